"""The shape of the code: functions stay short."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxembed", "converters", "benchmarks")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MAX_LINES = 80  # of a function, its decorators not counted


def test_no_function_is_long():
    lengths = {
        f"{file}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {place: lines for place, lines in lengths.items() if lines > MAX_LINES} == {}
