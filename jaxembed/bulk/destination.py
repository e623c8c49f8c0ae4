"""The folder that a job writes: here or in an object store. What is in it is always whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from jaxembed.bulk.sources import opened
from jaxembed.errors import ConfigError
from jaxembed.platform import object_store
from jaxembed.platform.files import PARTIAL, replacing, unfinished

LOCK = ".lock"


class LocalFolder:
    """A folder of a file system. Its files are written whole or not at all."""

    def __init__(self, path: Path):
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        """The names of the files in it."""
        return sorted(one.name for one in self._path.iterdir() if one.name != LOCK)

    def opened(self, name: str) -> Any:
        """A context with one of the files to read."""
        return opened(str(self._path / name))

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """The path of a local file, which becomes the file of this name at the end of the block. If
        that raises, nothing does."""
        with replacing(self._path / name) as partial:
            yield partial
            _sync(partial)
        _sync(self._path)

    def remove(self, name: str) -> None:
        """Remove one of the files."""
        (self._path / name).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process of this machine write here, and remove what a killed one left
        unfinished. Raises ConfigError if another one is writing."""
        try:
            with FileLock(self._path / LOCK, timeout=0):
                for one in self._path.glob(f".*{PARTIAL}*"):
                    one.unlink(missing_ok=True)
                yield
        except Timeout as error:
            raise ConfigError(f"{self}: another process is writing here") from error


class StoreFolder:
    """A folder in an object store, with the methods of LocalFolder. A file is uploaded under its
    own name, and seen when it is whole."""

    def __init__(self, url: str):
        self._url = url

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        if not object_store.has_objects(self._url):
            return []
        found = object_store.find_objects(self._url)
        return sorted(one.url.removeprefix(f"{self._url}/") for one in found)

    def opened(self, name: str) -> Any:
        return opened(f"{self._url}/{name}")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with TemporaryDirectory(prefix="jaxembed-") as folder, unfinished(Path(folder)):
            yield Path(folder) / name
            object_store.write_objects(Path(folder), [name], self._url)

    def remove(self, name: str) -> None:
        object_store.remove_object(f"{self._url}/{name}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Stores have no locks; two processes would write the same parts with the same rows."""
        yield


Destination = LocalFolder | StoreFolder


def destination(out: str, *, make: bool = True) -> Destination:
    """The folder at a path or URL. A folder here is made, or with `make` False must be there.
    Raises ConfigError if it cannot be or is not."""
    if object_store.is_url(out):
        return StoreFolder(str(object_store.location(out)))
    path = Path(out)
    if not make and not path.is_dir():
        raise ConfigError(f"{out}: there is no such folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {out}: cannot make this folder: {error.strerror}") from error
    return LocalFolder(path)


def _sync(path: Path) -> None:
    """Have the system write a file or the names in a folder to its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
