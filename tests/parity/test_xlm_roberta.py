"""XLM-R's published tokenizer against transformers, in the two forms in which models carry it."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from golden import make
from golden.families import FAMILIES

from converters import convert
from jaxembed.checkpoints import checkpoint
from jaxembed.config import TextConfig
from jaxembed.data.inputs import Pair
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from parity import sentences
from parity.reference import assert_within, relative, same_ids

# As all models of the family carry it, from before transformers 5, and set to cut at 128 and pad.
PUBLISHED = (
    Path(__file__).parents[3]
    / "shared"
    / "tokenizers"
    / "xlm-roberta-paraphrase-multilingual-mpnet-base-v2"
    / "tokenizer.json.gz"
)
pytestmark = pytest.mark.skipif(not PUBLISHED.is_file(), reason=f"no {PUBLISHED}")

VOCABULARY = 250002
LIMIT = 512
TEXTS = [*sentences.VARIED, "a <pad> b</s>c<mask> d <s>", "<pad>"]


def write_tokenizer(folder: Path, *, form: str) -> None:
    stored = gzip.decompress(PUBLISHED.read_bytes())
    (folder / "tokenizer.json").write_bytes(stored)
    config = {"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": LIMIT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if form == "saved anew":
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        assert (folder / "tokenizer.json").read_bytes() != stored


@pytest.fixture(name="folder", scope="module", params=["published", "saved anew"])
def _folder(request, tmp_path_factory) -> Path:
    """A narrow XLM-R with all of its vocabulary."""
    folder: Path = tmp_path_factory.mktemp("xlm")
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LIMIT + 2, "hidden_size": 4}
    make.save_tower(FAMILIES["xlm_roberta"], folder, **sizes)
    write_tokenizer(folder, form=request.param)
    return folder


@pytest.fixture(name="processor", scope="module")
def _processor(folder, tmp_path_factory) -> TextProcessor:
    out = tmp_path_factory.mktemp("out") / "xlm"
    spec = convert(folder, out, progress=lambda steps: steps)
    return TextProcessor(checkpoint.tokenizer_path(out), spec, LIMIT, TextConfig(), workers=1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_of_texts_equal_those_of_transformers(side, folder, processor, note):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, truncation_side=side)
    encodings = same_ids(processor, tokenizer, TEXTS, LIMIT, note)
    assert not any(one.types is not None and one.types.any() for one in encodings)


@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_of_pairs_equal_those_of_transformers(side, folder, processor, note):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, truncation_side=side)
    query = "What is a panda? </s> <pad>"
    wanted = tokenizer([query] * len(TEXTS), TEXTS, truncation="only_second", max_length=LIMIT)
    tokenization = TokenizationOptions(prompt="", truncate=True, side=side)
    encodings = processor.encode([Pair(query, text) for text in TEXTS], tokenization).work.encodings
    assert [one.ids.tolist() for one in encodings] == wanted["input_ids"]
    assert not any(one.types is not None and one.types.any() for one in encodings)
    note(f"{len(TEXTS)} pairs the same")


def test_a_bert_with_this_tokenizer_agrees(tmp_path, make_embedder, note):
    """multilingual-e5-small: BERT's positions, XLM-R's tokens, and more embeddings than tokens."""
    sizes = {"vocab_size": 250037, "max_position_embeddings": LIMIT, "hidden_size": 4}
    make.save_tower(FAMILIES["bert"], tmp_path, **sizes)
    for path in tmp_path.glob("vocab*"):
        path.unlink()
    write_tokenizer(tmp_path, form="published")
    embedder = make_embedder(tmp_path, [(2, LIMIT)])
    reference = make.load(tmp_path)
    got, wanted = embedder.encode(TEXTS), reference.encode(TEXTS, show_progress_bar=False)
    assert_within(relative(np.asarray(got), wanted), note, "vectors")
