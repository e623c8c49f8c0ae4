"""A tiny ColPali directory with random weights."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from sources import Tensors, decoder_shapes, sized, with_biases, write_json, write_weights
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WIDTH, WIDE, HEADS, LAYERS, HEAD_WIDTH, SPACE = 32, 48, 2, 2, 16, 8
SIDE, PATCH = 32, 8
WORDS = ["<pad>", "<eos>", "<bos>", "\n", "Question:", "Describe", "the", "image", ".", "<unk>"]
WORDS += [f"w{k}" for k in range(20)]
IMAGE_ID = len(WORDS)  # that of "<image>"
VOCABULARY = 40
PAGE = (SIDE // PATCH) ** 2 + 6  # tokens of a page: patches, and what is said after them

_SIZES = sized(WIDTH, LAYERS, HEADS, WIDE)
CONFIG: dict[str, Any] = {
    "architectures": ["ColPaliForRetrieval"],
    "model_type": "colpali",
    "embedding_dim": SPACE,
    "vlm_config": {
        "model_type": "paligemma",
        "image_token_index": IMAGE_ID,
        "projection_dim": WIDTH,
        "hidden_size": WIDTH,
        "text_config": _SIZES
        | {"model_type": "gemma", "vocab_size": VOCABULARY}
        | {"num_key_value_heads": 1, "head_dim": HEAD_WIDTH},
        "vision_config": _SIZES
        | {"model_type": "siglip_vision_model", "vision_use_head": False}
        | {"image_size": SIDE, "patch_size": PATCH},
    },
}


def words() -> Tokenizer:
    """A tokenizer of whole words, as Gemma's it keeps line breaks."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Split(".", "isolated"),
        ]
    )
    special = ["<pad>", "<eos>", "<bos>", "<image>"]
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    return tokenizer


def page_tensors(seed: int = 0) -> Tensors:
    """The tensors of a model, by the names that transformers saves."""
    text, image = "vlm.language_model.model", "vlm.vision_tower"
    shapes: dict[str, tuple[int, ...]] = {
        f"{text}.embed_tokens.weight": (VOCABULARY, WIDTH),
        f"{text}.norm.weight": (WIDTH,),
        f"{image}.embeddings.patch_embedding.weight": (WIDTH, 3, PATCH, PATCH),
        f"{image}.embeddings.patch_embedding.bias": (WIDTH,),
        f"{image}.embeddings.position_embedding.weight": ((SIDE // PATCH) ** 2, WIDTH),
    }
    linear = {"vlm.multi_modal_projector.linear": (WIDTH, WIDTH)}
    linear["embedding_proj_layer"] = (SPACE, WIDTH)
    norms = [f"{image}.post_layernorm"]
    for number in range(LAYERS):
        layer = f"{text}.layers.{number}"
        shapes |= decoder_shapes(layer, WIDTH, WIDE, HEADS * HEAD_WIDTH, HEAD_WIDTH)
        layer = f"{image}.encoder.layers.{number}"
        linear |= {f"{layer}.self_attn.{n}_proj": (WIDTH, WIDTH) for n in ("q", "k", "v", "out")}
        linear |= {f"{layer}.mlp.fc1": (WIDE, WIDTH), f"{layer}.mlp.fc2": (WIDTH, WIDE)}
        norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
    shapes |= with_biases(linear, norms, WIDTH)
    draw = np.random.default_rng(seed)
    return {name: _drawn(draw, shape) for name, shape in shapes.items()}


def _drawn(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = draw.standard_normal(shape).astype(np.float32)
    return values * np.float32(prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.3)


def write_pages(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A directory as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG | config)
    size = {"height": SIDE, "width": SIDE}
    images = {"image_processor_type": "SiglipImageProcessor", "size": size}
    write_json(folder / "preprocessor_config.json", images)
    special = {f"{one}_token": f"<{one}>" for one in ("pad", "eos", "bos")}
    write_json(folder / "tokenizer_config.json", special)
    words().save(str(folder / "tokenizer.json"))
    write_weights(folder, page_tensors(seed))
    return folder
