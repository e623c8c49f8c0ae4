"""Weights in int8, with scales.

The weight of a linear layer, `[inputs, outputs]`, has a scale for each output and each group of
inputs: w = scale * value. A table of vectors has a scale for each vector.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int8

ROWS_AT_ONCE = 4096  # of a table
MOST = 127  # values are from -127 to 127, so that a weight and its negative have the same error


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in int8, which takes the place of an array among the parameters of a model.

    `values` are `[inputs, outputs]` and `scales` `[groups, outputs]`, or both are packed for native
    kernels (native.packed_quantized); in a table they are `[size, dim]` and `[size, 1]`. `dtype` is
    the dtype to which products round their inputs.
    """

    values: Any
    scales: Any
    dtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the values."""
        return len(self.values.shape)

    def astype(self, dtype: Any) -> "QuantizedWeight":
        """Return the same weight for products of another dtype."""
        return QuantizedWeight(self.values, self.scales, str(np.dtype(dtype)))

    def __getitem__(self, whole: Any) -> "QuantizedWeight":
        """Return the weight itself for `[...]`, by which parameters are read."""
        assert whole is ...
        return self


def quantized(
    weight: Float[np.ndarray, "inputs outputs"], groups: int = 1
) -> tuple[Int8[np.ndarray, "inputs outputs"], Float[np.ndarray, "groups outputs"]]:
    """Return the values and the scales of a weight. `groups` must divide the number of inputs.

    The scale of a group of zeros is 1. NaN and infinities are refused with a ValueError: they would
    become ordinary numbers.
    """
    inputs, outputs = weight.shape
    grouped = np.asarray(weight, np.float32).reshape(groups, inputs // groups, outputs)
    largest = np.abs(grouped).max(axis=1)
    if not np.isfinite(largest).all():
        raise ValueError("a weight is not finite, and cannot be quantized")
    scales = np.where(largest < np.finfo(np.float32).tiny * MOST, np.float32(1), largest / MOST)
    values = np.rint(grouped / scales[:, None]).astype(np.int8)
    return values.reshape(inputs, outputs), scales


def quantized_table(
    table: Float[np.ndarray, "size dim"],
) -> tuple[Int8[np.ndarray, "size dim"], Float[np.ndarray, "size one"]]:
    """Return the values and the scales of a table of vectors, some rows at a time to save memory.
    Raises ValueError as `quantized` does."""
    values, scales = np.empty(table.shape, np.int8), np.empty((len(table), 1), np.float32)
    for first in range(0, len(table), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        of_values, of_scales = quantized(table[rows].T)
        values[rows], scales[rows] = of_values.T, of_scales.T
    return values, scales


def dequantized(values: Any, scales: Any) -> Any:
    """Return a weight in float32, from the results of `quantized` as arrays of numpy or JAX."""
    inputs, outputs = values.shape
    groups = values.reshape(len(scales), -1, outputs).astype(np.float32)
    return (groups * scales[:, None]).reshape(inputs, outputs)


def whole(weight: Any) -> Any:
    """Return a weight that is not packed as an array, in the dtype of its products."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    return dequantized(weight.values, weight.scales).astype(weight.dtype)


def groups_of(inputs: int, size: int, step: int) -> int:
    """Return the number of groups of `inputs`: groups are multiples of `step`, and as large as they
    can be up to `size`. If no multiple divides `inputs`, there is one group."""
    sizes = [group for group in range(step, size + 1, step) if inputs % group == 0]
    return inputs // max(sizes, default=inputs)
