"""Compiles the programs of published models for a TPU or GPU that is not there, and shows what the
compiler says of them.

For a TPU these are estimated cycles, the share that only moves data, memory and kernels. They are
estimates of a compiler, not measurements. The compiler counts a kernel, such as that of attention,
as nothing: a kernel is charged the cycles in which the chip could at best multiply, or read and
write, what attention needs. For a GPU they are kernels, memory, and the bytes that kernels read and
write: of each kernel, its results and the different arrays that it is given.

    python -m benchmarks.compile_for v5e
    python -m benchmarks.compile_for gpu --target h200.txtpb --kernels xla,triton
    python -m benchmarks.compile_for v6e --sizes qwen3-0.6b --layers 0 --buckets 2x8192
    python -m benchmarks.compile_for v5e --sizes qwen3-8b --tensor-parallel 4 --buckets default
    python -m benchmarks.compile_for v5e --check programs.json  # or what has changed since then

Needs `jax[tpu]` or `jax[cuda13]`, but no TPU or GPU. `--target` is XLA's description of a GPU, from
xla/backends/gpu/target_config/specs of github.com/openxla/xla. Columns: `mcycles` is the estimate,
attention included; `moves` and `products` are shares of it; `mfu` is the share of the chip's peak
that useful operations reach; `traffic_gb` is what kernels read and write; `sums` are all-reduces
over the devices that hold a model together. All figures are those of one device.
"""

import json
import math
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks import report, subject
from jaxembed.data.spec import DType, ModelSpec
from jaxembed.engine.autotune.calibrate import ACCELERATOR_TOKENS
from jaxembed.engine.bucket import TPU_TILE, Bucket, default_grid
from jaxembed.engine.placement import Device, placed_bytes
from jaxembed.engine.replica import compile_described, output_variants
from jaxembed.models import Program, kernels, program
from jaxembed.models.attention import Attend, by_xla

DTYPE: DType = "bfloat16"
# Instructions that compute nothing. Operations of JAX have the same names.
MOVES = {
    *("bitcast", "broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice"),
    *("get-tuple-element", "iota", "pad", "parameter", "reshape", "slice", "transpose", "tuple"),
}
PRODUCTS = {"convolution", "dot"}
EXCHANGES = r" (?:all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
KERNEL = 'custom_call_target="tpu_custom_call"'
# what --check compiles, which figures it compares, and by which share they may change
CHECKED = {"sizes": "bert-base,xlm-r-large,modernbert-base,qwen3-0.6b", "kernels": "splash"}
FIGURES = ("mcycles", "moves", "temporary_mb", "output_mb", "kernel_calls")
TOLERANCE = 0.05
WHAT_TO_DO = "if this is meant, remove the file, run `make estimates` and commit the new one"


@dataclass(frozen=True)
class Chip:
    """A kind of TPU, with the figures of Google's data sheets (cloud.google.com/tpu/docs).

    The clock follows from `flops`: in a cycle v5e's four matrix units of 128 x 128 make 131,072
    operations, and v6e's units, of 256 x 256, make 524,288.
    """

    topology: str  # as JAX names it
    accelerator_type: str  # as a TPU VM names it
    flops: float  # a second, in bfloat16
    flops_per_cycle: float
    bytes_per_s: float  # of its memory
    memory_bytes: float


CHIPS = {
    "v5e": Chip("v5e:2x2", "v5litepod-4", 197e12, 131_072, 819e9, 16 * 2**30),
    "v6e": Chip("v6e:2x2", "v6e-4", 918e12, 524_288, 1640e9, 32 * 2**30),
}


ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1}
# instructions of a GPU's program that start no kernel
NO_KERNEL = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}


@dataclass(frozen=True)
class Instruction:
    """An instruction of a program, or a fusion of several."""

    opcodes: frozenset[str]  # what it is made of
    operation: str  # of JAX, for which it is there, such as "dot_general"
    is_kernel: bool  # whether it calls a kernel, whose cycles the compiler does not know
    cycles: int  # the compiler's estimate

    @cached_property
    def kind(self) -> str:
        """What it does: "product", "move", "kernel" or "other"."""
        if self.is_kernel:
            return "kernel"
        if self.opcodes & PRODUCTS:
            return "product"
        # the scale of queries, for example, is fused into the instruction that moves them
        moves = self.opcodes <= MOVES or self.operation in MOVES
        return "move" if moves else "other"


def main(argv: Sequence[str] | None = None) -> None:
    """Compile the programs, and print and write what the compiler says."""
    args = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    chip = CHIPS.get(args.chip)
    devices = gpu_devices(args.target) if chip is None else tpu_devices(chip)
    device, holding = devices[0], devices[: args.tensor_parallel]
    if len(holding) < args.tensor_parallel:
        sys.exit(f"--tensor-parallel {args.tensor_parallel}: {len(devices)} devices are described")
    rows = []
    for size in args.sizes.split(","):
        for kernel in args.kernels.split(","):
            for bucket in buckets_of(args.buckets, device, size):
                for layers in map(int, args.layers.split(",")):
                    rows.append(row_of(holding, chip, size, layers, kernel, bucket))
                    report.show([rows[-1]])
    report.show(rows, f"{device.device_kind}, compiled without one")
    facts = {"chip": args.chip, "results": rows}
    facts["compilers"] = report.versions(("libtpu", "jax-cuda13-plugin", "jax", "jaxlib"))
    if args.check is not None and args.check.exists():
        before = json.loads(args.check.read_text())
        if before["compilers"] == facts["compilers"]:
            if lines := differences(before, facts):
                sys.exit("\n".join(["the compiler says something else:", *lines, WHAT_TO_DO]))
            return
    report.finish(args, facts)


def buckets_of(names: str, device: Device, size: str) -> list[str]:
    """The buckets that --buckets names."""
    if names != "default":
        return names.split(",")
    tile = TPU_TILE if device.platform == "tpu" else 1
    grid = default_grid(subject.spec_of(size).max_input_tokens, ACCELERATOR_TOKENS, 1, tile)
    return [str(bucket) for bucket in grid.buckets]


def tpu_devices(chip: Chip) -> Sequence[Device]:
    """Describe four TPUs."""
    # libtpu would ask the metadata server of a TPU VM for these
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", chip.accelerator_type)
    return topologies.get_topology_desc(chip.topology, platform="tpu").devices


def gpu_devices(target: Path) -> Sequence[Device]:
    """Describe the GPU of XLA's description `target`."""
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target.read_text(), topology="1x1x1"
    )
    return described.devices


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("chip", choices=[*CHIPS, "gpu"])
    parser.add_argument("--target", type=Path, metavar="FILE", help="XLA's description of the GPU")
    parser.add_argument("--sizes", default="bert-base", help="of SIZES, with commas")
    parser.add_argument("--layers", default="2", help="with commas; 0: as many as the model has")
    parser.add_argument(
        "--buckets", default="1x128,128x128,32x512", help="or default: those of the engine"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="TPUs that hold the model together"
    )
    parser.add_argument("--kernels", default="xla,splash", help="of attention")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compile the programs of CHECKED, and fail if a figure differs from FILE's by more "
        f"than {TOLERANCE:.0%}; write FILE if it is missing or of other compilers",
    )
    args = report.parse(parser, argv)
    if (args.chip == "gpu") != (args.target is not None):
        parser.error("give --target with gpu, and only then")
    if args.check is not None:
        parser.set_defaults(out=args.check, **CHECKED)
        args = report.parse(parser, argv)
    return args


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two results of the same compilers, a line for each program."""

    def programs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {" ".join((r["size"], r["kernel"], r["bucket"])): r for r in result["results"]}

    old, new, lines = programs(before), programs(now), []
    for name in sorted({*old, *new}):
        pairs = {f: (new.get(name, {}).get(f), old.get(name, {}).get(f)) for f in FIGURES}
        changes = [
            f"{figure} {found} (was {wanted})"
            for figure, (found, wanted) in pairs.items()
            if found is None or wanted is None or abs(found - wanted) > TOLERANCE * abs(wanted)
        ]
        if changes:
            lines.append(f"{name}: {', '.join(changes)}")
    return lines


def row_of(
    devices: Sequence[Device],
    chip: Chip | None,
    size: str,
    layers: int,
    kernel: str,
    bucket: str,
) -> dict[str, Any]:
    """What the compiler says of the program of a bucket such as "32x512", or its error. `devices`
    hold the model together; `chip` is None for a GPU."""
    rows, length = map(int, bucket.split("x"))
    spec = subject.spec_of(size, layers)
    name = f"{size}, {spec.config['num_layers']} layers"
    row: dict[str, Any] = {"size": name, "kernel": kernel, "bucket": bucket}
    start, made = time.perf_counter(), program(spec, len(devices))
    try:
        compiled = compile_bucket(devices, made, Bucket(rows, length), kernel)
    except jax.errors.JaxRuntimeError as error:
        return row | {"error": str(error).strip().splitlines()[0]}
    if chip is None:
        kernel_count, traffic = gpu_traffic(compiled.as_text() or "")
        row |= {"kernels": kernel_count, "traffic_gb": traffic / 1e9}
    else:
        row |= cycles_of(compiled, chip, spec, rows, length, len(devices))
    if len(devices) > 1:
        text = compiled.as_text() or ""
        row["sums"] = len(re.findall(r" all-reduce(?:-start)?\(", text))
        row["other_exchanges"] = len(re.findall(EXCHANGES, text))
    memory: Any = compiled.memory_analysis()
    parameters = placed_bytes({name: made.share_of(name) for name in made.shapes}, DTYPE)
    taken = parameters + memory.temp_size_in_bytes + memory.output_size_in_bytes
    if chip is not None:
        row["fits"] = bool(taken <= chip.memory_bytes)
    return row | {
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "output_mb": memory.output_size_in_bytes / 1e6,
        "parameter_mb": parameters / 1e6,
        "compile_s": time.perf_counter() - start,
    }


def cycles_of(
    compiled: jax.stages.Compiled,
    chip: Chip,
    spec: ModelSpec,
    rows: int,
    length: int,
    degree: int,
) -> dict[str, Any]:
    """The cycles of a program for a TPU, by what they are spent on. `degree` devices hold the model
    together."""
    found = list(instructions(compiled.as_text() or ""))
    cycles = {
        kind: sum(one.cycles for one in found if one.kind == kind)
        for kind in ("product", "move", "other")
    }
    calls = sum(one.is_kernel for one in found)
    attention = attention_cycles(spec, chip, rows, length) / degree if calls else 0.0
    total = sum(cycles.values()) + attention
    useful = subject.useful_flops(spec, program(spec), [length] * rows) / degree
    return {
        "mcycles": total / 1e6,
        "moves": cycles["move"] / total,
        "products": cycles["product"] / total,
        "attention": attention / total,
        "mfu": useful / chip.flops_per_cycle / total,
        "kernel_calls": calls,
    }


def gpu_traffic(text: str) -> tuple[int, int]:
    """The number of kernels of a program for a GPU, and the bytes that they read and write."""
    entry = text[text.index("\nENTRY") :].splitlines()
    types = dict(re.findall(r"([\w.-]+): (\w+\[[\d,]*\])", entry[1]))
    kernel_count, traffic = 0, 0
    for line in entry[2:]:
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)", line)
        if match is None:
            continue
        name, types[name], opcode, rest = match[1], match[2], match[3], match[4]
        if opcode in NO_KERNEL:
            continue
        given = set(re.findall(r"%([\w.-]+)", rest.partition("), ")[0]))
        kernel_count += 1
        traffic += sum(type_bytes(types.get(one, "")) for one in [name, *given])
    return kernel_count, traffic


def type_bytes(kind: str) -> int:
    """The bytes of an array, or of all arrays of a tuple, by its type in HLO."""
    total = 0
    for item, axes in re.findall(r"(\w+)\[([\d,]*)\]", kind):
        total += ITEM_BYTES.get(item, 0) * math.prod(map(int, filter(None, axes.split(","))))
    return total


def compile_bucket(
    devices: Sequence[Device], made: Program, bucket: Bucket, kernel: str
) -> jax.stages.Compiled:
    """Compile the program of a bucket as an engine does. Raises the errors of XLA."""
    platform = devices[0].platform
    attend: Attend = by_xla
    if kernel != "xla" and bucket.length >= kernels.SHORTEST_PROBED_ROW:
        found = kernels.kernel(kernels.KERNELS[platform][kernel])
        attend = found.implementation(bucket.slots)
    outputs = output_variants(made, platform)[0]
    return compile_described(made, devices, bucket, DTYPE, attend, outputs)


def attention_cycles(spec: ModelSpec, chip: Chip, rows: int, length: int) -> float:
    """The fewest cycles for attention in all layers: for its products, or for reading queries, keys
    and values and writing the result, whichever takes longer."""
    config = spec.config
    heads = config["num_heads"]
    width = config.get("head_width", config["hidden_size"] // heads)
    flops = subject.attention_flops(spec, [length] * rows)
    moved = 2 * heads + 2 * config.get("num_key_heads", heads)  # heads read and written a token
    moved *= width * rows * length * config["num_layers"]
    bytes_moved = moved * jnp.dtype(DTYPE).itemsize
    seconds = max(flops / chip.flops, bytes_moved / chip.bytes_per_s)
    return seconds * chip.flops / chip.flops_per_cycle


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a compiled program that take cycles, and its calls of kernels."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = lines
    for line in text.splitlines():
        if start := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = computations.setdefault(start[2], [])
            entry = lines if start[1] else entry
        else:
            lines.append(line)
    for line in entry:
        opcode = _opcode(line)
        if opcode is None:
            continue
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        body = computations.get(called[1], []) if called else []
        made_of = frozenset(filter(None, map(_opcode, body))) if body else frozenset([opcode])
        operation = re.search(r'op_name="[^"]*?([^"/]*)"', line)
        if cycles or KERNEL in line:
            name, spent = operation[1] if operation else "", int(cycles[1]) if cycles else 0
            yield Instruction(made_of, name, KERNEL in line, spent)


def _opcode(line: str) -> str | None:
    """The opcode of a line of a program; None if the line has none."""
    found = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(", line)
    return found[1] if found else None


if __name__ == "__main__":
    main()
