"""Finds the entities that a token classifier sees in a text, as TokenClassificationPipeline of
transformers 5 does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jaxembed.data.inputs import AggregationStrategy
from jaxembed.preprocessing.tokenizer import Tokenizer
from jaxembed.runtime.options import TokenScores

OUTSIDE = "O"  # the label of what belongs to no entity, which is left out

Scores = Float[np.ndarray, "tokens labels"]


@dataclass(frozen=True)
class Entity:
    """A part of a text that has a label.

    `start` is its first character in the text, and `end` the character after its last. `word` is
    what its tokens stand for, which may differ from the text, as in upper and lower case. `index`
    is the number of its token in the sequence, special tokens included, if the entity is one token.
    """

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int | None = None


# From the scores of a word's tokens to the scores of the word.
WORD_SCORES: dict[AggregationStrategy, Callable[[Scores], Float[np.ndarray, " labels"]]] = {
    "first": lambda scores: scores[0],
    "average": lambda scores: scores.mean(axis=0),
    "max": lambda scores: scores[scores.max(axis=1).argmax()],
}


def find_entities(
    answer: TokenScores, number: int, text: str, tokenizer: Tokenizer, strategy: AggregationStrategy
) -> list[Entity]:
    """Return the entities in the text with this `number` in the request, in their order.

    `tokenizer` is that of the model. The score of an entity is the mean over its tokens, or over
    its words if `strategy` gives each word one label.
    """
    tokens = slice(*answer.logits.offsets[number : number + 2])
    kept = np.flatnonzero(answer.offsets[tokens][:, 0] >= 0)  # without special tokens
    offsets = answer.offsets[tokens][kept]
    words, continues = tokenizer.words(text, answer.ids[tokens][kept], offsets)
    scores, (starts, ends) = _softmax(answer.logits.values[tokens][kept]), offsets.T
    if strategy in WORD_SCORES:
        firsts = [k for k, is_joined in enumerate(continues) if not k or not is_joined]
        ranges = list(pairwise([*firsts, len(words)]))
        words = [tokenizer.joined(words[first:stop]) for first, stop in ranges]
        of_words = [WORD_SCORES[strategy](scores[first:stop]) for first, stop in ranges]
        scores = np.array(of_words, np.float32).reshape(-1, len(answer.labels))
        starts, ends = starts[firsts], ends[[stop - 1 for _, stop in ranges]]
    labels = [answer.labels[k] for k in scores.argmax(axis=1).tolist()]
    best, is_single, entities = scores.max(axis=1), strategy == "none", []
    for first, stop in pairwise(range(len(labels) + 1)) if is_single else _groups(labels):
        label = labels[first] if is_single else labels[first].split("-", 1)[-1]
        if label != OUTSIDE:
            entities.append(
                Entity(
                    label,
                    float(best[first:stop].mean()),
                    words[first] if is_single else tokenizer.joined(words[first:stop]),
                    int(starts[first]),
                    int(ends[stop - 1]),
                    int(kept[first]) if is_single else None,
                )
            )
    return entities


def _softmax(logits: Scores) -> Scores:
    """Return the softmax of each row, in float32 as transformers computes it."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _groups(labels: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Return the ranges of neighbours that are one entity. They have the same label but for B- or
    I- before it, and only the first may have B-."""
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    firsts = [
        k
        for k, (label, tag) in enumerate(zip(labels, tags, strict=True))
        if not k or label.startswith("B-") or tag != tags[k - 1]
    ]
    return pairwise([*firsts, len(labels)])
