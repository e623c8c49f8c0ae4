"""One name stands for one thing: no two files of the package define the same public name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxembed", "converters")

# What several files define on purpose, because each implements the same interface.
INTERFACES = {
    "a logger": {"logger"},
    "the routes of a file": {"blueprint"},
    "a family's converter": {
        "ARCHITECTURE",
        "CLASSES",
        "CLASSIFIERS",
        "GENERATORS",
        "HEAD_WIDTH",
        "IGNORED",
        "LAYER",
        "OWN_CODE",
        "PREFIXES",
        "RENAMES",
        "REQUIRED",
        "RERANKER",
        "RULES",
        "SELF",
        "SWITCHES",
        "TARGET",
        "classifier",
        "config_rules",
        "config",
        "masked_lm",
        "score_head",
    },
    "a converter of static models": {"static_outline"},
    "where tensors come from": {"find"},
    "an attention kernel": {"KERNEL", "attend", "refuses"},
}


def defined(file: Path) -> Iterator[str]:
    """The public names that a file defines at its top level."""
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign():
                targets = (one for target in node.targets for one in ast.walk(target))
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_"))


def test_no_two_files_define_the_same_public_name():
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for name in dict.fromkeys(defined(file)):
                found[name].append(str(file.relative_to(ROOT)))
    allowed = set().union(*INTERFACES.values())
    shared = {n: files for n, files in found.items() if len(files) > 1 and n not in allowed}
    assert not shared
    assert all(len(found[name]) > 1 for name in allowed)  # or it needs no exception


@pytest.mark.parametrize("words", ["Input validation error", "--auto-truncate"])
def test_what_clients_read_is_worded_in_the_server_alone(words):
    """A user of the library reads the library's words; commands and their jobs name flags."""
    files = (ROOT / "jaxembed").rglob("*.py")
    outside = [path for path in files if not {"server", "cli", "bulk"} & set(path.parts)]
    found = [str(path) for path in outside if words in path.read_text()]
    assert not found
