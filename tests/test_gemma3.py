"""Gemma 3: what its configs say of windows, angles and scales, and what is refused."""

import logging

import ml_dtypes
import numpy as np
import pytest
from test_families import GEMMA3, GEMMA3_FIELDS

from converters import gemma3
from converters.weights import one_plus
from jaxembed.errors import UnsupportedModel
from jaxembed.models import parameter_shapes
from jaxembed.spec import ModelSpec, Pooled


def test_embedding_gemma_has_as_many_parameters_as_published():
    spec = ModelSpec(
        architecture=gemma3.ARCHITECTURE,
        config=GEMMA3_FIELDS,
        heads={"dense": Pooled(("mean",))},
        max_input_tokens=2048,
        hidden_size=768,
        dtype="float32",
        source="",
        content_hash="",
    )
    # the published 308 million, less 2 * 768 * 3072 of the Dense modules
    assert sum(leaf.size for leaf in parameter_shapes(spec).values()) == 302_863_104


def test_an_odd_window_may_be_one_that_was_halved_before(caplog):
    with caplog.at_level(logging.WARNING):
        gemma3.config(GEMMA3)
        assert not caplog.messages
        gemma3.config(GEMMA3 | {"sliding_window": 257})
    assert "sliding_window 257 is odd" in caplog.text
    assert "published is 512" in caplog.text


def test_one_plus_a_weight_keeps_what_bfloat16_would_lose():
    weight = np.array([2**-9, -0.5], ml_dtypes.bfloat16)
    scale = one_plus.apply(weight)
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(scale, np.array([1 + 2**-9, 0.5], np.float32))
    assert one_plus.dtype == "float32"


def test_a_soft_cap_of_logits_is_refused_where_they_are_scores():
    capped = GEMMA3 | {"final_logit_softcapping": 30.0}
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping 30"):
        gemma3.score_head(capped, GEMMA3_FIELDS, 1, 0)
    (rule,) = gemma3.score_head(GEMMA3, GEMMA3_FIELDS, 1, 0).rules
    assert rule.sources == "embed_tokens.weight"  # tied unless the config says otherwise
