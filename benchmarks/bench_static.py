"""Compares static embeddings with model2vec in process, and measures them over HTTP, in texts a
second.

The table and the tokenizer are those of the package wordllama (32,000 tokens, 256 dimensions),
written as a repository of model2vec. Both libraries run in processes and environments of their own
and embed the same sentences, tokenizing included, all in one call or one by one. In every round
each runs once, and the order alternates. The other is idle meanwhile.

    python -m benchmarks.bench_static --peer ENVIRONMENT   # pip install model2vec wordllama

Columns: `times` is how many times as fast ours is, in the median round; `least` and `most` are over
the rounds.
"""

import asyncio
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import load, report, servers, workloads
from benchmarks.bench_libraries import LIMIT, Contestant, Worker, working
from benchmarks.load import Closed, Load
from converters.weights import find

OURS, PEER = "jaxembed", "model2vec"
CALLS = {"all in one call": 0, "one by one": 1}  # -> batch size of peers/embed.py
LOADS: tuple[Load, ...] = (Closed("lone query", 1, 1), Closed("bulk of 256", 256, 4))


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", type=Path, required=True, help="environment with model2vec")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load over HTTP")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both libraries in turns, then a server, and print and write the results."""
    args = parse(argv)
    texts = workloads.texts("sts", args.texts, data=args.data, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.peer, Path(folder) / "wordllama-model2vec")
        rounds, cosine, versions = in_process(args, model, texts)
        over_http = measure_http(model, texts, args.seconds)
    rows = [row_of(call, rounds[call], len(texts)) for call in CALLS]
    report.show(rows, f"static embeddings, {len(texts)} sentences, {report.device_name()}")
    report.show(over_http, "over HTTP")
    facts = {"texts": len(texts), "versions": versions, "worst_cosine": cosine}
    facts |= {"results": rows, "http": over_http, "rounds": rounds}
    report.finish("bench_static", argv, facts, args.out)


def write_model(environment: Path, folder: Path) -> Path:
    """Write the table of wordllama, which is in the environment, as a repository of model2vec."""
    from safetensors.numpy import save_file

    (package,) = environment.glob("lib/python3*/site-packages/wordllama")
    (weights,) = package.glob("weights/*_256.safetensors")
    (tokenizer,) = package.glob("tokenizers/*.json")
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(weights.resolve())
    table = find(folder)["embedding.weight"].read().astype(np.float32)
    (folder / "model.safetensors").unlink()
    save_file({"embeddings": table}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    return folder


def in_process(
    args: Namespace, model: Path, texts: list[str]
) -> tuple[dict[str, dict[str, list[float]]], float, dict[str, dict[str, str]]]:
    """The seconds of every round by call and library, the worst cosine, and the versions."""
    both = (
        Contestant(OURS, Path(sys.executable), "jaxembed-static", model, ""),
        Contestant(PEER, args.peer / "bin/python", PEER, model, ""),
    )
    rounds: dict[str, dict[str, list[float]]] = {call: {OURS: [], PEER: []} for call in CALLS}
    with ExitStack() as stack:
        workers: list[Worker] = [stack.enter_context(working(one, texts, LIMIT)) for one in both]
        for number in range(args.rounds):
            for call, batch in CALLS.items():
                for worker in workers if number % 2 else reversed(workers):
                    rounds[call][worker.contestant.name].append(worker.seconds(batch))
        ours, theirs = (worker.vectors(len(texts)) for worker in workers)
        versions = {worker.contestant.name: worker.versions for worker in workers}
    return rounds, float(np.einsum("nd,nd->n", ours, theirs).min()), versions


def row_of(call: str, seconds: dict[str, list[float]], texts: int) -> dict[str, Any]:
    """The row of a kind of call."""
    times = np.array(seconds[PEER]) / np.array(seconds[OURS])
    rates = {f"{name}_per_s": texts / float(np.median(seconds[name])) for name in (OURS, PEER)}
    spread = {"times": float(np.median(times)), "least": times.min(), "most": times.max()}
    return {"call": call} | rates | spread


def measure_http(model: Path, texts: list[str], seconds: float) -> list[dict[str, Any]]:
    """The figures of our server under each load alone."""
    rows = []
    with servers.jaxembed(str(model), until="listening on") as server:
        for one in LOADS:
            parts = [texts[k : k + one.texts] for k in range(0, len(texts), one.texts)]
            requests = cycle([server.target.request(part) for part in parts])
            (sample,) = asyncio.run(load.run(server.target, [(one, requests)], seconds))
            rows.append(sample.row())
    return rows


if __name__ == "__main__":
    main()
