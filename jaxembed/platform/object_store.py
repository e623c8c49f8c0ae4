"""Reads and writes files in object stores (s3:// and gs://) by fsspec, and reads files of hf://.

s3fs and gcsfs find credentials and endpoints by themselves. No message shows credentials.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxembed.errors import CheckpointError, JaxembedError, StoreUnreachable
from jaxembed.platform.extras import MODULES, require
from jaxembed.platform.files import DISK_FULL

# The package that reads the URLs of each scheme. The extra that installs the package has the name
# of the scheme; hf needs no extra.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
DATA_SCHEMES = ("hf",)  # schemes of data files only, not of models
TRANSFERS = 16  # files that are transferred at a time
# Fields in a store's description of an object. The first of these that is present is the version of
# the object.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime")
MAX_REASON = 300  # characters of another library's message that are kept

PIN = "@sha256:"
DIGEST = re.compile(r"[0-9a-f]{64}")
CREDENTIALS = re.compile(r"//[^/@\s]*@")


class Location(NamedTuple):
    """A folder in an object store, and the digest that its content must have."""

    url: str
    digest: str | None = None  # SHA-256 in hexadecimal digits; None: any content

    def __str__(self) -> str:
        return self.url if self.digest is None else f"{self.url}{PIN}{self.digest}"


def is_url(name: str, *, of_data: bool = False) -> bool:
    """Return whether `name` is a URL that can name a model or, with `of_data`, a data file."""
    schemes = [scheme for scheme in PACKAGES if of_data or scheme not in DATA_SCHEMES]
    return name.startswith(tuple(f"{scheme}://" for scheme in schemes))


def require_extra(url: str) -> None:
    """Raise ConfigError if the extra that reads the URL is missing. The path of a local file needs
    no extra."""
    if _scheme(url) in MODULES:
        require(_scheme(url), url)


def location(name: str) -> Location:
    """Parse `scheme://bucket/path` or `scheme://bucket/path@sha256:DIGEST`.

    Raises CheckpointError if the URL has no path, holds credentials or parameters, or has a
    malformed digest.
    """
    url, pin, digest = name.rstrip("/").partition(PIN)
    if CREDENTIALS.search(url) or "?" in url or "#" in url:
        shown = CREDENTIALS.sub("//", re.split("[?#]", url)[0])
        raise CheckpointError(
            f"{shown}: expected {_scheme(url)}://bucket/path without user, password or parameters; "
            "credentials come from the environment"
        )
    if not _path(url).strip("/").partition("/")[2]:
        raise CheckpointError(f"{url}: expected {_scheme(url)}://bucket/path, with a path")
    if pin and not DIGEST.fullmatch(digest):
        raise CheckpointError(
            f"{name}: expected 64 hexadecimal digits after {PIN}, as `jaxembed convert` shows them"
        )
    return Location(url, digest if pin else None)


def read_object(url: str, name: str) -> bytes | None:
    """Return the content of the file `name` below `url`, or None if there is no such file.

    Raises ConfigError if the extra is not installed, CheckpointError if access is denied, and
    StoreUnreachable if the store does not answer.
    """
    with _asking(f"cannot read {url}/{name}"):
        try:
            return store_of(url).cat_file(f"{_path(url)}/{name}")
        except FileNotFoundError:
            return None


def copy_objects(url: str, names: Iterable[str], folder: Path) -> None:
    """Copy the files `names` below `url` into `folder`, TRANSFERS at a time. Raises the errors of
    `read_object`, CheckpointError if a file is missing, and OSError if the disk is full."""

    def copy(name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _asking(f"cannot copy {url}/{name}"):
            store.get_file(f"{_path(url)}/{name}", str(target))

    store = store_of(url)
    _for_each(copy, names)


def write_objects(folder: Path, names: Iterable[str], url: str) -> None:
    """Copy the files `names` of `folder` to places below `url`, TRANSFERS at a time. Raises the
    errors of `read_object`."""

    def write(name: str) -> None:
        with _asking(f"cannot write {url}/{name}"):
            store.put_file(str(folder / name), f"{_path(url)}/{name}")

    store = store_of(url)
    _for_each(write, names)


def remove_object(url: str) -> None:
    """Remove the object at `url`. Raises the errors of `read_object`, and CheckpointError if the
    object is missing."""
    with _asking(f"cannot remove {url}"):
        store_of(url).rm_file(_path(url))


class StoredObject(NamedTuple):
    """An object in a store: its URL, its size in bytes, and a version that changes with its
    content."""

    url: str
    size: int
    version: str


def find_objects(url: str) -> list[StoredObject]:
    """Return the object at `url`, or all objects below `url`, or all that match a glob pattern.

    `url` is a pattern if it holds `*`, `?` or `[`. The list may be empty. Raises the errors of
    `read_object`, and CheckpointError if the store says that there is no such bucket or folder.
    """
    scheme, path = _scheme(url), _path(url)
    with _asking(f"cannot list {url}"):
        store = store_of(url)
        is_pattern = any(character in path for character in "*?[")
        infos = store.glob(path, detail=True) if is_pattern else store.find(path, detail=True)
        return [
            StoredObject(
                f"{scheme}://{name}",
                info["size"],
                next((str(info[key]) for key in VERSION_KEYS if info.get(key)), ""),
            )
            for name, info in infos.items()
            if info["type"] == "file"
        ]


@contextmanager
def open_object(url: str, store: Any = None) -> Iterator[Any]:
    """Open an object to read it from its start; its bytes are fetched as they are read.

    `store` is the result of `store_of` for the URL, which many objects can share. Raises the errors
    of `read_object`, and CheckpointError if the object is missing.
    """
    with _asking(f"cannot read {url}"), (store or store_of(url)).open(_path(url), "rb") as file:
        yield file


def has_objects(url: str) -> bool:
    """Return whether there is an object at or below `url`. Raises the errors of `read_object`."""
    with _asking(f"cannot list {url}"):
        try:
            return bool(store_of(url).ls(_path(url), detail=False))
        except FileNotFoundError:
            return False


def _for_each(run: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `run` with each name, TRANSFERS at a time. Raises the first error."""
    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="object-store") as threads:
        list(threads.map(run, names))  # after an error no further calls begin


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _path(url: str) -> str:
    """Return the bucket and the path of a URL as one string, the form that fsspec takes."""
    return url.partition("://")[2]


def store_of(url: str) -> Any:
    """Return fsspec's file system for a URL, which threads may share. It caches no listing, because
    other processes write to the store, too. Raises ConfigError if the extra is not installed,
    CheckpointError if access is denied, and StoreUnreachable."""
    require_extra(url)
    import fsspec  # installed with s3fs and gcsfs

    scheme = _scheme(url)
    # off, because the package raises the errors that it logs
    logging.getLogger(PACKAGES[scheme]).setLevel(logging.CRITICAL)
    with _asking(f"cannot open {url}"):
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextmanager
def _asking(failure: str) -> Iterator[None]:
    """Raise errors of the block as errors of jaxembed whose message begins with `failure`.

    Raises CheckpointError if the object is missing or access is denied, and StoreUnreachable for
    other errors. The OSError of a full disk is raised unchanged.
    """
    try:
        yield
    except JaxembedError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{failure}: the object or bucket does not exist") from error
    except PermissionError as error:
        raise CheckpointError(
            f"{failure}: access is denied ({_reason(error)}); give this process credentials with "
            "access"
        ) from error
    except Exception as error:  # each package of PACKAGES has its own error classes
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        raise StoreUnreachable(f"{failure}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error's message without credentials, cut at MAX_REASON."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CREDENTIALS.sub("//", lines[0])[:MAX_REASON]
