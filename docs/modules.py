"""Writes the map of docs/architecture.md: one line a module, the first sentence of its docstring.

python docs/modules.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules -->\n", "<!-- end of modules -->\n"
TREES = ("jaxembed", "converters", "benchmarks")


def main() -> None:
    PAGE.write_text(with_map(PAGE.read_text()))


def with_map(text: str) -> str:
    """The page with the map of the modules as they are now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{module_map()}\n{END}{rest.split(END)[1]}"


def module_map() -> str:
    """One heading and one table a package, in Markdown."""
    return "\n".join(line for package in _packages() for line in _section(package))


def _packages() -> Iterator[Path]:
    for tree in TREES:
        yield from sorted(path.parent for path in (ROOT / tree).rglob("__init__.py"))


def _section(package: Path) -> Iterator[str]:
    name = package.relative_to(ROOT).as_posix()
    modules = sorted(path for path in package.glob("*.py") if path.stem != "__init__")
    yield f"### {name}\n\n{_docstring(package / '__init__.py')}\n"
    if modules:
        yield "| module | |\n|---|---|"
    for module in modules:
        yield f"| `{module.name}` | {_first_sentence(_docstring(module))} |"
    yield ""


def _docstring(module: Path) -> str:
    """The first paragraph, on one line. Raises ValueError where there is none."""
    text = ast.get_docstring(ast.parse(module.read_text()))
    if text is None:
        raise ValueError(f"{module} has no docstring")
    return " ".join(text.split("\n\n")[0].split())


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


if __name__ == "__main__":
    main()
