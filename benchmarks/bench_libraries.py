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

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peer, report, workloads
from benchmarks.peer import Contestant, Peer
from benchmarks.servers import packaged_model
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource

PROGRAM = "embed.py"
OURS, TORCH, ONNX = "jaxembed", "sentence-transformers", "onnxruntime"
REFERENCE = f"{TORCH} float32"
BATCHES = (4, 8, 16, 32)
TRIED = 4096  # texts, with each batch size
LIMIT = 256  # tokens, as sentence_bert_config.json says
LONE = "lone"  # the name of the work of one query at a time
LONE_RUNS = 200  # of a query in a round; their median counts


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the texts and of the environments of other libraries."""
    workloads.add_arguments(parser)
    parser.add_argument("--torch", type=Path, default=report.ROOT / ".venv-parity")
    parser.add_argument("--onnx", type=Path, default=report.ROOT / ".venv-peers")
    parser.add_argument("--rounds", type=int, default=5)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the contestants in turns, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    add_arguments(parser)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--work", default="mixed", help="mixed, lone, or length:N in tokens")
    parser.add_argument("--limit", type=int, default=LIMIT, help="tokens of a text")
    parser.add_argument("--only", help="contestants by commas; default: all")
    args = report.parse(parser, argv)
    texts = texts_of(args)
    tokens = tokens_of(texts, args.limit)
    with ExitStack() as stack:
        workers = [started(stack, one, texts, args.limit) for one in contestants(args)]
        runs = LONE_RUNS if args.work == LONE else 1

        def seconds(worker: Peer) -> float:
            return float(np.median([embedding(worker, texts) for _ in range(runs)]))

        calls = {worker.name: partial(seconds, worker) for worker in workers}
        rounds = report.in_turns(calls, args.rounds)
        vectors = {worker.name: worker.vectors() for worker in workers}
    rows = [row_of(worker, rounds, vectors, tokens) for worker in workers]
    report.show(rows, f"{len(texts)} texts, {tokens} tokens, {report.device_name()}")
    facts = {"model": "all-MiniLM-L6-v2", "work": args.work, "texts": len(texts), "tokens": tokens}
    report.finish(args, facts | peer.about(workers) | {"results": rows, "rounds": rounds})


def started(
    stack: ExitStack, contestant: Contestant, texts: Sequence[str], limit: int = LIMIT
) -> Peer:
    """Start a contestant for the time of the stack, and choose its batch size, if it has one."""
    worker = stack.enter_context(peer.running(contestant, PROGRAM, texts=texts, limit=limit))
    batches = BATCHES if contestant.library.startswith((TORCH, ONNX)) else (0,)
    worker.choose(batches, "embed", min(TRIED, len(texts)))
    return worker


def embedding(worker: Peer, texts: Sequence[str]) -> float:
    """The seconds in which a contestant embeds all texts once."""
    return worker.seconds("embed", worker.batch, len(texts))


def contestants(args: Namespace) -> list[Contestant]:
    """The contestants that the arguments name, or all."""
    model, ours = {"model": str(packaged_model(args.torch))}, Path(sys.prefix)
    exported = {"model": str(args.onnx / "onnx")}
    every = [
        Contestant(OURS, ours, OURS, model | {"dtype": "default"}),
        *(
            Contestant(f"{library} {dtype}", environment, library, given | {"dtype": dtype})
            for library, environment, given, dtypes in (
                (OURS, ours, model, ("float32", "int8")),
                (TORCH, args.torch, model, ("float32", "bfloat16")),
                (ONNX, args.onnx, exported, ("float32", "int8")),
            )
            for dtype in dtypes
        ),
    ]
    by_name = {one.name: one for one in every}
    return [by_name[name] for name in args.only.split(",")] if args.only else every


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


def row_of(
    worker: Peer, rounds: dict[str, list[float]], vectors: dict[str, np.ndarray], tokens: int
) -> dict[str, Any]:
    """The row of a contestant, from the seconds and embeddings of all."""
    median = float(np.median(rounds[worker.name]))
    row = {"library": worker.name, "batch": worker.batch or None, "seconds": median}
    row |= {"tokens_per_s": tokens / median}
    if OURS in rounds:
        row |= report.spread(np.divide(rounds[worker.name], rounds[OURS]))
    if REFERENCE in vectors:
        cosine = np.einsum("nd,nd->n", vectors[worker.name], vectors[REFERENCE])
        row |= {"cosine": cosine.mean(), "worst_cosine": cosine.min()}
    return row


if __name__ == "__main__":
    main()
