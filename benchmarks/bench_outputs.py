"""Measures what sparse and multi-vector outputs cost beside one dense vector of the same tower.

Each bucket runs full of tokens, as the engine runs it, to the outputs on the host: with mean
pooling alone, with the head of a masked language model over the vocabulary (SPLADE), and with mean
pooling, a weight and a vector for each token (BGE-M3's three heads), in turns. `times_dense` is the
median ratio of a run to the run with mean pooling in the same round, `flop_ratio` how many more
floating-point operations it needs, and `over_flops` the first over the second.

    python -m benchmarks.bench_outputs
    python -m benchmarks.bench_outputs --architecture-size minilm --buckets 16x128

Weights are random. The bias of the terms leaves about one in a hundred of a text that are not zero.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import msgspec

from benchmarks import report, subject
from benchmarks.bench_model import chosen_grid, dtype_of, full_planes
from benchmarks.subject import Subject
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.models import program, random_parameters
from jaxembed.outputs import OutputName
from jaxembed.spec import (
    DenseLayer,
    DType,
    Head,
    LayerNormLayer,
    NormalizeLayer,
    PerToken,
    Vocabulary,
)

LEAST_LOGIT = 3.8  # of a term: the largest of 128 standard normal ones is over it once in 100


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
    for bucket in grid.buckets:
        runs = {name: subject.replica(one, args, [grid], dtype) for name, one in subjects.items()}
        rows += measure(subjects, runs, bucket, args.repeat)
    print(f"{model.name}, {dtype}, {report.device_name()}")
    report.show(rows)
    facts = {"model": model.name, "dtype": dtype, "repeat": args.repeat, "results": rows}
    report.finish("bench_outputs", argv, facts, args.out)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    subject.add_arguments(parser)
    parser.set_defaults(architecture_size="bert-base")
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--buckets", default="16x128,4x512")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each bucket")
    report.add_arguments(parser)
    return parser.parse_args(argv)


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
        parameters["heads.sparse.bias"][:] = -LEAST_LOGIT
    made = program(spec)
    wanted = {name: parameters[name] for name in made.shapes}
    return replace(model, spec=spec, program=made, parameters=wanted)


def measure(
    subjects: dict[str, Subject], replicas: dict[str, Replica], bucket: Bucket, repeat: int
) -> list[dict[str, Any]]:
    """The row of each model in one bucket."""
    calls, flops = [], []
    for name, replica in replicas.items():
        replica.compile(bucket)
        model = subjects[name]
        planes, lengths = full_planes(bucket, model)
        calls.append(partial(replica.run, bucket, planes, tuple(model.spec.heads)))
        flops.append(subject.useful_flops(model.spec, model.program, lengths))
    times = report.timed_in_turn(calls, repeat)
    return [
        {
            "bucket": str(bucket),
            "outputs": name,
            **one.row(),
            "times_dense": one.times(times[0]),
            "flop_ratio": own / flops[0],
            "over_flops": one.times(times[0]) * flops[0] / own,
            "temporary_mb": replicas[name].temporary_bytes(bucket) / 1e6,
        }
        for name, one, own in zip(replicas, times, flops, strict=True)
    ]


if __name__ == "__main__":
    main()
