"""What the routes of rerankers and classifiers have in common. Knows no dialect.

Everything is ordered by logits: far from zero, different ones have the same score.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from jaxembed.options import Scores
from jaxembed.postprocess import scores
from jaxembed.server.body import RequestSize
from jaxembed.server.encoding import OBJECT_WIDTH, json_items
from jaxembed.spec import ModelSpec


class Prediction(msgspec.Struct):
    """A label and its score."""

    score: float
    label: str


def size_of(query: str, documents: Sequence[str]) -> RequestSize:
    """Of a request to rerank: the query counts once for each document, as in TEI."""
    return RequestSize("batch", len(query) * len(documents) + sum(map(len, documents)))


def shown(answer: Scores, spec: ModelSpec, raw: bool | None) -> np.ndarray:
    """The scores as the client wants them, float32 [n, labels]: from 0 to 1, or the logits."""
    return answer.logits if raw else scores(answer.logits, spec.score_function)


async def json_predictions(
    answer: Scores, spec: ModelSpec, raw: bool | None, order: Callable[[np.ndarray], np.ndarray]
) -> bytes:
    """For each input the list of its labels in `order`; all inside one JSON list."""
    found = shown(answer, spec, raw)

    def items(start: int, stop: int) -> list[list[dict]]:
        return [
            [{"score": found[i, k], "label": spec.labels[k]} for k in order(answer.logits[i])]
            for i in range(start, stop)
        ]

    return await json_items(len(found), OBJECT_WIDTH * len(spec.labels), items)
