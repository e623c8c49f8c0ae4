"""The models that a server may load while it runs: those that the operator has named."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxembed.errors import ConfigError

logger = logging.getLogger(__name__)


class Catalog:
    """Ids of models by the names they are served under: each of `ids`, a hub id, a directory or a
    URL in an object store, under the NAME of `NAME=ID`, or without one under its own; and each
    folder of a repository under the folder's name."""

    def __init__(self, ids: Sequence[str], repository: Path | None):
        """Raises ConfigError if the repository is no directory, a name is meant twice, or what one
        names is not given."""
        if repository is not None and not repository.is_dir():
            raise ConfigError(
                f"--model-repository {repository} is no directory; a model in an object store is "
                "named with --loadable"
            )
        self._ids: dict[str, str] = {}
        for given in ids:
            name, equals, model = given.partition("=")
            if not equals or "/" in name:  # of no name: paths and URLs may hold "="
                name = model = given
            elif not name.strip() or not model:
                raise ConfigError(f"--loadable {given}: wanted MODEL or NAME=MODEL")
            if self._ids.setdefault(name, model) != model:
                raise ConfigError(f"--loadable names two models {name}; give each its own name")
        self._repository = repository
        if twice := self._ids.keys() & self._folders().keys():
            raise ConfigError(
                f"--loadable {min(twice)} is also the name of a folder in {repository}; rename it"
            )

    def __call__(self) -> Mapping[str, str]:
        """The models that there are now: folders may come and go."""
        return self._ids | self._folders()

    def _folders(self) -> dict[str, str]:
        if self._repository is None:
            return {}
        try:
            entries = sorted(self._repository.iterdir())
        except OSError as error:
            logger.warning("--model-repository %s: %s", self._repository, error.strerror)
            return {}
        return {
            entry.name: str(entry.absolute())
            for entry in entries
            # names that no request could have are left out
            if not entry.name.startswith(".") and ":" not in entry.name
            if entry.name.isprintable() and os.path.isdir(entry)
        }
