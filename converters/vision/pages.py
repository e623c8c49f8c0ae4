"""Finds models that read pages, whose texts and images give a vector for each token."""

from pathlib import Path

from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import Layout, read_optional_json
from converters.vision.colpali import read_colpali
from converters.vision.colqwen import read_colqwen
from converters.vision.page_words import PageFamily
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import UnsupportedModel

COLPALI, COLQWEN = "colpali", "colqwen2"
CLASSES = {COLPALI: ("ColPaliForRetrieval",), COLQWEN: ("ColQwen2ForRetrieval",)}
JOINED = {  # a published model, by what the names of the bases of adapters hold
    "colpali": "vidore/colpali-v1.3-hf",
    "colqwen2": "vidore/colqwen2-v1.0-hf",
}
PAGE_READERS = {COLPALI: read_colpali, COLQWEN: read_colqwen}


def is_pages(source: Path) -> bool:
    """Whether a directory holds a model that reads pages."""
    kind = read_optional_json(source / "config.json").get("model_type")
    return isinstance(kind, str) and kind in CLASSES


def refuse_adapter(folder: Path, base: str) -> None:
    """Raise UnsupportedModel for an adapter whose base, by its name, is a model that reads pages:
    these are served with their adapter joined."""
    known = next((one for kind, one in JOINED.items() if kind in base.lower()), None)
    if known is not None:
        raise UnsupportedModel(
            f"{folder} is an adapter of {base}, which reads pages with its adapter joined; serve "
            f"one that is, as {known}"
        )


def read_pages(
    source: Path, name: str, revision: str | None
) -> tuple[PageFamily, Layout, ModelSpec, bytes]:
    """The family, layout, spec and tokenizer of a model. Raises UnsupportedModel for what is not
    supported, and CheckpointError."""
    path, hf = source / "config.json", read_optional_json(source / "config.json")
    check_fields(str(path), hf, CONFIG_FIELDS)
    for architecture in hf.get("architectures") or ():
        if architecture not in CLASSES[hf["model_type"]]:
            raise UnsupportedModel(
                f"architecture {architecture!r} of a {hf['model_type']} model is not supported; "
                f"known: {', '.join(CLASSES[hf['model_type']])}"
            )
    read = PAGE_READERS[hf["model_type"]]
    return read(source, hf, name, revision)
