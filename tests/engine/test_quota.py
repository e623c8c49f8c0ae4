"""Quotas of keys: buckets that a minute fills, a share of admission, and what a request charges."""

import pytest
from fakes import Clock

from jaxembed.engine.admission import Admission, Capacity, Cost
from jaxembed.engine.quota import Account, Limits, Quota
from jaxembed.errors import Overloaded, QuotaExceeded, RequestTooLarge


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


def quota_of(clock: Clock, **limits: int) -> Quota:
    return Quota("batch", Limits(**limits), clock)


def admission_of(inputs: int = 1000, tokens: int = 100_000) -> Admission:
    return Admission(Capacity(inputs, tokens), 0, lambda: 0.0)


def remaining(quota: Quota) -> dict[str, int]:
    return {state.kind: state.remaining for state in quota.states()}


def test_requests_beyond_those_of_a_minute_wait_for_the_next_one_to_come_in(clock):
    quota = quota_of(clock, requests_per_minute=4)
    for _ in range(4):
        quota.count_request()
    with pytest.raises(QuotaExceeded, match="`batch` has used its 4 requests per") as refused:
        quota.count_request()
    assert refused.value.retry_after_s == 15
    clock.now += 14.9
    with pytest.raises(QuotaExceeded):
        quota.count_request()
    clock.now += 0.2
    quota.count_request()
    assert (quota.requests, quota.refused["requests"]) == (5, 2)


def test_a_bucket_never_holds_more_than_a_minute(clock):
    quota = quota_of(clock, requests_per_minute=3, tokens_per_minute=600)
    clock.now += 10_000
    (requests, tokens) = quota.states()
    assert (requests.remaining, tokens.remaining, tokens.limit, tokens.reset_s) == (3, 600, 600, 0)
    quota.use(charged=100)
    assert quota.states()[1].reset_s == pytest.approx(10)


def test_tokens_are_charged_by_estimate_then_by_what_is_run_then_by_the_answer(clock):
    quota, admission = quota_of(clock, tokens_per_minute=1000), admission_of()
    with admission.capacity.request() as reservation:
        reservation.account = Account(quota)
        with admission.admit(Cost(1, 400), reservation) as permit:
            assert remaining(quota) == {"tokens": 600}
            permit.correct(Cost(1, 300))
            assert remaining(quota) == {"tokens": 700}
            permit.charge_answer(250)
        assert remaining(quota) == {"tokens": 750}
        account = reservation.account
        assert (account.inputs, account.tokens, quota.tokens) == (1, 250, 250)


def test_an_estimate_that_was_too_small_is_paid_back_by_later_requests(clock):
    quota, admission = quota_of(clock, tokens_per_minute=600), admission_of()
    with ask(admission, quota, Cost(1, 500)) as permit:
        permit.charge_answer(1200)
    assert remaining(quota) == {"tokens": 0}
    with pytest.raises(QuotaExceeded, match="600 tokens per minute") as refused:
        ask(admission, quota, Cost(1, 100))
    assert refused.value.retry_after_s == 70  # 600 of debt, then 100
    clock.now += 70
    ask(admission, quota, Cost(1, 100)).release()


def test_a_request_with_more_tokens_than_a_minute_has_is_refused_for_good(clock):
    quota, admission = quota_of(clock, tokens_per_minute=1000), admission_of()
    with pytest.raises(RequestTooLarge, match=r"about 1001 tokens.*`batch`.*1000 .tokens_per_mi"):
        ask(admission, quota, Cost(1, 1001))
    assert remaining(quota) == {"tokens": 1000}
    ask(admission, quota, Cost(1, 1000))


def test_what_failed_is_not_charged_and_what_its_client_left_is(clock):
    class Gone(BaseException):
        """A cancelled task."""

    quota, admission = quota_of(clock, tokens_per_minute=1000), admission_of()
    with pytest.raises(ValueError, match="x"), ask(admission, quota, Cost(1, 400)):
        raise ValueError("x")
    assert remaining(quota) == {"tokens": 1000}
    with pytest.raises(Gone), ask(admission, quota, Cost(1, 400)):
        raise Gone
    assert remaining(quota) == {"tokens": 600}
    assert quota.waiting == 0


def test_inputs_that_wait_are_a_share_given_back_in_every_way(clock):
    quota, admission = quota_of(clock, max_inputs_waiting=5), admission_of()
    permit = ask(admission, quota, Cost(3, 1))
    with pytest.raises(QuotaExceeded, match="has 3 waiting inputs, and 3 more would") as refused:
        ask(admission, quota, Cost(3, 1))
    assert refused.value.retry_after_s == 1
    other = ask(admission, quota, Cost(2, 1))
    permit.correct(Cost(4, 1))  # windows
    assert quota.waiting == 6
    permit.release()
    permit.release()
    other.release()
    assert quota.waiting == 0
    with pytest.raises(RequestTooLarge, match=r"6 inputs.* is 5 .max_inputs_waiting"):
        ask(admission, quota, Cost(6, 1))
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), ask(admission, quota, Cost(5, 1)):
            raise error
        assert quota.waiting == 0


def test_what_the_server_has_no_room_for_is_neither_charged_nor_held(clock):
    quota = quota_of(clock, tokens_per_minute=1000, max_inputs_waiting=100)
    full = admission_of(inputs=1)
    full.admit(Cost(50, 1600))
    with pytest.raises(Overloaded, match="Model is overloaded"):
        ask(full, quota, Cost(2, 10))
    small = Admission(Capacity(10, 1000, max_bytes=8000), 0, lambda: 0.0)
    with pytest.raises(RequestTooLarge, match="max-queue-bytes"):
        ask(small, quota, Cost(1, 10, 7001))
    assert (remaining(quota), quota.waiting) == ({"tokens": 1000}, 0)


def test_later_parts_of_a_request_do_not_wait_but_all_of_them_are_within_the_limits(clock):
    quota = quota_of(clock, tokens_per_minute=1000, max_inputs_waiting=10)
    admission = admission_of()
    ask(admission, quota, Cost(1, 300)).charge_answer(300)
    with admission.capacity.request() as reservation:
        reservation.account = Account(quota)
        admission.admit(Cost(4, 500), reservation)
        admission.admit(Cost(4, 400), reservation)  # 200 more than there are
        with pytest.raises(RequestTooLarge, match="about 1001 tokens"):
            admission.admit(Cost(1, 101), reservation)
        with pytest.raises(RequestTooLarge, match="11 inputs"):
            admission.admit(Cost(3, 1), reservation)


def test_other_limits_keep_the_share_that_was_used(clock):
    quota = quota_of(clock, requests_per_minute=10, tokens_per_minute=1000)
    for _ in range(5):
        quota.count_request()
    quota.use(charged=1000)
    quota.change(Limits(requests_per_minute=100))
    assert remaining(quota) == {"requests": 50}
    quota.change(Limits(requests_per_minute=2, tokens_per_minute=60))
    assert remaining(quota) == {"requests": 1, "tokens": 60}


def test_without_limits_nothing_is_refused_and_what_was_used_is_counted():
    quota, admission = Quota("free", Limits()), admission_of()
    for _ in range(100):
        quota.count_request()
    ask(admission, quota, Cost(500, 90_000)).charge_answer(80_000)
    assert (quota.requests, quota.tokens, quota.states()) == (100, 80_000, [])


def ask(admission: Admission, quota: Quota, cost: Cost):
    with admission.capacity.request() as reservation:
        reservation.account = Account(quota)
        return admission.admit(cost, reservation)
