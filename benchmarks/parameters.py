"""Random parameters, for tests and benchmarks of models without weights."""

import numpy as np

from jaxembed.data.spec import ModelSpec
from jaxembed.models import parameter_shapes


def random_parameters(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 parameters of a model, by name."""
    draw = np.random.default_rng(seed)
    shapes = parameter_shapes(spec).items()
    return {name: random_parameter(name, shape.shape, draw) for name, shape in shapes}


def random_parameter(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Draw a float32 parameter, of a size that keeps activations near 1."""
    values = draw.standard_normal(shape, np.float32)
    if name.endswith(".kernel"):
        values *= shape[0] ** -0.5
    elif name.endswith(".scale"):
        values = 1 + 0.1 * values
    else:  # biases and embeddings
        values *= 0.1 if len(shape) == 1 else 0.5
    return values
