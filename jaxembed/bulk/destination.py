"""The output folder of a job, local or in an object store. A file appears when it is complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from jaxembed.bulk.sources import opened
from jaxembed.errors import ConfigError
from jaxembed.platform import object_store
from jaxembed.platform.files import PARTIAL, replacing, unfinished

LOCK = ".lock"


@dataclass(frozen=True)
class LocalFolder:
    """A local folder. Each of its files is written completely or not at all."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the sorted names of the files in the folder, without the lock file."""
        return sorted(file.name for file in self.path.iterdir() if file.name != LOCK)

    def opened(self, name: str) -> Any:
        """Return a context that opens a file for reading. It raises ConfigError on failure."""
        return opened(str(self.path / name))

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield the path of a local file to write. It becomes the file `name` when the block ends;
        if the block raises, the folder stays as it is."""
        with replacing(self.path / name) as partial:
            yield partial
            _sync(partial)
        _sync(self.path)

    def remove(self, name: str) -> None:
        """Remove the file `name`."""
        (self.path / name).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes of this machine, and remove the unfinished files
        of killed processes. Raises ConfigError if another process holds the lock."""
        try:
            with FileLock(self.path / LOCK, timeout=0):
                for partial in self.path.glob(f".*{PARTIAL}*"):
                    partial.unlink(missing_ok=True)
                yield
        except Timeout as error:
            raise ConfigError(f"{self}: another process is writing to this folder") from error


@dataclass(frozen=True)
class StoreFolder:
    """A folder in an object store, with the methods of LocalFolder. A file appears when its upload
    is complete. The methods raise CheckpointError and StoreUnreachable."""

    url: str

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        if not object_store.has_objects(self.url):
            return []
        objects = object_store.find_objects(self.url)
        return sorted(item.url.removeprefix(f"{self.url}/") for item in objects)

    def opened(self, name: str) -> Any:
        return opened(f"{self.url}/{name}")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with TemporaryDirectory(prefix="jaxembed-") as folder, unfinished(Path(folder)):
            yield Path(folder) / name
            object_store.write_objects(Path(folder), [name], self.url)

    def remove(self, name: str) -> None:
        object_store.remove_object(f"{self.url}/{name}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock nothing: stores have no locks. Two processes would write equal parts."""
        yield


Destination = LocalFolder | StoreFolder


def destination(out: str, *, make: bool = True) -> Destination:
    """Return the folder at a path or URL. A local folder is created; with `make` False it must
    exist. Raises ConfigError if a local folder cannot be created or does not exist, and
    CheckpointError for a wrong URL."""
    if object_store.is_url(out):
        return StoreFolder(str(object_store.location(out)))
    path = Path(out)
    if not make and not path.is_dir():
        raise ConfigError(f"the folder {out} does not exist")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {out}: cannot create this folder: {error.strerror}") from error
    return LocalFolder(path)


def _sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
