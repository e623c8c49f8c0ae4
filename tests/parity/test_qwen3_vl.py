"""Qwen3-VL-Embedding and Qwen3-VL-Reranker against transformers: vectors and scores."""

import numpy as np
import pytest
from golden import qwen3_vl
from golden.families import sized

from parity import sentences
from parity.reference import assert_within

# The widths and heads of Qwen3-VL-Embedding-2B, two layers deep.
WIDE = sized(2048, 2, 16, 6144, 1024, num_key_value_heads=8, head_dim=128)
WIDE |= {"rope_parameters": qwen3_vl.TEXT["rope_parameters"] | {"mrope_section": [24, 20, 20]}}
SIZES = [
    pytest.param(qwen3_vl.TEXT, id="tiny"),
    pytest.param(WIDE, id="2048x2", marks=pytest.mark.slow),
]
TEXTS = [*sentences.WEIRD, *sentences.ENGLISH[:5]]
QUERY = "What is the capital of China?"
BUCKETS = [(1, 512), (2, 1024)]


@pytest.mark.parametrize("size", SIZES)
def test_vectors_of_texts_are_those_of_transformers(size, tmp_path, make_embedder, note):
    answer = qwen3_vl.save_embedder(tmp_path, size, limit=400)
    ours = make_embedder(tmp_path, BUCKETS)
    for options in ({}, {"prompt_name": "query"}, {"instruction": "Find the text"}):
        got = ours.encode(TEXTS, **options)
        wanted = np.stack([answer(text, options)["dense"] for text in TEXTS])
        assert_within(float(np.abs(got - wanted).max()), note, "components")


@pytest.mark.parametrize("size", SIZES)
def test_scores_of_pairs_are_those_of_transformers(size, tmp_path, make_embedder, note):
    judge = qwen3_vl.save_reranker(tmp_path, size)
    ours = make_embedder(tmp_path, BUCKETS)
    found = ours.rerank(QUERY, TEXTS, raw_scores=True)
    got = np.array([one.score for one in sorted(found, key=lambda one: one.index)])
    wanted = np.array([judge(QUERY, text) for text in TEXTS])
    assert wanted.std() > 0.01
    assert_within(float(np.abs(got - wanted).max() / np.abs(wanted).max()), note, "logits")
