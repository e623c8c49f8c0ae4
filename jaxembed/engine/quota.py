"""Limits what one API key may use: requests per minute, tokens per minute, and waiting inputs."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from jaxembed.errors import QuotaExceeded, RequestTooLarge

MINUTE_S = 60.0
ROUNDING = 1e-6  # requests or tokens that a bucket may lack, as a rounding error, and still give
WAITING_RETRY_S = 1  # retry time of a request that is refused because too many inputs wait

Rate = Literal["requests", "tokens"]  # what is limited per minute
Refusal = Literal["expired", "route", "model", "requests", "tokens", "inputs"]
REFUSAL_REASONS: tuple[Refusal, ...] = get_args(Refusal)


@dataclass(frozen=True)
class Limits:
    """The limits of a key; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_inputs_waiting: int | None = None  # inputs admitted and not yet answered


class RateState(NamedTuple):
    """What remains of one limit per minute. After `reset_s` seconds the whole limit remains."""

    kind: Rate
    limit: int
    remaining: int
    reset_s: float


class TokenBucket:
    """A token bucket for a rate limit of `per_minute` requests or tokens.

    The bucket starts full, and refills from empty to full in a minute. `take` may bring the level
    below zero. `now` is a time in seconds, in all methods by the same clock.
    """

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def level(self, now: float) -> float:
        """Refill the bucket up to the time `now`, and return its level."""
        filled = max(now - self._filled_at, 0.0) * (self.per_minute / MINUTE_S)
        self._level = min(self._level + filled, float(self.per_minute))
        self._filled_at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        """Take `amount` out of the bucket. A negative amount is put back."""
        self._level = min(self.level(now) - amount, float(self.per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """Return the seconds until the level is at least `amount`; 0 if it is so already."""
        missing = amount - self.level(now)
        return missing / (self.per_minute / MINUTE_S) if missing > ROUNDING else 0.0

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit to `per_minute`. The level stays the same share of the limit."""
        self._level = self.level(now) * per_minute / self.per_minute
        self.per_minute = per_minute


class Quota:
    """The limits of one API key, and what the key has used.

    `name` is the name of the key in messages. Any thread may call the methods.
    """

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self.name = name
        self.waiting = 0  # inputs admitted and not yet answered
        self.requests = self.tokens = 0  # totals: requests accepted, tokens answered
        self.refused: Counter[Refusal] = Counter()
        self.limits = Limits()
        self._buckets: dict[Rate, TokenBucket] = {}  # only for limits that are set
        self._clock = clock
        self._lock = threading.Lock()
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Set other limits. If the key has used up half a limit per minute, it also has used up
        half the new one."""
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
        """Count a request, before any other work for it. Raises QuotaExceeded if the key has no
        request left in this minute."""
        with self._lock:
            self._check_rate("requests", 1)
            if "requests" in self._buckets:
                self._buckets["requests"].take(1, self._clock())
            self.requests += 1

    def check(self, inputs: int, tokens: int, account: "Account") -> None:
        """Check whether a part of a request may be admitted now. Counts nothing but refusals.

        The part has `inputs` inputs and about `tokens` tokens. `account` has the usage of the
        request so far. Raises RequestTooLarge if the request exceeds a limit of the key, and
        QuotaExceeded if the part must wait. Only the first part of a request may have to wait,
        because a refusal of a later part would waste the work for the earlier parts.
        """
        with self._lock:
            max_waiting = self.limits.max_inputs_waiting
            self._check_size(account.inputs + inputs, max_waiting, "inputs", "max_inputs_waiting")
            self._check_size(
                account.charged + tokens,
                self.limits.tokens_per_minute,
                "tokens",
                "tokens_per_minute",
            )
            if account.entered:  # an earlier part of the request is admitted
                return
            if max_waiting is not None and self.waiting + inputs > max_waiting:
                self.refused["inputs"] += 1
                raise QuotaExceeded(
                    f"the key `{self.name}` has {self.waiting} waiting inputs, and {inputs} more "
                    f"would exceed its limit of {max_waiting} (max_inputs_waiting)",
                    WAITING_RETRY_S,
                )
            self._check_rate("tokens", tokens)

    def _check_size(
        self, size: int, limit: int | None, kind: Literal["inputs", "tokens"], field: str
    ) -> None:
        """Raise RequestTooLarge if `size`, the request's number of inputs or tokens, exceeds
        `limit`, which is the field `field` of Limits."""
        if limit is not None and size > limit:
            self.refused[kind] += 1
            about = "about " if kind == "tokens" else ""
            raise RequestTooLarge(
                f"the request has {about}{size} {kind}, and the limit of the key `{self.name}` is "
                f"{limit} ({field}); send less at a time"
            )

    def _check_rate(self, kind: Rate, amount: int) -> None:
        """Raise QuotaExceeded if less than `amount` is left of the limit per minute `kind`."""
        bucket = self._buckets.get(kind)
        wait_s = 0.0 if bucket is None else bucket.wait_s(amount, self._clock())
        if bucket is not None and wait_s:
            self.refused[kind] += 1
            seconds = math.ceil(wait_s)
            raise QuotaExceeded(
                f"the key `{self.name}` has used its {bucket.per_minute} {kind} per minute; try "
                f"again in {seconds} s",
                seconds,
            )

    def use(self, *, waiting: int = 0, charged: int = 0, answered: int = 0) -> None:
        """Count waiting inputs, tokens charged to the limit per minute, and answered tokens.

        A negative number gives back what was counted before.
        """
        with self._lock:
            self.waiting += waiting
            self.tokens += answered
            if charged and "tokens" in self._buckets:
                self._buckets["tokens"].take(charged, self._clock())

    def refuse(self, reason: Refusal) -> None:
        """Count a request of this key that was refused for `reason`."""
        with self._lock:
            self.refused[reason] += 1

    def states(self) -> list[RateState]:
        """Return the state of each limit per minute that is set."""
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
    """The usage of one request, which also counts for the quota of its API key, if any.

    A large request is admitted in several parts; most requests have a single part.
    """

    quota: Quota | None = None
    models: set[str] = field(default_factory=set)  # names of the models that answer the request
    inputs: int = 0  # number of inputs that were admitted
    tokens: int = 0  # number of tokens that were answered
    charged: int = 0  # tokens charged to the quota; an estimate until a part is answered
    entered: bool = False  # whether a part of the request was admitted

    def use(self, *, waiting: int = 0, charged: int = 0, answered: int = 0) -> None:
        """Count waiting inputs for the key, and charged and answered tokens for the request and the
        key. A negative number gives back what was counted before."""
        self.charged += charged
        self.tokens += answered
        if self.quota is not None:
            self.quota.use(waiting=waiting, charged=charged, answered=answered)
