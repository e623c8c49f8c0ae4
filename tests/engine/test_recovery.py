"""Only the guilty fail: halves where memory is short, alone where a result is not finite."""

import logging

import numpy as np
import pytest
from fakes import SumRunner, count_of, future_of

from jaxembed.data.work import Encoding
from jaxembed.engine.batch import place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import Answers, QueuedSequence
from jaxembed.engine.recovery import Recovery
from jaxembed.errors import BackendError, NotFinite
from jaxembed.observability.metrics import Telemetry

BUCKETS = [Bucket(1, 16), Bucket(2, 16), Bucket(4, 16), Bucket(8, 16), Bucket(1, 32)]
BAD, WORSE = SumRunner.BAD, SumRunner.WORSE


def entries_of(*ids: list[int], outputs=frozenset({"dense"})) -> list[QueuedSequence]:
    return future_of([Encoding(np.array(one, np.int32)) for one in ids], outputs).sequences


def by_entry(results: list[Answers], sequences: list[QueuedSequence]) -> list[float | Exception]:
    """The answer or the error of each sequence; every sequence has exactly one."""
    found: dict[QueuedSequence, list] = {sequence: [] for sequence in sequences}
    for answers in results:
        for k, sequence in enumerate(answers.sequences):
            found[sequence].append(
                answers.error if answers.error is not None else float(answers.values["dense"][k, 0])
            )
    assert all(len(answers) == 1 for answers in found.values())
    return [found[sequence][0] for sequence in sequences]


@pytest.fixture(name="telemetry")
def _telemetry() -> Telemetry:
    return Telemetry()


def recover(runner: SumRunner, telemetry: Telemetry, sequences, bucket, buckets=BUCKETS):
    batch = place(bucket, sequences)
    assert len(batch.sequences) == len(sequences)
    return Recovery(runner, lambda: buckets, telemetry).run(batch)


@pytest.mark.parametrize("max_tokens", [16, 32, 64])
def test_a_batch_too_large_for_memory_is_halved_until_it_fits(telemetry, max_tokens, caplog):
    sequences = entries_of(*[[k, 1000 + k] * 6 for k in range(8)])  # one of 12 tokens in each row
    runner = SumRunner(max_tokens)
    with caplog.at_level(logging.WARNING):
        results = recover(runner, telemetry, sequences, Bucket(8, 16))
    assert by_entry(results, sequences) == [6 * (1000 + 2 * k) for k in range(8)]
    fitting = [bucket for bucket in runner.ran if bucket.tokens <= max_tokens]
    assert {bucket.tokens for bucket in fitting} == {max_tokens}
    assert count_of(telemetry.split_batches) == len(runner.ran) - len(fitting)
    assert count_of(telemetry.failed_batches) == 0
    assert "it runs again in parts" in caplog.text
    runner, sequences = SumRunner(32), entries_of([1] * 20, [2] * 12)  # for one length of 32
    results = recover(runner, telemetry, sequences, Bucket(2, 32), [*BUCKETS, Bucket(2, 32)])
    assert by_entry(results, sequences) == [20, 24]
    assert set(runner.ran[1:]) == {Bucket(1, 32)}


def test_memory_short_on_the_smallest_bucket_fails_the_batch_clearly(telemetry):
    sequences = entries_of([1, 2])
    (error,) = by_entry(recover(SumRunner(1), telemetry, sequences, Bucket(1, 16)), sequences)
    assert isinstance(error, BackendError)
    assert not isinstance(error, NotFinite)
    assert count_of(telemetry.failed_batches) == 1


def test_any_other_failure_fails_its_batch_without_internals(telemetry, caplog):
    runner = SumRunner(error=RuntimeError("INTERNAL: stream 0x7f at /opt/secret/kernel.cu:42"))
    sequences = entries_of([1, 2], [3])
    with caplog.at_level(logging.ERROR):
        errors = by_entry(recover(runner, telemetry, sequences, Bucket(2, 16)), sequences)
    assert len(runner.ran) == 1  # not tried again
    for error in errors:
        assert isinstance(error, BackendError)
        assert not any(word in str(error) for word in ("INTERNAL", "secret", "0x7f"))
    reference = str(errors[0]).split("reference ")[1].rstrip(")")
    assert reference in caplog.text
    assert "secret" in caplog.text  # the log has it all
    assert count_of(telemetry.failed_batches) == 1


def test_a_sequence_that_is_not_finite_is_run_alone_and_only_it_is_refused(telemetry):
    sequences = entries_of([1, 2], [3, BAD], [4, 5])
    runner = SumRunner()
    first, second, third = by_entry(recover(runner, telemetry, sequences, Bucket(1, 16)), sequences)
    assert (first, third) == (3.0, 9.0)
    assert isinstance(second, NotFinite)
    assert str(second) == "the result is not finite, even when run alone"
    assert runner.ran == [Bucket(1, 16), Bucket(1, 16)]  # the batch, then the one alone
    assert count_of(telemetry.not_finite) == 1


def test_neighbours_poisoned_by_an_infinity_recover_alone(telemetry):
    sequences = entries_of([1, 2], [3, BAD], [4, 5], [6] * 16)
    runner = SumRunner(poison=True)
    answers = by_entry(recover(runner, telemetry, sequences, Bucket(2, 16)), sequences)
    assert answers[0] == 3.0
    assert isinstance(answers[1], NotFinite)
    assert answers[2:] == [9.0, 96.0]
    assert count_of(telemetry.not_finite) == 3  # the one in the other row was never in doubt


def test_the_float32_program_rescues_what_float16_cannot_hold(telemetry):
    sequences = entries_of([1], [2, BAD], [3, WORSE])
    runner = SumRunner(float32=Bucket(1, 32))
    answers = by_entry(recover(runner, telemetry, sequences, Bucket(1, 16)), sequences)
    assert answers[:2] == [1.0, 668.0]
    assert isinstance(answers[2], NotFinite)
    assert runner.wide_runs == 2


def test_token_vectors_that_are_not_finite_count_too(telemetry):
    class TokensRunner(SumRunner):
        def _sums(self, planes, slots, outputs, guilty):
            everything = super()._sums(planes, slots, outputs, guilty=())
            hidden = everything["tokens"]
            hidden[np.isin(hidden, guilty)] = np.nan
            return everything

    sequences = entries_of([1], [BAD, 2], outputs=frozenset({"dense", "tokens"}))
    answers = by_entry(recover(TokensRunner(), telemetry, sequences, Bucket(1, 16)), sequences)
    assert answers[0] == 1.0
    assert isinstance(answers[1], NotFinite)


def test_each_call_of_the_runner_is_announced_with_its_bucket(telemetry):
    """A watchdog counts from there: many sequences that run alone are not one call that hangs."""
    calls: list[Bucket] = []
    runner = SumRunner(max_tokens=32, float32=Bucket(1, 32))
    batch = place(Bucket(4, 16), entries_of([1] * 16, [2] * 16, [3] * 16, [BAD] * 16))
    Recovery(runner, lambda: BUCKETS, telemetry, calls.append).run(batch)
    assert calls[:-1] == runner.ran
    assert calls[-1] == Bucket(1, 32)  # of the float32 program
    assert runner.wide_runs == 1


@pytest.mark.parametrize("wrong", [BAD, 5])
def test_a_lone_sequence_that_must_run_in_smaller_buckets_keeps_its_answer(telemetry, wrong):
    """The smaller bucket is compiled meanwhile; there it is not finite either, or all is well."""
    (sequence,) = sequences = entries_of([wrong, 2])
    runner = SumRunner()
    compiled = iter([[Bucket(1, 32)], BUCKETS, BUCKETS])

    def fail_the_second(bucket, planes):
        if len(runner.ran) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    runner.on_run, usual = fail_the_second, runner._sums

    def not_finite_at_first(*arguments, **options):
        answer = usual(*arguments, **options)
        return {"dense": answer["dense"] * (np.nan if len(runner.ran) == 1 else 1)}

    runner._sums = not_finite_at_first
    batch = place(Bucket(1, 32), [sequence])
    results = Recovery(runner, lambda: next(compiled), telemetry).run(batch)
    (answer,) = by_entry(results, sequences)
    assert isinstance(answer, NotFinite) if wrong == BAD else answer == 7.0


@pytest.mark.parametrize("error", [KeyError("1x16"), MemoryError()])
def test_an_error_in_the_recovery_itself_goes_to_those_who_wait(telemetry, error):
    calls = []

    def broken() -> list[Bucket]:
        calls.append(1)
        if len(calls) == max_calls:
            raise error
        return BUCKETS

    max_calls, sequences = 1, entries_of([1, 2], [3, BAD])
    answers = Recovery(SumRunner(), broken, telemetry).run(place(Bucket(1, 16), sequences))
    assert all(isinstance(one, BackendError) for one in by_entry(answers, sequences))
    assert count_of(telemetry.failed_batches) == 1
    calls.clear()  # of two halves that which looks where to run the guilty one
    max_calls, sequences = 2, entries_of([11] * 16, [12] * 16, [13] * 16, [BAD] * 16)
    answers = Recovery(SumRunner(32), broken, telemetry).run(place(Bucket(4, 16), sequences))
    kinds = sorted(type(answer).__name__ for answer in by_entry(answers, sequences))
    assert kinds == ["BackendError", "BackendError", "float", "float"]


def test_a_good_batch_runs_once_and_gives_what_anyone_in_it_asked_for(telemetry):
    runner = SumRunner()
    sequences = entries_of([1, 2], [3]) + entries_of([7, 8, 9], outputs=frozenset({"tokens"}))
    (answers,) = recover(runner, telemetry, sequences, Bucket(1, 16))
    assert by_entry([answers], sequences) == [3.0, 3.0, 24.0]
    hidden = dict(zip(answers.sequences, answers.values["tokens"], strict=True))
    np.testing.assert_array_equal(hidden[sequences[2]][:, 0], [7, 8, 9])
    assert runner.ran == [Bucket(1, 16)]
