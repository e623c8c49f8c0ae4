"""The benchmarks run, at a tiny size, and their arithmetic is right."""

import json
import math
import sys
from functools import partial
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
import sources

from benchmarks import (
    bench_bulk,
    bench_engine,
    bench_families,
    bench_host,
    bench_images,
    bench_maxsim,
    bench_memory,
    bench_model,
    bench_outputs,
    bench_pair,
    bench_peers,
    bench_start,
    compile_for,
    eval_sts,
    peer,
    report,
    servers,
    soak,
    subject,
    workloads,
)
from jaxembed.config import EngineConfig
from jaxembed.engine.autotune.calibrate import _flops_per_token

TINY = ["--architecture-size", "tiny", "--limit", "32", "--max-batch-tokens", "64"]


@pytest.fixture(name="one_bucket")
def _one_bucket(tmp_path):
    """A grid that compiles in no time."""
    path = tmp_path / "one.json"
    path.write_text('{"buckets": [[2, 64]]}')
    return path


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def write_sts(folder, rows: str) -> None:
    (folder / "stsb").mkdir()
    (folder / "stsb" / "stsb-en-test.csv").write_text(rows)


# -- arithmetic


@pytest.mark.parametrize("name", [*workloads.MIXES, "constant:7"])
def test_the_same_seed_gives_the_same_workload(name):
    first, second, other = (
        workloads.workload(name, 20, limit=64, vocab_size=100, seed=seed) for seed in (1, 1, 2)
    )
    ids, again, others = ([e.ids.tolist() for e in mix.encodings] for mix in (first, second, other))
    assert ids == again != others
    assert first.lengths.max() <= 64
    assert first.source == "synthetic lengths"
    assert {workloads.FIRST_ID <= one < 100 for row in ids for one in row} == {True}


def test_real_texts_are_tokenized_and_cut(tmp_path, tiny_checkpoint):
    write_sts(tmp_path, '"a cat, a dog",the cat sat on the mat,2\n')
    tokenizer = tiny_checkpoint / "tokenizer.json"
    mix = workloads.workload("sts", 2, limit=6, vocab_size=100, data=tmp_path, tokenizer=tokenizer)
    assert mix.source == "STS-B sentences"
    assert mix.lengths.tolist() == [6, 6]


def test_spearman_of_known_ranks():
    first, second = np.array([1.0, 2, 3, 4, 5]), np.array([5.0, 6, 7, 8, 7])
    # ranks 1 2 3.5 5 3.5 by hand; scipy.stats.spearmanr gives the same
    assert eval_sts.ranks(second).tolist() == [1, 2, 3.5, 5, 3.5]
    assert eval_sts.spearman(first, second) == pytest.approx(0.8207826816681233, abs=1e-12)
    assert eval_sts.spearman(first, -first) == pytest.approx(-1)


def test_useful_flops_are_products_and_attention():
    model = subject.random_subject("tiny")
    width, layers, intermediate = 32, 2, 64
    matrices = layers * (4 * width * width + 2 * width * intermediate)
    assert subject.useful_flops(model.spec, model.program, [1]) == 2 * matrices + 4 * layers * width
    two = subject.useful_flops(model.spec, model.program, [10, 6])
    assert two == 2 * matrices * 16 + 4 * layers * width * (100 + 36)
    assert 2 * matrices == _flops_per_token(model.program)


def test_the_ceiling_computes_every_product_whole():
    model = subject.random_subject("tiny")
    args = bench_model.parse(["--dtype", "float32", "--kernels", "xla"])
    replica = subject.replica(model, args, subject.grid_of("1x16"))
    ceiling = bench_model.products(model, replica, 16)
    assert np.isfinite(ceiling())
    held = [cell.cell_contents for cell in ceiling.__closure__]
    (compiled,) = (one for one in held if isinstance(one, jax.stages.Compiled))
    wanted = 2 * 16 * sum(map(math.prod, model.program.products))
    assert wanted <= compiled.cost_analysis()["flops"] < 1.05 * wanted


def test_results_go_to_a_folder_of_the_device(tmp_path, capsys):
    parser = report.parser("bench_nothing.py", None)
    parser.add_argument("--a")
    args = report.parse(parser, ["--a", "b c", "--out", str(tmp_path)])
    report.finish(args, {"x": np.float32(1 / 3)})
    (file,) = tmp_path.glob("*/bench_nothing.json")
    found = json.loads(file.read_text())
    assert found == last_line(capsys)
    assert found["x"] == 0.333333
    command = f"python -m benchmarks.bench_nothing --a 'b c' --out {tmp_path}"
    assert found["made"]["command"] == command
    assert found["made"]["versions"]["jax"] == jax.__version__


# -- each program, tiny


@pytest.mark.parametrize("adapters", ["", pytest.param("2x4", marks=pytest.mark.slow)])
def test_bench_model_runs_and_compares_a_model_with_adapters_with_the_plain_one(adapters, capsys):
    bench_model.main([*TINY, "--repeat", "1", "--buckets", "1x32,2x32", "--adapters", adapters])
    found = last_line(capsys)
    assert found.get("adapters", "") == adapters
    assert [row["bucket"] for row in found["buckets"]] == ["1x32", "2x32"]
    assert all((row.get("times_plain", 0) > 0) == bool(adapters) for row in found["buckets"])


def test_an_adapter_changes_each_weight_of_a_joined_product_by_columns_of_its_own():
    model = subject.with_adapters(subject.random_subject("tiny"), 2, 3)
    up = model.parameters["tower.layers.0.attention.qkv.adapter.up.kernel"]
    assert model.spec.adapters[0].ranks["tower.layers.0.attention.qkv"] == 9
    assert np.argwhere(up[9:12]).max(axis=0).tolist() == [2, 31]
    assert np.argwhere(up[15:18]).min(axis=0).tolist() == [0, 64]


@pytest.mark.slow
def test_bench_families_compares_with_bert(capsys):
    arguments = ["--families", "mpnet-base", "--buckets", "1x16", "--layers", "1", "--repeat", "1"]
    bench_families.main([*arguments, "--kernels", "xla"])
    bert, mpnet = last_line(capsys)["results"]
    assert (bert["family"], bert["of_bert"]) == ("bert-base", 1.0)
    assert mpnet["family"] == "mpnet-base"
    assert mpnet["share"] > 0


@pytest.mark.slow
def test_bench_engine_runs(capsys):
    arguments = ["--repeat", "1", "--scale", "0.01", "--mixes", "queries,bimodal", "--data", "none"]
    bench_engine.main([*TINY, *arguments])
    rows = last_line(capsys)["results"]
    assert [row["mix"] for row in rows] == ["queries", "bimodal"]
    assert all(row["of_best"] > 0 and 0 < row["fill"] <= 1 for row in rows)


def test_bench_maxsim_compares_ways_with_the_same_scores(capsys):
    sizes = ["--query", "3", "--documents", "7", "--length", "5", "--dim", "8", "--rounds", "1"]
    bench_maxsim.main(sizes)
    ways = last_line(capsys)["results"]
    assert [way["way"] for way in ways][:2] == ["products alone", "maxsim"]
    assert all(way["extra_mb"] > 0 for way in ways)


@pytest.mark.slow
def test_bench_pair_runs(capsys, tiny_checkpoint, one_bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_pair, "EngineConfig", partial(EngineConfig, buckets=one_bucket))
    flags = ["--seconds", "0.5", "--max-batch-tokens", "128", "--cache-dir", str(tmp_path)]
    bench_pair.main([str(tiny_checkpoint), *flags])
    facts = last_line(capsys)
    wanted = list(product(("alone", "all"), ("bulk", "query", "rerank")))
    assert [(row["with"], row["load"]) for row in facts["results"]] == wanted
    assert all(row["requests"] > 0 for row in facts["results"])


@pytest.mark.slow
def test_bench_start_compiles_nothing_when_warm(tiny_checkpoint, flags, capsys):
    at = flags.index("--cache-dir")
    bench_start.main([str(tiny_checkpoint), "--", *flags[:at], *flags[at + 2 :]])
    cold, warm = last_line(capsys)["starts"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert cold["compiled"] > warm["compiled"] == 0
    for one in (cold, warm):
        assert 0 < one["ready_s"] <= one["all_s"]
        assert one["embeddings_s"] > 0


def test_a_server_that_does_not_come_up_is_quoted():
    command = [sys.executable, "-c", "print('no such model')"]
    with servers.running(command, 1, "/") as server:
        server.process.wait(60)
        with pytest.raises(TimeoutError, match="did not come up"):
            server.until(lambda: False)


@pytest.mark.slow
def test_bench_memory_measures_each_stage_in_a_process_of_its_own(tmp_path, capsys):
    source = sources.write_sentence_bert(tmp_path / "source")
    bench_memory.main([str(source), "--dtype", "float32", "--max-batch-tokens", "64"])
    facts = last_line(capsys)
    assert [row["stage"] for row in facts["results"]] == ["convert", "ready", "answers"]
    peaks = [row["peak_gib"] for row in facts["results"]]
    assert peaks[1] <= peaks[2]  # of one process
    assert all(0 < row["now_gib"] <= row["peak_gib"] for row in facts["results"])
    weights = sum(leaf.nbytes for leaf in sources.bert_tensors().values())
    assert weights < facts["weights_bytes"] < weights + 100_000  # of Orbax's own


def test_eval_sts_says_skipped_without_data(tmp_path, capsys):
    assert eval_sts.main(["--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "skipped" in out
    assert json.loads(out.splitlines()[-1])["skipped"] is True


def test_eval_sts_fails_outside_its_tolerance(tmp_path, tiny_checkpoint, one_bucket, monkeypatch):
    few = partial(EngineConfig, buckets=one_bucket, max_batch_tokens=128)
    monkeypatch.setattr(eval_sts, "EngineConfig", few)
    write_sts(tmp_path, "the cat,the dog,1\na mat,a mat,5\nthe sky is blue,the dog runs,2\n")
    arguments = [str(tiny_checkpoint), "--data", str(tmp_path), "--dtype", "float32"]
    arguments += ["--cache-dir", str(tmp_path)]
    assert eval_sts.main([*arguments, "--tolerance", "200"]) == 0
    assert eval_sts.main([*arguments, "--expected", "300"]) == 1


@pytest.mark.slow
def test_bench_bulk_compares_a_job_with_encode(
    tiny_checkpoint, one_bucket, tmp_path, monkeypatch, capsys
):
    config = partial(EngineConfig, buckets=one_bucket, max_batch_tokens=128)
    monkeypatch.setattr(bench_bulk, "EngineConfig", config)
    none = str(tmp_path / "none")
    where = ["--model", str(tiny_checkpoint), "--cache-dir", str(tmp_path), "--data", none]
    peers = ["--torch", none, "--onnx", none, "--mix", "queries"]
    sizes = ["--texts", "20", "--rounds", "2", "--null-rows", "3000"]
    bench_bulk.main([*where, *peers, *sizes])
    found = last_line(capsys)
    assert [row["run"] for row in found["results"]] == ["encode", "job"]
    assert all(row["rows_per_s"] > 0 for row in found["results"])
    assert found["null_model"]["rows"] == 3000
    assert found["null_model"]["highest_mb"] > 0


PEER = """
import base64, json, struct, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"python": "3", job["library"]: "1"}), flush=True)
count = 6
for line in sys.stdin:
    method, *arguments = json.loads(line)
    if method == "vectors":
        vectors = struct.pack(f"<{2 * count}f", *[3.0, 4.0] * count)
        print(json.dumps([count, base64.b64encode(vectors).decode()]), flush=True)
        continue
    assert method in ("whole", "prepare", "forward", "values")
    faster = 1 + (arguments == [8]) + (job["library"] == "jaxembed" and job["dtype"] == "bfloat16")
    print(0.5 * count / faster if method != "values" else 1.0, flush=True)
"""


@pytest.fixture(name="peers")
def _peers(tmp_path, monkeypatch) -> Path:
    """An environment in which programs of peers do nothing, at known speeds."""
    for name in ("outputs.py", "images.py"):
        (tmp_path / name).write_text(PEER)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(peer, "PROGRAMS", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_bench_outputs_compares_with_dense_and_with_ours(peers, capsys):
    tiny = ["--architecture-size", "tiny", "--buckets", "1x16", "--repeat", "1"]
    bench_outputs.main([*tiny, "--torch", str(peers), "--onnx", str(peers)])
    facts = last_line(capsys)
    names = ["sentence-transformers", "onnxruntime"]
    assert facts["versions"] == {name: {"python": "3", name: "1"} for name in names}
    rows = {(one["library"], one["outputs"]): one for one in facts["results"]}
    theirs = [(name, output) for name in names for output in ("dense", "SPLADE")]
    assert list(rows) == [*[("jaxembed", name) for name in ("dense", "SPLADE", "BGE-M3")], *theirs]
    for one in rows.values():
        ours = rows["jaxembed", one["outputs"]]
        assert one["times_ours"] == pytest.approx(one["ms_median"] / ours["ms_median"], rel=1e-4)
        dense = rows[one["library"], "dense"]
        assert one["times_dense"] == pytest.approx(one["ms_median"] / dense["ms_median"], rel=1e-4)


IMAGES = ["--images", "6", "--rounds", "1"]


def test_bench_images_gives_each_peer_the_batch_that_is_fastest_for_it(peers, capsys):
    pytest.importorskip("PIL")
    folders = ["--torch", str(peers), "--onnx", str(peers)]
    bench_images.main([*IMAGES, "--tower", "siglip-b16", *folders])
    found = last_line(capsys)
    columns = ("library", "batch", "images_per_s", "times", "prepare_ms", "forward_ms")
    assert [tuple(one[name] for name in columns) for one in found["results"]] == [
        ("jaxembed float32", None, 2, 1, 500, 500),
        ("jaxembed bfloat16", None, 4, 1, 250, 250),
        ("transformers float32", 8, 4, 0.5, 250, 250),
        ("transformers bfloat16", 8, 4, 1, 250, 250),
        ("onnxruntime float32", 8, 4, 0.5, 250, 250),
    ]
    assert {one["cosine"] for one in found["results"]} == {1}


@pytest.mark.slow
def test_bench_images_runs(capsys, monkeypatch, tmp_path):
    """With our library in the place of transformers."""
    pytest.importorskip("PIL")
    folders = [str(Path(__file__).parent), str(peer.PROGRAMS)]
    (tmp_path / "images.py").write_text(f"""
import sys
sys.path[:0] = {folders}
import dual_sources, images, pipe, quick
from pathlib import Path
class Maker(images.Maker):
    def __init__(self, job):
        dual_sources.write_dual(Path(job["model"]))
Maker.PACKAGES = ()
ours = images.Jaxembed
pipe.serve({{"maker": Maker, "jaxembed": ours, "transformers": ours}})
""")
    monkeypatch.setattr(peer, "PROGRAMS", tmp_path)
    monkeypatch.setattr(bench_images, "DTYPES", ("float32",))
    bench_images.main([*IMAGES, "--tower", "tiny", "--torch", sys.prefix])
    found = last_line(capsys)
    names = ["jaxembed float32", "transformers float32"]
    assert [one["library"] for one in found["results"]] == names
    for one in found["results"]:
        assert one["cosine"] == pytest.approx(1, abs=1e-5)
        assert min(one[name] for name in ("images_per_s", "prepare_ms", "forward_ms")) > 0


# -- programs for a TPU

COMPILED = """HloModule jit_forward

%fused.1 (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0:T(8,128)} parameter(0)
  ROOT %c = bf16[8,8]{1,0:T(8,128)} convolution(%a, %a), dim_labels=bf_io->bf
}

%fused.2 (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0:T(8,128)} parameter(0)
  %t = bf16[8,8]{0,1:T(8,128)} transpose(%a), dimensions={1,0}
  ROOT %m = bf16[8,8]{0,1:T(8,128)} multiply(%t, %t)
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0:T(8,128)} parameter(0)
  %f = (bf16[8,8]{1,0:T(8,128)}, s32[]) fusion(%x), kind=kOutput, calls=%fused.1, metadata={op_name="jit(forward)/dot_general"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %k = bf16[8,8]{1,0:T(8,128)} custom-call(%f), custom_call_target="tpu_custom_call"
  %q = bf16[8,8]{1,0:T(8,128)} fusion(%k), kind=kLoop, calls=%fused.2, metadata={op_name="jit(forward)/transpose"}, backend_config={"window_config":{"estimated_cycles":"20"}}
  %g = bf16[8,8]{1,0:T(8,128)} fusion(%k), kind=kLoop, calls=%fused.2, metadata={op_name="jit(forward)/mul"}, backend_config={"window_config":{"estimated_cycles":"4"}}
  ROOT %r = bf16[8,8]{0,1:T(8,128)} copy(%g), backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""  # noqa: E501


def test_what_instructions_of_a_program_for_a_tpu_do():
    found = [(one.kind, one.cycles) for one in compile_for.instructions(COMPILED)]
    assert found == [("product", 100), ("kernel", 0), ("move", 20), ("other", 4), ("move", 7)]


COMPILED_FOR_GPU = """
HloModule m

%fused (p: bf16[4,8]) -> f32[4,8] {
  ROOT %c = f32[4,8]{1,0} convert(%p)
}

ENTRY %main (x: bf16[4,8], y: f32[2,2]) -> (f32[4,8]) {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = f32[2,2]{1,0} parameter(1)
  %b = bf16[32]{0} bitcast(%x)
  %f = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(forward)/%y"}
  %k = (bf16[8]{0}, s32[]) custom-call(%b, %b, %y), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %r = (f32[4,8]{1,0}) tuple(%f)
}
"""


def test_what_kernels_of_a_gpu_read_and_write():
    """An array that a kernel is given twice is read once."""
    fusion, call = 64 + 128, 64 + 16 + 16 + 4
    assert compile_for.gpu_traffic(COMPILED_FOR_GPU) == (2, fusion + call)


def test_what_the_compiler_says_is_compared_program_by_program():
    def result(**figures):
        row = {"size": "bert-base", "kernel": "splash", "bucket": "1x128"}
        return {"results": [row | dict.fromkeys(compile_for.FIGURES, 10.0) | figures]}

    assert compile_for.differences(result(), result(mcycles=10.4, moves=9.6)) == []
    assert compile_for.differences(result(), result(mcycles=11, kernel_calls=0)) == [
        "bert-base splash 1x128: mcycles 11 (was 10.0), kernel_calls 0 (was 10.0)"
    ]
    failed = {"results": [{"size": "bert-base", "kernel": "splash", "bucket": "1x128"}]}
    assert "mcycles None (was 10.0)" in compile_for.differences(result(), failed)[0]
    assert len(compile_for.differences(result(), {"results": []})) == 1


def test_attention_is_charged_at_the_peak_of_products_or_of_memory():
    spec, chip = subject.spec_of("bert-base", 2), compile_for.CHIPS["v5e"]
    assert spec.config["num_layers"] == 2
    long = compile_for.attention_cycles(spec, chip, rows=1, length=8192)
    assert long == pytest.approx(2 * 4 * 768 * 8192**2 / chip.flops_per_cycle)
    short = compile_for.attention_cycles(spec, chip, rows=64, length=128)
    # two layers read queries, keys and values, and write as much as one of these, in two bytes
    seconds = 2 * 4 * 768 * 64 * 128 * 2 / chip.bytes_per_s
    assert short == pytest.approx(seconds * chip.flops / chip.flops_per_cycle)
    local = subject.spec_of("modernbert-base", 4)
    assert local.config["global_layers"] == [0, 3]


# -- servers


@pytest.fixture(name="flags")
def _flags(grid_file, tmp_path) -> list[str]:
    """Of a server that has few buckets and a cache of its own."""
    flags = ["--buckets", str(grid_file), "--max-batch-tokens", "128", "--devices", "1"]
    return [*flags, "--cache-dir", str(tmp_path), "--max-queue-tokens", "1000000"]


@pytest.mark.slow
def test_bench_peers_measures_our_server_alone(tiny_checkpoint, flags, capsys):
    arguments = ["--texts", "300", "--seconds", "0.2,0.2,0.5", "--rounds", "1"]
    bench_peers.main([str(tiny_checkpoint), "--alone", "--data", "none", *arguments, "--", *flags])
    rows = last_line(capsys)["results"]
    assert [(row["scenario"], row["load"]) for row in rows] == [
        *(("lone", "query"), ("bulk", "bulk")),
        *(("under bulk", "query"), ("under bulk", "bulk")),
    ]
    assert all(row["requests"] > 0 for row in rows)


def test_bench_peers_takes_ratios_within_a_round():
    rows = [
        {"scenario": scenario, "load": load, "server": server}
        | {"texts_per_s": value, "p50_ms": value, "p99_ms": value}
        for scenario, load in (
            *(("lone", "query"), ("bulk", "bulk")),
            *(("under bulk", "query"), ("under bulk", "bulk")),
        )
        for ours, theirs in ((2, 4), (3, 9))
        for server, value in (("jaxembed", ours), ("infinity", theirs))
    ]
    bulk, lone, *_ = bench_peers.ratios_of(rows, "jaxembed", "infinity")
    assert (bulk["least"], bulk["most"]) == (pytest.approx(1 / 3), 0.5)
    assert (lone["least"], lone["most"]) == (2, 3)


def test_bench_host_compares_with_the_older_server_of_the_same_round():
    us = {"now": (20, 30, 90), "before": (40, 60, 60), "before, again": (40, 66, 60)}
    rows = [
        {"round": k, "server": name, "load": "bulk", "encoding": "float", "server_us": values[k]}
        for k in range(3)
        for name, values in us.items()
    ]
    ours, control = bench_host.ratios_of(rows)
    assert (ours["times"], ours["least"], ours["most"]) == (0.5, 0.5, 1.5)
    assert (control["times"], control["least"], control["most"]) == (1.0, 1.0, 1.1)


@pytest.mark.slow
def test_bench_host_and_soak_run(tiny_checkpoint, flags, capsys):
    arguments = [str(tiny_checkpoint), "--data", "none"]
    brief = ["--texts", "256", "--seconds", "0.3", "--rounds", "1", "--front-ends", "1"]
    bench_host.main([*arguments, *brief, "--", *flags])
    rows = last_line(capsys)["results"]
    assert [row["server"] for row in rows] == ["now", "front ends"] * 8
    assert all(row["requests"] > 0 and row["engine_us"] > 0 for row in rows)
    assert all((row["front_us"] > 0) == (row["server"] == "front ends") for row in rows)
    soak.main([*arguments, "--texts", "64", "--requests", "50", "--", "--null-model", *flags])
    found = last_line(capsys)["results"]
    assert [row["requests"] for row in found] == [50 * k // 20 for k in range(21)]
    assert all(row["resident_mib"] > 10 for row in found)
