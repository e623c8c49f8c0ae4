"""The shape of the code: functions stay short, and no modules import each other in a circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxembed", "converters", "benchmarks")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MOST_LINES = 60  # of a function, its decorators not counted


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): ast.parse(file.read_text()) for file in FILES}


def is_for_types_alone(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def executed_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that run when it is imported, those in blocks included."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types_alone(node):
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from executed_on_import(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from executed_on_import(handler.body)


def imported(tree: ast.Module) -> set[str]:
    """The modules of ours that a module imports when it is imported itself."""
    names: set[str] = set()
    for node in executed_on_import(tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in MODULES else str(node.module) for name in whole}
    return names & set(MODULES)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next and the last is the first; none if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_function_is_long():
    lengths = {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {place: lines for place, lines in lengths.items() if lines > MOST_LINES} == {}


def test_no_modules_import_each_other_in_a_circle():
    assert circle({name: imported(tree) for name, tree in MODULES.items()}) == []


def test_imports_are_relative_nowhere():
    """Else `imported` would overlook them."""
    relative = [
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import jaxembed.spec", {"jaxembed.spec"}),
        ("from jaxembed import spec", {"jaxembed.spec"}),
        ("from jaxembed import Embedder", {"jaxembed"}),
        ("from jaxembed.spec import Task", {"jaxembed.spec"}),
        ("try:\n    import jaxembed.spec\nexcept ImportError:\n    import json", {"jaxembed.spec"}),
        ("def f():\n    import jaxembed.spec", set()),
        ("if TYPE_CHECKING:\n    import jaxembed.spec", set()),
        ("import json", set()),
    ],
)
def test_imports_are_found_where_they_run(source, names):
    assert imported(ast.parse(source)) == names


def test_a_circle_is_found():
    assert len(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == 4
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
