"""Checks the names of adapters and where their folders are, for the library and the command line.

Knows nothing of what is in the folders.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from jaxembed.errors import CheckpointError

_NAME = r"[A-Za-z0-9._-]+"  # a ":" stands between the served name of a model and that of an adapter


def adapter_folders(given: object) -> dict[str, Path]:
    """The folders of adapters by name, as a caller of the library gave them. Raises CheckpointError
    for names that no request could have, and for what is no folder."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"adapters are {given!r}, wanted folders by the names of adapters")
    for name, folder in given.items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise CheckpointError(
                f"an adapter has the name {name!r}, wanted letters, digits, '.', '_' and '-'"
            )
        if not folder or not isinstance(folder, str | Path):
            raise CheckpointError(f"adapter {name} has the folder {folder!r}, wanted a path")
    return {name: Path(folder) for name, folder in given.items()}
