"""Gathers rows of an array on a GPU into several arrays, by one kernel.

XLA would need a kernel for each of these arrays, because they have different shapes. Like the
attention kernel of triton.py, this one is written in Pallas and compiled by the Triton in XLA.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

MOST_COLUMNS = 1024  # that an instance of the kernel copies: 4 KiB of float32
WARPS = 4


def gather(
    flat: Float[Array, "slots width"],
    order: Int[Array, " places"],
    sizes: Sequence[int],
    interpret: bool = False,
) -> list[Float[Array, "_ width"]]:
    """Return `flat[order]` in parts of these sizes, which add up to the number of places.

    `order` has indices from 0 to slots - 1. `interpret` runs the kernel in Pallas' interpreter,
    without a GPU.
    """
    (places,), width = order.shape, flat.shape[1]
    columns = min(pl.next_power_of_2(width), MOST_COLUMNS)
    gather_parts = pl.pallas_call(
        partial(_kernel, ends=list(accumulate(sizes)), columns=columns),
        grid=(places, pl.cdiv(width, columns)),
        out_shape=[jax.ShapeDtypeStruct((size, width), flat.dtype) for size in sizes],
        compiler_params=pltriton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="gather_parts",
    )
    return list(gather_parts(order, flat))


def _kernel(order_ref, flat_ref, *part_refs, ends: Sequence[int], columns: int):
    """Copy one block of columns of one place to the part that has this place."""
    place, first = pl.program_id(0), pl.program_id(1) * columns
    block = pl.ds(first, columns)
    is_column = first + lax.iota("int32", columns) < flat_ref.shape[1]
    values = pltriton.load(flat_ref.at[order_ref[place], block], mask=is_column)

    def store(part_ref, start):
        pltriton.store(part_ref.at[place - start, block], values, mask=is_column)

    for part_ref, start, end in zip(part_refs, [0, *ends[:-1]], ends, strict=True):
        pl.when((start <= place) & (place < end))(partial(store, part_ref, start))
