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

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import bench_model, report, subject
from benchmarks.parameters import random_parameters
from benchmarks.subject import Subject
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.models import program

BASELINE = "bert-base"
NO_FAMILIES = ("tiny", "minilm", "bge-large", "xlm-r-large", "qwen3-8b")  # other sizes
FAMILIES = [name for name in subject.SIZES if name not in (*NO_FAMILIES, BASELINE)]
VOCABULARY = 1024  # the rows of the table are gathered: their number does not count


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every bucket, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    subject.add_kernel_arguments(parser)
    parser.add_argument("--families", default=",".join(FAMILIES), help="of SIZES, with commas")
    parser.add_argument("--buckets", default="8x128,2x512")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15, help="rounds")
    args = report.parse(parser, argv)
    report.configure_jax()
    dtype, grid = subject.dtype_of(args), subject.grid_of(args.buckets)
    models = [
        _small(name, args.layers) for name in dict.fromkeys([BASELINE, *args.families.split(",")])
    ]
    replicas = [subject.replica(model, args, grid) for model in models]
    rows = [row for b in grid.buckets for row in rows_of(models, replicas, b, args.repeat)]
    report.show(rows, f"{args.layers} layers, {dtype}, {report.device_name()}")
    facts = {"dtype": dtype, "layers": args.layers, "repeat": args.repeat, "results": rows}
    report.finish(args, facts)


def rows_of(
    models: Sequence[Subject], replicas: Sequence[Replica], bucket: Bucket, rounds: int
) -> list[dict[str, Any]]:
    """The rows of a bucket; the first model is the baseline."""
    calls, flops = [], []
    for model, replica in zip(models, replicas, strict=True):
        replica.compile(bucket)
        planes, lengths = bench_model.full_planes(bucket, model)
        calls += [
            lambda r=replica, planes=planes: r.run(bucket, planes, (r.primary,)),
            bench_model.products(model, replica, bucket.tokens),
        ]
        flops.append(subject.useful_flops(model.spec, model.program, lengths))
    times = report.timed_in_turn(calls, rounds)
    shares = [
        np.divide(least.ms, whole.ms) for whole, least in zip(times[::2], times[1::2], strict=True)
    ]
    return [
        {
            "family": model.name,
            "bucket": str(bucket),
            "native": replica.native_layout,
            **whole.row(),
            "tflop_per_s": needed / whole.median / 1e9,
            "share": float(np.median(share)),
            **report.spread(share / shares[0], "of_bert"),
        }
        for model, replica, needed, whole, share in zip(
            models, replicas, flops, times[::2], shares, strict=True
        )
    ]


def _small(name: str, layers: int) -> Subject:
    """A model of SIZES with so many layers, and a small vocabulary."""
    spec = subject.spec_of(name, layers, vocab_size=VOCABULARY)
    return Subject(name, spec, program(spec), random_parameters(spec, 0), None)


if __name__ == "__main__":
    main()
