"""Compiles the native kernels for an instruction set. The build of the wheel runs this file where
jaxembed is not installed: it uses the standard library alone."""

import hashlib
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

SOURCE = Path(__file__).with_name("native.c")  # which includes the headers beside it
LIBRARIES = Path(__file__).with_name("libs")  # what was built ahead
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
OLDEST_GLIBC = 17  # of manylinux2014, the oldest that pip and jaxlib know by such a name

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")
# Never -march=native: a library is built on one machine and used on another.
AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")
AMX_FLAGS = (*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16")

# What these flags let a compiler use, by the names of /proc/cpuinfo.
_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _V4 | {"avx512_bf16"}


class Unavailable(Exception):
    """Why this machine has no native kernels, in one line."""


@dataclass(frozen=True)
class InstructionSet:
    """What a library is compiled for."""

    name: str
    flags: tuple[str, ...]  # of the compiler
    cpu_flags: frozenset[str]  # which a CPU must have

    @property
    def built(self) -> Path:
        """Where its library is, if one was built ahead."""
        return LIBRARIES / f"{self.name}.so"


# The fastest first.
INSTRUCTION_SETS = (
    InstructionSet("amx", FLAGS + AMX_FLAGS, _AVX512_BF16 | {"amx_tile", "amx_bf16"}),
    InstructionSet("avx512_bf16", FLAGS + AVX512_FLAGS, _AVX512_BF16),
)


def sources() -> list[Path]:
    """The files in C. The first one includes the others."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def digest(instruction_set: InstructionSet) -> str:
    """Names what a library is made of: sources and flags. Raises OSError."""
    parts = [*(path.read_bytes() for path in sources()), *map(str.encode, instruction_set.flags)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def headers() -> Path:
    """The folder of XLA's headers, which jaxlib brings. Raises Unavailable."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("jaxlib, whose headers the native kernels need, is not installed")
    return Path(spec.submodule_search_locations[0], "include")


def find_compiler() -> str | None:
    """The C compiler of this machine."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_library(instruction_set: InstructionSet, library: Path) -> None:
    """Raises Unavailable, and OSError where files cannot be read."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("there is no C compiler: install gcc or clang")
    of_source = f'-DJAXEMBED_SOURCE="{digest(instruction_set)}"'
    options = [*instruction_set.flags, of_source, f"-I{headers()}", "-o", str(library)]
    done = run_command([compiler, *options, str(SOURCE)], COMPILE_S)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "nothing")
        raise Unavailable(f"{compiler} exited with {done.returncode}: {said[:200]}")


def run_command(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Raises Unavailable if it does not end in time."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {seconds:.0f} s") from error


def build_ahead() -> str:
    """Compile a library for each instruction set into the package, and return the tag of a wheel
    that holds them. Raises Unavailable and OSError, and then none is left there."""
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    libc = platform.libc_ver()[0]
    if (sys.platform, platform.machine(), libc) != ("linux", "x86_64", "glibc"):
        here = f"{sys.platform} {platform.machine()} {libc}".strip()
        raise Unavailable(f"the native kernels are for Linux x86_64 with glibc, this is {here}")
    partial = LIBRARIES.with_name(f".libs.partial-{uuid4().hex}")
    partial.mkdir()
    try:
        for instruction_set in INSTRUCTION_SETS:
            compile_library(instruction_set, partial / instruction_set.built.name)
        newest = max(newest_glibc(library.read_bytes()) for library in partial.iterdir())
        partial.replace(LIBRARIES)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"py3-none-manylinux_2_{newest}_x86_64"


def newest_glibc(library: bytes) -> int:
    """N of the newest GLIBC_2.N among the versions of symbols that a shared library asks for,
    whose names are in its bytes."""
    versions = re.findall(rb"\0GLIBC_2\.(\d+)(?=[\0.])", library)
    return max([OLDEST_GLIBC, *map(int, versions)])
