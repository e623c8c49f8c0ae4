"""Saves and restores a checkpoint: manifest, parameters, tokenizer.

Formats 1 and 2 had one pooling and its modules instead of heads. They are read as format 3: the
modules become those of the primary head, and the names of their parameters follow. Format 1 was for
embedders alone: the fields that it lacks have defaults.

manifest.json      the ModelSpec
tokenizer.json     as Hugging Face's tokenizers reads it
params/part-000/   Orbax, flat dotted names, in the dtype of the source; more parts if large
SHA256SUMS         of each of these files, as `sha256sum` writes and checks it

A model with several routes is a folder of checkpoints, `routes/NAME`, with a manifest.json that has
the names, and a SHA256SUMS of all files.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

import ml_dtypes  # noqa: F401  # numpy knows "bfloat16" by name only once this is imported
import msgspec
import numpy as np

from jaxembed import memory
from jaxembed.data.spec import (
    FORMAT_VERSION,
    ROUTE_NAME,
    ModelSpec,
    Module,
    Pooled,
    Pooling,
    Routes,
    Task,
    scoring_heads,
)
from jaxembed.errors import CheckpointError, counted
from jaxembed.platform.files import DISK_FULL, PARTIAL, unfinished

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARAMETERS = "params"
ROUTE_FOLDERS = "routes"
DIGESTS = "SHA256SUMS"
DIGEST_LINE = re.compile(r"([0-9a-f]{64})  ([^\r\n]+)\n")

HEADS_SINCE = 3  # the first format with heads
OLD_MODULES = "modules."  # prefix of the names of modules' parameters in earlier formats

# Orbax holds about two copies of what it saves at once. Parts keep these copies small: a 2 GB model
# took 6 GB in one piece.
PART_BYTES = 256 * 1024 * 1024
METADATA_BYTES = 1024 * 1024  # about the most that Orbax adds to a part

MEMBERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # metadata file of an array -> driver

Parameters = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]


class Contents(NamedTuple):
    """The contents of a checkpoint."""

    spec: ModelSpec
    params: Parameters
    tokenizer: bytes  # empty for a model of images


def save(path: Path, spec: ModelSpec, params: Parameters, tokenizer: bytes) -> ModelSpec:
    """Write a checkpoint, all of it or nothing. Returns its spec, with the content hash and this
    format's version.

    `params` may be a generator of names and arrays, so that a model need not fit in memory. Raises
    CheckpointError if `path` exists and is not an empty directory, if it cannot be written, or if
    other values are read back.
    """
    # for pyright a Mapping might have pairs as its keys, and be an Iterable of pairs itself
    pairs = params.items() if isinstance(params, Mapping) else params
    digests: dict[str, str] = {}
    with atomic_folder(path) as partial:
        (partial / PARAMETERS).mkdir()
        for part_index, part in enumerate(_parts(pairs)):  # pyright: ignore[reportArgumentType]
            digests |= {name: _digest(name, array) for name, array in part.items()}
            folder = partial / PARAMETERS / f"part-{part_index:03d}"
            _save_part(folder, part)
            names = list(part)
            part.clear()  # else the next part and what is read back take memory beside it
            memory.trim()
            with _restoring(folder):
                arrays = stored_arrays(folder)
                altered = [key for key in names if _digest(key, arrays[key].read()) != digests[key]]
            if altered:
                raise CheckpointError(
                    f"{folder}: the values that were read back differ from those that were written "
                    f"for {', '.join(altered)}; check the disk and the memory of this machine"
                )
            memory.trim()
        spec = msgspec.structs.replace(
            spec,
            content_hash=_content_hash(digests, tokenizer),
            format_version=FORMAT_VERSION,
            written_by=_this_version(),
        )
        if tokenizer:
            (partial / TOKENIZER).write_bytes(tokenizer)
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
        (partial / DIGESTS).write_text(_digest_lines(_file_digests(partial)))
        verify(partial)
    return spec


def save_routes(path: Path, contents: Mapping[str, Contents], default: str | None) -> Routes:
    """Write the checkpoint of a model with several routes: `contents` by name of the route, and
    `default`, the name of the default route if there is one. Returns the specs that `save` returns,
    by route. Raises as `save`."""
    with atomic_folder(path) as partial:
        specs = {
            name: save(partial / ROUTE_FOLDERS / name, *item) for name, item in contents.items()
        }
        manifest = _RoutesManifest(tuple(specs), default, FORMAT_VERSION, _this_version())
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        (partial / DIGESTS).write_text(_digest_lines(_file_digests(partial)))
    return Routes(specs, default)


def load_routes(path: Path) -> Routes:
    """Read the specs of a checkpoint by route, and its default route; a checkpoint without a Router
    has one route, "". Raises CheckpointError if a manifest is missing, damaged or of a later
    format."""
    raw, header = _manifest(path)
    if header.routes is None:
        return Routes({"": load_spec(path)})
    with _decoding(path):
        manifest = msgspec.json.decode(raw, type=_RoutesManifest)
    specs = {name: load_spec(route_path(path, name)) for name in manifest.routes}
    if manifest.default_route is not None and manifest.default_route not in specs:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged (there is no route {manifest.default_route!r}); convert "
            "the model again"
        )
    return Routes(specs, manifest.default_route)


def route_path(path: Path, route: str) -> Path:
    """Return the folder with the checkpoint of a route; "", the only route of a checkpoint, is
    `path`."""
    return path / ROUTE_FOLDERS / route if route else path


def load_spec(path: Path) -> ModelSpec:
    """Read the manifest of a checkpoint, of this format or an earlier one.

    Raises CheckpointError if it is missing, damaged, of a later format or of several routes.
    """
    raw, header = _manifest(path)
    if header.routes is not None:
        raise CheckpointError(
            f"{path} has several routes, but one is needed: give {path / ROUTE_FOLDERS}/NAME with "
            f"one of the names {', '.join(map(str, header.routes))}"
        )
    with _decoding(path):
        if header.format_version < HEADS_SINCE:
            single_head = msgspec.json.decode(raw, type=_SingleHead)
            pooled = Pooled(single_head.pooling, single_head.modules)
            heads = {"dense": pooled} if single_head.task == "embed" else scoring_heads(pooled)
            fields = msgspec.json.decode(raw) | {"heads": msgspec.to_builtins(heads)}
            return msgspec.convert(fields, ModelSpec)
        return msgspec.json.decode(raw, type=ModelSpec)


def _manifest(path: Path) -> tuple[bytes, "_Header"]:
    """Read the manifest of a checkpoint: its bytes, and the header. Raises as `load_spec`."""
    with _decoding(path):
        raw = (path / MANIFEST).read_bytes()
        header = msgspec.json.decode(raw, type=_Header)
        if header.format_version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of format {header.format_version}, written by "
                f"{header.written_by or 'a newer jaxembed'}; this is {_this_version()}, which "
                f"reads formats up to {FORMAT_VERSION}: upgrade jaxembed, or convert the model "
                "again with this version"
            )
    return raw, header


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Raise CheckpointError for a manifest that cannot be read or decoded within the context."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: cannot read {MANIFEST}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged ({error}); convert the model again"
        ) from error


def lacks_token_types(path: Path) -> bool:
    """Return whether a manifest lacks `token_types`, as early versions wrote it."""
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Header).token_types is None


def load_params(path: Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Return all parameters of `stream_params` by name, at once."""
    return dict(stream_params(path, spec))


def stream_params(
    path: Path, spec: ModelSpec, check: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the parameters one at a time, as name and host array, in the dtype they were saved in.

    `check` is called with the stored parameters by name, which have a `shape` and a `dtype`, before
    any value is read. Raises the errors of `check`, and CheckpointError if the files are missing or
    damaged, or no parameter has the dtype that the manifest names.
    """
    with _restoring(path):
        parts = [stored_arrays(part) for part in sorted((path / PARAMETERS).iterdir())]
    stored = {name: array for arrays in parts for name, array in arrays.items()}
    if spec.format_version < HEADS_SINCE:  # put the head before the names of modules' parameters
        prefix = f"heads.{spec.primary}."
        stored = {
            prefix + name if name.startswith(OLD_MODULES) else name: array
            for name, array in stored.items()
        }
    dtypes = sorted({str(array.dtype) for array in stored.values()})
    if spec.dtype not in dtypes:
        raise CheckpointError(
            f"{path}: the manifest says {spec.dtype}, but the parameters are "
            f"{', '.join(dtypes) or 'missing'}; convert the model again"
        )
    if check is not None:
        check(stored)
    for name, array in stored.items():
        with _restoring(path):
            values = array.read()
        yield name, values
    memory.trim()


def verify(path: Path) -> int:
    """Compare every file with its digest, and return the number of files.

    Raises CheckpointError if there are no digests (early versions wrote none), or with a line for
    each file that is damaged, missing or not in the digests.
    """
    try:
        text = (path / DIGESTS).read_bytes().decode("ascii", "replace")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {DIGESTS}, so there are no digests to verify; convert the model again"
        ) from error
    expected = listed_digests(text)
    actual = _file_digests(path)
    differences = {name: f"is not in {DIGESTS}" for name in actual.keys() - expected.keys()}
    differences |= {name: "is missing" for name in expected.keys() - actual.keys()}
    differences |= {
        name: f"its SHA-256 is {actual[name]}, not {expected[name]}"
        for name in actual.keys() & expected.keys()
        if actual[name] != expected[name]
    }
    problems = [f"{name}: {difference}" for name, difference in sorted(differences.items())]
    if _digest_lines(expected) != text:
        problems.append(f"{DIGESTS}: is not a sorted list of digests, as jaxembed writes it")
    if problems:
        raise CheckpointError(
            f"{path} is damaged: {counted(len(problems), 'problem')}; convert the model again\n  "
            + "\n  ".join(problems)
        )
    return len(actual)


def listed_digests(text: str) -> dict[str, str]:
    """Parse the content of DIGESTS: return the SHA-256 of each file by its path."""
    return {name: digest for digest, name in DIGEST_LINE.findall(text)}


def verify_values(path: Path) -> None:
    """Read every parameter, and compare the content hash of each route with its manifest.

    Raises CheckpointError if they differ. `verify` finds files that were altered; this finds files
    that were put together from several checkpoints, with digests to match.
    """
    for route, spec in load_routes(path).specs.items():
        folder = route_path(path, route)
        digests = {}
        with _restoring(folder):
            for part in sorted((folder / PARAMETERS).iterdir()):
                arrays = stored_arrays(part)
                digests |= {name: _digest(name, array.read()) for name, array in arrays.items()}
        memory.trim()
        tokenizer = tokenizer_path(folder).read_bytes() if spec.takes_texts else b""
        found = _content_hash(digests, tokenizer)
        if found != spec.content_hash:
            raise CheckpointError(
                f"the values in {folder} do not match its {MANIFEST}: their hash is {found}, not "
                f"{spec.content_hash}; convert the model again"
            )


def tokenizer_path(path: Path) -> Path:
    return path / TOKENIZER


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder looks like a converted checkpoint, of any format version."""
    return (path / MANIFEST).is_file() and (
        (path / PARAMETERS).is_dir() or (path / ROUTE_FOLDERS).is_dir()
    )


def refuse_occupied(path: Path) -> None:
    """Raise CheckpointError unless `path` is free or an empty directory."""
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already; name another directory or remove it")


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that cannot be written to `path`."""
    if error.errno in DISK_FULL:
        return CheckpointError(
            f"cannot write the converted checkpoint in {path.parent}: {error.strerror}; free some "
            "space, or set --cache-dir (for `jaxembed convert`, OUT) to a directory on another disk"
        )
    return CheckpointError(f"cannot create {path}: {error}")


def discard_partial(path: Path) -> None:
    """Remove what a killed `save(path, ...)` left behind. The caller must hold a lock on `path`."""
    for partial in path.parent.glob(f"{_partial_prefix(path)}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _this_version() -> str:
    return f"jaxembed {metadata.version('jaxembed')}"


class _Header(msgspec.Struct):
    """The fields of a manifest that are read before its format is known."""

    format_version: Annotated[int, msgspec.Meta(ge=1)]
    written_by: str | None = None
    token_types: Any = None
    routes: list[Any] | None = None


class _RoutesManifest(msgspec.Struct, frozen=True):
    """The manifest of a checkpoint with several routes."""

    routes: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=ROUTE_NAME)], ...], msgspec.Meta(min_length=1)
    ]
    default_route: str | None
    format_version: int
    written_by: str


class _SingleHead(msgspec.Struct):
    """The fields of formats 1 and 2 that heads replace."""

    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()
    task: Task = "embed"


def _partial_prefix(path: Path) -> str:
    return f".{path.name}{PARTIAL}"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to write a checkpoint into. After the block it is renamed to `path`; if
    the block fails, it is removed. Raises CheckpointError if `path` is occupied or not writable."""
    path = path.absolute()
    refuse_occupied(path)
    partial = path.with_name(f"{_partial_prefix(path)}{secrets.token_hex(4)}")
    try:
        with unfinished(partial):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if all went well


def _content_hash(digests: Mapping[str, str], tokenizer: bytes) -> str:
    """Return a hash that identifies the content of a checkpoint, from the digests of its parameters
    by name and its tokenizer."""
    # sorted: the same parameters in another order are the same content
    ordered = "".join(digests[name] for name in sorted(digests))
    return hashlib.sha256(tokenizer + ordered.encode()).hexdigest()


def _file_digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that `save` writes, by their path within the checkpoint."""
    in_folders = [(path / folder).rglob("*") for folder in (PARAMETERS, ROUTE_FOLDERS)]
    files = [path / TOKENIZER, path / MANIFEST, *chain.from_iterable(in_folders)]
    digests = {}
    for file in sorted(file for file in files if file.is_file()):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        digests[file.relative_to(path).as_posix()] = digest
    return digests


def _digest_lines(digests: Mapping[str, str]) -> str:
    """Return the content of DIGESTS."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def _parts(pairs: Iterable[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Group arrays, in order, into parts of at most PART_BYTES, by name. A larger array is a part
    of its own."""
    part: dict[str, np.ndarray] = {}
    size = 0
    for name, array in pairs:
        if part and size + array.nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = array
        size += array.nbytes
    if part:
        yield part


def _digest(name: str, array: np.ndarray) -> str:
    """Return the SHA-256 of a parameter: of its name, dtype, shape and values."""
    digest = hashlib.sha256(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _checkpointer() -> Any:
    # Imported here: it takes half a second, and `jaxembed --help` does not need it.
    import orbax.checkpoint as ocp

    # Weights hardly compress. Without compression 90 MB restore in 0.1 s instead of 0.2 s.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _save_part(path: Path, part: dict[str, np.ndarray]) -> None:
    """Write arrays by name to the new folder `path`. Raises OSError if the disk is full."""
    import orbax.checkpoint as ocp  # here for the reason given in _checkpointer

    if hasattr(os, "posix_fallocate"):
        # Make a file of the size that Orbax will write, and remove it: without room this raises
        # OSError. On a full disk Orbax's threads would go on writing, and print their errors.
        with path.open("wb") as file:
            size = sum(array.nbytes for array in part.values()) + METADATA_BYTES
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(part))
    except ValueError as error:  # TensorStore's, which quotes the system's message
        for code in DISK_FULL:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code)) from error
        raise


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    """Raise CheckpointError for parameters that cannot be read within the context."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"cannot restore the parameters in {path}: {error}; convert the model again"
        ) from error


class StoredArray:
    """An array that Orbax wrote, which is read without the others. Orbax itself restores a whole
    tree at once: the host needs memory for all of it, and a process that does so repeatedly keeps
    growing."""

    def __init__(self, store: Any):
        self._store = store
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype

    def read(self) -> np.ndarray:
        """Read the values. Raises ValueError if they are damaged or missing."""
        return self._store.read().result()


def stored_arrays(folder: Path) -> dict[str, StoredArray]:
    """Return the arrays that Orbax saved in a folder, by name, without reading their values.

    Raises ValueError if the folder holds no arrays, or one that cannot be opened.
    """
    import tensorstore  # here, because `jaxembed --help` does not need it

    base = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    # TensorStore opens the array NAME by a spec; its metadata file is NAME/.zarray, for example.
    specs = {
        str(member.parent): {
            "driver": MEMBERS[member.name],
            "kvstore": base | {"path": f"{member.parent}/"},
        }
        for member in (PurePosixPath(key.decode()) for key in keys)
        if member.name in MEMBERS
    }
    if not specs:
        raise ValueError(f"{folder.name} holds no Orbax checkpoint")
    opening = {name: tensorstore.open(spec, read=True) for name, spec in specs.items()}
    return {name: StoredArray(future.result()) for name, future in sorted(opening.items())}
