"""Llama and what is built like it: NVIDIA's bidirectional one, Mistral, Ministral 3, EuroBERT."""

from typing import Any

import numpy as np
import pytest
from test_families import converted, golden

from converters import eurobert, llama, ministral3, mistral, qwen2, qwen3
from jaxembed.errors import CheckpointError, UnsupportedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaModel"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
}
BIDIRECTIONAL = LLAMA | {
    "model_type": "llama_bidirec",
    "architectures": ["LlamaBidirectionalModel"],
    "auto_map": {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"},
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 8}
MINISTRAL = LLAMA | {
    "model_type": "ministral3",
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    },
}


@pytest.mark.parametrize(
    ("fields", "causal"),
    [
        ({}, True),
        ({"is_causal": False}, False),
        ({"use_bidirectional_attention": True}, False),
        ({"model_type": "llama_bidirec"}, False),
        ({"model_type": "llama_bidirec", "is_causal": True}, True),
        ({"auto_map": BIDIRECTIONAL["auto_map"]}, False),
    ],
)
def test_three_keys_say_that_a_decoder_sees_both_ways(fields, causal):
    assert llama.config(LLAMA | fields)["causal"] == causal


def test_keys_that_contradict_each_other_are_refused():
    both = {"is_causal": True, "use_bidirectional_attention": True}
    for family in (llama, mistral, qwen2, qwen3):
        with pytest.raises(CheckpointError, match="is_causal and use_bidirectional_attention"):
            family.config(MISTRAL | both)


def test_sizes_that_a_llama_config_leaves_out():
    fields = llama.config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (fields["num_key_heads"], fields["head_width"]) == (4, 4)
    biased = llama.config(LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 6})
    assert biased["head_width"] == 6
    assert biased["qkv_bias"]
    assert biased["out_bias"]
    assert biased["mlp_bias"]
    with pytest.raises(CheckpointError, match="hidden_size 16 is not a multiple"):
        llama.config(LLAMA | {"num_attention_heads": 6})


def test_mistral_has_its_window_in_every_layer():
    fields = mistral.config(MISTRAL)
    assert (fields["local_layers"], fields["local_reach"]) == ([0, 1, 2, 3], 7)
    assert "local_reach" not in mistral.config(MISTRAL | {"sliding_window": None})
    silent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert mistral.config(silent)["local_reach"] == 4095
    assert mistral.config(MISTRAL | {"is_causal": False})["local_reach"] == 8
    mixed = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(UnsupportedModel, match="layer_types of mistral are not supported"):
        mistral.config(MISTRAL | {"layer_types": mixed})
    with pytest.raises(CheckpointError, match="sliding_window is 0, wanted a whole number"):
        mistral.config(MISTRAL | {"sliding_window": 0})


@pytest.mark.parametrize("family", [qwen2, qwen3])
def test_qwen_has_its_window_in_layers_from_a_number_on_if_asked(family):
    asked = MISTRAL | {"use_sliding_window": True, "max_window_layers": 3}
    assert family.config(asked)["local_layers"] == [3]
    assert family.config(asked)["local_reach"] == 7
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    assert family.config(asked | {"layer_types": kinds}) == family.config(asked)
    for fields in ({"use_sliding_window": False}, {"max_window_layers": 4}):
        assert "local_layers" not in family.config(asked | fields)


def test_ministral_scales_queries_by_their_position():
    fields = ministral3.config(MINISTRAL)
    assert (fields["query_growth"], fields["query_growth_length"]) == (0.1, 16)
    assert fields["rope_scaling"]["kind"] == "yarn"
    assert (fields["rope_theta"], fields["max_positions"]) == (1e6, 64)
    plain = MINISTRAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert "query_growth" not in ministral3.config(plain)
    lost = MINISTRAL["rope_parameters"] | {"original_max_position_embeddings": None}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is None"):
        ministral3.config(MINISTRAL | {"rope_parameters": lost})
    with pytest.raises(CheckpointError, match="lacks rope_parameters"):
        ministral3.config(MINISTRAL | {"rope_parameters": None})


def test_eurobert_sees_both_ways_and_pools_before_its_head():
    published = LLAMA | {"model_type": "eurobert", "rope_theta": 250_000}
    assert not eurobert.config(published)["causal"]
    for pooling, ours in (("bos", "cls"), ("mean", "mean")):
        head = eurobert.classifier(published | {"classifier_pooling": pooling}, 3)
        assert head.logits.pooling == (ours,)
    for fields in ({}, {"classifier_pooling": "late"}):
        with pytest.raises(UnsupportedModel, match="classifier_pooling 'late' is not supported"):
            eurobert.classifier(published | fields, 3)
    with pytest.raises(UnsupportedModel, match="is_causal=true"):
        eurobert.config(published | {"is_causal": True})


def test_nvidias_embedder_is_a_llama_that_sees_both_ways(tmp_path):
    """Its own code is named and not run."""
    fields = {key: BIDIRECTIONAL[key] for key in ("architectures", "auto_map", "model_type")}
    arrays = golden("llama_odd_mean")
    spec, params = converted(arrays, tmp_path / "nvidia", is_causal=None, **fields)
    wanted, tensors = converted(arrays, tmp_path / "llama")
    assert spec.config == wanted.config
    assert not spec.config["causal"]
    assert params.keys() == tensors.keys()
    with pytest.raises(UnsupportedModel, match=r"its own code .*x\.Y"):
        converted(arrays, tmp_path / "other", auto_map={"AutoModel": "x.Y"})


SCORER = {
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 0.25,
}


def test_nvidias_reranker_takes_the_mean_and_divides_by_its_temperature(tmp_path):
    arrays = golden("llama_cross_encoder")
    name = "llama-nemotron-rerank-1b-v2"
    spec, params = converted(arrays, tmp_path / "nvidia", name=name, **SCORER)
    _, plain = converted(arrays, tmp_path / "plain")
    assert spec.head.pooling == ("mean",)
    assert spec.template == llama.RERANKER.template
    kernel = "heads.logits.modules.0.kernel"
    np.testing.assert_allclose(params[kernel], plain[kernel] * 4, rtol=1e-6)
    for pooling, ours in (("cls", "cls"), ("last", "lasttoken")):
        head = llama.classifier(LLAMA | SCORER | {"pooling": pooling}, 1)
        assert head.logits.pooling == (ours,)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"pooling": "weighted_avg"}, UnsupportedModel, "pooling 'weighted_avg'"),
        ({"temperature": 0}, CheckpointError, "temperature is 0, wanted a number over 0"),
    ],
)
def test_what_nvidias_reranker_does_not_do_here_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        llama.classifier(LLAMA | SCORER | fields, 1)
