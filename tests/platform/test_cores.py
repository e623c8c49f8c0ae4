"""Cores that the process may use, and the share of them that it got while it was measured."""

import os
import time
from collections.abc import Callable

import pytest

from jaxembed.platform import cores
from jaxembed.platform.cores import CpuTimes, core_count, quota_cores, throttled_s, timed

Write = Callable[[str, str], None]


@pytest.fixture(name="system")
def _system(tmp_path, monkeypatch) -> Write:
    """A /proc and control groups of the test's own: `write(name, text)`."""
    monkeypatch.setattr(cores, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    return write


VERSION_1 = "9:memory:/pod\n4:cpu,cpuacct:/pod/a\n0::/\n"
VERSION_2 = "0::/pod/a\n"


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("", {}, None),
        (VERSION_2, {"pod/a/cpu.max": "max 100000"}, None),
        (VERSION_2, {"pod/a/cpu.max": "150000 100000"}, 1.5),
        (VERSION_2, {"pod/a/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 0.5),
        (VERSION_2, {"cpu.max": "300000 100000"}, 3.0),  # in a container, where it is the root
        (VERSION_2, {"pod/a/cpu.max": "nonsense"}, None),
        (VERSION_1, {"cpu/pod/a/cpu.cfs_quota_us": "-1"}, None),
        (VERSION_1, {"cpu/pod/a/cpu.cfs_quota_us": "250000"}, 2.5),
        (VERSION_1, {"pod/a/cpu.max": "150000 100000"}, None),
    ],
)
def test_the_quota_is_the_least_of_the_groups_of_either_version(system, groups, files, wanted):
    system("proc/self/cgroup", groups)
    for name, text in files.items():
        system(f"cgroup/{name}", text + "\n")
        if name.endswith("cpu.cfs_quota_us"):
            system(f"cgroup/{name.replace('quota', 'period')}", "100000\n")
    assert quota_cores() == wanted


def test_a_quota_limits_the_cores_and_gives_none(system, monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: {0, 3})
    assert core_count() == 2
    system("proc/self/cgroup", "0::/\n")
    for quota, count in ((150_000, 1.5), (800_000, 2)):
        system("cgroup/cpu.max", f"{quota} 100000\n")
        assert core_count() == count


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot be pinned here")
def test_cores_that_the_process_may_not_run_on_do_not_count(system):
    usual = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(usual)})
        assert core_count() == 1
    finally:
        os.sched_setaffinity(0, usual)


@pytest.mark.parametrize(
    ("groups", "name", "text"),
    [
        (VERSION_2, "cgroup/pod/a/cpu.stat", "usage_usec 9\nthrottled_usec 2500000\n"),
        (VERSION_1, "cgroup/cpu/pod/a/cpu.stat", "nr_periods 9\nthrottled_time 2500000000\n"),
    ],
)
def test_the_time_that_a_quota_stopped_the_process_is_of_either_version(system, groups, name, text):
    system("proc/self/cgroup", groups)
    assert throttled_s() is None
    system(name, text)
    assert throttled_s() == 2.5


def test_what_the_threads_of_the_process_waited_for_cores_is_counted(system, monkeypatch):
    assert timed(lambda: None)[1].waited == 0.0  # where nobody counts it
    clock, cpu = iter([10.0, 10.5]), iter([3.0, 3.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: next(cpu))
    system("proc/self/task/7/schedstat", "90 1000000000 4\n")
    system("proc/self/task/8/schedstat", "90 5000000000 4\n")
    system("proc/self/task/9/schedstat", "")  # of a thread that ends meanwhile

    def work() -> str:
        system("proc/self/task/7/schedstat", "90 1250000000 5\n")
        system("proc/self/task/8/schedstat", "")
        system("proc/self/task/10/schedstat", "90 125000000 1\n")
        return "done"

    assert timed(work) == ("done", CpuTimes(wall=0.5, cpu=0.25, waited=0.375))


@pytest.mark.parametrize(
    ("times", "waited", "lost"),
    [
        # a program on two cores: alone, beside one that loops, beside six
        (CpuTimes(0.012, 0.0235, 0.0001), 0.0, 0.0),
        (CpuTimes(0.041, 0.0246, 0.059), 0.7, 0.7),
        (CpuTimes(0.2, 0.026, 0.328), 0.93, 0.93),
        # two programs at once that wait for each other
        (CpuTimes(0.005, 0.0095, 0.006), 0.39, 0.05),
        # stopped by a quota of two cores: the process has all of what it may use
        (CpuTimes(0.1, 0.2, 0.3), 0.6, 0.0),
        # on another device, where the host has little to do
        (CpuTimes(0.1, 0.002, 0.002), 0.02, 0.02),
        (CpuTimes(0.0, 0.0, 0.0), 0.0, 0.0),
    ],
)
def test_the_share_of_the_cores_that_others_had(times, waited, lost):
    assert times.waited_share == pytest.approx(waited, abs=0.01)
    assert times.lost_share(2.0) == pytest.approx(lost, abs=0.01)
    assert times + CpuTimes(0.0, 0.0, 0.0) == times
