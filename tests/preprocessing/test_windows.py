"""Long documents of a reranker: divided into windows, of which the best one counts."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TOWERS, WORDS, open_tiny
from hypothesis import given
from hypothesis import strategies as st
from test_embedder import save_scorer
from test_pairs import TEMPLATE, bare, bert, template
from test_server_openai import ask

from jaxembed.data.inputs import Text
from jaxembed.errors import EmptyInput, InputTooLong, InvalidInput
from jaxembed.preprocessing import text as text_module
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.preprocessing.windows import MIN_WINDOW_TOKENS, overlap_of, windows
from jaxembed.runtime.options import Chunk, ScoreOptions

LIMIT = 128
QUERY = "what cat"
ROOM = LIMIT - 5  # [CLS], two words, [SEP], and [SEP] at the end
ROUTES = {"/v1/rerank": "documents", "/v2/rerank": "documents", "/rerank": "texts"}


def prose(words: int, seed: int = 0) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(draw.choice(WORDS, words))


def tokenization(**options) -> TokenizationOptions:
    return TokenizationOptions("", truncate=True, side="right", **options)


@pytest.fixture(name="make", scope="module")
def _make(make_processor):
    def make(post_processor=bert, **spec) -> TextProcessor:
        return make_processor(LIMIT, post_processor, **spec)

    return make


@pytest.fixture(name="reranker", scope="module")
def _reranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("reranker")
    backbone = TOWERS["bert"]["config"] | {"max_positions": LIMIT}
    save_scorer(path / "checkpoint", config=backbone, max_input_tokens=LIMIT)
    with open_tiny(path / "checkpoint", path, (1, 128), (4, 128)) as embedder:
        yield embedder


@given(st.integers(0, 3000), st.integers(MIN_WINDOW_TOKENS, 600), st.none() | st.integers(0, 900))
def test_windows_cover_a_document_and_share_the_overlap(count, room, asked):
    assert [overlap_of(room, None) for room in (64, 100, 400)] == [16, 25, 80]
    overlap = overlap_of(room, asked)
    assert overlap == (min(room // 4, 80) if asked is None else min(asked, room // 2))
    found = windows(count, room, overlap)
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(end - start == room for start, end in found[:-1])
    assert 0 <= found[-1][1] - found[-1][0] <= room
    for (_, end), (start, last) in pairwise(found):
        assert end - start == overlap
        assert last > end  # no window lies within the one before


def ids_of(processor, document, **options) -> list[list[int]]:
    row = processor.tokenize_query(QUERY, tokenization(**options))
    work = processor.encode_pairs_of_query(row, [document], tokenization(**options)).work
    return [one.ids.tolist() for one in work.encodings]


@pytest.mark.parametrize(
    ("post_processor", "spec"),
    [
        (bert, {}),
        (template("[CLS]:1 $A:0 [SEP]:1 [SEP]:1 $B:1"), {}),
        (bare, {"labels": ("yes",), "template": TEMPLATE}),
    ],
)
def test_a_window_has_the_tokens_of_its_characters_as_a_document(make, post_processor, spec):
    processor = make(post_processor, **spec)
    long = prose(400)
    row = processor.tokenize_query(QUERY, tokenization())
    tokenized = processor.encode_pairs_of_query(row, [long], tokenization(max_windows=64))
    assert tokenized.windows is not None
    assert tokenized.windows.counts.tolist() == [len(tokenized.work)] != [1]
    assert tokenized.truncated == 0
    bounds = tokenized.windows.bounds.tolist()
    for one, (start, end) in zip(tokenized.work.encodings, bounds, strict=True):
        assert [one.ids.tolist()] == ids_of(processor, long[start:end])
        assert one.length <= LIMIT
    assert bounds[-1][1] == len(long)


def test_windows_beyond_the_most_are_cut(make, monkeypatch):
    processor = make()
    for document in ("", "cat", prose(ROOM), "  a cat  "):  # which fit
        assert ids_of(processor, document, max_windows=8) == ids_of(processor, document)
    row = processor.tokenize_query(QUERY, tokenization())
    long = prose(400)
    cut = processor.encode_pairs_of_query(row, [long, "cat"], tokenization(max_windows=2))
    assert cut.windows.counts.tolist() == [2, 1]
    assert cut.truncated == 1
    asked = {"max_windows": 64, "max_second_tokens": 130}
    kept = processor.encode_pairs_of_query(row, [long], tokenization(**asked))
    assert kept.windows.counts.tolist() == [2]
    assert kept.windows.bounds[-1, 1] == len(" ".join(long.split()[:130]))
    unread = TokenizationOptions("", truncate=False, side="right", **asked)
    assert processor.encode_pairs_of_query(row, [long], unread).truncated == 1  # as asked: no error
    strict = TokenizationOptions("", truncate=False, side="right", max_windows=2)
    with pytest.raises(InputTooLong):
        processor.encode_pairs_of_query(row, ["cat", long], strict)
    monkeypatch.setattr(text_module, "MAX_DIVIDED_TOKENS", 300)  # tokens that a thread reads
    found = processor.encode_pairs_of_query(row, [prose(2000)], tokenization(max_windows=64))
    assert found.truncated == 1
    assert found.windows.bounds[-1, 1] == len(" ".join(prose(2000).split()[:300]))


def test_a_query_that_leaves_no_room_is_refused(make):
    processor = make()
    query = "cat " * (ROOM - MIN_WINDOW_TOKENS + 3)
    row = processor.tokenize_query(query, tokenization())
    with pytest.raises(InvalidInput, match="little room for a document: 63 of the 64") as raised:
        processor.encode_pairs_of_query(row, ["cat"], tokenization(max_windows=2))
    assert raised.value.field == "query"


def test_the_best_window_counts_and_is_named(reranker):
    documents = [prose(300, 1), "a cat", prose(500, 2), prose(300, 1)]
    ranked = reranker.rerank(QUERY, documents, raw_scores=True, max_chunks=64)
    assert sorted(one.index for one in ranked) == [0, 1, 2, 3]
    rules, processor = tokenization(max_windows=64), reranker.model.main.processor
    row = processor.tokenize_query(QUERY, rules)
    for one in ranked:
        text = documents[one.index]
        bounds = processor.encode_pairs_of_query(row, [text], rules).windows.bounds.tolist()
        parts = [text[start:end] for start, end in bounds]
        alone = reranker.rerank(QUERY, parts, raw_scores=True)
        assert one.score == pytest.approx(alone[0].score, abs=1e-5)
        assert one.chunk == Chunk(alone[0].index, *bounds[alone[0].index])
    first = reranker.rerank(QUERY, documents, raw_scores=True)
    cut = {one.index: one.score for one in first}
    assert all(one.score >= cut[one.index] - 1e-5 for one in ranked)
    assert all(one.chunk is None for one in first)


def test_many_documents_are_divided_in_several_jobs(reranker):
    documents = [prose(50 + 10 * (k % 30), k) for k in range(60)]  # over JOB_CHARACTERS together
    together = reranker.rerank(QUERY, documents, max_chunks=64)
    for one in (together[0], together[30], together[59]):
        (alone,) = reranker.rerank(QUERY, [documents[one.index]], max_chunks=64)
        assert (alone.score, alone.chunk) == (pytest.approx(one.score, abs=1e-6), one.chunk)


@pytest.mark.parametrize(("path", "field"), ROUTES.items())
def test_every_route_that_reranks_takes_and_names_chunks(reranker, path, field):
    body = {"query": QUERY, field: ["a cat", prose(300, 1)], "model": reranker.name}
    wanted = {one.index: one for one in reranker.rerank(QUERY, body[field], max_chunks=64)}
    for asked in ({"max_chunks_per_doc": 64}, {"long_documents": "chunk", "overlap_tokens": 30}):
        response, answer = ask(body | asked, path=path, embedder=reranker.model)
        assert response.status_code == 200
        results = answer["results"] if isinstance(answer, dict) else answer
        assert {one["index"] for one in results} == {0, 1}
        for one in results:
            best = wanted[one["index"]].chunk
            score = one.get("relevance_score", one.get("score"))
            assert score == pytest.approx(wanted[one["index"]].score, abs=1e-6)
            if "overlap_tokens" in asked:  # a quarter of 123 is 30
                assert one["chunk"] == {"index": best.index, "start": best.start, "end": best.end}
        assert "x-truncated-inputs" not in response.headers
        assert int(response.headers["x-compute-tokens"]) > 300
    cut = body | {"long_documents": "truncate"}
    response, answer = ask(cut, path=path, embedder=reranker.model)
    assert response.headers["x-truncated-inputs"] == "1"


def assert_each_window_is_admitted(embedder, request, room: int, limit: int) -> None:
    """Of a document of 2000 words: the estimate holds all windows, and then they are counted."""
    processor = embedder.model.main.processor
    sequences, tokens = processor.estimate(request.inputs(), request.tokenization)
    assert sequences == tokens // limit > 10
    told = []
    permit = SimpleNamespace(correct=lambda cost: told.append(cost[:2]))
    asyncio.run(embedder.model.runner.run_async(request, permit))
    ((sequences, tokens),) = told
    assert sequences == len(windows(2000, room, overlap_of(room, None)))
    assert tokens > 2000


def test_each_window_is_admitted(reranker):
    with pytest.raises(InvalidInput, match="only `rerank` divides"):
        reranker.model.tasks.score([Text("a cat")], ScoreOptions(max_chunks=2))
    request = reranker.model.tasks.rerank(QUERY, [prose(2000)], ScoreOptions(max_chunks=64))
    assert_each_window_is_admitted(reranker, request, ROOM, LIMIT)


def test_a_document_without_tokens_is_named_by_its_index(make):
    with pytest.raises(EmptyInput) as raised:
        make(bare).encode_documents([Text("cat"), Text(" ")], tokenization(max_windows=2))
    assert raised.value.index == 1
