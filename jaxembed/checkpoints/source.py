"""Describes where a model comes from, and how it is converted, without reading its files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxembed.data.spec import PoolingChoice
from jaxembed.errors import CheckpointError
from jaxembed.platform import object_store

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

_ADAPTER_NAME = r"[A-Za-z0-9._-]+"  # no ":", which separates a model's name from an adapter's


def default_cache_dir() -> Path:
    """Return the default cache directory: ~/.cache/jaxembed."""
    return Path.home() / ".cache" / "jaxembed"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, and the choices for its conversion.

    `model` is the directory of a converted checkpoint, the URL of a checkpoint in an object store,
    a Hugging Face directory or a hub id; None means DEFAULT_MODEL. `revision` is a revision of the
    model on the hub, and `token` is an access token of the hub. `offline` forbids downloads. Copies
    and conversions are kept in `cache_dir`.

    `dense_path` is the folder of a Dense module that replaces the model's own Dense module.
    `adapters` are folders of low-rank adapters, by the names that requests use; they are converted
    with the model. `cutoff_layer` is the last layer to run, of a reranker with a head after each of
    several layers; None means all layers. The `pooling` "splade" converts a masked language model
    to a sparse encoder; other poolings have no effect before the model is loaded. Raises
    CheckpointError for an empty `model`, and for adapters without a usable name or folder.
    """

    model: str | None = None
    revision: str | None = None
    offline: bool = False
    token: str | None = field(default=None, repr=False)
    cache_dir: Path = field(default_factory=default_cache_dir)
    dense_path: str | None = None
    cutoff_layer: int | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    pooling: PoolingChoice | None = None

    def __post_init__(self) -> None:
        if self.model == "":
            raise CheckpointError("the model is an empty string; expected a directory or a hub id")
        object.__setattr__(self, "adapters", adapter_folders(self.adapters))

    @property
    def name(self) -> str:
        """The name of the model: `model`, or DEFAULT_MODEL."""
        return self.model or DEFAULT_MODEL

    @property
    def is_splade(self) -> bool:
        """Whether the conversion makes a sparse encoder of a masked language model."""
        return self.pooling == "splade"

    @property
    def is_stored(self) -> bool:
        """Whether the model is a URL in an object store."""
        return object_store.is_url(self.name)

    @property
    def is_path(self) -> bool:
        """Whether the model is a path, and not a hub id."""
        name = self.model
        return name is not None and (
            name.startswith(("/", "./", "../", "~")) or name in (".", "..") or Path(name).exists()
        )

    @property
    def folder(self) -> Path:
        """The absolute path of the model's directory, if `is_path`. Raises CheckpointError if it is
        not a directory."""
        folder = Path(self.name).expanduser()
        if not folder.is_dir():
            state = "is a file" if folder.exists() else "does not exist"
            raise CheckpointError(
                f"model {self.name} {state}; expected a directory, a hub id (owner/name) or the "
                "s3:// or gs:// URL of a checkpoint"
            )
        return folder.resolve()

    def refuse_choices(self, checkpoint: str | Path) -> None:
        """Raise CheckpointError if the source has a revision, a dense path, a cut-off layer or
        adapters. Call this for a model that is converted already, where these options have no
        effect. `checkpoint` is its name in the message."""
        if self.revision is not None:
            raise CheckpointError(
                f"{checkpoint} is a converted checkpoint, which has no revisions; leave out the "
                f"revision {self.revision!r}"
            )
        for choice, is_set in (
            ("the dense path", self.dense_path is not None),
            ("--cutoff-layer", self.cutoff_layer is not None),
            ("--adapter", bool(self.adapters)),
        ):
            if is_set:
                raise CheckpointError(
                    f"{checkpoint} is converted already; give {choice} when converting its source"
                )


def adapter_folders(folders: object) -> dict[str, Path]:
    """Return the paths of adapters by name. `folders` is what a caller gave, which may be of any
    type. Raises CheckpointError if it is not a mapping, if a name has characters that requests
    cannot use, or if a value is not a path."""
    if folders is None:
        return {}
    if not isinstance(folders, Mapping):
        raise CheckpointError(
            f"the adapters are {folders!r}; expected a mapping of names to folders"
        )
    for name, folder in folders.items():
        if not isinstance(name, str) or not re.fullmatch(_ADAPTER_NAME, name):
            raise CheckpointError(
                f"an adapter has the name {name!r}; expected letters, digits, '.', '_' and '-'"
            )
        if not folder or not isinstance(folder, str | Path):
            raise CheckpointError(f"adapter {name} has the folder {folder!r}; expected a path")
    return {name: Path(folder) for name, folder in folders.items()}
