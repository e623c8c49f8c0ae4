"""The backbone of models that read pages: a decoder whose input mixes words and image patches.

Faysse et al. 2024, arXiv:2407.01449 (ColPali). For a patch, the hidden state that an image encoder
computes takes the place of the word embedding; those of some of its inner layers may be added after
the first layers of the decoder (Meng et al. 2024, arXiv:2406.04334). A row may hold texts and
images. Names and the order of operations are those of transformers' PaliGemmaModel and
Qwen3VLModel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxembed.models.clip import Clip, ClipConfig
from jaxembed.models.layers import Linear
from jaxembed.models.qwen3 import Qwen3, Qwen3Config
from jaxembed.models.qwen_vision import QwenVision, QwenVisionConfig
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class PagesConfig(Qwen3Config):
    """The config of the decoder, with the config of the image encoder in `image`."""

    image_tower: str = "clip"  # a name in IMAGE_TOWERS
    image: Mapping[str, Any] | None = None  # the fields of the image encoder's config
    image_token_id: int = 0  # the id of tokens that stand for patches


class Pages(Qwen3):
    """The backbone: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`.

    The pixels must be normalized: `tokens.pixels` is float32 `[rows, length, values]`. The image
    encoder runs only if the batch has an image.
    """

    Config = PagesConfig

    def __init__(self, config: PagesConfig):
        super().__init__(config)
        self.image = IMAGE_TOWERS[config.image_tower](config)
        self.image_token_id = config.image_token_id
        self.later = len((config.image or {}).get("deepstack", ()))

    def __call__(self, tokens: PackedTokens) -> Hidden:
        """Embed words and patches, and run the decoder on both."""
        words = self.embeddings(tokens)
        is_patch = tokens.ids == self.image_token_id

        def with_images() -> list[Hidden]:
            assert tokens.pixels is not None
            # In the input of the image encoder words become padding: segment 0 and pixels of 0.
            # Each image is a segment; a sequence may have several, with words between them.
            at_patch = is_patch[:, :, None]
            starts = is_patch & ~jnp.pad(is_patch, ((0, 0), (1, 0)))[:, :-1]
            image_tokens = replace(
                tokens,
                segments=jnp.where(is_patch, jnp.cumsum(starts, axis=1), 0),
                pixels=jnp.where(at_patch, tokens.pixels, 0.0),
            )
            otherwise = (words, *nothing)
            pairs = zip(self.image(image_tokens), otherwise, strict=True)
            return [jnp.where(at_patch, image, other) for image, other in pairs]

        nothing = [jnp.zeros_like(words)] * self.later
        hidden, *later = lax.cond(jnp.any(is_patch), with_images, lambda: [words, *nothing])
        return self.run(hidden, tokens, later)


class ProjectedClip(nnx.Module):
    """SigLIP's image encoder without its head, and a projection to the width of the decoder."""

    def __init__(self, config: PagesConfig):
        self.tower = Clip(sizes := ClipConfig(**(config.image or {})))
        self.projection = Linear(sizes.hidden_size, config.hidden_size)

    def __call__(self, tokens: PackedTokens) -> list[Hidden]:
        return [self.projection(self.tower(tokens))]


IMAGE_TOWERS: dict[str, Callable[[PagesConfig], nnx.Module]] = {
    "clip": ProjectedClip,
    "qwen_vision": lambda config: QwenVision(QwenVisionConfig(**(config.image or {}))),
}
"""The image encoders by name. They map packed tokens to hidden states of the decoder's width: those
that take the place of word embeddings, then those that are added after the decoder's first
layers."""
