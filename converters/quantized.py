"""Reads quantized weights: the tensors of a weight become one tensor, dequantized when it is read.

A weight `[out, in]` is `scale * (value - zero point)`. This is computed in float32 and rounded once
to the dtype of the model. Rows and columns that share a scale are a block. Which weights are
quantized is read from the tensors' names, and not from lists such as `ignore`. How activations are
quantized does not matter: jaxembed does not quantize them.

The layouts are defined by these files:

- compressed-tensors: its compressors/pack_quantized/helpers.py, compressors/naive_quantized/base.py
  and quantization/lifecycle/forward_helpers.py
- fp8: integrations/finegrained_fp8.py of transformers
- gptq: nn_modules/qlinear/qlinear_cuda.py of AutoGPTQ; utils/model.py of GPTQModel for gptq_v2
- awq: modules/linear/gemm.py of AutoAWQ
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from converters.fields import (
    CONFIG_FIELDS,
    QUANTIZED_WEIGHT_FIELDS,
    check_fields,
    either,
    lookup,
    refuse_unknown,
    refuse_unless,
)
from converters.heads import read_optional_json
from converters.weights import NUMPY_DTYPES, Shape, Tensor, check_dtype, check_shape
from jaxembed.data.spec import DType
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

WORD_BITS = 32
PACKED_BITS = (2, 4, 8)  # 3 bits are packed in several ways
CHUNK_ROWS = 512  # rows that are in memory as float32
# tensors that only quantize activations and the key-value cache
UNUSED = re.compile(r"(.*\.)?((input|output|[qkv])_(scale|zero_point)|activation_scale)")
# Numbers of the 4-bit values in a word of AWQ, in the order of the columns.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Block = tuple[int | None, int | None]  # numbers of rows and columns; None: all


@dataclass(frozen=True)
class Scheme:
    """How the weights of a model are quantized.

    `parts` has the last words of the names of a weight's tensors: `values`, `scale`, perhaps `zero`
    (zero points), `group` (each column's number among the blocks) and `shape`. A weight is
    quantized if it has the tensor of the part `key`.
    """

    parts: Mapping[str, str]
    key: str
    block: Block
    stored: tuple[str, ...]  # dtypes of the values and zero points
    required: Collection[str] = ("values", "scale", "zero", "shape")  # among `parts`
    bits: int | None = None  # of a value that is packed into int32; None: not packed
    axes: tuple[int, int] = (1, 1)  # those along which values and zero points are packed
    order: tuple[int, ...] = ()  # numbers of the values in a word; empty: lowest bits first
    transposed: bool = False  # values, scales and zero points are stored as [in, out]
    added: int = 0  # to a stored zero point, also to the largest, as AutoGPTQ does


def folded(
    model: str, folder: Path, tensors: Mapping[str, Tensor], dtype: DType
) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, with one tensor of this `dtype` for each weight that
    is quantized as config.json says. The names are those of the model before it was quantized.

    Raises UnsupportedModel for an unknown quantization, and ConversionError, which names `model`,
    if tensors of a weight are missing or have a wrong shape or dtype.
    """
    types = {"quantization_config": CONFIG_FIELDS["quantization_config"]}
    scheme = scheme_of(read_optional_json(folder / "config.json", types))
    if scheme is None:
        return dict(tensors)
    others, weights = dict(tensors), {}
    problems: list[str] = []
    for name in tensors:
        if UNUSED.fullmatch(name):
            others.pop(name).free()
        module, _, last = name.rpartition(".")
        if last != scheme.parts[scheme.key]:
            continue
        named = {part: f"{module}.{word}".removeprefix(".") for part, word in scheme.parts.items()}
        found = {part: others.pop(full) for part, full in named.items() if full in others}
        missing = [named[part] for part in named if part in scheme.required and part not in found]
        problems += [f"missing: {full}" for full in missing]
        if missing:
            continue
        shape, misfits = _shape_of(scheme, found)
        full = f"{module}.weight".removeprefix(".")
        problems += misfits
        problems += [f"both {full} and {found['values'].name} are there"] * (full in others)
        read = partial(_read, scheme, found, full, shape, dtype)
        weights[full] = Tensor(full, dtype, shape, read, partial(_free, found))
    if problems:
        raise ConversionError(model, problems)
    return others | weights


def scheme_of(hf: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights are quantized, from the content `hf` of config.json; None if no weight
    is. Raises UnsupportedModel for an unknown method or setting, and CheckpointError for a wrong
    type."""
    config = hf.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method")
    try:
        return lookup("quant_method", method, METHODS)(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"quantization_config of {method!r}: {error}; use the original model"
        ) from error


def _compressed_tensors(config: dict[str, Any]) -> Scheme | None:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    refuse_unknown("sparsity_config of format", sparsity, ("dense",))
    if config.get("transform_config"):
        raise UnsupportedModel("transform_config is not supported")
    schemes = []
    for name, group in (config.get("config_groups") or {}).items():
        if (weights := group.get("weights")) is not None:
            format = group.get("format") or config.get("format")
            schemes.append(_compressed_group(f"config_groups.{name}.weights", weights, format))
    if any(scheme != schemes[0] for scheme in schemes):
        raise UnsupportedModel("config_groups with different weights are not supported")
    return schemes[0] if schemes else None


def _compressed_group(where: str, weights: Any, format: Any) -> Scheme:
    """Return the scheme of a group of weights in this `format`; `where` names it in messages."""
    types = lookup("format", format, COMPRESSED_TYPES)
    if not isinstance(weights, dict):
        raise CheckpointError(f"quantization_config: {where} is no JSON object")
    check_fields("quantization_config", weights, QUANTIZED_WEIGHT_FIELDS, f"{where}.")
    for key in weights:
        refuse_unknown(f"{where} with", key, COMPRESSED_SETTINGS)
    is_packed = format == "pack-quantized"
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    refuse_unknown(f"type in format {format}", kind, types)
    refuse_unknown(f"num_bits of {kind}", bits, PACKED_BITS if is_packed or kind == "int" else (8,))
    refuse_unless(weights, {"dynamic": (False, None)})
    order = weights.get("actorder")
    refuse_unknown("actorder", order, (None, False, True, "weight", "static", "group", "dynamic"))
    is_symmetric = weights.get("symmetric") is not False
    if kind == "float":
        refuse_unknown("symmetric of float", is_symmetric, (True,))
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "group" if size > 0 else "channel"
    blocks: dict[str, Block] = {"channel": (1, None), "group": _groups(weights)}
    if not is_packed:
        blocks |= {"tensor": (None, None), "block": _sizes(weights.get("block_structure"))}
    strategy = weights.get("strategy") or inferred
    block = lookup("strategy", strategy, blocks)
    if strategy in ("group", "block") and block[1] is None:
        raise UnsupportedModel(f"strategy {strategy!r} without its size is not supported")
    values = "weight_packed" if is_packed else "weight"
    parts = {"values": values, "scale": "weight_scale", "group": "weight_g_idx"}
    if not is_symmetric:
        parts["zero"] = "weight_zero_point"
    key = "scale"
    if is_packed:
        parts["shape"], key = "weight_shape", "values"
    return Scheme(
        parts,
        key,
        block,
        stored=("int32",) if is_packed else ("int8",) if kind == "int" else ("float8_e4m3fn",),
        required=set(parts) - ({"group"} if order in (None, False, "weight", "static") else set()),
        bits=int(bits) if is_packed else None,
        axes=(1, 0),
    )


def _fp8(config: dict[str, Any]) -> Scheme:
    refuse_unless(config, {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)})
    block = _sizes(config.get("weight_block_size"))
    if block[1] is None:
        raise UnsupportedModel("weight_block_size None is not supported; known: two sizes")
    parts = {"values": "weight", "scale": "weight_scale_inv"}
    return Scheme(parts, "scale", block, stored=("float8_e4m3fn",))


def _gptq(config: dict[str, Any]) -> Scheme:
    bits = config.get("bits", 0)
    refuse_unknown("bits", bits, PACKED_BITS)
    # with a minus a pattern of `dynamic` names weights that are not quantized
    if any(not key.startswith("-:") for key in config.get("dynamic") or {}):
        raise UnsupportedModel("dynamic, with settings for some weights, is not supported")
    none = {"rotation": (None,), "adapter": (None,), "is_marlin_format": (False, None)}
    refuse_unless(config, {"pack_dtype": ("int32", None), **none})
    version = either(config, "checkpoint_format", "format", "gptq")
    return Scheme(
        {"values": "qweight", "scale": "scales", "zero": "qzeros", "group": "g_idx"},
        "values",
        _groups(config),
        stored=("int32",),
        required=("values", "scale", "zero", *(("group",) if config.get("desc_act") else ())),
        bits=int(bits),
        axes=(0, 1),
        transposed=True,
        added=lookup("checkpoint_format", version, {"gptq": 1, "gptq_v2": 0}),
    )


def _awq(config: dict[str, Any]) -> Scheme:
    refuse_unknown("bits", config.get("bits"), (4,))
    layouts = ("gemm", "GEMM", None)
    refuse_unless(config, dict.fromkeys(("version", "format", "checkpoint_format"), layouts))
    refuse_unless(config, {"zero_point": (True,)})
    if config.get("backend") == "llm-awq":
        raise UnsupportedModel("backend 'llm-awq' is not supported")
    return Scheme(
        {"values": "qweight", "scale": "scales", "zero": "qzeros"},
        "values",
        _groups(config),
        stored=("int32",),
        bits=4,
        order=AWQ_ORDER,
        transposed=True,
    )


def _groups(config: dict[str, Any]) -> Block:
    """Return the block of a group of a row's columns; a group_size of -1 means all columns."""
    size = int(config.get("group_size") or -1)
    return 1, size if size > 0 else None


def _sizes(value: Sequence[int] | None) -> Block:
    """Return the block of these numbers of rows and columns; without them, the block is all."""
    rows, columns = value or (None, None)
    return (None, None) if rows is None or columns is None else (int(rows), int(columns))


METHODS: dict[str, Callable[[dict[str, Any]], Scheme | None]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
}
COMPRESSED_TYPES = {  # types of values, by format
    "float-quantized": ("float",),
    "int-quantized": ("int",),
    "naive-quantized": ("int", "float"),
    "pack-quantized": ("int",),
}
COMPRESSED_SETTINGS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"),
    *("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)


def _shape_of(scheme: Scheme, found: Mapping[str, Tensor]) -> tuple[Shape, list[str]]:
    """Return the shape `[out, in]` of a weight, and a problem for each of its tensors that does not
    have the shape and dtype that belong to it."""
    values = found["values"]
    if len(values.shape) != 2 or 0 in values.shape:
        return values.shape, [f"{values.name}: wanted two axes, got shape {values.shape}"]
    if "shape" in found:
        misfits = check_shape([found["shape"]], (2,))
        misfits += check_dtype([found["shape"]], ("int64", "int32"))
        if misfits:
            return values.shape, misfits
        rows, columns = (int(size) for size in found["shape"].read())
    elif scheme.bits:
        sizes = list(values.shape)
        sizes[scheme.axes[0]] *= WORD_BITS // scheme.bits
        rows, columns = reversed(sizes)
    else:
        rows, columns = values.shape
    if min(rows, columns) < 1:
        return values.shape, [f"{found['shape'].name}: wanted sizes over 0, got {rows}, {columns}"]

    def stored(first: int, second: int, axis: int | None = None) -> Shape:
        sizes = [second, first] if scheme.transposed else [first, second]
        if axis is not None and scheme.bits:
            sizes[axis] = math.ceil(sizes[axis] * scheme.bits / WORD_BITS)
        return tuple(sizes)

    block = scheme.block[0] or rows, scheme.block[1] or columns
    scales = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    is_single = scheme.block == (None, None) and found["scale"].shape in ((), (1,))
    wanted: dict[str, tuple[Shape, Collection[str]]] = {
        "values": (stored(rows, columns, scheme.axes[0]), scheme.stored),
        "scale": (found["scale"].shape if is_single else stored(*scales), NUMPY_DTYPES),
        "group": ((columns,), ("int32", "int64")),
    }
    if "zero" in found:
        packed = stored(*scales, scheme.axes[1])
        wanted["zero"] = wanted["scale"][0] if is_single else packed, scheme.stored
    problems: list[str] = []
    for part, (shape, dtypes) in wanted.items():
        if part in found:
            problems += check_shape([found[part]], shape)
            problems += check_dtype([found[part]], dtypes)
    return (rows, columns), problems


def _read(
    scheme: Scheme, found: Mapping[str, Tensor], name: str, shape: Shape, dtype: DType
) -> np.ndarray:
    """Read the tensors of the weight `name`; return it dequantized, `[out, in]`. Raises
    CheckpointError if a column's group has no scale."""
    arrays = {part: tensor.read() for part, tensor in found.items()}
    values, scale, zero = arrays["values"], arrays["scale"], arrays.get("zero")
    if scheme.bits:
        counts = shape[::-1] if scheme.transposed else shape
        values = _unpacked(scheme, values, scheme.axes[0], counts)
        if zero is not None:
            zero = _unpacked(scheme, zero, scheme.axes[1], counts)
    if scheme.transposed:
        values, scale, zero = values.T, scale.T, None if zero is None else zero.T
    height, width = (size or full for size, full in zip(scheme.block, shape, strict=True))
    columns = arrays.get("group", np.arange(shape[1]) // width)
    groups = math.ceil(shape[1] / width)
    if columns.min() < 0 or columns.max() >= groups:
        raise CheckpointError(
            f"{name}: {found['group'].name} has numbers from {columns.min()} to {columns.max()}, "
            f"wanted 0 to {groups - 1}"
        )
    # compressed-tensors stores values that are symmetric around 0 with this added
    middle = 2 ** (scheme.bits - 1) if scheme.bits else 0
    scale = scale.reshape(-1, groups).astype(np.float32)
    zero = np.full_like(scale, middle) if zero is None else zero.reshape(-1, groups)
    zero = zero.astype(np.float32) + scheme.added
    result = np.empty(shape, NUMPY_DTYPES[dtype])
    for start in range(0, shape[0], CHUNK_ROWS):
        rows = np.arange(start, min(start + CHUNK_ROWS, shape[0]))
        blocks = rows[:, None] // height, columns[None]
        result[rows] = (values[rows].astype(np.float32) - zero[blocks]) * scale[blocks]
    return result


def _unpacked(scheme: Scheme, words: np.ndarray, axis: int, counts: Shape) -> np.ndarray:
    """Return the values, uint8, that int32 `words` hold along an axis. `counts` has the number of
    values along this axis; what a last word holds beyond it is left out."""
    assert scheme.bits is not None
    contiguous = np.ascontiguousarray(np.moveaxis(words, axis, 1))
    # a byte holds whole values, the first of them in its lowest bits
    shifts = np.arange(0, 8, scheme.bits, dtype=np.uint8)
    values = (contiguous.view(np.uint8)[..., None] >> shifts) & np.uint8(2**scheme.bits - 1)
    if scheme.order:
        values = values.reshape(len(contiguous), -1, len(scheme.order))[..., scheme.order]
    values = values.reshape(len(contiguous), -1)[:, : counts[axis]]
    return np.moveaxis(values, 1, axis)


def _free(found: Mapping[str, Tensor]) -> None:
    for tensor in found.values():
        tensor.free()
