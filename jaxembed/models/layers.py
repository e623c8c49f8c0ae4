"""The layers that backbones share.

Matrix products take operands in the dtype of the parameters; everything else is float32. Parameters
are declared as zeros of the right shape, but the arrays of zeros are never allocated: the values
come from a checkpoint. The weight of a Linear is the parameter `kernel`, as checkpoints name it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models import native, parallel
from jaxembed.models.attention import (
    EVERYTHING,
    AttentionMask,
    Bias,
    attend,
    attend_joint,
    is_native,
    is_separate,
    takes_joint,
)
from jaxembed.models.quantized import QuantizedWeight, whole
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens, Segments


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return GELU in its exact form, x * Phi(x), computed by erf."""
    return 0.5 * x * (1.0 + lax.erf(x * 0.7071067811865476))


ACTIVATIONS: dict[str, Callable] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # CLIP's
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


def rounded_on_gpu(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Return the float32 result of a product, rounded on a GPU if `dtype` is bfloat16.

    A GPU writes the result of a product to memory before XLA's next kernel, an activation, reads
    it; float32 would be twice the bytes. torch rounds there too. float16 has too small a range.
    """
    if dtype != jnp.bfloat16:
        return x

    def rounded(x):
        return x.astype(dtype).astype(jnp.float32)

    return lax.platform_dependent(x, cuda=rounded, rocm=rounded, default=lambda x: x)


def stored_on_gpu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x`, which a GPU computes once and writes to memory.

    Otherwise XLA:GPU may compute a sum or a norm again in each kernel that reads it, and all the
    arrays that it is made of stay in memory until the last of these kernels.
    """
    stored = lax.optimization_barrier
    return lax.platform_dependent(x, cuda=stored, rocm=stored, default=lambda x: x)


class Linear(nnx.Module):
    """A linear layer: x @ weight + bias, with float32 sums for a weight of any dtype.

    A product with a float32 weight has full float32 precision. (The default precision would be TF32
    on GPUs and bfloat16 passes on TPUs.) If the weight is packed into panels, a native kernel
    computes the layer. `adapter` is None or a LowRank, whose result is added.

    In a model that several devices hold together, each has some of the output features if `columns`
    names their parts, as a Cut does, or some of the input features if `rows` does. With `rows`, the
    products of the devices are summed.
    """

    adapter: Any = None  # set by models.adapters

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        columns: parallel.Parts | None = None,
        rows: parallel.Parts | None = None,
    ):
        kernel_cut = bias_cut = None
        if columns is not None:
            kernel_cut, bias_cut = parallel.Cut(1, columns), parallel.Cut(0, columns)
        elif rows is not None:
            kernel_cut = parallel.Cut(0, rows)
        self.kernel = parallel.zeros((in_features, out_features), kernel_cut)
        self.bias = parallel.zeros((out_features,), bias_cut) if bias else None
        self.is_summed = rows is not None and parallel.is_divided()

    def __call__(self, x: Float[Array, "rows length in"]) -> Float[Array, "rows length out"]:
        """Return x @ weight + bias, plus the adapter's result if there is one, in float32."""
        kernel, bias = self.parameters
        if native.is_packed(kernel):
            return native.linear(x, kernel, bias, adapters=self.native_adapters)
        y = lax.dot_general(
            x.astype(kernel.dtype),
            whole(kernel),
            (((2,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        y = parallel.summed(y) if self.is_summed else y
        y = y if bias is None else y + bias[None, None]
        return y if self.adapter is None else y + self.adapter(x)

    def heads(
        self, x: Float[Array, "rows length in"], counts: Sequence[int], width: int
    ) -> list[Float[Array, "rows length heads width"]]:
        """Return the result in parts, as `counts[k]` heads of `width` dimensions, in float32.

        Each part is a product of its own if `is_separate`, unless the layer has an adapter.
        """
        rows, length, _ = x.shape
        ends = list(accumulate(counts))
        if not is_separate() or self.adapter is not None:
            joint = self(x).reshape(rows, length, ends[-1], width)
            return jnp.split(joint, ends[:-1], axis=2)
        kernel, bias = self.parameters
        weight = whole(kernel)
        parts = []
        for count, end in zip(counts, ends, strict=True):
            columns = slice((end - count) * width, end * width)
            y = jnp.einsum(
                "bsd,dhk->bshk",
                x.astype(kernel.dtype),
                weight[:, columns].reshape(-1, count, width),
                precision=lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            if bias is not None:
                y = y + bias[columns].reshape(1, 1, count, width)
            parts.append(y)
        return parts

    @property
    def native_adapters(self) -> native.AdapterOperands | None:
        """The operands of the adapters for a native call, or None without adapters."""
        return None if self.adapter is None else self.adapter.for_native()

    def apply_rounded(
        self, x: Float[Array, "rows length in"], activation: str = "identity"
    ) -> Float[Array, "rows length out"]:
        """Apply the layer and an activation, and round the result to the weight's dtype.

        Use this method if the result is only an operand of the next matrix product, which would
        round its operands anyway. `activation` is a name in ACTIVATIONS.
        """
        kernel, bias = self.parameters
        end = "linear" if activation == "identity" else activation
        if native.is_packed(kernel) and (
            end == "linear" or (end in native.EPILOGUES and is_native(end))
        ):
            return native.linear(
                x,
                kernel,
                bias,
                end,
                dtype=str(kernel.dtype),
                adapters=self.native_adapters,
            )
        y = self(x) if activation == "identity" else rounded_on_gpu(self(x), kernel.dtype)
        return ACTIVATIONS[activation](y).astype(kernel.dtype)

    @property
    def parameters(self) -> tuple[Any, Any]:
        """The weight, and the bias or None, as arrays."""
        return self.kernel[...], None if self.bias is None else self.bias[...]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of input and of output features, even if the weight is packed."""
        inputs, outputs = native.unpacked_shape(self.kernel[...].shape)
        return inputs, outputs


class Embedding(nnx.Module):
    """A table of vectors, looked up by index.

    An index past the end gives the last vector without an error, so callers must check indices.
    `adapter` is None or a LowRank, whose result for the index is added to the vector.
    """

    adapter: Any = None  # set by models.adapters

    def __init__(self, size: int, dim: int):
        self.embedding = nnx.Param(jnp.zeros((size, dim), jnp.float32))

    def __call__(self, index: Int[Array, "rows length"]) -> Float[Array, "rows length dim"]:
        table = self.embedding[...]
        if isinstance(table, QuantizedWeight):
            parts = (table.values, table.scales)
            values, scales = (jnp.take(part, index, axis=0, mode="clip") for part in parts)
            y = values.astype(jnp.float32) * scales
        else:
            y = jnp.take(table, index, axis=0, mode="clip").astype(jnp.float32)
        return y if self.adapter is None else y + self.adapter(index)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of vectors, and the number of dimensions of each vector."""
        size, dim = self.embedding[...].shape
        return size, dim


def row_mean(x: Float[Array, "rows length dim"]) -> Float[Array, "rows length one"]:
    """Return the mean over the last axis, which is kept with size 1.

    On CPUs the sum is computed as a matrix product with ones, because XLA:CPU runs a reduction over
    the last axis one element at a time.
    """

    def by_product(x):
        ones = jnp.ones((x.shape[-1], 1), x.dtype)
        total = lax.dot_general(x, ones, (((2,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
        return total / x.shape[-1]

    return lax.platform_dependent(
        x, cpu=by_product, default=lambda x: x.mean(axis=-1, keepdims=True)
    )


class LayerNorm(nnx.Module):
    """Layer norm: mean 0 and variance 1 over the last axis, then a scale and an optional shift."""

    def __init__(self, dim: int, *, eps: float, bias: bool = True):
        self.scale = nnx.Param(jnp.ones(dim, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(dim, jnp.float32)) if bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "rows length dim"]) -> Float[Array, "rows length dim"]:
        centred = x - row_mean(x)
        variance = row_mean(centred * centred)
        normal = centred * lax.rsqrt(variance + self.eps) * self.scale[...][None, None]
        return normal if self.bias is None else normal + self.bias[...][None, None]

    @property
    def parameters(self) -> tuple[Any, Any]:
        """The scale, and the shift or None, as arrays."""
        return self.scale[...], None if self.bias is None else self.bias[...]

    def norm_of_sum(
        self, hidden: Float[Array, "rows length dim"], linear: Linear, x: Float[Array, "..."]
    ) -> Float[Array, "rows length dim"]:
        """Compute the norm of hidden + linear(x), in one native call if possible."""
        kernel, bias = linear.parameters
        scale, shift = self.parameters
        if native.is_packed(kernel) and is_native("norm") and shift is not None:
            return native.linear(
                x,
                kernel,
                bias,
                "norm",
                norm=(hidden, scale, shift, self.eps),
                adapters=linear.native_adapters,
            )
        return self(hidden + linear(x))


class RMSNorm(nnx.Module):
    """RMS norm: root mean square 1 over the last axis, then a scale. Zhang and Sennrich 2019."""

    def __init__(self, dim: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(dim, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return x * lax.rsqrt(mean_square + self.eps) * scale


class Mlp(nnx.Module):
    """An MLP: down(activation(up(x))), or, if `gated`, down(activation(gate(x)) * up(x)).

    A gated MLP computes gate(x) and up(x) in one product, by the layer `gate_up`. Shazeer 2020,
    arXiv:2002.05202.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        activation: str,
        gated: bool = True,
        bias: bool = False,
        down_bias: bool | None = None,  # None: the same as `bias`
    ):
        part = (width, 1)
        parallel.share(width, "columns of the MLP")
        if gated:
            self.gate_up = Linear(dim, 2 * width, bias=bias, columns=(part, part))
        else:
            self.up = Linear(dim, width, bias=bias, columns=(part,))
        down_bias = bias if down_bias is None else down_bias
        self.down = Linear(width, dim, bias=down_bias, rows=(part,))
        self.activation, self.gated = activation, gated

    def __call__(self, x: Float[Array, "rows length dim"]) -> Float[Array, "rows length dim"]:
        return self.down(self.wide(x))

    def wide(self, x: Float[Array, "rows length dim"]) -> Float[Array, "rows length width"]:
        """Return the input of the layer `down`, float32 or already rounded to the dtype of its
        weight."""
        if not self.gated:
            return self.up.apply_rounded(x, self.activation)
        kernel, bias = self.gate_up.parameters
        gate_mode = f"gated_{self.activation}"
        if native.supports_gated(kernel, self.activation) and is_native(gate_mode):
            return native.linear(
                x,
                kernel,
                bias,
                gate_mode,
                dtype=str(kernel.dtype),
                adapters=self.gate_up.native_adapters,
            )
        gate, up = jnp.split(rounded_on_gpu(self.gate_up(x), kernel.dtype), 2, axis=-1)
        return ACTIVATIONS[self.activation](gate) * up


def attend_hidden(
    hidden: Hidden,
    qkv: Linear,
    heads: int,
    segments: Segments,
    attention_mask: AttentionMask = EVERYTHING,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
    key_segments: Segments | None = None,
) -> Float[Array, "rows length inner"]:
    """Compute self-attention of hidden states: the `qkv` layer, then attention of its result.

    `qkv` maps the hidden states to queries, keys and values, each `inner` wide, of `heads` heads.
    The other arguments are those of `attend_joint`. The result, `[rows, length, inner]`, holds the
    heads side by side; the caller applies the output layer.

    If possible, a single native call computes the layer and the attention. If not, heads are
    rounded to the dtype of the weight: before the rotation if a native call rotates, because it
    takes rounded heads, and else after the rotation.
    """
    rows, length, dim = hidden.shape
    inner, kernel = qkv.shape[1] // 3, qkv.kernel[...]
    width = inner // heads
    is_supported = inner == dim and native.supports_self_attention(hidden, heads, kernel)
    if key_segments is None and is_native("self_attention") and is_supported:
        mask_fields = attention_mask.causal, attention_mask.reach, attention_mask.cap
        angles = None if rotation is None else (rotation.cos, rotation.sin)
        return native.self_attention(
            hidden,
            *qkv.parameters,
            segments,
            heads,
            *mask_fields,
            distance_bias=bias,
            angles=angles,
            adapters=qkv.native_adapters,
        )
    if is_separate():
        query, key, value = qkv.heads(hidden, [heads] * 3, width)
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        query, key, value = (x.astype(kernel.dtype) for x in (query, key, value))
        mixed = attend(query, key, value, segments, attention_mask, bias, key_segments)
        return mixed.reshape(rows, length, inner)
    rotates_natively = key_segments is None and takes_joint(length, width, kernel.dtype)
    may_round = rotation is None or rotates_natively
    joint = (qkv.apply_rounded if may_round else qkv)(hidden).reshape(rows, length, 3, heads, width)
    mixed = attend_joint(
        joint, segments, attention_mask, bias, rotation, kernel.dtype, key_segments
    )
    return mixed.reshape(rows, length, inner)


def after_attention(tokens: PackedTokens) -> AbstractContextManager[None]:
    """In the block, native calls also skip tokens whose last hidden state is not needed."""
    return nullcontext() if tokens.read is None else native.skipping_padding(tokens.read)


class SelfAttention(nnx.Module):
    """Self-attention with its output layer. All heads together have `inner` dimensions."""

    def __init__(
        self,
        dim: int,
        inner: int,
        heads: int,
        *,
        attention_mask: AttentionMask = EVERYTHING,
        bias: bool = False,
    ):
        self.num_heads = parallel.share(heads, "attention heads")
        self.attention_mask = attention_mask
        part = (heads, inner // heads)
        self.qkv = Linear(dim, 3 * inner, bias=bias, columns=(part,) * 3)
        self.out = Linear(inner, dim, bias=bias, rows=(part,))

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        bias: Bias | None = None,
        rotation: Rotation | None = None,
    ) -> Hidden:
        mixed = attend_hidden(
            hidden,
            self.qkv,
            self.num_heads,
            tokens.segments,
            self.attention_mask,
            bias,
            rotation,
            tokens.key_segments,
        )
        with after_attention(tokens):
            return self.out(mixed)


class PreNormLayer(nnx.Module):
    """A transformer layer: attention and MLP, each after a norm and with a residual connection. If
    `attention_norm` is None, there is no norm before the attention."""

    def __init__(
        self,
        attention_norm: LayerNorm | RMSNorm | None,
        attention: SelfAttention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: Mlp,
    ):
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        bias: Bias | None = None,
        rotation: Rotation | None = None,
    ) -> Hidden:
        normal = hidden if self.attention_norm is None else self.attention_norm(hidden)
        hidden = hidden + self.attention(normal, tokens, bias, rotation)
        with after_attention(tokens):
            return hidden + self.mlp(self.mlp_norm(hidden))


class WordEmbeddings(nnx.Module):
    """Word embeddings, times a scale, then an optional norm."""

    def __init__(self, size: int, dim: int, *, scale: float = 1.0, norm: LayerNorm | None = None):
        self.word = Embedding(size, dim)
        self.scale, self.norm = scale, norm

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.normed(self.scaled(tokens))

    def scaled(self, tokens: PackedTokens) -> Hidden:
        """Return the word embeddings times the scale."""
        hidden = self.word(tokens.ids)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def normed(self, hidden: Hidden) -> Hidden:
        """Return the result for these scaled embeddings."""
        return hidden if self.norm is None else self.norm(hidden)


class BiasByDistance(nnx.Module):
    """A learned bias of attention scores for each head and each distance between key and query.

    As in MPNet and T5, all keys `reach` or more tokens before the query share one bias, and all
    keys `reach` or more tokens after the query share another.
    """

    def __init__(self, heads: int, reach: int):
        # column k is for keys whose position minus the query's position is k - reach
        self.bias = parallel.zeros((heads, 2 * reach + 1), parallel.Cut(0, ((heads, 1),)))

    def __call__(self, length: int) -> Bias:
        """Return the biases for rows of this length, as `attend` takes them."""
        table = self.bias[...]
        beyond = max(length - 1 - table.shape[1] // 2, 0)
        wide = jnp.pad(table.astype(jnp.float32), ((0, 0), (beyond, beyond)), mode="edge")
        middle = wide.shape[1] // 2
        return wide[:, middle - length + 1 : middle + length]
