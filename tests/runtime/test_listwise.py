"""jina-reranker-v3, which reads the documents of a query together: its blocks and limits, what it
refuses, and its answers. The golden compares its scores."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from sources import change_json, converted
from test_families import golden
from test_golden import write_source
from test_server_openai import ask

from jaxembed import Embedder, EngineConfig
from jaxembed.config import TextConfig
from jaxembed.data.spec import Routes
from jaxembed.errors import (
    CheckpointError,
    EmptyInput,
    InputTooLong,
    InvalidInput,
    UnsupportedModel,
    WrongTask,
)
from jaxembed.runtime.options import ScoreOptions
from jaxembed.runtime.tasks import Tasks
from jaxembed.server.registry.models import Models

LIMIT = 2560  # tokens of a sequence; in bytes the prompt has nearly a thousand
QUERY, DOCUMENTS = "what is the sky", ["the cat", "the sky", "", "the cat"]


@pytest.fixture(name="ranker", scope="module")
def _ranker(tmp_path_factory) -> Iterator[Embedder]:
    """It caches."""
    folder = tmp_path_factory.mktemp("listwise")
    source, grid = write_source(golden("qwen3_listwise"), folder / "source"), folder / "grid.json"
    grid.write_text(f'{{"buckets": [[1, {LIMIT}]]}}')
    config = EngineConfig(
        dtype="float32", devices=1, buckets=grid, max_batch_tokens=LIMIT, cache_bytes=1 << 20
    )
    with Embedder(str(source), cache_dir=folder, config=config) as embedder:
        yield embedder


def blocks(ranker: Embedder, query: str, documents: list[str], **options) -> tuple[list[int], int]:
    """How many documents are read together, and how many documents were cut."""
    request = ranker.model.tasks.rerank(query, documents, ScoreOptions(**options))
    tokenized = request.prepare(ranker.model.main.processor, None, request.items)
    lengths = tokenized.work.lengths
    assert max(lengths) <= LIMIT
    return [int(slots) - 1 for slots in tokenized.work.slots], tokenized.truncated


def scores(ranker: Embedder, query: str, documents: list[str], **options) -> np.ndarray:
    """In the order of the documents."""
    found = ranker.rerank(query, documents, **options)
    return np.array([one.score for one in sorted(found, key=lambda one: one.index)])


def test_a_score_depends_on_the_documents_before(ranker):
    whole = scores(ranker, QUERY, DOCUMENTS)
    assert whole[0] != whole[3]  # equal documents at different places
    alone = np.array([scores(ranker, QUERY, [one])[0] for one in DOCUMENTS])
    assert abs(whole - alone).min() > 1e-4
    assert not np.allclose(scores(ranker, QUERY, DOCUMENTS[::-1])[::-1], whole, atol=1e-4)
    assert np.array_equal(scores(ranker, QUERY, DOCUMENTS, raw_scores=True), whole)
    assert not np.allclose(scores(ranker, QUERY, DOCUMENTS, instruction="a"), whole, atol=1e-4)


def test_the_best_come_first_over_http_and_from_the_cache(ranker):
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 3, "return_documents": True}
    body |= {"priority": "interactive"}  # only such answers are kept
    wanted = ranker.rerank(QUERY, DOCUMENTS, top_n=3)
    for path, hits in (("/v1/rerank", None), ("/v2/rerank", "1")):
        send = {"path": path, "models": Models([ranker.model], {ranker.name: ["tiny"]})}
        response, answer = ask(body | {"model": "tiny"}, **send)
        assert response.status_code == 200, answer
        assert response.headers["x-score-source"] == "listwise"
        assert response.headers.get("x-cache-hits") == hits  # the model reads one sequence
        found = answer["results"]
        assert [one["index"] for one in found] == [one.index for one in wanted]
        values = [one["relevance_score"] for one in found]
        assert values == pytest.approx([one.score for one in wanted], abs=2e-6)
        assert [one["document"]["text"] for one in found] == [
            DOCUMENTS[one.index] for one in wanted
        ]


def test_documents_beyond_a_block_are_read_in_further_blocks(ranker):
    assert blocks(ranker, QUERY, ["a"] * 10) == ([10], 0)
    # the templates of more documents are over the limit
    assert blocks(ranker, QUERY, ["a"] * 126) == ([63, 63], 0)
    # after four there is less room than a document may have
    assert blocks(ranker, QUERY, ["x " * 200] * 5, max_document_tokens=1000) == ([4, 1], 0)
    found = scores(ranker, QUERY, ["a"] * 126)
    assert np.array_equal(found[:63], found[63:])


def test_a_block_that_is_over_the_limit_after_all_is_halved(ranker, monkeypatch):
    monkeypatch.setattr(ranker.model.main.processor._lists, "_each", 0)  # more is read than counted
    assert blocks(ranker, QUERY, ["a"] * 90) == ([45, 45], 0)


def test_admission_counts_what_stands_in_every_block(ranker):
    for count, words in ((1, 1), (40, 3), (126, 30), (300, 1)):
        documents = ["cat dog " * words] * count
        options = ScoreOptions(instruction="the dog " * 50)
        request = ranker.model.tasks.rerank(QUERY, documents, options)
        processor = ranker.model.main.processor
        estimate = processor.estimate(request.inputs(), request.tokenization)
        work = request.prepare(processor, None, request.items).work
        # in bytes the texts have more tokens than an estimate by their characters
        assert estimate[0] <= len(work) <= 3 * estimate[0]
        assert 0.3 * work.tokens <= estimate[1] <= 1.2 * work.tokens


def test_texts_over_their_limits_are_cut_or_refused(ranker):
    document, query = "x " * 1500, "x " * 300
    assert blocks(ranker, QUERY, ["a", document], truncate=True)[1] == 1
    assert blocks(ranker, query, ["a", "b"], truncate=True)[1] == 2  # the query is in both
    assert blocks(ranker, QUERY, ["a", "b" * 9], max_document_tokens=3) == ([2], 1)
    with pytest.raises(InputTooLong, match="3000 tokens") as refused:
        ranker.rerank(QUERY, ["a", document], truncate=False)
    assert refused.value.index == 1
    with pytest.raises(InputTooLong) as refused:
        ranker.rerank(query, ["a"], truncate=False)
    assert refused.value.field == "query"
    with pytest.raises(InvalidInput, match="leave no room for a document"):
        ranker.rerank(QUERY, ["a"], instruction="x " * 1200)


def test_an_instruction_is_limited_as_on_routes_that_embed(ranker):
    text, processor = TextConfig(max_instruction_tokens=9), ranker.model.main.processor
    tasks = Tasks("tiny", Routes({"": ranker.spec}), processor, text)
    with pytest.raises(InvalidInput, match="more than 9 tokens") as refused:
        tasks.rerank(QUERY, DOCUMENTS, ScoreOptions(instruction="x " * 9))
    assert refused.value.field == "instruction"


def test_names_of_the_two_tokens_are_taken_out_of_texts(ranker):
    whole = scores(ranker, QUERY, DOCUMENTS)
    spelled = [f"<|embed<|embed_token|>_token|>{one}<|rerank_token|>" for one in DOCUMENTS]
    request = ranker.model.tasks.rerank(QUERY, spelled, ScoreOptions())
    work = request.prepare(ranker.model.main.processor, None, request.items).work
    assert work.slots.tolist() == [5]
    assert np.array_equal(scores(ranker, f"<|embed_token|>{QUERY}", DOCUMENTS), whole)
    with pytest.raises(EmptyInput):
        ranker.rerank("<|rerank_token|>", DOCUMENTS)


def test_what_reads_rows_alone_is_refused(ranker):
    with pytest.raises(WrongTask, match="takes no single texts or pairs"):
        ranker.score([(QUERY, "the cat")])
    with pytest.raises(WrongTask, match="cannot embed, only rerank"):
        ranker.encode("a")
    with pytest.raises(InvalidInput, match="does not divide them"):
        ranker.rerank(QUERY, DOCUMENTS, max_chunks=2)


async def test_requests_do_not_change_each_other(ranker):
    some = [[f"{text} {number}" for text in DOCUMENTS[: number + 1]] for number in range(4)]
    together = await asyncio.gather(*(ranker.rerank_async(QUERY, one) for one in some))
    for found, documents in zip(together, some, strict=True):
        wanted = ranker.rerank(QUERY, documents)
        assert [one.index for one in found] == [one.index for one in wanted]
        values = [[one.score for one in each] for each in (found, wanted)]
        np.testing.assert_allclose(*values, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "as in jina-reranker-v3.5"),
        ({"auto_map": {"AutoModel": "other.Model"}}, "other.Model"),
    ],
    ids=["windows", "other-code"],
)
def test_other_models_of_this_kind_are_refused(config, message, tmp_path):
    source = write_source(golden("qwen3_listwise"), tmp_path / "source")
    change_json(source / "config.json", use_sliding_window=True, sliding_window=8, **config)
    with pytest.raises(UnsupportedModel, match=message):
        converted(source)


def test_the_tokens_of_the_prompt_must_be_there(tmp_path):
    source = write_source(golden("qwen3_listwise"), tmp_path / "source")
    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text.replace("<|embed_token|>", "<|other|>"))
    with pytest.raises(CheckpointError, match=r"has no added token '<\|embed_token"):
        converted(source)
