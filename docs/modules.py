"""Writes the layers and the map of modules into docs/architecture.md.

The layers are those of pyproject.toml, and the map is the first sentence of each module's
docstring.

    python docs/modules.py
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
TREES = ("jaxembed", "converters", "benchmarks")


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


def written(page: str) -> str:
    """The page with its layers and its map as they are now."""
    for name, lines in (("layers", _layers()), ("modules", _modules())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = page.split(begin)
        page = "\n".join([f"{before}{begin}", *lines, "", f"{end}{rest.split(end)[1]}"])
    return page


def _layers() -> Iterator[str]:
    """A numbered list, from top to bottom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    for number, layer in enumerate(layers, 1):
        modules = (module.removeprefix("jaxembed.") for module in layer.split(" | "))
        yield f"{number}. {', '.join(f'`{module}`' for module in modules)}"


def _modules() -> Iterator[str]:
    """A heading and a table for each package."""
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
    """The first paragraph, on one line. Raises ValueError where there is none."""
    text = ast.get_docstring(ast.parse(module.read_text()))
    if text is None:
        raise ValueError(f"{module} has no docstring")
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    main()
