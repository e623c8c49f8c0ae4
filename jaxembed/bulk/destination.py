"""The output folder of a job, local or in an object store. Its files appear when they are whole."""

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
    """A local folder. Each of its files is written completely or not at all."""

    def __init__(self, path: Path):
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        """Return the sorted names of its files, without the lock file."""
        return sorted(file.name for file in self._path.iterdir() if file.name != LOCK)

    def opened(self, name: str) -> Any:
        """Return a context that opens a file for reading. Raises as `sources.opened`."""
        return opened(str(self._path / name))

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield the path of a local file to write. It becomes the file `name` when the block ends;
        if the block raises, the folder stays as it is."""
        with replacing(self._path / name) as partial:
            yield partial
            _sync(partial)
        _sync(self._path)

    def remove(self, name: str) -> None:
        """Remove the file `name`."""
        (self._path / name).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes of this machine, and remove unfinished files of
        killed ones. Raises ConfigError if another process holds the lock."""
        try:
            with FileLock(self._path / LOCK, timeout=0):
                for partial in self._path.glob(f".*{PARTIAL}*"):
                    partial.unlink(missing_ok=True)
                yield
        except Timeout as error:
            raise ConfigError(f"{self}: another process is writing here") from error


class StoreFolder:
    """A folder in an object store, with the methods of LocalFolder. A file appears when its upload
    is complete. The methods raise CheckpointError and StoreUnreachable."""

    def __init__(self, url: str):
        self._url = url

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        if not object_store.has_objects(self._url):
            return []
        objects = object_store.find_objects(self._url)
        return sorted(item.url.removeprefix(f"{self._url}/") for item in objects)

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
        """Lock nothing: stores have no locks. Two processes would write equal parts."""
        yield


Destination = LocalFolder | StoreFolder


def destination(out: str, *, make: bool = True) -> Destination:
    """Return the folder at a path or URL. A local folder is created; with `make` False it must
    exist. Raises ConfigError if either fails, and CheckpointError for a wrong URL."""
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
    """Flush a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
