"""Measures how many useful tokens a second the engine embeds on a grid, without tokenizer and HTTP.

Length mixes, of real texts if there are any, are submitted at once in futures of 32 sequences. The
queue is never empty until the end, so batches are as full as the engine can make them. Lone queries
are timed too, because a grid that is good for a full queue may be bad for one request.

    python -m benchmarks.bench_engine                             # the default grid
    python -m benchmarks.bench_engine --grids all --tokens 1024,2048,4096

Columns:

    of_best     the rate relative to that of the `best` bucket for this mix. That bucket is the one
                with the most useful tokens a second of those that hold the mix's longest sequence.
                It is filled from the mix and runs repeatedly in the same rounds, with as many
                programs at a time as the engine has. The ratio may exceed 1 if shorter buckets are
                faster for a part of the mix.
    fill        useful tokens over the tokens of the buckets that ran
    busy        the share of the time in which a program ran or its data was copied; the rest is the
                host's
    null_per_s  tokens a second of the same engine with a model that answers constants
    lone_ms     the time of one sequence of median length, alone

The grids are the server's own and GRIDS. Buckets are compiled once and shared, and grids take
turns.

Deep queue: the rate while as many tokens wait as two of the largest buckets hold, and while
`--deep` times as many wait; all sequences are different. `null_ratio` is the deep rate over the
shallow one with the model that answers constants, which shows the cost of the queue itself.
"""

import gc
import time
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np

from benchmarks import report, subject, workloads
from benchmarks.bench_model import add_arguments as add_model_arguments
from benchmarks.bench_model import budget_of, dtype_of, limit_of, usual_grid
from benchmarks.subject import Subject, load
from benchmarks.workloads import MIXES, Workload
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.autotune.costs import BucketCosts
from jaxembed.engine.autotune.timing import milliseconds
from jaxembed.engine.batch import pack, place
from jaxembed.engine.bucket import Bucket, BucketGrid, default_grid
from jaxembed.engine.engine import Engine, Worker
from jaxembed.engine.future import QueuedSequence, WorkFuture
from jaxembed.engine.replica import NullReplica, Runner
from jaxembed.engine.scheduler import DeviceScheduler
from jaxembed.observability.metrics import Telemetry

REQUEST_SEQUENCES = 32  # sequences in one request
COPIES = 3  # times that the lengths of a mix are repeated
SUSTAINED_S = 0.5  # time for which one bucket runs repeatedly, in each round
LONE_RUNS = 7  # runs of one sequence, in each round
USUAL = "default"  # the grid that the server would choose
COUNTS = {"queries": 4096, "sts": 2048, "abstracts": 256, "bimodal": 512, "lognormal": 512}
FINE = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)


def _grid(limit: int, rows_of: Callable[[int], Iterable[int]], lengths: Iterable[int]):
    """A grid with these row lengths up to the limit, and with `rows_of(length)` rows each."""
    fitting = sorted({length for length in lengths if length < limit} | {limit})
    return BucketGrid(
        tuple(Bucket(rows, length) for length in fitting for rows in sorted(set(rows_of(length))))
    )


def powers(step: int, limit: int, budget: int, lengths: Sequence[int]) -> BucketGrid:
    """A grid whose row counts are the powers of `step`, and the most rows that fit the budget."""
    return _grid(
        limit,
        lambda n: [*(step**k for k in range(20) if step**k < budget // n), max(budget // n, 1)],
        lengths,
    )


def ends(limit: int, budget: int, lengths: Sequence[int]) -> BucketGrid:
    """A grid with one row, and with the most rows that fit the budget."""
    return _grid(limit, lambda n: {1, max(budget // n, 1)}, lengths)


def largest(limit: int, budget: int, lengths: Sequence[int]) -> BucketGrid:
    """A grid with only the most rows that fit the budget."""
    return _grid(limit, lambda n: {max(budget // n, 1)}, lengths)


def from_length(shortest: int) -> list[int]:
    """Row lengths that are powers of two, from `shortest` to 8192."""
    return [2**k for k in range(4, 14) if 2**k >= shortest]


GRIDS: dict[str, Callable[[int, int], BucketGrid]] = {
    "unjoined": default_grid,
    "rows 1 2 4 8": lambda limit, budget: powers(2, limit, budget, from_length(32)),
    "rows 1 and most": lambda limit, budget: ends(limit, budget, from_length(32)),
    "only most rows": lambda limit, budget: largest(limit, budget, from_length(32)),
    "from 16": lambda limit, budget: powers(4, limit, budget, from_length(16)),
    "from 64": lambda limit, budget: powers(4, limit, budget, from_length(64)),
    "from 128": lambda limit, budget: powers(4, limit, budget, from_length(128)),
    "fine lengths": lambda limit, budget: powers(4, limit, budget, FINE),
}


@dataclass
class Recorder:
    """A runner that records when each program ran, and compiles each bucket only once."""

    runner: Runner
    compiled: set[Bucket] = field(default_factory=set)
    runs: list[tuple[Bucket, float, float]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """Return what the recorded runner has."""
        return getattr(self.runner, name)

    def lower(self, bucket: Bucket, for_any: bool = False) -> Bucket:
        """Return the bucket, which `compile` lowers."""
        return bucket

    def start(self, bucket: Bucket) -> Callable[[], None]:
        """Return a function that compiles a bucket."""
        return partial(self.compile, bucket)

    def compile(self, bucket: Bucket) -> None:
        """Compile a bucket, unless it is compiled."""
        if bucket not in self.compiled:
            self.runner.start(self.runner.lower(bucket))()
            self.compiled.add(bucket)

    def run(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        outputs: Iterable[OutputName],
        *,
        in_float32: bool = False,
    ):
        """Run a batch and record its start and end, unless it runs in float32."""
        if in_float32:
            return self.runner.run(bucket, planes, outputs, in_float32=True)
        start = time.perf_counter()
        answer = self.runner.run(bucket, planes, outputs)
        self.runs.append((bucket, start, time.perf_counter()))
        return answer

    def busy_s(self) -> float:
        """The seconds in which at least one program ran."""
        busy, until = 0.0, 0.0
        for _, start, stop in sorted(self.runs, key=lambda run: run[1]):
            busy += max(0.0, stop - max(start, until))
            until = max(until, stop)
        return busy


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_arguments(parser)
    workloads.add_arguments(parser)
    parser.add_argument("--mixes", default=",".join(MIXES), help="of workloads.py")
    parser.add_argument("--grids", default=USUAL, help="names of GRIDS by commas, or all")
    parser.add_argument("--tokens", help="budgets by commas, instead of one --max-batch-tokens")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer sequences")
    parser.add_argument("--deep", type=int, default=100, help="times deeper, of the deep queue")
    parser.add_argument("--deep-mixes", default="queries,lognormal", help="of the deep queue")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each mix")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the mixes on the grids, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    model = load(args)
    args.dtype = dtype = dtype_of(args)
    grids = _grids(args, model)
    replica = Recorder(subject.replica(model, args, grids.values(), dtype))
    mixes = [_workload(name, model, args) for name in args.mixes.split(",")]
    report.show([mix.describe() for mix in mixes], f"{model.name}, {dtype}, {report.device_name()}")
    rows = measure(model, replica, grids, mixes, args.repeat)
    report.show([{k: v for k, v in row.items() if k != "buckets_run"} for row in rows], "results")
    deep = [
        deep_queue(model, replica, next(iter(grids.values())), name, args)
        for name in args.deep_mixes.split(",")
    ]
    report.show(deep, f"a queue {args.deep} times deeper")
    facts = {"model": model.name, "dtype": dtype, "limit": limit_of(args, model)}
    facts |= {"mixes": [mix.describe() for mix in mixes], "results": rows, "deep": deep}
    report.finish("bench_engine", argv, facts, args.out)


def _grids(args: Namespace, model: Subject) -> dict[tuple[str, int], BucketGrid]:
    """The grids that the arguments name, by name and token budget."""
    budgets = args.tokens.split(",") if args.tokens else [budget_of(args, model)]
    grids = {USUAL: partial(usual_grid, args, model), **GRIDS}
    names = grids if args.grids == "all" else args.grids.split(",")
    return {
        (name, int(budget)): grids[name](limit_of(args, model), int(budget))
        for budget in budgets
        for name in names
    }


def _workload(name: str, model: Subject, args: Namespace) -> Workload:
    """A mix with its lengths repeated COPIES times in different orders, and random tokens.

    The tokens are random because the engine computes equal sequences once. The copies make the ends
    of the queue count for little.
    """
    mix = workloads.workload(
        name,
        max(1, round(COUNTS.get(name, 512) * args.scale)),
        limit=limit_of(args, model),
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
    model: Subject,
    recorder: Recorder,
    grids: dict[tuple[str, int], BucketGrid],
    mixes: Sequence[Workload],
    repeat: int,
) -> list[dict[str, Any]]:
    """Measure each mix on each grid. Returns a row for each pair.

    In each round every grid runs the mix once, so that disturbances of the machine hit all grids.
    """
    for bucket in {bucket for grid in grids.values() for bucket in grid.buckets}:
        recorder.compile(bucket)
    platform = jax.local_devices()[0].platform
    null = NullReplica(model.spec.primary, model.spec.widths)
    engines = {key: started(recorder, grid, model, platform) for key, grid in grids.items()}
    idle = {key: started(null, grid, model, platform) for key, grid in grids.items()}
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    rows = []
    for mix in mixes:
        runs: dict[tuple[str, int], list[Run]] = {key: [] for key in grids}
        for engine in engines.values():
            embed_all(engine, mix.encodings[: REQUEST_SEQUENCES * 4])
        entries = WorkFuture(work_from_encodings(mix.encodings), {"dense": 1}).sequences
        long_buckets = {
            b for e in engines.values() for b in e.grid.buckets if b.length >= mix.lengths.max()
        }
        for _ in range(repeat):
            best = {
                bucket: _useful_rate(recorder.runner, bucket, entries) for bucket in long_buckets
            }
            for key, engine in engines.items():
                runs[key].append(run_mix(engine, mix, recorder, best))
        for (name, budget), engine in engines.items():
            about = {"grid": name, "budget": budget, "buckets": len(engine.grid.buckets)}
            about |= row_of(runs[name, budget], mix, engine)
            rows.append(about | {"null_per_s": rate(idle[name, budget], mix)})
    for engine in [*engines.values(), *idle.values()]:
        engine.close(1.0)
    return rows


def started(runner: Runner | Recorder, grid: BucketGrid, model: Subject, platform: str) -> Engine:
    """Start an engine with one worker, and wait until every bucket is compiled and timed."""
    workers = [Worker(cast(Runner, runner), DeviceScheduler.for_platform(platform))]
    engine = Engine(
        workers, grid, model.spec.widths, Telemetry(), BucketCosts(1e-3), full_warmup=True
    )
    engine.start()
    engine.wait_timed()
    return engine


@dataclass(frozen=True)
class Run:
    """The figures of one run of a mix."""

    seconds: float
    busy_s: float
    buckets: Counter[Bucket]
    lone_ms: float
    useful: dict[Bucket, float]  # useful tokens a second of single buckets, in the same round


def run_mix(engine: Engine, mix: Workload, recorder: Recorder, useful: dict[Bucket, float]) -> Run:
    """Run a mix once on an engine; `useful` are the rates of buckets in the same round."""
    recorder.runs.clear()
    seconds = embed_all(engine, mix.encodings)
    buckets = Counter(bucket for bucket, _, _ in recorder.runs)
    return Run(seconds, recorder.busy_s(), buckets, lone_ms(engine, mix), useful)


def row_of(runs: Sequence[Run], mix: Workload, engine: Engine) -> dict[str, Any]:
    """The row of a mix on a grid, from its runs."""
    seconds = float(np.median([run.seconds for run in runs]))
    best = best_bucket(runs, engine.grid)
    ratios = [mix.tokens / run.seconds / run.useful[best] for run in runs]
    buckets = sum((run.buckets for run in runs), Counter[Bucket]())
    return {
        "mix": mix.name,
        "tokens_per_s": mix.tokens / seconds,
        "texts_per_s": len(mix.encodings) / seconds,
        "worst_s": max(run.seconds for run in runs),
        "best": str(best),
        "of_best": float(np.median(ratios)),
        "fill": len(runs) * mix.tokens / sum(b.tokens * count for b, count in buckets.items()),
        "batches": round(buckets.total() / len(runs)),
        "busy": float(np.median([run.busy_s / run.seconds for run in runs])),
        "lone_ms": float(np.median([run.lone_ms for run in runs])),
        "buckets_run": {str(b): round(n / len(runs), 1) for b, n in buckets.most_common()},
        "mostly": " ".join(str(bucket) for bucket, _ in buckets.most_common(2)),
    }


def rate(engine: Engine, mix: Workload) -> float:
    """Useful tokens a second of an engine, the better of two runs."""
    return mix.tokens / min(embed_all(engine, mix.encodings) for _ in range(2))


def best_bucket(runs: Sequence[Run], grid: BucketGrid) -> Bucket:
    """The bucket with the most useful tokens a second in the median round."""
    rates = {b: [run.useful[b] for run in runs] for b in grid.buckets if b in runs[0].useful}
    return max(rates, key=lambda bucket: float(np.median(rates[bucket])))


def _useful_rate(runner: Runner, bucket: Bucket, entries: Sequence[QueuedSequence]) -> float:
    """Measure the useful tokens a second of a bucket that is filled from the mix.

    It runs repeatedly, with as many programs at a time as the engine has in flight.
    """
    permits = DeviceScheduler.for_platform(jax.local_devices()[0].platform).permits
    batch = place(bucket, entries)
    ms = milliseconds(runner, bucket, permits, SUSTAINED_S, pack(batch, runner.planes))
    return batch.useful_tokens / ms * 1000


def deep_queue(
    model: Subject, replica: Recorder, grid: BucketGrid, name: str, args: Namespace
) -> dict[str, Any]:
    """Measure the rates of a shallow and a deep queue in turns, with the model and a null model."""
    platform = jax.local_devices()[0].platform
    null = NullReplica(model.spec.primary, model.spec.widths)
    some = _workload(name, model, args).lengths
    shallow = max(1, round(2 * max(b.tokens for b in grid.buckets) / some.mean()))
    deep = shallow * args.deep
    lengths = np.random.default_rng(args.seed).choice(some, deep)
    encodings = workloads.random_encodings(lengths, model.vocab_size, args.seed)
    medians: dict[str, float] = {}
    for kind, runner in (("", replica), ("null_", null)):
        engine = started(runner, grid, model, platform)
        rates: dict[str, list[float]] = {"shallow": [], "deep": []}
        for _ in range(args.repeat):
            for depth, count, waiting in (("shallow", deep // 5, shallow), ("deep", deep, deep)):
                seconds = embed_all(engine, encodings[:count], waiting)
                rates[depth].append(float(lengths[:count].sum() / seconds))
        engine.close(1.0)
        medians |= {kind + depth: float(np.median(values)) for depth, values in rates.items()}
    return {
        "mix": name,
        "shallow": shallow,
        "deep": deep,
        "shallow_per_s": medians["shallow"],
        "deep_per_s": medians["deep"],
        "ratio": medians["deep"] / medians["shallow"],
        "null_ratio": medians["null_deep"] / medians["null_shallow"],
    }


def embed_all(engine: Engine, encodings: Sequence[Encoding], waiting: int | None = None) -> float:
    """Measure the seconds to answer all sequences, submitted in futures of SEQUENCES_A_REQUEST.

    At most `waiting` sequences wait at a time; None submits all at once.
    """
    start = time.perf_counter()
    futures: deque[WorkFuture] = deque()
    for k in range(0, len(encodings), REQUEST_SEQUENCES):
        if len(futures) * REQUEST_SEQUENCES >= (waiting or len(encodings)):
            futures.popleft().result()
        futures.append(engine.submit(work_from_encodings(encodings[k : k + REQUEST_SEQUENCES])))
    for future in futures:
        future.result()
    return time.perf_counter() - start


def lone_ms(engine: Engine, mix: Workload) -> float:
    """The median milliseconds of one sequence of median length while nothing else waits.

    It is sent as bulk: after interactive requests the engine would keep the batches of the next
    round short.
    """
    one = sorted(mix.encodings, key=lambda e: e.length)[len(mix.encodings) // 2]
    return report.timed(
        lambda: engine.submit(work_from_encodings([one]), priority="bulk").result(), LONE_RUNS
    ).median


if __name__ == "__main__":
    main()
