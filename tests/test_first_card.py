"""The script for the first accelerator, on a CPU, in an environment that has only what is there."""

import json
import os
import random
import shutil
import subprocess
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from benchmarks import card_steps, first_card, subject
from jaxembed.engine.bucket import Bucket

ROOT = Path(__file__).parent.parent


@pytest.fixture(name="machine", scope="module")
def _machine(tmp_path_factory) -> tuple[Path, Path]:
    """An environment with the packages of the image alone, and what is carried to it."""
    folder = tmp_path_factory.mktemp("machine")
    venv.create(folder / "image", with_pip=False, symlinks=True)
    (site,) = (folder / "image").glob("lib/python3*/site-packages")
    for name in (Path(first_card.__file__).with_name("card_image.txt")).read_text().split():
        for top in tops(name):
            if not (site / top.name).exists():
                (site / top.name).symlink_to(top)
    carried, packages = folder / "carried", folder / "packages"
    for name in first_card.lacking():
        for top in tops(name):
            copy = shutil.copytree if top.is_dir() else shutil.copy
            packages.mkdir(exist_ok=True)
            copy(top, packages / top.name)
    first_card.main(["pack", "--no-packages", "--tiny", "--carried", str(carried)])
    shutil.make_archive(str(carried / "packages"), "zip", packages)
    return folder / "image" / "bin" / "python", carried


def tops(name: str) -> list[Path]:
    """What a package of this environment has in site-packages; nothing if it is not installed."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return []
    parts = {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
    return [Path(str(found.locate_file(part))) for part in parts if part != "__pycache__"]


def start(machine, out: Path, *arguments: str) -> subprocess.Popen:
    python, carried = machine
    command = [str(ROOT / "benchmarks" / "first_card.sh"), *arguments, "--tiny"]
    command += ["--carried", str(carried)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHON": str(python), "OUT": str(out), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def found_in(out: Path) -> dict[str, dict]:
    return json.loads((out / "first_card-1.json").read_text())["steps"]


@pytest.mark.slow
def test_a_call_records_every_step_and_one_that_fails(machine, tmp_path):
    process = start(machine, tmp_path, "1", "--budget-s", "5700")
    process.communicate()
    assert process.returncode == 0
    steps = found_in(tmp_path)
    status = {name: step["status"] for name, step in steps.items()}
    failing = {"buckets:bert-base:triton", "buckets:bert-base:flash"}
    failing |= {"attention:flash", "attention:cudnn-packed"}
    assert status == {name: "failed" if name in failing else "ok" for name in steps}, steps
    rows = [row for name in sorted(failing) for row in steps[name]["rows"]]
    errors = [row["error"] for row in rows if "error" in row]
    assert "cuDNN is not detected" in errors[0]
    assert any("interpret mode" in error for error in errors)
    buckets = steps["buckets:bert-base:xla"]["rows"][1:]
    assert [row["bucket"] for row in buckets] == ["1x16", "4x16", "2x64"]
    assert all(0 <= row["distance"] < 1e-4 for row in buckets)
    with zipfile.ZipFile(tmp_path / "first_card-1-hlo.zip") as archive:
        assert all(b"HloModule" in archive.read(row["hlo"]) for row in buckets)
    assert all(row["agrees"] for row in steps["attention:triton"]["rows"])
    for kind in ("served", "null"):
        started, *loads = steps[f"server:bert-base:{kind}"]["rows"]
        assert started["start_s"] > 0
        assert all(row["requests"] > 0 for row in loads)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_what_was_found_is_readable_after_a_kill_at_any_moment(machine, tmp_path):
    for lines in random.Random(7).sample(range(1, 23), 4):
        out = tmp_path / str(lines)
        process = start(machine, out, "1", "--only", "ceilings,copies")
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(lines)]
        steps = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        assert psutil.wait_procs(steps, timeout=60)[1] == []  # none is left on the device
        rows = [row for step in found_in(out).values() for row in step["rows"]]
        assert len(rows) >= sum(line.startswith("  row: ") for line in shown)


@pytest.mark.slow
def test_a_terminated_call_says_which_step_was_running(machine, tmp_path):
    process = start(machine, tmp_path, "1", "--only", "ceilings,copies")
    assert process.stdout is not None
    next(line for line in process.stdout if "row: " in line)
    process.terminate()
    process.communicate()
    status = {name: step["status"] for name, step in found_in(tmp_path).items()}
    assert status == {"ceilings": "interrupted", "copies": "not run"}


def test_a_step_is_stopped_at_its_deadline_and_none_starts_after_the_budget(tmp_path):
    arguments = ["run", "--only", "ceilings", "--tiny", "--out", str(tmp_path)]
    args = first_card.parse([*arguments, "--carried", str(tmp_path)])
    (step,) = (step for step in first_card.CALLS[1] if step.name == "ceilings")
    record = first_card.Record(tmp_path, 1, [step], {"carried": {}})
    first_card.run_step(step, 0.001, record, args, tmp_path, dict(os.environ))
    assert found_in(tmp_path)["ceilings"]["status"] == "timeout"
    first_card.main([*arguments, "--budget-s", "0", "--carried", str(tmp_path)])
    assert found_in(tmp_path)["ceilings"]["status"] == "not run"


def test_each_call_fits_its_budget_and_names_steps_that_there_are():
    for steps in first_card.CALLS.values():
        assert sum(step.seconds for step in steps) <= first_card.BUDGET_S - 20
        assert {step.name.split(":")[0] for step in steps} <= set(card_steps.STEPS)
        assert len({step.title for step in steps}) == len(steps)
    measured = {(call, step) for _, call, step, *_ in first_card.FIGURES}
    assert measured <= {(n, s.title) for n, steps in first_card.CALLS.items() for s in steps}


def test_probes_have_the_same_tokens_in_each_batch_and_slots_of_their_own():
    model = subject.random_subject("tiny")
    probes = {}
    for bucket in (Bucket(1, 16), Bucket(4, 16), Bucket(2, 64)):
        planes, places = card_steps.probe_batch(model, bucket)
        assert len(set(places.values())) == len(places) >= 1
        for length, (row, slot) in places.items():
            begin, end = planes[4, row, [slot, bucket.slots + slot]]
            assert end - begin == length
            assert planes[1, row, begin:end].tolist() == list(range(length))
            ids = planes[0, row, begin:end].tolist()
            assert probes.setdefault(length, ids) == ids


def test_carried_packages_find_the_libraries_of_cuda_beside_them(tmp_path, monkeypatch):
    (tmp_path / "site" / "nvidia" / "cu13").mkdir(parents=True)
    (tmp_path / "some").mkdir()
    shutil.make_archive(str(tmp_path / "packages"), "zip", tmp_path / "some")
    monkeypatch.syspath_prepend(tmp_path / "site")
    environment = first_card.environment_with(tmp_path, tmp_path / "unpacked")
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "nvidia" / "cu13").is_dir()


def test_flash_attention_2_is_left_out_of_the_known_package_only(tmp_path):
    (tmp_path / "libdew_flash_attn.so").touch()
    (tmp_path / "__init__.py").write_text("another version")
    with pytest.raises(ValueError, match="another version"):
        first_card.without_flash2(tmp_path)


def test_results_go_to_the_folder_of_their_device_and_into_the_table(tmp_path):
    (page := tmp_path / "page.md").write_text(f"a\n{first_card.BEGIN}old\n{first_card.END}b\n")
    rows = [{"product": "bfloat16 default", "size": 8192, "tflop_per_s": 700.4}]
    facts = {"benchmark": "first_card-1", "folder": "a-card", "made": {"device": "A Card"}}
    facts["steps"] = {"ceilings": {"status": "ok", "rows": rows}}
    (tmp_path / "first_card-1.json").write_text(json.dumps(facts))
    results = tmp_path / "results"
    arguments = ["--results", str(results), "--page", str(page)]
    first_card.main(["collect", str(tmp_path), *arguments])
    assert (results / "a-card" / "first_card-1.json").is_file()
    lines = page.read_text().splitlines()
    assert [lines[0], lines[-1]] == ["a", "b"]
    assert "| | A Card |" in lines
    assert "| products in bfloat16 | 700 TFLOP/s |" in lines
    assert "| device memory | not measured |" in lines
    with pytest.raises(SystemExit, match="has no first_card"):
        first_card.main(["collect", str(results), *arguments])
