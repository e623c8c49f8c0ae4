"""How well documents answer a query by the outputs of both: token by token, or of BGE-M3 by all
three. Uses no device and no HTTP."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxembed.maxsim import maxsim
from jaxembed.options import Embeddings, Similarities
from jaxembed.outputs import REPRESENTATIONS, OutputName
from jaxembed.terms import products

Weights = dict[OutputName, float]


def weights_of(offered: Sequence[OutputName], asked: Sequence[float] | None) -> Weights:
    """The share of each output in a score: those asked for, of dense, sparse and multi_vector, over
    their sum; else each of those offered has the same. Outputs without a share are left out."""
    given = dict(zip(REPRESENTATIONS, asked, strict=True)) if asked else dict.fromkeys(offered, 1.0)
    total = sum(given.values())
    return {name: weight / total for name, weight in given.items() if weight}


def compare_outputs(query: Embeddings, documents: Embeddings, weights: Weights) -> Similarities:
    """The similarities of a query's outputs, each with one row, and those of each document.

    The dense one is the inner product, the sparse one that of the weights of terms, and the one of
    several vectors the mean over the query's of the largest inner product with the document's
    (MeanMaxSim; Khattab and Zaharia 2020, arXiv:2004.12832). Their weighted mean is the score. Of
    several vectors alone the raw score is the sum (MaxSim).
    """
    raw = None
    parts: dict[OutputName, np.ndarray] = {}
    if "dense" in weights:
        parts["dense"] = documents.dense.astype(np.float64) @ query.dense[0]
    if "sparse" in weights:
        parts["sparse"] = products(query.sparse, documents.sparse)[0]
    if "multi_vector" in weights:
        raw = _column(maxsim(query.multi_vector[0], documents.multi_vector))
        parts["multi_vector"] = raw[:, 0] / max(len(query.multi_vector[0]), 1)
    scores = np.sum([weight * parts[name] for name, weight in weights.items()], axis=0)
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
        raw=raw if weights.keys() == {"multi_vector"} else None,
    )


def _column(scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 1"]:
    return np.asarray(scores, np.float32)[:, None]
