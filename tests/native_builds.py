"""Builds of the native kernels that this CPU runs: emulated where it lacks their instructions.

EMULATE_NATIVE=1 hides the instructions of the CPU, to try on one machine what another would run.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxembed.models.native import compiler, library

EMULATED = Path(__file__).with_name("native") / "emulated"  # a header in place of the compiler's
if "EMULATE_NATIVE" in os.environ:
    library.CPU = Path(os.devnull)
X86 = tuple(build for build in compiler.KERNELS if build.machine == "x86_64")
AMX, AVX512_BF16, AVX512_VNNI, AVX512, AVX_VNNI, AVX2 = X86
DTYPES = ("bfloat16", "float32")
RUNNABLE = [build for dtype in DTYPES for build in library._runnable(dtype)]


def for_this_cpu(build: compiler.Build) -> compiler.Build:
    """The build itself, or one of the same sources that this CPU runs slowly."""
    if build in RUNNABLE:
        return build
    if build is AVX_VNNI and AVX2 in RUNNABLE:
        flags = (*AVX2.flags, "-include", "stdint.h", "-include", str(EMULATED / "avxvnni.h"))
        return replace(AVX2, name=f"{build.name}-emulated", flags=flags)
    real = compiler.AVX512_BF16_FLAGS if AVX512_BF16 in RUNNABLE else compiler.AVX2_FLAGS
    asked = [flag for flag in build.flags if flag in compiler.FLOAT32_FLAGS]
    asked += ["-DEMULATE_AMX"] * (build is AMX)
    flags = (*compiler.FLAGS, *real, "-Wno-psabi", *asked, f"-I{EMULATED}", "-lm")
    return replace(build, name=f"{build.name}-emulated", flags=flags, cpu_flags=frozenset())


_registered: set[str] = set()


@contextmanager
def calling(build: compiler.Build, folder: Path) -> Iterator[str]:
    """Let native calls use this build, and yield its name. If it is not the one that the process
    has loaded, it is compiled in the folder, and its calls have names of their own."""
    build = for_this_cpu(build)
    if library._libraries[build.dtype][1] == build:
        yield build.name
        return
    opened = None if build.name in _registered else library._opened(build, folder)
    for name in library.CALLS if opened else ():
        entry = jax.ffi.pycapsule(getattr(opened, f"jaxembed_{name}"))
        target = f"{library.target(name, build.dtype)}_{build.name}"
        jax.ffi.register_ffi_target(target, entry, platform="cpu")
    _registered.add(build.name)
    usual = jax.ffi.ffi_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", lambda name, shape: usual(f"{name}_{build.name}", shape))
        yield build.name
