"""Limits what one key may use: requests and tokens a minute, and inputs that wait. Knows neither
the key nor HTTP."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxembed.errors import QuotaExceeded, RequestTooLarge

MINUTE_S = 60.0
ROUNDING = 1e-6  # of a request or token, by which a bucket that was filled slowly may be short
WAITING_RETRY_S = 1  # after which to try again where too many inputs wait

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

    kind: Literal["requests", "tokens"]
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
        elapsed_s = max(now - self._filled_at, 0.0)
        self._level = min(self._level + elapsed_s * self._per_second, float(self.per_minute))
        self._filled_at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        """Take an amount out; a negative one is put back."""
        self._level = min(self.level(now) - amount, float(self.per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """The seconds until the bucket holds the amount."""
        missing = amount - self.level(now)
        return missing / self._per_second if missing > ROUNDING else 0.0

    def resize(self, per_minute: int, now: float) -> None:
        """Change what a minute brings; the bucket stays as full as it is, relative to that."""
        self._level = self.level(now) * per_minute / self.per_minute
        self.per_minute = per_minute

    @property
    def _per_second(self) -> float:
        return self.per_minute / MINUTE_S


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
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Set other limits. What was used of the old ones stays used."""
        with self._lock:
            self.limits, now = limits, self._clock()
            self._requests = _resized(self._requests, limits.requests_per_minute, now)
            self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)

    def count_request(self) -> None:
        """Count a request before anything else is done for it. Raises QuotaExceeded."""
        with self._lock:
            now = self._clock()
            if self._requests is not None:
                if wait_s := self._requests.wait_s(1, now):
                    self._refuse("requests", self._requests.per_minute, wait_s)
                self._requests.take(1, now)
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
            bucket = self._tokens
            wanted = account.charged + tokens
            capacity = None if bucket is None else bucket.per_minute
            self._check_size(wanted, capacity, "tokens", "tokens_per_minute")
            if account.entered:
                return
            if most is not None and self.waiting + inputs > most:
                self.refused["inputs"] += 1
                raise QuotaExceeded(
                    f"the key `{self.name}` has {self.waiting} inputs that wait, and may have "
                    f"{most} (max_inputs_waiting): there is no room for {inputs} more now",
                    WAITING_RETRY_S,
                )
            if bucket is not None and (wait_s := bucket.wait_s(tokens, self._clock())):
                self._refuse("tokens", bucket.per_minute, wait_s)

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

    def _refuse(self, kind: Literal["requests", "tokens"], per_minute: int, wait_s: float) -> None:
        self.refused[kind] += 1
        seconds = math.ceil(wait_s)
        raise QuotaExceeded(
            f"the key `{self.name}` has used its {per_minute} {kind} a minute; try again in "
            f"{seconds} s",
            seconds,
        )

    def hold(self, inputs: int) -> None:
        """Count inputs that wait; a negative number gives some back."""
        with self._lock:
            self.waiting += inputs

    def charge(self, tokens: int) -> None:
        """Take tokens of this minute; a negative number gives some back."""
        if tokens and self._tokens is not None:
            with self._lock:
                if self._tokens is not None:
                    self._tokens.take(tokens, self._clock())

    def refuse(self, reason: Refusal) -> None:
        """Count a request that the key does not open."""
        with self._lock:
            self.refused[reason] += 1

    def count_answered(self, tokens: int) -> None:
        """Count tokens of an answer."""
        with self._lock:
            self.tokens += tokens

    def states(self) -> list[RateState]:
        """What is left of each limit a minute that there is."""
        with self._lock:
            now = self._clock()
            states = [_state("requests", self._requests, now), _state("tokens", self._tokens, now)]
            return [state for state in states if state is not None]


class Account:
    """What one request uses, of the quota of its key if it has one.

    A request has parts that are admitted one by one; most have a single one.
    """

    def __init__(self, quota: Quota | None = None):
        self.quota = quota
        self.models: set[str] = set()  # the served names of those that it was given
        self.inputs = 0  # admitted
        self.tokens = 0  # answered
        self.charged = 0  # tokens: about, until a part is answered
        self.entered = False  # whether a part was admitted

    def check(self, inputs: int, tokens: int) -> None:
        """Raise what `Quota.check` does for a further part."""
        if self.quota is not None:
            self.quota.check(inputs, tokens, self)

    def enter(self, inputs: int) -> None:
        """Count the inputs of an admitted part."""
        self.entered = True
        self.inputs += inputs

    def hold(self, inputs: int) -> None:
        """Count inputs that wait; a negative number gives some back."""
        if self.quota is not None:
            self.quota.hold(inputs)

    def charge(self, tokens: int) -> None:
        """Charge tokens; a negative number gives some back."""
        self.charged += tokens
        if self.quota is not None:
            self.quota.charge(tokens)

    def count_answered(self, tokens: int) -> None:
        """Count the tokens of an answered part."""
        self.tokens += tokens
        if self.quota is not None:
            self.quota.count_answered(tokens)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None or bucket is None:
        return None if per_minute is None else TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _state(
    kind: Literal["requests", "tokens"], bucket: TokenBucket | None, now: float
) -> RateState | None:
    if bucket is None:
        return None
    remaining = max(math.floor(bucket.level(now)), 0)
    return RateState(kind, bucket.per_minute, remaining, bucket.wait_s(bucket.per_minute, now))
