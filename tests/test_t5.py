"""T5's encoder: its config, the scale of its scores, and what is refused.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sources
from conftest import TOWERS, tiny_spec, word_tokenizer
from fakes import count_of
from safetensors.numpy import load_file, save_file
from test_adapter_conversion import write_adapter
from test_golden import FILES, read, write_source

from converters import convert, t5
from jaxembed import Embedder, EngineConfig, checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import position_limit, random_parameters
from jaxembed.spec import ModelSpec

# gtr-t5-base as published
PUBLISHED: dict[str, Any] = {
    "architectures": ["T5EncoderModel"],
    "d_ff": 3072,
    "d_kv": 64,
    "d_model": 768,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "relu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "transformers_version": "4.7.0",
    "use_cache": True,
    "vocab_size": 32128,
}
RESAVED = {key: value for key, value in PUBLISHED.items() if key != "n_positions"} | {
    "classifier_dropout": 0.0,
    "dense_act_fn": "relu",
    "dtype": "float32",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "is_gated_act": False,
    "relative_attention_max_distance": 128,
    "scale_decoder_outputs": True,
    "tie_word_embeddings": True,
    "use_cache": False,
}
CONFIG = {
    "vocab_size": 32128,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "head_width": 64,
    "intermediate_size": 3072,
    "bias_reach": 128,
    "norm_eps": 1e-6,
    "activation": "relu",
    "gated": False,
}
SHARED, OWN = "shared.weight", "encoder.embed_tokens.weight"
SELF = "encoder.block.0.layer.0.SelfAttention"


def converted(source: Path, out: Path) -> tuple[ModelSpec, dict[str, Any]]:
    spec = convert(source, out, progress=lambda steps: steps)
    return spec, checkpoint.load_params(out, spec)


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    (file,) = (file for file in FILES if file.stem == "t5_mean")
    return write_source(read(file), tmp_path / "source")


@pytest.mark.parametrize("hf", [PUBLISHED, RESAVED], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert t5.config(hf) == CONFIG


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (
            {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
            {"activation": "gelu_tanh", "gated": True},
        ),
        ({"feed_forward_proj": "gated-gelu"}, {"activation": "gelu_tanh", "gated": True}),
        ({"d_kv": 128, "num_heads": 128}, {"head_width": 128, "num_heads": 128}),
        ({"relative_attention_max_distance": 256}, {"bias_reach": 256}),
        ({"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
    ],
    ids=str,
)
def test_odd_configs_are_read(said, read):
    assert t5.config(PUBLISHED | said) == CONFIG | read


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    assert t5.config({key: PUBLISHED[key] for key in t5.REQUIRED}) == CONFIG


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, UnsupportedModel, "feed_forward_proj 'gated-silu'"),
        ({"feed_forward_proj": "gelu"}, UnsupportedModel, "known: relu, gated-gelu"),
        ({"dense_act_fn": "silu"}, UnsupportedModel, "dense_act_fn 'silu' .* known: relu"),
        ({"is_gated_act": True}, UnsupportedModel, "is_gated_act True"),
        ({"is_decoder": True}, UnsupportedModel, "is_decoder True"),
        ({"relative_attention_num_buckets": 3}, CheckpointError, "num_buckets is 3, wanted"),
        ({"relative_attention_max_distance": 8}, CheckpointError, "max_distance is 8, wanted .* 8"),
        ({"d_kv": None}, CheckpointError, "lacks d_kv"),
        ({"architectures": ["T5ForSequenceClassification"]}, UnsupportedModel, "T5ForSequenceCl"),
        ({"auto_map": {"AutoModel": "modeling.T5"}}, UnsupportedModel, "its own code"),
        ({"model_type": "mt5"}, UnsupportedModel, "model_type 'mt5' is not supported"),
        ({"model_type": "umt5"}, UnsupportedModel, "model_type 'umt5' is not supported"),
        ({"model_type": "longt5"}, UnsupportedModel, "model_type 'longt5' is not supported"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_scale_of_queries_that_is_a_power_of_two_loses_no_bit(dtype):
    query, key, value = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(dtype)
    transform = t5.with_scaled_queries(64**0.5)
    assert transform.dtype is None
    made = transform.apply(query, key, value)
    assert made.dtype == dtype
    np.testing.assert_array_equal(made[:, :8].astype(np.float32), 8 * query.T.astype(np.float32))
    np.testing.assert_array_equal(made[:, 8:], np.concatenate([key, value]).T)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_another_scale_of_queries_makes_a_float32_weight(dtype):
    query, key, value = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(dtype)
    transform = t5.with_scaled_queries(128**0.5)
    assert transform.dtype == "float32"
    made = transform.apply(query, key, value)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made[:, :8], query.T.astype(np.float32) * np.float32(128**0.5))


def test_all_layers_share_the_biases_of_the_first(source, tmp_path):
    spec, params = converted(source, tmp_path / "out")
    buckets = load_file(source / "model.safetensors")[f"{SELF}.relative_attention_bias.weight"]
    biases = params["tower.distance.bias"]
    assert biases.shape == (2, 41)  # up to a distance of 20
    assert [name for name in params if "distance" in name] == ["tower.distance.bias"]
    for distance, bucket in ((-20, 15), (-1, 1), (0, 0), (1, 17), (8, 24), (20, 31)):
        np.testing.assert_array_equal(biases[:, 20 + distance], buckets[bucket])
    assert position_limit(spec) is None


def test_the_limit_of_tokens_is_that_of_the_files_beside_the_tower(source, tmp_path):
    assert convert(source, tmp_path / "a").max_input_tokens == 24  # max_seq_length
    (beside,) = source.glob("sentence_bert_config.json")
    sources.change_json(beside, max_seq_length=700)
    assert convert(source, tmp_path / "b").max_input_tokens == 700
    sources.change_json(beside, max_seq_length=None)
    sources.change_json(source / "tokenizer_config.json", model_max_length=512)
    assert convert(source, tmp_path / "c").max_input_tokens == 512
    sources.change_json(source / "tokenizer_config.json", model_max_length=None)
    with pytest.raises(CheckpointError, match="names no limit of tokens; set max_seq_length"):
        convert(source, tmp_path / "d")


def test_the_table_of_words_may_have_either_name_or_both(source, tmp_path):
    weights = source / "model.safetensors"
    tensors = load_file(weights)
    _, wanted = converted(source, tmp_path / "one")
    assert (SHARED in tensors, OWN in tensors) == (True, False)
    for number, names in enumerate(([OWN], [SHARED, OWN])):
        others = {key: array for key, array in tensors.items() if key != SHARED}
        save_file(others | dict.fromkeys(names, tensors[SHARED]), weights)
        _, params = converted(source, tmp_path / str(number))
        np.testing.assert_array_equal(
            params["tower.embeddings.word.embedding"], wanted["tower.embeddings.word.embedding"]
        )


def test_the_decoder_is_left_out_and_other_tensors_are_not(source, tmp_path):
    weights = source / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"decoder.block.0.x": np.zeros(2, np.float32)}, weights)
    converted(source, tmp_path / "out")
    save_file(tensors | {"encoder.block.0.x": np.zeros(2, np.float32)}, weights)
    with pytest.raises(ConversionError, match=r"unused: encoder\.block\.0\.x"):
        converted(source, tmp_path / "other")


@pytest.mark.parametrize("name", ["shared", "encoder.embed_tokens"])
def test_the_table_of_words_takes_no_adapter(name, source, tmp_path):
    shape = load_file(source / "model.safetensors")[SHARED].shape
    folder = write_adapter(tmp_path / "a", {name: shape})
    with pytest.raises(ConversionError, match=f"{name}.weight takes no adapter"):
        convert(source, tmp_path / "out", adapters={"a": folder})


def test_a_float16_activation_out_of_range_does_not_change_the_vector(tmp_path, grid_file):
    """In T5 the operand of wo may exceed float16; what is not finite is computed in float32."""
    spec = tiny_spec(**TOWERS["t5"])
    parameters = random_parameters(spec)
    parameters["tower.layers.0.mlp.up.kernel"] *= 6e4
    halves = {name: array.astype(np.float16) for name, array in parameters.items()}
    assert all(np.isfinite(array).all() for array in halves.values())
    exact = {name: array.astype(np.float32) for name, array in halves.items()}
    source = tmp_path / "checkpoint"
    checkpoint.save(source, spec, exact, word_tokenizer().to_str().encode())
    vectors = {}
    texts = ["the cat sat on the mat", "a dog"]
    for dtype in ("float16", "float32"):
        config = EngineConfig(dtype=dtype, devices=1, buckets=grid_file, max_batch_tokens=128)
        embedder = Embedder(str(source), cache_dir=tmp_path / "cache", config=config)
        vectors[dtype] = embedder.encode(texts)
        rescued = count_of(embedder.telemetry.not_finite)
        assert rescued == (len(texts) if dtype == "float16" else 0)
        embedder.close()
    np.testing.assert_allclose(vectors["float16"], vectors["float32"], rtol=0, atol=1e-5)
