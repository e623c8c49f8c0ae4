"""What one forward pass returns."""

from dataclasses import dataclass
from typing import no_type_check

import jax
from jaxtyping import Array, Float


@no_type_check  # JAX rebuilds it with other leaves (shapes, numpy)
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Output:
    """Every output of a model, in float32, unnormalised. One executable computes them all;
    the host copies only those that somebody asked for."""

    dense: Float[Array, "rows slots dim"]  # one pooled vector for each sequence slot of a row
    tokens: Float[Array, "rows length width"]  # the last hidden state of each token
