"""What buckets cost: the median of their timings, an estimate, and one factor for all; and the
file that keeps them by all that they depend on."""

import json

import pytest

from jaxembed.engine.autotune import costs as costs_module
from jaxembed.engine.autotune.cost_file import CostFile
from jaxembed.engine.autotune.costs import (
    LATEST,
    LONG_RUN_MS,
    MAX_DRIFT,
    MAX_FAILURES,
    TIMED_MS,
    BucketCosts,
    repeat_timings,
)
from jaxembed.engine.batch import HOST_MS
from jaxembed.engine.bucket import Bucket

TIMINGS = 25
SHORT, WIDE, LONG, HUGE = Bucket(1, 16), Bucket(8, 16), Bucket(1, 64), Bucket(8, 8192)


@pytest.fixture(autouse=True)
def _many_timings(monkeypatch):
    monkeypatch.setattr(costs_module, "TIMINGS", TIMINGS)


def costs_of(*buckets: Bucket, default_ms: float = 0.1, timings=None) -> BucketCosts:
    costs = BucketCosts(default_ms, timings)
    for bucket in buckets:
        costs.add(bucket)
    return costs


def test_a_bucket_costs_the_median_of_its_latest_timings():
    """The best of them would flatter the one that happened to run in a quiet moment."""
    costs = costs_of(SHORT)
    for ms in (7.0, 1.0, 5.0, 9.0, 5.0):
        costs.record(SHORT, ms)
    assert costs.usable == {SHORT: 5.0}
    for _ in range(TIMINGS):
        costs.record(SHORT, 8.0)
    assert costs.usable == {SHORT: 8.0}
    assert costs.timings == {SHORT: [8.0] * TIMINGS}


def test_what_was_not_timed_is_estimated_from_those_of_its_length_first():
    costs = costs_of(SHORT, WIDE, LONG)
    before = costs.usable
    assert before == pytest.approx({SHORT: 1.6, WIDE: 12.8, LONG: 6.4})
    costs.record(LONG, 64.0)
    assert costs.usable == pytest.approx({SHORT: 16.0, WIDE: 128.0, LONG: 64.0})
    costs.record(SHORT, 3.2)
    assert costs.usable == pytest.approx({SHORT: 3.2, WIDE: 25.6, LONG: 64.0})
    costs.restrict([LONG])
    assert set(costs.usable) == {LONG}
    assert set(before) == {SHORT, WIDE, LONG}  # whoever looks at it is not disturbed


def test_a_bucket_that_would_run_long_is_estimated_for_good():
    """Timing 65,536 tokens of a large model on a CPU would hold up everything for minutes."""
    costs = costs_of(SHORT, HUGE, timings={SHORT: repeat_timings([1.6])})
    assert costs.usable[HUGE] == pytest.approx(2 * 0.1 * HUGE.tokens)
    assert costs.usable[HUGE] > LONG_RUN_MS
    assert costs.untimed() is None


def test_a_bucket_that_fails_comes_after_the_others_and_is_given_up_in_the_end():
    costs = costs_of(SHORT, LONG)
    costs.fail(SHORT)
    for _ in range(TIMINGS):
        assert costs.untimed() == LONG
        costs.record(LONG, 12.8)
    for _ in range(MAX_FAILURES - 1):
        assert costs.untimed() == SHORT
        costs.fail(SHORT)
    assert costs.untimed() is None
    assert costs.usable == pytest.approx({SHORT: 3.2, LONG: 12.8})


def test_the_bucket_with_the_fewest_timings_is_next_and_of_these_the_smallest():
    costs, order = costs_of(WIDE, SHORT, LONG), []
    for _ in range(5):
        order.append(costs.untimed())
        costs.record(order[-1], 1.0)
    assert order == [SHORT, LONG, WIDE, SHORT, LONG]
    while (bucket := costs.untimed()) is not None:  # a slow one less often
        costs.record(bucket, 1.0 if bucket != WIDE else TIMED_MS / 4)
    counts = {bucket: len(ms) for bucket, ms in costs.timings.items()}
    assert (counts[SHORT], counts[LONG]) == (TIMINGS, TIMINGS)
    assert counts[WIDE] < 8


def test_batches_give_one_factor_for_all_and_none_for_a_bucket():
    costs = costs_of(SHORT, LONG, timings={SHORT: [2.0], LONG: [8.0]})
    for _ in range(200):
        costs.observe(SHORT, 6.0 + HOST_MS, HOST_MS)
    assert costs.drift == pytest.approx(3.0, rel=0.03)
    assert costs.usable == pytest.approx({SHORT: 6.0, LONG: 24.0}, rel=0.03)
    for _ in range(200):
        costs.observe(LONG, 8.0 + HOST_MS, HOST_MS)
    assert costs.usable == pytest.approx({SHORT: 2.0, LONG: 8.0}, rel=0.03)
    assert costs.timings == {SHORT: [2.0], LONG: [8.0]}


def test_the_host_time_of_a_batch_is_measured():
    costs = costs_of(SHORT, timings={SHORT: [2.0]})
    assert costs.host_ms == HOST_MS
    for _ in range(400):
        costs.observe(SHORT, 2.1, 0.1)
    assert costs.host_ms == pytest.approx(0.1, rel=0.03)
    assert costs.drift == 1.0


def test_a_batch_that_nearly_hung_is_soon_forgotten():
    costs = costs_of(SHORT, timings={SHORT: [2.0]})
    costs.observe(SHORT, 20.0 + HOST_MS, HOST_MS)
    assert 1.0 < costs.drift < 2.0  # one odd batch at the start
    for took_ms in [2.0] * 50 + [59_000.0] + [2.0] * 50:
        costs.observe(SHORT, took_ms + HOST_MS, HOST_MS)
    assert costs.drift < 1.1


@pytest.mark.parametrize(("took_ms", "factor"), [(1e6, MAX_DRIFT), (0.0, 1 / MAX_DRIFT)])
def test_the_factor_stays_within_its_bounds(took_ms, factor):
    costs = costs_of(SHORT, timings={SHORT: [2.0]})
    for _ in range(500):
        costs.observe(SHORT, took_ms, HOST_MS)
    assert costs.drift == pytest.approx(factor, rel=0.03)


def test_timings_that_other_programs_disturbed_count_in_this_run_only(monkeypatch):
    monkeypatch.setattr(costs_module, "MAX_WAITED", 1 / 3)
    costs = costs_of(SHORT, WIDE, LONG, timings={SHORT: [2.0]})
    costs.record(SHORT, 20.0, lost_share=0.9)
    costs.record(SHORT, 3.0, lost_share=0.1)
    costs.record(LONG, 80.0, lost_share=0.9)
    assert (costs.usable[SHORT], costs.usable[LONG]) == (3.0, 80.0)
    assert [costs.source_of(bucket) for bucket in (LONG, WIDE)] == ["timed", "assumed"]
    assert costs.timings == {SHORT: [2.0, 3.0]}
    kept = costs_of(SHORT, timings={SHORT: repeat_timings([2.0])})
    assert kept.source_of(SHORT) == "kept"
    for _ in range(TIMINGS):
        kept.record(SHORT, 20.0, lost_share=0.9)
    assert kept.usable == {SHORT: 20.0}
    assert kept.timings == {SHORT: [2.0] * TIMINGS}


def test_the_share_that_others_had_is_that_of_the_latest_timings():
    costs = costs_of(SHORT)
    assert costs.lost_share == 0.0
    for lost_share in (0.1, 0.9, 0.2):
        costs.record(SHORT, 1.0, lost_share)
    assert costs.lost_share == 0.2
    for _ in range(LATEST):
        costs.record(SHORT, 1.0, 0.5)
    assert costs.lost_share == 0.5


KEPT = {SHORT: [1.25, 1.5], LONG: [4.0]}
IDENTITY = {"content_hash": "a", "dtype": "float32", "versions": {"jax": "1"}}


def file_in(folder, kernel: str = "xla", **changes) -> CostFile:
    return CostFile(folder, IDENTITY | changes, lambda bucket: kernel)


def test_what_was_saved_is_loaded(tmp_path):
    file_in(tmp_path).save(KEPT)
    assert file_in(tmp_path).load() == KEPT
    (path,) = (tmp_path / "costs").iterdir()
    assert json.loads(path.read_text())["identity"] == IDENTITY


def test_another_model_or_version_or_kernel_has_other_costs(tmp_path):
    file_in(tmp_path).save(KEPT)
    assert file_in(tmp_path, content_hash="b").load() == {}
    assert file_in(tmp_path, versions={"jax": "2"}).load() == {}
    assert file_in(tmp_path, kernel="native").load() == {}
    mixed = CostFile(tmp_path, IDENTITY, lambda b: "xla" if b == SHORT else "triton")
    assert mixed.load() == {SHORT: KEPT[SHORT]}


DAMAGED = ["", "[1]", "{}", '{"timings": 5}', '{"timings": {"1x16": [1.0]}}']
DAMAGED += [f'{{"timings": {{"1x16 xla": {of}}}}}' for of in ("[]", "[0]", '["fast"]', "[NaN]", 3)]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_ignored_and_told_of(tmp_path, caplog, text):
    file_in(tmp_path).save(KEPT)
    (path,) = (tmp_path / "costs").iterdir()
    path.write_text(text)
    assert file_in(tmp_path).load() == {}
    assert f"{path} is ignored" in caplog.text


def test_where_nothing_can_be_written_the_log_says_so(tmp_path, caplog):
    (tmp_path / "costs").write_text("in the way")
    file_in(tmp_path).save(KEPT)
    assert "cannot save the timings" in caplog.text
