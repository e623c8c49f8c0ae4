"""The real all-MiniLM-L6-v2 against sentence-transformers: vectors and token ids."""

import numpy as np
import pytest
import transformers
from golden import make
from sentence_transformers import SentenceTransformer
from sources import converted

from converters import convert
from jaxembed.checkpoints import checkpoint
from jaxembed.config import TextConfig
from jaxembed.preprocessing.text import TextProcessor
from parity import sentences
from parity.reference import minilm, same_ids, smallest_cosine

MINILM = minilm()

COSINES = {"float32": 0.99999, "bfloat16": 0.9995}

needs_stsb = pytest.mark.skipif(
    not sentences.STSB.is_file(),
    reason=f"no {sentences.STSB}: only the texts of tests/parity/sentences.py are compared",
)


@pytest.fixture(name="reference", scope="module")
def _reference() -> SentenceTransformer:
    return make.load(MINILM)


@pytest.fixture(name="stsb", scope="module")
def _stsb(reference) -> tuple[list[str], np.ndarray]:
    texts = sentences.stsb()
    return texts, reference.encode(texts, batch_size=64, show_progress_bar=False)


@pytest.mark.parametrize("bucket", [(4, 256), (1, 2048)])  # the model takes 256 tokens
@pytest.mark.parametrize("dtype", COSINES)
def test_vectors_of_varied_texts_agree(dtype, bucket, reference, make_embedder, note):
    assert len(sentences.ENGLISH) >= 100
    embedder = make_embedder(MINILM, [bucket], dtype)
    wanted = reference.encode(sentences.VARIED, show_progress_bar=False)
    cosine = smallest_cosine(embedder.encode(sentences.VARIED), wanted)
    note(f"{len(wanted)} cosines from 1 - {1 - cosine:.1e} ({embedder.dtype})")
    assert cosine >= COSINES[dtype]


@needs_stsb
def test_vectors_of_all_stsb_sentences_agree(stsb, make_embedder, note):
    embedder = make_embedder(MINILM, [(32, 32), (1, 256)], "float32")
    texts, wanted = stsb
    cosine = smallest_cosine(embedder.encode(texts), wanted)
    note(f"{len(wanted)} cosines from 1 - {1 - cosine:.1e}")
    assert cosine >= COSINES["float32"]


@pytest.mark.parametrize("limit", [256, 16])
@pytest.mark.parametrize("side", ["right", "left"])
def test_token_ids_equal_those_of_transformers(side, limit, tmp_path, note):
    texts = sentences.VARIED + (sentences.stsb() if sentences.STSB.is_file() else [])
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM, truncation_side=side)
    spec = convert(MINILM, tmp_path / "minilm")
    path = checkpoint.tokenizer_path(tmp_path / "minilm")
    processor = TextProcessor(path, spec, limit, TextConfig(), workers=1)
    same_ids(processor, tokenizer, texts, limit, note)


def test_a_copy_saved_by_this_sentence_transformers_has_the_same_parameters(reference, tmp_path):
    reference.save_pretrained(str(tmp_path / "copy"), create_model_card=False)
    spec, first = converted(MINILM, tmp_path / "out-0")
    other, second = converted(tmp_path / "copy", tmp_path / "out-1")
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)
    for name in ("architecture", "config", "heads", "max_input_tokens", "dtype"):
        assert getattr(spec, name) == getattr(other, name), name
