"""Directories of jina-clip-v1 and v2 as published, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
from dual_sources import WORDS, words
from sources import Tensors, sized, with_biases, write_json, write_weights

VERSIONS = ("v1", "v2")
TASK = "retrieval.query"
PROMPT = "Represent the query for retrieving evidence documents: "
ORIGINAL, LORA = ".parametrizations.weight.original", ".parametrizations.weight.0.lora_"
TEXT, IMAGE = "text_model.transformer.", "vision_model."
LIMIT = 40  # tokens of a text

# By version: the sizes of the texts' encoder, and those of the images'. The images of v2 do not
# consist of whole patches.
TINY = {
    "v1": (sized(32, 2, 2, 48), {"width": 32, "head_width": 16, "image_size": 32}),
    "v2": (sized(32, 2, 2, 48), {"width": 32, "head_width": 16, "image_size": 36}),
}
SIZES = {
    "v1": {"patch_size": 8, "pt_hw_seq_len": 4, "intp_freq": False},
    "v2": {"patch_size": 8, "pt_hw_seq_len": 3, "intp_freq": True},
}
# the published widths, with two layers
WIDE = {
    "v1": (sized(768, 2, 12, 3072), {"width": 768, "head_width": 64, "image_size": 224}),
    "v2": (sized(1024, 2, 16, 4096), {"width": 1024, "head_width": 64, "image_size": 512}),
}
WIDE_SIZES = {
    "v1": {"patch_size": 16, "pt_hw_seq_len": 14, "intp_freq": False},
    "v2": {"patch_size": 14, "pt_hw_seq_len": 16, "intp_freq": True},
}


def jina_clip_config(version: str, *, wide: bool = False) -> dict[str, Any]:
    """The content of config.json. The published one has no sizes of the texts' encoder."""
    (text, image), sizes = (WIDE if wide else TINY)[version], (WIDE_SIZES if wide else SIZES)
    settings: dict[str, Any] = {"use_flash_attn": False, "vocab_size": len(WORDS), **text}
    name, task = "jinaai/jina-bert-flash-implementation", None
    if version == "v2":
        name, task = "jinaai/jina-embeddings-v3", TASK
        settings |= {"lora_adaptations": [TASK], "lora_rank": 4, "lora_alpha": 4}
        settings |= {"task_instructions": {TASK: PROMPT}, "load_trained_adapters": False}
    return {
        "architectures": ["JinaCLIPModel"],
        "model_type": "jina_clip",
        "add_projections": False,
        "text_config": {
            "default_instruction_task": None,
            "default_lora_task": task,
            "embed_dim": text["hidden_size"],
            "hf_model_config_kwargs": settings,
            "hf_model_name_or_path": name,
            "pooler_type": "mean_pooler",
            "proj_type": None,
        },
        "vision_config": {
            "embed_dim": image["width"],
            "layers": 2,
            "ls_init_value": None,
            "mlp_ratio": 2.6667,
            "naive_swiglu": True,
            "patch_dropout": 0.1,
            "post_norm": False,
            "proj_type": None,
            "qkv_bias": True,
            "rope_embeddings": True,
            "subln": True,
            **image,
            **sizes[version],
        },
    }


def jina_clip_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """The tensors by their published names."""
    text, image = config["text_config"]["hf_model_config_kwargs"], config["vision_config"]
    shapes: dict[str, tuple[int, ...]] = {"logit_scale": ()}
    shapes |= _image_shapes(image) | _text_shapes(text)
    draw = np.random.default_rng(seed)
    return {name: _drawn(draw, name, shape) for name, shape in shapes.items()}


def _image_shapes(image: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, patch = image["width"], image["patch_size"]
    wide, tokens = int(width * image["mlp_ratio"]), (image["image_size"] // patch) ** 2 + 1
    shapes: dict[str, tuple[int, ...]] = {
        f"{IMAGE}cls_token": (1, 1, width),
        f"{IMAGE}pos_embed": (1, tokens, width),
        f"{IMAGE}patch_embed.proj.weight": (width, 3, patch, patch),
        f"{IMAGE}patch_embed.proj.bias": (width,),
    }
    shapes |= with_biases({}, [f"{IMAGE}norm"], width)
    for number in range(image["layers"]):
        block = f"{IMAGE}blocks.{number}"
        shapes |= {f"{block}.attn.{one}_proj.weight": (width, width) for one in "qkv"}
        shapes |= {f"{block}.attn.{one}_bias": (width,) for one in "qv"}
        linear = {f"{block}.attn.proj": (width, width), f"{block}.mlp.w3": (width, wide)}
        linear |= {f"{block}.mlp.{one}": (wide, width) for one in ("w1", "w2")}
        norms = [f"{block}.norm1", f"{block}.norm2", f"{block}.attn.inner_attn_ln"]
        shapes |= with_biases(linear, norms, width)
        shapes |= with_biases({}, [f"{block}.mlp.ffn_ln"], wide)
    return shapes


def _text_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, wide, rank = text["hidden_size"], text["intermediate_size"], text.get("lora_rank")
    start = f"{TEXT}roberta." if rank else TEXT
    weights = {
        "embeddings.word_embeddings": (text["vocab_size"], width),
        "embeddings.token_type_embeddings": (1 if rank else 2, width),
    }
    biases, norms = {}, ["emb_ln"]
    for number in range(text["num_hidden_layers"]):
        layer = f"encoder.layers.{number}"
        linear = {f"{layer}.mixer.Wqkv": (3 * width, width)}
        linear |= {f"{layer}.mixer.out_proj": (width, width)}
        if rank:
            linear |= {f"{layer}.mlp.fc1": (wide, width), f"{layer}.mlp.fc2": (width, wide)}
        else:
            linear[f"{layer}.mlp.wo"] = (width, wide)
            weights[f"{layer}.mlp.gated_layers"] = (2 * wide, width)
        weights |= linear
        biases |= {f"{start}{name}.bias": shape[:1] for name, shape in linear.items()}
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
    shapes = biases | with_biases({}, [start + name for name in norms], width)
    for name, (outputs, inputs) in weights.items():
        if not rank:
            shapes[f"{start}{name}.weight"] = (outputs, inputs)
            continue
        is_table = "embeddings" in name
        shapes[f"{start}{name}{ORIGINAL}"] = (outputs, inputs)
        shapes[f"{start}{name}{LORA}A"] = (1, outputs, rank) if is_table else (1, rank, inputs)
        shapes[f"{start}{name}{LORA}B"] = (1, rank, inputs) if is_table else (1, outputs, rank)
    return shapes


def _drawn(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = draw.standard_normal(shape).astype(np.float32)
    is_table = "_embeddings" in name
    if ".lora_" in name:  # so that an adapter changes its weight by about a half
        return values * np.float32(shape[2] ** -0.5 if name.endswith("B") == is_table else 0.5)
    if len(shape) > 1 and not is_table:
        return values * np.float32(np.prod(shape[1:]) ** -0.5)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return np.asarray(values * np.float32(0.3) + np.float32(is_scale), np.float32)


def without_adapter(tensors: Tensors) -> Tensors:
    """The tensors of texts by the names of a model without adapters, with the only adapter merged
    by the formulas of the model's code; its scale is 1."""
    found = {}
    for name, value in tensors.items():
        if not name.startswith(TEXT) or LORA in name:
            continue
        plain = name.removeprefix(TEXT).removeprefix("roberta.").replace(ORIGINAL, ".weight")
        if name.endswith(ORIGINAL):
            a, b = (tensors[name.replace(ORIGINAL, f"{LORA}{one}")][0] for one in "AB")
            value = value + (a @ b if "_embeddings" in name else b @ a)
        found[plain] = value
    return found


def write_jina_clip(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A directory as published, whose texts are those of `words`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    processor = {"image_processor_type": "JinaCLIPImageProcessor", "resize_mode": "shortest"}
    processor |= {"size": config["vision_config"]["image_size"], "interpolation": "bicubic"}
    colours = {"mean": [0.48145466, 0.4578275, 0.40821073], "fill_color": 0}
    colours["std"] = [0.26862954, 0.26130258, 0.27577711]
    write_json(folder / "preprocessor_config.json", processor | colours)
    write_json(folder / "tokenizer_config.json", {"model_max_length": LIMIT})
    prompts = config["text_config"]["hf_model_config_kwargs"].get("task_instructions", {})
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    words("metaclip_2").save(str(folder / "tokenizer.json"))  # as XLM-R's: <s> $A </s>
    write_weights(folder, jina_clip_tensors(config, seed))
    return folder
