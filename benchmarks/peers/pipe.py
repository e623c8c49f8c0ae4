"""What the programs of this folder share. Each runs one library in the library's own environment,
and answers the lines of its input with lines of JSON.

They are started by their path, so that this file lies beside them. They import nothing of jaxembed
but where it is what is timed.
"""

import base64
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def serve(libraries: Mapping[str, Any]) -> None:
    """Make a library, and call its methods.

    The first line of input is a JSON object, the job: it names the library, which is made of the
    job, and whose PACKAGES with their versions are the first answer. Each further line is a list: a
    method and its arguments, answered by the seconds of the call. `["vectors"]` is answered by the
    array that the last call returned: its number of rows, and float32 in base64.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    job = json.loads(sys.stdin.readline())
    library, found = libraries[job["library"]](job), np.zeros((0, 0))
    versions = {name: metadata.version(name) for name in library.PACKAGES}
    answer({"python": platform.python_version()} | versions)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "vectors":
            encoded = base64.b64encode(np.asarray(found, "<f4").tobytes()).decode()
            answer([len(found), encoded])
            continue
        start = time.perf_counter()
        found = getattr(library, name)(*arguments)
        answer(time.perf_counter() - start)


def embedder(model: str, cache_dir: str | None = None, **options: Any) -> Any:
    """jaxembed's Embedder with memory kept, as docs/library.md says, and all buckets timed."""
    import jax

    from jaxembed import Embedder, EngineConfig, memory

    memory.keep()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    folder = None if cache_dir is None else Path(cache_dir)
    made = Embedder(model, cache_dir=folder, config=EngineConfig(warmup="full", **options))
    for one in made.model.engines.values():
        one.engine.wait_timed()
    return made


def session(path: str, threads: int) -> Any:
    """onnxruntime's session of a graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options)


def apart(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process that ends, so that torch and its threads are not beside what is
    timed."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
