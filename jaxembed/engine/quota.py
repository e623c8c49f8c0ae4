"""Limits what one key may use: requests and tokens a minute, and inputs that wait. Knows neither
the key nor HTTP."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxembed.errors import QuotaExceeded, RequestTooLarge

MINUTE_S = 60.0
ROUNDING = 1e-6  # of a request or token, by which a bucket that was filled slowly may be short
WAITING_RETRY_S = 1  # after which to try again where too many inputs wait

Rate = Literal["requests", "tokens"]  # a minute
Refusal = Literal["expired", "route", "model", "requests", "tokens", "inputs"]
REFUSAL_REASONS: tuple[Refusal, ...] = ("expired", "route", "model", "requests", "tokens", "inputs")


@dataclass(frozen=True)
class Limits:
    """What a key may use; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_inputs_waiting: int | None = None  # inputs admitted and not yet answered


class RateState(NamedTuple):
    """What is left of one limit a minute. `reset_s` are the seconds until all of it is there."""

    kind: Rate
    limit: int
    remaining: int
    reset_s: float


class TokenBucket:
    """A bucket that a minute fills and use empties, below zero too: then it is filled up first."""

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def level(self, now: float) -> float:
        """How much is in the bucket at a time, in seconds."""
        filled = max(now - self._filled_at, 0.0) * (self.per_minute / MINUTE_S)
        self._level = min(self._level + filled, float(self.per_minute))
        self._filled_at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        """Take an amount out; a negative one is put back."""
        self._level = min(self.level(now) - amount, float(self.per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """The seconds until the bucket holds the amount."""
        missing = amount - self.level(now)
        return missing / (self.per_minute / MINUTE_S) if missing > ROUNDING else 0.0

    def resize(self, per_minute: int, now: float) -> None:
        """Change what a minute brings; the bucket stays as full as it is, relative to that."""
        self._level = self.level(now) * per_minute / self.per_minute
        self.per_minute = per_minute


class Quota:
    """The limits of one key, and what it has used. `name` is that of the key, for messages.

    Any thread may call its methods.
    """

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self.name = name
        self.waiting = 0  # inputs
        self.requests = self.tokens = 0  # so far: requests let in, tokens answered
        self.refused: Counter[Refusal] = Counter()
        self.limits = Limits()
        self._buckets: dict[Rate, TokenBucket] = {}  # of the limits that there are
        self._clock = clock
        self._lock = threading.Lock()
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Set other limits. What was used of the old ones stays used."""
        with self._lock:
            self.limits, now = limits, self._clock()
            rates: dict[Rate, int | None] = {
                "requests": limits.requests_per_minute,
                "tokens": limits.tokens_per_minute,
            }
            for kind, per_minute in rates.items():
                if per_minute is None:
                    self._buckets.pop(kind, None)
                elif kind in self._buckets:
                    self._buckets[kind].resize(per_minute, now)
                else:
                    self._buckets[kind] = TokenBucket(per_minute, now)

    def count_request(self) -> None:
        """Count a request before anything else is done for it. Raises QuotaExceeded."""
        with self._lock:
            self._check_rate("requests", 1)
            if "requests" in self._buckets:
                self._buckets["requests"].take(1, self._clock())
            self.requests += 1

    def check(self, inputs: int, tokens: int, account: "Account") -> None:
        """Raise QuotaExceeded if a part of a request with so many inputs, and about so many tokens,
        must wait, and RequestTooLarge if its request has more than there ever is.

        Of a request whose first part was admitted, no later part has to wait: those before would
        have been computed for nothing.
        """
        with self._lock:
            most = self.limits.max_inputs_waiting
            self._check_size(account.inputs + inputs, most, "inputs", "max_inputs_waiting")
            self._check_size(
                account.charged + tokens,
                self.limits.tokens_per_minute,
                "tokens",
                "tokens_per_minute",
            )
            if account.entered:
                return
            if most is not None and self.waiting + inputs > most:
                self.refused["inputs"] += 1
                raise QuotaExceeded(
                    f"the key `{self.name}` has {self.waiting} inputs that wait, and may have "
                    f"{most} (max_inputs_waiting): there is no room for {inputs} more now",
                    WAITING_RETRY_S,
                )
            self._check_rate("tokens", tokens)

    def _check_size(
        self, wanted: int, most: int | None, kind: Literal["inputs", "tokens"], field: str
    ) -> None:
        if most is not None and wanted > most:
            self.refused[kind] += 1
            about = "about " if kind == "tokens" else ""
            raise RequestTooLarge(
                f"the request has {about}{wanted} {kind}, and the key `{self.name}` never has room "
                f"for more than {most} ({field}); send less at a time"
            )

    def _check_rate(self, kind: Rate, amount: int) -> None:
        """Raise QuotaExceeded if so much of this minute is not left."""
        bucket = self._buckets.get(kind)
        wait_s = 0.0 if bucket is None else bucket.wait_s(amount, self._clock())
        if bucket is not None and wait_s:
            self.refused[kind] += 1
            seconds = math.ceil(wait_s)
            raise QuotaExceeded(
                f"the key `{self.name}` has used its {bucket.per_minute} {kind} a minute; try "
                f"again in {seconds} s",
                seconds,
            )

    def use(self, *, waiting: int = 0, charged: int = 0, answered: int = 0) -> None:
        """Count inputs that wait, tokens of this minute, and tokens of an answer.

        Negative numbers give some back.
        """
        with self._lock:
            self.waiting += waiting
            self.tokens += answered
            if charged and "tokens" in self._buckets:
                self._buckets["tokens"].take(charged, self._clock())

    def refuse(self, reason: Refusal) -> None:
        """Count a request that the key does not open."""
        with self._lock:
            self.refused[reason] += 1

    def states(self) -> list[RateState]:
        """What is left of each limit a minute that there is."""
        with self._lock:
            now = self._clock()
            return [
                RateState(
                    kind,
                    bucket.per_minute,
                    max(math.floor(bucket.level(now)), 0),
                    bucket.wait_s(bucket.per_minute, now),
                )
                for kind, bucket in sorted(self._buckets.items())
            ]


@dataclass(eq=False)
class Account:
    """What one request uses, of the quota of its key if it has one.

    A request has parts that are admitted one by one; most have a single one.
    """

    quota: Quota | None = None
    models: set[str] = field(default_factory=set)  # the served names of those that it was given
    inputs: int = 0  # admitted
    tokens: int = 0  # answered
    charged: int = 0  # tokens: about, until a part is answered
    entered: bool = False  # whether a part was admitted

    def use(self, *, waiting: int = 0, charged: int = 0, answered: int = 0) -> None:
        """Count for it and for its key what `Quota.use` does."""
        self.charged += charged
        self.tokens += answered
        if self.quota is not None:
            self.quota.use(waiting=waiting, charged=charged, answered=answered)
