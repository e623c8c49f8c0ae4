"""Folders of tiny ColModernVBERT and ColSmol models with random weights, and their tokenizer."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from sources import Tensors, decoder_shapes, sized, with_biases, write_json, write_weights
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

KINDS = ("colmodernvbert", "colsmol")
WIDTH, WIDE, HEADS, LAYERS, SPACE = 32, 48, 2, 2, 8
TILE, PATCH, MERGE, LONGEST = 32, 4, 2, 96
TILE_TOKENS = (TILE // PATCH // MERGE) ** 2
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_AROUND = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = ["[CLS]", "[SEP]", "<|begin_of_text|>", "<|im_start|>", *_AROUND, *_ROWS, "<image>"]
VOCABULARY = len(_LETTERS) + 1 + len(SPECIAL)
IMAGE_ID = VOCABULARY - 1
IMAGES: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": LONGEST},
    "max_image_size": {"longest_edge": TILE},
    "do_pad": True,
}
TEXT = sized(WIDTH, LAYERS, HEADS, WIDE, vocab_size=VOCABULARY, max_position_embeddings=1024)
VISION = sized(WIDTH, LAYERS, HEADS, WIDE, image_size=TILE, patch_size=PATCH)
CONFIGS: dict[str, dict[str, Any]] = {
    "colmodernvbert": {
        "architectures": ["ColModernVBertForRetrieval"],
        "model_type": "colmodernvbert",
        "embedding_dim": SPACE,
        "vlm_config": {
            "model_type": "modernvbert",
            "image_token_id": IMAGE_ID,
            "pixel_shuffle_factor": MERGE,
            "text_config": TEXT | {"model_type": "modernbert", "local_attention": 16},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
        },
    },
    "colsmol": {
        "architectures": ["ColIdefics3"],
        "model_type": "idefics3",
        "embedding_dim": SPACE,
        "image_token_id": IMAGE_ID,
        "scale_factor": MERGE,
        "text_config": TEXT | {"model_type": "llama", "num_key_value_heads": 1},
        "vision_config": VISION | {"model_type": "idefics3_vision"},
    },
}


def tile_words(kind: str) -> Tokenizer:
    """A tokenizer of single bytes, two line breaks and special tokens; that of ColModernVBERT adds
    [CLS] and [SEP]."""
    newline = "Ċ"
    vocabulary = {one: number for number, one in enumerate([*_LETTERS, newline * 2])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIAL])
    if kind == "colmodernvbert":
        ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single="[CLS] $A [SEP]", special_tokens=ends
        )
    return tokenizer


def tile_tensors(kind: str, seed: int = 0) -> Tensors:
    """The tensors of a model, by the names in its file."""
    is_bert = kind == "colmodernvbert"
    root = "vlm" if is_bert else "model"
    text, image = f"{root}.text_model", f"{root}.vision_model"
    connector = f"{root}.connector.modality_projection{'' if is_bert else '.proj'}.weight"
    shapes: dict[str, tuple[int, ...]] = {
        connector: (WIDTH, WIDTH * MERGE**2),
        f"{image}.embeddings.patch_embedding.weight": (WIDTH, 3, PATCH, PATCH),
        f"{image}.embeddings.patch_embedding.bias": (WIDTH,),
        f"{image}.embeddings.position_embedding.weight": ((TILE // PATCH) ** 2, WIDTH),
    }
    table = "embeddings.tok_embeddings" if is_bert else "embed_tokens"
    shapes[f"{text}.{table}.weight"] = (VOCABULARY, WIDTH)
    norms = ["embeddings.norm", "final_norm"] if is_bert else ["norm"]
    shapes |= {f"{text}.{name}.weight": (WIDTH,) for name in norms}
    linear = {"embedding_proj_layer" if is_bert else "linear": (SPACE, WIDTH)}
    norms = [f"{image}.post_layernorm"]
    for number in range(LAYERS):
        layer = f"{text}.layers.{number}"
        if is_bert:
            shapes |= {
                f"{layer}.attn.Wqkv.weight": (3 * WIDTH, WIDTH),
                f"{layer}.attn.Wo.weight": (WIDTH, WIDTH),
                f"{layer}.mlp.Wi.weight": (2 * WIDE, WIDTH),
                f"{layer}.mlp.Wo.weight": (WIDTH, WIDE),
                f"{layer}.mlp_norm.weight": (WIDTH,),
            }
            shapes |= {f"{layer}.attn_norm.weight": (WIDTH,)} if number else {}
        else:
            shapes |= decoder_shapes(layer, WIDTH, WIDE, WIDTH, WIDTH // HEADS)
        layer = f"{image}.encoder.layers.{number}"
        linear |= {f"{layer}.self_attn.{n}_proj": (WIDTH, WIDTH) for n in ("q", "k", "v", "out")}
        linear |= {f"{layer}.mlp.fc1": (WIDE, WIDTH), f"{layer}.mlp.fc2": (WIDTH, WIDE)}
        norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
    shapes |= with_biases(linear, norms, WIDTH)
    draw = np.random.default_rng(seed)
    return {name: _drawn(draw, name, shape) for name, shape in shapes.items()}


def _drawn(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = draw.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return values * np.float32(prod(shape[1:]) ** -0.5)
    return np.asarray(values * np.float32(0.3) + np.float32(name.endswith("weight")), np.float32)


def write_tiled(folder: Path, kind: str = "colmodernvbert", **vlm: Any) -> Path:
    """A directory as transformers or colpali-engine saves it; `vlm` changes the config of the model
    without the projection."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[kind]
    nested = {"vlm_config": config["vlm_config"] | vlm} if "vlm_config" in config else vlm
    write_json(folder / "config.json", config | nested)
    write_json(folder / "preprocessor_config.json", IMAGES)
    write_json(folder / "processor_config.json", {"image_seq_len": TILE_TOKENS})
    write_json(folder / "tokenizer_config.json", {})
    tile_words(kind).save(str(folder / "tokenizer.json"))
    write_weights(folder, tile_tensors(kind))
    return folder
