"""ModernBERT's real widths and tokenizer against transformers, at lengths far over the window."""

import gzip
import json
from dataclasses import dataclass
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
from jaxembed.data.inputs import Text
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from parity import sentences
from parity.reference import relative

REAL = Path(__file__).parents[3] / "shared" / "tokenizers" / "modernbert"
PUBLISHED = REAL / "config.json"
needs_tokenizer = pytest.mark.skipif(not REAL.is_dir(), reason=f"no {REAL}")

# float32, sums in another order: 1.2e-6 was the most of hidden states, 2.4e-6 of logits
TOLERANCE = 1e-5

LENGTHS = [1, 63, 64, 65, 66, 129, 130, 512, 700, 1023, 1024, 1500, 2048]


@dataclass(frozen=True)
class Pair:
    """The same model twice."""

    torch: Any
    embedder: Embedder


def whole_tokenizer(folder: Path) -> None:
    """A tokenizer for every id; what it gives is of no interest."""
    vocabulary = {str(n): n for n in range(50368)}
    word_level = tokenizers.models.WordLevel(vocabulary, unk_token="0")
    tokenizers.Tokenizer(word_level).save(str(folder / "tokenizer.json"))


@pytest.fixture(name="pair_of", scope="module")
def _pair_of(tmp_path_factory, make_embedder):
    def build(layers: int, length: int, **config: Any) -> Pair:
        """A cross-encoder of modernbert-base's widths with room for `length` tokens."""
        folder = tmp_path_factory.mktemp("modernbert")
        kind = transformers.ModernBertForSequenceClassification
        sizes = {"num_hidden_layers": layers, "max_position_embeddings": length, "num_labels": 1}
        model = kind(transformers.ModernBertConfig(**sizes, **config)).eval()
        make.randomise(model)
        model.save_pretrained(folder)
        whole_tokenizer(folder)
        return Pair(model, make_embedder(folder, [(1, length)]))

    return build


@torch.no_grad()
def answers(model: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """transformers' last hidden states and logits of one sequence."""
    inputs = {"input_ids": torch.from_numpy(ids[None]).long()}
    inputs["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
    hidden = model.model(**inputs).last_hidden_state[0]
    return hidden.numpy(), model(**inputs).logits[0].numpy()


def apart(pair: Pair, lengths: list[int]) -> tuple[float, float]:
    """The largest distances: of hidden states as a share of their length, and of logits."""
    draw = np.random.default_rng(0)
    sequences = [draw.integers(0, 50368, length, dtype=np.int32) for length in lengths]
    encodings = [Encoding(ids, None) for ids in sequences]
    work = work_from_encodings(encodings, frozenset({"logits", "tokens"}))
    result = pair.embedder.model.main.engine.submit(work).result()
    of_hidden, of_logits = [], []
    for ids, tokens, logits in zip(sequences, result["tokens"], result["logits"], strict=True):
        hidden, wanted = answers(pair.torch, ids)
        of_hidden.append(relative(tokens, hidden))
        of_logits.append(np.abs(logits - wanted).max())
    return max(of_hidden), max(of_logits)


@pytest.mark.parametrize("pooling", [pytest.param("cls", marks=pytest.mark.slow), "mean"])
def test_ragged_packed_rows_agree_below_and_beyond_the_window(pooling, pair_of, note):
    pair = pair_of(4, 2048, classifier_pooling=pooling)
    hidden, logits = apart(pair, LENGTHS)
    note(f"hidden states within {hidden:.1e}, logits {logits:.1e}")
    assert hidden < TOLERANCE
    assert logits < TOLERANCE


@pytest.mark.slow
def test_the_longest_sequence_agrees(pair_of, note):
    hidden, logits = apart(pair_of(2, 8192, classifier_pooling="mean"), [8192])
    note(f"hidden states within {hidden:.1e}, logits {logits:.1e}")
    assert hidden < TOLERANCE
    assert logits < TOLERANCE


@pytest.fixture(name="published", scope="module")
def _published(tmp_path_factory) -> Path:
    """The published config and tokenizer around random weights of one layer."""
    folder = tmp_path_factory.mktemp("published")
    config = json.loads(PUBLISHED.read_bytes()) | {"num_hidden_layers": 1}
    kind = transformers.ModernBertForMaskedLM
    kind(transformers.ModernBertConfig(**config)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # as transformers 4 wrote it
    (folder / "tokenizer.json").write_bytes(
        gzip.decompress((REAL / "tokenizer.json.gz").read_bytes())
    )
    return folder


@needs_tokenizer
@pytest.mark.parametrize("limit", [8192, 16])
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_published_tokenizer_gives_the_ids_of_transformers(
    side, limit, published, tmp_path, note
):
    texts = [*sentences.VARIED, "long " * 9000]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(published / "tokenizer.json"), truncation_side=side
    )
    wanted = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
    spec = convert(published, tmp_path / "out")
    assert spec.max_input_tokens == 8192
    path = checkpoint.tokenizer_path(tmp_path / "out")
    processor = TextProcessor(path, spec, limit, TextConfig(), workers=1)
    tokenization = TokenizationOptions(prompt="", truncate=True, side=side)
    encodings = processor.encode([Text(text) for text in texts], tokenization).work.encodings
    different = [
        text[:60]
        for text, one, ids in zip(texts, encodings, wanted, strict=True)
        if one.ids.tolist() != ids
    ]
    note(f"{len(texts) - len(different)} of {len(texts)} texts the same")
    assert not different
