"""What the process has of its machine, and how much of it is used. Asks the kernel; nothing is kept
busy for it."""

import os
import sys
import time
from functools import cache
from pathlib import Path

from jaxembed import memory
from jaxembed.doctor.facts import MachineFacts

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# Fields of a core's line in /proc/stat, in ticks. Time of guests is in the first two as well.
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 1, 2, 3, 6, 7, 8


def machine_facts() -> MachineFacts:
    """What the process may use."""
    return MachineFacts(
        cores=len(usable_cores()),
        machine_cores=os.cpu_count() or 1,
        quota_cores=_quota_cores(),
        kept_bytes=len(memory.kept),
        not_kept=memory.reason_not_kept(),
        huge_pages=_huge_pages(),
    )


def machine_counts() -> dict[str, float]:
    """Seconds since some start in the past: `cpu` of this process, `loop` of the calling thread,
    `busy` of the cores that the process may use, `throttled` by its quota. What the system does not
    tell is missing."""
    counts = {"cpu": time.process_time(), "loop": time.thread_time()}
    if (busy_s := _busy_s()) is not None:
        counts["busy"] = busy_s
    if "throttled_usec" in (stat := _keyed(_cgroup() / "cpu.stat")):
        counts["throttled"] = float(stat["throttled_usec"]) / 1e6
    return counts


def usable_cores() -> set[int]:
    """The cores that the process may run on."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@cache
def has_avx512_bf16() -> bool:
    """Whether the CPU says that it multiplies bfloat16."""
    return "avx512_bf16" in _text(PROC / "cpuinfo")


def _busy_s() -> float | None:
    """Of the usable cores. What runs at a lower priority gives way, and does not count, unless this
    process has a lower one too."""
    if sys.platform != "linux":
        return None
    fields = [_USER, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL]
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        fields.append(_NICE)
    cores = {f"cpu{core}" for core in usable_cores()}
    try:
        with (PROC / "stat").open() as lines:
            ours = [line.split() for line in lines if line.split(" ", 1)[0] in cores]
    except OSError:
        return None
    ticks = sum(int(line[field]) for line in ours for field in fields)
    return ticks / os.sysconf("SC_CLK_TCK")


def _quota_cores() -> float | None:
    quota, _, period = _text(_cgroup() / "cpu.max").strip().partition(" ")
    return float(quota) / float(period) if quota.isdigit() and period.isdigit() else None


@cache
def _cgroup() -> Path:
    """The directory of the process's control group, of version 2."""
    for line in _text(PROC / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            folder = CGROUPS / line.removeprefix("0::/")
            return folder if folder.is_dir() else CGROUPS
    return CGROUPS


def _huge_pages() -> str | None:
    if _keyed(PROC / "self" / "status").get("THP_enabled:") == "0":
        return "off for this process"
    chosen = [word for word in _text(HUGE_PAGES).split() if word.startswith("[")]
    return chosen[0].strip("[]") if chosen else None


def _keyed(path: Path) -> dict[str, str]:
    """The first two words of each line."""
    words = (line.split() for line in _text(path).splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}


def _text(path: Path) -> str:
    """Of a file of the kernel; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
