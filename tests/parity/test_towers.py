"""Hidden states of random BERTs against transformers, tiny to full size, in float32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from golden import make

from jaxembed import Embedder
from jaxembed.inputs import Encoding, Text
from jaxembed.processors.text import Rules
from parity.reference import relative

BERTS: dict[str, dict[str, Any]] = {
    "tiny": make.BERT | {"hidden_size": 32, "max_position_embeddings": 64},
    "384x6": {
        "vocab_size": 30522,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "768x12": {"vocab_size": 30522},  # BertConfig's defaults are bert-base
}
TOLERANCE = 1e-5  # float32, sums in another order; 1.5e-6 was the most


@dataclass(frozen=True)
class Towers:
    bert: Any
    tokenizer: Any
    embedder: Embedder

    @property
    def limit(self) -> int:
        return self.embedder.max_input_tokens

    def hidden(self, encodings: list[Encoding]) -> list[np.ndarray]:
        ticket = self.embedder.engine.submit(encodings, frozenset({"tokens"})).result()
        return [tokens for tokens in ticket.tokens if tokens is not None]

    def apart(self, encodings: list[Encoding]) -> float:
        """The largest relative distance of any token's hidden state from transformers'."""
        pairs = zip(self.hidden(encodings), encodings, strict=True)
        return max(
            relative(got, make.hidden_states(self.bert, one.ids, one.types)) for got, one in pairs
        )


@pytest.fixture(name="towers", scope="module", params=BERTS)
def _towers(request, tmp_path_factory, make_embedder) -> Towers:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make.save_bert(folder, **BERTS[request.param])
    bert = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    length = bert.config.max_position_embeddings
    embedder = make_embedder(folder, [(2, length)])
    return Towers(bert, transformers.AutoTokenizer.from_pretrained(folder), embedder)


def test_hidden_states_agree_at_every_length_packed_several_to_a_row(towers, note):
    limit, draw = towers.limit, np.random.default_rng(0)
    lengths = range(1, 65) if limit == 64 else [1, 2, 3, 5, 17, 33, 64, 100, 129, 255, 257, 511]
    encodings = [
        Encoding(
            draw.integers(0, towers.bert.config.vocab_size, length, dtype=np.int32),
            draw.integers(0, 2, length, dtype=np.int32),
        )
        for length in [*lengths, limit]
    ]
    apart = towers.apart(encodings)
    note(f"hidden states within {apart:.1e}")
    assert apart < TOLERANCE


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_over_the_limit_are_cut_as_transformers_cuts_them(towers, side, note):
    texts = [" ".join(make.WORDS * 60), "the dog sat"]
    rules = Rules(prompt="", truncate=True, side=side)
    encodings = towers.embedder.processor.encode([Text(text) for text in texts], rules).encodings
    towers.tokenizer.truncation_side = side
    wanted = towers.tokenizer(texts, truncation=True, max_length=towers.limit)["input_ids"]
    assert [one.ids.tolist() for one in encodings] == wanted
    assert encodings[0].length == towers.limit
    apart = towers.apart(encodings)
    note(f"hidden states within {apart:.1e}")
    assert apart < TOLERANCE
