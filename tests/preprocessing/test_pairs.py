"""Pairs of texts: the tokenizer's own template, that of a language model, and what is cut."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from conftest import WORDS, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import CLS, SEP, shown_texts, words
from tokenizers import processors

from jaxembed.data.inputs import Pair, Text
from jaxembed.data.spec import PairTemplate
from jaxembed.errors import (
    CheckpointError,
    ConfigError,
    InputTooLong,
    InvalidInput,
    UnsupportedModel,
)
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions, Tokenized

TEMPLATE = PairTemplate(
    prefix="[CLS] a cat [SEP] ",
    first="{instruction} what {query} mat",
    second=" is {document}",
    suffix="[SEP] how train",
    instruction="the red",
)


def tokenization(*, truncate=True, side="right", **options) -> TokenizationOptions:
    return TokenizationOptions("", truncate, side, **options)


def beside(
    processor: TextProcessor,
    query: str,
    documents: Sequence[str],
    tokenization: TokenizationOptions,
) -> Tokenized:
    """The pairs of a query and each document."""
    return processor.encode_pairs_of_query(
        processor.tokenize_query(query, tokenization), documents, tokenization
    )


def roberta(tokenizer):
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))


def bert(tokenizer):
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))


def bare(tokenizer):
    tokenizer.post_processor = processors.ByteLevel()


def template(pair: str):
    def give(tokenizer) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", pair, [("[CLS]", CLS), ("[SEP]", SEP)]
        )

    return give


POST_PROCESSORS = {
    "bert": bert,
    "roberta": roberta,
    "bare": bare,
    "types": template("[CLS]:1 $A:0 [SEP]:1 [SEP]:1 $B:1"),
    "second only": template("$A $B:1 [SEP]:1"),
}


@pytest.fixture(name="make", scope="module")
def _make(make_processor):
    def make(limit=16, post_processor=bert, **spec) -> TextProcessor:
        return make_processor(limit, post_processor, **spec)

    return make


@pytest.fixture(name="scorer", scope="module")
def _scorer(make) -> TextProcessor:
    """A language model's template around pairs, limit 24."""
    return make(limit=24, post_processor=bare, labels=("yes",), template=TEMPLATE)


some = st.sampled_from([*WORDS, "zq", ",", "\u6f22", " ", "[SEP]"])
texts = st.lists(some, max_size=9).map(" ".join)


# -- the tokenizer's own template ------------------------------------------------------------------


@pytest.fixture(name="kinds", scope="module")
def _kinds(make):
    """A processor and a plain tokenizer for each post-processor."""
    pairs = {}
    for name, post_processor in POST_PROCESSORS.items():
        tokenizer = word_tokenizer()
        post_processor(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        pairs[name] = make(limit=64, post_processor=post_processor), tokenizer
    return pairs


@pytest.mark.parametrize("kind", POST_PROCESSORS)
@given(first=texts, second=texts)
@settings(max_examples=20, deadline=None)
def test_a_pair_has_the_ids_and_types_that_the_tokenizer_gives_it(kinds, kind, first, second):
    processor, tokenizer = kinds[kind]
    if not (first + second).strip():
        return
    (encoding,) = processor.encode([Pair(first, second)], tokenization()).work.encodings
    wanted = tokenizer.encode(first, second)
    assert encoding.ids.tolist() == wanted.ids
    if encoding.types is None:
        assert not any(wanted.type_ids)
    else:
        assert encoding.types.tolist() == wanted.type_ids
        assert encoding.types.dtype == np.int32
    (paired,) = beside(processor, first, [second], tokenization()).work.encodings
    assert paired.ids.tolist() == wanted.ids


def test_types_are_left_out_where_the_model_is_not_given_them(make):
    for post_processor in (bert, template("[CLS]:1 $A:1 [SEP]:1 $B:0")):
        with_types = make(post_processor=post_processor)
        without = make(post_processor=post_processor, token_types=False)
        given = with_types.encode([Pair("a", "cat")], tokenization()).work.encodings[0]
        left_out = without.encode([Pair("a", "cat")], tokenization()).work.encodings[0]
        paired = beside(without, "a", ["cat"], tokenization()).work.encodings[0]
        assert given.types is not None
        assert left_out.types is paired.types is None
        assert given.ids.tolist() == left_out.ids.tolist() == paired.ids.tolist()


@pytest.mark.parametrize(
    "pair", ["[CLS] $B [SEP] $A", "$A [SEP] $B [SEP] $A", "[CLS]:0 $A [SEP]:0 [SEP]:1 $B:1"]
)
def test_a_template_that_reorders_or_repeats_is_refused_where_pairs_are_needed(make, pair):
    with pytest.raises(UnsupportedModel, match="template for pairs"):
        make(post_processor=template(pair), labels=("yes",))
    embedder = make(post_processor=template(pair))
    assert embedder.encode([Text("cat")], tokenization()).work.encodings[0].length == 3
    with pytest.raises(InvalidInput, match="takes no pairs"):
        embedder.encode([Pair("a", "cat")], tokenization())


# -- the template of a language model --------------------------------------------------------------


@given(query=texts, document=texts, instruction=st.none() | texts)
@settings(max_examples=30, deadline=None)
def test_a_filled_in_template_has_the_ids_of_the_whole(scorer, query, document, instruction):
    tokenizer = word_tokenizer()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    task = TEMPLATE.instruction if instruction is None else instruction
    whole = f"[CLS] a cat [SEP] {task} what {query} mat is {document}[SEP] how train"
    wanted = tokenizer.encode(whole, add_special_tokens=False).ids
    if len(wanted) > scorer.limit:
        return
    with_rules = tokenization(truncate=False, instruction=instruction)
    for encoded in (
        beside(scorer, query, [document], with_rules),
        scorer.encode([Pair(query, document or " ")], with_rules),
    ):
        assert encoded.work.encodings[0].ids.tolist() == wanted
        assert encoded.work.encodings[0].types is None


def test_braces_are_only_text(make):
    """In the template too: chat templates hold JSON."""
    frame = make(
        limit=24,
        post_processor=bare,
        template=PairTemplate("", '{"a": {instruction}} {{query}} {b', "{} {document}", "", ""),
    )._frame
    filled = frame.first("{instruction} {document}", "{query} {0} {")
    assert filled == '{"a": {query} {0} {} {{instruction} {document}} {b'
    assert frame.second("{document} }") == "{} {document} }"


@pytest.mark.parametrize(
    ("first", "second", "missing"),
    [("{topic}", "{document}", "{query}"), ("{query}", "", "{document}")],
)
def test_a_template_that_leaves_out_a_text_is_refused(make, first, second, missing):
    broken = PairTemplate("", first, second, "", "")
    with pytest.raises(CheckpointError, match=f"has no {missing} in"):
        make(post_processor=bare, labels=("yes",), template=broken)


def test_a_model_with_a_template_takes_no_single_texts(scorer):
    with pytest.raises(InvalidInput, match="scores pairs"):
        scorer.encode([Text("cat")], tokenization())


def test_a_template_without_room_for_text_is_refused(make):
    with pytest.raises(ConfigError, match=r"is 7, .* no room .* the model needs \(7\)"):
        make(limit=7, post_processor=bare, labels=("yes",), template=TEMPLATE)


# -- cutting ---------------------------------------------------------------------------------------


def test_prefix_and_suffix_stay_when_a_template_is_cut(scorer):
    """24 less 7 ids around leaves 17: 6 of the query's, 11 of the document's."""
    tokenized = beside(scorer, "dog", ["cat " * 30, "cat"], tokenization())
    ids = tokenized.work.encodings[0].ids.tolist()
    around = [CLS, *words("a cat"), SEP], [SEP, *words("how train")]
    first = words("the red what dog mat")
    assert ids == [*around[0], *first, *words("is" + " cat" * 11), *around[1]]
    assert tokenized.truncated == 1
    long_query = beside(scorer, "dog " * 40, ["cat", "dog"], tokenization())
    assert long_query.truncated == 2
    ids = long_query.work.encodings[0].ids.tolist()
    assert ids == [*around[0], *words("the red what" + " dog" * 14), *around[1]]


def test_a_template_may_leave_documents_a_share_of_the_limit(make):
    """Of 24 tokens the first part gets 12: else a long query leaves nothing of any document."""
    template = msgspec.structs.replace(TEMPLATE, query_share=0.5)
    processor = make(limit=24, post_processor=bare, labels=("yes",), template=template)
    tokenized = beside(processor, "dog " * 40, ["cat " * 9, "sat"], tokenization())
    parts = [one.ids.tolist()[4:-3] for one in tokenized.work.encodings]
    first = words("the red what" + " dog" * 9)
    assert parts == [[*first, *words("is cat cat cat cat")], [*first, *words("is sat")]]
    assert tokenized.truncated == 2
    fitting = beside(processor, "dog " * 11, ["cat"], tokenization(truncate=False))
    assert fitting.truncated == 0


def test_a_document_that_comes_first_keeps_the_end_of_its_template(make):
    """16 less 3 ids around leaves 13, of which 2 end the document's part."""
    template = PairTemplate(
        prefix="[CLS]",
        first="what {query} mat",
        second="is {document} how train",
        suffix="[SEP]",
        instruction="",
        document_first=True,
        end_ids=(SEP,),
    )
    spec = {"post_processor": bare, "labels": ("yes",), "template": template}
    processor = make(limit=16, **spec)

    def read(query: str, document: str, **options: int) -> list[int]:
        (one,) = beside(processor, query, [document], tokenization(**options)).work.encodings
        assert (one.ids[0], one.ids[-2:].tolist()) == (CLS, [SEP, SEP])
        return one.ids[1:-2].tolist()

    assert read("dog", "cat") == words("is cat how train what dog mat")
    assert read("dog", "cat " * 30) == words("is" + " cat" * 7 + " how train what dog mat")
    assert read("dog " * 40, "cat") == words("how train what" + " dog" * 10)
    assert read("dog", "cat " * 9, max_second_tokens=4) == words("is cat how train what dog mat")
    with pytest.raises(ConfigError, match=r"no room .* the model needs \(5\)"):
        make(limit=5, **spec)


@pytest.mark.parametrize(("side", "kept"), [("right", "the dog sat"), ("left", "on the mat")])
@pytest.mark.parametrize("truncate", [True, False])
def test_the_tokens_of_documents_are_limited_as_asked(make, side, kept, truncate):
    processor = make()
    with_rules = tokenization(side=side, truncate=truncate, max_second_tokens=3)
    documents = ["the dog sat on the mat", "cat", "the dog sat" if side == "right" else kept]
    tokenized = beside(processor, "a cat", documents, with_rules)
    first = [CLS, *words("a cat"), SEP]
    assert [encoding.ids.tolist() for encoding in tokenized.work.encodings] == [
        [*first, *words(kept), SEP],
        [*first, *words("cat"), SEP],
        [*first, *words(kept), SEP],
    ]
    assert tokenized.truncated == 1
    pair = processor.encode([Pair("a cat", documents[0])], with_rules)
    assert pair.work.encodings[0].ids.tolist() == [*first, *words(kept), SEP]


def test_a_limit_on_documents_may_bring_them_under_the_limit(make):
    processor = make()
    limited = tokenization(truncate=False, max_second_tokens=11)
    assert beside(processor, "a cat", ["dog " * 5000], limited).work.encodings[0].length == 16
    limited = tokenization(truncate=False, max_second_tokens=12)
    with pytest.raises(InputTooLong, match="17 tokens, the limit is 16"):
        beside(processor, "a cat", ["dog " * 5000], limited)
    with pytest.raises(InputTooLong, match="at least 17 tokens"):
        beside(processor, "a cat", ["cat", "dog " * 5000], tokenization(truncate=False))


@given(
    first=st.tuples(texts, st.integers(1, 80)).map(lambda run: run[0] * run[1]),
    second=st.tuples(texts, st.integers(1, 80)).map(lambda run: run[0] * run[1]),
    side=st.sampled_from(["left", "right"]),
)
@settings(max_examples=30, deadline=None)
def test_long_pairs_cut_before_tokenizing_give_the_tokens_of_the_whole(kinds, first, second, side):
    processor, tokenizer = kinds["bert"]
    if not (first + second).strip():
        return
    tokenized = processor.encode([Pair(first, second)], tokenization(side=side))
    one, two = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
    cut = len(one) + len(two) > 61
    one.truncate(61, direction=side)
    two.truncate(61 - len(one), direction=side)
    assert tokenized.work.encodings[0].ids.tolist() == [CLS, *one.ids, SEP, *two.ids, SEP]
    assert tokenized.truncated == cut


# -- the query -------------------------------------------------------------------------------------


def test_the_query_is_tokenized_once_whatever_the_number_of_threads(make, monkeypatch):
    processor = make()
    shown = shown_texts(processor, monkeypatch)
    query = processor.tokenize_query("how is the sky", tokenization())
    barrier = threading.Barrier(8)

    def work(_: int) -> list[int]:
        barrier.wait()
        pairs = processor.encode_pairs_of_query(query, ["red", "blue"], tokenization())
        return pairs.work.encodings[1].ids.tolist()

    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(work, range(8)))
    assert shown.count("how is the sky") == 1
    assert got == [[CLS, *words("how is the sky"), SEP, *words("blue"), SEP]] * 8


def test_megabytes_of_query_and_document_are_read_only_in_part(make, monkeypatch):
    processor = make()
    shown = shown_texts(processor, monkeypatch)
    document = "dog " * 1_000_000
    tokenized = beside(processor, "cat " * 1_000_000, [document] * 3, tokenization())
    assert [encoding.length for encoding in tokenized.work.encodings] == [16] * 3
    rules = tokenization(truncate=False, max_second_tokens=2)
    limited = beside(processor, "cat", [document], rules)
    assert limited.work.encodings[0].length == 6
    assert sum(map(len, shown)) < 30_000
