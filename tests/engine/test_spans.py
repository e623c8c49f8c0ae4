"""Several spans of one sequence are pooled one by one, and several outputs come of one pass."""

import numpy as np
import pytest
from conftest import LIMIT, WORDS, open_tiny, save_tiny
from fakes import SMALL_GRID, WAIT_S, EngineUnderTest, SumRunner, count_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxembed.data.spec import DenseLayer
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.errors import InvalidInput, TooManySpans

BOTH = frozenset({"dense", "tokens"})


def ids_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 40, count, np.int32)


def check(result, index: int, spans, first: int) -> None:
    """The vectors from `first` on are the means of the spans of sequence `index`."""
    hidden = result["tokens"][index].astype(np.float64)
    for k, (start, end) in enumerate(spans):
        # float32 means of at most LIMIT terms
        np.testing.assert_allclose(
            result["dense"][first + k], hidden[start:end].mean(axis=0), rtol=1e-5, atol=1e-5
        )


spans_of = st.integers(1, LIMIT).flatmap(
    lambda length: st.tuples(
        st.just(length),
        st.lists(
            st.integers(0, length - 1).flatmap(
                lambda start: st.tuples(st.just(start), st.integers(start + 1, length))
            ),
            min_size=1,
            max_size=12,
        ),
    )
)


@given(st.lists(spans_of, min_size=1, max_size=12))
@settings(max_examples=15, deadline=None)
def test_spans_are_pooled_one_by_one_whatever_shares_their_rows(embedder, sequences):
    encodings = [
        Encoding(ids_of(length, seed), spans=tuple(spans))
        for seed, (length, spans) in enumerate(sequences)
    ]
    result = embedder.model.main.engine.submit(work_from_encodings(encodings, BOTH)).result(WAIT_S)
    first = 0
    for index, (_, spans) in enumerate(sequences):
        check(result, index, spans, first)
        first += len(spans)
    assert len(result["dense"]) == first


def test_a_sequence_goes_to_a_row_that_has_slots_for_its_spans(start, runner):
    """Ten tokens fit every bucket, six spans only the row of 64 with its 16 slots."""
    engine = start(runner, full_warmup=True)
    spans = tuple((k, k + 5) for k in range(6))
    ids = np.arange(10, 20, dtype=np.int32)
    dense = engine.ask([Encoding(ids, spans=spans)]).result(WAIT_S)["dense"]
    assert runner.ran == [Bucket(1, 64)]
    assert dense[:, 0].tolist() == [float(ids[start:end].sum()) for start, end in spans]


def test_spans_survive_halving_and_running_alone():
    """What does not fit the memory, or is not finite, is placed again by its slots."""
    runner = SumRunner(max_tokens=64, poison=True)
    grid = BucketGrid((*SMALL_GRID.buckets, Bucket(4, 64)))
    engine = EngineUnderTest([runner], grid, full_warmup=True)
    spans = tuple((k, k + 2) for k in range(9))
    rows = [np.full(10, 20 + k, np.int32) for k in range(8)]
    rows[3][9] = SumRunner.BAD  # in no span
    work = work_from_encodings([Encoding(row, spans=spans) for row in rows])
    engine.start()
    engine.wait_ready(WAIT_S)  # or a bucket could run the batch that compiles before the largest
    future = engine.submit(work)
    with pytest.raises(Exception, match="input 3"):
        future.result(WAIT_S)
    dense = future.values["dense"].reshape(8, 9)
    for k in set(range(8)) - {3}:
        assert dense[k].tolist() == [2.0 * (20 + k)] * 9
    assert count_of(engine.telemetry.split_batches) > 0
    engine.close(WAIT_S)


def test_more_spans_than_a_row_has_slots_are_refused(start, runner):
    spans = ((0, 1),) * 17
    with pytest.raises(TooManySpans, match="17 spans, the limit is 16") as raised:
        start(runner).ask([Encoding(ids_of(4)), Encoding(ids_of(4), spans=spans)])
    assert raised.value.index == 1


@pytest.fixture(name="classifier", scope="module")
def _classifier(tmp_path_factory):
    """A classifier with one bucket, in which three short texts are one batch."""
    folder = tmp_path_factory.mktemp("classifier")
    layers = (DenseLayer(32, 32), DenseLayer(32, 3, activation="identity"))
    path = save_tiny(folder / "tiny", pooling=("cls",), modules=layers, labels=("a", "b", "c"))
    with open_tiny(path, folder, (4, 64)) as classifier:
        yield classifier


def test_a_classifier_gives_its_logits_and_its_pooled_vector_in_one_pass(classifier):
    texts = [" ".join(WORDS[:k]) for k in (2, 5, 7)]
    before = sum(use.runs for use in classifier.model.snapshot()[""].ran.values())
    result = classifier.compute(texts, ("logits", "dense", "tokens"))
    after = sum(use.runs for use in classifier.model.snapshot()[""].ran.values())
    assert after - before == 1
    labels = {one.label: one.score for one in classifier.classify(texts[1], raw_scores=True)[0]}
    wanted = [labels[label] for label in classifier.spec.labels]
    # float32 sums of 32 terms in another order: the text lies elsewhere in its row
    np.testing.assert_allclose(result["logits"][1], wanted, rtol=1e-5)
    for k, hidden in enumerate(result["tokens"]):
        np.testing.assert_array_equal(result["dense"][k], hidden[0])  # the first token


def test_only_the_outputs_asked_for_come_back_and_others_are_refused(classifier):
    assert classifier.compute("the cat", ["dense"]).keys() == {"dense"}
    for outputs in (["dens"], [], ["logits", "sparse"]):
        with pytest.raises(InvalidInput, match="must be some of") as raised:
            classifier.compute("the cat", outputs)
        assert raised.value.field == "outputs"


def test_an_embedders_vectors_are_not_normalised(embedder):
    result = embedder.compute(["the cat"], ["dense"])
    wanted = embedder.encode(["the cat"], normalize=False)
    np.testing.assert_array_equal(result["dense"], wanted)
    with pytest.raises(TypeError, match=r"compute\(\) has no option `normalize`"):
        embedder.compute("the cat", ["dense"], normalize=True)


@pytest.mark.parametrize("field", ["prompt", "prompt_name"])
def test_a_classifier_takes_no_prompt(classifier, field):
    with pytest.raises(InvalidInput, match=f"a classifier does not take `{field}`") as raised:
        classifier.compute("the cat", ["logits"], **{field: "query"})
    assert raised.value.field == field
