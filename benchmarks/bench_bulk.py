"""Compares `jaxembed embed` into a folder of Parquet with the engine's own rate: rows a second.

The job reads the texts from Parquet and writes them into parts; `encode` gets the same texts as a
list, in the same process and with the same engine. sentence-transformers with its pool of processes
and onnxruntime embed the same texts with the same weights, where their environments are there. In
every round each runs once, and the order alternates.

    python -m benchmarks.bench_bulk --torch .venv-parity --onnx .venv-peers
    python -m benchmarks.bench_bulk --texts 0 --null-rows 10000000

Columns: `of_encode` is the rate relative to that of `encode` in the median round; `least` and
`most` are over the rounds.

With --null-rows a job of so many rows is run with a model that answers constants, cut to NULL_WIDTH
numbers, and the resident memory is noted: after the first tenth of the rows (`settled_mb`), at the
end, and at most.
"""

import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import bench_libraries, peer, report, workloads
from benchmarks.peer import Contestant
from benchmarks.servers import packaged_model
from jaxembed import Embedder, EngineConfig
from jaxembed.bulk.computations import EmbedRows
from jaxembed.bulk.row_source import TextRows
from jaxembed.bulk.run import JobProgress, Rows, run_job
from jaxembed.engine.engine import Engine

ENCODE, JOB = "encode", "job"
UNMEASURED = 4096  # texts, before the rounds
NULL_WIDTH = 32  # so that ten million rows take 2 GB of disk
NULL_GROUP = 65_536  # rows of a row group of the input
GROWTH_SHARE = 0.1  # the share of the rows before which memory may grow
MB = 10**6


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    bench_libraries.add_arguments(parser)
    parser.add_argument("--model", help="a directory or a hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--mix", default="mixed", help="of benchmarks.workloads")
    parser.add_argument("--texts", type=int, default=4096, help="0: none of this comparison")
    parser.add_argument("--null-rows", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path)
    args = report.parse(parser, argv)
    report.configure_jax()
    facts: dict[str, Any] = {"model": args.model or "all-MiniLM-L6-v2"}
    if args.texts:
        facts |= compared(args)
    if args.null_rows:
        facts["null_model"] = null_job(args)
    report.finish(args, facts)


def compared(args: Namespace) -> dict[str, Any]:
    """The rates of the job, of `encode` and of the other libraries, as facts for JSON."""
    texts = distinct(workloads.texts(args.mix, args.texts, data=args.data, seed=args.seed))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxembed-")))
        embedder = stack.enter_context(started(args))

        def encode(some: list[str]) -> float:
            start = time.perf_counter()
            embedder.encode(some)
            return time.perf_counter() - start

        def job(some: list[str]) -> float:
            pq.write_table(pa.table({"text": some}), source := folder / f"{len(some)}.parquet")
            return job_seconds(embedder, source, len(some))

        encode(texts[:UNMEASURED])
        job(texts[:UNMEASURED])
        workers = [bench_libraries.started(stack, one, texts) for one in peers(args)]
        runs = {ENCODE: partial(encode, texts), JOB: partial(job, texts)}
        for worker in workers:
            runs[worker.name] = partial(bench_libraries.embedding, worker, texts)
        rounds = report.in_turns(runs, args.rounds)
    rows = [row_of(name, rounds, len(texts)) for name in runs]
    report.show(rows, f"{len(texts)} texts, {report.device_name()}")
    facts = {"texts": len(texts), "mix": args.mix, "results": rows, "rounds": rounds}
    return facts | peer.about(workers)


def distinct(texts: Sequence[str]) -> list[str]:
    """The texts, of which those that are there again end in a number: one request computes equal
    texts once, and the parts of a job are different requests."""
    seen: Counter[str] = Counter()
    different = []
    for text in texts:
        seen[text] += 1
        different.append(text if seen[text] == 1 else f"{text} {seen[text]}")
    return different


@contextmanager
def started(args: Namespace, *, null_model: bool = False) -> Iterator[Embedder]:
    """An Embedder whose buckets are all compiled and timed; closed after the context."""
    config = EngineConfig(warmup="full", null_model=null_model)
    with Embedder(args.model, cache_dir=args.cache_dir, config=config) as embedder:
        assert isinstance(embedder.model.main.engine, Engine)
        embedder.model.main.engine.wait_timed()
        yield embedder


def peers(args: Namespace) -> list[Contestant]:
    """The other libraries whose environments are there."""
    pool, onnx = f"{bench_libraries.TORCH}-pool", bench_libraries.ONNX
    found = []
    if args.torch.exists():
        model = str(packaged_model(args.torch))
        for dtype in ("float32", "bfloat16"):
            job = {"model": model, "dtype": dtype}
            name = f"{bench_libraries.TORCH} pool {dtype}"
            found.append(Contestant(name, args.torch, pool, job))
    if args.onnx.exists():
        job = {"model": str(args.onnx / "onnx"), "dtype": "float32"}
        found.append(Contestant(f"{onnx} float32", args.onnx, onnx, job))
    return found


def job_seconds(
    embedder: Embedder,
    source: Path,
    count: int,
    on_progress: Callable[[JobProgress], object] = lambda progress: None,
    **options: Any,
) -> float:
    """How long the job of a file of `count` rows takes, into a folder that is removed after."""
    computation = EmbedRows(embedder, TextRows(), ("dense",), options)
    with tempfile.TemporaryDirectory(prefix="jaxembed-", dir=source.parent) as folder:
        start = time.perf_counter()
        summary = run_job(computation, Rows([str(source)]), folder, on_progress=on_progress)
        seconds = time.perf_counter() - start
    assert summary.computed == count, summary
    return seconds


def row_of(name: str, rounds: dict[str, list[float]], texts: int) -> dict[str, Any]:
    """The row of one of those measured."""
    median = float(np.median(rounds[name]))
    return {
        "run": name,
        "seconds": median,
        "rows_per_s": texts / median,
        **report.spread(np.divide(rounds[ENCODE], rounds[name]), "of_encode"),
    }


def null_job(args: Namespace) -> dict[str, Any]:
    """The rate and the memory of a job with a model that answers constants, as facts for JSON."""
    texts = workloads.texts("queries", NULL_GROUP, data=args.data, seed=args.seed)
    noted: list[tuple[int, int]] = []  # rows that were done, and bytes that the process held

    def note(progress: JobProgress) -> None:
        noted.append((progress.rows, psutil.Process().memory_info().rss))

    with (
        tempfile.TemporaryDirectory(prefix="jaxembed-") as folder,
        started(args, null_model=True) as embedder,
    ):
        source, table = Path(folder) / "texts.parquet", pa.table({"text": texts})
        with pq.ParquetWriter(source, table.schema) as writer:
            for start in range(0, args.null_rows, len(texts)):
                writer.write_table(table.slice(0, args.null_rows - start))
        width = min(NULL_WIDTH, embedder.spec.dim)
        seconds = job_seconds(embedder, source, args.null_rows, note, dimensions=width)
    steady = [held for rows, held in noted if rows >= GROWTH_SHARE * args.null_rows]
    facts = {
        "rows": args.null_rows,
        "seconds": seconds,
        "rows_per_s": args.null_rows / seconds,
        "width": width,
        "settled_mb": steady[0] / MB,
        "end_mb": steady[-1] / MB,
        "highest_mb": max(steady) / MB,
    }
    report.show([facts], "null model")
    return facts


if __name__ == "__main__":
    main()
