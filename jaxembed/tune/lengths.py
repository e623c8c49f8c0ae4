"""How long the inputs of somebody's traffic are: from texts, a file of lengths or a live server.

Knows no model: whoever has texts brings what counts their tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jaxembed.errors import ConfigError
from jaxembed.fetch import fetch
from jaxembed.json_file import read_user_json, shown

SAMPLE = 20_000  # texts that are tokenized; their lengths' quantiles are known to 1 % by then
TEXTS_COUNTED_AT_ONCE = 1024  # texts tokenized in one call
LONGEST = 2**19  # no model takes more
SERIES = "jaxembed_input_tokens"
MOST_INPUTS = 2**40  # of one length; their sum must be an int64
LENGTHS_FORM = (
    'a list of lengths such as [9, 12, 9], or counts by length such as {"9": 2, "12": 1}; '
    "texts go into a .txt or .jsonl file"
)
SERVER = (
    "wanted a server of ours such as http://127.0.0.1:8080; one with --prometheus-port has its "
    "metrics at that port"
)


@dataclass(frozen=True)
class Lengths:
    """`counts[n]` inputs of n tokens, and where that is from."""

    counts: np.ndarray  # int64 [longest + 1]
    source: str

    def cut(self, limit: int) -> "Lengths":
        """As a model of this limit sees them: longer inputs are cut."""
        kept = self.counts[: limit + 1].copy()
        kept[-1] += self.counts[limit + 1 :].sum()
        return Lengths(kept, self.source)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.counts @ np.arange(len(self.counts))) / self.total

    @property
    def present(self) -> np.ndarray:
        """The lengths that occur, shortest first."""
        return np.flatnonzero(self.counts)

    @property
    def longest(self) -> int:
        return int(self.present[-1])

    def quantile(self, share: float) -> int:
        """The length that this share of the inputs does not exceed."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.total))

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """Lengths in this mix, in random order. Evenly spread over the quantiles, so that a small
        sample has the mean and the tail of all."""
        shares = (np.arange(count) + random.random(count)) / count
        lengths = np.searchsorted(np.cumsum(self.counts), shares * self.total, side="right")
        return random.permutation(lengths).tolist()

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "inputs": self.total,
            "mean": round(self.mean, 1),
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "longest": self.longest,
        }


def of_texts(
    texts: Iterable[str],
    count_tokens: Callable[[Sequence[str]], Sequence[int]],
    source: str,
) -> Lengths:
    """SAMPLE of the texts, each as likely as the others, as `count_tokens` counts them."""
    sample, lengths = _sample(texts), []
    for first in range(0, len(sample), TEXTS_COUNTED_AT_ONCE):
        lengths += count_tokens(sample[first : first + TEXTS_COUNTED_AT_ONCE])
    return _lengths([(length, 1) for length in lengths], source)


def _sample(texts: Iterable[str]) -> list[str]:
    """Reservoir sampling: algorithm R (Vitter 1985)."""
    random, sample = Random(0), []
    for number, text in enumerate(texts):
        if number < SAMPLE:
            sample.append(text)
        elif (place := random.randrange(number + 1)) < SAMPLE:
            sample[place] = text
    return sample


def of_file(path: Path) -> Lengths:
    """From JSON: a list of lengths, or an object of counts by length. Raises ConfigError."""
    said = read_user_json(path, str(path), LENGTHS_FORM)
    pairs: list[tuple[Any, Any]]  # of whatever JSON has
    if isinstance(said, dict):
        pairs = [(_number(length), count) for length, count in said.items()]
    elif isinstance(said, list):
        pairs = [(length, 1) for length in said]
    else:
        raise ConfigError(f"{path}: it holds {shown(said)}; wanted {LENGTHS_FORM}")
    for length, count in pairs:
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"{path}: {shown(length)} is no length in tokens; wanted {LENGTHS_FORM}"
            )
        if type(count) is not int or not 0 <= count <= MOST_INPUTS:
            raise ConfigError(
                f"{path}: {shown(count)} is no count of inputs of {length} tokens; "
                f"wanted {LENGTHS_FORM}"
            )
    return _lengths(pairs, str(path))


def _number(key: str) -> int | str:
    """A key of a JSON object as the number it may be."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key


def of_server(url: str, model: str | None = None) -> Lengths:
    """What a live server has answered since it started, from its metrics. Raises ConfigError.

    Of several models, the one of this served name.
    """
    url = url if url.endswith("/metrics") else url.rstrip("/") + "/metrics"
    text = fetch(url, SERVER).decode(errors="replace")
    return _lengths(list(_spread(_buckets(text, model, url))), url)


def _buckets(text: str, model: str | None, url: str) -> list[tuple[int, int]]:
    """Upper bound of each bucket of the histogram and the inputs up to there."""
    try:
        families = {family.name: family for family in text_string_to_metric_families(text)}
    except (ValueError, IndexError) as error:  # as the parser meets what it does not know
        raise ConfigError(f"{url} answers with no metrics; {SERVER}") from error
    if SERIES not in families:
        raise ConfigError(f"{url} has no series {SERIES}; {SERVER}")
    samples = [s for s in families[SERIES].samples if s.name.endswith("_bucket")]
    names = sorted({s.labels["model"] for s in samples if "model" in s.labels})
    if names and model not in names:
        asked = "" if model is None else f", not {model}"
        raise ConfigError(
            f"{url} serves {', '.join(names)}{asked}; say which with --served-model-name"
        )
    chosen = [s for s in samples if not names or s.labels["model"] == model]
    return [(int(float(s.labels["le"])), int(s.value)) for s in chosen if s.labels["le"] != "+Inf"]


def _spread(buckets: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The inputs of each bucket, evenly over its lengths: what is between is not known."""
    below, counted = 0, 0
    for bound, upto in buckets:
        places = bound - below
        for k in range(places):
            yield (
                below + 1 + k,
                (upto - counted) * (k + 1) // places - (upto - counted) * k // places,
            )
        below, counted = bound, upto


def _lengths(pairs: Sequence[tuple[int, int]], source: str) -> Lengths:
    counts = np.zeros(min(max((n for n, _ in pairs), default=0), LONGEST) + 1, np.int64)
    for length, count in pairs:
        counts[min(length, LONGEST)] += count
    if not counts.any():
        raise ConfigError(f"{source}: no inputs in it, so nothing to tune for")
    return Lengths(counts, source)
