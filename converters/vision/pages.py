"""Finds models that read pages, whose texts and images give a vector for each token."""

from pathlib import Path

from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import read_optional_json
from converters.outline import Options, Outline, Reader
from converters.vision.colpali import read_colpali
from converters.vision.colqwen import read_colqwen
from converters.vision.dual import refuse_options
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


def _outlines(source: Path, options: Options) -> tuple[dict[str, Outline], str | None]:
    refuse_options(source, options)
    path, hf = source / "config.json", read_optional_json(source / "config.json")
    check_fields(str(path), hf, CONFIG_FIELDS)
    for architecture in hf.get("architectures") or ():
        if architecture not in CLASSES[hf["model_type"]]:
            raise UnsupportedModel(
                f"architecture {architecture!r} of a {hf['model_type']} model is not supported; "
                f"known: {', '.join(CLASSES[hf['model_type']])}"
            )
    return {"": PAGE_READERS[hf["model_type"]](source, hf, options)}, ""


READER = Reader(is_pages, _outlines)
