"""The pipes of the programs in this folder, which answer each line of input with a line of JSON.

They run in environments of their own, by their path, so that this file lies beside them.
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any


def opened() -> tuple[Any, Callable[[Any], None]]:
    """The job, which is the first line of input, and the function that answers a value."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    job = json.loads(sys.stdin.readline())

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    return job, answer


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of Python and of the packages."""
    found = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version()} | found
