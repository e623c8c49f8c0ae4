"""Reads which cores and memory settings the process has, and how busy its cores are."""

import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from jaxembed import memory
from jaxembed.platform import cores
from jaxembed.runtime.diagnostics.facts import MachineFacts

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# The indices of fields, which count ticks, in a core's line of /proc/stat. The first two of these
# fields include the time of guests.
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 1, 2, 3, 6, 7, 8


def machine_facts() -> MachineFacts:
    """Read the cores and memory settings of this process."""
    # Linux puts the setting that is in force in brackets: "always [madvise] never".
    in_force = [word for word in cores.read_or_empty(HUGE_PAGES).split() if word.startswith("[")]
    huge_pages = in_force[0].strip("[]") if in_force else None
    if cores.read_keyed(cores.PROC / "self" / "status").get("THP_enabled:") == "0":
        huge_pages = "off for this process"
    return MachineFacts(
        cores=len(cores.usable_cores()),
        machine_cores=os.cpu_count() or 1,
        quota_cores=cores.quota_cores(),
        kept_bytes=len(memory.kept),
        not_kept=memory.reason_not_kept(),
        huge_pages=huge_pages,
    )


def machine_counts() -> dict[str, float]:
    """Return counters of seconds by name. Only the difference of the results of two calls has a
    meaning. A counter that the system lacks is left out.

    `cpu` is the CPU time of this process, and `loop` that of the calling thread. `busy` is the time
    in which any program ran on the cores that this process may use; programs of lower priority
    (nice) count only if this process also has a lower priority. `throttled` is the time in which
    the CPU quota stopped the process.
    """
    counts = {"cpu": time.process_time(), "loop": time.thread_time()}
    if sys.platform == "linux":
        fields = [_USER, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL]
        if os.getpriority(os.PRIO_PROCESS, 0) > 0:
            fields.append(_NICE)
        names = {f"cpu{core}" for core in cores.usable_cores()}
        with suppress(OSError), (cores.PROC / "stat").open() as lines:
            usable = [line.split() for line in lines if line.split(" ", 1)[0] in names]
            ticks = sum(int(line[field]) for line in usable for field in fields)
            counts["busy"] = ticks / os.sysconf("SC_CLK_TCK")
    if (throttled_s := cores.throttled_s()) is not None:
        counts["throttled"] = throttled_s
    return counts


@cache
def has_avx512_bf16() -> bool:
    """Return whether the CPU has the AVX-512 instructions that multiply bfloat16."""
    return "avx512_bf16" in cores.read_or_empty(cores.PROC / "cpuinfo")
