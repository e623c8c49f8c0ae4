"""The heart: a text has one vector, whatever shares its batch and wherever it lies.

Padding is NaN here (the pad token's embedding), and neighbours hold a token of size 1e30.
"""

from itertools import product

import numpy as np
import pytest
from conftest import LIMIT, TOWERS, WIDER_TOWERS, WORDS, tiny_spec
from fakes import count_of, future_of
from hypothesis import given, settings
from hypothesis import strategies as st
from representatives import each
from test_replica import replica_with

from benchmarks.parameters import random_parameters
from jaxembed.data.outputs import OUTPUTS
from jaxembed.data.spec import DenseLayer, LayerNormLayer, PerToken, Vocabulary
from jaxembed.data.work import Encoding
from jaxembed.engine.batch import Batch, pack
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.models import ARCHITECTURES, attention, deberta
from jaxembed.models.native import TILE

pytestmark = pytest.mark.usefixtures("optimized")

BUCKETS = (Bucket(4, 32), Bucket(2, 64))  # rows of 32 have all scores at once, those of 64 blocks
# FIRST to HUGE - 1 are ordinary tokens. RoBERTa counts FIRST out of its positions.
PAD, HUGE, FIRST = 0, 48, 1
# What stands on a tower that scores: BERT's, ModernBERT's and a language model's.
HEADS = {
    "two dense layers": {
        "pooling": ("cls",),
        "modules": (DenseLayer(32, 32), DenseLayer(32, 3, activation="identity")),
    },
    "dense layers and a norm": {
        "pooling": ("mean",),
        "modules": (
            DenseLayer(32, 32, bias=False, activation="gelu"),
            LayerNormLayer(32, eps=1e-5, bias=False),
            DenseLayer(32, 1, activation="identity"),
        ),
    },
    "one dense layer": {
        "pooling": ("lasttoken",),
        "modules": (DenseLayer(32, 1, bias=False, activation="identity"),),
    },
    "vocabulary, maximum": {
        "heads": {"dense": Vocabulary(40, 32, (DenseLayer(32, 32, activation="gelu"),))}
    },
    "logits of tokens": {
        "heads": {
            "token_logits": PerToken(
                (DenseLayer(32, 32), LayerNormLayer(32, eps=1e-5), DenseLayer(32, 7))
            )
        }
    },
    "vocabulary, sum": {"heads": {"dense": Vocabulary(40, 32, over_tokens="sum")}},
}


def poisoned_parameters(spec) -> dict[str, np.ndarray]:
    parameters = random_parameters(spec)
    table = parameters["tower.embeddings.word.embedding"]
    table[PAD] = np.nan
    table[HUGE] *= 1e30
    assert np.abs(table[HUGE]).max() > 1e29  # in every tower
    return parameters


def replica_of(dtype: str, buckets=BUCKETS, native: bool = False, **spec) -> Replica:
    model = tiny_spec(**spec)
    replica = replica_with(model, dtype, native, parameters=poisoned_parameters(model))
    with pytest.MonkeyPatch.context() as patch:  # the last block of a row of 64 is not full
        patch.setattr(attention, "WHOLE_SCORES", 32)
        patch.setattr(attention, "QUERY_BLOCK", 24)
        patch.setattr(attention, "LOCAL_BLOCK", 24)
        patch.setattr(deberta, "SCORES_TILE", 24)
        for bucket in buckets:
            replica.compile(bucket)
    return replica


@pytest.fixture(name="float32", scope="module", params=each(TOWERS, "bert", "deberta", "qwen3"))
def _float32(request) -> Replica:
    return replica_of("float32", **TOWERS[request.param])


@pytest.fixture(name="bfloat16", scope="module", params=each(ARCHITECTURES, "modernbert"))
def _bfloat16(request) -> Replica:
    """Of each architecture, its first tower."""
    return replica_of("bfloat16", **TOWERS[request.param])


NATIVE = (  # of each set of native calls one
    "bert", "mpnet", "nomic_bert", "nomic_moe", "jina_bert", "jina_bert_code", "clip, gelu",
    "modernbert", "qwen3", "gemma2", "t5", "t5, gated",
)  # fmt: skip


@pytest.fixture(name="native", scope="module", params=each(NATIVE, "bert"))
def _native(request, native_kernels) -> Replica:
    """With the native kernels, which take heads of 32."""
    return replica_of("bfloat16", native=True, **WIDER_TOWERS[request.param])


def run(replica: Replica, batch: Batch, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The primary output, of one slot or of each token, and the hidden states of entry k."""
    primary = replica.primary
    output = replica.run(batch.bucket, pack(batch, replica.planes), (primary, "tokens"))
    row, start = batch.rows[k], batch.starts[k]
    of_tokens = slice(start, start + batch.sequences[k].length)
    place = batch.slots[k] if OUTPUTS[primary].per == "slot" else of_tokens
    return output[primary][row, place], output["tokens"][row, of_tokens]


def placed(bucket: Bucket, places) -> Batch:
    """`places` are (ids, unpooled, row, slot, start)."""
    encodings = [Encoding(np.array(ids, np.int32), spans=((n, len(ids)),)) for ids, n, *_ in places]
    rows, slots, starts = (np.array([place[i] for place in places]) for i in (2, 3, 4))
    # a future each: one would compute what is alike only once
    entries = [future_of([encoding]).sequences[0] for encoding in encodings]
    return Batch(bucket, entries, rows, slots + 1, slots, starts)


def alone(bucket: Bucket, ids, unpooled=0) -> Batch:
    return placed(bucket, [(ids, unpooled, 0, 0, 0)])


def assert_same(vector, wanted) -> None:
    # float32, sums of at most 64 terms in another order; hidden states are of size 1
    np.testing.assert_allclose(vector, wanted, rtol=1e-5, atol=1e-5)


def assert_close(vector, wanted) -> None:
    """Cosine of at least 0.9999 along the last axis: bfloat16 rounds what lies between."""
    vector, wanted = np.asarray(vector, np.float64), np.asarray(wanted, np.float64)
    lengths = np.linalg.norm(vector, axis=-1) * np.linalg.norm(wanted, axis=-1)
    assert ((vector * wanted).sum(axis=-1) / lengths).min() >= 0.9999


ordinary = st.integers(FIRST, HUGE - 1)
neighbour = st.lists(st.integers(FIRST, HUGE), min_size=1, max_size=24)


@st.composite
def placements(draw):
    """A text among neighbours, for `placed`: any bucket, row, slot and position, with gaps of
    padding. Plain values: beartype draws at random, which Hypothesis forbids in here."""
    ids = draw(st.lists(ordinary, min_size=1, max_size=40))
    unpooled = draw(st.integers(0, min(3, len(ids) - 1)))
    bucket = draw(st.sampled_from([b for b in BUCKETS if b.length >= len(ids)]))
    target_row = draw(st.integers(0, bucket.rows - 1))
    places = []
    for row in range(bucket.rows):
        sequences = [(one, 0) for one in draw(st.lists(neighbour, max_size=6))]
        if row == target_row:
            sequences.insert(draw(st.integers(0, len(sequences))), (ids, unpooled))
        at, slot, reserved = 0, 0, len(ids) if row == target_row else 0
        for one, prompt in sequences:
            is_target = one is ids
            gap = draw(st.integers(0, 2))
            rest = 0 if is_target else reserved
            slots_left = bucket.slots - slot - (rest > 0)
            if at + gap + len(one) + rest > bucket.length or slots_left < 1:
                if not is_target:
                    continue
                gap = 0
            places.append((one, prompt, row, slot, at + gap))
            at, slot = at + gap + len(one), slot + 1
            reserved = 0 if is_target else reserved
    places.sort(key=lambda place: place[0] is not ids)  # the text itself first
    assert places[0][0] is ids
    return bucket, places


def assert_same_wherever_it_lies(replica: Replica, placement, assert_alike) -> None:
    batch = placed(*placement)
    entry = batch.sequences[0]
    home = next(bucket for bucket in BUCKETS if bucket.length >= entry.length)
    first_pooled = 0 if entry.spans is None else int(entry.spans[0, 0])
    single = alone(home, entry.ids, first_pooled)
    for got, wanted in zip(run(replica, batch), run(replica, single), strict=True):
        assert np.isfinite(wanted).all()
        assert_alike(got, wanted)


@given(placement=placements())
@settings(max_examples=40, deadline=None)
def test_a_text_has_one_vector_wherever_it_lies_in_float32(float32, placement):
    assert_same_wherever_it_lies(float32, placement, assert_same)


@given(placement=placements())
@settings(max_examples=25, deadline=None)
def test_a_text_has_one_vector_wherever_it_lies_in_bfloat16(bfloat16, placement):
    assert_same_wherever_it_lies(bfloat16, placement, assert_close)


@given(placement=placements())
@settings(max_examples=25, deadline=None)
def test_a_text_has_one_vector_wherever_it_lies_with_the_native_kernels(native, placement):
    assert_same_wherever_it_lies(native, placement, assert_close)


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_with_the_native_kernels_all_rows_starts_and_neighbours_give_the_same_bits(native, bucket):
    """All starts of an engine, which are multiples of the alignment. XLA pools the bits."""
    ids = [7, 8, 9, 10, 11]
    assert native.alignment == TILE
    pooled, hidden = run(native, alone(bucket, ids))
    for row, start in product(range(bucket.rows), range(0, bucket.length, TILE)):
        before = [([HUGE, 6] * 4, 0, row, 1, start - 9)] if start else []
        company = [*before, ([9, 8, 7], 0, row, 2, start + 5)]
        got_pooled, got = run(native, placed(bucket, [(ids, 0, row, 0, start), *company]))
        np.testing.assert_array_equal(got, hidden)
        assert_same(got_pooled, pooled)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("pooling", [("cls",), ("lasttoken",), ("cls", "mean")], ids=" ".join)
@pytest.mark.parametrize("tower", each(NATIVE, "bert"))
def test_the_last_layer_computes_only_what_pooling_reads_and_gives_the_same_bits(tower, pooling):
    bucket = BUCKETS[0]
    model = {"pooling": pooling, **WIDER_TOWERS[tower]}
    replica = replica_of("bfloat16", [bucket], native=True, **model)
    batch = placed(bucket, [([7, 8, 9, 10, 11], 2, 1, 0, 0), ([9, 8, 7], 0, 1, 1, 16)])
    planes = pack(batch, replica.planes)
    both = replica.run(bucket, planes, ("dense", "tokens"))
    alone = replica.run(bucket, planes, ("dense",))["dense"]
    np.testing.assert_array_equal(alone[1, :2], both["dense"][1, :2])
    # the program also returns what the last layer did not compute
    computed = replica.compiled(bucket)(replica._parameters, planes)["tokens"]
    is_same = (np.asarray(computed)[1] == both["tokens"][1]).all(axis=1)
    same = [at for at in (0, 1, 2, 3, 4, 16, 17, 18) if is_same[at]]  # pooled are those from 2 on
    assert same == ([0, 1, 2, 3, 4, 16, 17, 18] if "mean" in pooling else [2, 4, 16, 18])


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_every_row_slot_and_start_gives_the_same_vector(float32, bucket):
    """All places of a short text, one after another, between huge neighbours."""
    ids = [7, 8, 9]
    wanted = run(float32, alone(BUCKETS[0], ids))
    for row in range(bucket.rows):
        for slot in range(bucket.slots):
            start = min(4 * slot, bucket.length - 3)
            others = [([HUGE] * 4, 0, row, k, 4 * k) for k in range(slot)]
            got = run(float32, placed(bucket, [(ids, 0, row, slot, start), *others]))
            for vector, reference in zip(got, wanted, strict=True):
                assert_same(vector, reference)


@pytest.mark.parametrize("head", each(HEADS, "vocabulary, maximum"))
def test_every_head_is_the_same_among_poisoned_neighbours(head):
    replica = replica_of("float32", BUCKETS[:1], **HEADS[head])
    ids, bucket = [7, 8, 9, 10, 11], BUCKETS[0]
    wanted, _ = run(replica, alone(bucket, ids, 2))
    among = [(ids, 2, 2, 1, 9), ([HUGE, 6] * 4, 0, 2, 0, 0), ([HUGE] * 10, 0, 2, 2, 20)]
    got, _ = run(replica, placed(bucket, [*among, ([HUGE] * 32, 0, 1, 0, 0)]))
    assert np.isfinite(wanted).all()
    assert_same(got, wanted)


def test_every_architecture_is_among_the_towers():
    assert {backbone["architecture"] for backbone in TOWERS.values()} == set(ARCHITECTURES)


def test_the_poison_is_real(float32):
    """Were padding or the huge token harmless, the tests above would show nothing."""
    dense, hidden = run(float32, alone(BUCKETS[0], [7, PAD, 8]))
    assert np.isnan(dense).any()
    assert np.isnan(hidden).any()
    dense, _ = run(float32, alone(BUCKETS[0], [7, HUGE, 8]))
    assert np.isfinite(dense).all()
    ordinary, _ = run(float32, alone(BUCKETS[0], [7, 9, 8]))
    assert np.abs(dense - ordinary).max() > 1e-2


texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=LIMIT).map(" ".join)


@given(together=st.lists(texts, min_size=1, max_size=30))
@settings(max_examples=25, deadline=None)
def test_an_embedder_gives_a_text_the_same_vector_alone_and_in_any_company(embedder, together):
    retried = count_of(embedder.model.telemetry.not_finite)
    vectors = embedder.encode(together)
    for text, vector in zip(together[:5], vectors, strict=False):
        assert_same(vector, embedder.encode(text))
    assert count_of(embedder.model.telemetry.not_finite) == retried  # no help from running alone
