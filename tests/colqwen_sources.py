"""Tiny models of Qwen2-VL and Qwen2.5-VL, and a tokenizer with Qwen's special tokens."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from sources import (
    Tensors,
    decoder_shapes,
    sized,
    with_biases,
    write_json,
    write_modules,
    write_weights,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

KINDS = ("qwen2_vl", "qwen2_5_vl")
_NAMES = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
SPECIAL = [f"<|{name}|>" for name in _NAMES]
PATCH, SIDE = 14, 28  # pixels on a side of a patch and of a token
VOCAB, WIDTH, SPACE = 256 + len(SPECIAL), 64, 32
IMAGE_ID = VOCAB - 2
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]}
TEXT = sized(WIDTH, 2, 2, 96, vocab_size=VOCAB, num_key_value_heads=1, initializer_range=0.2)
TEXT |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_parameters": _ROPE}
TEXT |= {"bos_token_id": None, "eos_token_id": None}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH},
    "qwen2_5_vl": {"depth": 3, "hidden_size": 32, "intermediate_size": 48}
    | {"out_hidden_size": WIDTH, "fullatt_block_indexes": [1]},
}
for _one in VISION.values():
    _one |= {"num_heads": 2, "initializer_range": 0.2}
IMAGES: dict[str, Any] = {  # one token to forty
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 784, "longest_edge": 40 * 784},
}


def vlm_config(kind: str) -> dict[str, Any]:
    """The config of a language model with eyes."""
    return {
        "model_type": kind,
        "text_config": TEXT,
        "vision_config": VISION[kind],
        "image_token_id": IMAGE_ID,
    }


def qwen_words() -> Tokenizer:
    """A tokenizer of single bytes and Qwen's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def colqwen_tensors(kind: str, seed: int = 0) -> Tensors:
    """The tensors of a model, by the names that transformers saves."""
    text, image = "vlm.language_model", "vlm.visual"
    wide, key_width, dim = TEXT["intermediate_size"], WIDTH // TEXT["num_attention_heads"], 32
    merged = 4 * dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{text}.embed_tokens.weight": (VOCAB, WIDTH),
        f"{text}.norm.weight": (WIDTH,),
        f"{image}.patch_embed.proj.weight": (dim, 3, 2, PATCH, PATCH),
    }
    linear = {
        "embedding_proj_layer": (SPACE, WIDTH),
        f"{image}.merger.mlp.0": (merged, merged),
        f"{image}.merger.mlp.2": (WIDTH, merged),
    }
    norms = [f"{image}.merger.ln_q"]
    for number in range(TEXT["num_hidden_layers"]):
        layer = f"{text}.layers.{number}"
        shapes |= decoder_shapes(layer, WIDTH, wide, WIDTH, key_width)
        for name, width in (("q", WIDTH), ("k", key_width), ("v", key_width)):
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (width,)
    for number in range(VISION[kind]["depth"]):
        block = f"{image}.blocks.{number}"
        linear |= {f"{block}.attn.qkv": (3 * dim, dim), f"{block}.attn.proj": (dim, dim)}
        if kind == "qwen2_vl":
            linear |= {f"{block}.mlp.fc1": (merged, dim), f"{block}.mlp.fc2": (dim, merged)}
        else:
            between = VISION[kind]["intermediate_size"]
            linear |= {f"{block}.mlp.{one}_proj": (between, dim) for one in ("gate", "up")}
            linear[f"{block}.mlp.down_proj"] = (dim, between)
        norms += [f"{block}.norm1", f"{block}.norm2"]
    shapes |= with_biases(linear, norms, dim)
    if kind == "qwen2_5_vl":  # whose norms have no biases
        shapes = {k: v for k, v in shapes.items() if k.removesuffix(".bias") not in norms}
    draw = np.random.default_rng(seed)
    return {name: _drawn(draw, name, shape) for name, shape in shapes.items()}


def _drawn(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = draw.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return values * np.float32(prod(shape[1:]) ** -0.5)
    return np.asarray(values * np.float32(0.3) + np.float32(name.endswith("weight")), np.float32)


def write_colqwen(folder: Path, kind: str = "qwen2_vl", **vlm: Any) -> Path:
    """A directory as transformers saves it; `vlm` changes the config of the language model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["ColQwen2ForRetrieval"],
        "model_type": "colqwen2",
        "embedding_dim": SPACE,
        "vlm_config": vlm_config(kind) | vlm,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", IMAGES)
    write_json(folder / "tokenizer_config.json", {"pad_token": "<|endoftext|>"})
    qwen_words().save(str(folder / "tokenizer.json"))
    write_weights(folder, colqwen_tensors(kind))
    return folder


def write_biqwen(folder: Path, kind: str = "qwen2_5_vl", name: str = "BiQwen2_5") -> Path:
    """A directory as colpali-engine saves it, for a class `name` with one vector for each input."""
    write_colqwen(folder, kind)
    write_json(folder / "config.json", vlm_config(kind) | {"architectures": [name]})
    tensors = colqwen_tensors(kind).items()
    own = {k.removeprefix("vlm."): x for k, x in tensors if k.startswith("vlm.")}
    write_weights(folder, own)
    return folder


JINA_TASKS = ("retrieval", "text-matching", "code")
PROJECTOR = "multi_vector_projector"


def write_jina_v4(folder: Path, **config: Any) -> Path:
    """jina-embeddings-v4 as published: the adapters of all tasks in one file. `config` changes the
    model's config."""
    write_biqwen(folder, name="JinaEmbeddingsV4Model")
    own = vlm_config("qwen2_5_vl") | {
        "architectures": ["JinaEmbeddingsV4Model"],
        "auto_map": {"AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model"},
        "task_names": list(JINA_TASKS),
        "single_vector_pool_strategy": "mean",
        "multi_vector_projector_dim": SPACE,
        "vision_start_token_id": IMAGE_ID - 2,
        "vision_end_token_id": IMAGE_ID - 1,
    }
    write_json(folder / "config.json", own | config)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256})
    write_modules(folder, ("custom_st.Own", ""))  # it is not read
    tensors = load_file(folder / "model.safetensors")
    tensors = {k.replace("embedding_proj_layer", PROJECTOR): x for k, x in tensors.items()}
    projector = {
        f"{PROJECTOR}.{part}": x.astype(np.float32)
        for part, x in (("weight", np.eye(SPACE, WIDTH)), ("bias", np.zeros(SPACE)))
    }
    write_weights(folder, tensors | projector)
    draw, adapters = np.random.default_rng(1), {}
    for task in JINA_TASKS:
        for layer in ("model.language_model.layers.1.self_attn.q_proj", PROJECTOR):
            outputs = SPACE if layer == PROJECTOR else WIDTH
            for part, shape in (("A", (2, WIDTH)), ("B", (outputs, 2))):
                factor = draw.standard_normal(shape).astype(np.float32) * np.float32(0.3)
                adapters[f"base_model.model.{layer}.lora_{part}.{task}.weight"] = factor
    (folder / "adapters").mkdir()
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none"}
    write_json(folder / "adapters" / "adapter_config.json", lora)
    save_file(adapters, folder / "adapters" / "adapter_model.safetensors")
    return folder


DSE_README = "max_pixels = 2560*28*28\n'What is shown in this image?'"
MCDSE_README = DSE_README.replace("2560*28*28", "960 * 28 * 28")


def write_dse(folder: Path, readme: str = DSE_README, **config: Any) -> Path:
    """DSE-Qwen2 as published, or mcdse with its README.md. `config` changes the model's config."""
    write_gme(folder)
    own = vlm_config("qwen2_vl") | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": TEXT | {"max_position_embeddings": 256},
        "vision_start_token_id": IMAGE_ID - 2,
        "vision_end_token_id": IMAGE_ID - 1,
    }
    write_json(folder / "config.json", own | config)
    (folder / "modules.json").unlink()
    (folder / "README.md").write_text(readme)
    return folder


def write_gme(folder: Path, **config: Any) -> Path:
    """GME-Qwen2-VL as published. `config` changes the model's config."""
    write_biqwen(folder, "qwen2_vl", "GmeQwen2VL")
    own = vlm_config("qwen2_vl") | {
        "architectures": ["GmeQwen2VL"],
        "auto_map": {"AutoModel": "modeling_gme_qwen2vl.GmeQwen2VL"},
        "vision_start_token_id": IMAGE_ID - 2,
        "vision_end_token_id": IMAGE_ID - 1,
        "min_image_tokens": 6,
        "max_image_tokens": 40,
        "max_length": 256,
    }
    write_json(folder / "config.json", own | config)
    write_modules(folder, ("custom_st.Own", ""))  # it is not read
    tensors = load_file(folder / "model.safetensors")
    write_weights(folder, {k: x for k, x in tensors.items() if "embedding_proj" not in k})
    return folder
