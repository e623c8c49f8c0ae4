"""Reads tensors by name and turns them into parameters by rules. Knows no architecture.

Strict both ways: every parameter is filled, every tensor is used or named in `ignored`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import ml_dtypes
import numpy as np

from jaxembed.errors import CheckpointError, ConversionError
from jaxembed.spec import DType

Shape = tuple[int, ...]

NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

LEAST_TORCH = (2, 6)  # before it weights_only let a pickle run code: CVE-2025-32434

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # safetensors' own limit


def _nothing() -> None:
    """Tensors read from their file at each call leave nothing to free."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source, not read yet. `read` may be called until `free` was."""

    name: str
    dtype: str  # a key of DTYPES, or what the file calls it
    shape: Shape
    read: Callable[[], np.ndarray]
    free: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Transform:
    """How sources become a parameter, and why they cannot become one of a shape: a line each."""

    apply: Callable[..., np.ndarray]
    misfits: Callable[[Sequence[Tensor], Shape], list[str]]
    dtype: DType | None = None  # of what comes out; None is that of the sources


def _keep(array: np.ndarray) -> np.ndarray:
    return array


def _transpose(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T)


def _join(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate(arrays)


def _join_transposed(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate([array.T for array in arrays], axis=1)


def _shaped(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    return [
        f"{source.name}: wanted shape {shape}, got {source.shape}"
        for source in sources
        if source.shape != shape
    ]


def _transposed(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    return _shaped(sources, shape[::-1])


def _joined(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    """Parts may be of unequal length, as those of grouped heads are."""
    alike = all(source.shape[1:] == shape[1:] for source in sources)
    if alike and sum(sum(source.shape[:1]) for source in sources) == shape[0]:
        return []
    got = ", ".join(f"{source.name} {source.shape}" for source in sources)
    return [f"{got}: wanted shape {shape} together"]


def _joined_transposed(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    return _joined(sources, shape[::-1])


identity = Transform(_keep, _shaped)
transpose = Transform(_transpose, _transposed)  # torch keeps [out, in]
concatenate = Transform(_join, _joined)
concatenate_transposed = Transform(_join_transposed, _joined_transposed)


def difference_of_rows(true_id: int, false_id: int) -> Transform:
    """[vocab, hidden] to a kernel [hidden, 1] in float32, whose product is logit(true_id) -
    logit(false_id)."""

    def apply(table: np.ndarray) -> np.ndarray:
        true, false = (table[row].astype(np.float32) for row in (true_id, false_id))
        return (true - false)[:, None]

    def misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
        rows = max(true_id, false_id) + 1
        return [
            f"{source.name}: wanted at least {rows} rows of {shape[0]}, got shape {source.shape}"
            for source in sources
            if source.shape[1:] != shape[:1] or source.shape[0] < rows
        ]

    return Transform(apply, misfits, dtype="float32")


@dataclass(frozen=True)
class Rule:
    """Source names, a parameter's name, and what lies between. `{i}` stands for every layer."""

    sources: str | tuple[str, ...]
    target: str
    transform: Transform = identity


@dataclass(frozen=True)
class Step:
    """A rule for one parameter, its sources found and checked."""

    sources: tuple[Tensor, ...]
    target: str
    shape: Shape  # of the parameter
    transform: Transform
    last_of: tuple[Tensor, ...] = ()  # sources that no later step reads

    @property
    def dtype(self) -> str:
        """Of the parameter."""
        return self.transform.dtype or self.sources[0].dtype

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    def read(self) -> np.ndarray:
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
    """Pair every parameter with its tensors, without reading any; frees those without a use.

    Smallest first: a torch file is freed as it is read, so little is left of it when saving makes
    its copy of the largest tensor. Raises ConversionError listing every missing, unused and
    wrongly shaped tensor.
    """
    expanded = list(_expand(rules, shapes))
    wanted = {name for rule in expanded for name in rule.sources}
    filled = {rule.target for rule in expanded}
    problems = [f"missing: {name}" for name in sorted(wanted) if name not in tensors]
    problems += [
        f"unused: {tensor.name}"
        for name, tensor in tensors.items()
        if name not in wanted and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    problems += [
        f"no rule fills {target}. This is a bug in jaxembed"
        for target in shapes
        if target not in filled
    ]
    steps = []
    for rule in expanded:
        if all(name in tensors for name in rule.sources):
            sources = tuple(tensors[name] for name in rule.sources)
            step = Step(sources, rule.target, shapes[rule.target], rule.transform)
            problems += _misfits(step)
            steps.append(step)
    if problems:
        raise ConversionError(model, problems)
    for name, tensor in tensors.items():
        if name not in wanted:
            tensor.free()
    return _freeing(sorted(steps, key=lambda step: step.size))


def _freeing(steps: Sequence[Step]) -> list[Step]:
    """The steps in that order, each with the sources of which it is the last reader."""
    last = {source.name: number for number, step in enumerate(steps) for source in step.sources}
    return [
        replace(step, last_of=tuple(one for one in step.sources if last[one.name] == number))
        for number, step in enumerate(steps)
    ]


def _expand(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> Iterator[Rule]:
    """One rule for each parameter: `{i}` is every layer that has such a parameter."""
    numbers = {int(part) for target in shapes for part in target.split(".") if part.isdigit()}
    for rule in rules:
        sources = (rule.sources,) if isinstance(rule.sources, str) else rule.sources
        for i in sorted(numbers) if "{i}" in rule.target else range(1):
            target = rule.target.replace("{i}", str(i))
            if target in shapes:
                names = tuple(source.replace("{i}", str(i)) for source in sources)
                yield Rule(names, target, rule.transform)


def _misfits(step: Step) -> list[str]:
    problems = step.transform.misfits(step.sources, step.shape)
    problems += [
        f"{source.name}: wanted one of {', '.join(NUMPY_DTYPES)}, got {source.dtype}"
        for source in step.sources
        if source.dtype not in NUMPY_DTYPES
    ]
    if len({source.dtype for source in step.sources}) > 1:
        kinds = ", ".join(f"{source.name} {source.dtype}" for source in step.sources)
        problems.append(f"tensors that become one parameter must share a dtype, got {kinds}")
    return problems


def canonical(
    model: str,
    tensors: Mapping[str, Tensor],
    prefixes: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """The tensors under the names that rules use: a known prefix gone, old endings made new.

    Raises ConversionError if two tensors end up with one name.
    """
    named: dict[str, Tensor] = {}
    problems = []
    for original, tensor in tensors.items():
        name = original
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        for old, new in (renames or {}).items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name in named:
            problems.append(f"both {named[name].name} and {original} stand for {name}")
        named[name] = tensor
    if problems:
        raise ConversionError(model, problems)
    return named


def within(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, named `folder/name`, so that several folders can share one plan."""
    return {
        f"{folder}/{name}": replace(tensor, name=f"{folder}/{tensor.name}")
        for name, tensor in tensors.items()
    }


def find(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder: safetensors if there are any, else a torch file.

    Only names, dtypes and shapes are read of safetensors. Raises CheckpointError if there are no
    weights or a file is damaged.
    """
    for name, reader in (("model.safetensors", _safetensors), ("pytorch_model.bin", _torch_file)):
        tensors: dict[str, Tensor] = {}
        for file in _files(folder, name):
            tensors |= reader(file)
        if tensors:
            return tensors
    raise CheckpointError(
        f"no weights in {folder}: wanted model.safetensors or pytorch_model.bin, or either's "
        ".index.json with its shards"
    )


def _files(folder: Path, name: str) -> list[Path]:
    """The file of that name, or the shards that its index names; empty if there is neither."""
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: no readable weight_map") from error
    missing = [shard for shard in names if not (folder / Path(shard).name).is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
    return [folder / Path(shard).name for shard in names]  # .name: an index may not lead elsewhere


def _safetensors(path: Path) -> dict[str, Tensor]:
    # Read by hand: safe_open maps the file, whose pages then count as ours beside the copy made
    # of them, and its numpy flavour has no bfloat16.
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a safetensors file, or was cut short")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            return {name: _entry(path, name, 8 + length, header[name]) for name in header}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has a damaged header: {error}") from error


def _entry(path: Path, name: str, base: int, entry: dict[str, Any]) -> Tensor:
    shape = tuple(int(axis) for axis in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"], str(entry["dtype"]))
    if not 0 <= begin <= end <= path.stat().st_size - base:
        raise ValueError(f"{name} lies outside the file, which may have been cut short")
    if dtype in NUMPY_DTYPES:
        want = math.prod(shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
        if min(shape, default=0) < 0 or end - begin != want:
            raise ValueError(f"{name} of shape {shape} wants {want} bytes, got {end - begin}")
    return Tensor(name, dtype, shape, partial(_read, path, base + begin, dtype, shape))


def _read(path: Path, offset: int, dtype: str, shape: Shape) -> np.ndarray:
    items = math.prod(shape)
    size = items * np.dtype(NUMPY_DTYPES[dtype]).itemsize
    raw = np.fromfile(path, np.uint8, count=size, offset=offset)
    return raw.view(NUMPY_DTYPES[dtype]).reshape(shape)


def _torch_file(path: Path) -> dict[str, Tensor]:
    try:
        torch = import_module("torch")  # not a dependency: only old models need it, and only here
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a torch file and torch is not installed; install it for the conversion "
            "(pip install torch) or use a model with model.safetensors"
        ) from error
    _refuse_old_torch(path, str(torch.__version__))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors, and jaxembed runs no pickled code: "
            f"{error}"
        ) from error
    # Loaded whole, then freed one by one as they are read, unlike the pages of a mapped file.
    return {
        name: Tensor(
            name,
            str(state[name].dtype).removeprefix("torch."),
            tuple(state[name].shape),
            partial(_torch_tensor, torch, state, name),
            partial(state.pop, name, None),
        )
        for name in list(state)
    }


def _refuse_old_torch(path: Path, installed: str) -> None:
    version = re.match(r"(\d+)\.(\d+)", installed)
    if version is None or tuple(map(int, version.groups())) < LEAST_TORCH:
        wanted = ".".join(map(str, LEAST_TORCH))
        raise CheckpointError(
            f"{path} is a pickle, which torch {installed} can be made to run code by "
            f"(CVE-2025-32434); install torch {wanted} or newer for the conversion, or use a model "
            "with model.safetensors"
        )


def _torch_tensor(torch: Any, state: Mapping[str, Any], name: str) -> np.ndarray:
    tensor = state[name].contiguous()
    if tensor.dtype == torch.bfloat16:  # which numpy does not know
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
