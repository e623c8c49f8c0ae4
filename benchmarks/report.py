"""Functions that all benchmarks share: timing, tables for people, and JSON with its provenance.

Knows nothing of models. Imports only JAX, numpy and the standard library, so that the steps of
first_card about the device alone run without jaxembed's other dependencies.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxembed import memory

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "jaxembed")
# Environment variables that change timings. Their values are recorded and not used.
VARIABLES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "XLA_FLAGS",
    "JAX_COMPILATION_CACHE_DIR",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "PJRT_NPROC",
    "OMP_NUM_THREADS",
)
# CPU features that matrix products use, as /proc/cpuinfo names them.
INSTRUCTIONS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm"),
)


@dataclass(frozen=True)
class Times:
    """The times of several runs of one function, in milliseconds."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median in milliseconds."""
        return float(np.median(self.ms))

    @property
    def p95(self) -> float:
        """The 95th percentile in milliseconds."""
        return float(np.percentile(self.ms, 95))

    def times(self, other: "Times") -> float:
        """How many times as long as another function, in the median round of both."""
        return float(np.median(np.divide(self.ms, other.ms)))

    def row(self) -> dict[str, float]:
        """The columns of a table."""
        return {"ms_median": self.median, "ms_p95": self.p95}


def timed(call: Callable[[], Any], runs: int, warmups: int = 2) -> Times:
    """Time `runs` calls of a function, each until its result is ready, after some warm-up calls."""
    return timed_in_turn([call], runs, warmups)[0]


def timed_in_turn(calls: Sequence[Callable[[], Any]], runs: int, warmups: int = 2) -> list[Times]:
    """Time several functions in turns, one call of each in every round.

    Disturbances of the machine then hit all of them, so that their ratios stay right.
    """
    for call in calls:
        for _ in range(warmups):
            jax.block_until_ready(call())
    rounds = [[_once(call) for call in calls] for _ in range(runs)]
    return [Times(tuple(ms)) for ms in zip(*rounds, strict=True)]


def _once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1000


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each function once in every round, in alternating order; return their values by name.

    The functions measure themselves and return seconds.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 else reversed(calls):
            found[name].append(calls[name]())
    return found


def spread(ratios: Sequence[float] | np.ndarray, name: str = "times") -> dict[str, float]:
    """The columns of the ratios of several rounds: the median by a name, the least and the most."""
    return {
        name: float(np.median(ratios)),
        "least": float(np.min(ratios)),
        "most": float(np.max(ratios)),
    }


def parser(file: str, doc: str | None) -> ArgumentParser:
    """Make the parser of a benchmark from its file and docstring, with the option that all have."""
    made = ArgumentParser(description=(doc or "").split("\n")[0])
    made.set_defaults(benchmark=Path(file).stem)
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the JSON here too; of a folder, to FOLDER/<device>/<benchmark>.json",
    )
    return made


def parse(
    parser: ArgumentParser, argv: Sequence[str] | None, *, takes_flags: bool = False
) -> Namespace:
    """Parse the command line; None means this program's own arguments.

    With `takes_flags`, what follows "--" is `flags`, for a server.
    """
    given = [*sys.argv[1:]] if argv is None else [*argv]
    at = given.index("--") if takes_flags and "--" in given else len(given)
    args = parser.parse_args(given[:at])
    args.arguments, args.flags = given, given[at + 1 :]
    return args


def configure_jax() -> None:
    """Configure JAX and memory as the server does: on a CPU programs run in the calling thread."""
    if "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        memory.keep()
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def finish(args: Namespace, facts: dict[str, Any]) -> None:
    """Print the results as a JSON object in the last line, and write them to `--out`, if given."""
    made = provenance(args.benchmark, args.arguments)
    report = rounded({"benchmark": args.benchmark, **facts, "made": made})
    if (out := args.out) is not None:
        out = out if out.suffix == ".json" else out / device_folder() / f"{args.benchmark}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {out}")
    print(json.dumps(report), flush=True)


def provenance(benchmark: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything needed to reproduce a result."""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(),
        "devices": jax.local_device_count(),
        "cores": os.cpu_count(),
        "instructions": instructions(),
        "versions": {"python": platform.python_version()} | versions(PACKAGES),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def versions(packages: Sequence[str], environment: Path | None = None) -> dict[str, str]:
    """The versions of the packages that are installed, here or in another virtual environment."""
    paths = sys.path if environment is None else map(str, environment.glob("lib/python3*/site-*"))
    distributions = [*metadata.distributions(path=[*paths])]
    installed = {d.name: d.version for d in reversed(distributions)}  # the first one is imported
    return {name: installed[name] for name in packages if name in installed}


def commit(checkout: Path = ROOT) -> str | None:
    """The commit of a working tree, with "+" if files were changed; None without a repository."""
    git = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        found = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return found.stdout.strip() or None


def device_name() -> str:
    """The name of the accelerator, or of the CPU."""
    device = jax.local_devices()[0]
    return cpu_name() if device.platform == "cpu" else device.device_kind


def device_folder() -> str:
    """A folder name for this device, such as "nvidia-h200" or "cpu-amd-epyc-2-cores"."""
    name = device_name()
    if jax.local_devices()[0].platform == "cpu":
        name = f"cpu {name} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_name() -> str:
    """The CPU's name without trademark signs, clock rate and the word processor. Clouds hide the
    number in it; then family and model follow: "AMD EPYC family 26 model 2", which is Zen 5."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    name = re.sub(r"\((R|TM)\)|@.*|\b(CPU|Processor)\b", " ", name, flags=re.IGNORECASE)
    if not re.search(r"\d", name) and (family := _cpuinfo("cpu family")):
        name += f" family {family} model {_cpuinfo('model')}"
    return " ".join(name.split())


def instructions() -> list[str]:
    """The INSTRUCTIONS that this CPU has, which the name of a cloud's CPU does not tell."""
    flags = _cpuinfo("flags").split()
    return [name for name in INSTRUCTIONS if name in flags]


def _cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty if there is none, or no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in pairs if name.strip() == field), "")


def show(rows: Sequence[dict[str, Any]], title: str = "") -> None:
    """Print rows with the same keys as an aligned table."""
    if title:
        print(f"\n{title}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(names))]
    for line in lines:
        cells = [
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


def _cell(value: Any) -> str:
    """A value as a cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if 0.99 <= value < 1:  # a cosine: with four digits 0.99996 would become 1
            return f"{value:.5f}"
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def rounded(value: Any) -> Any:
    """Round all floats of a JSON value to six digits, for people who read and compare results."""
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float | np.floating):
        return float(f"{float(value):.6g}") if np.isfinite(value) else str(value)
    if isinstance(value, np.integer):
        return int(value)
    return value
