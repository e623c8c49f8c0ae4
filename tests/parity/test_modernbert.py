"""ModernBERT's real widths and tokenizer against transformers, at lengths far over the window."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from golden import make

from converters import convert
from jaxembed import Embedder
from jaxembed.checkpoints import checkpoint
from jaxembed.config import TextConfig
from jaxembed.preprocessing.text import TextProcessor
from parity import sentences
from parity.reference import assert_within, drawn, relative, run, same_ids

REAL = Path(__file__).parents[3] / "shared" / "tokenizers" / "modernbert"
PUBLISHED = REAL / "config.json"
needs_tokenizer = pytest.mark.skipif(not REAL.is_dir(), reason=f"no {REAL}")

LENGTHS = [1, 63, 64, 65, 66, 129, 130, 512, 700, 1023, 1024, 1500, 2048]


def whole_tokenizer(folder: Path) -> None:
    """A tokenizer for every id; what it gives is of no interest."""
    vocabulary = {str(n): n for n in range(50368)}
    word_level = tokenizers.models.WordLevel(vocabulary, unk_token="0")
    tokenizers.Tokenizer(word_level).save(str(folder / "tokenizer.json"))


@pytest.fixture(name="pair_of", scope="module")
def _pair_of(tmp_path_factory, make_embedder):
    def build(layers: int, length: int, **config: Any) -> tuple[Any, Embedder]:
        """A cross-encoder of modernbert-base's widths with room for `length` tokens, twice."""
        folder = tmp_path_factory.mktemp("modernbert")
        kind = transformers.ModernBertForSequenceClassification
        sizes = {"num_hidden_layers": layers, "max_position_embeddings": length, "num_labels": 1}
        model = kind(transformers.ModernBertConfig(**sizes, **config)).eval()
        make.randomise(model)
        model.save_pretrained(folder)
        whole_tokenizer(folder)
        return model, make_embedder(folder, [(1, length)])

    return build


@torch.no_grad()
def answers(model: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """transformers' last hidden states and logits of one sequence."""
    inputs = {"input_ids": torch.from_numpy(ids[None]).long()}
    inputs["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
    hidden = model.model(**inputs).last_hidden_state[0]
    return hidden.numpy(), model(**inputs).logits[0].numpy()


def assert_agrees(model: Any, embedder: Embedder, lengths: list[int], note) -> None:
    """Hidden states and logits; 1.2e-6 and 2.4e-6 were the most."""
    encodings = drawn(50368, lengths)
    result = run(embedder, encodings, "logits", "tokens")
    of_hidden, of_logits = [], []
    for one, tokens, logits in zip(encodings, result["tokens"], result["logits"], strict=True):
        hidden, wanted = answers(model, one.ids)
        of_hidden.append(relative(tokens, hidden))
        of_logits.append(np.abs(logits - wanted).max())
    assert_within(max(of_hidden), note)
    assert_within(max(of_logits), note, "logits")


@pytest.mark.parametrize("pooling", [pytest.param("cls", marks=pytest.mark.slow), "mean"])
def test_ragged_packed_rows_agree_below_and_beyond_the_window(pooling, pair_of, note):
    assert_agrees(*pair_of(4, 2048, classifier_pooling=pooling), LENGTHS, note)


@pytest.mark.slow
def test_the_longest_sequence_agrees(pair_of, note):
    assert_agrees(*pair_of(2, 8192, classifier_pooling="mean"), [8192], note)


@pytest.fixture(name="published", scope="module")
def _published(tmp_path_factory) -> Path:
    """The published config and tokenizer around random weights of one layer."""
    folder = tmp_path_factory.mktemp("published")
    config = json.loads(PUBLISHED.read_bytes()) | {"num_hidden_layers": 1}
    kind = transformers.ModernBertForMaskedLM
    kind(transformers.ModernBertConfig(**config)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # as transformers 4 wrote it
    packed = (REAL / "tokenizer.json.gz").read_bytes()
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    return folder


@needs_tokenizer
@pytest.mark.parametrize("limit", [8192, 16])
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_published_tokenizer_gives_their_ids(side, limit, published, tmp_path, note):
    texts = [*sentences.VARIED, "long " * 9000]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(published / "tokenizer.json"), truncation_side=side
    )
    spec = convert(published, tmp_path / "out")
    assert spec.max_input_tokens == 8192
    path = checkpoint.tokenizer_path(tmp_path / "out")
    processor = TextProcessor(path, spec, limit, TextConfig(), workers=1)
    same_ids(processor, tokenizer, texts, limit, note)
