"""NomicBERT and GTE at lengths far over 2,048 tokens, against transformers, tiny, in float32."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from golden import make
from golden.families import FAMILIES

from jaxembed import Embedder
from parity.reference import TOLERANCE, assert_within, drawn, hidden_apart, relative, run

LIMIT = 8192
LENGTHS = [1, 700, 2047, 2048, 2049, 4096, LIMIT]


class Pair(NamedTuple):
    """The same model twice, with its folder."""

    torch: Any
    embedder: Embedder
    folder: Path


@pytest.fixture(name="pair_of", scope="module")
def _pair_of(tmp_path_factory, make_embedder):
    def build(name: str, **said: Any) -> Pair:
        """A tiny model; `said` are fields of config.json that transformers did not write."""
        folder = tmp_path_factory.mktemp(name)
        family = FAMILIES[name]
        make.save_tower(family, folder, max_position_embeddings=LIMIT)
        backbone = getattr(transformers, family.backbone).from_pretrained(folder).eval()
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | said))
        return Pair(backbone, make_embedder(folder, [(1, LIMIT)]), folder)

    return build


@pytest.mark.parametrize("name", ["nomic_bert", "gte"])
def test_long_texts_agree(name, pair_of, note):
    pair = pair_of(name)
    inputs = drawn(pair.torch.config.vocab_size, LENGTHS)
    assert_within(hidden_apart(pair.embedder, pair.torch, inputs), note)  # 5.4e-6 was the most


def test_nomics_scaling_factor_raises_the_base_of_each_text_over_the_trained_length(pair_of, note):
    """transformers' class knows no rotary_scaling_factor: it is given the base of each length."""
    factor, trained = 2.0, 2048
    pair = pair_of("nomic_bert", rotary_scaling_factor=factor, max_trained_positions=trained)
    inputs = drawn(pair.torch.config.vocab_size, LENGTHS)
    got = list(run(pair.embedder, inputs, "tokens")["tokens"])
    apart = []
    for one, states in zip(inputs, got, strict=True):
        growth = max(factor * one.length / trained - (factor - 1), 1)
        width = pair.torch.config.head_dim
        base = 1000.0 * growth ** (width / (width - 2))
        rope = {"rope_type": "default", "rope_theta": base}
        backbone = transformers.NomicBertModel.from_pretrained(pair.folder, rope_parameters=rope)
        apart.append(relative(states, make.hidden_states(backbone.eval(), one.ids)))
    plain = make.hidden_states(pair.torch, inputs[-1].ids)
    assert relative(got[-1], plain) > 100 * TOLERANCE
    assert_within(max(apart), note)
