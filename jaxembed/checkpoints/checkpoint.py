"""Saves and restores a checkpoint: manifest, parameters, tokenizer. Knows no model and no source.

Formats 1 and 2 had one pooling and its modules instead of heads. They are read as format 3: the
modules become those of the primary head, and the names of their parameters follow. Format 1 was for
embedders alone: the fields that it lacks have defaults.

manifest.json      the ModelSpec
tokenizer.json     as Hugging Face's tokenizers reads it
params/part-000/   Orbax, flat dotted names, in the dtype they came in; more parts if large
SHA256SUMS         of each of these files, as `sha256sum` writes and checks it

A model with several routes is a folder of checkpoints, `routes/NAME`, with the names in a
manifest.json of its own and a SHA256SUMS of everything.
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
from jaxembed.errors import CheckpointError
from jaxembed.platform.files import DISK_FULL, PARTIAL, unfinished

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARAMETERS = "params"
ROUTE_FOLDERS = "routes"
DIGESTS = "SHA256SUMS"
DIGEST_LINE = re.compile(r"([0-9a-f]{64})  ([^\r\n]+)\n")

HEADS_SINCE = 3  # the first format with heads
OLD_MODULES = "modules."  # how names of parameters of modules began in earlier formats

# Orbax holds about two copies of what it saves at once. Parts keep that from being two copies of
# the model: a 2 GB one took 6 GB in one piece.
PART_BYTES = 256 * 1024 * 1024
METADATA_BYTES = 1024 * 1024  # what Orbax adds to a part, at most about

MEMBERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # the file that says what an array is -> driver

Parameters = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]


class Contents(NamedTuple):
    """What a checkpoint is made of."""

    spec: ModelSpec
    params: Parameters
    tokenizer: bytes  # empty for a model of images


def save(path: Path, spec: ModelSpec, params: Parameters, tokenizer: bytes) -> ModelSpec:
    """Write a checkpoint, all of it or nothing, and return its spec: with the content hash, and of
    this format.

    Pairs may come from a generator, so that a model need not fit in memory.
    Raises CheckpointError if `path` exists and is not an empty directory.
    """
    # pyright thinks of a Mapping whose keys are pairs, which is an Iterable of pairs as well
    pairs = params.items() if isinstance(params, Mapping) else params
    digests: dict[str, str] = {}
    with whole_folder(path) as partial:
        (partial / PARAMETERS).mkdir()
        for number, part in enumerate(_parts(pairs)):  # pyright: ignore[reportArgumentType]
            digests |= {name: _digest(name, array) for name, array in part.items()}
            saved = partial / PARAMETERS / f"part-{number:03d}"
            _save_part(saved, part)
            names = list(part)
            part.clear()  # or it would lie beside what is read back, and beside the next
            memory.trim()
            with _restoring(saved):
                arrays = stored_arrays(saved)
                wrong = [one for one in names if _digest(one, arrays[one].read()) != digests[one]]
            if wrong:
                raise CheckpointError(
                    f"{saved} reads back other values of {', '.join(wrong)} than were written; "
                    "check the disk and the memory of this machine"
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
    """Write the checkpoint of a model with several routes, as `save` does."""
    with whole_folder(path) as partial:
        specs = {name: save(partial / ROUTE_FOLDERS / name, *one) for name, one in contents.items()}
        manifest = _RoutesManifest(tuple(specs), default, FORMAT_VERSION, _this_version())
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        (partial / DIGESTS).write_text(_digest_lines(_file_digests(partial)))
    return Routes(specs, default)


def load_routes(path: Path) -> Routes:
    """Read the specs of a checkpoint by route. Raises as `load_spec`."""
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
    """The checkpoint of one route; `path` itself for the only one."""
    return path / ROUTE_FOLDERS / route if route else path


def load_spec(path: Path) -> ModelSpec:
    """Read the manifest of this format or an earlier one.

    Raises CheckpointError if it is missing, damaged, of a later format or of several routes.
    """
    raw, header = _manifest(path)
    if header.routes is not None:
        names = ", ".join(map(str, header.routes))
        raise CheckpointError(
            f"{path} has several routes, and one is wanted: give {path / ROUTE_FOLDERS}/NAME, of "
            f"{names}"
        )
    with _decoding(path):
        if header.format_version < HEADS_SINCE:
            old = msgspec.json.decode(raw, type=_SingleHead)
            pooled = Pooled(old.pooling, old.modules)
            heads = {"dense": pooled} if old.task == "embed" else scoring_heads(pooled)
            fields = msgspec.json.decode(raw) | {"heads": msgspec.to_builtins(heads)}
            return msgspec.convert(fields, ModelSpec)
        return msgspec.json.decode(raw, type=ModelSpec)


def _manifest(path: Path) -> tuple[bytes, "_Header"]:
    """The manifest of a checkpoint, and what is read of it first. Raises as `load_spec`."""
    with _decoding(path):
        raw = (path / MANIFEST).read_bytes()
        header = msgspec.json.decode(raw, type=_Header)
        if header.format_version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of format {header.format_version}, written by "
                f"{header.written_by or 'a newer jaxembed'}; this is {_this_version()}, which "
                f"reads formats up to {FORMAT_VERSION}: upgrade jaxembed, or convert the model "
                "again with this one"
            )
    return raw, header


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: cannot read {MANIFEST}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged ({error}); convert the model again"
        ) from error


def leaves_token_types_open(path: Path) -> bool:
    """Whether a manifest lacks `token_types`, as early versions wrote it."""
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Header).token_types is None


def load_params(path: Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    """All of `stream_params`, held on the host at once."""
    return dict(stream_params(path, spec))


def stream_params(
    path: Path, spec: ModelSpec, check: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Restore the parameters as host arrays in the dtype they were saved in, one at a time.

    `check` is called with the stored parameters by name, with `shape` and `dtype`, before any value
    is read. Raises the errors of `check`, and CheckpointError if the files are missing or damaged,
    or hold nothing of the dtype that the manifest names.
    """
    with _restoring(path):
        parts = [stored_arrays(part) for part in sorted((path / PARAMETERS).iterdir())]
    stored = {name: array for arrays in parts for name, array in arrays.items()}
    if spec.format_version < HEADS_SINCE:  # these formats did not name the head of a module
        before = f"heads.{spec.primary}."
        stored = {
            before + name if name.startswith(OLD_MODULES) else name: array
            for name, array in stored.items()
        }
    dtypes = sorted({str(array.dtype) for array in stored.values()})
    if spec.dtype not in dtypes:
        raise CheckpointError(
            f"{path}: the manifest says {spec.dtype}, the parameters are "
            f"{', '.join(dtypes) or 'not there'}; convert the model again"
        )
    if check is not None:
        check(stored)
    for name, array in stored.items():
        with _restoring(path):
            values = array.read()
        yield name, values
    memory.trim()


def verify(path: Path) -> int:
    """Compare every file with its digest, and say how many there are.

    Raises CheckpointError, with a line for each file that is damaged, missing or not in the
    digests, and if there are no digests: earlier versions wrote none.
    """
    try:
        text = (path / DIGESTS).read_bytes().decode("ascii", "replace")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {DIGESTS}, so there are no digests to verify; convert the model again"
        ) from error
    wanted = listed_digests(text)
    found = _file_digests(path)
    differences = {name: f"is not in {DIGESTS}" for name in found.keys() - wanted.keys()}
    differences |= {name: "is missing" for name in wanted.keys() - found.keys()}
    for name in found.keys() & wanted.keys():
        if found[name] != wanted[name]:
            differences[name] = f"its SHA-256 is {found[name]}, not {wanted[name]}"
    problems = [f"{name}: {difference}" for name, difference in sorted(differences.items())]
    if _digest_lines(wanted) != text:
        problems.append(f"{DIGESTS}: not a list of digests in order, as it was written")
    if problems:
        lines = "\n  ".join(problems)
        raise CheckpointError(
            f"{path} is damaged: {len(problems)} problem(s); convert the model again\n  {lines}"
        )
    return len(found)


def listed_digests(text: str) -> dict[str, str]:
    """The SHA-256 of each file by its path, from the content of DIGESTS."""
    return {name: digest for digest, name in DIGEST_LINE.findall(text)}


def verify_values(path: Path) -> None:
    """Read every parameter and compare the content hash of each route with its manifest.

    Raises CheckpointError if they differ: `verify` finds files that were altered, this one files
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
                f"{folder} holds other values than its {MANIFEST} says: their hash is {found}, not "
                f"{spec.content_hash}; convert the model again"
            )


def tokenizer_path(path: Path) -> Path:
    return path / TOKENIZER


def is_checkpoint(path: Path) -> bool:
    """Whether this looks like a converted checkpoint, of any format version."""
    holds = (path / PARAMETERS).is_dir() or (path / ROUTE_FOLDERS).is_dir()
    return (path / MANIFEST).is_file() and holds


def refuse_occupied(path: Path) -> None:
    """Raises CheckpointError unless `path` is free or an empty directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists already; name another directory or remove it")


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error for a checkpoint that cannot be written to `path`."""
    if error.errno in DISK_FULL:
        return CheckpointError(
            f"cannot write the converted checkpoint in {path.parent}: {error.strerror}; free some "
            "or set --cache-dir (of `jaxembed convert`, OUT) to another disk"
        )
    return CheckpointError(f"cannot make {path}: {error}")


def discard_partial(path: Path) -> None:
    """Remove what a killed `save(path, ...)` left behind. For whoever holds a lock on `path`."""
    for partial in path.parent.glob(f"{_partial_prefix(path)}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _this_version() -> str:
    return f"jaxembed {metadata.version('jaxembed')}"


class _Header(msgspec.Struct):
    """The fields that are read of a manifest before its format is known."""

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
    """The fields that formats 1 and 2 had in place of heads."""

    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()
    task: Task = "embed"


def _partial_prefix(path: Path) -> str:
    return f".{path.name}{PARTIAL}"


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write a checkpoint into, which becomes `path` at the end unless that
    fails."""
    path = path.absolute()
    refuse_occupied(path)
    partial = path.with_name(f"{_partial_prefix(path)}{secrets.token_hex(4)}")
    try:
        with unfinished(partial):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if all went well


def _content_hash(digests: Mapping[str, str], tokenizer: bytes) -> str:
    """What names the content of a checkpoint, from the digests of its parameters by name."""
    # sorted: the order of reading does not name another model
    ordered = "".join(digests[name] for name in sorted(digests))
    return hashlib.sha256(tokenizer + ordered.encode()).hexdigest()


def _file_digests(path: Path) -> dict[str, str]:
    """SHA-256 of the files that `save` writes, by their path within the checkpoint."""
    within = [(path / folder).rglob("*") for folder in (PARAMETERS, ROUTE_FOLDERS)]
    files = [path / TOKENIZER, path / MANIFEST, *chain.from_iterable(within)]
    digests = {}
    for file in sorted(file for file in files if file.is_file()):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        digests[file.relative_to(path).as_posix()] = digest
    return digests


def _digest_lines(digests: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def _parts(pairs: Iterable[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Group the arrays into parts of about PART_BYTES."""
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
    digest = hashlib.sha256(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _checkpointer() -> Any:
    # Imported here: it costs half a second that `jaxembed --help` need not pay.
    import orbax.checkpoint as ocp

    # Weights hardly compress; without, 90 MB restore in 0.1 s instead of 0.2 s.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _save_part(path: Path, part: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp  # here for the reason in _checkpointer

    if hasattr(os, "posix_fallocate"):
        # Make a file of that size for a moment, which raises OSError without room for it. Orbax
        # would write on in threads of its own after the first error, and print what they run into.
        with path.open("wb") as file:
            size = sum(array.nbytes for array in part.values()) + METADATA_BYTES
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(part))
    except ValueError as error:  # TensorStore's, which has the system's words in it
        for number in DISK_FULL:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"cannot restore the parameters in {path}: {error}; convert the model again"
        ) from error


class StoredArray:
    """An array that Orbax wrote, read by itself, so that the host need not hold all of them: Orbax
    restores a whole tree at once, and a process that does so again and again keeps growing."""

    def __init__(self, store: Any):
        self._store = store
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype

    def read(self) -> np.ndarray:
        """The values. Raises ValueError if they are damaged or missing."""
        return self._store.read().result()


def stored_arrays(folder: Path) -> dict[str, StoredArray]:
    """The arrays of a tree without branches that Orbax saved, by name; no value is read yet.

    Raises ValueError if the folder holds none, or one of them cannot be read.
    """
    import tensorstore  # here, because `jaxembed --help` need not wait for it

    base = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    members = [PurePosixPath(key.decode()) for key in keys]
    specs = {
        str(member.parent): {
            "driver": MEMBERS[member.name],
            "kvstore": base | {"path": f"{member.parent}/"},
        }
        for member in members
        if member.name in MEMBERS
    }
    if not specs:
        raise ValueError(f"{folder.name} holds no Orbax checkpoint")
    opening = {name: tensorstore.open(spec, read=True) for name, spec in specs.items()}
    return {name: StoredArray(one.result()) for name, one in sorted(opening.items())}
