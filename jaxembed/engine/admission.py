"""Admits a request by its inputs, tokens and bytes, or refuses it at once when a limit is full.

`Capacity` has the limits of the process. An `Admission` admits requests to a model, and returns a
`Permit` for each. A `Reservation` counts the bytes of memory that a request holds.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple, Self

from jaxembed.config import EngineConfig
from jaxembed.engine.quota import Account
from jaxembed.errors import Overloaded, RequestTooLarge, ShuttingDown

LONGEST_RETRY_S = 60
MAX_LIMITS_PER_REQUEST = 16  # one request may have at most this multiple of the token limit
SMALL_DIVISOR = 64  # a small request has at most 1/SMALL_DIVISOR of each limit
# The reserve for small requests is 1/RESERVE_DIVISOR of each limit. It is within the limit of
# bytes, and in addition to the limits of inputs and tokens.
RESERVE_DIVISOR = 8

Limit = Literal["inputs", "tokens", "bytes"]


class Cost(NamedTuple):
    """The cost of a request, or of a part of one: numbers of inputs, tokens and bytes of memory.

    Before tokenization, `tokens` and `bytes` are estimated from the number of characters;
    `Permit.correct` replaces the estimates. `bytes` excludes the request body and the finished
    answer, which the server charges to the Reservation separately.
    """

    inputs: int
    tokens: int
    bytes: int = 0


class Reservation:
    """The memory reservation of one request, in bytes, until `close` or the end of its context.

    It covers the body of the request, its texts and tokens, and its answer until that is sent.
    `entered` is true once a model has admitted a part of the request. `account` counts the usage of
    the request for an API key or a log; it may be None.
    """

    def __init__(self, capacity: "Capacity"):
        self.bytes = 0
        self.entered = False
        self.account: Account | None = None
        self._capacity = capacity

    def charge(self, count: int) -> None:
        """Add `count` bytes to the reservation; a negative `count` gives bytes back.

        Call it before the memory is allocated. Raises RequestTooLarge if the request would exceed
        the limit of one request, and Overloaded if all requests together would exceed the limit of
        the process. After an error the reservation is unchanged.
        """
        capacity = self._capacity
        with capacity.lock:
            wanted = self.bytes + count
            if count > 0:
                # the bytes that requests of any size may hold, without the reserve for small ones
                open_to_all = capacity.max_bytes - capacity.max_bytes // RESERVE_DIVISOR
                if wanted > open_to_all:
                    raise RequestTooLarge(
                        f"the request and its answer need {wanted} bytes of memory, and the limit "
                        f"of a request is {open_to_all}; send less at a time or raise "
                        "--max-queue-bytes"
                    )
                is_small = wanted <= capacity.max_bytes // SMALL_DIVISOR
                if capacity.bytes + count > (capacity.max_bytes if is_small else open_to_all):
                    capacity.refused["bytes"] += 1
                    raise Overloaded(
                        f"Server is overloaded: requests hold {capacity.bytes} bytes of memory, "
                        f"and the limit is {capacity.max_bytes} (--max-queue-bytes)",
                        capacity.retry_after_s,
                    )
            self.bytes = wanted
            capacity.bytes += count

    async def make_room(self, count: int) -> None:
        """Do nothing. In a front-end process, borrow `count` bytes for the next `charge`."""

    def cover(self, count: int) -> None:
        """Grow the reservation to at least `count` bytes. Raises the errors of `charge`."""
        if count > self.bytes:
            self.charge(count - self.bytes)

    def close(self) -> None:
        """Give all bytes back, when the request is answered or abandoned."""
        with self._capacity.lock:
            self._capacity.bytes -= self.bytes
            self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Capacity:
    """The limits of one process, and how much of each limit is in use.

    All models share the limits, because they share the devices. A model that uses less than its own
    share of a limit may admit requests although the limit is reached: devices serve all models
    fairly, so many requests to one model must not block requests to another. `bytes` never exceeds
    `max_bytes`. Without `max_tokens`, the token limit is the sum of the models' shares.
    """

    def __init__(
        self,
        max_inputs: int,
        max_tokens: int | None = None,
        max_bytes: int = EngineConfig.max_queue_bytes,
    ):
        self.max_inputs = max_inputs
        self.max_tokens = max_tokens or 0
        self.max_bytes = max_bytes
        self.inputs = self.tokens = self.bytes = 0
        # inputs and tokens of the small requests for which the reserve had room
        self.small_inputs = self.small_tokens = 0
        self.refused: Counter[Limit] = Counter()  # refused requests by the limit that was full
        self.admissions: list[Admission] = []
        self.lock = threading.RLock()
        self.sums_shares = not max_tokens  # whether `max_tokens` is the sum of the models' shares

    def request(self) -> Reservation:
        """Return the reservation of a new request."""
        return Reservation(self)

    @property
    def retry_after_s(self) -> int:
        """The estimated seconds until half the admitted tokens are computed, 1 to LONGEST_RETRY_S.

        Models without a measured throughput do not count."""
        rates = [(model.tokens, model.tokens_per_s()) for model in self.admissions]
        wait_s = sum((tokens / rate for tokens, rate in rates if rate > 0), 0.0)
        return min(max(math.ceil(wait_s / 2), 1), LONGEST_RETRY_S)


def capacity_of(config: EngineConfig) -> Capacity:
    """Return a capacity with the limits of the settings."""
    return Capacity(config.max_concurrent_requests, config.max_queue_tokens, config.max_queue_bytes)


class Admission:
    """Admits requests to one model, and counts their inputs and tokens until they are answered.

    A limit is full if the process has reached the limit and the model has reached its share of the
    limit. While no limit is full, a request of any size is admitted. Small requests have a reserve
    beyond the limits. So the tokens of all models together are at most the sum of the limit, the
    shares of all models but one, the reserve, and one request for each model, which may have
    MAX_LIMITS_PER_REQUEST times the token limit.

    `share` is the number of tokens that the model adds to the token limit of a capacity that was
    made without `max_tokens`. `tokens_per_s` returns the recent throughput of the model.
    """

    def __init__(self, capacity: Capacity, share: int, tokens_per_s: Callable[[], float]):
        """Add the model to the models that share `capacity`."""
        self.capacity = capacity
        self.share = share
        self.tokens_per_s = tokens_per_s
        self.inputs = 0
        self.tokens = 0
        self.draining = False
        self._closed = False
        with capacity.lock:
            capacity.admissions.append(self)
            if capacity.sums_shares:
                capacity.max_tokens += share

    def admit(
        self, cost: Cost, reservation: Reservation | None = None, *, is_run: bool = True
    ) -> "Permit":
        """Admit a request, or a part of one, and return its permit.

        With `reservation`, this is a part of the request that has that reservation. Once the first
        part of a request is admitted, a full limit of inputs or tokens refuses none of the other
        parts. The bytes of all parts stay reserved until `reservation` is closed. `is_run` is False
        for work without a device, such as tokenization, whose tokens are not charged to the
        account.

        Raises Overloaded if a limit is full, ShuttingDown after `drain` or `close`, RequestTooLarge
        if the request could never be admitted, and QuotaExceeded if the limits of its API key are
        used up. After an error nothing is admitted.
        """
        capacity, is_own = self.capacity, reservation is None
        reservation = reservation or Reservation(capacity)
        with capacity.lock:
            if self.draining:
                raise ShuttingDown("the server is shutting down", retry_after_s=5)
            if cost.tokens > MAX_LIMITS_PER_REQUEST * capacity.max_tokens:
                raise RequestTooLarge(
                    f"the request has about {cost.tokens} tokens, and the limit of a request is "
                    f"{MAX_LIMITS_PER_REQUEST * capacity.max_tokens}; send less at a time or raise "
                    "--max-queue-tokens"
                )
            if reservation.account is not None and reservation.account.quota is not None:
                reservation.account.quota.check(
                    cost.inputs, cost.tokens if is_run else 0, reservation.account
                )
            # only a small request may use the reserve, while the reserve has room
            in_reserve = (
                cost.inputs * SMALL_DIVISOR <= capacity.max_inputs
                and cost.tokens * SMALL_DIVISOR <= capacity.max_tokens
                and (capacity.small_inputs + cost.inputs) * RESERVE_DIVISOR <= capacity.max_inputs
                and (capacity.small_tokens + cost.tokens) * RESERVE_DIVISOR <= capacity.max_tokens
            )
            # All models have equal shares of a limit; but if the token limit is the sum of the
            # models' shares, each model has its own `share` of tokens.
            full: Limit | None = None
            models = len(capacity.admissions)
            tokens_share = self.share if capacity.sums_shares else capacity.max_tokens / models
            if capacity.tokens >= capacity.max_tokens and self.tokens >= tokens_share:
                full = "tokens"
            elif (
                capacity.inputs >= capacity.max_inputs
                and self.inputs >= capacity.max_inputs / models
            ):
                full = "inputs"
            # `entered` means that an earlier part of the request is admitted
            if full is not None and not reservation.entered and not in_reserve:
                capacity.refused[full] += 1
                raise Overloaded(
                    f"Model is overloaded: {capacity.inputs} inputs and about {capacity.tokens} "
                    f"tokens wait, and the limits are {capacity.max_inputs} "
                    f"(--max-concurrent-requests) and {capacity.max_tokens} (--max-queue-tokens); "
                    "send the request again later",
                    capacity.retry_after_s,
                )
            reservation.charge(cost.bytes)
            reservation.entered = True
            permit = Permit(self, reservation, is_own=is_own, is_run=is_run, in_reserve=in_reserve)
            if reservation.account is not None:
                reservation.account.entered = True
                reservation.account.inputs += cost.inputs
            permit._count(cost)
        return permit

    def drain(self) -> None:
        """Refuse all further requests to this model."""
        with self.capacity.lock:
            self.draining = True

    def close(self) -> None:
        """Refuse all further requests; remove the model's share once every permit is released."""
        with self.capacity.lock:
            self.draining = self._closed = True
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        """Remove the model from the capacity if it is closed and has no admitted work."""
        capacity = self.capacity
        if self._closed and not self.inputs and not self.tokens and self in capacity.admissions:
            capacity.admissions.remove(self)
            if capacity.sums_shares:
                capacity.max_tokens -= self.share


class Permit:
    """An admitted request, or a part of one, which counts for its model until `release`."""

    def __init__(
        self,
        admission: Admission,
        reservation: Reservation,
        *,
        is_own: bool,
        is_run: bool,
        in_reserve: bool,
    ):
        """Make a permit that counts nothing yet.

        With `is_own` the permit is for a whole request, and `release` gives the bytes of
        `reservation` back. With `is_run` tokens are charged to the account. With `in_reserve` the
        request also counts for the reserve for small requests."""
        self.reservation = reservation
        self._is_run = is_run
        self._admission = admission
        self._cost = Cost(inputs=0, tokens=0)
        self._is_own = is_own
        self._in_reserve = in_reserve
        self._charged = 0  # tokens that are charged to the account of the request

    def correct(self, cost: Cost) -> None:
        """Replace the estimated cost by the true `cost`. Raises RequestTooLarge or Overloaded if
        its bytes exceed a limit."""
        with self._admission.capacity.lock:
            self.reservation.charge(cost.bytes - self._cost.bytes)
            self._count(cost)

    def charge_answer(self, tokens: int) -> None:
        """Charge the account `tokens`, the number that the answer reports, instead of the tokens
        that were charged so far."""
        if self.reservation.account is not None:
            with self._admission.capacity.lock:
                self._charge(tokens, answered=tokens)

    def release(self) -> None:
        """Stop counting the request, when it is answered or abandoned."""
        with self._admission.capacity.lock:
            self._count(Cost(inputs=0, tokens=0), charges=False)
            if self._is_own:
                self.reservation.charge(-self.reservation.bytes)

    def _count(self, cost: Cost, *, charges: bool = True) -> None:
        """Replace the cost that is counted for model and process by `cost`.

        With `charges`, `cost.tokens` also replaces the tokens charged to the account."""
        admission, capacity = self._admission, self._admission.capacity
        inputs, tokens = cost.inputs - self._cost.inputs, cost.tokens - self._cost.tokens
        self._cost = cost
        admission.inputs += inputs
        admission.tokens += tokens
        capacity.inputs += inputs
        capacity.tokens += tokens
        if self._in_reserve:
            capacity.small_inputs += inputs
            capacity.small_tokens += tokens
        if admission._closed:
            admission._leave_if_done()
        self._charge(cost.tokens if charges else self._charged, waiting=inputs)

    def _charge(self, tokens: int, *, waiting: int = 0, answered: int = 0) -> None:
        """Charge the account `tokens` instead of the tokens that were charged so far.

        Also add `waiting` to the account's waiting inputs, and `answered` to its answered tokens.
        """
        if self.reservation.account is not None:
            more = tokens - self._charged if self._is_run else 0
            self._charged += more
            self.reservation.account.use(waiting=waiting, charged=more, answered=answered)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the permit. After an Exception, the charge to the account is taken back.

        The charge stays if the request was cancelled."""
        if isinstance(error, Exception):
            with self._admission.capacity.lock:
                self._charge(0)
        self.release()
