"""Measures how fast each bucket's program runs, and its share of the speed of its matrix products.

Every bucket of the grid is compiled twice, without and with the persistent cache, and run full of
tokens as the engine runs it, from token ids to pooled vectors on the host. The ceiling is measured
in turn with it: one compiled program per bucket with only the model's matrix products, of the same
shapes, dtype and order. Attention, norms, activations and copies are the rest to 100 %.

    python -m benchmarks.bench_model                                # all-MiniLM-L6-v2, default grid
    python -m benchmarks.bench_model --architecture-size bert-base --limit 512 --buckets 8x128,8x512
    python -m benchmarks.bench_model --architecture-size minilm --buckets 16x128 --adapters 2x8

`--adapters 2x8` also runs each bucket of the same model with two random adapters of rank 8 on all
products of its layers, in turn with the others; each row of a batch takes another of them, or none.
`times_plain` is the median ratio of a run with adapters to the run without before it.
"""

import math
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from benchmarks import report, subject
from benchmarks.subject import Subject
from jaxembed.data.spec import DType
from jaxembed.engine.autotune import timing
from jaxembed.engine.autotune.calibrate import Calibration
from jaxembed.engine.bucket import Bucket, BucketGrid, default_grid
from jaxembed.engine.replica import Replica
from jaxembed.models import native, position_limit


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the model, the dtype and the default grid."""
    subject.add_arguments(parser)
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--limit", type=int, help="longest sequence; default: the model's")
    parser.add_argument("--max-batch-tokens", type=int, help="of the default grid")
    report.add_arguments(parser)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--buckets", help="such as 1x32,8x128; default: the default grid")
    parser.add_argument("--repeat", type=int, default=15, help="runs of each bucket")
    parser.add_argument("--adapters", metavar="COUNTxRANK", help="also run with these, such as 2x8")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every bucket, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    model = subject.load(args)
    args.dtype = dtype = dtype_of(args)
    grid = chosen_grid(args, model)
    replica = subject.replica(model, args, [grid], dtype)
    print(f"{model.name}, {dtype}, {report.device_name()}, {len(grid.buckets)} buckets")
    adapted = None
    if args.adapters:
        count, rank = map(int, args.adapters.split("x"))
        changed = subject.with_adapters(model, count, rank)
        adapted = partial(run_of, subject.replica(changed, args, [grid], dtype), count)
    with empty_compile_cache():
        rows = [measure(model, replica, bucket, args.repeat, adapted) for bucket in grid.buckets]
    report.show(rows)
    facts = {"model": model.name, "dtype": dtype, "repeat": args.repeat, "buckets": rows}
    facts |= {"adapters": args.adapters} if args.adapters else {}
    report.finish("bench_model", argv, facts, args.out)


def chosen_grid(args: Namespace, model: Subject) -> BucketGrid:
    """The grid that the arguments name, or the default grid for their limit and token budget."""
    if args.buckets:
        pairs = [text.split("x") for text in args.buckets.split(",")]
        return BucketGrid(tuple(Bucket(int(rows), int(length)) for rows, length in pairs))
    return usual_grid(args, model, limit_of(args, model), budget_of(args, model))


def usual_grid(args: Namespace, model: Subject, limit: int, budget: int) -> BucketGrid:
    """The grid that the server would choose for this limit and token budget."""
    native_choice = subject.native_choice_of(model, args, dtype_of(args))
    return default_grid(limit, budget, join=native_choice.joins)


def dtype_of(args: Namespace) -> DType:
    """The dtype that the arguments name, or the device's own."""
    return args.dtype or Calibration(jax.local_devices()[0]).native_dtype()


def limit_of(args: Namespace, model: Subject) -> int:
    """The input limit in tokens that the arguments name, or the model's."""
    return args.limit or model.spec.max_input_tokens


def budget_of(args: Namespace, model: Subject) -> int:
    """The token budget that the arguments name, or the one that the server would choose."""
    if args.max_batch_tokens:
        return args.max_batch_tokens
    device, dtype = jax.local_devices()[0], dtype_of(args)
    native_choice = subject.native_choice_of(model, args, dtype)
    return Calibration(device).batch_tokens(model.program, dtype, native_choice.joins)


def measure(
    model: Subject,
    replica: Replica,
    bucket: Bucket,
    runs: int,
    adapted: Callable[[Bucket, np.ndarray], Callable] | None = None,
) -> dict[str, Any]:
    """Measure a bucket, and return its row; `adapted` is `run_of` of a model with adapters."""
    cold_s, cached_s = seconds_of(replica, bucket), seconds_of(replica, bucket)
    planes, lengths = full_planes(bucket, model)
    ceiling = products(
        model, replica.dtype, bucket.tokens, replica.devices[0], replica.native_layout
    )
    calls = [lambda: replica.run(bucket, planes, (replica.primary,)), ceiling]
    if adapted is not None:
        calls.insert(1, adapted(bucket, planes))
    times, *with_adapters, least = report.timed_in_turn(calls, runs)
    flops = subject.useful_flops(model.spec, model.program, lengths)
    products_flops = 2.0 * bucket.tokens * sum(map(math.prod, model.program.products))
    row = {
        "bucket": str(bucket),
        "tokens": bucket.tokens,
        "cold_s": cold_s,
        "cached_s": cached_s,
        **times.row(),
        "tokens_per_s": bucket.tokens / times.median * 1000,
        "tflop_per_s": flops / times.median / 1e9,
        "ceiling_ms": least.median,
        "ceiling_tflop_per_s": products_flops / least.median / 1e9,
        "share": least.median / times.median,
        "temporary_mb": replica.temporary_bytes(bucket) / 1e6,
    }
    return row | {"times_plain": with_adapters[0].times(times)} if with_adapters else row


def run_of(adapted: Replica, count: int, bucket: Bucket, planes: np.ndarray) -> Callable[[], Any]:
    """Compile a bucket of a model with `count` adapters, and return a function that runs it."""
    adapted.compile(bucket)
    numbers = np.arange(bucket.rows, dtype=np.int32)[None, :, None] % (count + 1)
    numbered = np.concatenate([planes, np.repeat(numbers, bucket.length, axis=2)])
    return lambda: adapted.run(bucket, numbered, (adapted.primary,))


def seconds_of(replica: Replica, bucket: Bucket) -> float:
    """The seconds to compile a bucket."""
    start = time.perf_counter()
    replica.compile(bucket)
    return time.perf_counter() - start


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


def products(model: Subject, dtype: DType, tokens: int, device: Any, native_layout: bool = False):
    """Compile a program with only the model's matrix products, and return a function that runs it.

    It multiplies `tokens` tokens, by XLA, or with `native_layout` by the native kernels. Operands
    have the model's dtype and sums are float32, as in the model. Each product takes the result of
    the one before, rounded and cut to its width. Independent products would all be kept in memory
    at once, and on a CPU new memory costs more than the products.
    """
    draw = np.random.default_rng(0)
    shapes = model.program.products
    weights = [_placed(draw, shape, dtype, device) for shape in shapes]
    first = _placed(draw, (tokens, shapes[0][0]), dtype, device)
    if native_layout:
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


@contextmanager
def empty_compile_cache() -> Iterator[Path]:
    """Use an empty folder as JAX's persistent cache in the context, and store every program."""
    settings = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with tempfile.TemporaryDirectory() as folder:
        try:
            _use_cache(settings | {"jax_compilation_cache_dir": folder})
            yield Path(folder)
        finally:
            _use_cache(before)


def _use_cache(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX chooses its cache once, at the first compilation


if __name__ == "__main__":
    main()
