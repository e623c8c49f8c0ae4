"""Reads, copies and writes checkpoints in object stores.

manifest.json is written last, so that a reader never sees half a checkpoint. SHA256SUMS has the
digest of every other file, so the digest of SHA256SUMS identifies the whole content. A URL that is
pinned names this digest.
"""

import hashlib
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.checkpoint import DIGESTS, MANIFEST, PARAMETERS, ROUTE_FOLDERS, TOKENIZER
from jaxembed.data.spec import Routes
from jaxembed.errors import CheckpointError, counted
from jaxembed.platform import object_store
from jaxembed.platform.object_store import Location

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """The list of files of a checkpoint that was written to an object store, with their digests."""

    url: str
    lines: bytes  # the content of SHA256SUMS
    files: Mapping[str, str]  # path in the checkpoint -> SHA-256

    @property
    def digest(self) -> str:
        """The SHA-256 of SHA256SUMS, which identifies the content of the checkpoint."""
        return hashlib.sha256(self.lines).hexdigest()


def published(where: Location) -> Published:
    """Return the list of files of the complete checkpoint at a location in an object store.

    Only SHA256SUMS and manifest.json are read. Raises CheckpointError if there is no complete
    checkpoint, or if it is not the content that the location is pinned to; StoreUnreachable if the
    store does not answer; and ConfigError if the Python packages for the store are not installed.
    """
    url = where.url
    manifest = object_store.read_object(url, MANIFEST)  # read first, because it is written last
    lines = object_store.read_object(url, DIGESTS)
    if manifest is None or lines is None:
        raise CheckpointError(
            f"{url} has no {MANIFEST if manifest is None else DIGESTS}; expected a complete "
            f"checkpoint, as `jaxembed convert MODEL {url}` writes it"
        )
    stored = Published(url, lines, checkpoint.listed_digests(lines.decode("ascii", "replace")))
    if where.digest not in (None, stored.digest):
        raise CheckpointError(
            f"{url} is pinned to the checkpoint sha256:{where.digest}, but the object store has "
            f"sha256:{stored.digest}"
        )
    if stored.files.get(MANIFEST) != hashlib.sha256(manifest).hexdigest():
        raise CheckpointError(
            f"{url}: {DIGESTS} does not match {MANIFEST}; the checkpoint is being replaced, or was "
            "altered: try again later, or convert the model again to another path"
        )
    for name in stored.files:  # refuse any other path: files are copied to these paths
        top, *below = name.split("/")
        tops = (PARAMETERS, ROUTE_FOLDERS) if below else (MANIFEST, TOKENIZER)
        if top not in tops or {"", ".", ".."} & {*below}:
            raise CheckpointError(
                f"{url}/{DIGESTS} lists {name!r}, which is not a file of a checkpoint"
            )
    return stored


def copy(found: Published, to: Path) -> None:
    """Copy a checkpoint to the new folder `to` and verify the copy. If that fails, there is no
    folder.

    Raises CheckpointError if the copy differs from the digests or the manifest, or if the folder
    cannot be written; and StoreUnreachable if the store does not answer.
    """
    started = time.monotonic()
    logger.info("copying %s, %s, once", found.url, counted(len(found.files), "file"))
    with checkpoint.atomic_folder(to) as partial:
        object_store.copy_objects(found.url, found.files, partial)
        (partial / DIGESTS).write_bytes(found.lines)
        try:
            checkpoint.verify(partial)
            checkpoint.verify_values(partial)
        except CheckpointError as error:
            raise CheckpointError(
                f"the copy of {found.url} was discarded, because it does not match its {DIGESTS} "
                f"and {MANIFEST}; try again, and if that fails, too, convert the model again\n"
                f"  {error}"
            ) from error
    logger.info("copied %s in %.1f s: %s", found.url, time.monotonic() - started, to)


def read_routes(found: Published) -> Routes:
    """Return the specs of a checkpoint by route. Only its manifests are copied. Raises
    CheckpointError for a manifest that is damaged or of a later format, and StoreUnreachable."""
    with tempfile.TemporaryDirectory() as folder:
        manifests = [name for name in found.files if name.rpartition("/")[2] == MANIFEST]
        object_store.copy_objects(found.url, manifests, Path(folder))
        return checkpoint.load_routes(Path(folder))


def refuse_unwritable(where: Location) -> None:
    """Raise CheckpointError if a location has a digest, or if the store has objects there: then no
    checkpoint can be written to it."""
    if where.digest is not None:
        raise CheckpointError(
            f"{where}: a checkpoint can be pinned only after it is written; leave the digest out"
        )
    if object_store.has_objects(where.url):
        raise CheckpointError(f"{where} exists already; name another path or remove it")


def publish(folder: Path, url: str) -> Location:
    """Write the checkpoint in `folder` to `url`. Returns the location pinned to this content.

    Raises CheckpointError if that fails. The store then has no manifest at `url`, so readers find
    no checkpoint there.
    """
    started = time.monotonic()
    lines = (folder / DIGESTS).read_bytes()
    files = checkpoint.listed_digests(lines.decode())
    object_store.write_objects(folder, files.keys() - {MANIFEST}, url)
    for name in (DIGESTS, MANIFEST):  # MANIFEST last
        object_store.write_objects(folder, [name], url)
    logger.info("wrote %d files to %s in %.1f s", len(files) + 1, url, time.monotonic() - started)
    return Location(url, hashlib.sha256(lines).hexdigest())
