"""Compares ways to score documents of many vectors against a query by MaxSim on the host.

The ceiling is the matrix products alone, in the blocks of `jaxembed.runtime.postprocess`. Beside
them stand `maxsim` as it is, with other block sizes and in two threads, the other layout of the
products, and plain numpy without blocks. Vectors are random and of length one; all ways take turns.

    python -m benchmarks.bench_maxsim --query 32 --documents 1000 --length 180 --dim 128

Columns: `times` is how many times as long as `maxsim` a way takes, in the median round;
`extra_mb` the most memory that numpy holds beside the vectors, in units of 1e6 bytes, without
BLAS's own; `error` the worst difference to float64.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from tracemalloc import get_traced_memory, start, stop
from typing import Any

import numpy as np

from benchmarks import report
from jaxembed.data.work import Ragged
from jaxembed.runtime import postprocess as module
from jaxembed.runtime.postprocess import maxsim

OURS = "maxsim"
CEILING = "products alone"
MIB = 1 << 20

Way = Callable[[], np.ndarray]


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    report.add_arguments(parser)
    parser.add_argument("--query", type=int, default=32, help="vectors of the query")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--length", type=int, default=180, help="vectors of each document")
    parser.add_argument("--dim", type=int, default=128, help="dimensions of each vector")
    parser.add_argument("--blocks", default="0.5,2,16", help="other block sizes, in MiB")
    parser.add_argument("--rounds", type=int, default=51)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each way, and print and write the results."""
    args = parse(argv)
    random = np.random.default_rng(0)
    query = unit(random, args.query, args.dim)
    offsets = np.arange(args.documents + 1, dtype=np.int64) * args.length
    documents = Ragged(unit(random, int(offsets[-1]), args.dim), offsets)
    with ThreadPoolExecutor(2) as executor:
        ways = ways_of(query, documents, executor)
        for size in map(float, args.blocks.split(",")):
            ways[f"{OURS}, blocks of {size:g} MiB"] = partial(in_blocks, query, documents, size)
        times = report.timed_in_turn(list(ways.values()), args.rounds)
        exact = exact_scores(query, documents)
        rows = rows_of(ways, dict(zip(ways, times, strict=True)), exact)
    sizes = f"{args.query} x {args.documents} x {args.length} vectors of {args.dim} dimensions"
    report.show(rows, f"MaxSim, {sizes}, {report.device_name()}")
    facts = {name: getattr(args, name) for name in ("query", "documents", "length", "dim")}
    facts |= {"rounds": args.rounds, "block_mib": module.PRODUCT_BYTES / MIB, "results": rows}
    report.finish("bench_maxsim", argv, facts, args.out)


def unit(random: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Random vectors of length one, float32."""
    vectors = random.standard_normal((count, dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def ways_of(query: np.ndarray, documents: Ragged, executor: ThreadPoolExecutor) -> dict[str, Way]:
    """The ways by name. All return the scores, but for the ceiling."""
    return {
        CEILING: lambda: products_alone(query, documents),
        OURS: lambda: maxsim(query, documents),
        f"{OURS} in two threads": lambda: in_threads(query, documents, executor),
        "blocks, rows first": lambda: rows_first(query, documents),
        "all at once, query first": lambda: at_once(query, documents),
        "all at once, rows first": lambda: at_once_rows_first(query, documents),
        "all at once, einsum": lambda: by_einsum(query, documents),
        "document by document": lambda: one_by_one(query, documents),
    }


def products_alone(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """The products of each block, which replace those of the one before. Returns no scores."""
    values = documents.values
    rows = min(module.PRODUCT_BYTES // (4 * len(query)), len(values))
    buffer = np.empty(len(query) * rows, np.float32)
    for row in range(0, len(values), rows):
        block = values[row : row + rows]
        products = buffer[: len(query) * len(block)].reshape(len(query), len(block))
        np.matmul(query, block.T, out=products)
    return np.full(len(documents), np.nan, np.float32)


def in_threads(query: np.ndarray, documents: Ragged, executor: ThreadPoolExecutor) -> np.ndarray:
    """Half of the documents in each of two threads."""
    offsets, middle = documents.offsets, len(documents) // 2
    halves = (offsets[: middle + 1], offsets[middle:])
    parts = [Ragged(documents.values, half) for half in halves]
    return np.concatenate(list(executor.map(partial(maxsim, query), parts)))


def in_blocks(query: np.ndarray, documents: Ragged, mib: float) -> np.ndarray:
    """`maxsim` with blocks of another size."""
    with block_bytes(int(mib * MIB)):
        return maxsim(query, documents)


@contextmanager
def block_bytes(size: int) -> Iterator[None]:
    """Set the size of a block in the context."""
    before, module.PRODUCT_BYTES = module.PRODUCT_BYTES, size
    try:
        yield
    finally:
        module.PRODUCT_BYTES = before


def rows_first(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """Blocks of whole documents, with a row of products for each of their vectors."""
    offsets, transposed = documents.offsets, np.ascontiguousarray(query.T)
    length = int(offsets[1] - offsets[0])
    count = max(module.PRODUCT_BYTES // (4 * len(query) * length), 1)
    buffer = np.empty((count * length, len(query)), np.float32)
    scores = np.empty(len(documents), np.float32)
    for first in range(0, len(documents), count):
        cuts = offsets[first : first + count + 1]
        products = buffer[: cuts[-1] - cuts[0]]
        np.matmul(documents.values[cuts[0] : cuts[-1]], transposed, out=products)
        maxima = np.maximum.reduceat(products, cuts[:-1] - cuts[0], axis=0)
        scores[first : first + count] = maxima.sum(axis=1)
    return scores


def at_once(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """All products in one matrix, a row for each vector of the query."""
    products = query @ documents.values.T
    return np.maximum.reduceat(products, documents.offsets[:-1], axis=1).sum(axis=0)


def at_once_rows_first(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """All products in one matrix, a row for each vector of the documents."""
    products = documents.values @ query.T
    return np.maximum.reduceat(products, documents.offsets[:-1], axis=0).sum(axis=1)


def by_einsum(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """`at_once` without BLAS."""
    products = np.einsum("qd,rd->qr", query, documents.values)
    return np.maximum.reduceat(products, documents.offsets[:-1], axis=1).sum(axis=0)


def one_by_one(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """A product for each document."""
    scores = [(query @ document.T).max(axis=1).sum() for document in documents]
    return np.array(scores, np.float32)


def exact_scores(query: np.ndarray, documents: Ragged) -> np.ndarray:
    """The scores in float64, document by document."""
    exact = query.astype(np.float64)
    return np.array([(exact @ one.astype(np.float64).T).max(axis=1).sum() for one in documents])


def rows_of(
    ways: dict[str, Way], times: dict[str, report.Times], exact: np.ndarray
) -> list[dict[str, Any]]:
    """The row of each way."""
    return [
        {
            "way": name,
            **times[name].row(),
            "times": times[name].times(times[OURS]),
            "extra_mb": extra_bytes(way) / 1e6,
            "error": None if name == CEILING else float(np.abs(way() - exact).max()),
        }
        for name, way in ways.items()
    ]


def extra_bytes(way: Way) -> int:
    """The most memory that numpy holds during a call, its result included."""
    start()
    try:
        way()
        return get_traced_memory()[1]
    finally:
        stop()


if __name__ == "__main__":
    main()
