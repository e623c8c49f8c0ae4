"""Generates sections of the site from the code: the layers and the map of modules of
architecture.md, and the tables of published models of known-models.md. conf.py puts them in.

The layers are those of pyproject.toml, the map is the first sentence of each module's docstring,
and the models are those of jaxembed/tools/known_models.json.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxembed.cli.models import size
from jaxembed.tools.known_models import VERIFIED, Kind, KnownModel, known_models

ROOT = Path(__file__).parent.parent
TREES = ("jaxembed", "converters", "benchmarks")
KINDS: dict[Kind, str] = {
    "embedder": "Embedders",
    "reranker": "Rerankers",
    "sparse": "Sparse encoders",
    "colbert": "ColBERT models",
    "static": "Static embeddings",
    "images": "Texts and images",
    "pages": "Pages of documents",
}
HEAD = (
    "model",
    "`model_type`",
    "parameters",
    "dimensions",
    "tokens",
    "outputs",
    "languages",
    "prompts",
    "licence",
    "verified",
    "sources",
)
MAX_LANGUAGES = 3  # that a cell names


def _layers() -> Iterator[str]:
    """Yield a numbered list, from top to bottom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    for number, layer in enumerate(layers, 1):
        modules = (module.removeprefix("jaxembed.") for module in re.split(" [|:] ", layer))
        yield f"{number}. {', '.join(f'`{module}`' for module in modules)}"


def _modules() -> Iterator[str]:
    """Yield a heading and a table for each package."""
    for tree in TREES:
        for package in sorted(path.parent for path in (ROOT / tree).rglob("__init__.py")):
            yield from _package(package)


def _package(folder: Path) -> Iterator[str]:
    modules = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
    yield f"### {folder.relative_to(ROOT).as_posix()}\n\n{_docstring(folder / '__init__.py')}\n"
    if modules:
        yield "| module | |\n|---|---|"
    for module in modules:
        yield f"| `{module.name}` | {_docstring(module).split('. ')[0].rstrip('.')} |"
    yield ""


def _docstring(module: Path) -> str:
    """Return the first paragraph on one line. Raise ValueError if there is none."""
    text = ast.get_docstring(ast.parse(module.read_text()))
    if text is None:
        raise ValueError(f"{module} has no docstring")
    return " ".join(text.split("\n\n")[0].split())


def _models() -> Iterator[str]:
    """Yield a heading and a table for each kind of model."""
    for kind, title in KINDS.items():
        models = [model for model in known_models().models if model.kind == kind]
        yield f"### {title}\n"
        yield f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}"
        for model in models:
            yield f"| {' | '.join(_cells(model))} |"
        yield ""


def _cells(model: KnownModel) -> tuple[str, ...]:
    prompts = ", ".join(f"{role} {_code(text)}" for role, text in model.prompts.items())
    names = [known_models().languages[code] for code in model.languages]
    many = len(names) > MAX_LANGUAGES
    licence = model.licence or ""
    return (
        model.name + (f"<br>{model.note}" if model.note else ""),
        f"`{model.type}`",
        size(model.parameters),
        str(model.dimensions or ""),
        f"{model.max_tokens:,}" if model.max_tokens else "",
        ", ".join(model.outputs),
        f"{len(names)} languages" if many else ", ".join(names),
        prompts,
        f"[terms]({licence})" if licence.startswith("https:") else licence,
        model.verified,
        _sources_of(model),
    )


def _code(text: str) -> str:
    escaped = text.replace("\n", r"\n").replace("|", r"\|")
    return f"`{escaped}`"


def _sources_of(model: KnownModel) -> str:
    """Return the sources of a model's facts. The first one, which states the most, has no facts."""
    main, *others = sorted(model.sources, key=lambda source: -len(model.sources[source]))
    return "; ".join([main, *(f"{one}: {', '.join(model.sources[one])}" for one in others)])


def _sources() -> Iterator[str]:
    """Yield a table of the sources and one of what was verified."""
    for title, meanings in (("source", known_models().sources), ("verified", VERIFIED)):
        yield f"| {title} | is |\n|---|---|"
        for name, meaning in meanings.items():
            yield f"| {name} | {meaning} |"
        yield ""


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {  # the lines of each section, by its name
    "layers": _layers,
    "modules": _modules,
    "models": _models,
    "sources": _sources,
}
