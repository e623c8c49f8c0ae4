"""Loads native libraries: the kernels, which are registered with XLA, and a function that computes
means of table rows.

Wheels hold prebuilt libraries. In a source checkout without them, the libraries are compiled into
the cache directory.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np

from jaxembed.errors import ConfigError
from jaxembed.models.native import compiler
from jaxembed.models.native.compiler import Build, NativeUnavailable
from jaxembed.platform.cache_folder import OTHERS_WRITE, ROOT, make_private, refuse_shared
from jaxembed.platform.files import replacing

logger = logging.getLogger(__name__)

CPU = Path("/proc/cpuinfo")
CHECK_S = 20.0  # the time limit for checking a library, in seconds
CALLS = ("linear", "attention", "joint_attention", "self_attention", "mlp")
# The instructions without which a CPU has no kernels of a dtype, by machine.
NEEDED = {
    "x86_64": {"bfloat16": "AVX512_BF16", "float32": "AVX2 and FMA"},
    "aarch64": {"bfloat16": "BF16", "float32": "NEON"},
}
# What is wrong if the check of a library (jaxembed_check in check.h) ends with this exit status.
FAULTS = {
    2: "the system does not let this process use AMX",
    3: "there was no memory for the check",
    4: "the compiled library computes wrong numbers on this machine",
}


class NativeMeans:
    """A function that computes means of table rows by means.c, without the interpreter lock.

    Threads may share it.
    """

    def __init__(self, library: ctypes.CDLL):
        """Raises AttributeError if the library has no function `jaxembed_means`."""
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._means = library.jaxembed_means
        self._means.restype = None
        self._means.argtypes = (pointer, size, size, pointer, pointer, size, size, pointer)

    def __call__(
        self, table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, block: int
    ) -> np.ndarray:
        """Return the mean of the table's rows for each slot: the values of `numpy_means` in
        models/static.py, which describes the arguments, bit for bit. Raises ValueError if a slot
        ends after the last of the `ids`."""
        if len(bounds) and not 0 <= bounds.min() <= bounds.max() <= len(ids):
            raise ValueError(
                f"a slot lies beyond the ids, of which there are {len(ids)}: a bug in jaxembed"
            )
        table = np.ascontiguousarray(table, np.float32)
        ids, bounds = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(bounds, np.int64)
        means = np.empty((len(bounds), table.shape[1]), np.float32)
        self._means(
            table.ctypes.data,
            *table.shape,
            ids.ctypes.data,
            bounds.ctypes.data,
            len(bounds),
            block,
            means.ctypes.data,
        )
        return means


_loading = threading.Lock()
_libraries: dict[str, tuple[ctypes.CDLL, Build]] = {}  # the loaded kernels by dtype
_means: NativeMeans | None = None


def load_library(cache_dir: Path, dtype: str) -> None:
    """Load the fastest kernels of a dtype that this CPU supports, and register them with XLA.

    Only the first successful call for a dtype loads a library, because XLA refuses to register
    kernels of the same names again. A library that must be compiled is kept in `cache_dir`. Raises
    NativeUnavailable if the machine cannot use any of the kernels.
    """
    reasons: list[str] = []
    with _loading:
        if dtype in _libraries:
            return
        for build in _runnable(dtype):  # the fastest first
            try:
                library = _opened(build, cache_dir)
                if library.jaxembed_prepare():  # not 0: the system refuses AMX
                    raise NativeUnavailable(FAULTS[2])
                _register(library, dtype)
            except OSError as error:
                reasons.append(f"cannot read {error.filename}: {error.strerror}")
            except NativeUnavailable as error:
                reasons.append(str(error))
            else:
                _libraries[dtype] = library, build
                return
        needed = NEEDED.get(platform.machine(), NEEDED["x86_64"])[dtype]
        raise NativeUnavailable(
            "; ".join(dict.fromkeys(reasons))
            or f"this CPU has no {needed}, or the system does not say so"
        )


def load_means(cache_dir: Path) -> NativeMeans:
    """Load the function that computes means of table rows. Further calls return the same object.

    The function runs on any CPU, without XLA. If the library must be compiled, it is kept in
    `cache_dir`. Raises NativeUnavailable if the library cannot be compiled or loaded.
    """
    global _means
    with _loading:
        if _means is None:
            try:
                _means = NativeMeans(_opened(compiler.MEANS, cache_dir))
            except OSError as error:
                raise NativeUnavailable(
                    f"cannot read {error.filename}: {error.strerror}"
                ) from error
        return _means


def source_digest(dtype: str) -> str:
    """Return a hash of the sources of the loaded kernels of a dtype, or if none are loaded, of the
    fastest for this CPU; "" if there are no kernels. Raises OSError if a source is missing."""
    builds = [_libraries[dtype][1]] if dtype in _libraries else _runnable(dtype)
    return compiler.digest(builds[0]) if builds else ""


def operand_names(call: str, dtype: str, mode: int = 0) -> tuple[str, ...]:
    """Return the names of the operands of a native call in order, from the table in operands.h.

    `call` is one of CALLS, and `dtype` that of the kernels. The bits of `mode`, the attribute of a
    NativeCall, say which optional operands the call has. Raises RuntimeError if the library is not
    loaded.
    """
    if dtype not in _libraries:
        raise RuntimeError("native kernels are used before they are loaded: a bug in jaxembed")
    operand = _libraries[dtype][0].jaxembed_operand
    operand.restype, operand.argtypes = ctypes.c_char_p, (ctypes.c_char_p, *[ctypes.c_int64] * 2)
    names: list[str] = []
    while name := operand(call.encode(), mode, len(names)):
        names.append(name.decode())
    return tuple(names)


def target(call: str, dtype: str) -> str:
    """Return the name by which XLA knows a native call of the kernels of a dtype."""
    return f"jaxembed_{call}_{dtype}"


def _runnable(dtype: str) -> tuple[Build, ...]:
    """Return the builds of the kernels of a dtype that this CPU has the features for, the fastest
    first. The result is empty if the system does not list the features of the CPU."""
    try:
        lines = CPU.read_text().splitlines()
    except OSError:
        return ()
    names = ("flags", "Features")  # of the line, on x86-64 and on Arm
    flags = next((set(line.split()) for line in lines if line.startswith(names)), set())
    kernels = (build for build in compiler.KERNELS if build.dtype == dtype)
    return tuple(build for build in kernels if build.cpu_flags <= flags)


def _opened(build: Build, cache_dir: Path) -> ctypes.CDLL:
    """Load a library after checking it in another process. A prebuilt library is used if it is up
    to date; otherwise the library is compiled into `cache_dir`. Raises NativeUnavailable if it
    cannot be compiled, fails its check or cannot be loaded, and OSError for an unreadable source.
    """
    # A prebuilt library holds the digest of its sources. In a checkout the sources may be newer.
    source_hash = compiler.digest(build).encode()
    try:
        is_prebuilt = source_hash in build.built.read_bytes()
    except OSError:
        is_prebuilt = False
    path = build.built if is_prebuilt else _compiled(build, cache_dir)
    # The library's check runs in another process, so that a crash does not end the server. With -I
    # Python does not import a ctypes.py of the working directory, and with -S it skips the site
    # packages, which are not needed.
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(path)!r}).jaxembed_check())"
    try:
        command = [sys.executable, "-I", "-S", "-c", code]
        if status := compiler.run_command(command, CHECK_S).returncode:
            crash = f"{path} does not run on this machine: exit status {status}"
            raise NativeUnavailable(FAULTS.get(status, crash))
        library = ctypes.CDLL(str(path))
    except (OSError, NativeUnavailable) as error:  # the file may be truncated, for example
        if not is_prebuilt:  # remove it, so that the next start compiles it again
            with suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            raise NativeUnavailable(f"cannot load {path}: {error}") from error
        raise
    logger.info("loaded the native library %s", path)
    return library


def _compiled(build: Build, cache_dir: Path) -> Path:
    """Compile a library into the cache directory, unless it is there already, and return its path.
    Raises NativeUnavailable if the compilation fails, or if other users can change the directory or
    the library."""
    try:
        refuse_shared(cache_dir)
    except ConfigError as error:
        raise NativeUnavailable(str(error)) from error
    key_parts = [_header().read_bytes(), compiler.digest(build).encode()]
    key = hashlib.sha256(b"\0".join(key_parts)).hexdigest()[:16]
    # The path must be absolute, because the loader searches other folders for a bare name.
    library = cache_dir.absolute() / f"native-{build.name}-{key}.so"
    if _is_compiled(library):
        return library
    try:
        make_private(cache_dir)
        with replacing(library) as partial:
            compiler.compile_library(build, partial)
            # Other users must not change code that runs here, whatever the umask allows.
            partial.chmod(0o700)
    except OSError as error:
        raise NativeUnavailable(f"cannot compile in {cache_dir}: {error.strerror}") from error
    return library


def _is_compiled(library: Path) -> bool:
    """Whether the compiled library exists. Raises NativeUnavailable if the path is not a regular
    file, or if other users can change it."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode):
        raise NativeUnavailable(f"{library} is a link or not a regular file; remove it")
    if status.st_uid not in (os.geteuid(), ROOT) or status.st_mode & OTHERS_WRITE:
        owner = f"belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        raise NativeUnavailable(
            f"{library} {owner}: others can change what would run here; remove it"
        )
    return True


def _register(library: ctypes.CDLL, dtype: str) -> None:
    """Register the functions of a library of kernels of a dtype with XLA.

    Raises NativeUnavailable if the library was built for another version of jaxlib's FFI, or if
    jaxlib refuses a function.
    """
    built_for = tuple(
        ctypes.c_int.in_dll(library, f"jaxembed_ffi_{part}").value for part in ("major", "minor")
    )
    try:
        header = _header().read_text()
    except OSError:
        header = ""  # without the header the versions are not compared
    versions = re.findall(r"^#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)$", header, re.MULTILINE)
    installed = tuple(map(int, versions)) if len(versions) == 2 else ()
    if installed and (installed[0] != built_for[0] or installed < built_for):
        built_ffi, jaxlib_ffi = (".".join(map(str, version)) for version in (built_for, installed))
        raise NativeUnavailable(
            f"the native kernels were built for XLA FFI {built_ffi}, but the installed jaxlib has "
            f"{jaxlib_ffi}: upgrade jaxlib, or build jaxembed with this one"
        )
    try:
        for name in CALLS:
            function = jax.ffi.pycapsule(getattr(library, f"jaxembed_{name}"))
            jax.ffi.register_ffi_target(target(name, dtype), function, platform="cpu")
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or ["nothing"])[0][:200]
        raise NativeUnavailable(
            f"the installed jaxlib refuses the native kernels: {line}"
        ) from error


def _header() -> Path:
    return Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
