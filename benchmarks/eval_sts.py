"""Checks the quality on STS-B: Spearman x 100 of the cosine similarities against a published value.

`make eval` runs it. float32 must give 82.03 +- 0.02 (which transformers and torch give on the same
file), and the device's default dtype 82.03 +- 0.1. The exit status is 1 if a score is outside, and
0 if it is inside or there is no data, which is reported as "skipped".

    python -m benchmarks.eval_sts
    python -m benchmarks.eval_sts sentence-transformers/all-mpnet-base-v2 --expected 83.42
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks import report
from benchmarks.workloads import DATA, sts_pairs
from jaxembed import Embedder, EngineConfig
from jaxembed.data.spec import DType

EXPECTED = 82.03  # all-MiniLM-L6-v2, transformers + torch float32, as published
TOLERANCE = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.1}
FILE = "stsb/stsb-en-test.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """Score the model, and print and write the results. Returns the exit status."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder with {FILE}")
    parser.add_argument("--dtype", choices=get_args(DType), help="only this one")
    parser.add_argument("--expected", type=float, default=EXPECTED)
    parser.add_argument("--tolerance", type=float, help="instead of the dtype's own")
    parser.add_argument("--cache-dir", type=Path)
    args = report.parse(parser, argv)
    report.configure_jax()
    path = args.data / FILE
    facts: dict[str, Any] = {"model": args.model, "expected": args.expected}
    if not path.is_file():
        print(f"skipped: no {FILE} in the folder given by --data")
        report.finish(args, facts | {"skipped": True})
        return 0
    pairs = sts_pairs(path)
    rows = [evaluate(args, pairs, args.dtype or "float32")]
    if args.dtype is None:
        default = evaluate(args, pairs, None)
        rows += [default] if default["dtype"] != "float32" else []
    report.show(rows, f"STS-B test, {len(pairs)} pairs, {report.device_name()}")
    passed = all(row["passed"] for row in rows)
    report.finish(args, facts | {"results": rows, "passed": passed})
    return 0 if passed else 1


def evaluate(args: Namespace, pairs: Sequence[tuple[str, str, float]], dtype: DType | None):
    """Score the pairs in one dtype; None means the device's default. Returns a row."""
    # all buckets compile before the first text: a process that ends while XLA compiles is aborted
    config = EngineConfig(dtype=dtype, devices=1, warmup="full")
    embedder = Embedder(args.model, cache_dir=args.cache_dir, config=config)
    start = time.perf_counter()
    first = embedder.encode([pair[0] for pair in pairs], normalize=True)
    second = embedder.encode([pair[1] for pair in pairs], normalize=True)
    seconds, dtype_used = time.perf_counter() - start, embedder.dtype
    embedder.close()
    score = 100 * spearman((first * second).sum(axis=1), np.array([pair[2] for pair in pairs]))
    tolerance = TOLERANCE[dtype_used] if args.tolerance is None else args.tolerance
    return {
        "dtype": dtype_used,
        "spearman": score,
        "expected": args.expected,
        "difference": score - args.expected,
        "tolerance": tolerance,
        "passed": bool(abs(score - args.expected) <= tolerance),
        "seconds": seconds,
    }


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    """The ranks of values, from 1; ties get the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[index]


if __name__ == "__main__":
    sys.exit(main())
