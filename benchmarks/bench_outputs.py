"""Measures what sparse and multi-vector outputs cost beside one dense vector of the same tower.

Each bucket runs full of tokens, as the engine runs it, to the outputs on the host: with mean
pooling alone, with the head of a masked language model over the vocabulary (SPLADE), and with mean
pooling, a weight and a vector for each token (BGE-M3's three heads), in turns. `times_dense` is the
median ratio of a run to the run with mean pooling in the same round, `flop_ratio` how many more
floating-point operations it needs, and `over_flops` the first over the second.

Peers run a BERT of the same shape on batches of the same shape, in the same rounds, each in a
process and an environment of its own with as many threads as there are cores: sentence-transformers
in our dtype, its SparseEncoder for SPLADE, and onnxruntime in float32 with a graph that ends in the
pooled output. `times_ours` is the median ratio to ours of the same round.

    python -m benchmarks.bench_outputs
    python -m benchmarks.bench_outputs --architecture-size minilm --buckets 16x128
    python -m benchmarks.bench_outputs --torch .venv-parity --onnx .venv-peers

Weights are random. The bias of the terms leaves about one in a hundred of a text that are not zero.
"""

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec

from benchmarks import peer, report, subject
from benchmarks.bench_model import chosen_grid, dtype_of, full_planes
from benchmarks.parameters import random_parameters
from benchmarks.peer import Peer
from benchmarks.subject import Subject
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import (
    DenseLayer,
    DType,
    Head,
    LayerNormLayer,
    NormalizeLayer,
    PerToken,
    Vocabulary,
)
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.models import program

WORKER = Path(__file__).parent / "peers" / "outputs.py"
OURS = "jaxembed"
PEER_OUTPUTS = ("dense", "SPLADE")
PEER_SIZES = ("tiny", "minilm", "bert-base", "bge-large")  # BERT as it was published
MIN_LOGIT = 3.8  # of a term: the largest of 128 standard normal ones is over it once in 100


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every bucket, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    model = subject.load(args)
    dtype, grid = dtype_of(args), chosen_grid(args, model)
    width, vocabulary = model.spec.hidden_size, model.vocab_size
    heads = {
        "dense": model.spec.heads,
        "SPLADE": {"sparse": masked_lm(width, vocabulary)},
        "BGE-M3": {**model.spec.heads, **per_token(width)},
    }
    subjects = {name: with_heads(model, chosen) for name, chosen in heads.items()}
    rows = []
    with ExitStack() as stack:
        peers = [stack.enter_context(one) for one in peers_of(args, dtype)]
        for bucket in grid.buckets:
            runs = {name: subject.replica(s, args, [grid], dtype) for name, s in subjects.items()}
            rows += measure(subjects, runs, [one for one, _ in peers], bucket, args.repeat)
    print(f"{model.name}, {dtype}, {report.device_name()}")
    report.show(rows)
    facts = {"model": model.name, "dtype": dtype, "repeat": args.repeat, "results": rows}
    facts |= {"versions": {one.name: versions for one, versions in peers}}
    report.finish("bench_outputs", argv, facts, args.out)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    subject.add_arguments(parser)
    parser.set_defaults(architecture_size="bert-base")
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--buckets", default="16x128,4x512")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each bucket")
    parser.add_argument("--torch", type=Path, help="an environment with sentence-transformers")
    parser.add_argument("--onnx", type=Path, help="one with onnxruntime, torch and transformers")
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    if (args.torch or args.onnx) and args.architecture_size not in PEER_SIZES:
        parser.error(f"--torch and --onnx run --architecture-size {', '.join(PEER_SIZES)}")
    return args


Running = tuple[Peer, dict[str, str]]  # with its versions


def peers_of(args: Namespace, dtype: DType) -> Iterator[AbstractContextManager[Running]]:
    """The peers whose environments the arguments name."""
    if args.torch:
        yield running("sentence-transformers", args.torch, args.architecture_size, dtype)
    if args.onnx:
        yield running("onnxruntime", args.onnx, args.architecture_size, "float32")


@contextmanager
def running(library: str, environment: Path, size: str, dtype: DType) -> Iterator[Running]:
    """Run a peer with a model of this shape; end its process after."""
    job = {"library": library, "dtype": dtype, "threads": os.cpu_count()}
    job |= {"config": subject.transformers_config(size)[1], "bias": -MIN_LOGIT}
    with peer.running(library, environment / "bin" / "python", WORKER) as process:
        yield process, process.ask(json.dumps(job))


def masked_lm(width: int, vocabulary: int) -> Vocabulary:
    """BERT's head of a masked language model."""
    layers = DenseLayer(width, width, activation="gelu"), LayerNormLayer(width, eps=1e-12)
    return Vocabulary(vocabulary, width, layers)


def per_token(width: int) -> dict[OutputName, Head]:
    """The heads of BGE-M3 beside the dense one."""
    return {
        "token_weights": PerToken((DenseLayer(width, 1, activation="relu"),)),
        "multi_vector": PerToken(
            (DenseLayer(width, width, activation="identity"), NormalizeLayer()), drops_first=True
        ),
    }


def with_heads(model: Subject, heads: dict[OutputName, Head]) -> Subject:
    """The model with other heads, of random weights."""
    spec = msgspec.structs.replace(model.spec, heads=heads)
    parameters = random_parameters(spec) | model.parameters
    if "heads.sparse.bias" in parameters:
        parameters["heads.sparse.bias"][:] = -MIN_LOGIT
    made = program(spec)
    wanted = {name: parameters[name] for name in made.shapes}
    return replace(model, spec=spec, program=made, parameters=wanted)


def measure(
    subjects: dict[str, Subject],
    replicas: dict[str, Replica],
    peers: Sequence[Peer],
    bucket: Bucket,
    repeat: int,
) -> list[dict[str, Any]]:
    """The row of each library and output in one bucket."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    flops = {}
    for name, replica in replicas.items():
        replica.compile(bucket)
        model = subjects[name]
        planes, lengths = full_planes(bucket, model)
        calls[OURS, name] = partial(replica.run, bucket, planes, tuple(model.spec.heads))
        flops[name] = subject.useful_flops(model.spec, model.program, lengths)
    for one in peers:
        for name in PEER_OUTPUTS:
            line = json.dumps([name, [bucket.rows, bucket.length]])
            calls[one.name, name] = partial(one.ask, line)
    measured = report.timed_in_turn(list(calls.values()), repeat, warmups=1)
    times = dict(zip(calls, measured, strict=True))
    rows = []
    for (library, name), one in times.items():
        row = {"bucket": str(bucket), "library": library, "outputs": name, **one.row()}
        more, longer = flops[name] / flops["dense"], one.times(times[library, "dense"])
        row |= {"times_dense": longer, "flop_ratio": more, "over_flops": longer / more}
        row |= {"times_ours": one.times(times[OURS, name])}
        if library == OURS:
            row |= {"temporary_mb": replicas[name].temporary_bytes(bucket) / 1e6}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
