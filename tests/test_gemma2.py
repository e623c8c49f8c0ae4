"""Gemma 2: what its configs say of windows, scores and their soft cap, and what is refused.

Its numbers are compared with torch's by the goldens.
"""

from collections import Counter

import numpy as np
import pytest
from conftest import WIDER_TOWERS, tiny_spec
from test_families import GEMMA2, GEMMA2_FIELDS, converted, golden, without

from converters import gemma2
from jaxembed.engine.kernels import calls
from jaxembed.errors import UnsupportedModel
from jaxembed.models import program
from jaxembed.models.attention import Sight


def test_scores_may_have_no_cap():
    uncapped = gemma2.config(GEMMA2 | {"attn_logit_softcapping": None})
    assert uncapped == without(GEMMA2_FIELDS, "score_cap")


def test_a_soft_cap_of_logits_is_refused_where_they_are_scores():
    for hf in (GEMMA2, without(GEMMA2, "final_logit_softcapping")):
        with pytest.raises(UnsupportedModel, match="final_logit_softcapping 30"):
            gemma2.score_head(hf, GEMMA2_FIELDS, 1, 0)
    uncapped = GEMMA2 | {"final_logit_softcapping": None}
    (rule,) = gemma2.score_head(uncapped, GEMMA2_FIELDS, 1, 0).rules
    assert rule.sources == "embed_tokens.weight"


def test_every_layer_caps_its_scores():
    """So attention is the native kernels' or XLA's: those of accelerators take no cap."""
    seen = calls(program(tiny_spec(**WIDER_TOWERS["gemma2"])), "bfloat16")
    sights = Counter({call.sight: count for call, count in seen.items()})
    assert sights == {Sight(causal=True, reach=3, cap=0.5): 1, Sight(causal=True, cap=0.5): 1}


def test_norms_are_one_more_than_their_weights(tmp_path):
    arrays = golden("gemma2_lasttoken")
    _, params = converted(arrays, tmp_path)
    weight = arrays["tensors/model.safetensors:layers.1.pre_feedforward_layernorm.weight"]
    np.testing.assert_array_equal(params["tower.layers.1.mlp_norm.scale"], 1 + weight)
    assert not any("query_norm" in name for name in params)
