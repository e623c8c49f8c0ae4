"""Reads which cores the process may use, and what a quota leaves of them."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> set[int]:
    """The cores that the process may run on. XLA starts a thread for each on a CPU."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota_cores() -> float | None:
    """The number of cores that the quota of the control group allows; None without a quota.

    The least quota of the group and those above it counts, of version 1 or 2.
    """
    quotas = [quota for group in _control_groups() if (quota := _quota_of(group)) is not None]
    return min(quotas, default=None)


def core_count() -> float:
    """The number of cores that the process may keep busy: those it may run on, or its quota."""
    cores = float(len(usable_cores()))
    quota = quota_cores()
    return cores if quota is None else min(cores, quota)


def throttled_s() -> float | None:
    """Seconds for which quotas have stopped the process; None if the system does not count them."""
    seconds = []
    for group in _control_groups():
        stat = keyed(group / "cpu.stat")
        with suppress(KeyError, ValueError):
            seconds.append(float(stat["throttled_usec"]) / 1e6)  # version 2
        with suppress(KeyError, ValueError):
            seconds.append(float(stat["throttled_time"]) / 1e9)  # version 1
    return sum(seconds) if seconds else None


def keyed(path: Path) -> dict[str, str]:
    """Parse a file of the kernel: the first word of each line is the key, the second the value."""
    words = (line.split() for line in text_of(path).splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}


def text_of(path: Path) -> str:
    """The content of a file of the kernel; empty if the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota_of(group: Path) -> float | None:
    """The quota of a control group in cores; None without one."""
    quota, _, period = text_of(group / "cpu.max").strip().partition(" ")  # version 2
    if not quota:
        quota = text_of(group / "cpu.cfs_quota_us").strip()  # version 1
        period = text_of(group / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", or -1
        return None
    return int(quota) / int(period)


def _control_groups() -> Iterator[Path]:
    """The folders of the process's control group for the CPU and of those above it."""
    root, path = CGROUPS, ""
    for line in text_of(PROC / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if "cpu" in controllers.split(","):  # version 1
            root, path = CGROUPS / "cpu", group
            break
        if not controllers:  # version 2
            path = group
    folder = root / path.lstrip("/")
    if not folder.is_dir():  # a container may see its own group as the root
        folder = root
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder
