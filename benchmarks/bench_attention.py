"""Whole scores or query blocks: which constants of models/attention.py a device wants.

`attend` computes the scores of a row at once up to WHOLE_SCORES tokens, above that QUERY_BLOCK
(on an accelerator ACCELERATOR_QUERY_BLOCK) queries at a time. Here the whole model runs a batch of
about the token budget at each row length, once with whole scores and once with each block size, in
turn. Alone, attention measures otherwise: inside the model XLA fuses it with its neighbours.

    python -m benchmarks.bench_attention --lengths 128,256,512 --blocks 32,64,128
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from benchmarks import report
from benchmarks.bench_model import add_arguments as add_model_arguments
from benchmarks.bench_model import budget_of, full_planes, seconds_of
from benchmarks.subject import Subject, load, useful_flops
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.calibrate import native_dtype
from jaxembed.engine.replica import Replica
from jaxembed.models import attention
from jaxembed.spec import DType

WHOLE = 0  # as a block size: none
BLOCK_SIZES = ("QUERY_BLOCK", "ACCELERATOR_QUERY_BLOCK")


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--lengths", default="128,256,512")
    parser.add_argument("--blocks", default="32,64,128")
    parser.add_argument("--repeat", type=int, default=10)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    report.configure_jax()
    model = load(args)
    dtype: DType = args.dtype or native_dtype(jax.local_devices()[0])
    blocks = [WHOLE, *map(int, args.blocks.split(","))]
    print(f"{model.name}, {dtype}, {report.device_name()}")
    rows: list[dict[str, Any]] = []
    for length in map(int, args.lengths.split(",")):
        bucket = Bucket(max(budget_of(args, model) // length, 1), length)
        rows += measure(model, dtype, bucket, blocks, args.repeat)
    report.show(rows)
    facts = {"model": model.name, "dtype": dtype, "repeat": args.repeat, "results": rows}
    report.finish("bench_attention", argv, facts, args.out)


def measure(
    model: Subject, dtype: DType, bucket: Bucket, blocks: Sequence[int], runs: int
) -> list[dict[str, Any]]:
    """A row for each block size shorter than the bucket's rows, and one for whole scores."""
    blocks = [block for block in blocks if block < bucket.length]
    planes, lengths = full_planes(bucket, model)
    replicas, compile_s = [], []
    for block in blocks:
        replica = Replica(model.program, model.parameters, jax.local_devices()[:1], dtype)
        with query_block(block, bucket.length):
            compile_s.append(seconds_of(replica, bucket))
        replicas.append(replica)
    calls = [lambda r=r: r.run(bucket, planes, (r.primary,)) for r in replicas]
    times = report.timed_in_turn(calls, runs)
    flops = useful_flops(model.spec, model.program, lengths)
    return [
        {
            "bucket": str(bucket),
            "queries": block or "all",
            "compile_s": seconds,
            **t.row(),
            "tflop_per_s": flops / t.median / 1e9,
            "temporary_mb": replica.temporary_bytes(bucket) / 1e6,
        }
        for block, seconds, t, replica in zip(blocks, compile_s, times, replicas, strict=True)
    ]


@contextmanager
def query_block(block: int, length: int) -> Iterator[None]:
    """The attention module with these constants, for what is traced meanwhile."""
    wanted = {name: block or length for name in BLOCK_SIZES}
    wanted["WHOLE_SCORES"] = length if block == WHOLE else 0
    before = {name: getattr(attention, name) for name in wanted}
    for name, value in wanted.items():
        setattr(attention, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(attention, name, value)


if __name__ == "__main__":
    main()
