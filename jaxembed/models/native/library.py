"""Loads native libraries: the kernels, which it registers with XLA, and the means of table rows.

The package holds prebuilt libraries. A source checkout without them compiles them into the cache
directory.
"""

import ctypes
import hashlib
import logging
import os
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
CHECK_S = 20.0  # timeout of a library's check in seconds
CALLS = ("linear", "attention", "joint_attention", "self_attention", "mlp")
FAULTS = {  # messages by the exit status of jaxembed_check in check.h
    2: "the system does not let this process use AMX",
    3: "there was no memory for the check",
    4: "the compiled library computes wrong numbers on this machine",
}


class NativeMeans:
    """Means of table rows, computed by means.c without the interpreter lock.

    Threads may share it.
    """

    def __init__(self, library: ctypes.CDLL):
        """Raises AttributeError if the library does not have the function."""
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._means = library.jaxembed_means
        self._means.restype = None
        self._means.argtypes = (pointer, size, size, pointer, pointer, size, size, pointer)

    def __call__(
        self, table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, block: int
    ) -> np.ndarray:
        """Return what `numpy_means` of models/static.py returns, bit for bit. Raises ValueError if
        a slot lies beyond the ids."""
        if len(bounds) and not 0 <= bounds.min() <= bounds.max() <= len(ids):
            raise ValueError(f"a slot lies beyond the {len(ids)} ids: a bug in jaxembed")
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
_library: ctypes.CDLL | None = None
_build: Build | None = None  # the build of _library
_means: NativeMeans | None = None


def load_library(cache_dir: Path) -> None:
    """Load the fastest kernels that this CPU runs, and register them with XLA.

    Further calls do nothing: one library serves the whole process, because XLA refuses a second one
    of the same name. A library that must be compiled is kept in `cache_dir`. Raises
    NativeUnavailable if the machine cannot use any of the kernels.
    """
    global _library, _build
    reasons: list[str] = []
    with _loading:
        if _library is not None:
            return
        for build in _runnable():  # the fastest first
            try:
                library = _opened(build, cache_dir)
                if library.jaxembed_prepare():  # the system refuses AMX
                    raise NativeUnavailable(FAULTS[2])
                _register(library)
            except OSError as error:
                reasons.append(f"cannot read {error.filename}: {error.strerror}")
            except NativeUnavailable as error:
                reasons.append(str(error))
            else:
                _library, _build = library, build
                return
        raise NativeUnavailable(
            "; ".join(dict.fromkeys(reasons))
            or "this CPU has no AVX512_BF16, or the system does not say so"
        )


def load_means(cache_dir: Path) -> NativeMeans:
    """Load the function of means of table rows; further calls return the same object.

    It needs no XLA, and any CPU runs it. A library that must be compiled is kept in `cache_dir`.
    Raises NativeUnavailable if the library cannot be compiled or loaded.
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


def source_digest() -> str:
    """Return a hash of the sources of the loaded kernels, or of those that this CPU would load.
    Raises OSError if a source is missing."""
    return compiler.digest(_build or (_runnable() or compiler.INSTRUCTION_SETS)[0])


def operand_names(call: str, mode: int = 0) -> tuple[str, ...]:
    """Return the names of a call's operands in order, from the table in operands.h.

    `call` is one of CALLS. `mode` is its attribute of this name, whose bits say which optional
    operands it has. Raises RuntimeError before the library is loaded.
    """
    if _library is None:
        raise RuntimeError("native kernels are used before they are loaded: a bug in jaxembed")
    operand = _library.jaxembed_operand
    operand.restype, operand.argtypes = ctypes.c_char_p, (ctypes.c_char_p, *[ctypes.c_int64] * 2)
    names: list[str] = []
    while name := operand(call.encode(), mode, len(names)):
        names.append(name.decode())
    return tuple(names)


def _runnable() -> tuple[Build, ...]:
    """Return the builds whose CPU features this CPU has, the fastest first. The result is empty if
    the system does not list the features."""
    try:
        lines = CPU.read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(build for build in compiler.INSTRUCTION_SETS if build.cpu_flags <= flags)


def _opened(build: Build, cache_dir: Path) -> ctypes.CDLL:
    """Check a library in another process, then load it: the prebuilt one if it is up to date,
    otherwise one compiled into `cache_dir`. Raises NativeUnavailable or OSError."""
    # a prebuilt library holds the digest of its sources, which may have changed since in a checkout
    source_hash = compiler.digest(build).encode()
    try:
        is_prebuilt = source_hash in build.built.read_bytes()
    except OSError:
        is_prebuilt = False
    path = build.built if is_prebuilt else _compiled(build, cache_dir)
    # The library's check runs in another process, so that a crash does not end the server. -I
    # keeps Python from importing a ctypes.py of the working directory, and -S leaves out the site
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
    """Compile a library into the cache directory, unless it is there, and return its path. Raises
    NativeUnavailable if that fails, or if others can change the directory or the library."""
    try:
        refuse_shared(cache_dir)
    except ConfigError as error:
        raise NativeUnavailable(str(error)) from error
    key_parts = [_header().read_bytes(), compiler.digest(build).encode()]
    key = hashlib.sha256(b"\0".join(key_parts)).hexdigest()[:16]
    # absolute, because the loader searches other folders for a bare name
    library = cache_dir.absolute() / f"native-{build.name}-{key}.so"
    if _is_compiled(library):
        return library
    try:
        make_private(cache_dir)
        with replacing(library) as partial:
            compiler.compile_library(build, partial)
            partial.chmod(0o700)  # whatever the umask: others must not change code that runs here
    except OSError as error:
        raise NativeUnavailable(f"cannot compile in {cache_dir}: {error.strerror}") from error
    return library


def _is_compiled(library: Path) -> bool:
    """Whether the compiled library exists. Raises NativeUnavailable for something else than a file,
    or if others can change it."""
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


def _register(library: ctypes.CDLL) -> None:
    """Register the library's functions with XLA.

    Raises NativeUnavailable if jaxlib's version does not suit the library, or refuses a function.
    """
    built_for = tuple(
        ctypes.c_int.in_dll(library, f"jaxembed_ffi_{part}").value for part in ("major", "minor")
    )
    try:
        header = _header().read_text()
    except OSError:
        header = ""  # then the versions are not compared
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
            jax.ffi.register_ffi_target(f"jaxembed_{name}", function, platform="cpu")
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or ["nothing"])[0][:200]
        raise NativeUnavailable(
            f"the installed jaxlib refuses the native kernels: {line}"
        ) from error


def _header() -> Path:
    return Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
