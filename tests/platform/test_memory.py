"""Freed memory is used again, from one heap, without every run faulting its pages in anew."""

import mmap
import subprocess
import sys
from ast import literal_eval
from unittest.mock import Mock

import pytest

from jaxembed import memory

PIECE = 96 * memory.MIB  # more than glibc's heaps of single threads hold
WAVES = 5

# A process of its own: what is arranged holds for a process as a whole, and for good.
PROGRAM = f"""
import ctypes, resource, threading
from jaxembed import memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert memory.keep() and memory.keep()
libc = memory._glibc()
results = {{}}

def runs():
    def run():
        piece = libc.malloc({PIECE})
        ctypes.memset(piece, 1, {PIECE})
        libc.free(piece)
    run()
    before = faults()
    for _ in range({WAVES}):
        run()
    results["faults"] = (faults() - before) / {WAVES}
    results["resident"] = memory.resident_bytes()
    results["inside"] = memory._is_kept(libc, memory.kept)

others = threading.Event()
busy = [threading.Thread(target=others.wait, daemon=True) for _ in range(3)]
for thread in busy:
    thread.start()
thread = threading.Thread(target=lambda: memory.in_kept_heap(runs))
thread.start()
thread.join()
others.set()
memory.trim()
results["trimmed"] = memory.resident_bytes()
results["heap"] = memory.keep() and libc.malloc({PIECE}) in memory.kept
print(results)
"""


@pytest.fixture(name="nothing_kept", autouse=True)
def _nothing_kept(monkeypatch):
    """As in a process that did not ask yet: another test may have."""
    monkeypatch.setattr(memory, "kept", range(0))


def run(program: str):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return literal_eval(done.stdout)


glibc = pytest.mark.skipif(memory._glibc() is None, reason="the C library is not glibc")


@glibc
def test_a_thread_that_frees_and_takes_memory_again_faults_nothing_in():
    kept = run(PROGRAM)
    assert kept["inside"]
    assert kept["faults"] < 100  # a piece has 24,576 small pages, 48 large ones
    assert kept["resident"] - kept["trimmed"] > 0.9 * PIECE  # and trim still gives it back
    assert kept["heap"]  # to be taken from the same heap again


BURST = f"""
import ctypes, threading
from jaxembed import memory

assert memory.keep()
libc = memory._glibc()
trimmer = memory.Trimmer()
before = memory.resident_bytes()
freed, blocks = threading.Barrier(5), []

def burst():
    pieces = [libc.malloc({PIECE} // 8) for _ in range(3)]
    for piece in pieces:
        ctypes.memset(piece, 1, {PIECE} // 8)
    for piece in pieces:
        libc.free(piece)
    freed.wait()
    freed.wait()

threads = [threading.Thread(target=burst) for _ in range(4)]
for thread in threads:
    thread.start()
freed.wait()
after_threads = memory.resident_bytes() - before
freed.wait()
for _ in range(4):  # of the main thread: between them are blocks that stay
    blocks.append(libc.malloc({PIECE}))
    ctypes.memset(blocks[-1], 1, {PIECE})
    libc.malloc(1000)
for block in blocks:
    libc.free(block)
burst_bytes = memory.resident_bytes() - before
trimmer.run()
trimmed = memory.resident_bytes() - before
print([after_threads, burst_bytes, trimmed])
"""


@glibc
def test_what_a_burst_took_goes_back_to_the_system():
    after_threads, burst, trimmed = run(BURST)
    assert after_threads < PIECE // 8  # each of four threads took three times that
    assert burst > 3 * PIECE
    assert trimmed < PIECE + memory.SPARE_BYTES


def test_what_is_resident_is_the_second_number_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "STATM", tmp_path / "statm")
    assert memory.resident_bytes() is None
    (tmp_path / "statm").write_text("900 7 3 1 0 5 0\n")
    assert memory.resident_bytes() == 7 * mmap.PAGESIZE


def test_a_process_that_has_not_grown_is_not_trimmed(monkeypatch):
    sizes = iter([100, 90, 90 + memory.GROWTH_BYTES, 91 + memory.GROWTH_BYTES, 95, 96])
    monkeypatch.setattr(memory, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(memory, "trim", trim := Mock())
    trimmer = memory.Trimmer()
    for expected in (0, 0, 1, 1):
        trimmer.run()
        assert trim.call_count == expected


def test_where_nothing_can_be_kept_nothing_is_done(monkeypatch, tmp_path):
    called = []
    with monkeypatch.context() as patch:  # address space counts as memory
        (tmp_path / "overcommit_memory").write_text("2\n")
        patch.setattr(memory, "OVERCOMMIT", tmp_path / "overcommit_memory")
        assert not memory.keep()
        assert not memory.kept
    with monkeypatch.context() as patch:
        patch.setattr(memory.ctypes, "CDLL", lambda name: object())  # musl, an old glibc
        assert not memory.keep()
        memory.trim()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep()
    memory.trim()
    memory.in_kept_heap(lambda: called.append(1))
    assert called == [1]


@glibc
def test_why_nothing_is_kept(monkeypatch):
    for name, value, reason in (
        ("_is_counted", lambda: True, "ulimit -v"),
        ("_is_counted", lambda: False, "GLIBC_TUNABLES"),
        ("_glibc", lambda: None, "glibc 2.33"),
    ):
        monkeypatch.setattr(memory, name, value)
        assert reason in (memory.reason_not_kept() or "")
    monkeypatch.setattr(memory, "kept", range(1, 2))
    assert memory.reason_not_kept() is None


def test_what_is_available_is_the_least_of_system_and_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert memory.available_bytes() == 500 * memory.KIB
    (tmp_path / "memory.current").write_text("1000\n")
    for most, wanted in (("max", 500 * memory.KIB), ("3000", 2000), ("900", 0)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert memory.available_bytes() == wanted
