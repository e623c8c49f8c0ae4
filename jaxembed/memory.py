"""Keeps freed memory for XLA's next run, in huge pages, or gives it back. Of glibc; else nothing.

XLA takes the temporaries of a CPU program, 10 to 100 MB in one piece, anew at every run. glibc maps
and unmaps such a piece each time, and faulting its pages in takes a tenth to a third of the time.
"""

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIB = 1024
MIB = 1024 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
MMAP_THRESHOLD = 32 * MIB  # where glibc's own adapting ends (DEFAULT_MMAP_THRESHOLD_MAX)
MMAP_MAX = 65536  # glibc's default
HEAPS_A_CORE, MOST_HEAPS = 8, 64  # glibc's default, and enough; `in_kept_heap` may try them all
SPARE_BYTES = 64 * MIB  # of the heap, for whoever allocates while `trim` holds the rest
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
PROBE = 4 * MIB  # more than is free in what lies below the kept heap; not touched


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h, whose last field is the free top of the main thread's heap."""

    _fields_ = (("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t))


kept = range(0)  # addresses of the heap that `keep` made; of the whole process, as the heap is


def keep() -> bool:
    """Make the main thread's heap large, in huge pages, and keep what is freed there for reuse.

    It takes half as much address space as there is memory, and memory as it is used. That holds for
    the whole process and for good: a program's to call, at its start, not a library's. Returns
    whether it is done: not without glibc 2.33, nor where address space is limited or the system
    counts it as memory.
    """
    global kept
    if kept:
        return True
    libc = _glibc()
    if libc is None or _is_counted():
        return False
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    libc.mallopt(M_ARENA_MAX, min(HEAPS_A_CORE * (os.cpu_count() or 1), MOST_HEAPS))
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    libc.mallopt(M_MMAP_MAX, 0)  # from the heap, not mapped on its own
    start = libc.malloc(size)
    libc.mallopt(M_MMAP_MAX, MMAP_MAX)
    if start is None:
        return False
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    _advise(libc, start, size, mmap.MADV_HUGEPAGE)
    libc.free(start)
    if not _is_kept(libc, range(start, start + size)):  # it was mapped on its own after all
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD)
        return False
    kept = range(start, start + size)
    return True


def reason_not_kept() -> str | None:
    """Why there is no heap that freed memory is kept in; None where there is one."""
    if kept:
        return None
    if _glibc() is None:
        return "it needs Linux with glibc 2.33 or later"
    if _is_counted():
        return "address space is limited (`ulimit -v`, or vm.overcommit_memory=2)"
    return "GLIBC_TUNABLES sets glibc.malloc, or nobody called jaxembed.memory.keep()"


def _is_counted() -> bool:
    """Whether address space is limited, or promised only as far as there is memory, which is
    vm.overcommit_memory=2."""
    import resource  # there is none on Windows

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        return OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False


def in_kept_heap(work: Callable[[], object]) -> None:
    """Call it where memory comes from the heap that `keep` made: if need be in another thread.

    glibc gives each new thread a heap of its own, and begins again with the main thread's when
    there are as many as it may have. One heap for all threads would do too, but two that tokenize
    would take three times as long.
    """
    libc = _glibc()
    if libc is None or not kept or _is_kept(libc, kept):
        work()
        return
    found, tried = threading.Event(), threading.Semaphore(0)
    inside: list[threading.Thread] = []

    def attempt() -> None:
        if not inside and _is_kept(libc, kept):
            inside.append(threading.current_thread())
        tried.release()
        if threading.current_thread() in inside:
            work()
        else:
            found.wait()  # a heap that is given back is the next to be given out

    for _ in range(2 * MOST_HEAPS):
        name = threading.current_thread().name
        threading.Thread(target=attempt, name=name, daemon=True).start()
        tried.acquire()
        if inside:
            break
    found.set()
    if inside:
        inside[0].join()
    else:
        work()


def trim() -> None:
    """Return freed memory to the system.

    glibc keeps all that lies below memory still in use: of a model of 1.2 GB 700 MB after loading,
    and 20 to 40 MB after each compilation.
    """
    libc = _glibc()
    if libc is None:
        return
    if not kept:
        libc.malloc_trim(0)
        return
    libc.malloc_trim(len(kept))  # all but the top of the heap, which must stay mapped
    size = libc.mallinfo2().keepcost - SPARE_BYTES
    top = libc.malloc(size) if size > MMAP_THRESHOLD else None
    if top is not None:
        if top in kept:
            _advise(libc, top, size, mmap.MADV_DONTNEED)
        libc.free(top)


def _glibc() -> Any:
    """The C library, if it is glibc 2.33 or later."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallinfo2"):  # musl has none
        return None
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallinfo2.restype = _MallocInfo
    return libc


def _is_kept(libc: Any, heap: range) -> bool:
    """Whether this thread allocates from the heap."""
    block = libc.malloc(PROBE)
    libc.free(block)
    return block is not None and block in heap


def _advise(libc: Any, start: int, size: int, advice: int) -> None:
    """Of the whole pages within. A system without such pages refuses, and nothing is lost."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    libc.madvise(first, last - first, advice)
