"""Text to token ids: truncation, prompts, pairs, offsets."""

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from conftest import LIMIT, WORDS, word_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from jaxembed.config import TextConfig
from jaxembed.data.inputs import Pair, Text, Tokens
from jaxembed.errors import (
    BareTokenIds,
    ConfigError,
    EmptyInput,
    InputTooLong,
    InvalidInput,
    TokenizerError,
)
from jaxembed.preprocessing import tokenizer as tokenizer_module
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.preprocessing.tokenizer import INPUTS_A_JOB, JOB_CHARACTERS, Tokenizer, cut_tokens

CLS, SEP = 2, 3
ID = {word: 5 + k for k, word in enumerate(WORDS)}


def words(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


@pytest.fixture(name="processor", scope="module")
def _processor(make_processor) -> TextProcessor:
    """Limit 8: six tokens of text between [CLS] and [SEP]."""
    return make_processor()


@pytest.fixture(name="wide", scope="module")
def _wide(make_processor) -> TextProcessor:
    return make_processor(limit=LIMIT)


def tokenization(prompt="", *, truncate=True, side="right") -> TokenizationOptions:
    return TokenizationOptions(prompt, truncate, side)


def ids_of(processor, one, with_rules=None) -> list[int]:
    tokenized = processor.encode([one], with_rules or tokenization())
    return tokenized.work.encodings[0].ids.tolist()


def with_special_tokens(single: str):
    def give(tokenizer) -> None:
        names = [("[CLS]", CLS), ("[SEP]", SEP)]
        tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=names)

    return give


FAR_OVER = "cat " * 1_000_000


def shown_texts(processor: TextProcessor, monkeypatch) -> list[str]:
    """Each text that the tokenizer is given from now on."""
    shown: list[str] = []
    usual = processor._tokenizer.encode

    def encode(texts, **options):
        shown.extend(texts)
        return usual(texts, **options)

    monkeypatch.setattr(processor._tokenizer, "encode", encode)
    return shown


def test_padding_and_truncation_stored_with_the_tokenizer_are_switched_off(wide):
    """The fixture's tokenizer stores both at 16, as all-MiniLM-L6-v2 does at 128."""
    assert word_tokenizer().padding is not None
    assert word_tokenizer().truncation is not None
    assert ids_of(wide, Text("the cat")) == [CLS, *words("the cat"), SEP]
    assert len(ids_of(wide, Text("cat " * 40))) == 42


def test_encodings_are_int32_and_have_types_where_there_are_some(make_processor, processor):
    (encoding,) = processor.encode([Text("the cat")], tokenization()).work.encodings
    assert encoding.ids.dtype == np.int32
    assert encoding.types is None
    assert encoding.spans == ((0, encoding.length),)
    typed = make_processor(post_processor=with_special_tokens("[CLS]:1 $A:1 [SEP]:1"))
    (encoding,) = typed.encode([Text("cat " * 9)], tokenization()).work.encodings
    assert encoding.types.tolist() == [1] * 8
    assert encoding.types.dtype == np.int32


@pytest.mark.parametrize(
    ("side", "kept"), [("right", "the cat sat on the mat"), ("left", "sat on the mat a dog")]
)
def test_truncation_keeps_the_special_tokens_around_the_text(processor, side, kept):
    text = Text("the cat sat on the mat a dog")
    tokenized = processor.encode([text, Text("a dog")], tokenization(side=side))
    assert tokenized.work.encodings[0].ids.tolist() == [CLS, *words(kept), SEP]
    assert tokenized.work.encodings[1].ids.tolist() == [CLS, *words("a dog"), SEP]
    assert tokenized.truncated == 1
    exactly = processor.encode([Text("cat " * 6)], tokenization(truncate=False, side=side))
    assert (exactly.truncated, exactly.work.encodings[0].length) == (0, 8)


LONG = [(Text("cat " * 7), 9), (Text("cat " * 100), 102), (Tokens([7] * 9), 9)]


@pytest.mark.parametrize(("one", "count"), [*LONG, (Pair("cat " * 4, "dog " * 3), 10)])
def test_without_truncation_a_long_input_is_refused_with_its_count(processor, one, count):
    with pytest.raises(InputTooLong, match=f"{count} tokens, the limit is 8") as raised:
        processor.encode([Text("cat"), one], tokenization(truncate=False))
    assert "truncate" in str(raised.value)
    assert (raised.value.limit, raised.value.got, raised.value.exact) == (8, count, True)


@pytest.mark.parametrize("one", [Text(FAR_OVER), Pair("a cat", FAR_OVER), Pair(FAR_OVER, "a cat")])
def test_an_input_far_over_the_limit_is_refused_by_its_beginning(processor, one, monkeypatch):
    shown = shown_texts(processor, monkeypatch)
    with pytest.raises(InputTooLong, match=r"at least \d+ tokens, the limit is 8") as raised:
        processor.encode([one] * 100, tokenization(truncate=False))
    assert 8 < raised.value.got < 1_000_000
    assert not raised.value.exact
    assert sum(map(len, shown)) < 10_000  # nor are the inputs after it read


def test_inputs_of_all_kinds_keep_their_order(processor):
    inputs = [Tokens([9, 9]), Text("cat"), Pair("a", "dog"), Text("dog"), Tokens([7])] * 200
    encodings = processor.encode(inputs, tokenization()).work.encodings
    cat, a, dog = words("cat a dog")
    wanted = [[9, 9], [CLS, cat, SEP], [CLS, a, SEP, dog, SEP], [CLS, dog, SEP], [7]]
    assert [encoding.ids.tolist() for encoding in encodings] == wanted * 200


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ("a cat", "the dog", ("a cat", "the dog")),
        ("a cat", "the dog sat on the mat", ("a cat", "the dog sat")),
        ("the cat sat on the mat", "a dog", ("the cat sat on the", "")),
        ("the cat sat on the", "a dog", ("the cat sat on the", "")),
        ("", "a dog", ("", "a dog")),
        ("a dog", "", ("a dog", "")),
    ],
)
def test_of_a_pair_the_second_text_is_cut_first(processor, first, second, wanted):
    tokenized = processor.encode([Pair(first, second)], tokenization())
    first_ids, second_ids = words(wanted[0]), words(wanted[1])
    (encoding,) = tokenized.work.encodings
    assert encoding.ids.tolist() == [CLS, *first_ids, SEP, *second_ids, SEP]
    assert encoding.types.tolist() == [0] * (len(first_ids) + 2) + [1] * (len(second_ids) + 1)
    assert tokenized.truncated == ((first, second) != wanted)


def test_a_pair_cut_from_the_left_keeps_the_ends(processor):
    ids = ids_of(processor, Pair("a cat", "the dog sat on the mat"), tokenization(side="left"))
    assert ids == [CLS, *words("a cat"), SEP, *words("on the mat"), SEP]


def test_a_prompt_is_given_named_or_the_default(make_processor, processor):
    assert processor.prompt("how is ", "query") == "how is "
    assert processor.prompt("", "query") == ""
    assert processor.prompt(None, "query") == "what is "
    assert processor.prompt(None, None) == ""
    default = make_processor(text=TextConfig(default_prompt="the "))
    assert default.prompt(None, None) == "the "
    assert default.prompt("", None) == ""
    named = make_processor(text=TextConfig(default_prompt_name="passage"))
    assert named.prompt(None, None) == "the "
    assert make_processor(default_prompt_name="query").prompt(None, None) == "what is "


def test_an_unknown_prompt_name_is_refused_with_those_there_are(make_processor, processor):
    with pytest.raises(InvalidInput, match="no prompt 'title'; it has passage, query") as raised:
        processor.prompt(None, "title")
    assert raised.value.field == "prompt_name"
    with pytest.raises(InvalidInput, match="it has no prompts"):
        make_processor(prompts={}).prompt(None, "query")
    with pytest.raises(ConfigError, match="--default-prompt-name title"):
        make_processor(text=TextConfig(default_prompt_name="title"))
    with pytest.raises(ConfigError, match="--default-prompt or --default-prompt-name, not both"):
        make_processor(text=TextConfig(default_prompt="a", default_prompt_name="query"))


def test_a_prompt_stands_before_each_text_and_not_before_pairs_or_tokens(processor):
    inputs = [Text("cat"), Pair("cat", "dog"), Tokens([7])]
    rules = tokenization("what is ")
    assert [one.ids.tolist() for one in processor.encode(inputs, rules).work.encodings] == [
        [CLS, *words("what is cat"), SEP],
        [CLS, *words("cat"), SEP, *words("dog"), SEP],
        [7],
    ]
    long = Text("the cat sat on a mat")  # the prompt counts against the limit
    assert ids_of(processor, long, rules) == [CLS, *words("what is the cat sat on"), SEP]


def test_a_prompt_that_is_not_pooled_is_counted_with_the_tokens_before_it(make_processor):
    """[CLS] and the prompt, not its [SEP]: what sentence-transformers leaves out."""
    processor = make_processor(include_prompt=False)
    with_prompt, without = tokenization("what is "), tokenization()
    assert processor.encode([Text("cat")], with_prompt).work.bounds.tolist() == [[3, 5]]
    assert processor.encode([Text("cat")], without).work.bounds.tolist() == [[0, 3]]
    assert make_processor().encode([Text("cat")], with_prompt).work.bounds.tolist() == [[0, 5]]
    long_prompt = tokenization("the " * 30)
    ((first, end),) = processor.encode([Text("cat")], long_prompt).work.bounds.tolist()
    assert first == end - 1  # something is always pooled


def test_token_ids_run_verbatim(processor):
    assert ids_of(processor, Tokens([CLS, CLS, 0, 48])) == [CLS, CLS, 0, 48]
    assert ids_of(processor, Tokens(range(5, 15))) == list(range(5, 13))
    assert ids_of(processor, Tokens(range(5, 15)), tokenization(side="left")) == list(range(7, 15))


def test_token_ids_may_be_an_array(processor):
    ids = array("I", [CLS, 7, 48])
    assert ids_of(processor, Tokens(ids)) == [CLS, 7, 48]
    assert processor.decode([ids], skip_special_tokens=False)
    as_list = processor.estimate([Tokens(ids.tolist())], tokenization())
    assert processor.estimate([Tokens(ids)], tokenization()) == as_list
    with pytest.raises(InvalidInput, match="token id 49 is out of range"):
        processor.encode([Tokens(array("I", [5, 49, 6]))], tokenization())
    with pytest.raises(EmptyInput):
        processor.encode([Tokens(array("I"))], tokenization())


def test_token_ids_out_of_range_are_refused_with_the_range(processor):
    for bad in (-1, 49, 2**31, 2**40, 2**70, -(2**70)):
        with pytest.raises(InvalidInput, match=f"token id {bad} is out of range.*0 to 48"):
            processor.encode([Tokens([5, bad, 6])], tokenization())
        with pytest.raises(InvalidInput, match=f"token id {bad} "):
            processor.decode([[5], [bad]], skip_special_tokens=True)


def test_decode_gives_the_text_of_ids(processor):
    ids = [[CLS, *words("the cat"), SEP], words("a dog")]
    assert processor.decode(ids, skip_special_tokens=True) == ["the cat", "a dog"]
    assert processor.decode(ids, skip_special_tokens=False)[0].startswith("[CLS] the")
    with pytest.raises(EmptyInput):
        processor.decode([[5], []], skip_special_tokens=True)


WHOLE = TokenizationOptions("", truncate=True, side="right", bare_ids=False)


@pytest.mark.parametrize(
    "ids", [[7], [7, 8], [CLS, 7], [7, SEP], [SEP, 7, CLS], [CLS], [7, CLS, 8, SEP, 9]]
)
def test_token_ids_without_special_tokens_are_refused_where_they_must_be_whole(processor, ids):
    with pytest.raises(BareTokenIds, match=r"\[2\] before and \[3\] after") as refusal:
        processor.encode([Text("cat"), Tokens(ids)], WHOLE)
    assert refusal.value.index == 1
    assert ids_of(processor, Tokens(ids)) == ids


def test_whole_token_ids_run_as_they_are_and_are_cut_as_texts(processor, make_processor):
    with pytest.raises(BareTokenIds):  # of no special tokens nothing is known
        make_processor(post_processor=with_special_tokens("$A")).encode([Tokens([7, 8])], WHOLE)
    assert ids_of(processor, Tokens([CLS, 7, SEP]), WHOLE) == [CLS, 7, SEP]
    assert ids_of(processor, Tokens([CLS, SEP]), WHOLE) == [CLS, SEP]
    long = Tokens([CLS, *range(5, 15), SEP])
    for options in (WHOLE, tokenization()):
        assert ids_of(processor, long, options) == [CLS, *range(5, 11), SEP]
    assert ids_of(processor, Tokens([CLS, *range(5, 15)])) == [CLS, *range(5, 12)]


def test_an_empty_input_is_refused_even_with_a_prompt(processor):
    for one in (Text(""), Tokens([]), Pair("", "")):
        for prompt in ("", "what is "):
            with pytest.raises(EmptyInput, match="the input is empty"):
                processor.encode([Text("cat"), one], tokenization(prompt))


def test_texts_of_spaces_and_nul_are_texts(processor):
    for text in (" ", "\n\t ", "\0", "\0\0cat"):
        assert ids_of(processor, Text(text)) == [CLS, *words(text.strip("\0 \n\t")), SEP]


@pytest.mark.parametrize("single", ["[CLS] $A [SEP]", "$A", "[CLS] $A [SEP] $A [SEP]"])
def test_a_short_text_has_the_special_tokens_of_its_template(make_processor, single):
    one = make_processor(post_processor=with_special_tokens(single), limit=LIMIT)
    together = one.encode([Text("cat dog"), Text("cat dog")], tokenization()).work
    assert ids_of(one, Text("cat dog")) == together.encodings[0].ids.tolist()


def test_outer_white_space_reaches_the_tokenizer(processor, monkeypatch):
    shown = shown_texts(processor, monkeypatch)
    processor.encode([Text("  cat \n"), Text(" dog")], tokenization())
    assert shown == ["  cat \n", " dog"]


def test_a_lone_surrogate_is_refused(processor):
    for text in ("\ud800", "cat \udfff dog", "\ud800" + "cat " * 5000):
        with pytest.raises(TokenizerError, match="lone surrogate"):
            processor.encode([Text(text)], tokenization(truncate=False))


@pytest.fixture(name="plain", scope="module")
def _plain() -> tokenizers.Tokenizer:
    tokenizer = word_tokenizer()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


pieces_of_text = st.one_of(
    st.sampled_from(["the ", "cat ", "a", "dog, ", "\u6f22\u5b57", "e\u0301 ", "\U0001f600"]),
    st.tuples(st.sampled_from([" ", "\n", "\0", "\u00a0", "\u0301"]), st.integers(1, 900)).map(
        lambda run: run[0] * run[1]
    ),
    st.integers(1, 220).map(lambda n: "cat" + "z" * n),
    st.tuples(st.sampled_from(["the ", "mat "]), st.integers(1, 60)).map(lambda r: r[0] * r[1]),
    st.text(max_size=30),
)
STRADDLING = "cat " * 45 + " " * 760 + "cat" + "z" * 200  # 84 characters of a word before the cut


@pytest.mark.parametrize(
    ("unit", "side"),
    [("cat ", "right"), ("cat ", "left"), ("a,", "right"), ("z", "left"), (" ", "right")],
)
def test_of_megabytes_the_first_or_last_tokens_are_embedded(processor, unit, side, monkeypatch):
    """The tokenizer is never shown more of ordinary text than the cut; a single word or spaces
    must be read to their end."""
    is_ordinary = unit in ("cat ", "a,")
    text = unit * (1_000_000 if is_ordinary else 200_000)
    shown = shown_texts(processor, monkeypatch)
    tokenized = processor.encode([Text(text)], tokenization(side=side))
    wanted = {"cat ": words("cat") * 6, "a,": [ID["a"], 1] * 3, "z": [1], " ": []}[unit]
    assert tokenized.work.encodings[0].ids.tolist() == [CLS, *wanted, SEP]
    assert tokenized.truncated == is_ordinary
    if is_ordinary:
        assert sum(map(len, shown)) < 10_000


def test_a_text_of_too_many_characters_for_few_tokens_is_refused(processor):
    """Not even its tokens are known before it is read to its end, and that takes 400 MB."""
    most = "z" * tokenizer_module.MAX_READ_CHARACTERS
    assert ids_of(processor, Text(most)) == [CLS, 1, SEP]
    inputs = [Text("cat"), Text(f"{most}z")]
    for truncate in (True, False):
        with pytest.raises(InvalidInput, match="first 524288 do not determine its first") as raised:
            processor.encode(inputs, tokenization(truncate=truncate))
        assert raised.value.index == 1


def model_of(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of another kind, as those of GPT-2 and XLM-R are made."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "BPE":
        merges = [("c", "a"), ("ca", "t"), ("\u0120", "cat"), ("z", "z"), ("zz", "zz")]
        names = [*letters, *("".join(merge) for merge in merges)]
        vocabulary = {name: k for k, name in enumerate(names)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer
    scores = {"<unk>": -20.0, "\u2581": -3.0, "\u2581cat": -4.0, "cat": -5.0, "zz": -4.0}
    scores |= {letter: -6.0 for letter in "acdghtoez,"}
    tokenizer = tokenizers.Tokenizer(models.Unigram(list(scores.items()), unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


@pytest.fixture(name="kinds", scope="module")
def _kinds(tmp_path_factory, plain) -> dict[str, Tokenizer]:
    """Tokenizers as they are served; `file` is what others make of the same file."""
    opened = {}
    tokenizers_of_all_kinds = {kind: model_of(kind) for kind in ("BPE", "Unigram")}
    for kind, tokenizer in {"WordPiece": plain, **tokenizers_of_all_kinds}.items():
        path = tmp_path_factory.mktemp("kind") / "tokenizer.json"
        tokenizer.save(str(path))
        opened[kind] = Tokenizer(path)
    return opened


def assert_enough(tokenizer: Tokenizer, text: str, most: int, side) -> None:
    """Of a text all tokens are read, or those that are left of the whole."""
    wanted = np.array(tokenizer.file.encode(text, add_special_tokens=False).ids)
    ((ids, whole),) = tokenizer.rows([text], most, side)
    if whole:
        assert ids.tolist() == wanted.tolist()
    else:
        assert len(wanted) > most
        assert cut_tokens(ids, most, side).tolist() == cut_tokens(wanted, most, side).tolist()


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "Unigram"])
@given(
    text=st.lists(pieces_of_text, min_size=1, max_size=40).map("".join).filter(bool),
    max_tokens=st.sampled_from([1, 8, 64, 512]),
    side=st.sampled_from(["left", "right"]),
)
@example(text=STRADDLING, max_tokens=LIMIT, side="right")
@example(text=STRADDLING[::-1].replace("tac", "cat"), max_tokens=LIMIT, side="left")
@settings(max_examples=25, deadline=None)
def test_enough_of_a_text_has_the_ids_of_the_whole(kinds, kind, text, max_tokens, side):
    assert_enough(kinds[kind], text, max_tokens, side)


def test_offsets_are_bytes_of_the_prompted_text(processor):
    text, prompt = "a caf\u00e9, \u6f22 CAT\U0001f600 dog", "\u00fc the "
    data = (prompt + text).encode()
    many = [text] * (INPUTS_A_JOB + 2)  # two jobs
    for pieces in processor.pieces(many, special=True, prompt=prompt)[:: len(many) - 1]:
        ends = [(p.id, p.start, p.stop) for p in (pieces[0], pieces[-1])]
        assert ends == [(CLS, None, None), (SEP, None, None)]
        for piece in pieces[1:-1]:
            assert not piece.special
            assert data[piece.start : piece.stop].decode() == piece.text
        texts = [piece.text for piece in pieces[1:-1]]
        assert (texts[1:3], texts[-1]) == (["the", "a"], "dog")
        assert "\u6f22" in texts
        assert pieces[-2].stop == len(data)


def test_pieces_are_uncut_and_without_special_tokens_where_not_asked_for(processor):
    (pieces,) = processor.pieces(["cat " * 50], special=False, prompt="")
    assert [piece.id for piece in pieces] == [ID["cat"]] * 50
    assert [(piece.start, piece.stop) for piece in pieces[:2]] == [(0, 3), (4, 7)]
    with pytest.raises(EmptyInput):
        processor.pieces(["cat", ""], special=True, prompt="")


def test_a_limit_without_room_for_text_is_refused(make_processor):
    assert ids_of(make_processor(limit=3), Text("cat dog")) == [CLS, ID["cat"], SEP]
    with pytest.raises(ConfigError, match=r"-length is 2, .* no room.* the model needs \(2\)"):
        make_processor(limit=2)


def test_the_estimate_is_a_guess_within_the_limit(processor):
    inputs = [Text("x" * 8), Text("x" * 10**6), Pair("x" * 4, "x" * 4), Tokens([1, 2, 3])]
    assert processor.estimate(inputs, tokenization()) == (4, 4 + 8 + 4 + 5)


def test_many_threads_share_one_processor(wide):
    """Different sides and lengths at once: were they the tokenizer's settings, they would mix."""
    text, barrier = Text("the cat sat on the mat " * 50), threading.Barrier(8)
    wanted = {side: ids_of(wide, text, tokenization(side=side)) for side in ("left", "right")}
    assert wanted["left"] != wanted["right"]

    def work(k: int) -> None:
        side = ("left", "right")[k % 2]
        barrier.wait()
        for _ in range(20):
            if k % 4 == 3:
                wide.pieces([text.text], special=True, prompt="")
            else:
                assert ids_of(wide, text, tokenization(side=side)) == wanted[side]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("wrong", [Text("cat " * 9), Text(""), Pair("", ""), Tokens([10**9])])
def test_an_error_says_which_input_it_is_about(processor, wrong):
    inputs = [Text("cat"), Tokens([5]), Pair("cat", "dog")]
    for place in (0, 2, 3):
        given = [*inputs[:place], wrong, *inputs[place:]]
        with pytest.raises(InvalidInput) as raised:
            processor.encode(given, tokenization(truncate=False))
        assert raised.value.index == place


@given(sizes=st.lists(st.integers(0, 2 * JOB_CHARACTERS), max_size=200))
@settings(max_examples=50, deadline=None)
def test_chunks_are_bounded_in_number_and_characters_and_keep_all_in_order(sizes):
    parts = list(tokenizer_module.chunks(sizes, lambda size: size))
    assert [size for part in parts for size in part] == sizes
    assert all(len(part) == 1 or sum(part) <= JOB_CHARACTERS for part in parts)
    assert all(0 < len(part) <= INPUTS_A_JOB for part in parts)
