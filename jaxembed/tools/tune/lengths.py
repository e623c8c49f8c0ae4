"""Reads the distribution of input lengths from texts, a file of lengths or a running server."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jaxembed.errors import ConfigError
from jaxembed.platform.fetch import fetch
from jaxembed.platform.files import read_user_json, shown

SAMPLE = 20_000  # texts to tokenize; with this many the quantiles are exact to about 1 %
TEXTS_COUNTED_AT_ONCE = 1024  # texts tokenized in one call
LONGEST = 2**19  # tokens; no model takes longer inputs
SERIES = "jaxembed_input_tokens"
MAX_INPUTS = 2**40  # maximum count of one length, so that the sum of all counts fits an int64
LENGTHS_FORM = (
    'a list of lengths such as [9, 12, 9], or counts by length such as {"9": 2, "12": 1}; '
    "texts go into a .txt or .jsonl file"
)
SERVER = (
    "expected the URL of a running jaxembed server, such as http://127.0.0.1:8080; one with "
    "--prometheus-port has its metrics at that port"
)


@dataclass(frozen=True)
class Lengths:
    """A distribution of input lengths, and the file or URL that it came from."""

    counts: np.ndarray  # int64 [longest + 1]; counts[n] is the number of inputs of n tokens
    source: str

    def cut(self, limit: int) -> "Lengths":
        """Return the distribution after truncation: longer inputs have `limit` tokens."""
        counts = self.counts[: limit + 1].copy()
        counts[-1] += self.counts[limit + 1 :].sum()
        return Lengths(counts, self.source)

    @property
    def total(self) -> int:
        """The number of inputs."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """The mean length in tokens."""
        return float(self.counts @ np.arange(len(self.counts))) / self.total

    @property
    def present(self) -> np.ndarray:
        """The lengths that occur, shortest first."""
        return np.flatnonzero(self.counts)

    @property
    def longest(self) -> int:
        """The largest length in tokens."""
        return int(self.present[-1])

    def quantile(self, share: float) -> int:
        """Return the length in tokens that this share (0 to 1) of the inputs does not exceed."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.total))

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """Draw `count` lengths in tokens from the distribution, in random order.

        Sampling is stratified: the sorted inputs are divided into `count` equal parts, and one
        length is drawn from each. So even a small sample has nearly the mean and the tail.
        """
        shares = (np.arange(count) + random.random(count)) / count
        lengths = np.searchsorted(np.cumsum(self.counts), shares * self.total, side="right")
        return random.permutation(lengths).tolist()

    def describe(self) -> dict[str, Any]:
        """Summarise the distribution for JSON; lengths are in tokens."""
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
    """Measure the lengths in tokens of up to SAMPLE texts, sampled uniformly.

    `count_tokens` returns the number of tokens of each text. `source` names the texts in
    messages. Raises ConfigError if there is no text.
    """
    random, sample = Random(0), []
    for index, text in enumerate(texts):  # reservoir sampling: algorithm R (Vitter 1985)
        if index < SAMPLE:
            sample.append(text)
        elif (replaced := random.randrange(index + 1)) < SAMPLE:
            sample[replaced] = text
    lengths: list[int] = []
    for first in range(0, len(sample), TEXTS_COUNTED_AT_ONCE):
        lengths += count_tokens(sample[first : first + TEXTS_COUNTED_AT_ONCE])
    return _lengths([(length, 1) for length in lengths], source)


def of_file(path: Path) -> Lengths:
    """Read lengths from a JSON file: a list of lengths, or an object of counts by length.

    Raises ConfigError if the file cannot be read, holds anything else, or has no inputs.
    """
    content = read_user_json(path, str(path), LENGTHS_FORM)
    pairs: list[tuple[Any, Any]]  # any JSON values, checked below
    if isinstance(content, dict):
        pairs = [
            (int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key, count)
            for key, count in content.items()
        ]
    elif isinstance(content, list):
        pairs = [(length, 1) for length in content]
    else:
        raise ConfigError(f"{path} holds {shown(content)}; expected {LENGTHS_FORM}")
    for length, count in pairs:
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"{path}: {shown(length)} is not a length in tokens; expected {LENGTHS_FORM}"
            )
        if type(count) is not int or not 0 <= count <= MAX_INPUTS:
            raise ConfigError(
                f"{path}: {shown(count)} is not a number of inputs of {length} tokens; "
                f"expected {LENGTHS_FORM}"
            )
    return _lengths(pairs, str(path))


def of_server(url: str, model: str | None = None) -> Lengths:
    """Read the lengths of the inputs since the start of a server from its metrics.

    The lengths are approximate, because the metrics have a histogram. `url` is the server's base
    URL or that of its metrics. `model` is the served name, needed if the server has several models.
    Raises ConfigError if the metrics cannot be fetched or have no inputs of this model.
    """
    url = url if url.endswith("/metrics") else url.rstrip("/") + "/metrics"
    text = fetch(url, SERVER).decode(errors="replace")
    try:
        families = {family.name: family for family in text_string_to_metric_families(text)}
    except (ValueError, IndexError) as error:  # the parser raises both for text it cannot parse
        raise ConfigError(f"{url} does not return metrics; {SERVER}") from error
    if SERIES not in families:
        raise ConfigError(f"{url} has no series {SERIES}; {SERVER}")
    samples = [s for s in families[SERIES].samples if s.name.endswith("_bucket")]
    names = sorted({s.labels["model"] for s in samples if "model" in s.labels})
    if names and model not in names:
        model_name = "" if model is None else f", not {model}"
        raise ConfigError(
            f"{url} serves {', '.join(names)}{model_name}; choose one with --served-model-name"
        )
    pairs = []  # each a length and a count
    below, below_count = 0, 0  # the previous bucket's bound, and the inputs up to this bound
    own = [s for s in samples if not names or s.labels["model"] == model]
    for sample in (s for s in own if s.labels["le"] != "+Inf"):
        bound, bound_count = int(float(sample.labels["le"])), int(sample.value)
        width, count = bound - below, bound_count - below_count
        pairs += [  # the inputs of a bucket are spread evenly over its lengths
            (below + 1 + k, count * (k + 1) // width - count * k // width) for k in range(width)
        ]
        below, below_count = bound, bound_count
    return _lengths(pairs, url)


def _lengths(pairs: Sequence[tuple[int, int]], source: str) -> Lengths:
    """Make a distribution from pairs of length and count. A length over LONGEST counts as LONGEST.
    Raises ConfigError if there are no inputs."""
    counts = np.zeros(min(max((n for n, _ in pairs), default=0), LONGEST) + 1, np.int64)
    for length, count in pairs:
        counts[min(length, LONGEST)] += count
    if not counts.any():
        raise ConfigError(f"{source} has no inputs, so there is nothing to tune for")
    return Lengths(counts, source)
