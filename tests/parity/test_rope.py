"""Scaled rotary positions against transformers, at lengths beyond those that models begin with.

transformers takes the angles of a batch from its longest sequence, and keeps them for later ones,
so that it gets each sequence alone, in order of their lengths. Ours lie packed in rows.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from golden import make
from golden.families import FAMILIES, sized

from parity.reference import assert_within, drawn, hidden_apart

ORIGINAL = {"original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": ORIGINAL | {"factor": 4.0},
    "yarn, its own ramp": ORIGINAL
    | {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7}
    | {"mscale_all_dim": 1.3},
    "llama3": ORIGINAL | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": ORIGINAL
    | {
        "short_factor": np.linspace(1, 2, 32).tolist(),
        "long_factor": np.linspace(1, 60, 32).tolist(),
        "factor": 4.0,
    },
}
LENGTHS = [1, 2, 17, 63, 64, 65, 100, 129, 200, 256]
WIDTHS = sized(256, 2, 4, 512, vocab_size=500, num_key_value_heads=2, head_dim=64)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("name", ROPES)
def test_states_agree_beyond_the_length_of_training(name, family, tmp_path, make_embedder, note):
    kind = name.partition(",")[0]
    positions = 64 if kind == "dynamic" else 256
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | ROPES[name]
    changes = WIDTHS | {"max_position_embeddings": positions, "rope_parameters": rope}
    make.save_tower(FAMILIES[family], tmp_path, **changes)
    backbone = getattr(transformers, FAMILIES[family].backbone)
    reference = backbone.from_pretrained(tmp_path, dtype=torch.float32).eval()
    embedder = make_embedder(tmp_path, [(2, 256)])
    apart = hidden_apart(embedder, reference, drawn(500, LENGTHS))
    embedder.close()
    assert_within(apart, note)  # 3.5e-6 was the most
