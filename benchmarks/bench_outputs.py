"""Measures what sparse and multi-vector outputs cost beside one dense vector of the same tower.

Each bucket runs full of tokens, as the engine runs it, to the outputs on the host: with mean
pooling alone, with the head of a masked language model over the vocabulary (SPLADE), and with mean
pooling, a weight and a vector for each token (BGE-M3's three heads), in turns. `times_dense` is the
median ratio of a run to the run with mean pooling in the same round, and `flop_ratio` how many more
floating-point operations it needs.

Peers run a BERT of the same shape on batches of the same shape, in the same rounds, each in a
process and an environment of its own with as many threads as there are cores: sentence-transformers
in our dtype, its SparseEncoder for SPLADE, and onnxruntime in float32 with a graph that ends in the
pooled output. `times_ours` is the median ratio to ours of the same round.

    python -m benchmarks.bench_outputs
    python -m benchmarks.bench_outputs --architecture-size minilm --buckets 16x128
    python -m benchmarks.bench_outputs --torch .venv-parity --onnx .venv-peers

Weights are random. The bias of the terms leaves about one in a hundred of a text that are not zero.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import peer, report, subject
from benchmarks.bench_model import full_planes
from benchmarks.parameters import random_parameters
from benchmarks.peer import Contestant, Peer
from benchmarks.subject import Subject
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import (
    DenseLayer,
    Head,
    LayerNormLayer,
    NormalizeLayer,
    PerToken,
    Vocabulary,
)
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.models import program

OURS, PROGRAM = "jaxembed", "outputs.py"
PEER_OUTPUTS = ("dense", "SPLADE")
SIZES = ("tiny", "minilm", "bert-base", "bge-large")  # BERT as it was published
MIN_LOGIT = 3.8  # of a term: the largest of 128 standard normal ones is over it once in 100


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every bucket, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("--architecture-size", choices=SIZES, default="bert-base")
    subject.add_kernel_arguments(parser)
    parser.add_argument("--buckets", default="16x128,4x512")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each bucket")
    parser.add_argument("--torch", type=Path, help="an environment with sentence-transformers")
    parser.add_argument("--onnx", type=Path, help="one with onnxruntime, torch and transformers")
    args = report.parse(parser, argv)
    report.configure_jax()
    model = subject.random_subject(args.architecture_size)
    dtype, grid = subject.dtype_of(args), subject.grid_of(args.buckets)
    width, vocabulary = model.spec.hidden_size, model.vocab_size
    heads = {
        "dense": model.spec.heads,
        "SPLADE": {"sparse": masked_lm(width, vocabulary)},
        "BGE-M3": {**model.spec.heads, **per_token(width)},
    }
    subjects = {name: with_heads(model, chosen) for name, chosen in heads.items()}
    config = subject.transformers_config(args.architecture_size)[1]
    rows = []
    with ExitStack() as stack:
        peers = [
            stack.enter_context(
                peer.running(
                    Contestant(library, environment, library, {"dtype": form}),
                    PROGRAM,
                    config=config,
                    bias=-MIN_LOGIT,
                )
            )
            for library, environment, form in (
                ("sentence-transformers", args.torch, dtype),
                ("onnxruntime", args.onnx, "float32"),
            )
            if environment is not None
        ]
        replicas = {name: subject.replica(one, args, grid) for name, one in subjects.items()}
        for bucket in grid.buckets:
            rows += measure(subjects, replicas, peers, bucket, args.repeat)
    report.show(rows, f"{model.name}, {dtype}, {report.device_name()}")
    facts = {"model": model.name, "dtype": dtype, "repeat": args.repeat, "results": rows}
    report.finish(args, facts | {"versions": {one.name: one.versions for one in peers}})


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
            shape = bucket.rows, bucket.length
            calls[one.name, name] = partial(one.seconds, "values", name, *shape)
    measured = report.timed_in_turn(list(calls.values()), repeat, warmups=1)
    times = dict(zip(calls, measured, strict=True))
    return [
        {
            "bucket": str(bucket),
            "library": library,
            "outputs": name,
            **one.row(),
            "times_dense": one.times(times[library, "dense"]),
            "flop_ratio": flops[name] / flops["dense"],
            "times_ours": one.times(times[OURS, name]),
        }
        for (library, name), one in times.items()
    ]


if __name__ == "__main__":
    main()
