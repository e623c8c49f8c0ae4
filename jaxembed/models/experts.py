"""MLPs with routed experts: each token uses a few of several MLPs.

Nussbaum and Duderstadt 2025, arXiv:2502.07972, after Shazeer et al. 2017, arXiv:1701.06538.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models import native, parallel
from jaxembed.models.layers import Linear, Mlp
from jaxembed.models.tokens import Hidden, Segments

MIN_BLOCK = 16  # rows: a tile of native kernels


class Experts(nnx.Module):
    """The sum of the results of a token's experts, each times its share, plus a bias.

    The `router` gives each token a softmax over all experts. The token's `active` experts are those
    with the largest shares, of equal ones the first; the shares are not scaled to a sum of 1. The
    router is float32 in every model, because a rounded one would choose other experts.

    An expert computes only its tokens, in blocks, and padding has no expert.
    """

    def __init__(self, dim: int, width: int, *, activation: str, experts: int, active: int):
        self.router = Linear(dim, experts, bias=False)
        self.experts = nnx.List(
            [Mlp(dim, width, activation=activation, gated=False) for _ in range(experts)]
        )
        self.bias = nnx.Param(jnp.zeros(dim, jnp.float32))
        self.active = active
        self.is_summed = parallel.is_divided()
        for expert in self.experts:  # the sum over the devices is that of all experts together
            expert.down.is_summed = False

    def __call__(self, x: Hidden, segments: Segments) -> Hidden:
        """Return the result for hidden states; `segments` are those of PackedTokens."""
        shares, chosen = lax.top_k(jax.nn.softmax(self.router(x), axis=-1), self.active)
        padding = len(self.experts)  # comes after all experts
        chosen = jnp.where(segments[:, :, None] == 0, padding, chosen)
        places, starts = _sorted_places(chosen.reshape(-1), padding + 1)
        results = self._results(x.reshape(-1, x.shape[-1]), places, starts)
        results = results[places].reshape(*shares.shape, -1)
        y = (results * shares[..., None]).sum(axis=2)
        y = parallel.summed(y) if self.is_summed else y
        return y + self.bias[...][None, None]

    def _results(
        self, x: Float[Array, "tokens dim"], places: Int[Array, " uses"], starts: Int[Array, " end"]
    ) -> Float[Array, "places dim"]:
        """Return the results of all experts for their tokens, one expert's after another's.

        `places` are those of each token's `active` uses of experts, and `starts` the first place of
        each expert. A block is as long as an expert's mean number of tokens. The rows after the
        last token of an expert are written again by the experts that follow.
        """
        uses, dim = len(places), x.shape[1]
        block = min(max(uses // len(self.experts), MIN_BLOCK), uses)
        token = jnp.arange(uses, dtype=jnp.int32) // self.active
        x = x[jnp.zeros(uses + block, jnp.int32).at[places].set(token)]
        results = jnp.zeros((uses + block, dim), jnp.float32)
        for number, expert in enumerate(self.experts):
            start, count = starts[number], starts[number + 1] - starts[number]

            def computed(step, results, expert=expert, start=start, count=count):
                first = step * block
                is_own = (jnp.arange(block) < count - first).astype(jnp.int32)
                with native.skipping_padding(is_own[None]):
                    y = expert(lax.dynamic_slice_in_dim(x, start + first, block)[None])[0]
                return lax.dynamic_update_slice_in_dim(results, y, start + first, 0)

            results = lax.fori_loop(0, -(-count // block), computed, results)
        return results


def _sorted_places(
    numbers: Int[Array, " uses"], size: int
) -> tuple[Int[Array, " uses"], Int[Array, " size"]]:
    """Return the place of each of `numbers`, which are less than `size`, in their sorted order, and
    the first place of each number from 0 on. Equal numbers keep their order."""
    is_number = (numbers[:, None] == jnp.arange(size)[None]).astype(jnp.int32)
    counts = jnp.cumsum(is_number, axis=0)
    starts = jnp.cumsum(counts[-1]) - counts[-1]
    return (is_number * (starts[None] + counts - 1)).sum(axis=1), starts
