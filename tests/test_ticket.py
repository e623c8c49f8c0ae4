"""A ticket completes once, whoever fills it."""

import threading

import numpy as np
import pytest

from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError, Cancelled, NotFinite
from jaxembed.inputs import Encoding


def ticket_of(lengths, outputs=frozenset({"dense"})) -> tuple[Ticket, list[int]]:
    """A ticket, and a list that grows by one each time it wakes its waiter."""
    woken: list[int] = []
    encodings = [Encoding(np.ones(n, np.int32)) for n in lengths]
    return Ticket(encodings, 2, outputs, lambda: woken.append(1)), woken


def rows(*values: float) -> np.ndarray:
    return np.array([[value, value] for value in values], np.float32)


def test_a_ticket_counts_its_entries_and_tokens():
    ticket, _ = ticket_of([3, 5])
    assert ticket.tokens_in == 8
    assert [(e.length, e.claims) for e in ticket.entries] == [
        (3, {ticket: [0]}),
        (5, {ticket: [1]}),
    ]


def test_a_ticket_wakes_once_when_the_last_answer_is_in():
    ticket, woken = ticket_of([1, 1, 1])
    ticket.answer([2, 0], rows(2, 0), None)
    assert woken == []
    with pytest.raises(TimeoutError, match=r"no answer within 0\.0 s"):
        ticket.result(timeout_s=0.0)
    ticket.answer([1], rows(1), None)
    assert woken == [1]
    np.testing.assert_array_equal(ticket.result(timeout_s=0.0).dense, rows(0, 1, 2))


def test_token_answers_are_kept_only_where_asked_for():
    hidden = [np.ones((3, 4), np.float32)]
    with_tokens, _ = ticket_of([3], frozenset({"dense", "tokens"}))
    with_tokens.answer([0], rows(1), hidden)
    np.testing.assert_array_equal(with_tokens.tokens[0], hidden[0])
    assert with_tokens.tokens[0] is not hidden[0]  # which may be a view of a whole bucket's output
    without, _ = ticket_of([3])
    without.answer([0], rows(1), hidden)
    assert without.tokens == [None]


def test_the_first_failure_in_input_order_is_raised_when_all_are_settled():
    ticket, woken = ticket_of([1, 1, 1, 1])
    ticket.fail([3], BackendError("late"))
    ticket.fail([1, 2], NotFinite("first"))
    assert woken == []
    ticket.answer([0], rows(0), None)
    assert woken == [1]
    with pytest.raises(NotFinite, match="first"):
        ticket.result()


def test_a_cancelled_ticket_is_never_woken_and_raises():
    ticket, woken = ticket_of([1, 1])
    assert ticket.cancel()
    assert not ticket.cancel()
    ticket.answer([0, 1], rows(0, 1), None)
    assert woken == []
    with pytest.raises(Cancelled):
        ticket.result(timeout_s=0.0)


def test_cancelling_after_completion_changes_nothing():
    ticket, woken = ticket_of([1])
    ticket.answer([0], rows(4), None)
    assert not ticket.cancel()
    assert woken == [1]
    np.testing.assert_array_equal(ticket.result().dense, rows(4))


def test_answers_from_many_threads_complete_a_ticket_once():
    count, workers = 64, 4
    ticket, woken = ticket_of([1] * count)
    barrier = threading.Barrier(workers)

    def fill(k: int) -> None:
        barrier.wait()
        for i in range(k, count, workers):
            ticket.answer([i], rows(i), None)

    threads = [threading.Thread(target=fill, args=(k,)) for k in range(workers)]
    for thread in threads:
        thread.start()
    ticket.result(timeout_s=30.0)
    for thread in threads:
        thread.join()
    assert woken == [1]
    np.testing.assert_array_equal(ticket.dense, rows(*range(count)))


def test_a_waiter_in_another_thread_is_released():
    ticket, _ = ticket_of([1])
    seen: list[np.ndarray] = []
    waiter = threading.Thread(target=lambda: seen.append(ticket.result(timeout_s=30.0).dense))
    waiter.start()
    ticket.answer([0], rows(3), None)
    waiter.join(30)
    np.testing.assert_array_equal(seen[0], rows(3))
