"""Models start with few buckets, which are compiled without LLVM's optimisations and not timed.

A program, too: `python tests/quick.py serve ...` is `jaxembed serve ...` that starts so.
"""

from typing import Any

import jax

from jaxembed.engine import build
from jaxembed.engine.autotune import costs, timing
from jaxembed.engine.bucket import BucketGrid, default_grid


def small_grid(*sizes: int, **options: Any) -> BucketGrid:
    """The shortest and the longest rows of the default grid: compiling all of it takes long."""
    buckets = default_grid(*sizes, **options).buckets
    return BucketGrid(tuple(dict.fromkeys((buckets[0], buckets[-1]))))


# LLVM's optimisations are half of the time that a program takes to compile. XLA's own are made all
# the same. The fixture `optimized` is for tests of what only the code that is served can show.
jax.config.update("jax_disable_most_optimizations", True)
build.default_grid = small_grid
# Nothing runs beside tests: beartype draws random numbers, which Hypothesis notices.
costs.TIMINGS = 1
timing.TIMING_S = 0.0
timing.AGAIN_S = 3600.0

if __name__ == "__main__":
    from jaxembed.cli import main

    main()
