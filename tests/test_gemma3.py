"""Gemma 3: what its configs say of windows, angles and scales, and what is refused."""

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from converters import gemma3
from converters.weights import one_plus
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import parameter_shapes
from jaxembed.spec import ModelSpec, Pooled

# EmbeddingGemma-300m, as transformers 4 wrote it
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 1152,
    "max_position_embeddings": 2048,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "_sliding_window_pattern": 6,
    "use_bidirectional_attention": True,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
}
LOCAL = [number for number in range(24) if number % 6 != 5]


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in PUBLISHED.items() if key not in keys}


def test_embedding_gemma_as_published():
    fields = gemma3.config(PUBLISHED)
    assert fields["local_layers"] == LOCAL
    assert fields["local_reach"] == 256
    assert (fields["rope_theta"], fields["local_theta"]) == (1e6, 1e4)
    assert "rope_scaling" not in fields
    assert fields["embedding_scale"] == 768**0.5
    assert fields["query_scale"] == 1.0
    assert fields["activation"] == "gelu_tanh"
    assert not fields["causal"]
    assert fields["overflows_float16"]
    spec = ModelSpec(
        architecture=gemma3.ARCHITECTURE,
        config=fields,
        heads={"dense": Pooled(("mean",))},
        max_input_tokens=2048,
        hidden_size=768,
        dtype="float32",
        source="",
        content_hash="",
    )
    # the published 308 million, less 2 * 768 * 3072 of the Dense modules
    assert sum(leaf.size for leaf in parameter_shapes(spec).values()) == 302_863_104


def test_configs_of_transformers_4_and_5_say_the_same():
    old_keys = ("rope_theta", "rope_local_base_freq", "rope_scaling", "_sliding_window_pattern")
    kinds = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(24)]
    new = without(*old_keys) | {
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert gemma3.config(new) == gemma3.config(PUBLISHED)
    oldest = without("_sliding_window_pattern") | {"sliding_window_pattern": 6}
    assert gemma3.config(oldest) == gemma3.config(PUBLISHED)
    bare = without(*old_keys, "head_dim", "query_pre_attn_scalar", "hidden_activation")
    assert gemma3.config(bare) == gemma3.config(PUBLISHED)


def test_rope_scaling_is_for_layers_without_a_window():
    scaled = PUBLISHED | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    fields = gemma3.config(scaled)
    assert fields["rope_scaling"] == {"kind": "linear", "factor": 8.0}
    assert fields["local_theta"] == 1e4


@pytest.mark.parametrize(
    ("fields", "reach"),
    [
        ({}, 256),
        ({"sliding_window": 7}, 3),
        ({"use_bidirectional_attention": False}, 511),  # harrier: the token itself is in it
        ({"use_bidirectional_attention": None, "is_causal": False}, 512),  # transformers' own rule
    ],
)
def test_how_far_a_window_reaches(fields, reach):
    assert gemma3.config(PUBLISHED | fields)["local_reach"] == reach


def test_an_odd_window_may_be_one_that_was_halved_before(caplog):
    with caplog.at_level(logging.WARNING):
        gemma3.config(PUBLISHED)
        assert not caplog.messages
        gemma3.config(PUBLISHED | {"sliding_window": 257})
    assert "sliding_window 257 is odd" in caplog.text
    assert "published is 512" in caplog.text


def test_scores_are_scaled_by_the_config_and_not_by_the_width_of_heads():
    assert (
        gemma3.config(PUBLISHED | {"query_pre_attn_scalar": 168})["query_scale"]
        == (256 / 168) ** 0.5
    )


def test_one_plus_a_weight_keeps_what_bfloat16_would_lose():
    weight = np.array([2**-9, -0.5], ml_dtypes.bfloat16)
    scale = one_plus.apply(weight)
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(scale, np.array([1 + 2**-9, 0.5], np.float32))
    assert one_plus.dtype == "float32"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, UnsupportedModel, "attn_logit_softcapping 50.0"),
        ({"rope_parameters": {"rope_theta": 1e6}}, UnsupportedModel, "rope_parameters of rope_th"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            UnsupportedModel,
            "rope_parameters.sliding_attention .* not scaled",
        ),
        ({"layer_types": ["chunked"] * 24}, UnsupportedModel, "layer_types chunked"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "1 layer_types for num_hidden"),
        ({"sliding_window": None}, CheckpointError, "sliding_window is None, wanted"),
        ({"hidden_activation": "mish"}, UnsupportedModel, "hidden_activation 'mish'"),
        ({"is_causal": True}, CheckpointError, "is_causal and use_bidirectional_attention"),
    ],
)
def test_what_is_not_run_is_refused_by_name(fields, error, message):
    with pytest.raises(error, match=message):
        gemma3.config(PUBLISHED | fields)


def test_a_soft_cap_of_logits_is_refused_where_they_are_scores():
    config = gemma3.config(PUBLISHED)
    capped = PUBLISHED | {"final_logit_softcapping": 30.0}
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping 30"):
        gemma3.score_head(capped, config, 1, 0)
    (rule,) = gemma3.score_head(PUBLISHED, config, 1, 0).rules
    assert rule.sources == "embed_tokens.weight"  # tied unless the config says otherwise
