"""Measures which block sizes of models/attention.py are the fastest on a device.

`attend` computes the scores of a row at once up to WHOLE_SCORES tokens, and above that QUERY_BLOCK
(on an accelerator ACCELERATOR_QUERY_BLOCK) queries at a time. This benchmark runs a whole model on
a batch of about the token budget at each row length, with whole scores and with each block size in
turn. Attention alone would give other results, because XLA fuses it with its neighbours in a model.

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
from jaxembed.data.spec import DType
from jaxembed.engine.autotune.calibrate import Calibration
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.models import attention

WHOLE = 0  # the block size that stands for whole scores
BLOCK_SIZES = ("QUERY_BLOCK", "ACCELERATOR_QUERY_BLOCK")


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--lengths", default="128,256,512")
    parser.add_argument("--blocks", default="32,64,128")
    parser.add_argument("--repeat", type=int, default=10)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the block sizes at each row length, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    model = load(args)
    dtype: DType = args.dtype or Calibration(jax.local_devices()[0]).native_dtype()
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
    """Measure each block size that is shorter than the bucket's rows. Returns a row for each."""
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
    """Set the constants of the attention module for everything that is traced in the context."""
    constants = {name: block or length for name in BLOCK_SIZES}
    constants["WHOLE_SCORES"] = length if block == WHOLE else 0
    before = {name: getattr(attention, name) for name in constants}
    for name, value in constants.items():
        setattr(attention, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(attention, name, value)


if __name__ == "__main__":
    main()
