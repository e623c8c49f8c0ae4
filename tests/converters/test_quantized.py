"""Quantized checkpoints: dequantized exactly, and refused for what would give other numbers.

The weights are quantized here, one value after the other, as the formats' definitions say.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sources
from dual_sources import write_dual
from page_sources import write_pages
from sources import converted

from converters import outline, outline_routes
from converters.quantized import folded
from converters.weights import Tensor, find
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

FP8 = ml_dtypes.float8_e4m3fn
PLAIN = "encoder.layer.1.output.dense"  # not quantized, as `ignore` and its like say
WHOLE = sources.sized(32, 2, 2, 64)  # widths that fill words of int32
UNEVEN = sources.sized(36, 2, 2, 44)

# The tensors of a weight by the last word of their names, and the weight dequantized, in float64.
Quantized = tuple[sources.Tensors, np.ndarray]


def scales(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.uniform(0.01, 1, shape).astype(dtype)


def packed(values: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Words of int32 with these values of a row, [rows, words]; `order` has the columns of the
    values in a word, which otherwise follow each other from the lowest bits up."""
    in_word = 32 // bits
    columns = order or range(in_word)
    words = np.zeros((len(values), -(-values.shape[1] // in_word)), np.uint32)
    for row, word in np.ndindex(words.shape):
        for place, column in enumerate(columns):
            at = word * in_word + column
            value = int(values[row, at]) if at < values.shape[1] else 0
            words[row, word] |= np.uint32(value << (bits * place))
    return words.view(np.int32)


def expanded(blocks: np.ndarray, height: int, width: int, shape: tuple[int, int]) -> np.ndarray:
    """The value of each element's block: those of the last blocks may lie outside."""
    result = np.empty(shape)
    for row, column in np.ndindex(shape):
        result[row, column] = blocks[row // height, column // width]
    return result


def int8(rng, out: int, columns: int, *, width: int = 0, zeros: bool = False) -> Quantized:
    """Scales by group of `width` columns, or by row."""
    width = width or columns
    groups = -(-columns // width)
    values = rng.integers(-128, 128, (out, columns)).astype(np.int8)
    scale = scales(rng, out, groups, dtype=ml_dtypes.bfloat16)
    parts = {"weight": values, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    zero = np.zeros((out, groups), np.int8)
    if zeros:
        zero = rng.integers(-128, 128, (out, groups)).astype(np.int8)
        parts["weight_zero_point"] = zero
    spread = partial(expanded, height=1, width=width, shape=(out, columns))
    return parts, (values.astype(float) - spread(zero)) * spread(scale.astype(float))


def float8(
    rng, out: int, columns: int, *, block: tuple[int, int] = (1000, 1000), name: str, axes: int = 2
) -> Quantized:
    values = rng.standard_normal((out, columns)).astype(FP8)
    shape = -(-out // block[0]), -(-columns // block[1])
    scale = scales(rng, *shape)
    stored = scale.reshape(scale.shape[:axes] if scale.size > 1 else (1,) * axes)
    spread = expanded(scale.astype(float), *block, (out, columns))
    return {"weight": values, name: stored}, values.astype(float) * spread


def pack_quantized(
    rng, out: int, columns: int, *, bits: int, width: int = 0, zeros: bool = False, order=False
) -> Quantized:
    width = width or columns
    groups = -(-columns // width)
    values = rng.integers(0, 2**bits, (out, columns))
    zero = np.full((out, groups), 2 ** (bits - 1))  # of values around 0
    scale = scales(rng, out, groups)
    parts = {
        "weight_packed": packed(values, bits),
        "weight_shape": np.array([out, columns]),
        "weight_scale": scale,
    }
    if zeros:
        zero = rng.integers(0, 2**bits, (out, groups))
        parts["weight_zero_point"] = np.ascontiguousarray(packed(zero.T, bits).T)
    group = np.arange(columns) // width
    if order:
        group = rng.permutation(group)
        parts["weight_g_idx"] = group.astype(np.int32)
    return parts, (values - zero[:, group]) * scale.astype(float)[:, group]


def gptq(
    rng, out: int, columns: int, *, bits: int, width: int = 0, added: int = 1, order=False
) -> Quantized:
    width = width or columns
    groups = columns // width
    values = rng.integers(0, 2**bits, (columns, out))
    stored = rng.integers(0, 2**bits, (groups, out))
    scale = scales(rng, groups, out, dtype=np.float16)
    group = np.arange(columns) // width
    if order:
        group = rng.permutation(group)
    parts = {
        "qweight": np.ascontiguousarray(packed(values.T, bits).T),
        "qzeros": packed(stored, bits),
        "scales": scale,
        "g_idx": group.astype(np.int32),
    }
    return parts, ((values - (stored[group] + added)) * scale.astype(float)[group]).T


def awq(rng, out: int, columns: int, *, width: int) -> Quantized:
    values = rng.integers(0, 16, (columns, out))
    zero = rng.integers(0, 16, (columns // width, out))
    scale = scales(rng, columns // width, out, dtype=np.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(values, 4, order), "qzeros": packed(zero, 4, order), "scales": scale}
    group = np.arange(columns) // width
    return parts, ((values - zero[group]) * scale.astype(float)[group]).T


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": [PLAIN],
    }


def fp8(*sizes: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": list(sizes), "activation_scheme": "dynamic"}


def gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": -1} | fields


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int"}
FLOAT = {"num_bits": 8, "type": "float"}


def write(
    folder: Path,
    config: dict[str, Any],
    quantize: Callable[..., Quantized],
    *,
    sizes: dict[str, Any] = UNEVEN,
    dtype: str = "bfloat16",
) -> tuple[Path, Path]:
    """A BERT with quantized linear layers, and the same one with its weights dequantized."""
    kind = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    rng = np.random.default_rng(0)
    tensors = sources.bert_tensors(config=sources.BERT_CONFIG | sizes)
    plain = {name: array.astype(kind) for name, array in tensors.items()}
    stored = dict(plain)
    for name, array in tensors.items():
        layer = name.removesuffix(".weight")
        if array.ndim == 2 and "encoder" in name and layer != PLAIN:
            parts, weight = quantize(rng, *array.shape)
            del stored[name]
            stored |= {f"{layer}.{part}": values for part, values in parts.items()}
            # save_file wants rows that follow each other
            plain[name] = np.ascontiguousarray(weight, np.float32).astype(kind)
    said = {**sizes, "torch_dtype": dtype}
    return (
        sources.write_bert(folder / "a", tensors=stored, **said, quantization_config=config),
        sources.write_bert(folder / "b", tensors=plain, **said),
    )


def short_id(value) -> str:
    """A name of a parameter that is the same in every process."""
    if isinstance(value, dict):
        return str(value.get("format", value.get("quant_method", "sizes")))
    options = getattr(value, "keywords", {})
    return "-".join(map(str, options.values())) or "plain"


@pytest.mark.parametrize(
    ("config", "quantize", "sizes"),
    [
        (compressed("int-quantized", num_bits=8, strategy="channel"), int8, UNEVEN),
        (
            compressed("naive-quantized", group_size=4, symmetric=False, num_bits=8),
            partial(int8, width=4, zeros=True),
            UNEVEN,
        ),
        (
            compressed("float-quantized", strategy="tensor", **FLOAT),
            partial(float8, name="weight_scale", axes=1),
            UNEVEN,
        ),
        (
            compressed("float-quantized", strategy="tensor", **FLOAT),
            partial(float8, name="weight_scale", axes=0),
            UNEVEN,
        ),
        (
            compressed("float-quantized", strategy="block", block_structure=[16, 20], **FLOAT),
            partial(float8, name="weight_scale", block=(16, 20)),
            UNEVEN,
        ),
        (
            compressed("pack-quantized", strategy="group", group_size=4, symmetric=False, **INT4),
            partial(pack_quantized, bits=4, width=4, zeros=True),
            UNEVEN,
        ),
        (
            compressed("pack-quantized", strategy="group", group_size=4, actorder="group", **INT4),
            partial(pack_quantized, bits=4, width=4, order=True),
            UNEVEN,
        ),
        (
            compressed("pack-quantized", strategy="channel", num_bits=2, group_size=-1),
            partial(pack_quantized, bits=2),
            UNEVEN,
        ),
        (
            compressed("pack-quantized", strategy="channel", num_bits=8, symmetric=False),
            partial(pack_quantized, bits=8, zeros=True),
            UNEVEN,
        ),
        (fp8(16, 20), partial(float8, name="weight_scale_inv", block=(16, 20)), UNEVEN),
        (fp8(128, 128), partial(float8, name="weight_scale_inv", block=(128, 128)), UNEVEN),
        (gptq_config(4, group_size=16), partial(gptq, bits=4, width=16), WHOLE),
        (
            gptq_config(8, group_size=8, desc_act=True),
            partial(gptq, bits=8, width=8, order=True),
            WHOLE,
        ),
        (gptq_config(2, checkpoint_format="gptq_v2"), partial(gptq, bits=2, added=0), WHOLE),
        (AWQ, partial(awq, width=16), WHOLE),
    ],
    ids=short_id,
)
def test_a_quantized_checkpoint_converts_as_its_dequantized_weights(
    tmp_path, config, quantize, sizes
):
    quantized, plain = write(tmp_path, config, quantize, sizes=sizes)
    spec, params = converted(quantized)
    wanted_spec, wanted = converted(plain)
    assert spec.dtype == wanted_spec.dtype == "bfloat16"
    assert params.keys() == wanted.keys()
    for name, array in wanted.items():
        assert params[name].dtype == array.dtype
        np.testing.assert_array_equal(params[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_get_the_dtype_that_the_config_names(tmp_path, dtype):
    quantized, plain = write(tmp_path, AWQ, partial(awq, width=16), sizes=WHOLE, dtype=dtype)
    spec, params = converted(quantized)
    assert spec.dtype == dtype
    for name, array in converted(plain)[1].items():
        assert params[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(params[name], array, err_msg=name)


def test_a_weight_is_read_and_freed_with_all_its_tensors(tmp_path):
    sources.write_json(tmp_path / "config.json", {"quantization_config": AWQ})
    parts, _ = awq(np.random.default_rng(0), 8, 32, width=16)
    parts["input_scale"] = np.ones(1, np.float32)
    asked = []
    tensors = {
        f"a.{name}": Tensor(
            f"a.{name}",
            str(array.dtype),
            array.shape,
            lambda name=name, array=array: asked.append(("read", name)) or array,
            lambda name=name: asked.append(("free", name)),
        )
        for name, array in parts.items()
    }
    (weight,) = folded("model", tmp_path, tensors, "bfloat16").values()
    assert (weight.name, weight.shape, weight.dtype) == ("a.weight", (8, 32), "bfloat16")
    assert asked == [("free", "input_scale")]
    weight.read()
    weight.free()
    for act in ("read", "free"):
        assert {(act, name) for name in ("qweight", "qzeros", "scales")} <= {*asked}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"load_in_4bit": True}, "None is not supported; known: awq, compressed-tensors, fp8, gp"),
        *(
            ({"quant_method": method}, f"'{method}' is not supported; known: awq, .*use the origin")
            for method in ("bitsandbytes", "gguf", "hqq", "quanto", "mxfp4", "torchao", "new")
        ),
        (compressed("nvfp4-pack-quantized", num_bits=4), "'nvfp4-pack-quantized' .*int-quantized"),
        (compressed("dense", **INT4), "format 'dense'"),
        (compressed("int-quantized", **FLOAT), "type in format int-quantized 'float'"),
        (compressed("int-quantized", num_bits=16), "num_bits of int 16"),
        (compressed("pack-quantized", num_bits=3), "num_bits of int 3"),
        (compressed("float-quantized", type="float", num_bits=4), "num_bits of float 4"),
        (compressed("float-quantized", symmetric=False, **FLOAT), "symmetric of float False"),
        (compressed("int-quantized", strategy="tensor_group"), "strategy 'tensor_group'"),
        (compressed("int-quantized", strategy="group"), "strategy 'group' without its size"),
        (compressed("float-quantized", strategy="block", **FLOAT), "strategy 'block' without its"),
        (compressed("pack-quantized", strategy="tensor"), "strategy 'tensor' .*: channel, group"),
        (compressed("int-quantized", dynamic="local"), "dynamic 'local'"),
        (compressed("int-quantized", actorder="rows"), "actorder 'rows'"),
        (compressed("int-quantized", codebook=1), "group_0.weights with 'codebook'"),
        (compressed("int-quantized", symmetric="no"), 'weights.symmetric is "no", wanted true or'),
        (compressed("int-quantized") | {"transform_config": {"r": 1}}, "transform_config"),
        (
            compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config of format 'sparse-24-bitmask'",
        ),
        (
            compressed("int-quantized")
            | {"config_groups": {n: {"weights": {"strategy": n}} for n in ("channel", "tensor")}},
            "config_groups with different weights",
        ),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        (fp8(128), "weight_block_size is .* wanted two whole numbers"),
        (fp8(128, 128) | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported; known: e4m3"),
        (gptq_config(3), "'gptq': bits 3 is not supported; known: 2, 4, 8"),
        (gptq_config(4, checkpoint_format="marlin"), "checkpoint_format 'marlin'.*gptq, gptq_v2"),
        (gptq_config(4, dynamic={"+:.*k_proj": {"bits": 8}}), "dynamic, with settings for some"),
        (gptq_config(4, pack_dtype="int64"), "pack_dtype 'int64'"),
        (AWQ | {"bits": 8}, "bits 8 is not supported; known: 4"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq'"),
    ],
    ids=str,
)
def test_settings_that_are_not_supported_are_refused_by_name_without_weights(
    tmp_path, config, message
):
    source = sources.write_bert(tmp_path / "source", quantization_config=config)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message) as caught:
        outline(source)
    assert isinstance(caught.value, UnsupportedModel) or " wanted " in str(caught.value)


@pytest.mark.parametrize("write_model", [write_dual, write_pages])
def test_models_of_images_are_refused_too(tmp_path, write_model):
    config = {"quant_method": "bitsandbytes"}
    with pytest.raises(UnsupportedModel, match="'bitsandbytes' is not supported"):
        outline_routes(write_model(tmp_path / "model", quantization_config=config))


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"scales": None}, ["missing: a.scales"]),
        ({"g_idx": None}, ["missing: a.g_idx"]),
        ({"weight": np.ones((8, 32), np.float16)}, ["both a.weight and a.qweight are there"]),
        ({"scales": np.ones((4, 8), np.float32)}, ["a.scales: wanted shape (2, 8), got (4, 8)"]),
        ({"qzeros": np.ones((2, 8), np.int32)}, ["a.qzeros: wanted shape (2, 1), got (2, 8)"]),
        ({"qweight": np.ones((4, 8), np.int64)}, ["a.qweight: wanted one of int32, got int64"]),
        ({"qweight": np.ones(4, np.int32)}, ["a.qweight: wanted two axes, got shape (4,)"]),
        ({"scales": np.ones((2, 8), np.int32)}, None),
    ],
    ids=str,
)
def test_tensors_that_do_not_belong_together_are_refused_by_name(tmp_path, change, problems):
    config = gptq_config(4, group_size=16, desc_act=True)
    sources.write_json(tmp_path / "config.json", {"quantization_config": config})
    parts = gptq(np.random.default_rng(0), 8, 32, bits=4, width=16)[0] | change
    stored = {f"a.{name}": array for name, array in parts.items() if array is not None}
    sources.write_weights(tmp_path, stored)
    with pytest.raises(ConversionError) as caught:
        folded("model", tmp_path, find(tmp_path), "bfloat16")
    wanted = problems or ["a.scales: wanted one of float32, float16, bfloat16, got int32"]
    assert caught.value.problems == wanted


def test_a_column_of_no_group_is_refused(tmp_path):
    config = gptq_config(4, group_size=16)
    sources.write_json(tmp_path / "config.json", {"quantization_config": config})
    parts, _ = gptq(np.random.default_rng(0), 8, 32, bits=4, width=16)
    parts["g_idx"][3] = 2
    sources.write_weights(tmp_path, parts)
    (weight,) = folded("model", tmp_path, find(tmp_path), "bfloat16").values()
    with pytest.raises(CheckpointError, match="g_idx has numbers from 0 to 2, wanted 0 to 1"):
        weight.read()


def test_zero_points_of_symmetric_weights_are_not_read_but_named(tmp_path):
    config = compressed("int-quantized", num_bits=8, strategy="channel")
    source, _ = write(tmp_path, config, partial(int8, zeros=True))
    with pytest.raises(ConversionError, match=r"unused: .*\.weight_zero_point"):
        converted(source)
