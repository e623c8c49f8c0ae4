"""The model that a benchmark runs: a checkpoint, or random weights in a known shape.

Random weights run as fast as real ones: every shape is the same and no value is looked at.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxembed.models import Program, program, random_parameters
from jaxembed.spec import ModelSpec, NormalizeLayer

# vocabulary, width, layers, heads, intermediate width, positions
SIZES = {
    "tiny": (1000, 32, 2, 4, 64, 64),
    "minilm": (30522, 384, 6, 12, 1536, 512),
    "bert-base": (30522, 768, 12, 12, 3072, 512),
    "bge-large": (30522, 1024, 24, 16, 4096, 512),
}


@dataclass(frozen=True)
class Subject:
    """A model and its parameters, on the host."""

    name: str
    spec: ModelSpec
    program: Program
    parameters: dict[str, np.ndarray]
    tokenizer: Path | None  # none for random weights

    @property
    def vocab_size(self) -> int:
        return int(self.spec.config["vocab_size"])


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument(
        "--architecture-size", choices=SIZES, help="random weights of this shape instead"
    )
    parser.add_argument("--cache-dir", type=Path, help="of converted checkpoints")


def load(args: Namespace) -> Subject:
    """What the arguments name."""
    if args.architecture_size:
        return random_subject(args.architecture_size)
    # Imported here: random weights need neither Orbax nor the hub.
    from jaxembed import checkpoint, hub

    path = hub.resolve(args.model, cache_dir=args.cache_dir or hub.default_cache_dir())
    spec = checkpoint.load_spec(path)
    name = args.model or hub.DEFAULT_MODEL
    parameters = checkpoint.load_params(path, spec)
    return Subject(name, spec, program(spec), parameters, checkpoint.tokenizer_path(path))


def random_subject(size: str, seed: int = 0) -> Subject:
    spec = spec_of(size)
    return Subject(f"{size} (random)", spec, program(spec), random_parameters(spec, seed), None)


def spec_of(size: str) -> ModelSpec:
    """A BERT of this size, mean pooled."""
    vocabulary, width, layers, heads, intermediate, positions = SIZES[size]
    return ModelSpec(
        architecture="bert",
        config={
            "vocab_size": vocabulary,
            "hidden_size": width,
            "num_layers": layers,
            "num_heads": heads,
            "intermediate_size": intermediate,
            "max_positions": positions,
            "type_vocab_size": 2,
            "norm_eps": 1e-12,
            "activation": "gelu",
        },
        pooling=("mean",),
        modules=(NormalizeLayer(),),
        max_input_tokens=positions,
        hidden_size=width,
        dtype="float32",
        source=size,
        content_hash="",
    )


def kernels(model: Program) -> list[tuple[int, int]]:
    """The shape of every matrix that each token is multiplied with, in the order of layers."""
    shapes = model.shapes.items()
    return [(s.shape[0], s.shape[1]) for name, s in shapes if name.endswith(".kernel")]


def useful_flops(spec: ModelSpec, model: Program, lengths: Sequence[int] | np.ndarray) -> float:
    """Floating point operations that sequences of these lengths need: two for each element of
    each matrix and token, and attention's two products. Norms, softmax and padding not counted."""
    tokens = np.asarray(lengths, np.float64)
    products = 2.0 * sum(rows * columns for rows, columns in kernels(model))
    layers, width = spec.config["num_layers"], spec.config["hidden_size"]
    return float(products * tokens.sum() + 4.0 * layers * width * (tokens**2).sum())
