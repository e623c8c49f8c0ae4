"""NomicBERT: the configs of its own code and of transformers, and what each of them refuses.

Its numbers are compared with torch's by the goldens.
"""

from typing import Any

import numpy as np
import pytest
import sources
from test_golden import FILES, read, write_source

from converters import convert, nomic_bert
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import position_limit
from jaxembed.spec import DenseLayer

# nomic-embed-text-v1 as published, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": (
            "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining"
        ),
    },
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "fused_bias_fc": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 16,
    "n_head": 2,
    "n_inner": 32,
    "n_layer": 2,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 128,
}
# As transformers 5 saves it.
RESAVED: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "dtype": "float32",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 32,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "model_type": "nomic_bert",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "type_vocab_size": 2,
    "vocab_size": 128,
}

CONFIG = {
    "vocab_size": 128,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "max_positions": 8192,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "activation": "silu",
    "attention_bias": False,
    "gated": True,
    "up_bias": False,
    "down_bias": False,
    "rope_theta": 1000.0,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    ("hf", "positions"),
    [(PUBLISHED, 8192), (RESAVED, 2048), (PUBLISHED | RESAVED, 8192)],
    ids=["its own code", "transformers 5", "both, as v1.5"],
)
def test_every_spelling_of_a_config_is_read(hf, positions):
    """The table of positions that there is not does not limit v1.5, trained on 2,048 tokens."""
    assert nomic_bert.config(hf) == CONFIG | {"max_positions": positions}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"qkv_proj_bias": True}, {"attention_bias": True}),
        ({"mlp_fc1_bias": True, "mlp_fc2_bias": True}, {"up_bias": True, "down_bias": True}),
        ({"activation_function": "geglu"}, {"activation": "gelu"}),
        ({"vocab_size": 97}, {"vocab_size": 128}),  # the table has a multiple of 64 rows
        ({"rotary_emb_base": 10_000}, {"rope_theta": 10_000.0}),
        ({"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
        (
            {"rotary_scaling_factor": 2},
            {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "length": 2048}},
        ),
        (
            {"rotary_scaling_factor": 2, "max_trained_positions": 512},
            {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "length": 512}},
        ),
    ],
    ids=str,
)
def test_odd_configs_are_read(said, read):
    assert nomic_bert.config(PUBLISHED | said) == CONFIG | read


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"prenorm": True}, UnsupportedModel, "prenorm True is not supported; known: False"),
        ({"causal": True}, UnsupportedModel, "causal True"),
        ({"parallel_block": True}, UnsupportedModel, "parallel_block True"),
        ({"use_rms_norm": True}, UnsupportedModel, "use_rms_norm True"),
        ({"scale_attn_weights": False}, UnsupportedModel, "scale_attn_weights False"),
        ({"rotary_emb_fraction": 0.5}, UnsupportedModel, "rotary_emb_fraction 0.5"),
        ({"rotary_emb_interleaved": True}, UnsupportedModel, "rotary_emb_interleaved True"),
        ({"rotary_emb_scale_base": 512}, UnsupportedModel, "rotary_emb_scale_base 512"),
        ({"num_experts": 8, "moe_every_n_layers": 2}, UnsupportedModel, "num_experts 8"),
        ({"activation_function": "gelu"}, UnsupportedModel, "activation_function 'gelu'"),
        ({"hidden_act": "gelu"}, CheckpointError, "activation_function is 'swiglu' and hidden_act"),
        ({"hidden_size": 32}, CheckpointError, "n_embd is 16 and hidden_size 32"),
        ({"layer_norm_eps": 1e-5}, CheckpointError, "layer_norm_epsilon is 1e-12 and layer_norm"),
        ({"rope_theta": 5.0}, CheckpointError, "rotary_emb_base is 1000 and rope_theta 5.0"),
        ({"rotary_emb_base": None}, CheckpointError, "lacks rotary_emb_base"),
        ({"n_embd": None, "n_inner": None}, CheckpointError, "n_embd or hidden_size, n_inner or"),
        ({"n_positions": None, "max_trained_positions": None}, CheckpointError, "n_positions or"),
        ({"n_head": 3}, CheckpointError, "hidden_size 16 does not split into .* 3 of even width"),
        ({"n_head": 16}, CheckpointError, "of even width"),
        ({"head_dim": 12}, UnsupportedModel, "head_dim 12 is not supported; known: 8"),
        (
            {
                "rotary_scaling_factor": 2,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            },
            UnsupportedModel,
            "rotary_scaling_factor 2 beside rope_parameters of kind linear",
        ),
        ({"rope_scaling": "ntk"}, CheckpointError, "wanted a JSON object"),
        (
            {"auto_map": {"AutoModel": "other/fork--modeling_hf_nomic_bert.NomicBertModel"}},
            UnsupportedModel,
            "brings its own code .*other/fork",
        ),
        ({"architectures": ["NomicBertForTokenClassification"]}, UnsupportedModel, "TokenClass"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


@pytest.fixture(name="arrays")
def _arrays() -> dict[str, np.ndarray]:
    """What transformers saved."""
    return read(next(file for file in FILES if file.stem == "nomic_bert_mean"))


def test_the_config_of_its_own_code_gives_the_same_model(arrays, tmp_path):
    source = write_source(arrays, tmp_path / "source")
    resaved = convert(source, tmp_path / "resaved", progress=lambda steps: steps)
    sizes = {
        "vocab_size": resaved.config["vocab_size"],
        "pad_vocab_size_multiple": 1,
        "n_positions": 32,
        "max_trained_positions": 32,
    }
    sources.write_json(source / "config.json", PUBLISHED | sizes)
    spec = convert(source, tmp_path / "published", progress=lambda steps: steps)
    assert spec.config == resaved.config
    params = checkpoint.load_params(tmp_path / "published", spec)
    for name, array in checkpoint.load_params(tmp_path / "resaved", resaved).items():
        np.testing.assert_array_equal(params[name], array)


def test_the_gate_is_fc12(arrays, tmp_path):
    spec = convert(write_source(arrays, tmp_path / "source"), tmp_path / "out")
    kernel = checkpoint.load_params(tmp_path / "out", spec)["tower.layers.1.mlp.gate_up.kernel"]
    names = (f"tensors/model.safetensors:encoder.layers.1.mlp.fc1{n}.weight" for n in (2, 1))
    gate, up = (arrays[name].T for name in names)
    np.testing.assert_array_equal(kernel, np.concatenate([gate, up], axis=1))


def test_a_bias_that_the_config_does_not_speak_of_is_refused(arrays, tmp_path):
    arrays["tensors/model.safetensors:encoder.layers.0.attn.Wqkv.bias"] = np.zeros(48, np.float32)
    with pytest.raises(ConversionError, match=r"unused: encoder\.layers\.0\.attn\.Wqkv\.bias"):
        convert(write_source(arrays, tmp_path / "source"), tmp_path / "out")


def test_a_classifier_is_the_pooler_and_a_layer(tmp_path):
    arrays = read(next(file for file in FILES if file.stem == "nomic_bert_cross_encoder"))
    spec = convert(write_source(arrays, tmp_path / "source"), tmp_path / "out")
    assert (spec.task, spec.head.pooling, spec.token_types) == ("rerank", ("cls",), True)
    assert spec.head.modules == (
        DenseLayer(in_features=16, out_features=16, activation="tanh"),
        DenseLayer(in_features=16, out_features=1, activation="identity"),
    )
    assert position_limit(spec) == 32
