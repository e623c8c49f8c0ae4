"""Hybrid search: dense vectors and weights of terms, whose rankings Qdrant fuses in this process.

    pip install qdrant-client
    python hybrid_search.py corpus.jsonl "how do vaccines work"
    python hybrid_search.py corpus.jsonl "a question" --dense BAAI/bge-m3 --sparse BAAI/bge-m3

Each line of the file is a JSON object with `_id`, `text` and perhaps `title`. A model is a hub id
or a folder. One that gives both outputs is named twice and loaded once.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from qdrant_client import QdrantClient, models

from jaxembed import Embedder

DENSE = "sentence-transformers/all-MiniLM-L6-v2"
SPARSE = "naver/splade-cocondenser-ensembledistil"
COLLECTION = "texts"
CANDIDATES = 100  # of each ranking
RANK_CONSTANT = 60  # a text scores 1 / (60 + its rank), from 0, in each ranking

Embedders = Sequence[tuple[Embedder, Sequence[str]]]  # with the outputs that are asked of each


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Search a corpus by meaning and by terms.")
    parser.add_argument("corpus", type=Path, help="a .jsonl file: `_id` and `text` in each line")
    parser.add_argument("query")
    parser.add_argument("--dense", default=DENSE, help="model of the dense vectors (%(default)s)")
    parser.add_argument("--sparse", default=SPARSE, help="model of the terms (%(default)s)")
    parser.add_argument("--limit", type=int, default=10, help="texts to show (%(default)s)")
    options = parser.parse_args(arguments)

    client = QdrantClient(":memory:")  # or path="folder", or the url of a server
    with ExitStack() as stack:
        embedders = load(stack, options.dense, options.sparse)
        index(client, embedders, dict(read(options.corpus)))
        (vectors,) = embed(embedders, [options.query], "query")
    for score, name, text in search(client, vectors, options.limit):
        print(f"{score:.4f}  {name}  {text[:70]}")


def load(stack: ExitStack, dense: str, sparse: str) -> Embedders:
    """Load the models, which the stack closes, with the outputs that are asked of each."""
    if dense == sparse:
        return [(stack.enter_context(Embedder(dense)), ["dense", "sparse"])]
    wanted = ((dense, ["dense"]), (sparse, ["sparse"]))
    return [(stack.enter_context(Embedder(model)), outputs) for model, outputs in wanted]


def embed(embedders: Embedders, texts: Sequence[str], role: str) -> list[dict[str, Any]]:
    """The dense vector and the weights of terms of each text, as Qdrant takes them."""
    found = {}
    for embedder, outputs in embedders:
        found |= embedder.encode_outputs(texts, outputs, role=role)
    rows = zip(found["dense"], found["sparse"].indices, found["sparse"].values, strict=True)
    return [
        {
            "dense": vector.tolist(),
            "sparse": models.SparseVector(indices=terms.tolist(), values=weights.tolist()),
        }
        for vector, terms, weights in rows
    ]


def index(client: QdrantClient, embedders: Embedders, texts: dict[str, str]) -> None:
    """Embed the texts and put them into a new collection, with their names."""
    vectors = embed(embedders, list(texts.values()), "document")
    size = len(vectors[0]["dense"])
    client.create_collection(
        COLLECTION,
        vectors_config={"dense": models.VectorParams(size=size, distance=models.Distance.COSINE)},
        sparse_vectors_config={"sparse": models.SparseVectorParams()},
    )
    points = [
        models.PointStruct(id=number, vector=vector, payload={"name": name, "text": text})
        for number, (vector, (name, text)) in enumerate(zip(vectors, texts.items(), strict=True))
    ]
    client.upload_points(COLLECTION, points)


def search(
    client: QdrantClient, vectors: dict[str, Any], limit: int
) -> list[tuple[float, str, str]]:
    """The score, the name and the text of what ranks best by all of a query's vectors together."""
    rankings = [
        models.Prefetch(query=vector, using=kind, limit=CANDIDATES)
        for kind, vector in vectors.items()
    ]
    fusion = models.RrfQuery(rrf=models.Rrf(k=RANK_CONSTANT))  # reciprocal rank fusion
    found = client.query_points(COLLECTION, prefetch=rankings, query=fusion, limit=limit)
    return [
        (point.score, payload["name"], payload["text"])
        for point in found.points
        if (payload := point.payload)
    ]


def read(path: Path) -> Iterator[tuple[str, str]]:
    """The name and the text of every line; a title goes before its text."""
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            yield str(record["_id"]), f"{record.get('title', '')} {record['text']}".strip()


if __name__ == "__main__":
    main()
