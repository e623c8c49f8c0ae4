"""Gemma 2: what its configs say of windows, scores and their soft cap, and what is refused.

Its numbers are compared with torch's by the goldens.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import sources
from conftest import WIDER_TOWERS, tiny_spec
from test_golden import FILES, read, write_source

from converters import convert, gemma2, gemma3
from jaxembed import checkpoint
from jaxembed.engine.kernels import calls
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import program
from jaxembed.models.attention import Sight

# bge-multilingual-gemma2, as transformers 4 wrote it
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma2Model"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256002,
}
CONFIG = {
    "vocab_size": 256002,
    "hidden_size": 3584,
    "num_layers": 42,
    "num_heads": 16,
    "num_key_heads": 8,
    "head_width": 256,
    "intermediate_size": 14336,
    "max_positions": 8192,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
    "qkv_bias": False,
    "out_bias": False,
    "qk_norm": False,
    "causal": True,
    "local_layers": list(range(0, 42, 2)),
    "local_reach": 4095,
    "embedding_scale": 3584**0.5,
    "block_norms": True,
    "query_scale": 1.0,
    "score_cap": 50.0,
    "overflows_float16": True,
}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in PUBLISHED.items() if key not in keys}


def test_configs_of_transformers_4_and_5_say_the_same():
    assert gemma2.config(PUBLISHED) == CONFIG
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(42)]
    new = without("rope_theta", "sliding_window_size", "hidden_act") | {
        "layer_types": kinds,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_bidirectional_attention": None,
    }
    assert gemma2.config(new) == CONFIG


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    optional = ("attn_logit_softcapping", "query_pre_attn_scalar", "head_dim", "sliding_window")
    assert gemma2.config(without(*optional, "rope_theta", "hidden_activation")) == CONFIG


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"query_pre_attn_scalar": 144}, {"query_scale": (256 / 144) ** 0.5}),  # of 27 billion
        ({"attn_logit_softcapping": 20}, {"score_cap": 20.0}),
        ({"is_causal": False}, {"causal": False, "local_reach": 4096}),
    ],
    ids=str,
)
def test_odd_configs_are_read(said, read):
    assert gemma2.config(PUBLISHED | said) == CONFIG | read


def test_scores_may_have_no_cap():
    uncapped = gemma2.config(PUBLISHED | {"attn_logit_softcapping": None})
    assert uncapped == {key: value for key, value in CONFIG.items() if key != "score_cap"}


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"use_bidirectional_attention": True}, UnsupportedModel, "use_bidirectional_attention is"),
        ({"attn_logit_softcapping": 0}, CheckpointError, "attn_logit_softcapping is 0, wanted"),
        ({"attn_logit_softcapping": "50"}, CheckpointError, 'attn_logit_softcapping is "50"'),
        ({"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar is 0"),
        ({"sliding_window": None}, CheckpointError, "sliding_window is None, wanted"),
        ({"layer_types": ["chunked"] * 42}, UnsupportedModel, "layer_types chunked"),
        ({"hidden_activation": "mish"}, UnsupportedModel, "hidden_activation 'mish'"),
        ({"num_key_value_heads": 3}, CheckpointError, "not a multiple of num_key_value_heads 3"),
        ({"vocab_size": None}, CheckpointError, "lacks vocab_size"),
        ({"architectures": ["Gemma2ForTokenClassification"]}, UnsupportedModel, "TokenClass"),
        ({"auto_map": {"AutoModel": "cost_wise.Gemma"}}, UnsupportedModel, "its own code"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def test_a_soft_cap_of_logits_is_refused_where_they_are_scores():
    fields = gemma2.config(PUBLISHED)
    for hf in (PUBLISHED, without("final_logit_softcapping")):
        with pytest.raises(UnsupportedModel, match="final_logit_softcapping 30"):
            gemma2.score_head(hf, fields, 1, 0)
    (rule,) = gemma2.score_head(PUBLISHED | {"final_logit_softcapping": None}, fields, 1, 0).rules
    assert rule.sources == "embed_tokens.weight"


def test_a_classifier_reads_the_last_token():
    assert gemma2.classifier is gemma3.classifier


def test_every_layer_caps_its_scores():
    """So attention is the native kernels' or XLA's: those of accelerators take no cap."""
    seen = calls(program(tiny_spec(**WIDER_TOWERS["gemma2"])), "bfloat16")
    sights = Counter({call.sight: count for call, count in seen.items()})
    assert sights == {
        Sight(causal=True, reach=3, cap=0.5): 1,
        Sight(causal=True, cap=0.5): 1,
    }


def test_norms_are_one_more_than_their_weights(tmp_path):
    (file,) = (file for file in FILES if file.stem == "gemma2_lasttoken")
    source = write_source(read(file), tmp_path / "source")
    spec = convert(source, tmp_path / "out", progress=lambda steps: steps)
    params = checkpoint.load_params(tmp_path / "out", spec)
    weight = read(file)["tensors/model.safetensors:layers.1.pre_feedforward_layernorm.weight"]
    np.testing.assert_array_equal(params["tower.layers.1.mlp_norm.scale"], 1 + weight)
    assert not any("query_norm" in name for name in params)
