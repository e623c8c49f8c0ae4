"""Keeps freed memory in huge pages for XLA's next run, or returns it to the system. It works only
with glibc.

At every run of a CPU program, XLA allocates the temporaries again, 10 to 100 MB in one block. glibc
maps and unmaps such a block each time, and the page faults take a tenth to a third of the run.
"""

import ctypes
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KIB = 1024
MIB = 1024 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
# Bytes. A larger block of a heap other than the kept one gets a separate mapping, which returns to
# the system when the block is freed. The free end of such a heap, up to 64 MB, never returns.
MMAP_THRESHOLD = 4 * MIB
ADAPTED_THRESHOLD = 32 * MIB  # to which glibc may raise the mmap threshold by itself
MMAP_MAX = 65536  # glibc's default
# Heaps per core, which is glibc's default, and heaps of the process, because `in_kept_heap` may
# start a thread for each.
HEAPS_A_CORE, MAX_HEAPS = 8, 64
SPARE_BYTES = 64 * MIB  # of the kept heap that other threads can use while `trim` holds the rest
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
GROWTH_BYTES = 128 * MIB  # by which the process grows before Trimmer returns freed memory
STATM = Path("/proc/self/statm")
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
CGROUP_FILES = "memory.max", "memory.current"
PROBE = 4 * MIB  # bytes: larger than any free block below the kept heap; never written to


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h. Its last field is the free top of the main thread's heap."""

    _fields_ = (("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t))


kept = range(0)  # addresses of the heap that `keep` made for the whole process


def keep() -> bool:
    """Make the main thread's heap large, in huge pages, so that memory freed there stays mapped.

    The heap reserves address space of half the machine's memory, but takes memory only as it is
    used. This changes the whole process for good, so a program may call it at its start, but a
    library must not. Returns whether freed memory is kept; if not, `reason_not_kept` says why.
    """
    global kept
    if kept:
        return True
    libc = _glibc()
    if libc is None or _is_counted():
        return False
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    libc.mallopt(M_ARENA_MAX, min(HEAPS_A_CORE * (os.cpu_count() or 1), MAX_HEAPS))
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    libc.mallopt(M_MMAP_MAX, 0)  # allocate in the heap, not in a separate mapping
    start = libc.malloc(size)
    libc.mallopt(M_MMAP_MAX, MMAP_MAX)
    if start is None:
        return False
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never shrink the heap when memory is freed
    _advise(libc, start, size, mmap.MADV_HUGEPAGE)
    libc.free(start)
    if not _is_kept(libc, range(start, start + size)):
        # The block got a separate mapping. Set the thresholds that glibc itself may adapt to.
        libc.mallopt(M_MMAP_THRESHOLD, ADAPTED_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * ADAPTED_THRESHOLD)
        return False
    kept = range(start, start + size)
    return True


def reason_not_kept() -> str | None:
    """Return a message that says why freed memory is not kept; None if it is kept."""
    if kept:
        return None
    if _glibc() is None:
        return "it needs Linux with glibc 2.33 or later"
    if _is_counted():
        return "address space is limited (`ulimit -v`, or vm.overcommit_memory=2)"
    return "GLIBC_TUNABLES sets glibc.malloc, or jaxembed.memory.keep() was not called"


def _is_counted() -> bool:
    """Return whether the system limits address space, by ulimit or by vm.overcommit_memory=2. If it
    does, `keep` must not reserve any."""
    import resource  # not available on Windows

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        return OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False


def in_kept_heap(work: Callable[[], object]) -> None:
    """Call `work` in a thread that allocates from the heap that `keep` made, and wait for it.

    glibc gives each new thread another heap. When glibc has made the maximum number of heaps, it
    gives out the heap of the main thread again, which `keep` made large. So this function starts
    threads until one gets that heap. If no thread gets it, or no memory is kept, the current thread
    calls `work`. With one heap for all threads, tokenizing in two would take three times as long.
    """
    libc = _glibc()
    if libc is None or not kept or _is_kept(libc, kept):
        work()
        return
    heap_found, attempts = threading.Event(), threading.Semaphore(0)
    inside: list[threading.Thread] = []  # the thread that has the kept heap, once it is found

    def attempt() -> None:
        if not inside and _is_kept(libc, kept):
            inside.append(threading.current_thread())
        attempts.release()
        if threading.current_thread() in inside:
            work()
        else:
            heap_found.wait()  # if this thread ended, the next one would get its heap

    for _ in range(2 * MAX_HEAPS):
        threading.Thread(target=attempt, name=threading.current_thread().name, daemon=True).start()
        attempts.acquire()
        if inside:
            break
    heap_found.set()
    if inside:
        inside[0].join()
    else:
        work()


def trim() -> None:
    """Return freed memory to the system.

    glibc itself keeps freed memory that lies below memory in use: 700 MB after loading a model of
    1.2 GB, and 20 to 40 MB after each compilation.
    """
    libc = _glibc()
    if libc is None:
        return
    if not kept:
        libc.malloc_trim(0)
        return
    libc.malloc_trim(len(kept))  # returns all but the top of the heap, which must stay mapped
    # Take the free top as a block and return its pages; its addresses stay mapped.
    size = libc.mallinfo2().keepcost - SPARE_BYTES
    top = libc.malloc(size) if size > MMAP_THRESHOLD else None
    if top is not None:
        if top in kept:
            _advise(libc, top, size, mmap.MADV_DONTNEED)
        libc.free(top)


class Trimmer:
    """Returns freed memory to the system when the process has grown by GROWTH_BYTES since the last
    time, for example after a burst of large images."""

    def __init__(self) -> None:
        self._baseline = resident_bytes()

    def run(self) -> None:
        """Return freed memory if the process has grown by GROWTH_BYTES. Call this while no request
        runs, because it blocks allocations of all threads, for about 0.1 s at most."""
        now = resident_bytes()
        if now is None or self._baseline is None:
            return
        if now > self._baseline + GROWTH_BYTES:
            gc.collect()  # memory of refused requests may be in reference cycles
            trim()
            self._baseline = resident_bytes()
        else:
            self._baseline = min(now, self._baseline)


def resident_bytes(statm: Path | None = None) -> int | None:
    """Return the resident memory of a process in bytes; None if the system does not say. `statm` is
    its file in /proc (default: that of this process)."""
    with suppress(OSError, ValueError, IndexError):
        return int((statm or STATM).read_text().split()[1]) * mmap.PAGESIZE
    return None


def available_bytes() -> int | None:
    """Return how many more bytes of memory the process may take: the smaller of what is free on the
    machine and what its control group still allows. None if the system says neither."""
    limits = []
    with suppress(OSError, ValueError, IndexError):
        lines = MEMINFO.read_text().splitlines()
        (line,) = [text for text in lines if text.startswith("MemAvailable:")]
        limits.append(int(line.split()[1]) * KIB)
    with suppress(OSError, ValueError):  # ValueError for "max", which means no limit
        limit, used = (int((CGROUP / name).read_text()) for name in CGROUP_FILES)
        limits.append(max(limit - used, 0))
    return min(limits, default=None)


def _glibc() -> Any:
    """Return the C library if it is glibc 2.33 or later, else None."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallinfo2"):  # musl and older glibc lack it
        return None
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallinfo2.restype = _MallocInfo
    return libc


def _is_kept(libc: Any, heap: range) -> bool:
    """Return whether this thread allocates from the heap at these addresses."""
    block = libc.malloc(PROBE)
    libc.free(block)
    return block is not None and block in heap


def _advise(libc: Any, start: int, size: int, advice: int) -> None:
    """Call madvise with `advice` for the whole pages within `size` bytes from `start`. A refusal by
    the system is ignored."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    libc.madvise(first, last - first, advice)
