"""The models that a server may load while it runs: those that the operator has named."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxembed.errors import ConfigError

logger = logging.getLogger(__name__)


class Catalog:
    """Ids of models by the names they are served under: hub ids and directories under their own,
    and each folder of a repository under the folder's name."""

    def __init__(self, ids: Sequence[str], repository: Path | None):
        """Raises ConfigError if the repository is no directory or a name is meant twice."""
        if repository is not None and not repository.is_dir():
            raise ConfigError(
                f"--model-repository {repository} is no directory; a model in an object store is "
                "named with --loadable"
            )
        self._ids = {name: name for name in ids}
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
        return {entry.name: str(entry.absolute()) for entry in entries if _is_model(entry)}


def _is_model(entry: Path) -> bool:
    """Whether a folder may be a model. Names that no request could have are left out."""
    name = entry.name
    if name.startswith(".") or ":" in name or not name.isprintable():
        return False
    try:
        return entry.is_dir()
    except OSError:  # such as a link that is too long
        return False
