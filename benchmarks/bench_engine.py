"""Measures how many useful tokens a second the engine embeds, without tokenizer and HTTP.

Length mixes, of real texts if there are any, are submitted at once in futures of 32 sequences. The
queue is never empty until the end, so batches are as full as the engine can make them.

    python -m benchmarks.bench_engine
    python -m benchmarks.bench_engine --max-batch-tokens 1024 --mixes queries,abstracts

Columns:

    of_best     the rate relative to that of the `best` bucket for this mix. That bucket is the one
                with the most useful tokens a second of those that hold the mix's longest sequence.
                It is filled from the mix and runs repeatedly in the same rounds, with as many
                programs at a time as the engine has. The ratio may exceed 1 if shorter buckets are
                faster for a part of the mix.
    fill        useful tokens over the tokens of the buckets that ran
"""

import gc
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks import report, subject, workloads
from benchmarks.bench_model import add_arguments, grid_of
from benchmarks.subject import Subject
from benchmarks.workloads import MIXES, Workload
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.autotune.costs import BucketCosts
from jaxembed.engine.autotune.timing import milliseconds
from jaxembed.engine.batch import pack, place
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.engine import BucketUse, Engine, Worker
from jaxembed.engine.future import QueuedSequence, WorkFuture
from jaxembed.engine.replica import Runner
from jaxembed.engine.scheduler import DeviceScheduler
from jaxembed.observability.metrics import Telemetry

REQUEST_SEQUENCES = 32  # sequences in one request
COPIES = 3  # times that the lengths of a mix are repeated
SUSTAINED_S = 0.5  # time for which one bucket runs repeatedly, in each round
COUNTS = {"queries": 4096, "sts": 2048, "abstracts": 256, "bimodal": 512, "lognormal": 512}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the mixes, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    add_arguments(parser)
    workloads.add_arguments(parser)
    parser.add_argument("--mixes", default=",".join(MIXES), help="of workloads.py")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer sequences")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each mix")
    args = report.parse(parser, argv)
    report.configure_jax()
    model = subject.load(args)
    grid = grid_of(args, model)
    runner = subject.replica(model, args, grid)
    limit = min(args.limit or model.spec.max_input_tokens, grid.max_length)
    mixes = [_workload(name, model, limit, args) for name in args.mixes.split(",")]
    described = [mix.describe() for mix in mixes]
    report.show(described, f"{model.name}, {runner.dtype}, {report.device_name()}")
    rows = measure(model, runner, grid, mixes, args.repeat)
    report.show(rows, "results")
    facts = {"model": model.name, "dtype": runner.dtype, "limit": limit, "mixes": described}
    report.finish(args, facts | {"results": rows})


def _workload(name: str, model: Subject, limit: int, args: Namespace) -> Workload:
    """A mix with its lengths repeated COPIES times in different orders, and random tokens.

    The tokens are random because the engine computes equal sequences once. The copies make the ends
    of the queue count for little.
    """
    mix = workloads.workload(
        name,
        max(1, round(COUNTS.get(name, 512) * args.scale)),
        limit=limit,
        vocab_size=model.vocab_size,
        data=args.data,
        tokenizer=model.tokenizer,
        seed=args.seed,
    )
    random = np.random.default_rng(args.seed)
    lengths = np.concatenate([random.permutation(mix.lengths) for _ in range(COPIES)])
    encodings = workloads.random_encodings(lengths, model.vocab_size, args.seed)
    return replace(mix, encodings=encodings)


def measure(
    model: Subject, runner: Runner, grid: BucketGrid, mixes: Sequence[Workload], repeat: int
) -> list[dict[str, Any]]:
    """Measure each mix on an engine with this grid. Returns a row for each."""
    scheduler = DeviceScheduler.for_platform(jax.local_devices()[0].platform)
    parts = [Worker(runner, scheduler)], grid, model.spec.widths, Telemetry(), BucketCosts(1e-3)
    with closing(Engine(*parts, full_warmup=True)) as engine:
        engine.start()
        engine.wait_timed()
        gc.collect()
        gc.freeze()  # as the server does once it is ready
        return [row_of(engine, runner, mix, repeat) for mix in mixes]


def row_of(engine: Engine, runner: Runner, mix: Workload, repeat: int) -> dict[str, Any]:
    """The row of a mix: medians of the rounds."""
    embed_all(engine, mix.encodings[: REQUEST_SEQUENCES * 4])
    sequences = WorkFuture(work_from_encodings(mix.encodings), {"dense": 1}).sequences
    buckets = [b for b in engine.grid.buckets if b.length >= mix.lengths.max()]
    seconds, rates = [], []
    before = engine.snapshot().ran
    for _ in range(repeat):
        rates.append([_useful_rate(runner, bucket, sequences) for bucket in buckets])
        seconds.append(embed_all(engine, mix.encodings))
    after = engine.snapshot().ran
    ran = {bucket: use - before.get(bucket, BucketUse()) for bucket, use in after.items()}
    best = int(np.median(rates, axis=0).argmax())
    of_best = mix.tokens / np.array(seconds) / np.array(rates)[:, best]
    return {
        "mix": mix.name,
        "tokens_per_s": mix.tokens / float(np.median(seconds)),
        "texts_per_s": len(mix.encodings) / float(np.median(seconds)),
        "best": str(buckets[best]),
        "of_best": float(np.median(of_best)),
        "fill": sum(use.useful_tokens for use in ran.values())
        / sum(bucket.tokens * use.runs for bucket, use in ran.items()),
    }


def _useful_rate(runner: Runner, bucket: Bucket, sequences: Sequence[QueuedSequence]) -> float:
    """Measure the useful tokens a second of a bucket that is filled from the mix.

    It runs repeatedly, with as many programs at a time as the engine has in flight.
    """
    permits = DeviceScheduler.for_platform(jax.local_devices()[0].platform).permits
    batch = place(bucket, sequences)
    ms = milliseconds(runner, bucket, permits, SUSTAINED_S, pack(batch, runner.planes))
    return batch.useful_tokens / ms * 1000


def embed_all(engine: Engine, encodings: Sequence[Encoding]) -> float:
    """Measure the seconds to answer all sequences, submitted at once."""
    start = time.perf_counter()
    parts = [
        encodings[k : k + REQUEST_SEQUENCES] for k in range(0, len(encodings), REQUEST_SEQUENCES)
    ]
    futures = [engine.submit(work_from_encodings(part)) for part in parts]
    for future in futures:
        future.result()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
