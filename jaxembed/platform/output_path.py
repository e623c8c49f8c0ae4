"""Checks the path of a file to write before the work whose result it will hold."""

from collections.abc import Iterable
from pathlib import Path

from jaxembed.errors import ConfigError


def check_output(path: Path, flag: str, suffixes: Iterable[str]) -> None:
    """Raise ConfigError, which begins with the flag and the path, unless the path has one of the
    suffixes and its directory exists."""
    if path.suffix not in suffixes:
        raise ConfigError(f"{flag} {path}: wanted a name that ends in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no directory {path.absolute().parent}")
