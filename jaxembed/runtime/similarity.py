"""Compares texts by the outputs of a model: by dense vectors, sparse embeddings, multi-vector
embeddings, or several of these for a model such as BGE-M3."""

from collections.abc import Sequence

import msgspec
import numpy as np
from jaxtyping import Float, Int

from jaxembed.data.inputs import Image
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.work import Ragged, select_inputs
from jaxembed.runtime.options import Embeddings, Similarities, best_windows
from jaxembed.runtime.postprocess import cosines, maxsim, products, similarity

Weights = dict[OutputName, float]

MIN_SIMILARITY = -1.0  # the lowest cosine
LEAST_WEIGHT = 1e-6  # of a block of documents; the weights may not all be 0


def weights_of(offered: Sequence[OutputName], asked: Sequence[float] | None) -> Weights:
    """Return the weight of each output in a combined score. The weights sum to 1.

    `asked` are the requested weights of dense, sparse and multi_vector, in this order. If it is
    None, all `offered` outputs weigh the same. An output with weight 0 is left out.
    """
    raw = dict(zip(REPRESENTATIONS, asked, strict=True)) if asked else dict.fromkeys(offered, 1.0)
    total = sum(raw.values())
    return {name: weight / total for name, weight in raw.items() if weight}


def compare_first(answer: Embeddings) -> Float[np.ndarray, " others"]:
    """Return the similarity of the first text of an answer to each other text of the answer.

    The answer has one output. The similarity is the cosine of dense vectors or sparse embeddings,
    or the MeanMaxSim of multi-vector embeddings, which `compare_outputs` describes."""
    if "dense" in answer.values:
        return similarity(answer.dense[0], answer.dense[1:])
    if "sparse" in answer.values:
        rows = answer.sparse
        return cosines(rows[[0]], rows[range(1, len(rows))])[0]
    vectors = answer.multi_vector
    sums = maxsim(vectors[0], Ragged(vectors.values, vectors.offsets[1:]))
    return _mean_maxsim(vectors[0], sums)


def compare_outputs(
    query: Embeddings, documents: Embeddings, weights: Weights, texts: Sequence[str | Image]
) -> Similarities:
    """Compare the outputs of a query with those of each document.

    `texts` are the documents, which may be images. An empty text gets the score MIN_SIMILARITY, so
    that no document ranks below it. The score of another document is a mean of these similarities,
    weighted by `weights`:

    - dense vectors and sparse embeddings: the inner product
    - multi-vector embeddings: the mean, over the query's vectors, of the largest inner product with
      a vector of the document (MeanMaxSim; Khattab and Zaharia 2020, arXiv:2004.12832)

    If only multi-vector embeddings are compared, the raw score is the sum over the query's vectors
    instead of the mean (MaxSim). A document that is divided into windows has the score of its best
    window.
    """
    raw = None
    similarities: dict[OutputName, np.ndarray] = {}
    if "dense" in weights:
        similarities["dense"] = documents.dense.astype(np.float64) @ query.dense[0]
    if "sparse" in weights:
        similarities["sparse"] = products(query.sparse, documents.sparse)[0]
    if "multi_vector" in weights:
        raw = _column(maxsim(query.multi_vector[0], documents.multi_vector))
        similarities["multi_vector"] = _mean_maxsim(query.multi_vector[0], raw[:, 0])
    scores = np.sum([weight * similarities[name] for name, weight in weights.items()], axis=0)
    chunks = None
    if documents.windows is not None:
        _, best, chunks = best_windows(scores, documents.windows)
        scores, raw = scores[best], None if raw is None else raw[best]
    is_empty = np.array([not text for text in texts], bool)
    scores = np.where(is_empty, MIN_SIMILARITY, scores)
    if raw is not None:
        lowest = MIN_SIMILARITY * len(query.multi_vector[0])
        raw = _column(np.where(is_empty, lowest, raw[:, 0]))
    answers = query, documents
    return Similarities(
        _column(scores),
        labels=("similarity",),
        score_function="sigmoid",  # has no effect, because `Similarities.shown` ignores it
        num_tokens=np.concatenate([answer.num_tokens for answer in answers]),
        truncated=sum(answer.truncated for answer in answers),
        tokenization_s=sum(answer.tokenization_s for answer in answers),
        queue_s=sum(answer.queue_s for answer in answers),
        inference_s=sum(answer.inference_s for answer in answers),
        cached=sum(answer.cached for answer in answers),
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
    """Return the score of each document with its query, float32, as `compare_outputs` computes it.

    Document k has the text `texts[k]`, and its query has the index `numbers[k]` in `queries`. Every
    query has at least one document. With `raw_scores`, the scores are raw if there are raw scores.
    """
    result, query_of = np.empty(len(texts), np.float32), np.array(numbers, np.int64)
    order = np.argsort(query_of, kind="stable")
    ends = np.cumsum(np.bincount(query_of))  # where the documents of each query end in `order`
    for index, documents_of in enumerate(np.split(order, ends)[:-1]):
        scores = compare_outputs(
            _select(queries, np.array([index])),
            _select(documents, documents_of),
            weights,
            [texts[int(k)] for k in documents_of],
        )
        result[documents_of] = scores.shown(raw_scores)[:, 0]
    return result


def list_scores(
    vectors: Float[np.ndarray, "slots width"], slots: Int[np.ndarray, " blocks"]
) -> Float[np.ndarray, " documents"]:
    """Return the scores of documents that were read together with their query, float32.

    The rows of a block, of which there are `slots`, are the vectors of its documents and last that
    of the query. A score is the cosine of the document's vector and a mean of the query's vectors,
    which are not normalised; a block weighs (1 + c) / 2, where c is the largest cosine of its
    documents. From `rerank` of jina-reranker-v3's modeling.py.
    """
    if not len(slots):
        return np.zeros(0, np.float32)
    blocks = [(rows[:-1], rows[-1]) for rows in np.split(vectors, np.cumsum(slots)[:-1])]
    best = [similarity(query, documents).max() for documents, query in blocks]
    weights = np.maximum(np.add(best, 1.0), LEAST_WEIGHT)  # their mean needs no factor
    query = np.average([query for _, query in blocks], axis=0, weights=weights)
    return similarity(query, np.concatenate([documents for documents, _ in blocks]))


def _select(answer: Embeddings, chosen: Int[np.ndarray, " n"]) -> Embeddings:
    """Return the part of an answer for the inputs with the indices `chosen`."""
    return msgspec.structs.replace(
        answer, values=select_inputs(answer.values, chosen), num_tokens=answer.num_tokens[chosen]
    )


def _mean_maxsim(query: np.ndarray, sums: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Convert MaxSim sums to means over the vectors of the query, which is `[vectors, width]`."""
    return sums / max(len(query), 1)


def _column(scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 1"]:
    return np.asarray(scores, np.float32)[:, None]
