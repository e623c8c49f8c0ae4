"""Late chunking: the chunks of a text have the means of its hidden states."""

import asyncio
from itertools import pairwise
from string import ascii_lowercase

import numpy as np
import pytest
from conftest import LIMIT, NORMALIZED, WORDS, save_tiny, tiny_spec, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_windows import prose
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks.parameters import random_parameters
from jaxembed import ChunkedText, ChunkSize, Embedder, EngineConfig, TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.spec import DenseLayer
from jaxembed.engine.bucket import Bucket
from jaxembed.errors import EmptyInput, InputTooLong, InvalidChunk, InvalidInput
from jaxembed.preprocessing import windows as late_module
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.preprocessing.windows import join_texts, plan_windows
from jaxembed.runtime.options import EncodeOptions

ROOM = LIMIT - 2  # tokens of a text in a window, beside [CLS] and [SEP]
OVERLAP = ROOM // 4
PARTS = ["the cat sat", "on the mat", "where the dog runs"]
RELATIVE = 1e-5  # float32, sums in another order


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=RELATIVE, atol=RELATIVE)


def chunks_of(embedder, text, **options):
    (one,) = embedder.encode_chunks([text], **options)
    return one.vectors


def places_of(text: ChunkedText) -> list[list[int]]:
    assert not isinstance(text.chunks, ChunkSize)
    return [list(one) for one in text.chunks]


@pytest.fixture(name="open_embedder", scope="module")
def _open_embedder(tmp_path_factory, grid_file, closed_late):
    """Embedders of tiny checkpoints, by the fields of their spec."""

    def open_embedder(null_model=False, **changes) -> Embedder:
        path = tmp_path_factory.mktemp("tiny")
        save_tiny(path / "checkpoint", **changes)
        config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
        config = EngineConfig(null_model=True) if null_model else config
        embedder = Embedder(str(path / "checkpoint"), cache_dir=path, config=config)
        return closed_late.enter_context(embedder)

    return open_embedder


# one pass


def chunked_pooling(hidden: np.ndarray, spans) -> np.ndarray:
    """jina-ai/late-chunking: the means of the hidden states of each span."""
    return np.stack([hidden[start:end].astype(np.float64).mean(axis=0) for start, end in spans])


def test_chunks_are_the_means_of_the_hidden_states_of_the_whole_text(embedder):
    (hidden,) = embedder.compute([" ".join(PARTS)], ["tokens"])["tokens"]
    wanted = chunked_pooling(hidden, [(0, 4), (4, 7), (7, 12)])  # [CLS] with the first, [SEP] last
    close(chunks_of(embedder, PARTS, normalize=False), wanted)


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("prompt_name", [None, "query"])
def test_one_chunk_has_the_ordinary_vector(open_embedder, include_prompt, prompt_name):
    embedder = open_embedder(include_prompt=include_prompt)
    for text in ("the cat", prose(ROOM - 2), "  a cat  "):
        wanted = embedder.encode([text], prompt_name=prompt_name)
        got = chunks_of(embedder, [text], prompt_name=prompt_name)
        np.testing.assert_array_equal(got, wanted)


def test_places_in_a_text_are_the_same_chunks_as_a_list(embedder):
    text = " ".join(PARTS)
    places = [(0, 11), (11, 22), (22, 41)]
    wanted = chunks_of(embedder, PARTS)
    np.testing.assert_array_equal(chunks_of(embedder, ChunkedText(text, places)), wanted)
    without_spaces = [(0, 11), (12, 22), (23, 41)]
    np.testing.assert_array_equal(chunks_of(embedder, ChunkedText(text, without_spaces)), wanted)


def test_chunks_may_overlap_and_leave_gaps(embedder):
    text = " ".join(PARTS)
    (hidden,) = embedder.compute([text], ["tokens"])["tokens"]
    got = chunks_of(embedder, ChunkedText(text, [(4, 11), (8, 14), (8, 11)]), normalize=False)
    close(got, chunked_pooling(hidden, [(2, 4), (3, 5), (3, 4)]))


@pytest.mark.parametrize("truncate", [True, False])
def test_texts_have_the_same_vectors_alone_and_in_a_batch(embedder, truncate):
    texts = [PARTS, ChunkedText("the red sky", [(0, 3), (4, 11)]), ["a cat"], PARTS[::-1]]
    together = embedder.encode_chunks(texts, truncate=truncate)
    assert [len(one.vectors) for one in together] == [3, 2, 1, 3]
    for text, one in zip(texts, together, strict=True):
        close(one.vectors, chunks_of(embedder, text))
    again = asyncio.run(embedder.encode_chunks_async(texts, truncate=truncate))
    close(again[3].vectors, together[3].vectors)


def test_many_texts_are_tokenized_in_several_jobs(embedder):
    texts = [[prose(3 + k % 5, k), prose(2, k)] for k in range(150)]
    together = embedder.encode_chunks(texts)
    for k in (0, 63, 64, 149):
        close(together[k].vectors, chunks_of(embedder, texts[k]))
        assert together[k].bounds.tolist() == places_of(join_texts(texts[k]))


def test_vectors_are_cut_normalised_and_encoded_as_others(embedder):
    plain = chunks_of(embedder, PARTS, normalize=False)
    cut = chunks_of(embedder, PARTS, dimensions=7, normalize=True)
    close(cut, plain[:, :7] / np.linalg.norm(plain[:, :7], axis=1, keepdims=True))
    bits = chunks_of(embedder, PARTS, output_dtype="ubinary")
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1), plain > 0)


def test_more_chunks_than_a_row_has_slots_are_run_in_copies(embedder):
    """A row of 64 tokens has 16 slots."""
    text = prose(60)
    starts = np.cumsum([0, *(len(word) + 1 for word in text.split())]).tolist()
    words = [(start, end - 1) for start, end in pairwise(starts)]
    assert len(words) == 60 > Bucket(1, LIMIT).slots
    (hidden,) = embedder.compute([text], ["tokens"])["tokens"]
    spans = [(0, 2), *((k, k + 1) for k in range(2, 60)), (60, 62)]
    got = chunks_of(embedder, ChunkedText(text, words), normalize=False)
    close(got, chunked_pooling(hidden, spans))


# windows


ranges_of = st.integers(1, 400).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(
            st.integers(0, count - 1).flatmap(
                lambda start: st.tuples(st.just(start), st.integers(start + 1, count))
            ),
            max_size=30,
        ),
        st.integers(4, 80),
    )
)


@given(ranges_of, st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_windows_pool_every_token_of_every_chunk_once(case, share):
    count, ranges, room = case
    overlap = int(share * room)
    found = plan_windows(ranges, count, room, overlap)
    pooled = {chunk: [] for chunk in range(len(ranges))}
    for window in found:
        assert 0 < window.end - window.start <= room
        for chunk, start, end in window.pieces:
            assert window.start <= start < end <= window.end
            # what a window pools has the context before it, or is at the start of the text
            assert start >= min(window.start + overlap, window.end - 1) or window.start == 0
            pooled[chunk].append((start, end))
    for chunk, (start, end) in enumerate(ranges):
        parts = pooled[chunk]
        assert parts[0][0] == start
        assert parts[-1][1] == end
        assert all(one[1] == other[0] for one, other in pairwise(parts))
        if end - start <= room - overlap:
            assert len(parts) == 1
    assert len({window.start for window in found}) == len(found)


WINDOWS = {  # ranges, tokens, room, overlap: windows
    "the window ends before the chunk that does not fit": (
        *([(0, 6), (6, 12), (12, 16), (16, 24)], 24, 15, 3),
        [(0, 15, [(0, 0, 6), (1, 6, 12)]), (9, 24, [(2, 12, 16), (3, 16, 24)])],
    ),
    "the last window is the short tail": (
        *([(0, 10), (10, 12)], 12, 10, 2),
        [(0, 10, [(0, 0, 10)]), (8, 12, [(1, 10, 12)])],
    ),
    "a chunk longer than a window": (
        *([(0, 25)], 25, 10, 2),
        [(0, 10, [(0, 0, 10)]), (8, 18, [(0, 10, 18)]), (16, 25, [(0, 18, 25)])],
    ),
}


@pytest.mark.parametrize("case", WINDOWS.values(), ids=WINDOWS)
def test_windows_of_a_text(case):
    *text, windows = case
    assert plan_windows(*text) == windows


def windowed(embedder, words, ranges, prompt="") -> np.ndarray:
    """The means of token ranges of a long text, from the hidden states of each window alone."""
    head = len(prompt.split())
    room = ROOM - head
    sums = np.zeros((len(ranges), 32))
    sizes = np.zeros(len(ranges))
    for start, end, pieces in plan_windows(ranges, len(words), room, room // 4):
        text = prompt + " ".join(words[start:end])
        (hidden,) = embedder.compute([text], ["tokens"], prompt="")["tokens"]
        for chunk, first, last in pieces:
            a = 0 if first == 0 else first - start + 1 + head
            b = last - start + 1 + head + (last == len(words))
            sums[chunk] += hidden[a:b].astype(np.float64).sum(axis=0)
            sizes[chunk] += b - a
    return sums / sizes[:, None]


@pytest.mark.parametrize("prompt", ["", "what is "])
@pytest.mark.parametrize("sizes", [[40, 40, 40], [200], [10, 150, 5, 30], [7] * 40])
def test_a_long_text_is_run_in_windows(embedder, sizes, prompt):
    words = prose(sum(sizes)).split()
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [" ".join(words[a:b]) for a, b in pairwise(ends)]
    wanted = windowed(embedder, words, list(pairwise(ends)), prompt)
    close(chunks_of(embedder, parts, prompt=prompt, normalize=False), wanted)


def test_a_long_text_is_refused_where_nothing_may_be_divided(embedder):
    with pytest.raises(InputTooLong, match="202 tokens, the limit is 64") as raised:
        embedder.encode_chunks([PARTS, [prose(100), prose(100)]], truncate=False)
    assert raised.value.index == 1


def test_a_token_counts_once_for_the_client_and_each_time_it_runs_for_admission(embedder):
    texts = [join_texts([prose(100), prose(100)]), join_texts(PARTS)]
    request = embedder.model.tasks.embed_chunks(texts, EncodeOptions())
    answer = embedder.model.run(request)
    assert answer.num_tokens.tolist() == [202, 12]
    assert answer.truncated == 0
    work = request.prepare(embedder.model.main.processor, None, texts).work
    assert answer.chunked.windows.tolist() == [len(work) - 1, 1]
    assert work.tokens == 202 + 12 + (len(work) - 2) * (2 + OVERLAP)
    assert request.cost(embedder.spec, len(work), work.tokens).tokens == work.tokens


@pytest.mark.parametrize("chunks", [ChunkSize(8, 4), [(0, 3)] * 500])
def test_each_vector_is_admitted(embedder, chunks):
    text = ChunkedText(prose(2000), chunks)
    request = embedder.model.tasks.embed_chunks([text], EncodeOptions())
    one = embedder.model.tasks.embed_chunks([join_texts([text.text])], EncodeOptions())
    size = embedder.model.main.processor.estimate(request.inputs(), request.tokenization)
    more = request.cost(embedder.spec, *size).bytes - one.cost(embedder.spec, *size).bytes
    vectors = len(embedder.model.run(request).dense)
    assert vectors >= 499
    assert more >= (vectors - 1) * 2 * 4 * embedder.spec.dim


def test_a_chunk_that_is_divided_goes_through_linear_layers_alone(open_embedder):
    parts = [prose(10), prose(150)]
    linear = open_embedder(modules=(DenseLayer(32, 12, activation="identity"), *NORMALIZED))
    parameters = random_parameters(linear.spec)
    kernel, bias = (parameters[f"heads.dense.modules.0.{name}"] for name in ("kernel", "bias"))
    words = " ".join(parts).split()
    wanted = windowed(linear, words, [(0, 10), (10, 160)]) @ kernel + bias
    close(chunks_of(linear, parts, normalize=False), wanted)
    other = open_embedder(modules=(DenseLayer(32, 12), *NORMALIZED))
    with pytest.raises(InvalidChunk, match="chunk 1 has 150 tokens, and a window has room for 47"):
        other.encode_chunks([parts])
    assert len(chunks_of(other, [prose(40), prose(40)])) == 2


# chunks of so many tokens


def test_a_text_is_divided_by_its_tokens(embedder):
    text = f"  {prose(27)} "
    (one,) = embedder.encode_chunks([ChunkedText(text, ChunkSize(10, 3))])
    assert len(one.vectors) == 4
    words = [text[start:end].split() for start, end in one.bounds.tolist()]
    assert words == [text.split()[a : a + 10] for a in (0, 7, 14, 21)]
    assert (one.bounds[0, 0], one.bounds[-1, 1]) == (0, len(text))
    again = chunks_of(embedder, ChunkedText(text, one.bounds.tolist()))
    np.testing.assert_array_equal(one.vectors, again)


@pytest.mark.parametrize(
    ("field", "sizes"), [("chunk_size", [(7,), (-1,)]), ("chunk_overlap", [(20, 11), (20, -1)])]
)
def test_an_impossible_size_is_refused(embedder, field, sizes):
    for size in sizes:
        with pytest.raises(InvalidInput, match=f"`{field}` must be") as raised:
            embedder.encode_chunks([ChunkedText("the cat", ChunkSize(*size))])
        assert raised.value.field == field


# places


def byte_level(trim: bool) -> Tokenizer:
    """Byte-level BPE that merges a blank and a letter, as RoBERTa's (which trims blanks off places)
    and others."""
    merges = [("Ġ", letter) for letter in ascii_lowercase]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({token: k for k, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    return tokenizer


def metaspace() -> Tokenizer:
    vocabulary = [("<unk>", 0.0), *((f"▁{word}", -3.0) for word in WORDS), ("▁", -4.0)]
    vocabulary += [(chr(code), -5.0) for code in range(ord("a"), ord("z") + 1)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


TOKENIZERS = {
    "wordpiece": word_tokenizer,
    "byte-level": lambda: byte_level(False),
    "byte-level, trimmed": lambda: byte_level(True),
    "metaspace": metaspace,
}


@pytest.fixture(name="make_reader")
def _make_reader(tmp_path, closed):
    def make(tokenizer: Tokenizer, limit: int = 512, **spec) -> TextProcessor:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = tiny_spec().config | {"vocab_size": tokenizer.get_vocab_size()}
        spec = tiny_spec(config=config, **spec)
        processor = TextProcessor(tmp_path / "tokenizer.json", spec, limit, TextConfig(), 1)
        closed.callback(processor.executor.shutdown)
        return processor

    return make


def late_work(processor, text, prompt=""):
    rules = TokenizationOptions(prompt, truncate=True, side="right", max_windows=100)
    return processor.encode_chunked_texts([text], rules, slots=16)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["", "what is ", "a"])
def test_the_space_before_a_word_belongs_to_its_chunk(make_reader, name, prompt):
    """Whatever place the tokenizer gives to it."""
    processor = make_reader(TOKENIZERS[name]())
    text = "the cat sat on the mat"
    chunks = [(0, 3), (4, 7), (8, 22)], [(0, 3), (3, 7), (7, 22)], [(0, 4), (4, 8), (8, 22)]
    found = [late_work(processor, ChunkedText(text, one), prompt).work for one in chunks]
    bounds = found[0].bounds.tolist()
    assert bounds == found[1].bounds.tolist() == found[2].bounds.tolist()
    assert (bounds[0][0], bounds[-1][1]) == (0, found[0].tokens)
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    plain = processor.encode([Text(text)], TokenizationOptions(prompt, True, "right")).work
    np.testing.assert_array_equal(plain.planes["ids"], found[0].planes["ids"])


@pytest.mark.parametrize(
    ("unit", "places"),
    [
        ("code-points", [(0, 3), (4, 8), (9, 12)]),
        ("utf-16", [(0, 3), (4, 9), (10, 13)]),
        ("utf-8", [(0, 3), (4, 12), (13, 16)]),
    ],
)
def test_places_are_counted_in_the_unit_asked_for(make_reader, unit, places):
    processor = make_reader(word_tokenizer())
    text = "the é🙂at mat"
    found = late_work(processor, ChunkedText(text, places, unit))
    plain = late_work(processor, ChunkedText(text, [(0, 3), (4, 8), (9, 12)]))
    assert found.chunked.bounds.tolist() == [list(one) for one in places]
    np.testing.assert_array_equal(found.work.bounds, plain.work.bounds)
    sized = late_work(processor, ChunkedText(text * 9, ChunkSize(8), unit)).chunked.bounds
    assert sized[-1, 1] == 9 * places[-1][1]


# what is refused


@pytest.mark.parametrize(
    ("chunks", "unit", "chunk", "words"),
    [
        ([(0, 3), (4, 4)], "code-points", 1, "of \\[4, 4\\] is not a range of its text: "),
        ([(0, 11)], "code-points", 0, "end <= 10, in code-points"),
        ([(-1, 3)], "code-points", 0, "expected 0 <= start < end"),
        ([(0, 10**30)], "code-points", 0, "is not a range"),
        ([(0, 3), (4, 8), (3, 9)], "utf-16", 2, "the previous chunk, which starts at 4"),
        ([(0, 7)], "utf-16", 0, "within a character in utf-16"),
        ([(0, 3), (3, 4)], "code-points", 1, "has no tokens: it is empty or white space"),
    ],
)
def test_a_chunk_that_is_wrong_is_named(embedder, chunks, unit, chunk, words):
    words_of = "the cat on" if unit == "code-points" else "the ca🙂 on"
    text = ChunkedText(words_of, chunks, unit)
    with pytest.raises(InvalidChunk, match=words) as raised:
        embedder.encode_chunks([PARTS, text])
    assert (raised.value.index, raised.value.chunk) == (1, chunk)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ([], EmptyInput, None),
        ([""], EmptyInput, None),
        (ChunkedText("", [(0, 0)]), EmptyInput, None),
        (["the cat", " ", "sat"], InvalidChunk, "chunk 1 has no tokens"),
        (ChunkedText("the cat", []), InvalidInput, "the text has no chunks"),
        (ChunkedText("  ", ChunkSize(8)), InvalidInput, "has no tokens: it is white space"),
        ("the cat", TypeError, "not a string"),
        (["a" * 21], InvalidInput, "21 characters, and the limit for a text with chunks is 20"),
    ],
)
def test_a_text_that_has_no_chunks_is_refused(embedder, monkeypatch, text, error, words):
    monkeypatch.setattr(late_module, "MAX_READ_CHARACTERS", 20)
    with pytest.raises(error, match=words):
        embedder.encode_chunks([text])


def test_many_long_chunks_above_each_other_are_refused(embedder):
    """Each is in every window: so many of them would take much memory before they are run."""
    text, length = prose(200), len(prose(200))
    assert len(chunks_of(embedder, ChunkedText(text, [(0, length)] * 16))) == 16
    with pytest.raises(InvalidInput, match="have 3400 tokens together; the limit is 16 times the"):
        embedder.encode_chunks([ChunkedText(text, [(0, length)] * 17)])


def test_a_prompt_that_leaves_no_room_is_refused(embedder):
    prompt = "the " * (ROOM - 15)
    assert len(chunks_of(embedder, [prose(15)], prompt=prompt)) == 1  # it needs no windows
    with pytest.raises(InvalidInput, match="too little room for the text: 15 of the 16 tokens"):
        embedder.encode_chunks([[prose(16)]], prompt=prompt)


@pytest.mark.parametrize(
    ("pooling", "words"),
    [(("cls",), "cls;"), (("mean", "max"), "mean and max;"), (("lasttoken",), "lasttoken")],
)
def test_other_poolings_are_refused_by_name(open_embedder, pooling, words):
    embedder = open_embedder(null_model=True, pooling=pooling)
    with pytest.raises(InvalidInput, match=f"the pooling of this model is .*{words}"):
        embedder.encode_chunks([PARTS])


def test_options_that_late_chunking_does_not_take_are_refused(embedder):
    for field, value, words in (
        ("truncation_side", "left", "late chunking does not truncate texts"),
        ("outputs", frozenset({"tokens"}), "only the dense output"),
    ):
        options = EncodeOptions(**{field: value})
        with pytest.raises(InvalidInput, match=words) as raised:
            embedder.model.tasks.embed_chunks([join_texts(PARTS)], options)
        assert raised.value.field == field
