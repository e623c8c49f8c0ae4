"""Measures the CPU time of the engine alone: queueing, composing and packing batches, and answers.

There is no HTTP, no tokenizer and no device: a null replica returns the same array for every batch
of a bucket. Buckets cost what they would on a device of three million tokens a second. A caller
submits requests of token ids, and keeps a number of them waiting.

`us` is the least CPU time of the process for a text, in microseconds, of several repetitions, and
`median_us` their median; `texts_a_batch` shows how full batches are.

    python -m benchmarks.bench_queue
    python -m benchmarks.bench_queue --only "a query, 128 waiting" --repeat 9
"""

import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks import report
from jaxembed.data.work import Encoding, Work, work_from_encodings
from jaxembed.engine.autotune.calibrate import ACCELERATOR_TOKENS
from jaxembed.engine.autotune.costs import BucketCosts
from jaxembed.engine.bucket import Bucket, default_grid
from jaxembed.engine.engine import Engine, Worker
from jaxembed.engine.replica import NullReplica, Outputs
from jaxembed.engine.scheduler import DeviceScheduler
from jaxembed.observability.metrics import Telemetry

WIDTH = 384
TOKEN_MS = 1 / 3000  # of a device of three million tokens a second
DIFFERENT = 4000  # requests; equal ones that wait at the same time would be computed once


@dataclass(frozen=True)
class Scenario:
    """Requests of `texts` texts of `length` tokens, of which `waiting` wait at any time."""

    length: int
    texts: int
    waiting: int
    requests: int


SCENARIOS = {
    "a query, 1 waiting": Scenario(10, 1, 1, 4000),
    "a query, 128 waiting": Scenario(10, 1, 128, 12_000),
    "64 texts, 8 waiting": Scenario(113, 64, 8, 100),
}


class CachingReplica(NullReplica):
    """A null replica that makes the answer of a bucket once: to fill it would take most time."""

    def __init__(self) -> None:
        super().__init__("dense", {"dense": WIDTH})
        self._made: dict[Bucket, Outputs] = {}

    def run(self, bucket: Bucket, *arguments: Any, **options: Any) -> Outputs:
        """Return ones, as a NullReplica does."""
        if bucket not in self._made:
            self._made[bucket] = super().run(bucket, *arguments, **options)
        return self._made[bucket]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the scenarios, and print and write the results."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=SCENARIOS, help="one of the scenarios")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each scenario")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    names = [args.only] if args.only else list(SCENARIOS)
    rows = [{"scenario": name, **measure(SCENARIOS[name], args)} for name in names]
    report.show(rows)
    report.finish("bench_queue", argv, {"results": rows}, args.out)


def measure(scenario: Scenario, args: Any) -> dict[str, float]:
    """Run a scenario on an engine of its own."""
    requests = max(int(args.scale * scenario.requests), 8)
    grid = default_grid(512, ACCELERATOR_TOKENS, 1)
    worker = Worker(CachingReplica(), DeviceScheduler(2))
    costs = BucketCosts(TOKEN_MS)
    engine = Engine([worker], grid, {"dense": WIDTH}, Telemetry(), costs, full_warmup=True)
    engine.start()
    try:
        engine.wait_ready()
        engine.wait_timed()
        works = works_of(scenario, min(requests, DIFFERENT))
        submit(engine, works, scenario.waiting, requests // 10 + 1)
        us, runs_before = [], runs_of(engine)
        for _ in range(args.repeat):
            start = time.process_time()
            submit(engine, works, scenario.waiting, requests)
            us.append(1e6 * (time.process_time() - start) / (requests * scenario.texts))
        runs = runs_of(engine) - runs_before
    finally:
        engine.close()
    texts = args.repeat * requests * scenario.texts
    return {
        "us": min(us),
        "median_us": median(us),
        "texts_a_batch": texts / runs,
    }


def runs_of(engine: Engine) -> int:
    """How many batches the engine has run."""
    return sum(use.runs for use in engine.snapshot().ran.values())


def works_of(scenario: Scenario, count: int) -> list[Work]:
    """The inputs of `count` different requests."""
    random = np.random.default_rng(0)
    return [
        work_from_encodings(
            [
                Encoding(random.integers(5, 30_000, scenario.length).astype(np.int32))
                for _ in range(scenario.texts)
            ],
            frozenset({"dense"}),
        )
        for _ in range(count)
    ]


def submit(engine: Engine, works: Sequence[Work], waiting: int, count: int) -> None:
    """Submit requests, each as soon as fewer than `waiting` wait, and wait for all answers."""
    room = threading.Semaphore(waiting)
    futures = []
    for k in range(count):
        room.acquire()
        futures.append(engine.submit(works[k % len(works)], wake=room.release))
    for future in futures:
        future.result()


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)  # as the server does
    main()
