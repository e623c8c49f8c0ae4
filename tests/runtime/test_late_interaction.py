"""Models that compare texts token by token: how queries and documents are tokenized, and that what
queries are filled up with changes nothing else."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOWERS, WORDS, save_tiny, tiny_spec
from fakes import future_of
from msgspec.structs import replace
from representatives import each

from jaxembed import Embedder, EngineConfig
from jaxembed.data.inputs import Pair, Text, Tokens
from jaxembed.data.spec import DenseLayer, Expansion, LateInteraction, NormalizeLayer, PerToken
from jaxembed.data.work import Encoding
from jaxembed.engine.autotune import kernels
from jaxembed.engine.autotune.native_trial import TrialResult
from jaxembed.engine.batch import pack, place
from jaxembed.engine.bucket import Bucket
from jaxembed.errors import ConfigError, InputTooLong, InvalidInput
from jaxembed.models import attention, program
from jaxembed.models.heads import TokenHead
from jaxembed.models.kernels import Call
from jaxembed.models.tokens import PackedTokens
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.runtime.options import EncodeOptions

CLS, SEP, MASK = 2, 3, 4
ID = {word: 5 + k for k, word in enumerate(WORDS)}
QUERY, DOCUMENT = ID["what"], ID["the"]  # markers
LENGTH = 12
HEAD = PerToken((DenseLayer(32, 6, bias=False, activation="identity"), NormalizeLayer()))
TEXTS = ["cat", "a cat sat on mat", "blue sky", "dog " * 30, "red dog runs"]


def interaction(length: int | None = LENGTH, attended: bool = False, **changes) -> LateInteraction:
    fields = {"query_length": LENGTH, "document_length": 10, "query_marker": QUERY}
    fields |= {"document_marker": DOCUMENT}
    if length is not None:
        fields["expansion"] = Expansion(MASK, length, attended)
    return LateInteraction(**fields | changes)


def late(**changes) -> dict[str, Any]:
    """Fields of ModelSpec; `changes` are those of `interaction`."""
    return {
        "heads": {"multi_vector": HEAD},
        "interaction": interaction(**changes),
        "prompts": {"query": "", "document": ""},
        "token_types": False,
        "max_input_tokens": LENGTH,
    }


@pytest.fixture(name="make", scope="module")
def _make(make_processor):
    def make(limit: int = LENGTH, **changes) -> TextProcessor:
        return make_processor(limit, lambda tokenizer: None, **late(**changes))

    return make


QUERY_RULES = TokenizationOptions("", True, "right", role="query")


def encoded(processor: TextProcessor, text: str, role=None, **changes) -> Encoding:
    tokenization = replace(QUERY_RULES, role=role, **changes)
    return processor.encode([Text(text)], tokenization).work.encodings[0]


LONGER, LOWER = {"length": 6, "query_length": 9}, {"limit": 7, "length": 6}


@pytest.mark.parametrize(
    ("changes", "text", "role", "words", "augmentation_tokens"),
    [
        ({}, "a cat", "query", "what a cat", 7),
        ({}, "a cat", None, "the a cat", 0),
        ({}, "a cat", "document", "the a cat", 0),
        # without a marker a text has its room
        ({"query_marker": None}, "cat " * 20, "query", "cat " * 10, 0),
        # queries longer than the expansion are not filled up
        (LONGER, "cat", "query", "what cat", 2),
        (LONGER, "cat " * 5, "query", "what" + " cat" * 5, 0),
        (LONGER, "cat " * 20, "query", "what" + " cat" * 6, 0),
        # a limit that is raised is for documents, a lower one for both
        ({"limit": 30}, "cat " * 50, None, "the" + " cat" * 27, 0),
        ({"limit": 30}, "cat " * 50, "query", "what" + " cat" * 9, 0),
        (LOWER, "cat " * 50, None, "the" + " cat" * 4, 0),
        (LOWER, "cat " * 50, "query", "what" + " cat" * 4, 0),
    ],
    ids=str,
)
def test_a_text_has_its_marker_and_fillers(make, changes, text, role, words, augmentation_tokens):
    encoding = encoded(make(**changes), text, role)
    wanted = [CLS, *(ID[word] for word in words.split()), SEP, *[MASK] * augmentation_tokens]
    assert encoding.ids.tolist() == wanted
    assert (encoding.ids.dtype, encoding.types) == (np.int32, None)
    assert encoding.augmentation_tokens == augmentation_tokens


def test_a_prompt_follows_the_marker(make):
    encoding = encoded(make(), "cat", "query", prompt="how ")
    assert encoding.ids.tolist()[:5] == [CLS, QUERY, ID["how"], ID["cat"], SEP]


@pytest.mark.parametrize(("role", "length"), [("query", LENGTH), ("document", 10)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cut_text_keeps_its_special_tokens_and_room_for_the_marker(make, role, length, side):
    encoding = encoded(make(), "cat " * 20 + "dog", role, side=side)
    ids = encoding.ids.tolist()
    assert (len(ids), ids[0], ids[-1], encoding.augmentation_tokens) == (length, CLS, SEP, 0)
    assert ids[1] == (QUERY if role == "query" else DOCUMENT)
    assert (ID["dog"] in ids) == (side == "left")


@pytest.mark.parametrize(("words", "augmentation_tokens"), [(8, 1), (9, 0), (10, 0)])
def test_cut_and_counted_are_texts_over_the_length(make, words, augmentation_tokens):
    tokenized = make().encode([Text("cat " * words)], QUERY_RULES)
    assert tokenized.work.lengths.tolist() == [LENGTH]
    assert tokenized.work.text_tokens.tolist() == [LENGTH - augmentation_tokens]
    assert tokenized.truncated == (words > 9)


def test_a_long_query_is_refused_where_nothing_may_be_cut(make):
    with pytest.raises(InputTooLong) as refused:
        encoded(make(), "cat " * 15, "query", truncate=False)
    assert (refused.value.limit, refused.value.got) == (LENGTH, 18)


def test_a_limit_below_the_expansion_is_refused(make):
    with pytest.raises(ConfigError, match="extends queries to 12;"):
        make(limit=11)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Tokens([7, 8]), "takes no token ids"),
        (Pair("a", "cat"), "takes no pairs"),
        (Text(""), "the input is empty"),
    ],
)
def test_only_texts_are_taken_and_the_first_at_fault_is_named(make, item, message):
    with pytest.raises(InvalidInput, match=message) as refused:
        make().encode([Text("cat"), item, Tokens([7])], TokenizationOptions("", True, "right"))
    assert refused.value.index == 1


def test_fillers_are_estimated(make):
    texts = [Text("cat"), Text("dog " * 50)]
    assert make().estimate(texts, QUERY_RULES) == (2, 2 * LENGTH)
    assert make().estimate([Text("cat")], TokenizationOptions("", True, "right")) == (1, 2)


def test_a_typed_mask_is_no_filler():
    """Two sequences of the same ids, of which one hides its last."""
    ids = np.array([CLS, QUERY, MASK, MASK], np.int32)
    future = future_of(
        [Encoding(ids, augmentation_tokens=2), Encoding(ids), Encoding(ids, augmentation_tokens=2)]
    )
    assert [entry.augmentation_tokens for entry in future.sequences] == [2, 0]


@pytest.mark.parametrize("attended", [False, True])
def test_fillers_have_no_segment_as_keys(attended):
    entries = future_of([Encoding(np.arange(5, 9, dtype="i4"), augmentation_tokens=3)]).sequences
    entries += future_of([Encoding(np.arange(5, 8, dtype=np.int32))]).sequences
    planes = pack(place(Bucket(1, 8), entries))
    tokens = PackedTokens.unstack(planes, 2, Expansion(MASK, 4, attended))
    assert tokens.segments.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0]]
    if attended:
        assert tokens.key_segments is None
    else:
        assert tokens.key_segments.tolist() == [[1, -1, -1, -1, 2, 2, 2, 0]]


@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("backbone", ["bert", "modernbert", "qwen3", "t5"])
def test_calls_say_whether_they_hide_keys(backbone, attended):
    spec = tiny_spec(**TOWERS[backbone] | late(attended=attended))
    assert {call.hides_keys for call in kernels.calls(program(spec), "float32")} == {not attended}


def test_native_attention_is_not_chosen_where_keys_are_hidden(monkeypatch, tmp_path):
    """The other native kernels are, whatever this CPU runs."""
    monkeypatch.setattr(kernels.native, "load_library", lambda cache_dir, dtype: None)
    results = dict.fromkeys(("linear", "attention"), TrialResult(times_xla=0.5))
    device = jax.local_devices()[0]
    for attended in (False, True):
        spec = tiny_spec(**late(attended=attended))
        choice = kernels.choose_native(
            program(spec), device, "bfloat16", "auto", tmp_path, lambda: results
        )
        assert ("attention" in choice.native.without) is not attended
        assert ("native attention" in choice.describe()["not_used"]) is not attended
        assert not (choice.joins and not attended)


def test_a_trial_hides_keys_for_calls_that_do(monkeypatch):
    monkeypatch.setattr(kernels, "PROBE_TOKENS", 256)
    call = Call(2, 2, 8, "float32", attention.EVERYTHING, hides_keys=True)
    trial = kernels.KernelTrial(jax.local_devices()[0], "float32", kernels.Counter({call: 1}), 128)
    right = kernels.Kernel("right", ours := without_slots, lambda call, length: None)
    assert trial.milliseconds_if_right(right) > 0

    def sees_all(*operands, key_segments, **options):
        return ours(*operands, **options)

    wrong = kernels.Kernel("wrong", sees_all, lambda call, length: None)
    with pytest.raises(kernels.NotRight, match="with hidden keys: off by"):
        trial.milliseconds_if_right(wrong)


def without_slots(*operands, slots, **options):
    return attention.by_xla(*operands, **options)


@pytest.fixture(name="embedder_of", scope="module")
def _embedder_of(tmp_path_factory, closed_late):
    """Embedders on towers with the same parameters; the last rows go block by block."""
    folder = tmp_path_factory.mktemp("cache")

    @cache
    def make(backbone: str = "bert", **changes) -> Embedder:
        fields = TOWERS[backbone] | late(**changes)
        if backbone == "modernbert":
            fields["config"] = fields["config"] | {"local_reach": LENGTH}
        path = save_tiny(tmp_path_factory.mktemp("model") / "checkpoint", **fields)
        config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=128)
        return closed_late.enter_context(Embedder(str(path), cache_dir=folder, config=config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "WHOLE_SCORES", 32)
        patch.setattr(attention, "QUERY_BLOCK", 24)
        patch.setattr(attention, "LOCAL_BLOCK", 24)
        yield make


def vectors(embedder: Embedder, texts: list[str], role: str) -> list[np.ndarray]:
    return list(embedder.compute(texts, ["multi_vector"], role=role)["multi_vector"])


def lengths_of(texts: list[str], most: int) -> list[int]:
    return [min(len(text.split()) + 3, most) for text in texts]


@pytest.mark.parametrize("attended", [False, True])
def test_a_query_has_a_row_for_each_filler_and_a_document_for_each_token(embedder_of, attended):
    embedder = embedder_of(attended=attended)
    assert [rows.shape for rows in vectors(embedder, TEXTS, "query")] == [(LENGTH, 6)] * len(TEXTS)
    documents = vectors(embedder, TEXTS, "document")
    assert [len(rows) for rows in documents] == lengths_of(TEXTS, 10)


@pytest.mark.parametrize(
    "backbone", each(["bert", "modernbert", "mpnet", "qwen3", "deberta"], "bert")
)
def test_own_tokens_do_not_see_fillers_that_are_hidden(backbone, embedder_of):
    plain = vectors(embedder_of(backbone, length=None), TEXTS, "query")
    hidden = vectors(embedder_of(backbone), TEXTS, "query")
    attended = vectors(embedder_of(backbone, attended=True), TEXTS, "query")
    causal = backbone == "qwen3"  # no token sees one that follows it
    for wanted, one, other in zip(plain, hidden, attended, strict=True):
        np.testing.assert_allclose(one[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
        apart = np.abs(other[: len(wanted)] - wanted).max()
        assert (apart > 1e-3) == (len(wanted) < LENGTH and not causal)


@pytest.mark.parametrize("backbone", each(["bert", "modernbert"], "bert"))
@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("role", ["query", "document"])
def test_a_text_has_the_same_rows_alone_and_among_others(backbone, attended, role, embedder_of):
    embedder = embedder_of(backbone, attended=attended)
    together = vectors(embedder, [*TEXTS, *TEXTS[::-1]], role)
    for number, text in enumerate(TEXTS):
        (alone,) = vectors(embedder, [text], role)
        for found in (together[number], together[-1 - number]):
            np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)


def test_fillers_are_not_counted_as_tokens(embedder_of):
    embedder = embedder_of()
    inputs = [Text(text) for text in TEXTS]
    for role, most in (("query", LENGTH), ("document", 10)):
        options = embedder.model.tasks.for_role(
            role, EncodeOptions(outputs=frozenset({"multi_vector"}))
        )
        answer = embedder.model.run(embedder.model.tasks.embed(inputs, options))
        assert answer.num_tokens.tolist() == lengths_of(TEXTS, most)


@pytest.mark.parametrize(
    ("options", "role"),
    [
        ({"prompt_name": "query"}, "query"),
        ({"prompt_name": "document"}, "document"),
        ({"role": "query", "prompt": "how "}, "query"),
        ({"prompt": "how "}, None),
        ({}, None),
    ],
)
def test_the_role_is_that_of_the_options_or_the_prompts_name(options, role, embedder_of):
    tasks = embedder_of().model.tasks
    request = tasks.compute([Text("cat")], ["multi_vector"], EncodeOptions(**options))
    assert request.tokenization.role == role


@pytest.mark.parametrize("width", [8, 5])
def test_a_residual_is_added_after_the_activation(width):
    """As it is where the widths are the same, else through a kernel of its own."""
    layer = DenseLayer(8, width, activation="tanh", residual=True)
    head = TokenHead(PerToken((layer,)))
    draw = np.random.default_rng(0)
    hidden = draw.standard_normal((1, 3, 8), np.float32)
    kernel, bias = draw.standard_normal((8, width), np.float32), np.float32(0.5)
    residual = draw.standard_normal((8, width), np.float32)
    head.modules[0].kernel[...] = jnp.asarray(kernel)
    head.modules[0].bias[...] = jnp.full(width, bias)
    if width != 8:
        head.modules[0].residual.kernel[...] = jnp.asarray(residual)
    entries = future_of([Encoding(np.arange(5, 8, dtype=np.int32))]).sequences
    tokens = PackedTokens.unstack(pack(place(Bucket(1, 3), entries)), 1)
    wanted = np.tanh(hidden @ kernel + bias) + (hidden if width == 8 else hidden @ residual)
    np.testing.assert_allclose(head(jnp.asarray(hidden), tokens), wanted, rtol=1e-5, atol=1e-5)
