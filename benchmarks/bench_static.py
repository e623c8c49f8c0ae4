"""Compares static embeddings with model2vec in process, in texts a second.

The table and the tokenizer are those of the package wordllama (32,000 tokens, 256 dimensions),
written as a repository of model2vec. Both libraries run in processes and environments of their own
and embed the same sentences, tokenizing included, all in one call or one by one. In every round
each runs once, and the order alternates. The other is idle meanwhile.

    python -m benchmarks.bench_static --peer ENVIRONMENT   # pip install model2vec wordllama

Columns: `times` is how many times as fast ours is, in the median round; `least` and `most` are over
the rounds.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import bench_libraries, report, workloads
from benchmarks.peer import Contestant
from converters.weights import find

OURS, PEER = "jaxembed", "model2vec"
CALLS = {"all in one call": 0, "one by one": 1}  # -> batch size of peers/embed.py


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both libraries in turns, then a server, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("--peer", type=Path, required=True, help="environment with model2vec")
    workloads.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser, argv)
    texts = workloads.texts("sts", args.texts, data=args.data, seed=args.seed)
    rounds = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {"model": str(write_model(args.peer, Path(folder) / "wordllama-model2vec"))}
        contestants = (
            Contestant(OURS, Path(sys.prefix), "jaxembed-static", job),
            Contestant(PEER, args.peer, PEER, job),
        )
        workers = [bench_libraries.started(stack, one, texts) for one in contestants]
        for call, batch in CALLS.items():
            calls = {w.name: partial(w.seconds, "embed", batch, len(texts)) for w in workers}
            rounds[call] = report.in_turns(calls, args.rounds)
        ours, theirs = (worker.vectors() for worker in workers)
    rows = [row_of(call, rounds[call], len(texts)) for call in CALLS]
    report.show(rows, f"static embeddings, {len(texts)} sentences, {report.device_name()}")
    facts = {"texts": len(texts), "worst_cosine": np.einsum("nd,nd->n", ours, theirs).min()}
    facts |= {"versions": {worker.name: worker.versions for worker in workers}}
    report.finish(args, facts | {"results": rows, "rounds": rounds})


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


def row_of(call: str, seconds: dict[str, list[float]], texts: int) -> dict[str, Any]:
    """The row of a kind of call."""
    rates = {f"{name}_per_s": texts / float(np.median(seconds[name])) for name in (OURS, PEER)}
    return {"call": call} | rates | report.spread(np.divide(seconds[PEER], seconds[OURS]))


if __name__ == "__main__":
    main()
