"""Measures the peak memory of converting and loading a model, beside the size of its weights.

Each stage runs in a process of its own with an empty cache, and reports its peak resident memory so
far (VmHWM of Linux), in which the interpreter, JAX and the compiler are included. Weights on an
accelerator are in its own memory, and only pass through the host's.

    convert   from a Hugging Face directory or hub id to a checkpoint; left out for a checkpoint
    ready     from the checkpoint until every request has a compiled bucket
    answers   after answers to a short text and to a batch of longer ones

    python -m benchmarks.bench_memory MODEL
    python -m benchmarks.bench_memory MODEL --dtype float32 --out benchmarks/results
"""

import multiprocessing
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_args

from benchmarks import report
from jaxembed.checkpoints import checkpoint
from jaxembed.data.spec import DType

GIB = 1024**3
SHORT = "how much memory does a model take?"
TEXTS, TIMES = 8, 50  # texts of the batch, and times that SHORT is repeated in each


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("model", help="a directory, converted or not, or a hub id")
    parser.add_argument("--dtype", choices=get_args(DType), help="default: the device's own")
    parser.add_argument("--max-batch-tokens", type=int, help="default: measured")
    args = report.parse(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(args.model), []
        if not checkpoint.is_checkpoint(path):
            path = Path(folder) / "checkpoint"
            rows += in_a_process(convert, args, path)
        rows += in_a_process(load, args, path)
        stored = (file for file in (path / "params").rglob("*") if file.is_file())
        weights = sum(file.stat().st_size for file in stored)  # stored without compression
    report.show(rows, f"weights {weights / GIB:.3f} GiB")
    report.finish(args, {"model": args.model, "weights_bytes": weights, "results": rows})


def in_a_process(
    stage: Callable[[Namespace, Path], list[dict[str, Any]]], args: Namespace, path: Path
) -> list[dict[str, Any]]:
    """Run a stage in a new process. Returns its rows."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(stage, args, path).result()


def convert(args: Namespace, path: Path) -> list[dict[str, Any]]:
    """Convert `args.model` to a checkpoint. Returns the row of the stage."""
    from jaxembed.checkpoints import hub
    from jaxembed.checkpoints.source import ModelSource

    hub.convert_model(ModelSource(args.model), path)
    return [row("convert")]


def load(args: Namespace, path: Path) -> list[dict[str, Any]]:
    """Load a checkpoint on one device and answer requests. Returns a row for each stage."""
    from jaxembed import Embedder, EngineConfig
    from jaxembed.cli.loading import configure_jax

    config = EngineConfig(dtype=args.dtype, devices=1, max_batch_tokens=args.max_batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
        configure_jax(Path(folder), None)
        with Embedder(str(path.absolute()), cache_dir=Path(folder), config=config) as embedder:
            rows = [row("ready")]
            for texts in [SHORT], [" ".join([SHORT] * TIMES)] * TEXTS:
                if embedder.spec.task == "rerank":
                    embedder.rerank(SHORT, texts)
                elif embedder.spec.task == "classify":
                    embedder.classify(texts)
                else:
                    embedder.encode(texts)
            return [*rows, row("answers")]


def row(stage: str) -> dict[str, Any]:
    """The row of a stage that has just ended: the memory of this process, now and at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    gib = {name: 1024 * int(fields[name].split()[0]) / GIB for name in ("VmHWM", "VmRSS")}
    return {"stage": stage, "peak_gib": gib["VmHWM"], "now_gib": gib["VmRSS"]}


if __name__ == "__main__":
    main()
