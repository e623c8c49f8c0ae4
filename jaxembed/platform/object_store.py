"""Reads and writes files in object stores, s3:// and gs://, by fsspec, and reads those of hf://.
Knows nothing of models.

Credentials and endpoints are those that s3fs and gcsfs find by themselves. No message shows them.
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

# What reads each scheme. The extras are named by scheme, but hf, which needs none.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
OF_DATA = ("hf",)  # schemes of files of rows, not of models
TRANSFERS = 16  # files at a time
# What stores say of an object that changes with its content.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime")
LONGEST_REASON = 300  # characters of another library's message

PIN = "@sha256:"
DIGEST = re.compile(r"[0-9a-f]{64}")
CREDENTIALS = re.compile(r"//[^/@\s]*@")


class Location(NamedTuple):
    """A folder in an object store, and the digest that its content must have."""

    url: str
    digest: str | None = None  # None: whatever is there

    def __str__(self) -> str:
        return self.url if self.digest is None else f"{self.url}{PIN}{self.digest}"


def is_url(name: str, *, of_data: bool = False) -> bool:
    """Whether `name` is meant as a place of models, or `of_data` of files of rows."""
    schemes = [scheme for scheme in PACKAGES if of_data or scheme not in OF_DATA]
    return name.startswith(tuple(f"{scheme}://" for scheme in schemes))


def require_extra(url: str) -> None:
    """Raise ConfigError if the extra that reads the URL is not installed. Paths need none."""
    if _scheme(url) in MODULES:
        require(_scheme(url), url)


def location(name: str) -> Location:
    """The place that `scheme://bucket/path` or `scheme://bucket/path@sha256:DIGEST` names.

    Raises CheckpointError if it is no such URL, or if it holds credentials.
    """
    url, pin, digest = name.rstrip("/").partition(PIN)
    if CREDENTIALS.search(url) or "?" in url or "#" in url:
        shown = CREDENTIALS.sub("//", re.split("[?#]", url)[0])
        raise CheckpointError(
            f"{shown}: wanted {_scheme(url)}://bucket/path without user, password or parameters; "
            "credentials come from the environment"
        )
    if not _path(url).strip("/").partition("/")[2]:
        raise CheckpointError(f"{url}: wanted {_scheme(url)}://bucket/path, with a path")
    if pin and not DIGEST.fullmatch(digest):
        raise CheckpointError(
            f"{name}: wanted 64 hexadecimal digits after {PIN}, as `jaxembed convert` shows them"
        )
    return Location(url, digest if pin else None)


def read_object(url: str, name: str) -> bytes | None:
    """The content of the file `name` below `url`, None if there is none.

    Raises CheckpointError if access is denied, and StoreUnreachable if the store gives no answer.
    """
    with _asking(f"cannot read {url}/{name}"):
        try:
            return store_of(url).cat_file(f"{_path(url)}/{name}")
        except FileNotFoundError:
            return None


def copy_objects(url: str, names: Iterable[str], folder: Path) -> None:
    """Copy files below `url` into `folder`, TRANSFERS at a time. Raises as `read_object`,
    CheckpointError if one is missing, and OSError if the disk is full."""

    def copy(name: str) -> None:
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        with _asking(f"cannot copy {url}/{name}"):
            store.get_file(f"{_path(url)}/{name}", str(to))

    store = store_of(url)
    _for_each(copy, names)


def write_objects(folder: Path, names: Iterable[str], url: str) -> None:
    """Copy files of `folder` below `url`, TRANSFERS at a time. Raises as `read_object`."""

    def write(name: str) -> None:
        with _asking(f"cannot write {url}/{name}"):
            store.put_file(str(folder / name), f"{_path(url)}/{name}")

    store = store_of(url)
    _for_each(write, names)


def remove_object(url: str) -> None:
    """Remove the object at `url`. Raises as `read_object`, and CheckpointError if there is none."""
    with _asking(f"cannot remove {url}"):
        store_of(url).rm_file(_path(url))


class FoundObject(NamedTuple):
    """An object: its URL, its size in bytes, and what changes whenever its content does."""

    url: str
    size: int
    version: str


def find_objects(url: str) -> list[FoundObject]:
    """The object at `url`, those below it, or those that match it if it holds `*`, `?` or `[`.

    Raises CheckpointError if there is none or access is denied, and StoreUnreachable.
    """
    scheme, path = _scheme(url), _path(url)
    with _asking(f"cannot list {url}"):
        store = store_of(url)
        wild = any(sign in path for sign in "*?[")
        found = store.glob(path, detail=True) if wild else store.find(path, detail=True)
        return [
            FoundObject(
                f"{scheme}://{name}",
                one["size"],
                next((str(one[key]) for key in VERSION_KEYS if one.get(key)), ""),
            )
            for name, one in found.items()
            if one["type"] == "file"
        ]


@contextmanager
def open_object(url: str, store: Any = None) -> Iterator[Any]:
    """An object to read from its start, fetched as it is read. `store` is the `store_of` its URL,
    for many objects. Raises as `read_object`, and CheckpointError if there is none."""
    with _asking(f"cannot read {url}"), (store or store_of(url)).open(_path(url), "rb") as file:
        yield file


def has_objects(url: str) -> bool:
    """Whether there is anything at or below `url`. Raises as `read_object`."""
    with _asking(f"cannot list {url}"):
        try:
            return bool(store_of(url).ls(_path(url), detail=False))
        except FileNotFoundError:
            return False


def _for_each(run: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="object-store") as threads:
        list(threads.map(run, names))  # after an error the rest is not begun


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _path(url: str) -> str:
    """The bucket and the path, as fsspec's file systems take them."""
    return url.partition("://")[2]


def store_of(url: str) -> Any:
    """The file system of a URL, which threads may share. It remembers no listing: others write
    there too. Raises as `read_object`."""
    require_extra(url)
    import fsspec  # which s3fs and gcsfs bring

    scheme = _scheme(url)
    logging.getLogger(PACKAGES[scheme]).setLevel(logging.CRITICAL)  # it raises what it logs
    with _asking(f"cannot open {url}"):
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextmanager
def _asking(failure: str) -> Iterator[None]:
    """Raise what goes wrong as an error of ours that begins with `failure`."""
    try:
        yield
    except JaxembedError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{failure}: there is no such object or bucket") from error
    except PermissionError as error:
        raise CheckpointError(
            f"{failure}: access is denied ({_reason(error)}); give this process credentials that "
            "have it"
        ) from error
    except Exception as error:  # each of these packages has a tree of errors of its own
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        raise StoreUnreachable(f"{failure}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of what went wrong, without credentials."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CREDENTIALS.sub("//", lines[0])[:LONGEST_REASON]
