"""Counts the calls that one short text on /v1/embeddings makes, in all threads of the server.

The server runs in this process with its null model. What is counted are calls of functions of
`jaxembed`, by package, and how often two calls that follow each other are of different files.
Comprehensions belong to their functions, and a coroutine that goes on is no call. The figures are
medians over requests that follow each other on one connection.

    python -m benchmarks.count_calls
    python -m benchmarks.count_calls --list  # the calls of one request, in order
"""

import http.client
import inspect
import json
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import jaxembed
from jaxembed.cli import main as serve

ROOT = str(Path(jaxembed.__file__).parent) + os.sep
PORT = 18473
BODY = json.dumps({"model": "counted", "input": "how do I cook rice"})
HEADERS = {"Content-Type": "application/json"}
WARM, COUNTED = 50, 21
PAUSE_S = 0.05  # until all threads are idle again
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
FIRST_INSTRUCTIONS = 16  # bytes of code before a function that may be resumed has begun


class Calls:
    """A profiler for `sys.setprofile`, which records while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.made: list[tuple[str, str]] = []  # file and function

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or not code.co_filename.startswith(ROOT):
            return
        goes_on = code.co_flags & RESUMABLE and frame.f_lasti > FIRST_INSTRUCTIONS
        if not goes_on and code.co_name not in COMPREHENSIONS:
            self.made.append((code.co_filename.removeprefix(ROOT), code.co_qualname))

    def figures(self) -> dict[str, int]:
        """What was recorded since the last time, which is forgotten."""
        files = [file for file, _ in self.made]
        packages = Counter(file.partition(os.sep)[0] for file in files)
        found = {
            "calls": len(files),
            "files": len({*files}),
            "changes of file": sum(one != other for one, other in pairwise(files)),
            "files in server": sum(file.startswith("server" + os.sep) for file in {*files}),
        }
        self.made = []
        return found | {f"calls in {package}": n for package, n in packages.most_common()}


def ask(calls: Calls, show: bool) -> None:
    """Send requests, count those after the first ones, print the figures and end the server."""
    begun = False
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    counted = []
    for number in range(-WARM, COUNTED):
        while True:
            try:
                calls.on = number >= 0
                connection.request("POST", "/v1/embeddings", BODY, HEADERS)
                answer = connection.getresponse()
                answer.read()
            except ConnectionRefusedError:
                connection.close()
                time.sleep(PAUSE_S)
                continue
            if answer.status == 200:
                break
            time.sleep(PAUSE_S)
        time.sleep(PAUSE_S)
        if not begun:
            os.kill(os.getpid(), signal.SIGUSR1)
            begun = True
        calls.on = False
        if show and number == COUNTED - 1:
            for file, name in calls.made:
                print(f"{file}  {name}")
        if number >= 0:
            counted.append(calls.figures())
    print(json.dumps({name: median(one.get(name, 0) for one in counted) for name in counted[0]}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve in this thread and ask in another."""
    parser = ArgumentParser(description="Count the calls of one short text.")
    parser.add_argument("model", nargs="?", help="whose tokenizer; default: all-MiniLM-L6-v2")
    parser.add_argument("--list", action="store_true", help="print the calls of one request, too")
    options = parser.parse_args()
    calls = Calls()
    threading.Thread(target=ask, args=(calls, options.list), daemon=True).start()
    threading.setprofile(calls)
    # This thread has the profiler from the first answer on: it would slow all imports down.
    signal.signal(signal.SIGUSR1, lambda *_: sys.setprofile(calls))

    model = [options.model] if options.model else []
    flags = ["--null-model", "--port", str(PORT), "--served-model-name", "counted"]
    sys.argv = ["jaxembed", "serve", *model, *flags]
    serve()


if __name__ == "__main__":
    main()
