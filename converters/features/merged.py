"""Folders that hold only an adapter of PEFT: the base model that they name, and the model that both
make together."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from converters.features.adapters import CONFIG, WEIGHTS, adapter_folder, read_config
from converters.heads import read_optional_json, router_of, tower_folder
from jaxembed.errors import CheckpointError, UnsupportedModel

# Files beside an adapter that take the place of none of the base model.
OWN = (CONFIG, WEIGHTS, "config.json")


def base_of(folder: Path) -> tuple[str, str | None] | None:
    """Return the name and the revision of the base model that the adapter in a folder names, or
    None if the folder holds no adapter. Raises CheckpointError if it names none."""
    config = folder if router_of(folder) else adapter_folder(folder) / CONFIG
    if not config.is_file():
        return None
    fields = read_optional_json(config)
    base, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{config}: base_model_name_or_path is {base!r}; expected the hub id or the folder of "
            "the model that the adapter changes"
        )
    return base, revision if isinstance(revision, str) and revision else None


@contextmanager
def joined(name: str, adapter: Path, base: Path) -> Iterator[Path]:
    """Yield a temporary folder with links to the files of a base model and of its adapter, called
    `name`, whose files are preferred: its tokenizer, its modules.json and the modules.

    Raises UnsupportedModel for a setting of the adapter that is not supported, and for a base that
    is an adapter itself or has routes; CheckpointError for damaged files.
    """
    own = adapter_folder(adapter)
    read_config(name, own, merging=True)
    if base_of(base) is not None or router_of(base):
        kind = "has several routes" if router_of(base) else "is an adapter itself"
        raise UnsupportedModel(
            f"{base}, the base model of {name}, {kind}; an adapter can be merged into a model with "
            "one route"
        )
    left_out = {own / file for file in OWN}
    with TemporaryDirectory(prefix=f"{adapter.name}-on-{base.name}-") as temporary:
        view = Path(temporary)
        if (adapter / "modules.json").is_file():  # of the base only the backbone is used
            _link(base / tower_folder(base), view / tower_folder(adapter))
            _link(adapter, view, left_out)
        else:
            _link(base, view)
            _link(adapter, view / tower_folder(base), left_out)
        yield view


def _link(source: Path, target: Path, left_out: Collection[Path] = ()) -> None:
    """Make links in the folder `target` to the files of `source`, except those `left_out` and
    hidden ones, in place of files of the same names."""
    for path in source.rglob("*"):
        inside = path.relative_to(source)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_dir() or is_hidden or path in left_out:
            continue
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        (target / inside).unlink(missing_ok=True)
        (target / inside).symlink_to(path.resolve())
