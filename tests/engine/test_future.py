"""A future completes once, whoever fills it."""

import numpy as np
import pytest

from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.future import WorkFuture
from jaxembed.errors import BackendError, Cancelled, NotFinite


def future_of(lengths, outputs=frozenset({"dense"}), spans=None) -> tuple[WorkFuture, list[int]]:
    """A future, and a list that grows by one each time it wakes its waiter."""
    woken: list[int] = []
    encodings = [Encoding(np.ones(n, np.int32), spans=spans) for n in lengths]
    work = work_from_encodings(encodings, outputs)
    return WorkFuture(work, {"dense": 2, "tokens": 4}, lambda: woken.append(1)), woken


def rows(*values: float) -> np.ndarray:
    return np.array([[value, value] for value in values], np.float32)


def test_a_ticket_wakes_once_when_the_last_answer_is_in():
    future, woken = future_of([1, 1, 1])
    future.answer([2, 0], {"dense": rows(2, 0)})
    assert woken == []
    with pytest.raises(TimeoutError, match=r"no answer within 0\.0 s"):
        future.result(timeout_s=0.0)
    future.answer([1], {"dense": rows(1), "tokens": [np.ones((1, 4), np.float32)]})  # of others
    assert woken == [1]
    assert future.result(timeout_s=0.0).keys() == {"dense"}
    np.testing.assert_array_equal(future.result(timeout_s=0.0)["dense"], rows(0, 1, 2))


def test_arrays_of_tokens_are_copied_out_of_the_bucket():
    hidden = [np.ones((3, 4), np.float32), np.full((2, 4), 2.0, np.float32)]
    future, _ = future_of([2, 3], frozenset({"tokens"}))
    future.answer([1, 0], {"tokens": hidden})
    tokens = future.result(timeout_s=0.0)["tokens"]
    assert len(tokens) == 2
    for got, wanted in zip(tokens, hidden[::-1], strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert not np.shares_memory(got, wanted)


def test_the_spans_of_a_sequence_are_answered_together():
    future, woken = future_of([4, 4, 4], spans=((0, 2), (1, 4)))
    future.answer([2], {"dense": rows(4, 5)})
    future.answer([1, 0], {"dense": rows(2, 3, 0, 1)})
    assert woken == [1]
    np.testing.assert_array_equal(future.result(timeout_s=0.0)["dense"], rows(0, 1, 2, 3, 4, 5))


def test_the_first_failure_in_input_order_is_raised_when_all_are_settled():
    future, woken = future_of([1, 1, 1, 1])
    future.fail([3], BackendError("late"))
    future.fail([1, 2], NotFinite("first"))
    assert woken == []
    future.answer([0], {"dense": rows(0)})
    assert woken == [1]
    with pytest.raises(NotFinite, match="first"):
        future.result()


def test_a_cancelled_ticket_is_never_woken_and_raises():
    future, woken = future_of([1, 1])
    assert future.cancel()
    assert not future.cancel()
    future.answer([0, 1], {"dense": rows(0, 1)})
    assert woken == []
    with pytest.raises(Cancelled):
        future.result(timeout_s=0.0)


def test_cancelling_after_completion_changes_nothing():
    future, woken = future_of([1])
    future.answer([0], {"dense": rows(4)})
    assert not future.cancel()
    assert woken == [1]
    np.testing.assert_array_equal(future.result()["dense"], rows(4))
