"""Starts a server as `jaxembed serve` does, with faults injected into its runners and tokenizers.

python tests/chaos/child.py '{"seed": "7/0", "armed": PATH, ...}' serve ...

While the file `armed` exists, the n-th call of a runner or tokenizer draws its fault from the seed
and n. Each fault is written to standard output as a line of JSON, which the storm can read even
after this process is killed.
"""

import json
import os
import resource
import sys
import threading
import time
from random import Random

import numpy as np

RUNNER_FAULTS = {"no_memory": 3, "internal": 3, "memory_error": 1, "nan": 4, "slow": 4, "hang": 0.5}
RUNNER_ERRORS = {
    "no_memory": (RuntimeError, "RESOURCE_EXHAUSTED: Out of memory while trying"),
    "internal": (RuntimeError, "INTERNAL: the stream did not block host until done"),
    "memory_error": (MemoryError,),
}
TOKENIZER_FAULTS = {"tokenizer_error": 3.0, "tokenizer_slow": 2.0}
SLOW_S, TOKENIZER_SLOW_S = 0.2, 0.05
OVER_OVERDUE_S = 1.0  # a hang lasts this much longer than the watchdog's limit


class Faults:
    """Chooses the calls that fail, a share `rate` of all, and their kinds by weight."""

    def __init__(self, seed: str, armed: str, rate: float, overdue_s: float):
        self.lasts_s = {"slow": SLOW_S, "tokenizer_slow": TOKENIZER_SLOW_S}
        self.lasts_s["hang"] = overdue_s + OVER_OVERDUE_S
        self._seed = seed
        self._armed = armed
        self._rate = rate
        self._calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def draw(self, part: str, weights: dict[str, float]) -> str | None:
        """The kind of fault of this call, or None. It is written out before it happens; one that
        lasts has passed."""
        if not os.path.exists(self._armed):
            return None
        with self._lock:
            n = self._calls[part] = self._calls.get(part, 0) + 1
            chance = Random(f"{self._seed}/{part}/{n}")
            if chance.random() >= self._rate:
                return None
            (kind,) = chance.choices(list(weights), list(weights.values()))
            now = time.monotonic()
            fault = {"kind": kind, "n": n, "from": now, "until": now + self.lasts_s.get(kind, 0.0)}
            print(json.dumps(fault), flush=True)
        time.sleep(self.lasts_s.get(kind, 0.0))
        return kind


class FaultyRunner:
    """A runner of the engine that sometimes fails as devices do."""

    def __init__(self, runner, faults: Faults):
        self._runner = runner
        self._faults = faults

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def run(self, bucket, planes, outputs, *, in_float32=False):
        """Run a batch with the fault that is drawn: an error, a delay, or NaN in a row."""
        if in_float32:
            return self._runner.run(bucket, planes, outputs, in_float32=True)
        kind = self._faults.draw("runner", RUNNER_FAULTS)
        if kind in RUNNER_ERRORS:
            error, *words = RUNNER_ERRORS[kind]
            raise error(*words)
        answer = self._runner.run(bucket, planes, outputs)
        if kind != "nan":
            return answer
        spoilt = {name: np.array(values) for name, values in answer.items()}
        for values in spoilt.values():
            values[0] = np.nan  # the first row of a batch is the fullest
        return spoilt


class FaultyTokenizer:
    """A tokenizer that sometimes raises an error or is slow."""

    def __init__(self, tokenizer, faults: Faults):
        self._tokenizer = tokenizer
        self._faults = faults

    def __getattr__(self, name: str):
        attribute = getattr(self._tokenizer, name)
        if name not in ("encode", "encode_batch", "encode_batch_fast"):
            return attribute

        def call(*arguments, **options):
            kind = self._faults.draw("tokenizer", TOKENIZER_FAULTS)
            if kind == "tokenizer_error":
                raise Exception("chaos: the tokenizer fails")
            return attribute(*arguments, **options)

        return call


def spoil(models, faults: Faults, overdue_s: float) -> None:
    """Put faulty runners and tokenizers into every model, and shorten the watchdogs' limits."""
    for embedder in models:
        for worker in embedder.main.engine.workers:
            worker.runner = FaultyRunner(worker.runner, faults)
        tokenizer = embedder.main.processor._tokenizer
        tokenizer.file = FaultyTokenizer(tokenizer.file, faults)
        watchdog = embedder.main.engine._watchdog
        watchdog._overdue_s, watchdog._interval_s = overdue_s, overdue_s / 5


def main() -> None:
    """Run the command line, and inject the faults once the server's models are built."""
    plan = json.loads(sys.argv[1])
    if plan["disk"] == "full":  # no regular file can grow; Python ignores SIGXFSZ
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    from jaxembed import cli
    from jaxembed.server import run as server

    faults = Faults(plan["seed"], plan["armed"], plan["rate"], plan["overdue_s"])
    run = server.run

    def run_spoilt(models, *arguments, **options):
        spoil(models, faults, plan["overdue_s"])
        run(models, *arguments, **options)

    server.run = run_spoilt
    sys.argv = ["jaxembed", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
