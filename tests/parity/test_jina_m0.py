"""jina-reranker-m0 against transformers and the formulas of its code: token ids and scores of texts
and images on both sides."""

import numpy as np
import pytest
from golden import qwen2_vl
from golden.families import sized
from golden.qwen2_vl import CHAT, PAIR_LIMIT, TEXT, VISION
from golden.qwen3_vl import IMAGES
from transformers import AutoTokenizer

from jaxembed.data.inputs import Pair
from jaxembed.preprocessing.text import TokenizationOptions
from parity.reference import assert_within
from parity.test_qwen3_vl import MIXED, QUERY, SMALL, TEXTS, as_parts

# The limits of the authors' code but for the maximum, and the names of the published processor.
PUBLISHED = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136}
FEW = PUBLISHED | {"max_pixels": 31360}
# The widths and heads of jina-reranker-m0, with two layers and an image encoder of two.
WIDE = sized(1536, 2, 12, 8960, 400, num_key_value_heads=2)
WIDE |= {"rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [16, 24, 24]}}
WIDE_VISION = {"depth": 2, "embed_dim": 1280, "num_heads": 16}
EACH = [
    pytest.param((TEXT, VISION, IMAGES), id="tiny"),
    pytest.param((WIDE, WIDE_VISION, FEW), id="1536x2", marks=pytest.mark.slow),
]
DOCUMENTS = [*MIXED, *TEXTS[::8], TEXTS[-1], "", [SMALL], [SMALL, SMALL[::-1]]]


@pytest.mark.parametrize("sizes", EACH)
def test_scores_are_those_of_the_formulas(sizes, tmp_path, make_embedder, note):
    judge = qwen2_vl.save(tmp_path, *sizes)
    ours = make_embedder(tmp_path, [(1, 512)])
    documents = [as_parts(one) if isinstance(one, list) else one for one in DOCUMENTS]
    for query in (QUERY, [SMALL], [SMALL, "Which?"], ["Which one?", SMALL]):
        asked = as_parts(query) if isinstance(query, list) else query
        found = ours.rerank(asked, documents, raw_scores=True)
        got = np.array([one.score for one in sorted(found, key=lambda one: one.index)])
        wanted = np.array([judge(query, one) for one in DOCUMENTS])
        assert wanted.std() > 0.01
        assert_within(float(np.abs(got - wanted).max() / np.abs(wanted).max()), note, "logits")


def test_token_ids_are_those_of_the_whole_text(tmp_path, make_embedder, note):
    qwen2_vl.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.chat_template, tokenizer.model_max_length) == (CHAT, PAIR_LIMIT)
    processor = make_embedder(tmp_path, [(1, 128)]).model.main.text_processor
    pairs = [Pair(query, document) for query in TEXTS[::4] for document in TEXTS if query]
    tokenization = TokenizationOptions("", truncate=True, side="right")
    encodings = processor.encode(pairs, tokenization).work.encodings
    for pair, encoding in zip(pairs, encodings, strict=True):
        wanted = qwen2_vl.ids_of(tokenizer, pair.first, pair.second)
        if len(wanted) <= PAIR_LIMIT:  # a longer query is cut, too
            assert encoding.ids.tolist() == wanted
    note(f"{len(pairs)} pairs the same")
