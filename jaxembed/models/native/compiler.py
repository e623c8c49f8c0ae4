"""Compiles the native libraries: kernels for an instruction set, and means of table rows for any
CPU.

The build of the wheel runs this file before jaxembed is installed, so this file imports only the
standard library.
"""

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

SOURCES = Path(__file__).parent  # the folder of C files and headers
LIBRARIES = Path(__file__).with_name("libs")  # the folder of prebuilt libraries in a wheel
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0  # the time limit for compiling a library, in seconds
OLDEST_GLIBC = 17  # manylinux2014 needs glibc 2.17, the oldest that pip and jaxlib have a tag for

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")
# -march=native is not used, because a library is built on one machine and used on others.
AVX2_FLAGS, AVX512_FLAGS = ("-march=x86-64-v3",), ("-march=x86-64-v4",)
AVX512_BF16_FLAGS = (*AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni")
AMX_FLAGS = (*AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
NEON_FLAGS, ARM_BF16_FLAGS = ("-march=armv8-a",), ("-march=armv8.2-a+bf16+i8mm",)
FLOAT32_FLAGS = ("-DELEMENTS_ARE_FLOAT32",)

# The CPU features that the compiler may use with these flags, as /proc/cpuinfo names them.
_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_AVX512_BF16 = _VNNI | {"avx512_bf16"}
_NEON = frozenset({"fp", "asimd"})
_ARM_BF16 = _NEON | {"atomics", "asimdrdm", "crc32", "bf16", "i8mm"}


class NativeUnavailable(Exception):
    """This machine cannot use the native kernels. The message is the reason, in one line."""


class UnsupportedPlatform(NativeUnavailable):
    """The native kernels do not support the platform of this machine."""


@dataclass(frozen=True)
class Build:
    """How a library is compiled, and the CPUs that it runs on."""

    name: str
    source: str  # name of a file in SOURCES
    flags: tuple[str, ...]  # options of the compiler
    cpu_flags: frozenset[str]  # features that a CPU must have, as /proc/cpuinfo names them
    dtype: str = ""  # of the numbers that the kernels multiply
    machine: str = ""  # that the library is for, as platform.machine() names it; "" for any

    @property
    def built(self) -> Path:
        """The path of the prebuilt library in the package; the file need not exist."""
        return LIBRARIES / f"{self.name}.so"


def _kernels(
    name: str, flags: tuple[str, ...], cpu_flags: frozenset[str], dtype: str, machine: str
) -> Build:
    return Build(name, "native.c", FLAGS + flags, cpu_flags, dtype, machine)


_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
AMX = _kernels("amx", AMX_FLAGS, _AMX, "bfloat16", "x86_64")
AVX512_BF16 = _kernels("avx512_bf16", AVX512_BF16_FLAGS, _AVX512_BF16, "bfloat16", "x86_64")
AVX512_VNNI = _kernels(
    "avx512_vnni_float32",
    (*AVX512_FLAGS, "-mavx512vnni", *FLOAT32_FLAGS),
    _VNNI,
    "float32",
    "x86_64",
)
AVX512 = _kernels("avx512_float32", AVX512_FLAGS + FLOAT32_FLAGS, _V4, "float32", "x86_64")
AVX_VNNI = _kernels(
    "avx_vnni_float32",
    (*AVX2_FLAGS, "-mavxvnni", *FLOAT32_FLAGS),
    _V3 | {"avx_vnni"},
    "float32",
    "x86_64",
)
AVX2 = _kernels("avx2_float32", AVX2_FLAGS + FLOAT32_FLAGS, _V3, "float32", "x86_64")
ARM_BF16 = _kernels("arm_bf16", ARM_BF16_FLAGS, _ARM_BF16, "bfloat16", "aarch64")
NEON = _kernels("neon_float32", NEON_FLAGS + FLOAT32_FLAGS, _NEON, "float32", "aarch64")
# The fastest of each machine and dtype first.
KERNELS = (AMX, AVX512_BF16, AVX512_VNNI, AVX512, AVX_VNNI, AVX2, ARM_BF16, NEON)
MEANS = Build("means", "means.c", FLAGS, frozenset())
MACHINES = ("x86_64", "aarch64")  # that kernels are for


def builds() -> tuple[Build, ...]:
    """Return the builds of all libraries for this machine."""
    return tuple(one for one in (*KERNELS, MEANS) if one.machine in ("", platform.machine()))


def digest(build: Build) -> str:
    """Return a hash of a library's sources and flags. Raises OSError if a source is missing."""
    # Include every header, because the source may include any of them.
    paths = [SOURCES / build.source, *sorted(SOURCES.glob("*.h"))]
    parts = [*(path.read_bytes() for path in paths), *map(str.encode, build.flags)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def find_compiler() -> str | None:
    """Return the path of a C compiler on this machine, or None if there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_library(build: Build, library: Path) -> None:
    """Compile a shared library to the path `library`.

    Raises NativeUnavailable if there is no compiler, if the compiler fails or takes too long, or if
    jaxlib is not installed, and OSError if a source is missing.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable("there is no C compiler: install gcc or clang")
    jaxlib = importlib.util.find_spec("jaxlib")  # jaxlib contains XLA's headers
    if jaxlib is None or not jaxlib.submodule_search_locations:
        raise NativeUnavailable("jaxlib, whose headers the native kernels need, is not installed")
    command = [
        compiler,
        *build.flags,
        # The loader finds this digest in a prebuilt library, and sees whether it is up to date.
        f'-DJAXEMBED_SOURCE="{digest(build)}"',
        f"-I{Path(jaxlib.submodule_search_locations[0], 'include')}",
        "-o",
        str(library),
        str(SOURCES / build.source),
    ]
    process = run_command(command, COMPILE_S)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        error = next((line for line in lines if "error" in line), lines[-1] if lines else "nothing")
        raise NativeUnavailable(f"{compiler} exited with {process.returncode}: {error[:200]}")


def run_command(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output. Raises NativeUnavailable if it takes longer than
    `seconds`."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took more than {seconds:.0f} s") from error


def build_all() -> str:
    """Compile all libraries into the package, and return the tag of wheels for this platform.

    Raises UnsupportedPlatform if the kernels do not support this platform, and NativeUnavailable or
    OSError if a library cannot be built. After an error the package holds no library. Processes
    that use the package meanwhile load the old libraries until all new ones are there.
    """
    partial = LIBRARIES.with_name(f".libs.partial-{uuid4().hex}")
    try:
        libc, machine = platform.libc_ver()[0], platform.machine()
        if (sys.platform, libc) != ("linux", "glibc") or machine not in MACHINES:
            raise UnsupportedPlatform(
                f"the native kernels need Linux with glibc on {' or '.join(MACHINES)}, and this is "
                f"{sys.platform} {machine} {libc}".rstrip()
            )
        partial.mkdir()
        for build in builds():
            compile_library(build, partial / build.built.name)
        newest = max(newest_glibc(library.read_bytes()) for library in partial.iterdir())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(LIBRARIES, ignore_errors=True)
    partial.replace(LIBRARIES)
    return f"py3-none-manylinux_2_{newest}_{machine}"


def newest_glibc(library: bytes) -> int:
    """Return the N of the newest symbol version GLIBC_2.N that a shared library needs, at least
    OLDEST_GLIBC.

    `library` is the content of the file, which includes the names of symbol versions.
    """
    versions = re.findall(rb"\0GLIBC_2\.(\d+)(?=[\0.])", library)
    return max([OLDEST_GLIBC, *map(int, versions)])
