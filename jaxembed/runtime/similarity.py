"""How similar texts are by their outputs: by dense vectors, by weights of terms, token by token, or
of BGE-M3 by all three. Uses no device and no HTTP."""

from collections.abc import Sequence

import msgspec
import numpy as np
from jaxtyping import Float, Int

from jaxembed.data.inputs import Image
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.work import Ragged, chosen_rows
from jaxembed.runtime.options import Embeddings, Similarities, best_windows
from jaxembed.runtime.postprocess import cosines, maxsim, products, similarity

Weights = dict[OutputName, float]

LEAST_SIMILARITY = -1.0  # of vectors of length one


def weights_of(offered: Sequence[OutputName], asked: Sequence[float] | None) -> Weights:
    """The share of each output in a score: those asked for, of dense, sparse and multi_vector, over
    their sum; else each of those offered has the same. Outputs without a share are left out."""
    given = dict(zip(REPRESENTATIONS, asked, strict=True)) if asked else dict.fromkeys(offered, 1.0)
    total = sum(given.values())
    return {name: weight / total for name, weight in given.items() if weight}


def compare_first(answer: Embeddings) -> Float[np.ndarray, " others"]:
    """How similar the first text of an answer with one output is to each of the others.

    Of dense vectors and of weights of terms it is the cosine. Of several vectors a text it is the
    mean over those of the first of the largest inner product with one of the other's, as in
    `compare_outputs`.
    """
    if "dense" in answer.values:
        return similarity(answer.dense[0], answer.dense[1:])
    if "sparse" in answer.values:
        rows = answer.sparse
        return cosines(rows[[0]], rows[range(1, len(rows))])[0]
    vectors = answer.multi_vector
    sums = maxsim(vectors[0], Ragged(vectors.values, vectors.offsets[1:]))
    return _means(vectors[0], sums)


def compare_outputs(
    query: Embeddings, documents: Embeddings, weights: Weights, texts: Sequence[str | Image]
) -> Similarities:
    """The similarities of a query's outputs, each with one row, and those of each document. `texts`
    are the documents, which may be images; an empty text has LEAST_SIMILARITY, so that none is
    ranked below it.

    The dense one is the inner product, the sparse one that of the weights of terms, and the one of
    several vectors the mean over the query's of the largest inner product with the document's
    (MeanMaxSim; Khattab and Zaharia 2020, arXiv:2004.12832). Their weighted mean is the score. Of
    several vectors alone the raw score is the sum (MaxSim). Of a document in windows the best one
    counts.
    """
    raw = None
    parts: dict[OutputName, np.ndarray] = {}
    if "dense" in weights:
        parts["dense"] = documents.dense.astype(np.float64) @ query.dense[0]
    if "sparse" in weights:
        parts["sparse"] = products(query.sparse, documents.sparse)[0]
    if "multi_vector" in weights:
        raw = _column(maxsim(query.multi_vector[0], documents.multi_vector))
        parts["multi_vector"] = _means(query.multi_vector[0], raw[:, 0])
    scores = np.sum([weight * parts[name] for name, weight in weights.items()], axis=0)
    chunks = None
    if documents.windows is not None:
        _, best, chunks = best_windows(scores, documents.windows)
        scores, raw = scores[best], None if raw is None else raw[best]
    is_empty = np.array([not text for text in texts], bool)
    scores = np.where(is_empty, LEAST_SIMILARITY, scores)
    if raw is not None:
        least = LEAST_SIMILARITY * len(query.multi_vector[0])
        raw = _column(np.where(is_empty, least, raw[:, 0]))
    both = query, documents
    return Similarities(
        _column(scores),
        ("similarity",),
        "sigmoid",
        num_tokens=np.concatenate([one.num_tokens for one in both]),
        truncated=sum(one.truncated for one in both),
        tokenization_s=sum(one.tokenization_s for one in both),
        queue_s=sum(one.queue_s for one in both),
        inference_s=sum(one.inference_s for one in both),
        cached=sum(one.cached for one in both),
        chunks=chunks,
        raw=raw if weights.keys() == {"multi_vector"} else None,
    )


def compare_pairs(
    queries: Embeddings,
    documents: Embeddings,
    weights: Weights,
    texts: Sequence[str],
    numbers: Sequence[int],
    *,
    raw_scores: bool,
) -> Float[np.ndarray, " documents"]:
    """The scores of documents, of which each has the query with its number, float32: those that
    `compare_outputs` gives. Each query has a document."""
    found, query_of = np.empty(len(texts), np.float32), np.array(numbers, np.int64)
    order = np.argsort(query_of, kind="stable")
    ends = np.cumsum(np.bincount(query_of))
    for number, chosen in enumerate(np.split(order, ends)[:-1]):
        scores = compare_outputs(
            _chosen(queries, np.array([number])),
            _chosen(documents, chosen),
            weights,
            [texts[int(k)] for k in chosen],
        )
        found[chosen] = scores.shown(raw_scores)[:, 0]
    return found


def _chosen(answer: Embeddings, chosen: Int[np.ndarray, " n"]) -> Embeddings:
    """The outputs of the inputs with these numbers."""
    return msgspec.structs.replace(
        answer, values=chosen_rows(answer.values, chosen), num_tokens=answer.num_tokens[chosen]
    )


def _means(query: np.ndarray, sums: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The means over a query's vectors of which these are the sums."""
    return sums / max(len(query), 1)


def _column(scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 1"]:
    return np.asarray(scores, np.float32)[:, None]
