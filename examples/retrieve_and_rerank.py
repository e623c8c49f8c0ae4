"""Search in two stages: an embedder retrieves from all documents, a reranker sorts what it found.

    python examples/retrieve_and_rerank.py corpus.jsonl queries.jsonl
    python examples/retrieve_and_rerank.py corpus.jsonl.gz queries.jsonl --qrels qrels/test.tsv

The files are in BEIR's format: a JSON object a line with `_id`, `text` and, for documents, perhaps
`title`; judgements as tab-separated query id, document id and relevance below a heading. Without
them both rankings are shown and nothing is scored.
"""

import csv
import gzip
import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxembed import Embedder

QUERIES_AT_ONCE = 4  # the next is tokenized while the device scores another
CUTOFF = 10  # of nDCG


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    documents = dict(read(args.corpus))
    queries = dict(read(args.queries))
    judged = read_qrels(args.qrels) if args.qrels else {}
    if judged:
        queries = {query: text for query, text in queries.items() if query in judged}

    # two models in one process share the device
    with Embedder(args.embedder) as embedder, Embedder(args.reranker) as reranker:
        retrieved = retrieve(embedder, queries, documents, args.top_k)
        reranked = rerank(reranker, queries, documents, retrieved)

    for query in list(queries)[: args.show]:
        print(f"\n{queries[query]}")
        for stage, ranking in (("retrieved", retrieved[query]), ("reranked", reranked[query])):
            print(f"  {stage}:")
            for document in ranking[:3]:
                print(f"    {document:>12}  {documents[document][:70]}")
    if judged:
        print(f"\nnDCG@{CUTOFF}, mean of {len(queries)} queries")
        print(f"  retrieved: {ndcg(retrieved, judged):.4f}")
        print(f"  reranked:  {ndcg(reranked, judged):.4f}")


def retrieve(
    embedder: Embedder, queries: dict[str, str], documents: dict[str, str], top_k: int
) -> dict[str, list[str]]:
    """The ids of the `top_k` documents nearest to each query, best first."""
    ids = list(documents)
    corpus = embedder.encode_document(list(documents.values()), normalize=True)  # [documents, dim]
    asked = embedder.encode_query(list(queries.values()), normalize=True)  # [queries, dim]
    order = np.argsort(-(asked @ corpus.T), axis=1, kind="stable")[:, :top_k]
    return {query: [ids[i] for i in row] for query, row in zip(queries, order, strict=True)}


def rerank(
    reranker: Embedder,
    queries: dict[str, str],
    documents: dict[str, str],
    retrieved: dict[str, list[str]],
) -> dict[str, list[str]]:
    """The retrieved ids of each query, best first by the reranker."""

    def reranked(query: str) -> list[str]:
        found = retrieved[query]
        ranking = reranker.rerank(queries[query], [documents[document] for document in found])
        return [found[ranked.index] for ranked in ranking]

    with ThreadPoolExecutor(QUERIES_AT_ONCE) as threads:
        return dict(zip(queries, threads.map(reranked, queries), strict=True))


def ndcg(rankings: dict[str, list[str]], judged: dict[str, dict[str, int]]) -> float:
    """nDCG@10 with linear gains, as trec_eval has it, averaged over the queries."""

    def dcg(gains: Sequence[int]) -> float:
        return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:CUTOFF]))

    scores = []
    for query, ranking in rankings.items():
        best = dcg(sorted(judged[query].values(), reverse=True))
        found = dcg([judged[query].get(document, 0) for document in ranking])
        scores.append(found / best if best else 0.0)
    return sum(scores) / len(scores)


def read(path: Path) -> Iterator[tuple[str, str]]:
    """The id and the text of every line; a title goes before its text."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            yield str(record["_id"]), f"{record.get('title', '')} {record['text']}".strip()


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """The relevance of documents to queries: `{query: {document: relevance}}`."""
    judged: dict[str, dict[str, int]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t")
        next(rows)  # the heading
        for query, document, relevance in rows:
            judged.setdefault(query, {})[document] = int(relevance)
    return judged


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help=".jsonl or .jsonl.gz")
    parser.add_argument("queries", type=Path, help=".jsonl or .jsonl.gz")
    parser.add_argument("--qrels", type=Path, help="judgements, .tsv: score both stages")
    parser.add_argument("--embedder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reranker", default="BAAI/bge-reranker-base")
    parser.add_argument("--top-k", type=int, default=100, help="documents that are reranked")
    parser.add_argument("--show", type=int, default=3, help="queries whose rankings are printed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
