"""Replaces files atomically, removes unfinished files, checks output paths, reads users' JSON."""

import errno
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from jaxembed.errors import ConfigError

PARTIAL = ".partial-"  # marks the name of an unfinished copy; random characters follow

MAX_SHOWN = 60  # characters of a value that a message shows

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_unfinished: set[Path] = set()


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Mark a file or folder as unfinished during the block. If `remove_unfinished` is called in
    this time, because the process ends, it removes the file or folder."""
    _unfinished.add(path)
    try:
        yield path
    finally:
        _unfinished.discard(path)


def remove_unfinished() -> None:
    """Remove the files and folders that are marked as unfinished. Errors are ignored."""
    for path in list(_unfinished):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a new file to. At the end of the block the new file replaces `path`.

    Readers of `path` see the whole old file or the whole new file. If the block raises, the old
    file stays and the new file is removed. Raises OSError if the new file cannot replace `path`.
    """
    # random, because two containers that share a folder may have the same process id
    partial = path.with_name(f".{path.name}{PARTIAL}{uuid4().hex}")
    try:
        with unfinished(partial):
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):  # after success the new file has another name
            partial.unlink()


def check_output(path: Path, flag: str, suffixes: Iterable[str]) -> None:
    """Raise ConfigError unless `path` has one of the suffixes and its directory exists. The message
    begins with the command line's `flag` and the path."""
    if path.suffix not in suffixes:
        raise ConfigError(f"{flag} {path}: expected a name that ends in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the directory {path.absolute().parent} does not exist")


def is_copy_of(path: Path, name: str) -> bool:
    """Return whether `path` has the name `name`, or the name of an unfinished copy that `replacing`
    makes of a file `name`."""
    return path.name == name or path.name.startswith(f".{name}{PARTIAL}")


def read_user_json(path: Path, name: str, expectation: str) -> Any:
    """Read a JSON file and return its value.

    Raises ConfigError if the file cannot be read or is not JSON. The message calls the file `name`
    and ends with `expectation`, a phrase that says what the file should hold.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {name}: {error.strerror}; expected {expectation}"
        ) from error
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        place = f"not valid JSON at line {error.lineno}, column {error.colno}"
        problem = place if data.strip() else "empty"
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except (RecursionError, ValueError):  # Python reads integers of at most 4,300 digits
        problem = "nested too deeply, or contains a number of thousands of digits"
    raise ConfigError(f"{name} is {problem}; expected {expectation}")


def shown(value: Any) -> str:
    """Return a value as JSON for a message, truncated after MAX_SHOWN characters."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
