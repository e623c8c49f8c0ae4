"""Loads the native kernels into the process and registers them with XLA; loads native means.

A library comes with the package; a source checkout without one compiles it into the cache
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
from jaxembed.models.native.compiler import Build, Unavailable
from jaxembed.platform.cache_folder import OTHERS_WRITE, ROOT, make_private, refuse_shared
from jaxembed.platform.files import replacing

logger = logging.getLogger(__name__)

CPU = Path("/proc/cpuinfo")
CHECK_S = 20.0  # time limit
CALLS = ("linear", "attention", "joint_attention", "self_attention", "mlp")
FAULTS = {  # the meaning of what jaxembed_check in check.h returns
    2: "the system does not let this process use AMX",
    3: "there was no memory for the check",
    4: "what was compiled gives wrong numbers on this machine",
}


class NativeMeans:
    """Means of table rows by means.c, for which other threads do not wait: no interpreter lock is
    held. Threads may share it."""

    def __init__(self, library: ctypes.CDLL):
        """Raises AttributeError if the library is another one."""
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._means = library.jaxembed_means
        self._means.restype = None
        self._means.argtypes = (pointer, size, size, pointer, pointer, size, size, pointer)

    def __call__(
        self, table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, block: int
    ) -> np.ndarray:
        """What `numpy_means` of models/static.py gives, bit for bit. Raises ValueError for a slot
        beyond the ids."""
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
_build: Build | None = None  # of the library
_means: NativeMeans | None = None


def load_library(cache_dir: Path) -> None:
    """Load the kernels and register them with XLA; further calls do nothing.

    A library that must be compiled here is kept in `cache_dir`. The first library serves the whole
    process, because XLA refuses another of the same name. Raises Unavailable if the machine has no
    kernels.
    """
    global _library, _build
    reasons: list[str] = []
    with _loading:
        if _library is not None:
            return
        for build in _runnable():  # the fastest first
            try:
                library = _opened(build, cache_dir)
                if library.jaxembed_prepare():
                    raise Unavailable(FAULTS[2])
                _register(library)
            except OSError as error:
                reasons.append(f"cannot read {error.filename}: {error.strerror}")
            except Unavailable as error:
                reasons.append(str(error))
            else:
                _library, _build = library, build
                return
        raise Unavailable(
            "; ".join(dict.fromkeys(reasons))
            or "this CPU has no AVX512_BF16, or the system does not say so"
        )


def load_means(cache_dir: Path) -> NativeMeans:
    """Load the means of table rows; further calls return the same. They need no XLA, and any CPU
    runs them.

    A library that must be compiled here is kept in `cache_dir`. Raises Unavailable if that fails.
    """
    global _means
    with _loading:
        if _means is None:
            try:
                _means = NativeMeans(_opened(compiler.MEANS, cache_dir))
            except OSError as error:
                raise Unavailable(f"cannot read {error.filename}: {error.strerror}") from error
        return _means


def source_digest() -> str:
    """A hash of the sources of the kernels that are loaded, or that this CPU would load."""
    runnable = _runnable() or compiler.INSTRUCTION_SETS
    return compiler.digest(_build or runnable[0])


def operand_names(call: str, mode: int = 0) -> tuple[str, ...]:
    """The names of a call's operands in order, from the table in operands.h.

    `call` is one of CALLS, `mode` its attribute of that name. Raises RuntimeError before the
    library is loaded.
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
    """The instruction sets whose features this CPU has, as far as the system tells."""
    try:
        lines = CPU.read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(one for one in compiler.INSTRUCTION_SETS if one.cpu_flags <= flags)


def _opened(build: Build, cache_dir: Path) -> ctypes.CDLL:
    """Check a library in another process and load it. Raises Unavailable or OSError."""
    # whether the package holds a library that was built from the sources that it holds: in a
    # checkout they may have changed since the build
    made_of = compiler.digest(build).encode()
    try:
        ahead = made_of in build.built.read_bytes()
    except OSError:
        ahead = False
    path = build.built if ahead else _compiled(build, cache_dir)
    # The library's own check runs in another process, so that a crash does not end the server: an
    # isolated one (-I), or Python would import a ctypes.py of the working directory. It needs only
    # the standard library, and so no site packages (-S).
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(path)!r}).jaxembed_check())"
    try:
        command = [sys.executable, "-I", "-S", "-c", code]
        if status := compiler.run_command(command, CHECK_S).returncode:
            crash = f"{path} does not run on this machine: exit status {status}"
            raise Unavailable(FAULTS.get(status, crash))
        library = ctypes.CDLL(str(path))
    except (OSError, Unavailable) as error:  # such as a truncated file
        if not ahead:  # the next start compiles it again
            with suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            raise Unavailable(f"cannot load {path}: {error}") from error
        raise
    logger.info("native code: %s", path)
    return library


def _compiled(build: Build, cache_dir: Path) -> Path:
    """Compile a library into the cache directory, unless it is there. Returns its path."""
    try:
        refuse_shared(cache_dir)
    except ConfigError as error:
        raise Unavailable(str(error)) from error
    parts = [_header().read_bytes(), compiler.digest(build).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    # absolute, because the loader searches other folders for a bare name
    library = cache_dir.absolute() / f"native-{build.name}-{key}.so"
    if _is_kept(library):
        return library
    try:
        make_private(cache_dir)
        with replacing(library) as partial:
            compiler.compile_library(build, partial)
            partial.chmod(0o700)  # whatever the umask: others must not change code that runs here
    except OSError as error:
        raise Unavailable(f"cannot compile in {cache_dir}: {error.strerror}") from error
    return library


def _is_kept(library: Path) -> bool:
    """Whether a compiled library exists. Raises Unavailable if others could have changed it."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode):
        raise Unavailable(f"{library} is a link or no file; remove it")
    if status.st_uid not in (os.geteuid(), ROOT) or status.st_mode & OTHERS_WRITE:
        of = f"belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        raise Unavailable(f"{library} {of}: others can change what would run here; remove it")
    return True


def _register(library: ctypes.CDLL) -> None:
    """Register the calls with XLA.

    Raises Unavailable if jaxlib is too old for the library, or refuses its calls.
    """
    built_for = tuple(
        ctypes.c_int.in_dll(library, f"jaxembed_ffi_{part}").value for part in ("major", "minor")
    )
    try:
        text = _header().read_text()
    except OSError:
        text = ""
    versions = re.findall(r"^#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)$", text, re.MULTILINE)
    installed = tuple(map(int, versions)) if len(versions) == 2 else ()
    if installed and (installed[0] != built_for[0] or installed < built_for):
        ours, theirs = (".".join(map(str, version)) for version in (built_for, installed))
        raise Unavailable(
            f"the native kernels were built for XLA FFI {ours}, the installed jaxlib has {theirs}: "
            "upgrade jaxlib, or build jaxembed with this one"
        )
    try:
        for name in CALLS:
            entry = jax.ffi.pycapsule(getattr(library, f"jaxembed_{name}"))
            jax.ffi.register_ffi_target(f"jaxembed_{name}", entry, platform="cpu")
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or ["nothing"])[0][:200]
        raise Unavailable(
            f"the installed jaxlib does not take the native kernels: {line}"
        ) from error


def _header() -> Path:
    return Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
