"""Compares ways to score documents of many vectors against a query by MaxSim on the host.

The ceiling is the matrix products alone, in the blocks of `jaxembed.runtime.postprocess`. Beside
them stand `maxsim` as it is, and plain numpy without blocks. Vectors are random and of length one;
all ways take turns.

    python -m benchmarks.bench_maxsim --query 32 --documents 1000 --length 180 --dim 128

Columns: `times` is how many times as long as `maxsim` a way takes, in the median round; `extra_mb`
the most memory that numpy holds beside the vectors, in units of 1e6 bytes, without BLAS's own.
"""

from collections.abc import Callable, Sequence
from tracemalloc import get_traced_memory, start, stop

import numpy as np

from benchmarks import report
from jaxembed.data.work import Ragged
from jaxembed.runtime import postprocess

OURS = "maxsim"
CEILING = "products alone"

Way = Callable[[], np.ndarray]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each way, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("--query", type=int, default=32, help="vectors of the query")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--length", type=int, default=180, help="vectors of each document")
    parser.add_argument("--dim", type=int, default=128, help="dimensions of each vector")
    parser.add_argument("--rounds", type=int, default=51)
    args = report.parse(parser, argv)
    random = np.random.default_rng(0)
    query = unit(random, args.query, args.dim)
    offsets = np.arange(args.documents + 1, dtype=np.int64) * args.length
    documents = Ragged(unit(random, int(offsets[-1]), args.dim), offsets)
    ways = ways_of(query, documents)
    for name, way in ways.items():
        if name != CEILING:
            np.testing.assert_allclose(way(), ways[OURS](), rtol=1e-5, err_msg=name)
    times = dict(zip(ways, report.timed_in_turn(list(ways.values()), args.rounds), strict=True))
    rows = [
        {
            "way": name,
            **times[name].row(),
            "times": times[name].times(times[OURS]),
            "extra_mb": extra_bytes(way) / 1e6,
        }
        for name, way in ways.items()
    ]
    facts = {name: getattr(args, name) for name in ("query", "documents", "length", "dim")}
    report.show(rows, f"MaxSim, {facts}, {report.device_name()}")
    report.finish(args, facts | {"rounds": args.rounds, "results": rows})


def unit(random: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Random vectors of length one, float32."""
    vectors = random.standard_normal((count, dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def ways_of(query: np.ndarray, documents: Ragged) -> dict[str, Way]:
    """The ways by name. All return the scores, but for the ceiling."""
    values, cuts = documents.values, documents.offsets[:-1]

    def at_once(products: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(products, cuts, axis=1).sum(axis=0)

    def rows_first() -> np.ndarray:
        return np.maximum.reduceat(values @ query.T, cuts, axis=0).sum(axis=1)

    def one_by_one() -> np.ndarray:
        return np.array([(query @ document.T).max(axis=1).sum() for document in documents])

    return {
        CEILING: lambda: products_alone(query, values),
        OURS: lambda: postprocess.maxsim(query, documents),
        "all at once, query first": lambda: at_once(query @ values.T),
        "all at once, rows first": rows_first,
        "all at once, einsum": lambda: at_once(np.einsum("qd,rd->qr", query, values)),
        "document by document": one_by_one,
    }


def products_alone(query: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The products of each block, which replace those of the one before. Returns no scores."""
    rows = min(postprocess.PRODUCT_BYTES // (4 * len(query)), len(values))
    buffer = np.empty(len(query) * rows, np.float32)
    for row in range(0, len(values), rows):
        block = values[row : row + rows]
        products = buffer[: len(query) * len(block)].reshape(len(query), len(block))
        np.matmul(query, block.T, out=products)
    return buffer


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
