"""Measures the peak memory of converting and loading a model, relative to the size of its weights.

Each stage runs in a process of its own with an empty cache, and reports its peak resident memory so
far (VmHWM of Linux), in which the interpreter, JAX and the compiler are included.

    convert   from a Hugging Face directory or hub id to a checkpoint; left out for a checkpoint
    ready     from the checkpoint until every request has a compiled bucket
    answers   after answers to a short text and to a batch of longer ones
    compiled  once every bucket is compiled; only with --all-buckets, because it may take minutes

The limit is what a host should need at most: 1.2 x the stored weights plus 1 GiB. Weights on an
accelerator are in its own memory, and only pass through the host's.

    python -m benchmarks.bench_memory MODEL
    python -m benchmarks.bench_memory MODEL --dtype float32 --out benchmarks/results
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks import report
from jaxembed.checkpoints.source import ModelSource
from jaxembed.data.spec import DType

GIB = 1024**3
LIMIT_SHARE, LIMIT_MORE = 1.2, GIB  # factor of the weights, and bytes added
SHORT = "how much memory does a model take?"
TEXTS, TIMES = 8, 50  # texts of the batch, and times that SHORT is repeated in each


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a directory, converted or not, or a hub id")
    parser.add_argument("--dtype", choices=get_args(DType), help="default: the device's own")
    parser.add_argument("--max-batch-tokens", type=int, help="default: measured")
    parser.add_argument("--all-buckets", action="store_true", help="wait until all are compiled")
    parser.add_argument("--stage", choices=STAGES, help="only this, in this process, as JSON rows")
    parser.add_argument("--checkpoint", type=Path, help="of --stage: what it writes or reads")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages, or the one of --stage, and print and write the results."""
    args = parse(argv)
    if args.stage is not None:
        print(json.dumps(list(STAGES[args.stage](args))))
        return
    from jaxembed.checkpoints import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model)
        converted = checkpoint.is_checkpoint(path)
        args.checkpoint = path if converted else Path(folder) / "checkpoint"
        rows = [] if converted else in_a_process("convert", args)
        rows += in_a_process("load", args)
        weights = stored_bytes(args.checkpoint)
    limit = LIMIT_SHARE * weights + LIMIT_MORE
    rows = [row | {"of_limit": row["peak_gib"] * GIB / limit} for row in rows]
    report.show(rows, f"weights {weights / GIB:.3f} GiB, limit {limit / GIB:.3f} GiB")
    facts = {"model": args.model, "weights_bytes": weights, "limit_bytes": limit, "results": rows}
    report.finish("bench_memory", argv, facts, args.out)


def in_a_process(stage: str, args: Namespace) -> list[dict[str, Any]]:
    """Run a stage in a new process. Returns its rows."""
    command = [sys.executable, "-m", "benchmarks.bench_memory", args.model, "--stage", stage]
    command += ["--checkpoint", str(args.checkpoint.absolute())]
    command += ["--dtype", args.dtype] if args.dtype else []
    command += ["--all-buckets"] if args.all_buckets else []
    command += ["--max-batch-tokens", str(args.max_batch_tokens)] if args.max_batch_tokens else []
    process = subprocess.run(
        command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def convert(args: Namespace) -> Iterator[dict[str, Any]]:
    """Convert `args.model` to `args.checkpoint`. Yields the row of the stage."""
    from jaxembed.checkpoints import hub

    started_at = time.monotonic()
    hub.convert_model(ModelSource(args.model), args.checkpoint)
    yield row("convert", started_at)


def load(args: Namespace) -> Iterator[dict[str, Any]]:
    """Load `args.checkpoint` on one device and answer requests. Yields a row for each stage."""
    from jaxembed import Embedder, EngineConfig
    from jaxembed.cli.loading import configure_jax

    compiled = threading.Event()

    def on_progress(done: int, total: int) -> None:
        if done == total:
            compiled.set()

    config = EngineConfig(dtype=args.dtype, devices=1, max_batch_tokens=args.max_batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
        cache_dir = Path(folder)
        configure_jax(cache_dir, None)
        started_at = time.monotonic()
        embedder = Embedder(
            str(args.checkpoint), cache_dir=cache_dir, config=config, on_progress=on_progress
        )
        yield row("ready", started_at, dtype=embedder.dtype)
        answer(embedder)
        yield row("answers", started_at, dtype=embedder.dtype)
        if args.all_buckets:
            compiled.wait()
            yield row("compiled", started_at, dtype=embedder.dtype)
        embedder.close()


def answer(embedder: Any) -> None:
    """Run a short text and then a batch of longer ones, as the model's task requires."""
    for texts in [SHORT], [" ".join([SHORT] * TIMES)] * TEXTS:
        if embedder.spec.task == "rerank":
            embedder.rerank(SHORT, texts)
        elif embedder.spec.task == "classify":
            embedder.classify(texts)
        else:
            embedder.encode(texts)


def row(stage: str, started_at: float, **facts: Any) -> dict[str, Any]:
    """The row of a stage that has just ended: its memory now and at its peak, and its seconds."""
    memory = resident()
    return {
        "stage": stage,
        **facts,
        "peak_gib": memory["VmHWM"] / GIB,
        "now_gib": memory["VmRSS"] / GIB,
        "seconds": time.monotonic() - started_at,
    }


def resident() -> dict[str, int]:
    """The resident memory of this process in bytes, now (VmRSS) and at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmHWM", "VmRSS")}


def stored_bytes(checkpoint: Path) -> int:
    """The bytes of a checkpoint's parameters, which are stored without compression."""
    return sum(path.stat().st_size for path in (checkpoint / "params").rglob("*") if path.is_file())


STAGES: dict[str, Callable[[Namespace], Iterator[dict[str, Any]]]] = {
    "convert": convert,
    "load": load,
}


if __name__ == "__main__":
    main()
