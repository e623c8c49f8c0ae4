"""Turns scores into the lists that the routes of rerankers and classifiers answer with. Knows no
dialect."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from jaxembed.runtime.options import Scores
from jaxembed.runtime.postprocess import Ties, rank
from jaxembed.server.http.encoding import OBJECT_WIDTH, json_items, object_width


class Prediction(msgspec.Struct):
    """A label and its score."""

    score: float
    label: str


def json_ranks(
    answer: Scores,
    item: Callable[[int, Any], dict],
    texts: Sequence[str] | None = None,
    *,
    raw_scores: bool,
    ties: Ties,
    top_n: int | None = None,
) -> AsyncIterator[bytes]:
    """The inside of a JSON list, best first. `item` makes an object of an index and its score, a
    numpy.float32; `texts` are the documents, if the objects hold them."""
    found = answer.shown(raw_scores)[:, 0]
    order = rank(answer.logits[:, 0], ties)[:top_n].tolist()

    def items(start: int, stop: int) -> list[dict]:
        return [item(i, found[i]) for i in order[start:stop]]

    return json_items(len(order), object_width(texts or ()), items)


def json_predictions(answer: Scores, *, raw_scores: bool, ties: Ties) -> AsyncIterator[bytes]:
    """The inside of a JSON list: for each input the list of its labels, best first."""
    found, labels = answer.shown(raw_scores), answer.labels

    def items(start: int, stop: int) -> list[list[dict]]:
        return [
            [{"score": found[i, k], "label": labels[k]} for k in rank(answer.logits[i], ties)]
            for i in range(start, stop)
        ]

    return json_items(len(found), OBJECT_WIDTH * len(labels), items)
