"""The shape of the code: functions stay short, no modules import each other in a circle, and what
is private to a module or a library is used nowhere else."""

import ast
import contextlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxembed", "converters", "benchmarks")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MOST_LINES = 60  # of a function, its decorators not counted

# The only uses of names that another module or library keeps to itself, by module.
USES_OF_PRIVATE_NAMES = {
    "jaxembed.server.connection": {  # its docstring says which changes would end them
        "_close",
        "_create_request_from_scope",
        "_data",
        "_idle_timeout",
        "_initiate_server_close",
        "_read_data",
        "_task_group",
    },
    "jaxembed.images.pdf_renderer": {"_exit"},  # as below
    "jaxembed.signals": {"_exit"},  # of os: documented, in spite of its name
    "jaxembed.telemetry": {"_replace"},  # of a NamedTuple: documented, in spite of its name
    "benchmarks.attention_candidates": {"_src"},  # of jax: what would be there to use
}


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


def test_imports_and_circles_are_found():
    assert imported(
        ast.parse("try:\n    from jaxembed import spec\nfinally:\n    import json")
    ) == {"jaxembed.spec"}
    later = "def f():\n    import jaxembed.spec\nif TYPE_CHECKING:\n    import jaxembed.spec"
    assert imported(ast.parse(later)) == set()
    assert len(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == 4


PRIVATE = re.compile("_[a-z]")


def defined_in(tree: ast.AST) -> set[str]:
    """The names that are defined in a module or class: classes, functions, variables, and
    attributes that `self` or `cls` is given."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def used_in(tree: ast.AST) -> set[str]:
    """The attributes that a module or class uses, and the parts of the names that it imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                names.add(name)
            case ast.Import(names=imports):
                names.update(part for one in imports for part in one.name.split("."))
            case ast.ImportFrom(module=module, names=imports):
                names.update([*str(module).split("."), *(one.name for one in imports)])
    return names


def private(names: set[str]) -> set[str]:
    return {name for name in names if PRIVATE.match(name)}


@cache
def private_of(kind: type) -> set[str]:
    """The private names of a class, if it is not ours."""
    if kind.__module__.split(".")[0] in (*PACKAGES, "builtins"):
        return set()
    names = private(set(vars(kind)))
    with contextlib.suppress(OSError, TypeError):  # it has no source in Python
        names |= private(defined_in(ast.parse(textwrap.dedent(inspect.getsource(kind)))))
    return names


def private_of_bases(kind: type) -> set[str]:
    """The private names of a class's bases that are not ours."""
    return set().union(*map(private_of, kind.__mro__[1:]))


def inherited(module: str, tree: ast.Module) -> set[str]:
    """The private names that classes of a module override or use of bases that are not ours."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.bases:
            kind = getattr(importlib.import_module(module), node.name)
            names |= private_of_bases(kind) & (defined_in(node) | used_in(node))
    return names


def test_private_names_of_others_are_used_in_one_file_alone():
    """Else an update of a library could break any file."""
    found = {
        name: (private(used_in(tree)) - defined_in(tree)) | inherited(name, tree)
        for name, tree in MODULES.items()
    }
    assert {name: uses for name, uses in found.items() if uses} == USES_OF_PRIVATE_NAMES


@pytest.mark.parametrize("words", ["Input validation error", "--auto-truncate"])
def test_what_clients_read_is_worded_in_the_server_alone(words):
    """A user of the library reads the library's words; commands and their jobs name flags."""
    files = (ROOT / "jaxembed").rglob("*.py")
    outside = [path for path in files if not {"server", "cli", "bulk"} & set(path.parts)]
    found = [str(path) for path in outside if words in path.read_text()]
    assert not found
