"""Saves and restores a checkpoint: manifest, parameters, tokenizer.

Formats 1 and 2 had one pooling and its modules instead of heads. Their checkpoints are read as if
they were of format 3: the modules become those of the primary head, and the parameters of modules
are renamed. Format 1 was for embedders only: the fields that it lacks have defaults.

manifest.json      the ModelSpec
tokenizer.json     the tokenizer, as Hugging Face's `tokenizers` reads it
params/part-000/   arrays that Orbax wrote, by their dotted names; large models have more parts
SHA256SUMS         the digests of all these files, as `sha256sum` writes and checks them

The checkpoint of a model with several routes is a folder with a checkpoint for each route in
`routes/NAME`, a manifest.json with the names of the routes, and a SHA256SUMS of all files.
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

import ml_dtypes  # noqa: F401  # this import makes the name "bfloat16" known to numpy
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
OLD_MODULES = "modules."  # prefix of the names of modules' parameters in formats 1 and 2

# Parameters are saved in parts of this size, because Orbax holds about two copies of what it saves
# at once: a 2 GB model saved in one part took 6 GB of memory.
PART_BYTES = 256 * 1024 * 1024
METADATA_BYTES = 1024 * 1024  # about the most that Orbax adds to the arrays of a part

# The metadata file of an array that Orbax wrote -> the TensorStore driver that reads the array.
MEMBERS = {".zarray": "zarr", "zarr.json": "zarr3"}

Parameters = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]


class Contents(NamedTuple):
    """The arguments of `save` that describe the contents of a checkpoint."""

    spec: ModelSpec
    params: Parameters
    tokenizer: bytes  # the content of tokenizer.json; empty for a model that takes no texts


def save(path: Path, spec: ModelSpec, params: Parameters, tokenizer: bytes) -> ModelSpec:
    """Write a checkpoint to `path`; if it cannot be written completely, nothing is written. Returns
    the spec with the content hash, FORMAT_VERSION and this jaxembed version.

    `params` are the parameters by name, or an iterable of names and arrays: with a generator the
    model need not fit in memory. Raises CheckpointError if `path` exists and is not an empty
    directory, if it cannot be written, or if the values that are read back differ from `params`.
    """
    # Ignored for pyright: the keys of a Mapping might be pairs, so that it is an Iterable of pairs.
    pairs = params.items() if isinstance(params, Mapping) else params
    digests: dict[str, str] = {}
    with atomic_folder(path) as partial:
        (partial / PARAMETERS).mkdir()
        for part_index, part in enumerate(_parts(pairs)):  # pyright: ignore[reportArgumentType]
            digests |= {name: _digest(name, array) for name, array in part.items()}
            folder = partial / PARAMETERS / f"part-{part_index:03d}"
            _save_part(folder, part)
            names = list(part)
            part.clear()  # free the memory for what is read back, and for the next part
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
    """Write the checkpoint of a model with several routes. `contents` are the contents of each
    route by its name, and `default` is the name of the default route, or None if there is none.
    Returns the specs that `save` returns. Raises CheckpointError if `path` exists and is not an
    empty directory, if it cannot be written, or if values that are read back differ."""
    with atomic_folder(path) as partial:
        specs = {
            name: save(partial / ROUTE_FOLDERS / name, *item) for name, item in contents.items()
        }
        manifest = _RoutesManifest(tuple(specs), default, FORMAT_VERSION, _this_version())
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        (partial / DIGESTS).write_text(_digest_lines(_file_digests(partial)))
    return Routes(specs, default)


def load_routes(path: Path) -> Routes:
    """Read the specs of a checkpoint by route, and the name of its default route. A checkpoint
    without routes is read as one route named "". Raises CheckpointError if a manifest is missing,
    damaged or of a later format."""
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
    """Return the folder of a route in the checkpoint at `path`. For "", the only route of a
    checkpoint without routes, this is `path`."""
    return path / ROUTE_FOLDERS / route if route else path


def load_spec(path: Path) -> ModelSpec:
    """Return the spec of a checkpoint of this format or an earlier one.

    Raises CheckpointError if the manifest is missing, damaged or of a later format, if it has a
    setting that this version does not know, or if the checkpoint has several routes.
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
        spec = msgspec.json.decode(raw, type=ModelSpec)
    if name := next(_unknown_settings(msgspec.json.decode(raw), msgspec.to_builtins(spec)), None):
        raise CheckpointError(
            f"{path / MANIFEST} has the setting {name}, which {_this_version()} does not know; it "
            f"was written by {header.written_by or 'an early jaxembed'}: upgrade jaxembed, or "
            "convert the model again with this version"
        )
    return spec


def _unknown_settings(stored: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of keys in `stored`, values of a manifest, that what was `read` of them
    lacks."""
    if isinstance(stored, dict):
        for key, value in stored.items():
            if key in read:
                yield from _unknown_settings(value, read[key], f"{path}{key}.")
            else:
                yield path + key
    elif isinstance(stored, list):
        for value, of in zip(stored, read, strict=False):
            yield from _unknown_settings(value, of, path)


def _manifest(path: Path) -> tuple[bytes, "_Header"]:
    """Read the manifest of a checkpoint. Returns its bytes, and the fields of all formats. Raises
    CheckpointError if it is missing, damaged or of a later format."""
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
    """Raise CheckpointError if the block fails to read or decode the manifest of `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: cannot read {MANIFEST}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged ({error}); convert the model again"
        ) from error


def lacks_token_types(path: Path) -> bool:
    """Return whether a manifest lacks the field `token_types`, which early versions did not
    write."""
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Header).token_types is None


def load_params(path: Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Read all parameters of a checkpoint. Returns them by name; see `stream_params`."""
    return dict(stream_params(path, spec))


def stream_params(
    path: Path, spec: ModelSpec, check: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the parameters one at a time, as name and host array, in the dtype they were saved in.

    Before any values are read, `check` is called with a dict of StoredArray, which have the shape
    and the dtype of each parameter. Raises the errors of `check`, and CheckpointError if the files
    are missing or damaged, or if no parameter has the dtype of the manifest.
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
    """Compare every file with its digest in SHA256SUMS, and return the number of files.

    Raises CheckpointError if the checkpoint has no SHA256SUMS, which early versions did not write,
    or if files are damaged, missing or not listed; the message has a line for each of these files.
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

    Raises CheckpointError if they differ. `verify` finds files that differ from SHA256SUMS. This
    function also finds files of different checkpoints that were put together with a new SHA256SUMS.
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
    """Return the path of tokenizer.json in the checkpoint at `path`."""
    return path / TOKENIZER


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder looks like a converted checkpoint, of any format version."""
    return (path / MANIFEST).is_file() and (
        (path / PARAMETERS).is_dir() or (path / ROUTE_FOLDERS).is_dir()
    )


def refuse_occupied(path: Path) -> None:
    """Raise CheckpointError if `path` exists and is not an empty directory."""
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already; name another directory or remove it")


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error to raise if `error` prevents writing a checkpoint to `path`."""
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
    """The fields that are read from the manifest of any format, before it is decoded in full."""

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
    """The fields of formats 1 and 2 that the heads of later formats replace."""

    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()
    task: Task = "embed"


def _partial_prefix(path: Path) -> str:
    return f".{path.name}{PARTIAL}"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder for the block to write a checkpoint into. After the block the folder is
    renamed to `path`, or removed if the block failed. Raises CheckpointError if `path` exists and
    is not an empty directory, or if it cannot be written."""
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
        shutil.rmtree(partial, ignore_errors=True)  # no effect after the renaming


def _content_hash(digests: Mapping[str, str], tokenizer: bytes) -> str:
    """Return a hash that identifies the content of a checkpoint. `digests` are those of the
    parameters by name, and `tokenizer` is the content of tokenizer.json."""
    # sorted: the order of the parameters does not change the hash
    ordered = "".join(digests[name] for name in sorted(digests))
    return hashlib.sha256(tokenizer + ordered.encode()).hexdigest()


def _file_digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that `save` or `save_routes` writes, by its path within the
    checkpoint. SHA256SUMS itself is left out."""
    in_folders = [(path / folder).rglob("*") for folder in (PARAMETERS, ROUTE_FOLDERS)]
    files = [path / TOKENIZER, path / MANIFEST, *chain.from_iterable(in_folders)]
    digests = {}
    for file in sorted(file for file in files if file.is_file()):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        digests[file.relative_to(path).as_posix()] = digest
    return digests


def _digest_lines(digests: Mapping[str, str]) -> str:
    """Return the content of SHA256SUMS for the digests of files by path."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def _parts(pairs: Iterable[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Group arrays, in order, into parts of at most PART_BYTES. A part is a dict of arrays by name.
    An array of more than PART_BYTES is a part of its own."""
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
    """Return the SHA-256 of the name, dtype, shape and values of a parameter."""
    digest = hashlib.sha256(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _checkpointer() -> Any:
    # Imported here: the import takes half a second, and `jaxembed --help` does not need it.
    import orbax.checkpoint as ocp

    # Compression saves little space. Without it 90 MB are read in 0.1 s instead of 0.2 s.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _save_part(path: Path, part: dict[str, np.ndarray]) -> None:
    """Write arrays by name to the new folder `path`. Raises OSError if the disk is full."""
    import orbax.checkpoint as ocp  # imported here, because it takes half a second

    if hasattr(os, "posix_fallocate"):
        # Make a file of the size that Orbax will write, and remove it. This raises OSError if the
        # disk is too full, where Orbax's threads would go on writing and print their errors.
        with path.open("wb") as file:
            size = sum(array.nbytes for array in part.values()) + METADATA_BYTES
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(part))
    except ValueError as error:  # TensorStore raises it with the message of the system's error
        for code in DISK_FULL:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code)) from error
        raise


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the block fails to read the parameters in `path`."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"cannot restore the parameters in {path}: {error}; convert the model again"
        ) from error


class StoredArray:
    """An array that Orbax wrote, which can be read alone. Orbax itself restores all arrays at once:
    the host needs memory for all of them, and the memory of a process grows each time."""

    def __init__(self, store: Any):
        self._store = store
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype

    def read(self) -> np.ndarray:
        """Read the values. Raises ValueError if they are damaged or missing."""
        return self._store.read().result()


def stored_arrays(folder: Path) -> dict[str, StoredArray]:
    """Return the arrays that Orbax saved in a folder, by name, without reading their values.

    Raises ValueError if the folder holds no arrays, or if one of the arrays cannot be opened.
    """
    import tensorstore  # imported here, because `jaxembed --help` does not need it

    base = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    # TensorStore opens each array by a spec. The metadata file of the array NAME is NAME/.zarray,
    # for example.
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
