"""Compares our library with sentence-transformers and onnxruntime in process: tokens a second.

Each library runs in a process and an environment of its own, loads the same weights, and embeds the
same English texts, tokenizing included, with as many threads as there are cores: mixed texts, texts
of one length, or one query at a time (`--work`). The others are idle meanwhile. Peers use the batch
size that was fastest for them in a run before; onnxruntime's batches are sorted by length, as those
of sentence-transformers are. In every round each library runs once, and the order alternates.
Fidelity is measured too, as the cosine to sentence-transformers in float32.

    python -m benchmarks.bench_libraries --torch .venv-parity --onnx .venv-peers
    python -m benchmarks.bench_libraries --work length:512 --limit 512
    python -m benchmarks.bench_libraries --work lone --only "jaxembed int8,onnxruntime int8"

Columns: `times` is how many times as fast our library in its default dtype is, in the median round;
`least` and `most` are over the rounds. The int8 model is quantised dynamically by onnxruntime, with
a scale for each channel.
"""

import base64
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peer, report, workloads
from benchmarks.peer import Peer
from benchmarks.servers import packaged_model
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource

WORKER = Path(__file__).parent / "peers" / "embed.py"
OURS, REFERENCE = "jaxembed", "sentence-transformers float32"
BATCHES = (4, 8, 16, 32)
TRIED = 4096  # texts, with each batch size
LIMIT = 256  # tokens, as sentence_bert_config.json says
LONE = "lone"  # the name of the work of one query at a time
LONE_RUNS = 200  # of a query in a round; their median counts
BATCHED = ("sentence-transformers", "sentence-transformers-pool", "onnxruntime")


@dataclass(frozen=True)
class Contestant:
    """A library, and the form of the model that it runs."""

    name: str
    python: Path
    library: str  # a name of peers/embed.py
    model: Path
    dtype: str

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes to try; only a placeholder for a library that chooses its own."""
        return BATCHES if self.library in BATCHED else (0,)


class Worker:
    """A contestant in its process, with the fastest batch size chosen."""

    def __init__(self, contestant: Contestant, process: Peer, texts: list[str], limit: int):
        self._process, self._texts = process, len(texts)
        self.contestant = contestant
        job = {"library": contestant.library, "model": str(contestant.model), "limit": limit}
        job |= {"dtype": contestant.dtype, "threads": os.cpu_count(), "texts": texts}
        self.versions: dict[str, str] = self._process.ask(json.dumps(job))
        tried = min(TRIED, len(texts))
        runs = [
            {batch: self.seconds(batch, tried) for batch in contestant.batches} for _ in range(2)
        ]
        self.seconds_of = {batch: min(run[batch] for run in runs) for batch in contestant.batches}
        self.batch = min(self.seconds_of, key=lambda batch: self.seconds_of[batch])
        print(f"{contestant.name}: seconds by batch size {self.seconds_of}", flush=True)

    def seconds(self, batch: int, texts: int | None = None) -> float:
        """Embed all texts once with a batch size, or the first so many. Returns the seconds that
        it took."""
        return self._process.ask(f"{batch} {self._texts if texts is None else texts}")

    def round(self) -> float:
        """Return the seconds of all texts; of a single one, their median over LONE_RUNS runs."""
        runs = LONE_RUNS if self._texts == 1 else 1
        return float(np.median([self.seconds(self.batch) for _ in range(runs)]))

    def vectors(self, texts: int) -> np.ndarray:
        """The embeddings of the last run, float64 `[texts, dim]`, normalised."""
        return vectors_of(self._process.ask(""), texts)


def vectors_of(answer: str, count: int) -> np.ndarray:
    """The vectors that a peer answers in base64, float64 `[count, dim]`, normalised."""
    flat = np.frombuffer(base64.b64decode(answer), "<f4").astype(np.float64)
    vectors = flat.reshape(count, -1)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@contextmanager
def working(contestant: Contestant, texts: list[str], limit: int) -> Iterator[Worker]:
    """Run a worker that has loaded its model and chosen its batch size; end its process after."""
    with peer.running(contestant.name, contestant.python, WORKER) as process:
        yield Worker(contestant, process, texts, limit)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--torch", type=Path, default=report.ROOT / ".venv-parity")
    parser.add_argument("--onnx", type=Path, default=report.ROOT / ".venv-peers")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--work", default="mixed", help="mixed, lone, or length:N in tokens")
    parser.add_argument("--limit", type=int, default=LIMIT, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="contestants by commas; default: all")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the contestants in turns, and print and write the results."""
    args = parse(argv)
    texts = texts_of(args)
    tokens = tokens_of(texts, args.limit)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(working(one, texts, args.limit)) for one in contestants(args)
        ]
        seconds = measure(workers, args.rounds)
        vectors = {w.contestant.name: w.vectors(len(texts)) for w in workers}
    rows = [row_of(worker, seconds, vectors, tokens) for worker in workers]
    report.show(
        [_with_digits(row) for row in rows],
        f"all-MiniLM-L6-v2, {len(texts)} texts, {tokens} tokens, {report.device_name()}",
    )
    facts = {
        "model": "all-MiniLM-L6-v2",
        "work": args.work,
        "texts": len(texts),
        "tokens": tokens,
        "versions": {w.contestant.name: w.versions for w in workers},
        "batches": {w.contestant.name: w.seconds_of for w in workers},
        "results": rows,
        "rounds": seconds,
    }
    report.finish("bench_libraries", argv, facts, args.out)


def contestants(args: Namespace) -> list[Contestant]:
    """The contestants that the arguments name, or all."""
    ours, torch, onnx = Path(sys.executable), args.torch / "bin/python", args.onnx / "bin/python"
    exported = args.onnx / "onnx"
    model = packaged_model(args.torch)
    every = [
        Contestant(OURS, ours, "jaxembed", model, "default"),
        Contestant(f"{OURS} float32", ours, "jaxembed", model, "float32"),
        Contestant(f"{OURS} int8", ours, "jaxembed", model, "int8"),
        Contestant(REFERENCE, torch, "sentence-transformers", model, "float32"),
        Contestant(
            "sentence-transformers bfloat16", torch, "sentence-transformers", model, "bfloat16"
        ),
        Contestant("onnxruntime float32", onnx, "onnxruntime", exported, "float32"),
        Contestant("onnxruntime int8", onnx, "onnxruntime", exported, "int8"),
    ]
    names = args.only.split(",") if args.only else [one.name for one in every]
    return [one for one in every if one.name in names]


def texts_of(args: Namespace) -> list[str]:
    """The texts of the work that the arguments name; words of `length:N` are one token each."""
    if args.work == LONE:
        return workloads.texts("queries", 1, data=args.data, seed=args.seed)
    if not args.work.startswith("length:"):
        return workloads.texts(args.work, args.texts, data=args.data, seed=args.seed)
    words = int(args.work.removeprefix("length:")) - 2  # besides [CLS] and [SEP]
    draw = np.random.default_rng(args.seed)
    common = workloads.COMMON.split()
    return [" ".join(draw.choice(common, words)) for _ in range(args.texts)]


def tokens_of(texts: list[str], limit: int) -> int:
    """The number of tokens of these texts, special tokens included, cut to a limit."""
    path = hub.resolve(ModelSource())
    return sum(e.length for e in workloads.tokenized(texts, checkpoint.tokenizer_path(path), limit))


def measure(workers: Sequence[Worker], rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of each contestant in each round, by its name."""
    seconds: dict[str, list[float]] = {worker.contestant.name: [] for worker in workers}
    for number in range(rounds):
        for worker in workers if number % 2 else reversed(workers):
            seconds[worker.contestant.name].append(worker.round())
    return seconds


def row_of(
    worker: Worker,
    seconds: dict[str, list[float]],
    vectors: dict[str, np.ndarray],
    tokens: int,
) -> dict[str, Any]:
    """The row of a contestant, from the seconds and embeddings of all."""
    name = worker.contestant.name
    median = float(np.median(seconds[name]))
    row = {"library": name, "batch": worker.batch or None, "seconds": median}
    row |= {"tokens_per_s": tokens / median}
    if OURS in seconds:
        times = np.array(seconds[name]) / np.array(seconds[OURS])
        row |= {"times": float(np.median(times)), "least": times.min(), "most": times.max()}
    if REFERENCE in vectors:
        cosine = np.einsum("nd,nd->n", vectors[name], vectors[REFERENCE])
        row |= {"cosine": cosine.mean(), "worst_cosine": cosine.min()}
    return row


def _with_digits(row: dict[str, Any]) -> dict[str, Any]:
    """Format cosines with five digits for the table: with four, 0.99996 would become 1."""
    digits = {name: f"{row[name]:.5f}" for name in ("cosine", "worst_cosine") if name in row}
    return row | digits


if __name__ == "__main__":
    main()
