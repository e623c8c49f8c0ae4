"""Converts the image encoder of DSE-Qwen2 and of models trained from it, how their pages are
prepared, and the blank image before their texts."""

from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx

from converters.families import dse
from converters.family import Images
from converters.heads import PAGE
from converters.tokenizers.framed import FramedTokenizer
from converters.vision import gme, qwen_vl
from converters.vision.colqwen import vision_rules
from converters.weights import Rule, Transform, choose, expand
from jaxembed.data.spec import BLANK_SIDE, ImageRules
from jaxembed.models import normalized_pixels
from jaxembed.models.qwen_vision import QwenVision, QwenVisionConfig
from jaxembed.models.tokens import PackedTokens
from jaxembed.preprocessing.images.prepare import mrope_positions

# From the code in README.md: the minimum and maximum tokens of an image. They take the place of the
# limits in preprocessor_config.json. A lower maximum in this file is used.
TOKENS = {"readme.DSE": (1, 2560), "readme.MCDSE": (1, 960), "readme.VDR": (1, 768)}
TWICE = ("readme.DSE",)  # codes that resize images twice, as GME's does
SOURCE = "visual"


def images(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images. `hf` is its config.json with the fields of its
    text_config. Raises UnsupportedModel and CheckpointError."""
    found, code = qwen_vl.encoder_of(hf, folder), dse.code_of(hf)
    tokenizer = FramedTokenizer(folder, hf["vocab_size"])
    (blank,) = tokenizer.ids(dse.BLANK)
    after = f"{dse.AFTER_IMAGE}{PAGE}{dse.END[code]}"
    rules = qwen_vl.within_texts(found.image, tokenizer, dse.BEFORE_IMAGE, after)
    rules = qwen_vl.limited(rules, TOKENS[code])
    if code in TWICE:
        low, high = (rules.token_side**2 * tokens for tokens in gme.FIRST_TOKENS)
        rules = msgspec.structs.replace(rules, first_area=(low, high))
    rule = blank_rule(found.config["image"], rules)
    return Images(found.config | {"blank_id": blank}, (*found.rules, rule), rules)


def blank_rule(encoder: dict[str, Any], rules: ImageRules) -> Rule:
    """Return the rule for the hidden states of a black image of BLANK_SIDE by BLANK_SIDE tokens.
    `encoder` has the fields of the image encoder's config."""
    graph, state = nnx.split(nnx.eval_shape(lambda: QwenVision(QwenVisionConfig(**encoder))))
    names = [".".join(("image", *map(str, path))) for path, _ in nnx.to_flat_state(state)]
    rules_by_name = {
        rule.target: rule
        for rule in choose(expand(vision_rules(SOURCE, "image"), dict.fromkeys(names, ())), {})
    }
    ordered = [rules_by_name[name] for name in names]

    def states(*arrays: np.ndarray) -> np.ndarray:
        rest = iter(arrays)
        values = (rule.transform.apply(*islice(rest, len(rule.sources))) for rule in ordered)
        parameters = [jnp.asarray(value, jnp.float32) for value in values]
        model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), parameters))
        return np.asarray(model(blank_image(rules))[0][0])

    sources = tuple(source for rule in ordered for source in rule.sources)
    # the other rules for these tensors check their shapes
    return Rule(sources, "tower.blank.embedding", Transform(states, lambda *_: [], dtype="float32"))


def blank_image(rules: ImageRules) -> PackedTokens:
    """Return the tokens of a black image of BLANK_SIDE by BLANK_SIDE tokens, as QwenVision takes
    them."""
    count = BLANK_SIDE**2
    zeros = jnp.zeros((1, count), jnp.int32)
    return PackedTokens(
        ids=zeros,
        positions=zeros,
        segments=zeros + 1,
        types=zeros,
        bounds=jnp.zeros((1, 1, 2), jnp.int32),
        pixels=normalized_pixels(jnp.zeros((1, count, rules.token_bytes), jnp.uint8), rules),
        places=jnp.asarray(mrope_positions(BLANK_SIDE, BLANK_SIDE, 0, 0))[None],
    )
