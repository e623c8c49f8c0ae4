"""Admits whole requests, by their inputs, tokens and bytes, or refuses them at once when full."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Literal, NamedTuple

from jaxembed.config import EngineConfig
from jaxembed.engine.quota import Account
from jaxembed.errors import Overloaded, RequestTooLarge, ShuttingDown

LONGEST_RETRY_S = 60
LARGEST = 16  # one request may have at most this many times the limit of tokens
SMALL = 64  # a small request has at most 1/SMALL of each limit
RESERVE = 8  # 1/RESERVE is for small requests: beyond other limits, within that of bytes

Limit = Literal["inputs", "tokens", "bytes"]


class Cost(NamedTuple):
    """The inputs, tokens and bytes of a request, or of a part of it, until it is answered.

    Before the request is tokenized `tokens` is estimated from its characters, and `bytes` with it;
    `Permit.correct` replaces them. The bytes of its body and of its finished answer are not
    included: `Held.charge` counts them.
    """

    inputs: int
    tokens: int
    bytes: int = 0


class Held:
    """The bytes of memory that one request holds until it is closed: its body, its texts and
    tokens, its answer until that is sent. `entered` is set once a model has admitted a part of it.
    `account` counts what it uses, for its key or a log; None if nobody asks.
    """

    def __init__(self, capacity: "Capacity"):
        self.bytes = 0
        self.entered = False
        self.account: Account | None = None
        self._capacity = capacity

    def charge(self, count: int) -> None:
        """Count `count` more bytes for the request; a negative `count` gives bytes back.

        Call it before the memory is allocated. Raises RequestTooLarge if the request has more bytes
        than one request may have, and Overloaded if all requests together would have too many; then
        nothing is counted.
        """
        capacity = self._capacity
        with capacity.lock:
            wanted = self.bytes + count
            if count > 0:
                # the last part is for small requests
                open_to_all = capacity.max_bytes - capacity.max_bytes // RESERVE
                if wanted > open_to_all:
                    raise RequestTooLarge(
                        f"the request and its answer take {wanted} bytes of memory, a request may "
                        f"take {open_to_all}; send less at a time or raise --max-queue-bytes"
                    )
                is_small = wanted <= capacity.max_bytes // SMALL
                if capacity.bytes + count > (capacity.max_bytes if is_small else open_to_all):
                    capacity.refused["bytes"] += 1
                    raise Overloaded(
                        f"Server is overloaded: requests hold {capacity.bytes} bytes of memory, "
                        f"the limit is {capacity.max_bytes} (--max-queue-bytes)",
                        capacity.retry_after_s,
                    )
            self.bytes = wanted
            capacity.bytes += count

    def cover(self, count: int) -> None:
        """Count more bytes until the request has at least `count` in total. Raises as `charge`."""
        if count > self.bytes:
            self.charge(count - self.bytes)

    def close(self) -> None:
        """Give all bytes of the request back: it is answered, or nobody waits for it."""
        with self._capacity.lock:
            self._capacity.bytes -= self.bytes
            self.bytes = 0


class Capacity:
    """The limits of one process. All its models share them, because they share its devices.

    Without `max_tokens` the limit is the sum of the models' shares. A model may exceed the limits
    up to its own share of them: devices serve models in turn however much work the others have, so
    many requests to one model must not block requests to another. `bytes` never exceeds
    `max_bytes`.
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
        self.small_inputs = self.small_tokens = 0  # of small requests
        self.refused: Counter[Limit] = Counter()  # requests, by the limit that had no room
        self.doors: list[Admission] = []
        self.lock = threading.RLock()
        self.sums_shares = not max_tokens  # whether `max_tokens` is the sum of the models' shares

    def request(self) -> AbstractContextManager[Held]:
        """The memory that one request holds, given back at the end of the block."""
        return closing(Held(self))

    @property
    def retry_after_s(self) -> int:
        """The estimated seconds until half of the waiting work is done, from 1 to LONGEST_RETRY_S.

        The work of models without a measured rate is not counted."""
        rates = [(door.tokens, door.tokens_per_s()) for door in self.doors]
        wait_s = sum((tokens / rate for tokens, rate in rates if rate > 0), 0.0)
        return min(max(math.ceil(wait_s / 2), 1), LONGEST_RETRY_S)


def capacity_of(config: EngineConfig) -> Capacity:
    """The capacity that the settings ask for."""
    return Capacity(config.max_concurrent_requests, config.max_queue_tokens, config.max_queue_bytes)


class Admission:
    """Counts the inputs and tokens that are admitted to one model and not yet answered.

    A request is admitted while each count is below the capacity's limit or the model's share of it,
    even if it alone exceeds them, so that requests of all sizes are served; small requests have a
    reserve beyond the limits. So all models together hold at most the limit, the shares of all
    but one, the reserve, and one request each of at most LARGEST times the limit of tokens. Before
    tokenizing, the cost of a request is an estimate; `Permit.correct` corrects it. `share` is the
    number of tokens that the model adds to the limit of a capacity without `max_tokens`.
    """

    def __init__(self, capacity: Capacity, share: int, tokens_per_s: Callable[[], float]):
        self.capacity = capacity
        self.share = share
        self.tokens_per_s = tokens_per_s
        self.inputs = 0
        self.tokens = 0
        self.draining = False
        self._closed = False
        with capacity.lock:
            capacity.doors.append(self)
            if capacity.sums_shares:
                capacity.max_tokens += share

    def admit(self, cost: Cost, held: Held | None = None, *, is_run: bool = True) -> "Permit":
        """Admit a request of this cost. Without `is_run` no model runs it, and its tokens are not
        charged to the account of the request.

        With `held` it is a part of the request that `held` belongs to: once the first part is
        admitted, a full limit of inputs or tokens does not refuse the others, and the bytes of all
        parts are counted until `held` is closed. Raises Overloaded if a limit is reached,
        ShuttingDown after `drain`, RequestTooLarge if it could never be admitted, and what
        `Quota.check` does; then nothing is counted.
        """
        capacity, is_own = self.capacity, held is None
        held = held or Held(capacity)
        with capacity.lock:
            if self.draining:
                raise ShuttingDown("the server is shutting down", retry_after_s=5)
            if cost.tokens > LARGEST * capacity.max_tokens:
                raise RequestTooLarge(
                    f"the request holds about {cost.tokens} tokens, a request may hold "
                    f"{LARGEST * capacity.max_tokens}; send less at a time or raise "
                    "--max-queue-tokens"
                )
            if held.account is not None and held.account.quota is not None:
                tokens = cost.tokens if is_run else 0
                held.account.quota.check(cost.inputs, tokens, held.account)
            # the reserve, closed to large requests, may have room for a small one
            is_small = (
                cost.inputs * SMALL <= capacity.max_inputs
                and cost.tokens * SMALL <= capacity.max_tokens
            )
            in_reserve = (
                is_small
                and (capacity.small_inputs + cost.inputs) * RESERVE <= capacity.max_inputs
                and (capacity.small_tokens + cost.tokens) * RESERVE <= capacity.max_tokens
            )
            # A limit is full for a model that has used its share of it, too: an equal part, or of
            # tokens without a set limit its own share.
            full: Limit | None = None
            models = len(capacity.doors)
            tokens_share = self.share if capacity.sums_shares else capacity.max_tokens / models
            if capacity.tokens >= capacity.max_tokens and self.tokens >= tokens_share:
                full = "tokens"
            elif (
                capacity.inputs >= capacity.max_inputs
                and self.inputs >= capacity.max_inputs / models
            ):
                full = "inputs"
            if full is not None and not held.entered and not in_reserve:
                capacity.refused[full] += 1
                raise Overloaded(
                    f"Model is overloaded: {capacity.inputs} inputs and about {capacity.tokens} "
                    f"tokens wait, the limits are {capacity.max_inputs} "
                    f"(--max-concurrent-requests) and {capacity.max_tokens} (--max-queue-tokens)",
                    capacity.retry_after_s,
                )
            held.charge(cost.bytes)
            held.entered = True
            permit = Permit(self, held, is_own=is_own, is_run=is_run, in_reserve=in_reserve)
            if held.account is not None:
                held.account.entered = True
                held.account.inputs += cost.inputs
            permit._count(cost)
        return permit

    def drain(self) -> None:
        """Admit nothing more to this model."""
        with self.capacity.lock:
            self.draining = True

    def close(self) -> None:
        """Admit nothing more, and remove the model's share once every permit is released."""
        with self.capacity.lock:
            self.draining = self._closed = True
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        capacity = self.capacity
        if self._closed and not self.inputs and not self.tokens and self in capacity.doors:
            capacity.doors.remove(self)
            if capacity.sums_shares:
                capacity.max_tokens -= self.share


class Permit:
    """The admission of one request, or of one part of it, to a model until it is released."""

    def __init__(
        self, admission: Admission, held: Held, *, is_own: bool, is_run: bool, in_reserve: bool
    ):
        """With `is_own` it is the whole request, and `release` gives the bytes of `held` back.
        Without `is_run` its tokens are not charged. `in_reserve` says whether it is small and the
        reserve had room for it."""
        self.held = held
        self._is_run = is_run
        self._admission = admission
        self._cost = Cost(0, 0)
        self._is_own = is_own
        self._in_reserve = in_reserve
        self._charged = 0  # tokens, to the account of the request

    def correct(self, cost: Cost) -> None:
        """Replace the estimated cost of the request by the true one. Raises as `Held.charge`."""
        with self._admission.capacity.lock:
            self.held.charge(cost.bytes - self._cost.bytes)
            self._count(cost)

    def settle(self, tokens: int) -> None:
        """Charge the request for the tokens that its answer says it had, and no others."""
        if self.held.account is not None:
            with self._admission.capacity.lock:
                self._charge(tokens, answered=tokens)

    def release(self) -> None:
        """Stop counting the request: it is answered, or nobody waits for it."""
        with self._admission.capacity.lock:
            self._count(Cost(0, 0), charges=False)
            if self._is_own:
                self.held.charge(-self.held.bytes)

    def _count(self, cost: Cost, *, charges: bool = True) -> None:
        """Replace the cost counted so far by this one. With `charges` its tokens also replace those
        charged so far."""
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
        """Replace the tokens charged so far by these, and count more inputs that wait and more
        tokens that were answered."""
        if self.held.account is not None:
            more = tokens - self._charged if self._is_run else 0
            self._charged += more
            self.held.account.use(waiting=waiting, charged=more, answered=answered)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the permit. A request that failed is charged nothing; one whose client went away
        keeps what it was charged."""
        if isinstance(error, Exception):
            with self._admission.capacity.lock:
                self._charge(0)
        self.release()
