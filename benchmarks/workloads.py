"""Seeded mixes of texts and lengths that the other benchmarks run.

With a folder of evaluation data (`--data`, default ../shared/data beside the repository where that
exists) `queries` are MS MARCO's, `abstracts` SciFact's and `sts` sentences STS-B's, tokenized by
the model's tokenizer. `mixed` is a quarter each of these and of `passages`, the first sentences of
abstracts. Without data or without a tokenizer the same mixes are drawn from length distributions
that resemble them, and a Workload says which of the two it is.

Run as a program it prints the lengths of every mix: python -m benchmarks.workloads
"""

import csv
import gzip
import json
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks import report
from jaxembed.work import Encoding

DATA = report.ROOT.parent / "shared" / "data"
MIXES = ("queries", "sts", "abstracts", "bimodal", "lognormal", "mixed")
PARTS = ("queries", "sts", "abstracts", "passages")  # of mixed
FIRST_ID = 5  # ids below are special tokens in small vocabularies
SENTENCE_END = re.compile(r"(?<=[.?!]) +")
COMMON = "the of and to in a is that for it as was with be by on not he his but at are this"


@dataclass(frozen=True)
class Workload:
    """Sequences to embed, and what they are."""

    name: str
    encodings: list[Encoding]
    source: str

    @property
    def lengths(self) -> np.ndarray:
        return np.array([encoding.length for encoding in self.encodings])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def describe(self) -> dict[str, object]:
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
    """`count` sequences of at most `limit` tokens. The same arguments give the same sequences.

    `name` is one of MIXES or `constant:N`, N tokens each. Raises ValueError for another.
    """
    real = real_texts(name, data) if tokenizer is not None else None
    if real and tokenizer is not None:
        texts, source = real
        return Workload(name, tokenized(_draw(texts, count, seed), tokenizer, limit), source)
    lengths = synthetic_lengths(name, count, limit, seed)
    return Workload(name, random_encodings(lengths, vocab_size, seed), "synthetic lengths")


def synthetic_lengths(name: str, count: int, limit: int, seed: int = 0) -> np.ndarray:
    """Tokens of each sequence, special tokens included, drawn from the mix's distribution."""
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
    """Encodings of random ordinary token ids."""
    draw = np.random.default_rng(seed + 1)
    ids = draw.integers(FIRST_ID, vocab_size, int(np.sum(lengths)), dtype=np.int32)
    return [Encoding(part) for part in np.split(ids, np.cumsum(lengths)[:-1])]


def texts(name: str, count: int, *, data: Path | None = None, seed: int = 0) -> list[str]:
    """`count` texts of a mix, for benchmarks that begin at the tokenizer or at HTTP: real ones
    where there is data, else common words in about the right number."""
    if real := real_texts(name, data):
        return _draw(real[0], count, seed)
    draw = np.random.default_rng(seed + 2)
    lengths = synthetic_lengths(name, count, 512, seed)
    return [" ".join(draw.choice(COMMON.split(), max(int(n) - 2, 1))) for n in lengths]


def real_texts(name: str, data: Path | None) -> tuple[list[str], str] | None:
    """Every text of a mix, sorted, and where they are from; None without data for it."""
    if name == "mixed":
        return _as_many_of_each([real_texts(part, data) for part in PARTS])
    if name not in READERS or data is None:
        return None
    file, source, read = READERS[name]
    path = data / file
    return (sorted(set(read(path))), source) if path.is_file() else None


def _as_many_of_each(parts: Sequence[tuple[list[str], str] | None]) -> tuple[list[str], str] | None:
    """What `real_texts` gives, of as many texts as the smallest part has of every part."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    count = min(len(texts) for texts, _ in found)
    drawn = {text for texts, _ in found for text in _draw(texts, count, 0)}
    return sorted(drawn), ", ".join(source for _, source in found)


def _queries(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        yield line.split("\t", 1)[1]


def _abstracts(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") as file:
        for line in file:
            document = json.loads(line)
            yield f"{document['title']} {document['text']}".strip()


def _passages(path: Path) -> Iterator[str]:
    """Of each abstract the first sentences, as many as its number says: every length comes up."""
    for number, abstract in enumerate(_abstracts(path)):
        sentences = SENTENCE_END.split(abstract)
        yield " ".join(sentences[: 1 + number % len(sentences)])


def _sentences(path: Path) -> Iterator[str]:
    for first, second, _ in sts_pairs(path):
        yield first
        yield second


def sts_pairs(path: Path) -> list[tuple[str, str, float]]:
    """The rows of an STS-B file: two sentences and their score from 0 to 5."""
    with path.open(newline="") as file:
        return [(first, second, float(score)) for first, second, score in csv.reader(file)]


READERS: dict[str, tuple[str, str, Callable[[Path], Iterator[str]]]] = {
    "queries": ("msmarco/5k-eval.queries.tsv", "MS MARCO queries", _queries),
    "abstracts": ("scifact/corpus.jsonl.gz", "SciFact abstracts", _abstracts),
    "passages": ("scifact/corpus.jsonl.gz", "their first sentences", _passages),
    "sts": ("stsb/stsb-en-test.csv", "STS-B sentences", _sentences),
}


def _draw(texts: list[str], count: int, seed: int) -> list[str]:
    """Without repetition as long as there are enough."""
    order = np.random.default_rng(seed).permutation(len(texts))
    return [texts[order[k % len(texts)]] for k in range(count)]


def tokenized(texts: Sequence[str], tokenizer: Path, limit: int) -> list[Encoding]:
    reader = tokenizers.Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.enable_truncation(limit)
    return [Encoding(np.array(one.ids, np.int32)) for one in reader.encode_batch_fast(list(texts))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--count", type=int, default=2048)
    args = parser.parse_args(argv)
    rows = [
        workload(
            name,
            args.count,
            limit=args.limit,
            vocab_size=30522,
            data=args.data,
            tokenizer=args.tokenizer,
            seed=args.seed,
        ).describe()
        for name in MIXES
    ]
    report.show(rows)
    print(json.dumps({"benchmark": "workloads", "mixes": rows}))


if __name__ == "__main__":
    main()
