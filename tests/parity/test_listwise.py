"""jina-reranker-v3 in its published width, with its tokenizer and with that of tiny models: token
ids and scores. The golden has it in tiny."""

import asyncio
from typing import Any

import numpy as np
import pytest
import transformers
from golden import listwise
from golden.families import sized
from golden.make import QUESTION

from jaxembed import Embedder
from jaxembed.runtime.options import ScoreOptions
from parity import sentences
from parity.test_qwen3 import TOKENIZERS, unpack

LIMIT = 16384
PUBLISHED = sized(1024, 2, 16, 3072, num_key_value_heads=8, head_dim=128)
PUBLISHED |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
LONG = ["长" * 2500, "👩‍👩‍👧‍👦🇩🇪" * 400, "\n\nword " * 2100]  # cut within a character
ODD = [*sentences.WEIRD, "", "\n\n", "a <|rerank_token|>b<|embed_token|>", "<|im_end|>"]
INSTRUCTION = "Prefer what was said in the morning."


def documents_of(count: int) -> list[str]:
    return (sentences.ENGLISH * 2)[:count]


def ids_of(embedder: Embedder, query: str, documents: list[str], **options: Any) -> list[list[int]]:
    request = embedder.model.tasks.rerank(query, documents, ScoreOptions(**options))
    work = request.prepare(embedder.model.main.processor, None, request.items).work
    return [one.ids.tolist() for one in work.encodings]


def scores_of(embedder: Embedder, documents: list[str], **options: Any) -> np.ndarray:
    """In the order of the documents; the raw scores are the same numbers."""
    ranked = embedder.rerank(QUESTION, documents, **options)
    assert ranked == embedder.rerank(QUESTION, documents, raw_scores=True, **options)
    return np.array([one.score for one in sorted(ranked, key=lambda one: one.index)])


@pytest.fixture(name="tokenizer", params=["tiny", "published"], scope="module")
def _tokenizer(request, tmp_path_factory) -> Any:
    """None stands for that of tiny models."""
    if request.param == "tiny":
        return None
    if not TOKENIZERS.is_dir():
        pytest.skip(f"no {TOKENIZERS}")
    folder = tmp_path_factory.mktemp("tokenizer")
    unpack("qwen3", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(listwise.TOKENS)})
    return tokenizer


@pytest.mark.parametrize(
    "wide", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tiny", "wide"]
)
def test_scores_agree(tokenizer, wide, tmp_path, make_embedder, note):
    if wide and tokenizer is None:
        pytest.skip("as slow, with other texts")
    reference = listwise.save(tmp_path, tokenizer, limit=LIMIT, **(PUBLISHED if wide else {}))
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    cases = [documents_of(count) for count in (1, 3, 64)]
    if not wide:  # more than a block has: by their number, and by their tokens
        cases += [documents_of(130), [*LONG * 3, *documents_of(6)]]
    worst, blocks = 0.0, []
    for documents in cases:
        wanted = reference.rank(QUESTION, documents)
        got = scores_of(embedder, documents)
        blocks.append(len(ids_of(embedder, QUESTION, documents)))
        worst = max(worst, float(np.abs(got - wanted).max()))
    note(f"scores within {worst:.1e}, in blocks of {blocks}")
    assert worst < 1e-4
    assert wide or min(blocks[3:]) > 1


def test_token_ids_are_those_of_the_whole_prompt(tokenizer, tmp_path, make_embedder):
    reference = listwise.save(tmp_path, tokenizer, limit=LIMIT)
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    for query in (QUESTION, "?", "\nwho\n\n", "e\u0301", "我 " * 600):
        for documents in (ODD, LONG, ODD[::-1]):
            for instruction in (None, INSTRUCTION):
                wanted = reference.prompts(query, documents, instruction)
                assert ids_of(embedder, query, documents, instruction=instruction) == wanted


def test_scores_do_not_depend_on_what_else_is_in_the_batch(tmp_path, make_embedder):
    listwise.save(tmp_path)
    embedder = make_embedder(tmp_path, [(1, 1024), (2, listwise.LIMIT)])
    requests = [documents_of(count) for count in (3, 1, 7, 5)]
    alone = [embedder.rerank(QUESTION, documents) for documents in requests]

    async def together() -> list:
        return await asyncio.gather(*(embedder.rerank_async(QUESTION, one) for one in requests))

    for got, wanted in zip(asyncio.run(together()), alone, strict=True):
        assert [one.index for one in got] == [one.index for one in wanted]
        scores = [[one.score for one in each] for each in (got, wanted)]
        np.testing.assert_allclose(*scores, rtol=0, atol=2e-6)
