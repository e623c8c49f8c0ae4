"""What may enter, and when to come back."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from jaxembed.engine.admission import (
    LONGEST_RETRY_S,
    MAX_LIMITS_PER_REQUEST,
    Admission,
    Capacity,
    Cost,
)
from jaxembed.errors import Overloaded, RequestTooLarge, ShuttingDown


def admission_of(inputs=10, tokens=100, rate=0.0, **limits) -> Admission:
    return Admission(Capacity(inputs, tokens, **limits), 0, lambda: rate)


@pytest.mark.parametrize(("inputs", "tokens", "limit"), [(10, 1, "inputs"), (1, 100, "tokens")])
def test_what_is_refused_at_either_limit_is_told_both_and_leaves_nothing(inputs, tokens, limit):
    admission = admission_of(inputs=10, tokens=100)
    permit = admission.admit(Cost(inputs, tokens))
    for _ in range(2):
        with pytest.raises(Overloaded, match="--max-concurrent-requests") as raised:
            admission.admit(Cost(5, 50))
    assert "--max-queue-tokens" in str(raised.value)
    assert f"{inputs} inputs and about {tokens} tokens" in str(raised.value)
    assert admission.capacity.refused == {limit: 2}
    permit.release()
    permit.release()  # counts once
    assert (admission.inputs, admission.tokens) == (0, 0)
    admission.admit(Cost(1, 1))


def test_the_parts_of_one_request_enter_together_or_not_at_all():
    admission = admission_of(inputs=2)
    with admission.capacity.request() as reservation:
        first, *others = [admission.admit(Cost(2, 2), reservation) for _ in range(3)]
    assert admission.inputs == 6
    with admission.capacity.request() as reservation, pytest.raises(Overloaded):
        admission.admit(Cost(1, 1), reservation)
    for permit in (first, *others):
        permit.release()
    admission.admit(Cost(2, 2))
    with pytest.raises(Overloaded):  # what came in as one request is over
        admission.admit(Cost(1, 1))


def test_a_request_that_could_never_end_in_time_is_refused_for_good():
    admission = admission_of(tokens=100)
    admission.admit(Cost(1, 100 * MAX_LIMITS_PER_REQUEST)).release()
    with pytest.raises(RequestTooLarge, match=r"1601 tokens.*1600.*--max-queue-tokens"):
        admission.admit(Cost(1, 100 * MAX_LIMITS_PER_REQUEST + 1))
    assert (admission.inputs, admission.tokens, admission.capacity.bytes) == (0, 0, 0)


def test_small_requests_enter_a_full_server_until_their_reserve_is_full():
    admission = admission_of(inputs=640, tokens=6400)
    admission.admit(Cost(10, 100_000))
    with pytest.raises(Overloaded):
        admission.admit(Cost(1, 101))  # more than a 64th
    small = [admission.admit(Cost(1, 100)) for _ in range(8)]  # an eighth
    with pytest.raises(Overloaded):
        admission.admit(Cost(1, 1))
    small[0].release()
    admission.admit(Cost(1, 100))


def test_bytes_are_held_until_the_request_is_answered_and_never_pass_their_limit():
    capacity = Capacity(10, 1000, max_bytes=8000)
    admission = Admission(capacity, 0, lambda: 0.0)
    with capacity.request() as reservation:
        reservation.charge(1000)
        with admission.admit(Cost(2, 100, 1100), reservation) as permit:
            assert capacity.bytes == reservation.bytes == 2100
            permit.correct(Cost(2, 80, 900))
            assert capacity.bytes == 1900
        assert capacity.bytes == 1900  # its answer is not sent yet
        reservation.cover(1500)
        assert capacity.bytes == 1900
        reservation.cover(2000)
        assert capacity.bytes == 2000
    assert capacity.bytes == 0


def test_what_finds_no_room_for_its_bytes_is_refused_and_leaves_nothing():
    capacity = Capacity(10, 1000, max_bytes=8000)
    admission = Admission(capacity, 0, lambda: 0.0)
    with capacity.request() as one, capacity.request() as other:
        one.charge(6900)
        with pytest.raises(Overloaded, match=r"hold 6900 bytes.*8000 .--max-queue-bytes"):
            other.charge(200)
        with pytest.raises(Overloaded):
            admission.admit(Cost(1, 20, 200))
        assert (capacity.bytes, admission.inputs, admission.tokens) == (6900, 0, 0)
        assert capacity.refused == {"bytes": 2}
        with capacity.request() as small:
            small.charge(125)  # a 64th: the last part is for such


def test_what_could_never_be_held_is_refused_for_good():
    capacity = Capacity(10, 1000, max_bytes=8000)
    with capacity.request() as reservation:
        reservation.charge(7000)
        with pytest.raises(RequestTooLarge, match=r"need 7001 bytes.*7000.*--max-queue-bytes"):
            reservation.charge(1)
        assert capacity.bytes == 7000


def test_a_guess_that_was_too_low_is_refused_once_it_is_known():
    admission = admission_of(tokens=1000, max_bytes=8000)
    with admission.admit(Cost(1, 10, 1000)) as permit, pytest.raises(RequestTooLarge):
        permit.correct(Cost(1, 100, 10_000))
    assert (admission.capacity.bytes, admission.tokens, admission.inputs) == (0, 0, 0)


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        (0.0, 1),  # nothing measured yet
        (1e9, 1),
        (50.0, 10),  # half of 1000 tokens
        (33.0, 16),  # rounded up
        (1e-3, LONGEST_RETRY_S),
    ],
)
def test_retry_after_is_the_time_for_half_of_what_waits_within_bounds(rate, seconds):
    admission = admission_of(tokens=1000, rate=rate)
    admission.admit(Cost(1, 1000))
    with pytest.raises(Overloaded) as raised:
        admission.admit(Cost(1, 1))
    assert raised.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("max_tokens", "room"),
    [
        (100, [50, 50]),  # a limit by flag, in equal parts
        (None, [80, 20]),  # what each model brings
    ],
)
def test_a_flood_of_one_model_leaves_the_other_its_share(max_tokens, room):
    for flooded, calm in ((0, 1), (1, 0)):
        capacity = Capacity(100, max_tokens)
        admissions = [Admission(capacity, share, lambda: 0.0) for share in (80, 20)]
        admissions[flooded].admit(Cost(5, 100))
        with pytest.raises(Overloaded):
            admissions[flooded].admit(Cost(2, 2))  # too large for the reserve
        admissions[calm].admit(Cost(1, room[calm] - 1))
        admissions[calm].admit(Cost(1, 1))
        with pytest.raises(Overloaded, match="--max-queue-tokens"):
            admissions[calm].admit(Cost(2, 2))


@pytest.mark.parametrize("models", [1, 2, 5])
def test_all_models_together_hold_the_limit_and_the_shares_of_all_but_one_at_most(models):
    limit, largest, draw = 60, 4, np.random.default_rng(models)
    capacity = Capacity(limit, 10**6)
    admissions = [Admission(capacity, 0, lambda: 0.0) for _ in range(models)]
    reservation, most = [], 0
    for _ in range(2000):
        admission = admissions[draw.integers(models) if draw.random() < 0.5 else 0]
        try:
            reservation.append(admission.admit(Cost(int(draw.integers(1, largest + 1)), 1)))
        except Overloaded:
            if reservation and draw.random() < 0.3:
                reservation.pop(draw.integers(len(reservation))).release()
        most = max(most, capacity.inputs)
    assert limit <= most <= limit + (models - 1) * limit / models + models * largest


def test_a_closed_model_takes_its_share_away_when_its_last_request_is_released():
    capacity = Capacity(max_inputs=10)
    Admission(capacity, 50, lambda: 0.0)
    admission = Admission(capacity, 100, lambda: 0.0)
    permit = admission.admit(Cost(1, 10))
    admission.close()
    with pytest.raises(ShuttingDown):
        admission.admit(Cost(1, 1))
    assert (capacity.inputs, capacity.max_tokens) == (1, 150)
    permit.release()
    admission.close()  # a second time changes nothing
    assert (capacity.inputs, capacity.max_tokens) == (0, 50)


def test_retry_after_adds_up_the_work_of_all_models():
    capacity = Capacity(max_inputs=10, max_tokens=1000)
    quick, slow = (Admission(capacity, 0, lambda rate=rate: rate) for rate in (100.0, 10.0))
    quick.admit(Cost(1, 800))  # 8 s of work
    slow.admit(Cost(1, 200))  # 20 s
    with pytest.raises(Overloaded) as raised:
        quick.admit(Cost(1, 1))
    assert raised.value.retry_after_s == 14


def test_draining_one_model_leaves_the_other_open():
    capacity = Capacity(10, 100)
    one, other = (Admission(capacity, 0, lambda: 0.0) for _ in range(2))
    one.drain()
    other.admit(Cost(1, 1))
    with pytest.raises(ShuttingDown) as raised:
        one.admit(Cost(1, 1))
    assert raised.value.retry_after_s > 0


def test_many_threads_leave_the_counts_at_zero():
    admission = admission_of(inputs=4, tokens=10**9)
    barrier = threading.Barrier(8)

    def work(_: int) -> None:
        barrier.wait()
        for _ in range(100):
            with suppress(Overloaded), admission.admit(Cost(1, 10)) as permit:
                permit.correct(Cost(1, 7))
                assert admission.inputs <= 4

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert (admission.inputs, admission.tokens) == (0, 0)
