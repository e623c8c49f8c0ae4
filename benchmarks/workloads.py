"""Makes seeded mixes of texts and lengths for the other benchmarks.

With a folder of evaluation data (`--data`, by default ../shared/data beside the repository, if it
exists), `queries` are MS MARCO's, `abstracts` SciFact's and `sts` sentences STS-B's, tokenized by
the model's tokenizer. `mixed` is a quarter each of these and of `passages`, the first sentences of
abstracts. Without data or a tokenizer the same mixes are drawn from similar length distributions;
the source of a Workload says so.
"""

import csv
import gzip
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks import report
from benchmarks.load import Target
from jaxembed.data.work import Encoding

DATA = report.ROOT.parent / "shared" / "data"
MIXES = ("queries", "sts", "abstracts", "bimodal", "lognormal", "mixed")
PARTS = ("queries", "sts", "abstracts", "passages")  # of the mix `mixed`
FIRST_ID = 5  # smaller ids are special tokens in small vocabularies
SENTENCE_END = re.compile(r"(?<=[.?!]) +")
COMMON = "the of and to in a is that for it as was with be by on not he his but at are this"


@dataclass(frozen=True)
class Workload:
    """Sequences to embed, with the name of their mix and their source."""

    name: str
    encodings: list[Encoding]
    source: str

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sequence, int `[sequences]`."""
        return np.array([encoding.length for encoding in self.encodings])

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return int(self.lengths.sum())

    def describe(self) -> dict[str, object]:
        """Summarise the lengths, as values for JSON."""
        lengths = self.lengths
        return {
            "mix": self.name,
            "texts": len(lengths),
            "tokens": self.tokens,
            "mean": float(lengths.mean()),
            "median": int(np.median(lengths)),
            "p95": int(np.percentile(lengths, 95)),
            "longest": int(lengths.max()),
            "source": self.source,
        }


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the data folder and the seed."""
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with msmarco, scifact and stsb"
    )
    parser.add_argument("--seed", type=int, default=0)


def workload(
    name: str,
    count: int,
    *,
    limit: int,
    vocab_size: int,
    data: Path | None = None,
    tokenizer: Path | None = None,
    seed: int = 0,
) -> Workload:
    """Draw `count` sequences of at most `limit` tokens; the same arguments give the same ones.

    `name` is one of MIXES, or `constant:N` for N tokens each. Raises ValueError for another name.
    """
    if tokenizer is not None and (real := real_texts(name, data)):
        texts, source = real
        return Workload(name, tokenized(_draw(texts, count, seed), tokenizer, limit), source)
    lengths = synthetic_lengths(name, count, limit, seed)
    return Workload(name, random_encodings(lengths, vocab_size, seed), "synthetic lengths")


def synthetic_lengths(name: str, count: int, limit: int, seed: int = 0) -> np.ndarray:
    """Draw the lengths of sequences from a mix's distribution, int `[count]`.

    They are in tokens, special tokens included. Raises ValueError for an unknown name.
    """
    draw = np.random.default_rng(seed)
    if name.startswith("constant:"):
        lengths = np.full(count, int(name.removeprefix("constant:")))
    elif name == "queries":
        lengths = draw.lognormal(np.log(9), 0.35, count)
    elif name == "sts":
        lengths = draw.lognormal(np.log(14), 0.40, count)
    elif name == "abstracts":
        lengths = draw.lognormal(np.log(300), 0.35, count)
    elif name == "passages":
        lengths = draw.lognormal(np.log(110), 0.60, count)
    elif name == "mixed":
        parts = [synthetic_lengths(part, count, limit, seed) for part in PARTS]
        lengths = np.choose(draw.integers(len(PARTS), size=count), parts)
    elif name == "lognormal":
        lengths = draw.lognormal(np.log(64), 0.90, count)
    elif name == "bimodal":
        short = draw.integers(8, 17, count)
        long = draw.integers(min(200, limit), limit + 1, count)
        lengths = np.where(draw.random(count) < 0.8, short, long)
    else:
        raise ValueError(f"no mix {name!r}; there are {', '.join(MIXES)} and constant:N")
    return np.clip(np.rint(lengths), min(3, limit), limit).astype(int)


def random_encodings(lengths: Sequence[int] | np.ndarray, vocab_size: int, seed: int = 0):
    """Make encodings of these lengths with random token ids, none of them special."""
    draw = np.random.default_rng(seed + 1)
    ids = draw.integers(FIRST_ID, vocab_size, int(np.sum(lengths)), dtype=np.int32)
    return [Encoding(part) for part in np.split(ids, np.cumsum(lengths)[:-1])]


def texts(name: str, count: int, *, data: Path | None = None, seed: int = 0) -> list[str]:
    """Draw `count` texts of a mix, for benchmarks that include the tokenizer or HTTP.

    They are real texts if there is data, else about the right number of common words.
    """
    if real := real_texts(name, data):
        return _draw(real[0], count, seed)
    draw = np.random.default_rng(seed + 2)
    lengths = synthetic_lengths(name, count, 512, seed)
    return [" ".join(draw.choice(COMMON.split(), max(int(n) - 2, 1))) for n in lengths]


def real_texts(name: str, data: Path | None) -> tuple[list[str], str] | None:
    """All texts of a mix, sorted, and the name of their source; None without data for it."""
    if name == "mixed":
        parts = [real_texts(part, data) for part in PARTS]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return None
        count = min(len(texts) for texts, _ in present)
        mixture = {text for texts, _ in present for text in _draw(texts, count, 0)}
        return sorted(mixture), ", ".join(source for _, source in present)
    if name not in READERS or data is None:
        return None
    file, source, read = READERS[name]
    path = data / file
    return (sorted(set(read(path))), source) if path.is_file() else None


class Texts:
    """Single texts and bulk texts for a server; no text is in both."""

    def __init__(self, args: Namespace):
        self.bulk = texts("mixed", args.texts, data=args.data, seed=args.seed)
        others = texts("queries", args.texts, data=args.data, seed=args.seed)
        self.single = sorted(set(others) - set(self.bulk)) or others

    def requests(self, target: Target, count: int, encoding: str) -> Iterator[bytes]:
        """Yield requests of this many texts each, without end."""
        return requests(target, self.single if count == 1 else self.bulk, count, encoding)


def requests(
    target: Target, pool: Sequence[str], count: int, encoding: str = "base64"
) -> Iterator[bytes]:
    """Yield requests of this many texts of the pool each, without end."""
    starts = range(0, max(len(pool) - count, 0) + 1, count)
    return cycle([target.request(pool[k : k + count], encoding) for k in starts])


def _queries(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        yield line.split("\t", 1)[1]


def _abstracts(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") as file:
        for line in file:
            document = json.loads(line)
            yield f"{document['title']} {document['text']}".strip()


def _passages(path: Path) -> Iterator[str]:
    """Yield the first sentences of each abstract, from one to all, so that all lengths occur."""
    for number, abstract in enumerate(_abstracts(path)):
        sentences = SENTENCE_END.split(abstract)
        yield " ".join(sentences[: 1 + number % len(sentences)])


def _sentences(path: Path) -> Iterator[str]:
    for first, second, _ in sts_pairs(path):
        yield first
        yield second


def sts_pairs(path: Path) -> list[tuple[str, str, float]]:
    """Read an STS-B file. Returns pairs of sentences with their score, 0 to 5."""
    with path.open(newline="") as file:
        return [(first, second, float(score)) for first, second, score in csv.reader(file)]


READERS: dict[str, tuple[str, str, Callable[[Path], Iterator[str]]]] = {
    "queries": ("msmarco/5k-eval.queries.tsv", "MS MARCO queries", _queries),
    "abstracts": ("scifact/corpus.jsonl.gz", "SciFact abstracts", _abstracts),
    "passages": ("scifact/corpus.jsonl.gz", "their first sentences", _passages),
    "sts": ("stsb/stsb-en-test.csv", "STS-B sentences", _sentences),
}


def _draw(texts: list[str], count: int, seed: int) -> list[str]:
    """Draw `count` texts at random, with repetition only if there are too few."""
    order = np.random.default_rng(seed).permutation(len(texts))
    return [texts[order[k % len(texts)]] for k in range(count)]


def tokenized(texts: Sequence[str], tokenizer: Path, limit: int) -> list[Encoding]:
    """Tokenize texts with special tokens, cut to `limit` tokens."""
    reader = tokenizers.Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.enable_truncation(limit)
    return [Encoding(np.array(one.ids, np.int32)) for one in reader.encode_batch_fast(list(texts))]
