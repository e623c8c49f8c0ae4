"""BAAI's rerankers on language models in their published widths, at each layer with a head, in the
library and over HTTP; their token ids with a tokenizer of sentences. The goldens have them in tiny.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import transformers
from golden import baai, make
from golden.families import sized

from jaxembed.data.inputs import Pair
from jaxembed.preprocessing.text import TokenizationOptions
from parity import sentences
from parity.reference import answers, from_every_order, in_every_order

GEMMA = sized(2048, 2, 8, 16384, num_key_value_heads=1, head_dim=256)
MINICPM = sized(2304, 2, 36, 5760, num_key_value_heads=36)
GEMMA2 = sized(3584, 2, 16, 14336, num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256)
CASES: dict[str, Any] = {
    "gemma": partial(baai.save_gemma, **GEMMA),
    "minicpm": partial(baai.save_minicpm, **MINICPM),
    "minicpm-1": partial(baai.save_minicpm, layer=1, **MINICPM),
    "gemma2": partial(baai.save_lightweight, **GEMMA2),
}
TEXTS = [*sentences.WEIRD[:5], "", *sentences.ENGLISH[:2]]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "gemma2" else []) for n in CASES]
)
def test_logits_of_the_published_width_agree(name, tmp_path, make_embedder, note):
    judge = CASES[name](tmp_path)
    layer = int(name[-1]) if "-" in name else None
    embedder = make_embedder(tmp_path, [(2, 256)], cutoff_layer=layer)
    assert embedder.spec.config["num_layers"] == (layer or 2)
    wanted = np.array([judge(make.QUESTION, text) for text in TEXTS])
    batches = in_every_order(TEXTS)
    fixed: dict[str, Any] = {"query": make.QUESTION, "raw_scores": True}
    answered = answers(embedder, "/rerank", [fixed | {"texts": batch} for batch in batches])
    ranked = [embedder.rerank(make.QUESTION, batch, raw_scores=True) for batch in batches]
    here = [[(one.index, one.score) for one in batch] for batch in ranked]
    there = [[(one["index"], one["score"]) for one in batch] for batch in answered]
    got = [from_every_order([[s for _, s in sorted(one)] for one in way]) for way in (here, there)]
    apart = np.abs(np.array(got) - wanted).max()
    note(f"logits within {apart:.1e} of a spread of {wanted.std():.1e}")
    assert apart < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["gemma", "minicpm", "gemma2"])
def test_every_line_is_tokenized_by_itself(name, tmp_path, make_embedder):
    save = CASES[name].func
    save(tmp_path)
    embedder = make_embedder(tmp_path, [(1, 256)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = baai.LIGHT_PROMPT if name == "gemma2" else baai.PROMPT
    documents = [*sentences.WEIRD, *sentences.ENGLISH]
    tokenization = TokenizationOptions(prompt="", truncate=True, side="right")
    pairs = [Pair(make.QUESTION, document) for document in documents]
    work = embedder.model.main.processor.encode(pairs, tokenization).work
    wanted = [baai.ids_of(tokenizer, make.QUESTION, text, prompt, 256) for text in documents]
    assert [one.ids.tolist() for one in work.encodings] == wanted
