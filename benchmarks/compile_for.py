"""Compiles the programs of published models for a TPU that is not there, and shows what the
compiler says of them: estimated cycles, the share that only moves data, memory, kernels.

The figures are estimates of a compiler, not measurements. The compiler counts a kernel, such as
that of attention, as nothing: a kernel is charged the cycles in which the chip could at best
multiply, or read and write, what attention needs.

    python -m benchmarks.compile_for v5e
    python -m benchmarks.compile_for v6e --sizes qwen3-0.6b --layers 0 --buckets 2x8192
    python -m benchmarks.compile_for v5e --check programs.json  # or what has changed since then

Needs `jax[tpu]`, but no TPU. Columns: `mcycles` is the estimate, attention included; `moves` and
`products` are shares of it; `mfu` is the share of the chip's peak that useful operations reach.
"""

import json
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import report, subject
from jaxembed.data.spec import DType, ModelSpec
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.placement import Device, mesh_of, placed_bytes
from jaxembed.engine.replica import compile_described
from jaxembed.models import kernels, program
from jaxembed.models.attention import Attend, by_xla

DTYPE: DType = "bfloat16"
# Instructions that compute nothing. Operations of JAX have the same names.
MOVES = {
    *("bitcast", "broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice"),
    *("get-tuple-element", "iota", "pad", "parameter", "reshape", "slice", "transpose", "tuple"),
}
PRODUCTS = {"convolution", "dot"}
KERNEL = 'custom_call_target="tpu_custom_call"'
SIDE = 8192  # of the matrices of `product_mfu`
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
    chip = CHIPS[args.chip]
    # libtpu would ask the metadata server of a TPU VM for these
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", chip.accelerator_type)
    jax.config.update("jax_platforms", "cpu")
    device = topologies.get_topology_desc(chip.topology, platform="tpu").devices[0]
    rows = []
    for size in args.sizes.split(","):
        for kernel in args.kernels.split(","):
            for bucket in args.buckets.split(","):
                for layers in map(int, args.layers.split(",")):
                    rows.append(row_of(device, chip, size, layers, kernel, bucket))
                    report.show([rows[-1]])
    report.show(rows, f"{device.device_kind}, compiled without one")
    facts = {"chip": args.chip, "product_mfu": product_mfu(device, chip), "results": rows}
    facts["compilers"] = report.versions(("libtpu", "jax", "jaxlib"))
    if args.check is not None and args.check.exists():
        before = json.loads(args.check.read_text())
        if before["compilers"] == facts["compilers"]:
            if lines := differences(before, facts):
                sys.exit("\n".join(["the compiler says something else:", *lines, WHAT_TO_DO]))
            return
    report.finish("compile_for", argv, facts, args.out)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("--sizes", default="bert-base", help="of SIZES, with commas")
    parser.add_argument("--layers", default="2", help="with commas; 0: as many as the model has")
    parser.add_argument("--buckets", default="1x128,128x128,32x512")
    parser.add_argument("--kernels", default="xla,splash", help="of attention")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compile the programs of CHECKED, and fail if a figure differs from FILE's by more "
        f"than {TOLERANCE:.0%}; write FILE if it is missing or of other compilers",
    )
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.check is not None:
        parser.set_defaults(out=args.check, **CHECKED)
        args = parser.parse_args(argv)
    return args


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two results of the same compilers, a line for each program."""

    def programs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {" ".join((r["size"], r["kernel"], r["bucket"])): r for r in result["results"]}

    old, new, lines = programs(before), programs(now), []
    for name in sorted({*old, *new}):
        changes = [
            f"{figure} {found} (was {wanted})"
            for figure in FIGURES
            for found, wanted in [(new.get(name, {}).get(figure), old.get(name, {}).get(figure))]
            if None in (found, wanted) or abs(found - wanted) > TOLERANCE * abs(wanted)
        ]
        if changes:
            lines.append(f"{name}: {', '.join(changes)}")
    return lines


def product_mfu(device: Device, chip: Chip) -> float:
    """The share of the peak that the compiler expects of a large product alone."""
    placed = NamedSharding(mesh_of([device]), PartitionSpec())
    side = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16, sharding=placed)
    compiled = jax.jit(jnp.matmul).lower(side, side).compile()
    cycles = sum(one.cycles for one in instructions(compiled.as_text() or ""))
    return 2.0 * SIDE**3 / chip.flops_per_cycle / cycles


def row_of(
    device: Device, chip: Chip, size: str, layers: int, kernel: str, bucket: str
) -> dict[str, Any]:
    """What the compiler says of the program of a bucket such as "32x512", or its error."""
    rows, length = map(int, bucket.split("x"))
    spec = subject.spec_of(size, layers)
    name = f"{size}, {spec.config['num_layers']} layers"
    row: dict[str, Any] = {"size": name, "kernel": kernel, "bucket": bucket}
    start = time.perf_counter()
    try:
        compiled = compile_bucket(device, spec, Bucket(rows, length), kernel)
    except jax.errors.JaxRuntimeError as error:
        return row | {"error": str(error).strip().splitlines()[0]}
    found = list(instructions(compiled.as_text() or ""))
    cycles = {
        kind: sum(one.cycles for one in found if one.kind == kind)
        for kind in ("product", "move", "other")
    }
    calls = sum(one.is_kernel for one in found)
    attention = attention_cycles(spec, chip, rows, length) if calls else 0.0
    total = sum(cycles.values()) + attention
    memory: Any = compiled.memory_analysis()
    made = program(spec)
    parameters = placed_bytes({name: s.shape for name, s in made.shapes.items()}, DTYPE)
    taken = parameters + memory.temp_size_in_bytes + memory.output_size_in_bytes
    useful = subject.useful_flops(spec, made, [length] * rows)
    return row | {
        "mcycles": total / 1e6,
        "moves": cycles["move"] / total,
        "products": cycles["product"] / total,
        "attention": attention / total,
        "mfu": useful / chip.flops_per_cycle / total,
        "kernel_calls": calls,
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "output_mb": memory.output_size_in_bytes / 1e6,
        "parameter_mb": parameters / 1e6,
        "fits": bool(taken <= chip.memory_bytes),
        "compile_s": time.perf_counter() - start,
    }


def compile_bucket(
    device: Device, spec: ModelSpec, bucket: Bucket, kernel: str
) -> jax.stages.Compiled:
    """Compile the program of a bucket as an engine does. Raises the errors of XLA."""
    attend: Attend = by_xla
    if kernel != "xla" and bucket.length >= kernels.SHORTEST_PROBED_ROW:
        found = kernels.kernel(kernels.KERNELS["tpu"][kernel])
        attend = found.implementation(bucket.slots)
    return compile_described(program(spec), [device], bucket, DTYPE, attend)


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
