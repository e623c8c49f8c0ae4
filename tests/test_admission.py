"""What may enter, and when to come back."""

import threading

import pytest

from jaxembed.engine.admission import LONGEST_RETRY_S, Admission, Capacity
from jaxembed.errors import Overloaded, ShuttingDown


def admission(inputs=10, tokens=100, rate=0.0) -> Admission:
    return Admission(Capacity(inputs, tokens), 0, lambda: rate)


def test_a_request_enters_below_the_limits_even_if_it_alone_overshoots_them():
    door = admission(inputs=2, tokens=100)
    with door.admit(1, 10), door.admit(50, 5000):
        assert (door.inputs, door.tokens) == (51, 5010)
        with pytest.raises(Overloaded):
            door.admit(1, 1)


@pytest.mark.parametrize(("inputs", "tokens"), [(10, 1), (1, 100)])
def test_a_request_is_refused_at_either_limit_and_told_both(inputs, tokens):
    door = admission(inputs=10, tokens=100)
    door.admit(inputs, tokens)
    with pytest.raises(Overloaded, match="--max-concurrent-requests") as raised:
        door.admit(1, 1)
    assert "--max-queue-tokens" in str(raised.value)
    assert f"{inputs} inputs and about {tokens} tokens" in str(raised.value)


def test_a_refused_request_leaves_nothing_behind():
    door = admission(inputs=1)
    permit = door.admit(1, 1)
    for _ in range(3):
        with pytest.raises(Overloaded):
            door.admit(7, 7)
    permit.release()
    assert (door.inputs, door.tokens) == (0, 0)


def test_release_makes_room():
    door = admission(inputs=1)
    door.admit(1, 1).release()
    door.admit(1, 1)


def test_a_permit_is_released_when_its_request_fails():
    door = admission()
    with pytest.raises(ValueError, match="request"), door.admit(3, 30):
        raise ValueError("request")
    assert (door.inputs, door.tokens) == (0, 0)


def test_releasing_twice_counts_once():
    door = admission()
    permit, other = door.admit(1, 10), door.admit(2, 20)
    permit.release()
    permit.release()
    assert (door.inputs, door.tokens) == (2, 20)
    other.release()
    assert (door.inputs, door.tokens) == (0, 0)


def test_correct_replaces_the_guess_and_release_takes_the_corrected_count():
    door = admission(tokens=100)
    permit, other = door.admit(1, 99), door.admit(1, 5)
    permit.correct(20)
    assert door.tokens == 25
    permit.correct(30)
    assert door.tokens == 35
    permit.release()
    assert (door.inputs, door.tokens) == (1, 5)
    other.release()
    assert (door.inputs, door.tokens) == (0, 0)
    assert (door.inputs, door.tokens) == (0, 0)


def test_draining_admits_nothing_more():
    door = admission()
    permit = door.admit(1, 1)
    door.drain()
    assert door.draining
    with pytest.raises(ShuttingDown) as raised:
        door.admit(1, 1)
    assert raised.value.retry_after_s > 0
    permit.release()


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
    door = admission(tokens=1000, rate=rate)
    door.admit(1, 1000)
    with pytest.raises(Overloaded) as raised:
        door.admit(1, 1)
    assert raised.value.retry_after_s == seconds


def test_models_of_one_capacity_share_its_limits():
    capacity = Capacity(max_inputs=3, max_tokens=100)
    one, other = (Admission(capacity, 0, lambda: 0.0) for _ in range(2))
    permit = one.admit(2, 20)
    other.admit(1, 30)
    assert (capacity.inputs, capacity.tokens) == (3, 50)
    assert (one.inputs, other.inputs) == (2, 1)
    for door in (one, other):
        with pytest.raises(Overloaded, match="3 inputs and about 50 tokens wait, the limits are 3"):
            door.admit(1, 1)
    permit.release()
    other.admit(1, 1)


def test_without_a_limit_on_tokens_each_model_brings_its_share():
    capacity = Capacity(max_inputs=10)
    Admission(capacity, 100, lambda: 0.0)
    assert capacity.max_tokens == 100
    Admission(capacity, 50, lambda: 0.0)
    assert capacity.max_tokens == 150
    assert Capacity(10, 7).max_tokens == 7


def test_retry_after_adds_up_the_work_of_all_models():
    capacity = Capacity(max_inputs=10, max_tokens=1000)
    quick, slow = (Admission(capacity, 0, lambda rate=rate: rate) for rate in (100.0, 10.0))
    quick.admit(1, 800)  # 8 s of work
    slow.admit(1, 200)  # 20 s
    with pytest.raises(Overloaded) as raised:
        quick.admit(1, 1)
    assert raised.value.retry_after_s == 14


def test_draining_one_model_leaves_the_other_open():
    capacity = Capacity(10, 100)
    one, other = (Admission(capacity, 0, lambda: 0.0) for _ in range(2))
    one.drain()
    other.admit(1, 1)
    with pytest.raises(ShuttingDown):
        one.admit(1, 1)


def test_many_threads_leave_the_counts_at_zero():
    door = admission(inputs=4, tokens=10**9)
    barrier = threading.Barrier(8)
    refused: list[int] = []

    def work() -> None:
        barrier.wait()
        for _ in range(100):
            try:
                with door.admit(1, 10) as permit:
                    permit.correct(7)
                    assert door.inputs <= 4
            except Overloaded:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (door.inputs, door.tokens) == (0, 0)
