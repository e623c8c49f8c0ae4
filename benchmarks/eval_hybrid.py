"""Scores hybrid search on SciFact: nDCG@10 of a dense model, of a sparse one, and of both fused.

It runs the functions of examples/hybrid_search.py, and so needs qdrant-client, which nothing else
here does. A score depends on the models and the data alone, apart from rounding.

    pip install qdrant-client
    python -m benchmarks.eval_hybrid --sparse naver/splade-cocondenser-ensembledistil
"""

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks import report
from benchmarks.workloads import DATA
from jaxembed import Embedder, EngineConfig
from jaxembed.data.spec import DType

FOLDER = "scifact"
RANKINGS = {"dense": ["dense"], "sparse": ["sparse"], "fused": ["dense", "sparse"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Score the models, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("--dense", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--sparse", required=True, help="directory or hub id")
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder with {FOLDER}, as BEIR")
    parser.add_argument("--dtype", choices=get_args(DType), help="default: the device's")
    parser.add_argument("--cache-dir", type=Path)
    args = report.parse(parser, argv)
    report.configure_jax()
    facts = evaluate(args)
    title = f"SciFact test, {facts['documents']} abstracts, {facts['queries']} queries"
    report.show(facts["results"], title)
    report.finish(args, facts)


def evaluate(args: Namespace) -> dict[str, Any]:
    """Index the abstracts, and score the rankings of the queries by each kind of vector."""
    # imported here, so that a test can import this file without qdrant-client
    from examples import hybrid_search, retrieve_and_rerank

    folder = args.data / FOLDER
    documents = dict(retrieve_and_rerank.read(folder / "corpus.jsonl.gz"))
    judged = retrieve_and_rerank.read_qrels(folder / "qrels" / "test.tsv")
    texts = dict(retrieve_and_rerank.read(folder / "queries.test.jsonl"))
    queries = {name: texts[name] for name in judged}

    # all buckets compile before the first text: a process that ends while XLA compiles is aborted
    config = EngineConfig(dtype=args.dtype, devices=1, warmup="full")
    client = hybrid_search.QdrantClient(":memory:")
    with (
        Embedder(args.dense, cache_dir=args.cache_dir, config=config) as dense,
        Embedder(args.sparse, cache_dir=args.cache_dir, config=config) as sparse,
    ):
        embedders = [(dense, ["dense"]), (sparse, ["sparse"])]
        start = time.perf_counter()
        hybrid_search.index(client, embedders, documents)
        seconds = time.perf_counter() - start
        vectors = hybrid_search.embed(embedders, list(queries.values()), "query")
        models = {
            output: {"model": embedder.name, "dtype": embedder.dtype}
            for embedder, (output,) in embedders
        }
    rows = []
    for ranking, kinds in RANKINGS.items():
        found = {}
        for query, of in zip(queries, vectors, strict=True):
            chosen = {kind: of[kind] for kind in kinds}
            best = hybrid_search.search(client, chosen, retrieve_and_rerank.CUTOFF)
            found[query] = [name for _, name, _ in best]
        rows.append({"ranking": ranking, "ndcg_at_10": retrieve_and_rerank.ndcg(found, judged)})
    return {
        "models": models,
        "documents": len(documents),
        "queries": len(queries),
        "terms_of_a_query": float(np.mean([len(of["sparse"].indices) for of in vectors])),
        "index_s": seconds,
        "qdrant_client": report.versions(["qdrant-client"])["qdrant-client"],
        "results": rows,
    }


if __name__ == "__main__":
    main()
