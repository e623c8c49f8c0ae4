"""The backbones of models that read pages: their input mixes words and image patches.

Faysse et al. 2024, arXiv:2407.01449 (ColPali). For a patch, the hidden state that an image encoder
computes takes the place of the word embedding; those of some of its inner layers may be added after
the first layers of the backbone (Meng et al. 2024, arXiv:2406.04334). A row may hold texts and
images. Names and the order of operations are those of transformers' PaliGemmaModel,
Qwen3VLModel, ModernVBertModel and Idefics3Model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxembed.data.spec import BLANK_SIDE
from jaxembed.models import native
from jaxembed.models.clip import Clip, ClipConfig
from jaxembed.models.layers import Embedding, Linear, WordEmbeddings
from jaxembed.models.modernbert import ModernBert, ModernBertConfig
from jaxembed.models.qwen3 import Qwen3, Qwen3Config
from jaxembed.models.qwen_vision import QwenVision, QwenVisionConfig
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """The image encoder of a backbone, whose config is in `image`."""

    image_tower: str = "clip"  # a name in IMAGE_TOWERS
    image: Mapping[str, Any] | None = None  # the fields of the image encoder's config
    image_token_id: int = 0  # the id of tokens that stand for patches


@dataclass(frozen=True)
class PagesConfig(Qwen3Config, ImagesConfig):
    """The config of a decoder, and of its image encoder."""

    blank_id: int | None = None  # the id of each of the BLANK_TOKENS tokens of a blank image


@dataclass(frozen=True)
class ModernBertPagesConfig(ModernBertConfig, ImagesConfig):
    """The config of ModernBERT, and of its image encoder."""


class _ReadsImages(nnx.Module):
    """Adds an image encoder to a backbone.

    The pixels must be normalized: `tokens.pixels` is float32 `[rows, length, values]`. The image
    encoder runs only if the batch has an image.
    """

    embeddings: WordEmbeddings

    def add_images(self, config: ImagesConfig, width: int) -> None:
        """Make the image encoder. `width` is the number of dimensions of hidden states."""
        self.image = IMAGE_TOWERS[config.image_tower](config.image or {}, width)
        self.image_token_id = config.image_token_id
        self.later = len((config.image or {}).get("deepstack", ()))

    def embed(self, tokens: PackedTokens) -> list[Hidden]:
        """Return the embeddings of words and patches, and hidden states that are added after the
        first layers."""
        words = self.embeddings.scaled(tokens)
        is_patch = tokens.ids == self.image_token_id

        def with_images() -> list[Hidden]:
            assert tokens.pixels is not None
            # In the input of the image encoder words become padding: segment 0 and pixels of 0. An
            # image or tile begins where a patch follows a word.
            at_patch = is_patch[:, :, None]
            is_first = is_patch & ~jnp.pad(is_patch, ((0, 0), (1, 0)))[:, :-1]
            image_tokens = replace(
                tokens,
                segments=jnp.where(is_patch, jnp.cumsum(is_first, axis=1), 0),
                pixels=jnp.where(at_patch, tokens.pixels, 0.0),
            )
            otherwise = (words, *nothing)
            pairs = zip(self.image(image_tokens), otherwise, strict=True)
            return [jnp.where(at_patch, image, other) for image, other in pairs]

        nothing = [jnp.zeros_like(words)] * self.later
        hidden, *later = lax.cond(jnp.any(is_patch), with_images, lambda: [words, *nothing])
        return [self.embeddings.normed(hidden), *later]


BLANK_TOKENS = BLANK_SIDE**2


class Pages(_ReadsImages, Qwen3):
    """A decoder with an image encoder: maps packed tokens to the last hidden states, float32
    `[rows, length, dim]`.

    If the config has a `blank_id`, a sequence may have a blank image, tokens with this id. What the
    image encoder computes for it is in the parameters, so it need not run for texts that have one.
    """

    Config = PagesConfig

    def __init__(self, config: PagesConfig):
        Qwen3.__init__(self, config)
        self.add_images(config, config.hidden_size)
        self.blank_id = config.blank_id
        has_blank = config.blank_id is not None
        self.blank = Embedding(BLANK_TOKENS, config.hidden_size) if has_blank else None

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden, *later = self.embed(tokens)
        if self.blank is not None and self.blank_id is not None:
            assert tokens.places is not None
            is_blank, number, places = blanks(tokens, self.blank_id)
            hidden = jnp.where(is_blank[:, :, None], self.blank(number), hidden)
            tokens = replace(tokens, places=tokens.places + places)
        return self.run(hidden, tokens, later)


def blanks(tokens: PackedTokens, blank_id: int) -> tuple[Array, Array, Array]:
    """Return for each token whether it is one of a blank image, its number in it, and what is added
    to its places: bool and int `[rows, length]`, and int `[rows, length, 3]`.

    A sequence must have one blank image or none. Its tokens and those after it get the places of
    `mrope_positions`.
    """
    is_blank = tokens.ids == blank_id
    ones = is_blank.astype(jnp.int32)
    count = jnp.cumsum(ones, axis=1)
    first = jnp.arange(is_blank.shape[1])[None] - tokens.positions  # of the token's sequence
    before = jnp.take_along_axis(count - ones, first, axis=1, mode="clip")
    seen = count - before  # the blank tokens of the sequence, up to this one
    number = jnp.clip(seen - 1, 0, BLANK_TOKENS - 1)
    in_image = jnp.stack(
        [jnp.zeros_like(number), number // BLANK_SIDE, number % BLANK_SIDE], axis=2
    )
    shift = jnp.where(seen > 0, BLANK_SIDE - BLANK_TOKENS, 0)[:, :, None]
    places = jnp.where(is_blank[:, :, None], in_image - number[:, :, None], shift)
    return is_blank, number, places


class ModernBertPages(_ReadsImages, ModernBert):
    """ModernBERT with an image encoder: maps packed tokens to the last hidden states, float32
    `[rows, length, dim]`."""

    Config = ModernBertPagesConfig

    def __init__(self, config: ModernBertPagesConfig):
        ModernBert.__init__(self, config)
        self.add_images(config, config.hidden_size)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        (hidden,) = self.embed(tokens)
        return self.run(hidden, tokens)


@dataclass(frozen=True)
class TileEncoderConfig(ClipConfig):
    """The config of SigLIP's image encoder, and of the projection after it."""

    merge: int = 1  # a token is made of merge * merge patches
    projection_bias: bool = True


class TileEncoder(nnx.Module):
    """SigLIP's image encoder without its head, and a projection to the width of the backbone.

    It takes an image, or each tile of an image, as a row of its own. The images or tiles of a row
    must be numbered by `tokens.segments` from 1, and each have as many patches as the encoder has
    positions.
    """

    def __init__(self, config: TileEncoderConfig, width: int):
        merge = config.merge
        self.tower = Clip(config)
        self.projection = Linear(config.hidden_size * merge**2, width, bias=config.projection_bias)
        side = isqrt(config.max_positions)
        grid = np.arange(side**2).reshape(side // merge, merge, side // merge, merge)
        # the positions of patches in the order of tokens, and of the patches in a token
        self.positions = tuple(grid.transpose(0, 2, 1, 3).reshape(-1).tolist())
        self.size = len(self.positions) // merge**2  # tokens of a tile

    def __call__(self, tokens: PackedTokens) -> list[Hidden]:
        """Return the hidden states of patches; those of words are arbitrary."""
        assert tokens.pixels is not None
        rows, length, values = tokens.pixels.shape
        if length < self.size:  # no image fits into the row
            return [jnp.zeros((rows, length, self.projection.shape[1]), jnp.float32)]
        numbers = jnp.arange(1, length // self.size + 1)
        is_in = tokens.segments[:, None, :] == numbers[None, :, None]
        first = jnp.argmax(is_in, axis=2)  # the index of a tile's first token
        at = first[:, :, None] + jnp.arange(self.size)[None, None]
        pixels = jnp.take_along_axis(
            tokens.pixels, at.reshape(rows, -1, 1), axis=1, mode="clip"
        ).reshape(-1, self.size, values)
        by_tile = lax.map(self._encode_if, (jnp.any(is_in, axis=2).reshape(-1), pixels))
        tile = jnp.maximum(tokens.segments - 1, 0)
        within = jnp.arange(length)[None] - jnp.take_along_axis(first, tile, axis=1)
        index = (tile * self.size + within)[:, :, None]
        encoded = by_tile.reshape(rows, -1, by_tile.shape[-1])
        return [jnp.take_along_axis(encoded, index, axis=1, mode="clip")]

    def _encode_if(
        self, tile: tuple[Bool[Array, ""], Float[Array, "size values"]]
    ) -> Float[Array, "size dim"]:
        """Return the hidden states of a tile's tokens; zeros if it is none."""
        is_tile, pixels = tile
        nothing = jnp.zeros((self.size, self.projection.shape[1]), jnp.float32)
        return lax.cond(is_tile, lambda: self._encode(pixels), lambda: nothing)

    def _encode(self, pixels: Float[Array, "size values"]) -> Float[Array, "size dim"]:
        """Return the hidden states of a tile's tokens."""
        positions = jnp.array(self.positions)[None]
        patches = PackedTokens(
            ids=jnp.zeros_like(positions),
            positions=positions,
            segments=jnp.ones_like(positions),
            types=jnp.zeros_like(positions),
            bounds=jnp.zeros((1, 1, 2), positions.dtype),
            pixels=pixels.reshape(1, positions.shape[1], -1),
        )
        with native.skipping_padding(None):  # a tile has none
            return self.projection(self.tower(patches).reshape(1, self.size, -1))[0]


IMAGE_TOWERS: dict[str, Callable[[Mapping[str, Any], int], nnx.Module]] = {
    "clip": lambda fields, width: TileEncoder(TileEncoderConfig(**fields), width),
    "qwen_vision": lambda fields, width: QwenVision(QwenVisionConfig(**fields)),
}
"""The image encoders by name, from the fields of their config and the width of the backbone. They
map packed tokens to hidden states of this width: those that take the place of word embeddings, then
those that are added after the backbone's first layers."""
