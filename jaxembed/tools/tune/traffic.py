"""Samples traffic for three loads, and predicts the figures of a grid from its buckets' costs.

The loads are a lone text on an idle server, requests of 4, 16 and 64 texts on an idle server, and
full load, which is a queue that is never empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from jaxembed.data.work import Encoding, work_of
from jaxembed.engine.batch import HOST_MS, choose_bucket, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.lanes import WINDOW_BUCKETS
from jaxembed.engine.ticket import Entry, Ticket
from jaxembed.tools.tune.lengths import Lengths

REQUEST_SIZES = (4, 16, 64)  # texts
REQUESTS = 6  # requests of each size; fewer if texts are long
LONE = 64  # lone texts
LEAST_TEXTS, MOST_TEXTS = 64, 8192  # at full load


@dataclass(frozen=True)
class Traffic:
    """Random sequences for each load: lone texts, requests, and the queue at full load."""

    lone: list[Encoding]
    requests: list[list[Encoding]]
    full: list[Encoding]

    @property
    def full_tokens(self) -> int:
        """The number of tokens at full load."""
        return sum(encoding.length for encoding in self.full)

    @cached_property
    def lone_lengths(self) -> list[int]:
        """The tokens of each lone text."""
        return [encoding.length for encoding in self.lone]

    @cached_property
    def queues(self) -> list[list[Entry]]:
        """The entries that wait at full load, then those of each request."""
        return [Ticket(work_of(one), {"dense": 1}).entries for one in (self.full, *self.requests)]


def traffic_of(lengths: Lengths, vocab_size: int, full_tokens: int, seed: int) -> Traffic:
    """Draw traffic with these lengths and about `full_tokens` tokens at full load.

    Token ids are random below `vocab_size`; the same `seed` gives the same traffic.
    """
    random = np.random.default_rng(seed)

    def draw(count: int) -> list[Encoding]:
        return [
            Encoding(random.integers(0, vocab_size, length, np.int32))
            for length in lengths.draw(count, random)
        ]

    texts = int(np.clip(full_tokens / lengths.mean, LEAST_TEXTS, MOST_TEXTS))
    share = full_tokens / len(REQUEST_SIZES) / lengths.mean  # texts for the requests of one size
    sizes = [n for n in REQUEST_SIZES for _ in range(int(np.clip(share / n, 1, REQUESTS)))]
    return Traffic(draw(LONE), [draw(size) for size in sizes], draw(texts))


@dataclass(frozen=True)
class Figures:
    """The speed of a grid under each load, predicted or measured."""

    full_tokens_per_s: float  # useful tokens
    full_fill: float  # useful tokens over the buckets' tokens
    request_ms: float  # geometric mean over the requests of several texts
    lone_ms: float  # geometric mean over the lone texts
    lone_p50_ms: float
    lone_p95_ms: float

    def ratios(self, other: "Figures") -> tuple[float, float, float]:
        """The time of each load relative to the other's: full load, requests, lone texts."""
        return (
            other.full_tokens_per_s / self.full_tokens_per_s,
            self.request_ms / other.request_ms,
            self.lone_ms / other.lone_ms,
        )

    def describe(self) -> dict[str, float]:
        """The figures by name, rounded to five digits for JSON."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


def figures(
    full_tokens: int, full_ms: float, padded: int, requests: Sequence[float], lone: Sequence[float]
) -> Figures:
    """Summarise the times of all loads, which are in milliseconds.

    `full_tokens` useful tokens took `full_ms` in buckets of `padded` tokens together. `requests`
    and `lone` are the times of each request and each lone text.
    """
    return Figures(
        full_tokens_per_s=full_tokens / full_ms * 1000,
        full_fill=full_tokens / padded,
        request_ms=float(np.exp(np.mean(np.log(requests)))),
        lone_ms=float(np.exp(np.mean(np.log(lone)))),
        lone_p50_ms=float(np.percentile(lone, 50)),
        lone_p95_ms=float(np.percentile(lone, 95)),
    )


def predict_figures(
    traffic: Traffic,
    cost: Mapping[Bucket, float],
    most: int | None = None,
    pair_ms: float = 0.0,
) -> Figures:
    """Predict the figures of a grid by composing batches as the engine does and adding their cost.

    `cost` holds the milliseconds of each bucket of the grid. Long sequences cost `pair_ms` more for
    each pair of their tokens. A batch has at most `most` sequences. Of the host's time only the
    part that each batch costs is counted.
    """
    (full_ms, padded), *requests = [_drain(queue, cost, most, pair_ms) for queue in traffic.queues]
    alone = {
        length: HOST_MS + min(ms for bucket, ms in cost.items() if bucket.length >= length)
        for length in set(traffic.lone_lengths)
    }
    lone = [alone[length] + pair_ms * length**2 for length in traffic.lone_lengths]
    return figures(traffic.full_tokens, full_ms, padded, [ms for ms, _ in requests], lone)


def _drain(
    waiting: Sequence[Entry], cost: Mapping[Bucket, float], most: int | None, pair_ms: float
) -> tuple[float, int]:
    """Compose batches until nothing waits. Returns their milliseconds and their buckets' tokens."""
    enough = WINDOW_BUCKETS * max(bucket.tokens for bucket in cost)
    ms, padded = pair_ms * sum(entry.length**2 for entry in waiting), 0
    while waiting:
        window = _window(waiting, enough)[:most]
        bucket = choose_bucket(window, cost)
        batch = place(bucket, window[:1], window[1:], most=most)
        ms += cost[bucket] + HOST_MS
        padded += bucket.tokens
        batch_entries = set(batch.entries)
        rest = [entry for entry in window if entry not in batch_entries]
        waiting = [*rest, *waiting[len(window) :]]
    return ms, padded


def _window(waiting: Sequence[Entry], enough: int) -> Sequence[Entry]:
    """The first entries that have at least `enough` tokens together, or all if they have fewer."""
    held = 0
    for count, entry in enumerate(waiting, start=1):
        held += entry.length
        if held >= enough:
            return waiting[:count]
    return waiting
