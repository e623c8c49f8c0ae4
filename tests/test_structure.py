"""The shape of the code: functions stay short, and nothing is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


HELP = """
import sys; sys.argv = ['jaxembed', 'serve', '--help']
from jaxembed.cli import main
try: main()
except SystemExit: pass"""


@pytest.mark.parametrize(
    ("code", "absent", "printed"),
    [
        (HELP, {"jax", "quart", "transformers", "torch"}, "--max-batch-tokens"),
        ("import jaxembed.preprocessing.images.pdf_renderer", {"jax", "numpy"}, ""),
        ("import jaxembed.checkpoints.hub, jaxembed.server.run", {"fsspec", "gcsfs", "s3fs"}, ""),
    ],
)
def test_what_is_not_needed_is_not_imported(code, absent, printed):
    program = f"{code}\nimport sys; print({absent} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr
    assert printed in done.stdout
