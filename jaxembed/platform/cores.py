"""Reads the CPU's identity, the cores that the process may use, and how long threads wait for a
core."""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

# A measurement with a larger `waited_share` or `lost_share` was disturbed by other programs. On two
# idle cores the shares were 0.00 for a large product, up to 0.2 for small calls and 0.02 to 0.25
# for batches. Beside one busy program they were 0.4 to 0.8, beside six 0.9.
MAX_WAITED = 1 / 3

Result = TypeVar("Result")


def usable_cores() -> set[int]:
    """Return the ids of the cores that the process may run on. XLA:CPU starts a thread for each."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def host_id() -> str:
    """Return a hash of the CPU's model and features, which identifies this kind of host.

    Hosts that share a home directory may differ in speed, and may not run each other's compiled
    programs.
    """
    lines = read_or_empty(Path("/proc/cpuinfo")).splitlines()
    traits = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    identity = "\n".join([platform.machine(), *sorted(traits)]).encode()
    return hashlib.sha256(identity).hexdigest()[:12]


def quota_cores() -> float | None:
    """Return the number of cores that quotas of control groups allow, or None without a quota.

    It is the smallest quota of the process's control group and the groups above that one, in
    version 1 or 2 of control groups.
    """
    quotas = []
    for group in _control_groups():
        quota, _, period = read_or_empty(group / "cpu.max").strip().partition(" ")  # version 2
        if not quota:
            quota = read_or_empty(group / "cpu.cfs_quota_us").strip()  # version 1
            period = read_or_empty(group / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # no quota: "max", or -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def core_count() -> float:
    """Return the number of cores that the process may keep busy: the number of its usable cores, or
    its CPU quota if that is less."""
    cores, quota = float(len(usable_cores())), quota_cores()
    return cores if quota is None else min(cores, quota)


def throttled_s() -> float | None:
    """Return the seconds for which CPU quotas have stopped the process; None if the system has no
    such count."""
    seconds = []
    for group in _control_groups():
        stat = read_keyed(group / "cpu.stat")
        # version 2 counts in microseconds, version 1 in nanoseconds
        for key, units_per_second in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            with suppress(KeyError, ValueError):
                seconds.append(float(stat[key]) / units_per_second)
    return sum(seconds) if seconds else None


@dataclass(frozen=True)
class CpuTimes:
    """How long some work took, and how long threads ran and waited meanwhile, in seconds.

    `cpu` and `waited` are sums over all threads of the process.
    """

    wall: float = 0.0  # elapsed time
    cpu: float = 0.0  # time in which a thread ran on a core
    waited: float = 0.0  # time in which a runnable thread had no core; 0 if nothing counts it

    @property
    def waited_share(self) -> float:
        """The share of runnable time (threads ran or waited for a core) in which threads waited."""
        return self._share(self.waited)

    def lost_share(self, cores: float) -> float:
        """Return the share of runnable time in which threads waited because of other programs.

        `cores` is the number of cores that the process may use. While the process keeps all these
        cores busy, its threads wait for each other, and such time is not counted.
        """
        return self._share(min(self.waited, max(cores * self.wall - self.cpu, 0.0)))

    def _share(self, waited: float) -> float:
        """Return `waited` over the runnable time, or over the elapsed time if that is longer."""
        # If an accelerator does most of the work, the runnable time is so short that the share of
        # it would mislead.
        return waited / max(self.cpu + waited, self.wall, 1e-9)

    def __add__(self, other: "CpuTimes") -> "CpuTimes":
        return CpuTimes(self.wall + other.wall, self.cpu + other.cpu, self.waited + other.waited)


def timed(work: Callable[[], Result]) -> tuple[Result, CpuTimes]:
    """Call `work`, and return its result and its times. Raises the errors of `work`."""
    waited_before = _waited_ns()
    cpu_before, began_at = time.process_time(), time.perf_counter()
    result = work()
    wall, cpu = time.perf_counter() - began_at, time.process_time() - cpu_before
    waited_ns = sum(
        max(ns - waited_before.get(thread, 0), 0) for thread, ns in _waited_ns().items()
    )
    return result, CpuTimes(wall, cpu, waited_ns / 1e9)


def read_keyed(path: Path) -> dict[str, str]:
    """Parse a file of the Linux kernel into a dict. The first word of each line is the key, and the
    second word is the value. The dict is empty if the file cannot be read."""
    words = (line.split() for line in read_or_empty(path).splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}


def read_or_empty(path: Path) -> str:
    """Return the content of a file of the Linux kernel, or "" if the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _waited_ns() -> dict[str, int]:
    """Return the nanoseconds that each thread of the process has waited for a core, by thread id.

    Only Linux counts them (proc_pid_schedstat(5): time spent waiting on a runqueue); elsewhere the
    result is empty. The time for which a CPU quota stops a thread is included.
    """
    try:
        threads = os.listdir(PROC / "self" / "task")
    except OSError:
        return {}
    waited: dict[str, int] = {}
    for thread in threads:
        with suppress(IndexError, ValueError):  # the thread has ended, or the kernel does not count
            waited[thread] = int(
                read_or_empty(PROC / "self" / "task" / thread / "schedstat").split()[1]
            )
    return waited


def _control_groups() -> Iterator[Path]:
    """Yield the folders of the process's CPU control group and of the groups above it."""
    root, path = CGROUPS, ""
    for line in read_or_empty(PROC / "self" / "cgroup").splitlines():
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
