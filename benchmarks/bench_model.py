"""Measures how fast each bucket's program runs, and its share of the speed of its matrix products.

Every bucket of the grid runs full of tokens as the engine runs it, from token ids to pooled vectors
on the host. The ceiling is measured in turn with it: one compiled program per bucket with only the
model's matrix products, of the same shapes, dtype and order. Attention, norms, activations and
copies are the rest to 100 %.

    python -m benchmarks.bench_model                                # all-MiniLM-L6-v2, default grid
    python -m benchmarks.bench_model --architecture-size bert-base --limit 512 --buckets 8x128,8x512
    python -m benchmarks.bench_model --architecture-size minilm --buckets 16x128 --adapters 2x8

`--adapters 2x8` also runs each bucket of the same model with two random adapters of rank 8 on all
products of its layers, in turn with the others; each row of a batch takes another of them, or none.
`times_plain` is the median ratio of a run with adapters to the run without before it.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report, subject
from benchmarks.subject import Subject
from jaxembed.data.spec import DType
from jaxembed.engine.autotune import timing
from jaxembed.engine.autotune.calibrate import Calibration
from jaxembed.engine.bucket import Bucket, BucketGrid, default_grid
from jaxembed.engine.replica import Replica
from jaxembed.models import native, position_limit


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the model and the grid."""
    subject.add_arguments(parser)
    parser.add_argument("--buckets", help="such as 1x32,8x128; default: those of the server")
    parser.add_argument("--limit", type=int, help="longest sequence; default: the model's")
    parser.add_argument("--max-batch-tokens", type=int, help="of the default grid")


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = report.parser(__file__, __doc__)
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=15, help="runs of each bucket")
    parser.add_argument("--adapters", metavar="COUNTxRANK", help="also run with these, such as 2x8")
    return report.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every bucket, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    model = subject.load(args)
    grid = grid_of(args, model)
    replica = subject.replica(model, args, grid)
    adapted = None
    if args.adapters:
        count, rank = map(int, args.adapters.split("x"))
        changed = subject.with_adapters(model, count, rank)
        adapted = partial(run_of, subject.replica(changed, args, grid), count)
    rows = [measure(model, replica, bucket, args.repeat, adapted) for bucket in grid.buckets]
    report.show(rows, f"{model.name}, {replica.dtype}, {report.device_name()}")
    facts = {"model": model.name, "dtype": replica.dtype, "repeat": args.repeat, "buckets": rows}
    report.finish(args, facts | ({"adapters": args.adapters} if args.adapters else {}))


def grid_of(args: Namespace, model: Subject) -> BucketGrid:
    """The grid that the arguments name, or the one that a server would choose."""
    if args.buckets:
        return subject.grid_of(args.buckets)
    joins = subject.native_choice_of(model, args).joins
    budget = args.max_batch_tokens or Calibration(jax.local_devices()[0]).batch_tokens(
        model.program, subject.dtype_of(args), joins
    )
    return default_grid(args.limit or model.spec.max_input_tokens, budget, join=joins)


def measure(
    model: Subject,
    replica: Replica,
    bucket: Bucket,
    runs: int,
    adapted: Callable[[Bucket, np.ndarray], Callable] | None = None,
) -> dict[str, Any]:
    """Measure a bucket, and return its row; `adapted` is `run_of` of a model with adapters."""
    replica.compile(bucket)
    planes, lengths = full_planes(bucket, model)
    ceiling = products(model, replica, bucket.tokens)
    calls = [lambda: replica.run(bucket, planes, (replica.primary,)), ceiling]
    if adapted is not None:
        calls.insert(1, adapted(bucket, planes))
    times, *with_adapters, least = report.timed_in_turn(calls, runs)
    flops = subject.useful_flops(model.spec, model.program, lengths)
    row = {
        "bucket": str(bucket),
        "tokens": bucket.tokens,
        **times.row(),
        "tokens_per_s": bucket.tokens / times.median * 1000,
        "tflop_per_s": flops / times.median / 1e9,
        "ceiling_ms": least.median,
        "share": least.median / times.median,
    }
    return row | {"times_plain": with_adapters[0].times(times)} if with_adapters else row


def run_of(adapted: Replica, count: int, bucket: Bucket, planes: np.ndarray) -> Callable[[], Any]:
    """Compile a bucket of a model with `count` adapters, and return a function that runs it."""
    adapted.compile(bucket)
    numbers = np.arange(bucket.rows, dtype=np.int32)[None, :, None] % (count + 1)
    numbered = np.concatenate([planes, np.repeat(numbers, bucket.length, axis=2)])
    return lambda: adapted.run(bucket, numbered, (adapted.primary,))


def full_planes(bucket: Bucket, model: Subject, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Make a batch without padding, int32 `[planes, rows, length]`.

    Each row holds one sequence, or several if it is longer than the model's limit. Returns the
    batch, and the lengths of its sequences.
    """
    longest = min(position_limit(model.spec) or bucket.length, bucket.length)
    planes = timing.full_planes(bucket, longest)
    ids = planes[0]
    ids[:] = np.random.default_rng(seed).integers(0, model.vocab_size, ids.shape)
    return planes, np.bincount(np.arange(bucket.length) // longest).tolist() * bucket.rows


def products(model: Subject, replica: Replica, tokens: int) -> Callable[[], Any]:
    """Compile a program with only the model's matrix products, and return a function that runs it.

    It multiplies `tokens` tokens, by XLA or by the native kernels, as the replica does. Operands
    have the replica's dtype and sums are float32, as in the model. Each product takes the result of
    the one before, rounded and cut to its width. Independent products would all be kept in memory
    at once, and on a CPU new memory costs more than the products.
    """
    draw, dtype, device = np.random.default_rng(0), replica.dtype, replica.devices[0]
    shapes = model.program.products
    weights = [_placed(draw, shape, dtype, device) for shape in shapes]
    first = _placed(draw, (tokens, shapes[0][0]), dtype, device)
    if replica.native_layout:
        weights = [
            jax.device_put(native.packed(np.asarray(weight)), device)
            if native.is_packable(".kernel", weight.shape, dtype)
            else weight
            for weight in weights
        ]

    def run(weights, x):
        for weight, (width, _) in zip(weights, shapes, strict=True):
            x = _of_width(x, width)
            if native.is_packed(weight):
                x = native.linear(x, weight, None, dtype=dtype)
                continue
            y = jnp.dot(x, weight, preferred_element_type=jnp.float32)
            # without the barrier XLA would compute only the columns that the next product takes
            x = jax.lax.optimization_barrier(y).astype(weight.dtype)
        return x[0, 0]

    with jax.default_matmul_precision("highest" if dtype == "float32" else None):
        compiled = jax.jit(run).lower(weights, first).compile()
    return lambda: compiled(weights, first)


def _of_width(x: jax.Array, width: int) -> jax.Array:
    """Cut the columns of an array to a width, or repeat them if there are too few."""
    return jnp.tile(x, (1, -(-width // x.shape[1])))[:, :width]


def _placed(draw: np.random.Generator, shape: tuple[int, ...], dtype: DType, device: Any):
    """A random weight on the device."""
    values = draw.standard_normal(shape, np.float32) * shape[0] ** -0.5
    return jax.device_put(values.astype(jnp.dtype(dtype)), device)


if __name__ == "__main__":
    main()
