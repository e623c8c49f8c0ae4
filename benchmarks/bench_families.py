"""Compares the families of models: how fast each runs, and its share of the speed of its matrix
products, beside BERT-base.

Each family has its published width, random weights, two layers and a small vocabulary, and the
kernels that a server would choose. In every round each family runs once, and then a program with
only its matrix products, as in bench_model; so disturbances hit all of them alike.

    python -m benchmarks.bench_families
    python -m benchmarks.bench_families --families bert-base,mpnet-base --buckets 4x256

Columns: `share` is that of its matrix products alone; `of_bert` is that share over BERT-base's, the
median of the rounds, with the `least` and the `most`.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from benchmarks import bench_model, report, subject
from benchmarks.parameters import random_parameters
from benchmarks.subject import Subject
from jaxembed.data.spec import DType
from jaxembed.engine.autotune.kernels import choose_kernels
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.replica import Replica
from jaxembed.models import program

BASELINE = "bert-base"
FAMILIES = tuple(
    name
    for name in subject.SIZES
    if name not in ("tiny", "minilm", "bge-large", "xlm-r-large", "gemma2-9b", "qwen3-8b", BASELINE)
)
VOCABULARY = 1024  # the rows of the table are gathered: their number does not count


@dataclass(frozen=True)
class Contestant:
    """One family in one bucket: what runs it, and its matrix products alone."""

    name: str
    kernels: str
    run: Callable[[], Any]
    products: Callable[[], Any]
    flops: float


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", default=",".join(FAMILIES), help="of SIZES, with commas")
    parser.add_argument("--buckets", default="8x128,2x512")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--kernels", default="auto", help="as of `jaxembed serve`")
    parser.add_argument("--repeat", type=int, default=15, help="rounds")
    parser.add_argument("--cache-dir", type=Path, help="for the results of kernel trials")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every bucket, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    dtype = bench_model.dtype_of(args)
    pairs = [text.split("x") for text in args.buckets.split(",")]
    buckets = [Bucket(int(rows), int(length)) for rows, length in pairs]
    names = dict.fromkeys([BASELINE, *args.families.split(",")])
    models = [_small(name, args.layers) for name in names]
    rows = []
    for bucket in buckets:
        contestants = [_contestant(model, args, dtype, bucket) for model in models]
        rows += rows_of(contestants, bucket, args.repeat)
    report.show(rows, f"{args.layers} layers, {dtype}, {report.device_name()}")
    facts = {"dtype": dtype, "layers": args.layers, "repeat": args.repeat, "results": rows}
    report.finish("bench_families", argv, facts, args.out)


def rows_of(contestants: Sequence[Contestant], bucket: Bucket, rounds: int) -> list[dict[str, Any]]:
    """The rows of a bucket; the first contestant is the baseline."""
    calls = [call for one in contestants for call in (one.run, one.products)]
    times = report.timed_in_turn(calls, rounds)
    shares = [
        np.array(least.ms) / np.array(whole.ms)
        for whole, least in zip(times[::2], times[1::2], strict=True)
    ]
    rows = []
    for one, whole, share in zip(contestants, times[::2], shares, strict=True):
        of_bert = share / shares[0]
        rows.append(
            {
                "family": one.name,
                "bucket": str(bucket),
                "kernels": one.kernels,
                **whole.row(),
                "tflop_per_s": one.flops / whole.median / 1e9,
                "share": float(np.median(share)),
                "of_bert": float(np.median(of_bert)),
                "least": float(of_bert.min()),
                "most": float(of_bert.max()),
            }
        )
    return rows


def _small(name: str, layers: int) -> Subject:
    """A model of SIZES with so many layers, and a small vocabulary."""
    spec = subject.spec_of(name, layers, vocab_size=VOCABULARY)
    return Subject(name, spec, program(spec), random_parameters(spec, 0), None)


def _contestant(model: Subject, args: Namespace, dtype: DType, bucket: Bucket) -> Contestant:
    grid, device = BucketGrid((bucket,)), jax.local_devices()[0]
    native_choice = subject.native_choice_of(model, args, dtype)
    choice = choose_kernels(
        model.program, device, dtype, grid, args.kernels, native_choice=native_choice
    )
    parameters = (model.program, model.parameters, [device], dtype)
    replica = Replica(
        *parameters, attention=choice.implementation, native_layout=choice.native_layout
    )
    replica.compile(bucket)
    planes, lengths = bench_model.full_planes(bucket, model)
    products = bench_model.products(model, dtype, bucket.tokens, device, replica.native_layout)
    return Contestant(
        model.name,
        choice.name_of(bucket.length),
        lambda: replica.run(bucket, planes, (replica.primary,)),
        products,
        subject.useful_flops(model.spec, model.program, lengths),
    )


if __name__ == "__main__":
    main()
