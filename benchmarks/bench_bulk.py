"""Compares `jaxembed embed` into a folder of Parquet with the engine's own rate: rows a second.

The job reads the texts from Parquet and writes them into parts; `encode` gets the same texts as a
list, in the same process and with the same engine. sentence-transformers with its pool of processes
and onnxruntime embed the same texts with the same weights, where their environments are there. In
every round each runs once, and the order alternates.

    python -m benchmarks.bench_bulk --torch .venv-parity --onnx .venv-peers
    python -m benchmarks.bench_bulk --texts 0 --null-rows 10000000

Columns: `of_encode` is the rate relative to that of `encode`, from the medians of the seconds;
`least` and `most` are over the rounds.

With --null-rows a job of so many rows is run with a model that answers constants, cut to NULL_WIDTH
numbers, and the resident memory is noted every second. Its slope is that of a line through what was
noted after the first tenth of the rows.
"""

import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import bench_libraries, report, workloads
from benchmarks.bench_libraries import Contestant
from benchmarks.bench_memory import resident
from benchmarks.servers import packaged_model
from jaxembed import Embedder, EngineConfig
from jaxembed.bulk.computations import EmbedRows
from jaxembed.bulk.row_source import TextRows
from jaxembed.bulk.run import JobProgress, Rows, Summary, run_job
from jaxembed.engine.engine import Engine

ENCODE, JOB = "encode", "job"
UNMEASURED = 4096  # texts, before the rounds
NULL_WIDTH = 32  # so that ten million rows take 2 GB of disk
NULL_GROUP = 65_536  # rows of a row group of the input
GROWTH_SHARE = 0.1  # the share of the rows before which memory may grow
MB, MILLION = 10**6, 10**6
SAMPLE_S = 1.0


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a directory or a hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--torch", type=Path, default=report.ROOT / ".venv-parity")
    parser.add_argument("--onnx", type=Path, default=report.ROOT / ".venv-peers")
    parser.add_argument("--mix", default="mixed", help="of benchmarks.workloads")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=4096, help="0: none of this comparison")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--null-rows", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    facts: dict[str, Any] = {"model": "all-MiniLM-L6-v2" if args.model is None else "another"}
    if args.texts:
        facts |= compared(args)
    if args.null_rows:
        facts["null_model"] = null_job(args)
    report.finish("bench_bulk", argv, facts, args.out)


def compared(args: Namespace) -> dict[str, Any]:
    """The rates of the job, of `encode` and of the other libraries, as facts for JSON."""
    texts = distinct(workloads.texts(args.mix, args.texts, data=args.data, seed=args.seed))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxembed-")))
        embedder = stack.enter_context(started(args))
        source, few = folder / "texts.parquet", folder / "few.parquet"
        pq.write_table(pa.table({"text": texts}), source)
        pq.write_table(pa.table({"text": texts[:UNMEASURED]}), few)
        runs: dict[str, Callable[[], float]] = {
            ENCODE: lambda: seconds_of(lambda: embedder.encode(texts)),
            JOB: lambda: job_seconds(embedder, source, len(texts)),
        }
        embedder.encode(texts[:UNMEASURED])
        job_seconds(embedder, few, len(texts[:UNMEASURED]))
        workers = [
            stack.enter_context(bench_libraries.working(one, texts, bench_libraries.LIMIT))
            for one in peers(args)
        ]
        for worker in workers:
            runs[worker.contestant.name] = lambda worker=worker: worker.seconds(worker.batch)
        rounds = measure(runs, args.rounds)
    rows = [row_of(name, rounds, len(texts)) for name in runs]
    report.show(rows, f"{len(texts)} texts, {report.device_name()}")
    return {
        "texts": len(texts),
        "mix": args.mix,
        "results": rows,
        "rounds": rounds,
        "versions": {one.contestant.name: one.versions for one in workers},
        "batches": {one.contestant.name: one.seconds_of for one in workers},
    }


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
    found = []
    python = args.torch / "bin/python"
    if python.exists():
        model = packaged_model(args.torch)
        for dtype in ("float32", "bfloat16"):
            name = f"sentence-transformers pool {dtype}"
            pool = "sentence-transformers-pool"
            found.append(Contestant(name, python, pool, model, dtype))
    python = args.onnx / "bin/python"
    if python.exists():
        exported = args.onnx / "onnx"
        found.append(Contestant("onnxruntime float32", python, "onnxruntime", exported, "float32"))
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def job_seconds(embedder: Embedder, source: Path, count: int) -> float:
    """How long the job of a file takes, into a folder that is removed after."""
    with tempfile.TemporaryDirectory(prefix="jaxembed-", dir=source.parent) as folder:
        start = time.perf_counter()
        summary = dense_job(embedder, [str(source)], folder)
        seconds = time.perf_counter() - start
    assert summary.computed == count, summary
    return seconds


def dense_job(
    embedder: Embedder,
    inputs: Sequence[str],
    folder: str,
    on_progress: Callable[[JobProgress], object] = lambda progress: None,
    **options: Any,
) -> Summary:
    """Embed the column `text` of some files into a folder that is not there or empty."""
    computation = EmbedRows(embedder, TextRows(), ("dense",), options)
    return run_job(computation, Rows(inputs), folder, on_progress=on_progress)


def measure(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each in each round, by its name; the order alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 else reversed(runs):
            seconds[name].append(runs[name]())
    return seconds


def row_of(name: str, rounds: dict[str, list[float]], texts: int) -> dict[str, Any]:
    """The row of one of those measured."""
    median = float(np.median(rounds[name]))
    of_encode = np.divide(rounds[ENCODE], rounds[name])
    return {
        "run": name,
        "seconds": median,
        "rows_per_s": texts / median,
        "of_encode": float(np.median(rounds[ENCODE])) / median,
        "least": float(of_encode.min()),
        "most": float(of_encode.max()),
    }


def null_job(args: Namespace) -> dict[str, Any]:
    """The rate and the memory of a job with a model that answers constants, as facts for JSON."""
    texts = workloads.texts("queries", NULL_GROUP, data=args.data, seed=args.seed)
    with (
        tempfile.TemporaryDirectory(prefix="jaxembed-") as folder,
        started(args, null_model=True) as embedder,
    ):
        source = Path(folder) / "texts.parquet"
        write_rows(source, texts, args.null_rows)
        watch = Memory()
        start = time.perf_counter()
        with watch.sampling():
            out = str(Path(folder) / "out")
            width = min(NULL_WIDTH, embedder.spec.dim)
            dense_job(embedder, [str(source)], out, watch.on_progress, dimensions=width)
        seconds = time.perf_counter() - start
    rate = args.null_rows / seconds
    facts = {"rows": args.null_rows, "seconds": seconds, "rows_per_s": rate, "width": width}
    facts |= watch.describe(args.null_rows)
    report.show([facts], "null model")
    return facts | {"samples": [(rows, round(held / MB, 1)) for rows, held in watch.samples]}


def write_rows(path: Path, texts: Sequence[str], count: int) -> None:
    """Write a Parquet file of so many rows, whose texts repeat."""
    table = pa.table({"text": texts})
    with pq.ParquetWriter(path, table.schema) as writer:
        for start in range(0, count, len(texts)):
            writer.write_table(table.slice(0, count - start))


class Memory:
    """Notes the resident memory every second, with the rows that are done."""

    def __init__(self):
        self.samples: list[tuple[int, int]] = []  # rows, bytes
        self._rows = 0

    def on_progress(self, progress: JobProgress) -> None:
        """Take how far a job is."""
        self._rows = progress.rows

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Note it until the end of the context, and then once more."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                self.samples.append((self._rows, resident()["VmRSS"]))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.samples.append((self._rows, resident()["VmRSS"]))

    def describe(self, total: int) -> dict[str, float | None]:
        """The memory after the first tenth of the rows, in MB; the slope is None where too little
        was noted."""
        steady = [(rows, held) for rows, held in self.samples if rows >= GROWTH_SHARE * total]
        rows, held = np.array(steady, float).T
        several = len(set(rows)) > 1
        slope = np.polyfit(rows / MILLION, held / MB, 1)[0] if several else None
        return {
            "settled_mb": held[0] / MB,
            "end_mb": held[-1] / MB,
            "highest_mb": held.max() / MB,
            "mb_per_million_rows": None if slope is None else float(slope),
        }


if __name__ == "__main__":
    main()
