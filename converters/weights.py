"""Reads tensors by name and converts them to parameters by rules.

Every parameter must be filled, and every tensor must be used or ignored.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from jaxembed.data.spec import DType
from jaxembed.errors import CheckpointError, ConversionError, counted

Shape = tuple[int, ...]

NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
SAFETENSORS_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
READ_DTYPES: dict[str, Any] = {
    **NUMPY_DTYPES,
    # only some transforms, and quantized weights, take these dtypes; no parameter has one of them
    "float64": np.float64,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
    "int32": np.int32,
    "int64": np.int64,
}

MIN_TORCH = (2, 6)  # older versions may run code of a pickle despite weights_only: CVE-2025-32434

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Tensor:
    """A source tensor that is not read yet."""

    name: str
    dtype: str  # a key of READ_DTYPES, or the file's name of another dtype
    shape: Shape
    read: Callable[[], np.ndarray]  # returns the values; must not be called after `free`
    free: Callable[[], None] = lambda: None  # releases the memory of values that are loaded


@dataclass(frozen=True)
class Transform:
    """A function that makes a parameter from source tensors, with a check of their shapes."""

    apply: Callable[..., np.ndarray]
    misfits: Callable[[Sequence[Tensor], Shape], list[str]]  # sources, result's shape -> problems
    dtype: DType | None = None  # dtype of the parameter; None: the dtype of the sources
    takes: Collection[str] = tuple(NUMPY_DTYPES)  # allowed dtypes of the sources
    by_column: bool = False  # whether each result column is a row of one source, perhaps scaled


def _transpose(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T)


def check_shape(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    """Return a problem for each source that does not have this shape."""
    return [
        f"{source.name}: wanted shape {shape}, got {source.shape}"
        for source in sources
        if source.shape != shape
    ]


def check_dtype(sources: Sequence[Tensor], known: Collection[str]) -> list[str]:
    """Return a problem for each source whose dtype is not one of `known`."""
    return [
        f"{source.name}: wanted one of {', '.join(known)}, got {source.dtype}"
        for source in sources
        if source.dtype not in known
    ]


def _transposed(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    """Return a problem for each source that does not have this shape after transposition."""
    return check_shape(sources, shape[::-1])


def _joined(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    """Return a problem unless the sources have this shape when they are concatenated by rows. Their
    numbers of rows may differ, as with grouped key heads."""
    same_width = all(source.shape[1:] == shape[1:] for source in sources)
    if same_width and sum(sum(source.shape[:1]) for source in sources) == shape[0]:
        return []
    shapes = ", ".join(f"{source.name} {source.shape}" for source in sources)
    return [f"{shapes}: wanted shape {shape} together"]


identity = Transform(lambda array: array, check_shape)
transpose = Transform(_transpose, _transposed, by_column=True)  # torch stores weights as [out, in]
concatenate = Transform(lambda *arrays: np.concatenate(arrays), _joined)
concatenate_transposed = Transform(
    lambda *arrays: np.concatenate([array.T for array in arrays], axis=1),
    lambda sources, shape: _joined(sources, shape[::-1]),
    by_column=True,
)
swap_halves_transposed = Transform(
    lambda array: np.concatenate([half.T for half in reversed(np.split(array, 2))], axis=1),
    _transposed,
    by_column=True,
)


def plus(value: float) -> Transform:
    """Return a transform that adds a number. bfloat16 would lose bits of the sum."""
    return Transform(lambda array: array.astype(np.float32) + value, check_shape, dtype="float32")


one_plus = plus(1)


def rows_of(start: int, stop: int, total: int, *, turned: bool = False) -> Transform:
    """Return a transform that takes the rows from `start` to before `stop` of a vector or a table
    with `total` rows. With `turned` each row becomes a column of a weight."""

    def misfits(sources: Sequence[Tensor], wanted: Shape) -> list[str]:
        rows, *others = wanted[::-1] if turned else wanted  # the shape of the rows in the source
        return check_shape(sources, (rows - (stop - start) + total, *others))

    return Transform(lambda x: _transpose(x[start:stop]) if turned else x[start:stop], misfits)


def reshaped(*shape: int) -> Transform:
    """Return a transform that gives a tensor this shape, with its values in the same order."""

    def misfits(sources: Sequence[Tensor], wanted: Shape) -> list[str]:
        same = all(math.prod(source.shape) == math.prod(wanted) for source in sources)
        return [] if same and wanted == shape else check_shape(sources, wanted)

    return Transform(lambda x: x.reshape(shape), misfits)


def transposed_over(divisor: float) -> Transform:
    """Return a transform that transposes a tensor and divides it: a float32 weight `[in, out]`."""
    return Transform(lambda x: _transpose(x).astype(np.float32) / divisor, _transposed, "float32")


def padded(size: int, total: int) -> Transform:
    """Return a transform that pads a vector `[size]` with zeros to `[total]`."""
    return Transform(
        lambda x: np.pad(x, (0, total - size)), lambda sources, _: check_shape(sources, (size,))
    )


def transposed_padded(rows: int, columns: int) -> Transform:
    """Return a transform that transposes a table `[rows, width]`, and pads it with columns of zeros
    to a weight `[width, columns]`."""
    return Transform(
        lambda table: np.pad(table.T, ((0, 0), (0, columns - rows))),
        lambda sources, shape: check_shape(sources, (rows, shape[0])),
    )


def constant(value: float, *shape: int) -> Transform:
    """Return a transform from no tensor to a parameter of this shape that is `value` everywhere,
    for one that a model lacks."""
    return Transform(
        lambda: np.full(shape, value, np.float32), lambda sources, _: [], dtype="float32"
    )


def difference_of_rows(true_id: int, false_id: int | None) -> Transform:
    """Return a transform from a table `[vocab, hidden]` to a float32 weight `[hidden, 1]`.

    The weight is the difference of two rows of the table, or the first row alone. So its product
    with a hidden state is logit(true_id) - logit(false_id), or logit(true_id).
    """

    def apply(table: np.ndarray) -> np.ndarray:
        row = table[true_id].astype(np.float32)
        return (row if false_id is None else row - table[false_id].astype(np.float32))[:, None]

    def misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
        rows = max(true_id, false_id or 0) + 1
        return [
            f"{source.name}: wanted at least {counted(rows, 'row')} of {shape[0]}, got shape "
            f"{source.shape}"
            for source in sources
            if source.shape[1:] != shape[:1] or source.shape[0] < rows
        ]

    return Transform(apply, misfits, dtype="float32")


@dataclass(frozen=True)
class Rule:
    """How a parameter is made: the names of its source tensors, its own name, and the transform.

    `{i}` in the names stands for the number of each layer. If a parameter has several rules, the
    first rule whose source tensors all exist is used. If there is none, the first rule is used.
    """

    sources: str | tuple[str, ...]
    target: str
    transform: Transform = identity


@dataclass(frozen=True)
class Step:
    """The conversion of one parameter from its source tensors."""

    sources: tuple[Tensor, ...]
    target: str  # name of the parameter
    shape: Shape  # shape of the parameter
    transform: Transform
    last_of: tuple[Tensor, ...] = ()  # sources that no later step reads

    @property
    def dtype(self) -> str:
        """The dtype of the parameter."""
        return self.transform.dtype or self.sources[0].dtype

    @property
    def size(self) -> int:
        """The number of elements of the parameter."""
        return math.prod(self.shape)

    def read(self) -> np.ndarray:
        """Read the sources, free those that no later step reads, and return the parameter."""
        arrays = [source.read() for source in self.sources]
        for source in self.last_of:
            source.free()
        return self.transform.apply(*arrays)


def plan_steps(
    model: str,
    rules: Sequence[Rule],
    ignored: Sequence[str],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
) -> list[Step]:
    """Plan a step for every parameter, without reading tensors. Free tensors that no step needs.

    `ignored` are patterns of names of unused tensors. `tensors` has all tensors by name, and
    `shapes` the shapes of all parameters by name. The smallest parameter comes first: the tensors
    of a torch file are freed as they are read, so that little of the file is in memory when the
    largest tensor is copied. Raises ConversionError, which lists every tensor that is missing or
    unused, or has a wrong shape or dtype.
    """
    expanded_rules = choose(expand(rules, shapes), tensors)
    source_names = {name for rule in expanded_rules for name in rule.sources}
    targets = {rule.target for rule in expanded_rules}
    problems = [f"missing: {name}" for name in sorted(source_names) if name not in tensors]
    problems += [
        f"unused: {tensor.name}"
        for name, tensor in tensors.items()
        if name not in source_names and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    problems += [
        f"no rule fills {target}. This is a bug in jaxembed"
        for target in shapes
        if target not in targets
    ]
    steps: list[Step] = []
    for rule in expanded_rules:
        if not all(name in tensors for name in rule.sources):
            continue
        sources = tuple(tensors[name] for name in rule.sources)
        transform, shape = rule.transform, shapes[rule.target]
        problems += transform.misfits(sources, shape)
        problems += check_dtype(sources, transform.takes)
        if transform.dtype is None and len({source.dtype for source in sources}) > 1:
            kinds = ", ".join(f"{source.name} {source.dtype}" for source in sources)
            problems.append(f"tensors that become one parameter must share a dtype, got {kinds}")
        steps.append(Step(sources, rule.target, shape, transform))
    if problems:
        raise ConversionError(model, problems)
    for name, tensor in tensors.items():
        if name not in source_names:
            tensor.free()
    steps.sort(key=lambda step: step.size)
    # the step that reads each tensor last
    last = {source.name: number for number, step in enumerate(steps) for source in step.sources}
    return [
        replace(step, last_of=tuple(one for one in step.sources if last[one.name] == number))
        for number, step in enumerate(steps)
    ]


def expand(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> Iterator[Rule]:
    """Yield the rules for the parameters in `shapes`, one for each layer if a rule has `{i}`."""
    layers = {int(part) for target in shapes for part in target.split(".") if part.isdigit()}
    for rule in rules:
        sources = (rule.sources,) if isinstance(rule.sources, str) else rule.sources
        for i in sorted(layers) if "{i}" in rule.target else range(1):  # once without {i}
            target = rule.target.replace("{i}", str(i))
            if target in shapes:
                names = tuple(source.replace("{i}", str(i)) for source in sources)
                yield Rule(names, target, rule.transform)


def choose(rules: Iterable[Rule], tensors: Mapping[str, Tensor]) -> list[Rule]:
    """Return one rule for each parameter: the first whose sources all exist, else the first."""
    by_target: dict[str, list[Rule]] = {}
    for rule in rules:
        by_target.setdefault(rule.target, []).append(rule)
    return [
        next((rule for rule in group if all(name in tensors for name in rule.sources)), group[0])
        for group in by_target.values()
    ]


def canonical(
    model: str,
    tensors: Mapping[str, Tensor],
    prefixes: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Rename tensors to the names that rules use.

    Each of `prefixes` is removed in turn, and each ending in `renames` is replaced. Raises
    ConversionError, which names `model`, if two tensors get the same name.
    """
    tensors_by_name: dict[str, Tensor] = {}
    problems = []
    for original, tensor in tensors.items():
        name = original
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        for old, new in (renames or {}).items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name in tensors_by_name:
            problems.append(f"both {tensors_by_name[name].name} and {original} stand for {name}")
        tensors_by_name[name] = tensor
    if problems:
        raise ConversionError(model, problems)
    return tensors_by_name


def within(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to `folder/name`, so that tensors of several folders can share one plan."""
    return {
        f"{folder}/{name}": replace(tensor, name=f"{folder}/{tensor.name}")
        for name, tensor in tensors.items()
    }


def find(
    folder: Path, safetensors: str = "model.safetensors", torch: str = "pytorch_model.bin"
) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, from its safetensors files, or else its torch files.

    Of safetensors files only the headers are read; a torch file is loaded. Raises CheckpointError
    if there are no weights, a file is damaged, or torch is missing or too old.
    """
    for name, reader in ((safetensors, safetensors_of), (torch, torch_file)):
        tensors: dict[str, Tensor] = {}
        for file in _files(folder, name):
            tensors |= reader(file)
        if tensors:
            return tensors
    raise CheckpointError(
        f"no weights in {folder}: wanted {safetensors} or {torch}, or either's "
        ".index.json with its shards"
    )


def _files(folder: Path, name: str) -> list[Path]:
    """Return the file of this name, or the shards that its index names; empty if there is neither.
    Raises CheckpointError if the index is damaged or shards are missing."""
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        missing_shards = [shard for shard in names if not (folder / Path(shard).name).is_file()]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{index} is damaged: no readable weight_map ({error})") from error
    if missing_shards:
        raise CheckpointError(f"{index} names files that do not exist: {', '.join(missing_shards)}")
    return [folder / Path(shard).name for shard in names]  # .name keeps an index within the folder


def safetensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, from its header. Raises CheckpointError if
    the file is damaged."""
    # safe_open is not used: it maps the file, whose pages would count as memory of this process in
    # addition to their copies, and its numpy version lacks bfloat16
    size = path.stat().st_size
    with path.open("rb") as file:
        # the length of the header in 8 bytes, the header as JSON, the data
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a safetensors file, or was cut short")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, _Entry])
            return {name: _tensor(path, name, 8 + length, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged header: {error}") from error


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _tensor(path: Path, name: str, base: int, entry: _Entry) -> Tensor:
    """Make a tensor from an entry of the header. The data of the file begin at the offset `base`.

    Raises ValueError if the entry does not fit the file.
    """
    shape, (begin, end) = entry.shape, entry.data_offsets
    dtype = SAFETENSORS_DTYPES.get(entry.dtype, entry.dtype)
    if not 0 <= begin <= end <= path.stat().st_size - base:
        raise ValueError(f"{name} lies outside the file, which may have been cut short")
    if dtype in READ_DTYPES:
        size = math.prod(shape) * np.dtype(READ_DTYPES[dtype]).itemsize
        if min(shape, default=0) < 0 or end - begin != size:
            raise ValueError(f"{name} of shape {shape} wants {size} bytes, got {end - begin}")
    return Tensor(name, dtype, shape, partial(_read, path, base + begin, dtype, shape))


def _read(path: Path, offset: int, dtype: str, shape: Shape) -> np.ndarray:
    kind = np.dtype(READ_DTYPES[dtype])
    raw = np.fromfile(path, np.uint8, count=math.prod(shape) * kind.itemsize, offset=offset)
    return raw.view(kind).reshape(shape)


def torch_file(path: Path) -> dict[str, Tensor]:
    """Load a torch file and return its tensors by name. Raises CheckpointError if it is damaged, or
    torch is missing or older than MIN_TORCH."""
    try:
        torch = import_module("torch")  # not a dependency: only old models need it
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a torch file and torch is not installed; install it for the conversion "
            "(pip install torch) or use a model with model.safetensors"
        ) from error
    version = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if version is None or tuple(map(int, version.groups())) < MIN_TORCH:
        oldest = ".".join(map(str, MIN_TORCH))
        raise CheckpointError(
            f"{path} is a pickle, which can make torch {torch.__version__} run code "
            f"(CVE-2025-32434); install torch {oldest} or newer for the conversion, or use a model "
            "with model.safetensors"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors, and jaxembed does not run pickled "
            f"code: {error}"
        ) from error
    # the whole file is loaded; its tensors are freed one by one as they are read
    return {
        name: Tensor(
            name,
            str(state[name].dtype).removeprefix("torch."),
            tuple(state[name].shape),
            partial(_torch_tensor, torch, state, name),  # reads it
            partial(state.pop, name, None),  # frees it
        )
        for name in list(state)
    }


def _torch_tensor(torch: Any, state: Mapping[str, Any], name: str) -> np.ndarray:
    tensor = state[name].contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy itself has neither of the two
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if str(tensor.dtype) == "torch.float8_e4m3fn":
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()
