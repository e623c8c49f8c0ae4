"""GTE: the configs of Alibaba's and Snowflake's code and of transformers, and their refusals.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_golden import FILES, read, write_source

from converters import convert, gte
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.spec import DenseLayer, ModelSpec

IMPL = "Alibaba-NLP/new-impl--"
# gte-multilingual-base as published, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["NewModel", "NewForTokenClassification"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{IMPL}configuration.NewConfig",
        "AutoModel": f"{IMPL}modeling.NewModel",
        "AutoModelForMaskedLM": f"{IMPL}modeling.NewForMaskedLM",
        "AutoModelForSequenceClassification": f"{IMPL}modeling.NewForSequenceClassification",
        "AutoModelForTokenClassification": f"{IMPL}modeling.NewForTokenClassification",
    },
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 32,
    "model_type": "new",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "torch_dtype": "float16",
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 64,
}
# The same as transformers 5 runs it: its base and factor are those of "ntk".
FACTOR = 8 ** (2 / 8)
NATIVE: dict[str, Any] = {
    "architectures": ["GteModel"],
    "dtype": "float32",
    "hidden_act": "gelu",
    "hidden_size": 16,
    "intermediate_size": 32,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 32,
    "model_type": "gte",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "rope_parameters": {"factor": FACTOR, "rope_theta": 160000.0, "rope_type": "linear"},
    "type_vocab_size": 1,
    "vocab_size": 64,
}
# snowflake-arctic-embed-m-v2.0
SNOWFLAKE = PUBLISHED | {
    "architectures": ["GteModel"],
    "auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"},
    "model_type": "gte",
    "rope_scaling": None,
    "rope_theta": 160000,
}

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "max_positions": 32,
    "type_vocab_size": 1,
    "norm_eps": 1e-12,
    "activation": "gelu",
    "gated": True,
    "up_bias": False,
    "rope_theta": 160000.0,
    "rope_scaling": {"kind": "linear", "factor": FACTOR},
}


@pytest.mark.parametrize("hf", [PUBLISHED, NATIVE], ids=["its own code", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert gte.config(hf) == CONFIG


def test_ntk_scales_texts_of_every_length_as_in_the_published_code():
    heads = {"hidden_size": 768, "num_attention_heads": 12}
    fields = gte.config(PUBLISHED | heads)
    assert fields["rope_theta"] == 160000.0
    assert fields["rope_scaling"]["factor"] == pytest.approx(1.06714, abs=1e-5)
    ntk = {"rope_type": "ntk", "type": "ntk", "factor": 8.0, "rope_theta": 20000}
    resaved = PUBLISHED | heads | {"rope_scaling": None, "rope_theta": None}
    assert gte.config(resaved | {"rope_parameters": ntk}) == fields


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"rope_scaling": None}, {"rope_theta": 20000.0, "rope_scaling": None}),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": None}, "rope_theta": 500000},
            {"rope_theta": 1e6, "rope_scaling": {"kind": "linear", "factor": 2 ** (2 / 8)}},
        ),
        ({"type_vocab_size": 0}, {"type_vocab_size": 0}),  # gte-base-en-v1.5
        ({"pack_qkv": False}, {}),
        ({"layer_norm_eps": 1e-5, "hidden_act": "silu"}, {"norm_eps": 1e-5, "activation": "silu"}),
    ],
    ids=str,
)
def test_odd_configs_are_read(said, read):
    assert gte.config(PUBLISHED | said) == CONFIG | read


def test_snowflakes_config_is_read():
    assert gte.config(SNOWFLAKE) == CONFIG | {"rope_scaling": None}


NTK = {"type": "ntk", "factor": 8.0}


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"position_embedding_type": "absolute"}, UnsupportedModel, "'absolute' .* known: rope"),
        ({"layer_norm_type": "rms_norm"}, UnsupportedModel, "layer_norm_type 'rms_norm'"),
        ({"logn_attention_scale": True}, UnsupportedModel, "logn_attention_scale True"),
        ({"rope_scaling": NTK | {"mixed_b": 0.6}}, UnsupportedModel, "mixed_b 0.6"),
        ({"rope_scaling": NTK | {"beta": 1}}, UnsupportedModel, "beta"),
        ({"rope_scaling": {"type": "ntk"}}, CheckpointError, "factor is None"),
        ({"rope_scaling": {"type": "su"}}, UnsupportedModel, "rope_type 'su'"),
        ({"rope_scaling": "ntk"}, CheckpointError, "wanted a JSON object"),
        ({"rope_theta": None}, CheckpointError, "lacks rope_theta"),
        ({"hidden_act": "mish"}, UnsupportedModel, "hidden_act 'mish'"),
        ({"num_attention_heads": 3}, CheckpointError, "num_attention_heads 3 of even width"),
        ({"num_attention_heads": 16}, CheckpointError, "num_attention_heads 16 of even width"),
        ({"head_dim": 4}, UnsupportedModel, "head_dim 4 is not supported; known: 8"),
        ({"vocab_size": None}, CheckpointError, "lacks vocab_size"),
        (
            {"architectures": ["NewForTokenClassification"]},
            UnsupportedModel,
            "NewForTokenClassification is not supported by itself",
        ),
        ({"architectures": ["NewForQuestionAnswering"]}, UnsupportedModel, "QuestionAnswering"),
        (
            {"auto_map": {"AutoModel": "other/fork--modeling.NewModel"}},
            UnsupportedModel,
            "brings its own code .*other/fork",
        ),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def golden(name: str) -> dict[str, np.ndarray]:
    """What transformers saved."""
    return read(next(file for file in FILES if file.stem == name))


def converted(
    arrays: dict[str, np.ndarray], folder: Path, **config: Any
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """`config` takes the place of that of the source but for the size of the vocabulary."""
    source = write_source(arrays, folder / "source")
    if config:
        rows = arrays_named(arrays, "word_embeddings.weight").shape[0]
        sources.write_json(source / "config.json", config | {"vocab_size": rows})
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


def arrays_named(arrays: dict[str, np.ndarray], end: str) -> np.ndarray:
    return next(array for name, array in arrays.items() if name.endswith(end))


def published_names(arrays: dict[str, np.ndarray], packed: bool) -> dict[str, np.ndarray]:
    """As Alibaba names them, with the head of the sparse weights."""
    named = {}
    for key, array in arrays.items():
        name = key.replace("safetensors:", "safetensors:new.")
        if ".qkv_proj." in name and not packed:
            parts = np.split(array, 3)
            named |= {
                name.replace("qkv_proj", f"{x}_proj"): y for x, y in zip("qkv", parts, strict=True)
            }
        else:
            named[name] = array
    head = "tensors/model.safetensors:classifier"
    return named | {
        f"{head}.weight": np.ones((1, 16), np.float32),
        f"{head}.bias": np.ones(1, np.float32),
    }


@pytest.mark.parametrize("packed", [True, False])
def test_the_published_spelling_gives_the_same_model(packed, tmp_path):
    arrays = golden("gte_cls")
    _, wanted = converted(arrays, tmp_path / "native")
    names = published_names(arrays, packed)
    spec, params = converted(names, tmp_path / "own", **PUBLISHED | {"pack_qkv": packed})
    assert (spec.task, spec.head.pooling, spec.token_types) == ("embed", ("cls",), False)
    sparse = "heads.token_weights.modules.0"
    assert params.keys() - wanted.keys() == {f"{sparse}.kernel", f"{sparse}.bias"}
    assert spec.representations == ("dense", "sparse")
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)


def test_the_second_half_is_the_gate(tmp_path):
    arrays = golden("gte_cls")
    _, params = converted(arrays, tmp_path)
    up, gate = np.split(arrays_named(arrays, "layer.1.mlp.up_gate_proj.weight").T, 2, axis=1)
    kernel = params["tower.layers.1.mlp.gate_up.kernel"]
    np.testing.assert_array_equal(kernel, np.concatenate([gate, up], axis=1))


def test_a_missing_tensor_is_named_as_published(tmp_path):
    arrays = {name: x for name, x in golden("gte_cls").items() if "0.attention.qkv" not in name}
    with pytest.raises(ConversionError, match=r"missing: encoder\.layer\.0\.attention\.qkv_proj"):
        converted(arrays, tmp_path)


def test_a_reranker_is_the_pooler_and_a_layer(tmp_path):
    arrays = golden("gte_cross_encoder")
    own = PUBLISHED | {"architectures": ["NewForSequenceClassification"], "type_vocab_size": 0}
    labels = {"id2label": {"0": "LABEL_0"}}
    spec, _ = converted(arrays, tmp_path, **own, **labels)
    assert (spec.task, spec.head.pooling, spec.token_types) == ("rerank", ("cls",), False)
    assert spec.head.modules == (
        DenseLayer(in_features=16, out_features=16, activation="tanh"),
        DenseLayer(in_features=16, out_features=1, activation="identity"),
    )
