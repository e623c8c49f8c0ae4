"""T5's encoder: its config, the scale of its scores, and what is refused.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import sources
from conftest import TOWERS, tiny_spec, word_tokenizer
from fakes import count_of
from safetensors.numpy import load_file, save_file
from test_adapter_conversion import write_adapter
from test_families import golden
from test_golden import write_source

from converters import convert, outline, t5
from jaxembed import Embedder, EngineConfig, checkpoint
from jaxembed.errors import CheckpointError, ConversionError
from jaxembed.models import position_limit, random_parameters
from jaxembed.spec import ModelSpec

SHARED, OWN = "shared.weight", "encoder.embed_tokens.weight"
SELF = "encoder.block.0.layer.0.SelfAttention"


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    return write_source(golden("t5_mean"), tmp_path / "source")


def converted(source: Path, out: Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    spec = convert(source, out, progress=lambda steps: steps)
    return spec, checkpoint.load_params(out, spec)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_scale_of_queries_loses_no_bit(dtype):
    """Of a power of two it leaves the dtype; another makes a float32 weight."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(dtype)
    for width, made_dtype in ((64, None), (128, "float32")):
        transform = t5.with_scaled_queries(width**0.5)
        assert transform.dtype == made_dtype
        made = transform.apply(query, key, value)
        assert made.dtype == np.dtype(made_dtype or dtype)
        wanted = query.T.astype(np.float32) * np.float32(width**0.5)
        np.testing.assert_array_equal(made[:, :8].astype(np.float32), wanted)
        np.testing.assert_array_equal(made[:, 8:], np.concatenate([key, value]).T)


def test_all_layers_share_the_biases_of_the_first(source, tmp_path):
    spec, params = converted(source, tmp_path / "out")
    buckets = load_file(source / "model.safetensors")[f"{SELF}.relative_attention_bias.weight"]
    biases = params["tower.distance.bias"]
    assert biases.shape == (2, 41)  # up to a distance of 20
    assert [name for name in params if "distance" in name] == ["tower.distance.bias"]
    for distance, bucket in ((-20, 15), (-1, 1), (0, 0), (1, 17), (8, 24), (20, 31)):
        np.testing.assert_array_equal(biases[:, 20 + distance], buckets[bucket])
    assert position_limit(spec) is None


def test_the_limit_of_tokens_is_that_of_the_files_beside_the_tower(source):
    assert outline(source).spec.max_input_tokens == 24  # max_seq_length
    (beside,) = source.glob("sentence_bert_config.json")
    sources.change_json(beside, max_seq_length=700)
    assert outline(source).spec.max_input_tokens == 700
    sources.change_json(beside, max_seq_length=None)
    sources.change_json(source / "tokenizer_config.json", model_max_length=512)
    assert outline(source).spec.max_input_tokens == 512
    sources.change_json(source / "tokenizer_config.json", model_max_length=None)
    with pytest.raises(CheckpointError, match="names no limit of tokens; set max_seq_length"):
        outline(source)


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


def test_a_float16_activation_out_of_range_does_not_change_the_vector(tmp_path):
    """In T5 the operand of wo may exceed float16; what is not finite is computed in float32."""
    spec = tiny_spec(**TOWERS["t5"])
    parameters = random_parameters(spec)
    parameters["tower.layers.0.mlp.up.kernel"] *= 6e4
    halves = {name: array.astype(np.float16) for name, array in parameters.items()}
    assert all(np.isfinite(array).all() for array in halves.values())
    exact = {name: array.astype(np.float32) for name, array in halves.items()}
    source = tmp_path / "checkpoint"
    checkpoint.save(source, spec, exact, word_tokenizer().to_str().encode())
    grid = tmp_path / "grid.json"
    sources.write_json(grid, {"buckets": [[2, 64]]})
    vectors = {}
    texts = ["the cat sat on the mat", "a dog"]
    for dtype in ("float16", "float32"):
        config = EngineConfig(dtype=dtype, devices=1, buckets=grid, max_batch_tokens=128)
        embedder = Embedder(str(source), cache_dir=tmp_path / "cache", config=config)
        vectors[dtype] = embedder.encode(texts)
        rescued = count_of(embedder.telemetry.not_finite)
        assert rescued == (len(texts) if dtype == "float16" else 0)
        embedder.close()
    np.testing.assert_allclose(vectors["float16"], vectors["float32"], rtol=0, atol=1e-5)
