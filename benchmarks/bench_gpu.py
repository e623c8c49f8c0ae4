"""Measures a model with random weights on an accelerator: buckets, length mixes, and torch beside.

There are only a few buckets, because each takes a while to compile. With `--torch`, torch first
runs the same lengths in a process and an environment of its own: transformers in bf16 with scaled
dot product attention, sorted by length, with the fastest of some batch sizes. Both start from token
ids. `make bench-gpu` runs every size, then the server over HTTP.

    python -m benchmarks.bench_gpu --architecture-size bert-base --torch .venv-torch

The columns are those of bench_model and bench_engine; `times` is our tokens a second over torch's.
"""

import json
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench_engine, bench_model, report, subject, workloads
from benchmarks.bench_model import chosen_grid
from benchmarks.workloads import Workload

FORWARD = Path(__file__).parent / "peers" / "forward.py"
BUCKETS = "1x32,512x32,128x128,32x512"
MIXES = "queries,mixed,constant:512"
BATCHES = (32, 128, 512)  # batch sizes that torch tries, in sequences


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench_model.add_arguments(parser)
    workloads.add_arguments(parser)
    parser.set_defaults(architecture_size="bert-base", limit=512, dtype="bfloat16")
    parser.add_argument("--buckets", default=BUCKETS)
    parser.add_argument("--mixes", default=MIXES, help="of workloads.py")
    parser.add_argument("--texts", type=int, default=4096, help="sequences of each mix")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--torch", type=Path, help="an environment with torch and transformers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the buckets and mixes, and torch if asked, and print and write the results."""
    args = parse(argv)
    mixes = [_mix(name, args) for name in args.mixes.split(",")]
    torch = torch_on(mixes, args) if args.torch else {"results": []}
    report.configure_jax()
    model = subject.load(args)
    grid = chosen_grid(args, model)
    replica = subject.replica(model, args, [grid], args.dtype)
    with bench_model.empty_compile_cache():
        buckets = [bench_model.measure(model, replica, b, args.repeat) for b in grid.buckets]
    budget = max(bucket.tokens for bucket in grid.buckets)
    recorder = bench_engine.Recorder(replica)
    rows = bench_engine.measure(model, recorder, {("few", budget): grid}, mixes, args.repeat)
    rows = [_beside(row, torch["results"]) for row in rows]
    report.show(buckets, f"{model.name}, {args.dtype}, {report.device_name()}")
    shown = ("mix", "tokens_per_s", "texts_per_s", "of_best", "fill", "busy", "lone_ms")
    shown += ("torch_tokens_per_s", "times")
    report.show([{name: row.get(name) for name in shown} for row in rows], "mixes")
    facts = {"model": model.name, "dtype": args.dtype, "buckets": buckets, "results": rows}
    name = f"bench_gpu-{args.architecture_size}"
    report.finish("bench_gpu", argv, facts | {"torch": torch}, _named(args.out, name))


def _named(out: Path | None, name: str) -> Path | None:
    """The path of the results: `out` if it is a file, else a file in the device's folder."""
    if out is None or out.suffix == ".json":
        return out
    return out / report.device_folder() / f"{name}.json"


def _mix(name: str, args: Namespace) -> Workload:
    return workloads.workload(
        name,
        args.texts,
        limit=args.limit,
        vocab_size=subject.SIZES[args.architecture_size][1]["vocab_size"],
        seed=args.seed,
    )


def torch_on(mixes: Sequence[Workload], args: Namespace) -> dict[str, Any]:
    """Run peers/forward.py with torch's environment. Returns its JSON.

    Raises CalledProcessError; the errors of the process are on standard error.
    """
    model_type, config = subject.transformers_config(args.architecture_size)
    job = {
        "model_type": model_type,
        "config": config,
        "mixes": {mix.name: mix.lengths.tolist() for mix in mixes},
        "batches": BATCHES,
        "repeat": args.repeat,
    }
    command = [str(args.torch / "bin" / "python"), str(FORWARD)]
    process = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def _beside(row: dict[str, Any], torch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add torch's rate of the same mix to a row."""
    rates = {result["mix"]: result["tokens_per_s"] for result in torch}
    if row["mix"] not in rates:
        return row
    rate = rates[row["mix"]]
    return row | {"torch_tokens_per_s": rate, "times": row["tokens_per_s"] / rate}


if __name__ == "__main__":
    main()
