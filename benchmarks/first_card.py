"""Runs the steps of card_steps within ten minutes, and keeps what each has found at any moment.

    python -m benchmarks.first_card pack                # where there is internet: fills .card
    python -m benchmarks.first_card run 1               # on the accelerator; first_card.sh is this
    python -m benchmarks.first_card collect FOLDER      # takes what came back into results/

`run` needs only Python's standard library. Each step has a process of its own, with a deadline: its
seconds, and what earlier steps left over. Each row is written at once into first_card-CALL.json,
the optimised HLO into first_card-CALL-hlo.zip. The status of a step is "not run", "running", "ok",
"failed" (a row of it has an `error`), "timeout" or "interrupted".
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accelerators.md"
BUDGET_S = 570.0
MAX_HLO_BYTES = 15_000_000
TAIL = 3000  # characters kept of what a step printed
SHOWN = 240  # characters of a row that are shown
REFERENCES = ("bert-base", "modernbert-base", "qwen3-0.6b")
PACKAGES = ("jax", "flax", "numpy", "nvidia-", "libtpu", "dew", "torch", "transformers", "triton")


@dataclass(frozen=True)
class Step:
    """A step of card_steps with its arguments, its seconds, and its environment variables."""

    name: str
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, with the environment if there is one."""
        return " ".join([self.name, *self.environment.values()])


def _flag(flag: str) -> Step:
    return Step("buckets:bert-base:xla", 45, {"XLA_FLAGS": flag})


# What decides the design comes first.
CALLS: dict[int, list[Step]] = {
    1: [
        Step("ceilings", 20),
        Step("copies", 30),
        Step("buckets:bert-base:xla", 45),
        Step("buckets:bert-base:triton", 40),
        Step("buckets:bert-base:flash", 35),
        Step("choice:bert-base", 60),
        *(Step(f"attention:{name}", 37) for name in ("attend", "triton", "flash", "cudnn-packed")),
        Step("server:bert-base:served", 100),
        Step("server:bert-base:null", 50),
    ],
    2: [
        Step("ceilings", 20),
        Step("start:bert-base", 270),
        *(Step(f"buckets:modernbert-base:{name}", 60) for name in ("xla", "triton", "flash")),
        Step("choice:modernbert-base", 70),
    ],
    3: [
        Step("ceilings", 20),
        *(Step(f"buckets:qwen3-0.6b:{name}", 60) for name in ("triton", "flash", "xla")),
        Step("buckets:qwen3-8b:triton", 110),
        Step("buckets:qwen3-8b:flash", 90),
        Step("mixes:bert-base", 130),
    ],
    4: [
        Step("ceilings", 20),
        _flag("--xla_gpu_enable_triton_gemm=false"),
        _flag("--xla_allow_excess_precision=false"),
        _flag("--xla_gpu_autotune_level=0"),
        *(
            Step(f"attention:{name}", 40)
            for name in (
                *("triton-64x64", "triton-64x32", "triton-128x32", "triton-128x128"),
                "splash",
            )
        ),
    ],
}


# -- pack


def pack(args: Namespace) -> None:
    """Fill the folder that travels: packages that such an image lacks, and float32 vectors."""
    args.carried.mkdir(parents=True, exist_ok=True)
    if not args.no_packages:
        names = sorted(lacking())
        with tempfile.TemporaryDirectory() as folder:
            install(names, Path(folder))
            (packages := args.carried / "packages.zip").unlink(missing_ok=True)
            shutil.make_archive(str(packages.with_suffix("")), "zip", folder)
        print(f"{', '.join(names)}: {packages.stat().st_size / 1e6:.1f} MB")
    # imported here, because `run` must not need it
    import numpy as np

    from benchmarks import card_steps, report

    for size in ("tiny",) if args.tiny else REFERENCES:
        vectors: dict[str, Any] = card_steps.float32_reference(size)
        np.savez(args.carried / f"{size}.npz", **vectors)
        print(f"{size}: float32 vectors")
    facts = {"commit": report.commit(), "device": report.device_name()}
    (args.carried / "pack.json").write_text(json.dumps(facts))


def lacking() -> dict[str, str]:
    """The packages that jaxembed needs and an image of card_image.txt lacks, with their versions.

    Their needs are those that the packages of this environment state.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (Path(__file__).with_name("card_image.txt")).read_text().splitlines()
    image = {name for line in lines if not line.startswith("#") for name in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    found: dict[str, str] = {}
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        target = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
        if name in image or name in found or (one.marker and not one.marker.evaluate(target)):
            continue
        found[name] = importlib.metadata.version(name)
        waiting += map(Requirement, importlib.metadata.requires(name) or [])
    return found


def install(names: Sequence[str], folder: Path) -> None:
    """Install packages for Python 3.12 on x86-64 Linux into a folder, and FlashAttention 3."""
    target = ["--target", str(folder), "--python-version", "3.12", "--no-deps", "--quiet"]
    target += ["--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    target += ["--constraint", "constraints/tested.txt", "dew-flash-attn-cu13==0.3.6"]
    environment = dict(os.environ) | {"VENV": sys.prefix}
    command = [str(ROOT / ".ci" / "uv"), "pip", "install", *target, *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    without_flash2(folder / "dew_flash_attn")


def without_flash2(package: Path) -> None:
    """Remove FlashAttention 2, which Hopper does not use and which has 338 MB.

    Raises ValueError if the package is not the one that is known.
    """
    (package / "libdew_flash_attn.so").unlink()
    source = package / "__init__.py"
    text = source.read_text()
    for old, new in (
        ('_load("libdew_flash_attn.so", "dew_flash_architectures")', "(None, ())"),
        ('(_library, "dew_flash_mha"), (_library3,', "(_library3,"),
        ('"dew_flash3_mha")):', '"dew_flash3_mha"),):'),
    ):
        if text.count(old) != 1:
            raise ValueError(f"{source} has not one {old!r}: another version?")
        text = text.replace(old, new)
    source.unlink()  # the file may be shared with a cache
    source.write_text(text)


# -- run


class Record:
    """What a call has found so far, in its files at any moment."""

    def __init__(self, folder: Path, call: int, steps: Sequence[Step], facts: dict[str, Any]):
        self._file = folder / f"first_card-{call}.json"
        self._hlo_file = folder / f"first_card-{call}-hlo.zip"
        self._hlo_file.unlink(missing_ok=True)
        self.steps: dict[str, dict[str, Any]] = {
            step.title: {"status": "not run", "rows": []} for step in steps
        }
        self._facts = {"benchmark": f"first_card-{call}", **facts, "steps": self.steps}
        self.write()

    def write(self) -> None:
        """Replace the file by one with everything found so far."""
        partial = self._file.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(self._facts, indent=1) + "\n")
        os.replace(partial, self._file)

    def add(self, title: str, row: dict[str, Any]) -> None:
        """Add a row of a step; its HLO goes into the archive."""
        if hlo := row.pop("hlo", None):
            row["hlo"] = self._archive(f"{title} {row.get('bucket', '')}.txt", hlo)
        if "made" in row:
            made = row.pop("made")
            made["commit"] = made["commit"] or self._facts["carried"].get("commit")
            self._facts |= {"made": made, "folder": row.pop("folder")}
        self.steps[title]["rows"].append(row)
        self.write()

    def _archive(self, name: str, text: str) -> str | None:
        """Add a text to the archive. Returns its name there; None if the archive is full."""
        name = name.replace(" ", "_").replace(":", "-")
        partial = self._hlo_file.with_suffix(".partial")
        if self._hlo_file.is_file():
            shutil.copyfile(self._hlo_file, partial)
        else:
            partial.unlink(missing_ok=True)
        with zipfile.ZipFile(partial, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, text)
        if partial.stat().st_size > MAX_HLO_BYTES:
            partial.unlink()
            return None
        os.replace(partial, self._hlo_file)
        return name


def run(args: Namespace) -> None:
    """Run the steps of a call, one after the other, within the budget."""
    started_at = time.monotonic()
    steps = [s for s in CALLS[args.call] if s.name.startswith(tuple(args.only.split(",")))]
    args.carried = args.carried.resolve()
    record = Record(args.out, args.call, steps, facts_of(args))
    scale = args.budget_s / BUDGET_S
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = environment_with(args.carried, Path(folder) / "packages")
        for at, step in enumerate(steps):
            later = sum(s.seconds for s in steps[at + 1 :]) * scale
            left = args.budget_s - (time.monotonic() - started_at)
            if left < min(step.seconds * scale, 5):
                break
            limit = max(left - later, min(step.seconds * scale, left))
            print(f"{args.budget_s - left:6.1f} s  {step.title}", flush=True)
            run_step(step, limit, record, args, Path(folder), environment)
            found = record.steps[step.title]
            print(f"         {found['status']} after {found['seconds']:.1f} s", flush=True)


def facts_of(args: Namespace) -> dict[str, Any]:
    """What is known of the machine without JAX."""
    names = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    packages = {n: v for n, v in sorted(names.items()) if n and n.lower().startswith(PACKAGES)}
    carried: dict[str, Any] = {"folder": str(args.carried)}
    with suppress(OSError, ValueError):
        carried |= json.loads((args.carried / "pack.json").read_text())
    query = "--query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm"
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "budget_s": args.budget_s,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "packages": packages,
        "carried": carried,
        "nvidia_smi": [output_of(["nvidia-smi", query, "--format=csv"]), output_of(["nvidia-smi"])],
    }


def output_of(command: Sequence[str]) -> str:
    """What a command prints, or why it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return (done.stdout + done.stderr).strip()[-TAIL:]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def environment_with(carried: Path, folder: Path) -> dict[str, str]:
    """The environment of the steps, with the carried packages unpacked into a folder."""
    environment = dict(os.environ)
    folder.mkdir()
    if (packages := carried / "packages.zip").is_file():
        shutil.unpack_archive(packages, folder)
        # CUDA's libraries lie beside packages, where those of FlashAttention 3 look for them
        if (cuda := importlib.util.find_spec("nvidia")) and cuda.submodule_search_locations:
            (folder / "nvidia").symlink_to(next(iter(cuda.submodule_search_locations)))
    # jaxembed is not installed there, and asks for its version
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (about := folder / f"jaxembed-{version}.dist-info").mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jaxembed\nVersion: {version}\n")
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # a step takes only the device memory that it needs, and nothing is asked of a hub
    return environment | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}


def run_step(
    step: Step,
    limit: float,
    record: Record,
    args: Namespace,
    work: Path,
    environment: dict[str, str],
) -> None:
    """Run a step in a process group of its own for at most `limit` seconds, and record its rows."""
    found = record.steps[step.title]
    found |= {"status": "running", "limit_s": round(limit, 1), **step.environment}
    record.write()
    command = [sys.executable, "-m", "benchmarks.card_steps", step.name, "--watch-stdin"]
    command += ["--carried", str(args.carried), "--work", str(work)]
    command += ["--tiny"] if args.tiny else []
    started_at = time.monotonic()
    status = "interrupted"
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | step.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        reader = threading.Thread(target=read_rows, args=(process.stdout, step, record))
        reader.start()
        try:
            status = "ok" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            with suppress(ProcessLookupError):  # also what the step has left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()
            if status == "ok" and any("error" in row for row in found["rows"]):
                status = "failed"
            found |= {"status": status, "seconds": round(time.monotonic() - started_at, 1)}
            if status != "ok":
                found |= {"exit_status": process.returncode, "stderr": tail(errors)}
            record.write()


def read_rows(lines: Any, step: Step, record: Record) -> None:
    """Record each line that a step prints, and show it; one that is cut off is left out."""
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            record.add(step.title, row)
            shown = ", ".join(f"{key} {value}" for key, value in row.items())
            print(f"  row: {shown[-SHOWN:]!r}", flush=True)


def tail(file: Any) -> str:
    """The end of what was written to a file."""
    file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
    return file.read().decode(errors="replace")


# -- collect

# The rows of the table in docs/accelerators.md: a name, the call and the step that measure it, the
# fields that find its row there, the figure, and its form.
KERNELS = ("xla", "triton", "flash")
BERT_BUCKETS = ("32x512", "128x128", "1024x16", "1x16")
FIGURES: list[tuple[str, int, str, dict[str, Any], str, str]] = [
    ("products in bfloat16", 1, "ceilings", {"size": 8192}, "tflop_per_s", "{:.0f} TFLOP/s"),
    ("device memory", 1, "ceilings", {"copy": "device memory"}, "gb_per_s", "{:,.0f} GB/s"),
    *(
        (f"12.6 MB to the host, {way}", 1, "copies", {"mb": 12.6, "way": way}, "gb_per_s", form)
        for way, form in (("plain", "{:.1f} GB/s"), ("pinned", "{:.1f} GB/s"))
    ),
    *(
        (f"{name} {bucket}, `{kernel}`", call, f"buckets:{size}:{kernel}", {"bucket": bucket}, *of)
        for name, size, call, buckets in (
            ("BERT-base", "bert-base", 1, BERT_BUCKETS),
            ("ModernBERT-base", "modernbert-base", 2, ("2x8192",)),
            ("Qwen3-Embedding-0.6B", "qwen3-0.6b", 3, ("32x512",)),
            ("Qwen3-Embedding-8B", "qwen3-8b", 3, ("2x8192",)),
        )
        for bucket in buckets
        for kernel in (KERNELS if size != "qwen3-8b" else KERNELS[1:])
        for of in (("pipelined_ms", "{:.2f} ms"),)
    ),
    *(
        (f"1 - cosine to float32, `{kernel}`", 1, f"buckets:bert-base:{kernel}", *of)
        for kernel in KERNELS
        for of in (({"bucket": "32x512"}, "distance", "{:.1e}"),)
    ),
    *(
        (
            f"{load}, {name}",
            1,
            f"server:bert-base:{kind}",
            {"load": load},
            "texts_per_s",
            "{:,.0f}/s",
        )
        for load in ("queries, 32 connections", "bulk of 100 tokens", "bulk of 500 tokens")
        for kind, name in (("served", "BERT-base"), ("null", "null model"))
    ),
    *(
        (f"start, {kind}", 2, "start:bert-base", {"start": kind}, "all_s", "{:.0f} s")
        for kind in ("cold", "warm")
    ),
]
BEGIN, END = "<!-- first card -->\n", "<!-- end of first card -->\n"


def collect(args: Namespace) -> None:
    """Take the results of calls into the folder of their device, and write the table."""
    files = sorted(args.folder.glob("first_card-*.json"))
    if not files:
        sys.exit(f"{args.folder} has no first_card-*.json, which `run --out` writes")
    for file in files:
        facts = json.loads(file.read_text())
        if "folder" not in facts:
            sys.exit(f"{file} names no device: its step `ceilings` printed nothing")
        folder = args.results / facts["folder"]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
        print(folder / file.name)
    args.page.write_text(with_table(args.page.read_text(), args.results))


def with_table(page: str, results: Path) -> str:
    """The page with the table of the results that are there."""
    before, rest = page.split(BEGIN)
    return "\n".join([before + BEGIN, *table(results), "", END + rest.split(END)[1]])


def table(results: Path) -> Iterator[str]:
    """The lines of the table: a column for each device, or one in which nothing is measured."""
    devices: dict[str, dict[str, Any]] = {}
    for file in sorted(results.glob("*/first_card-*.json")):
        facts = json.loads(file.read_text())
        devices.setdefault(facts["made"]["device"], {})[facts["benchmark"]] = facts["steps"]
    columns = devices or {"NVIDIA GPU": {}}
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, call, step, fields, figure, form in FIGURES:
        cells = []
        for calls in columns.values():
            found = calls.get(f"first_card-{call}", {}).get(step, {}).get("rows", [])
            values = (row.get(figure) for row in found if fields.items() <= row.items())
            value = next((v for v in values if isinstance(v, int | float)), None)
            cells.append("not measured" if value is None else form.format(value))
        yield f"| {name} | {' | '.join(cells)} |"


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="fill the folder that travels")
    packing.add_argument("--no-packages", action="store_true", help="only the float32 vectors")
    packing.set_defaults(call_of=pack)
    running = commands.add_parser("run", help="measure, on the accelerator")
    running.add_argument("call", nargs="?", type=int, choices=CALLS, default=1)
    running.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "first_card")))
    running.add_argument("--budget-s", type=float, default=BUDGET_S)
    running.add_argument("--only", default="", help="steps whose names begin so, with commas")
    running.set_defaults(call_of=run)
    for one in (packing, running):
        one.add_argument("--carried", type=Path, default=ROOT / ".card", help="default: .card")
        one.add_argument("--tiny", action="store_true", help="a tiny model, for a test on a CPU")
    collecting = commands.add_parser("collect", help="take results into benchmarks/results")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--results", type=Path, default=RESULTS)
    collecting.add_argument("--page", type=Path, default=PAGE)
    collecting.set_defaults(call_of=collect)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    args = parse(argv)
    args.call_of(args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the record is completed
    main()
