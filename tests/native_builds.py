"""Builds of the native kernels that this CPU runs: emulated where it lacks their instructions.

EMULATE_NATIVE=1 hides the instructions of the CPU, to try on one machine what another would run.
"""

import os
from dataclasses import replace
from pathlib import Path

from jaxembed.models.native import compiler, library

EMULATED = Path(__file__).with_name("native") / "emulated"  # a header in place of the compiler's
if "EMULATE_NATIVE" in os.environ:
    library.CPU = Path(os.devnull)
AMX, AVX512_BF16 = compiler.INSTRUCTION_SETS
RUNNABLE = library._runnable()


def for_this_cpu(build: compiler.Build) -> compiler.Build:
    """The build itself, or one of the same sources that this CPU runs slowly."""
    if build in RUNNABLE:
        return build
    real = compiler.AVX512_FLAGS if AVX512_BF16 in RUNNABLE else ("-march=x86-64-v3", "-Wno-psabi")
    tiles = ("-DEMULATE_AMX",) if build is AMX else ()
    flags = (*compiler.FLAGS, *real, *tiles, f"-I{EMULATED}", "-lm")
    return replace(build, name=f"{build.name}-emulated", flags=flags, cpu_flags=frozenset())
