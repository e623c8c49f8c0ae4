"""Tiny directories of CLIP, SigLIP and kin, random weights, and their forward pass in numpy."""

from base64 import b64encode
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from sources import Tensors, sized, with_biases, write_json, write_weights
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WIDTH, WIDE, HEADS, LAYERS, POSITIONS, SPACE = 32, 48, 2, 2, 12, 16
SIDE, PATCH = 32, 8
PATCHES = (SIDE // PATCH) ** 2
WORDS = ["<pad>", "</s>", "<s>", *(f"w{k}" for k in range(20)), "<unk>", "<end>"]
CLIPS = ("clip", "metaclip_2")  # the kinds with the towers of CLIP


def _config(name: str, text: dict[str, Any], image: dict[str, Any], **more: Any) -> dict[str, Any]:
    halves = {
        "text_config": sized(WIDTH, LAYERS, HEADS, WIDE, vocab_size=len(WORDS))
        | {"max_position_embeddings": POSITIONS}
        | text,
        "vision_config": sized(WIDTH, LAYERS, HEADS, WIDE, patch_size=PATCH) | image,
    }
    return {"architectures": [f"{name}Model"], "model_type": name.lower(), **halves, **more}


_SQUARE = {"height": SIDE, "width": SIDE}
_FIXED, _ENDED = {"image_size": SIDE}, {"eos_token_id": len(WORDS) - 1}
CLIP_CONFIG = _config("CLIP", _ENDED, _FIXED, projection_dim=SPACE)
SIGLIP_CONFIG = _config("Siglip", {}, _FIXED)
CLIP_IMAGES: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor"}
CLIP_IMAGES |= {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE}
SIGLIP_IMAGES: dict[str, Any] = {"image_processor_type": "SiglipImageProcessor", "size": _SQUARE}
SIGLIP2_IMAGES: dict[str, Any] = {"image_processor_type": "Siglip2ImageProcessor"}
SIGLIP2_IMAGES |= {"patch_size": PATCH, "max_num_patches": PATCHES}
CONFIGS = {"clip": CLIP_CONFIG, "siglip": SIGLIP_CONFIG}
CONFIGS["metaclip_2"] = CLIP_CONFIG | _config(
    "MetaClip2", {"eos_token_id": 2}, _FIXED, model_type="metaclip_2"
)
CONFIGS["siglip2"] = _config("Siglip2", {}, {"num_patches": PATCHES})
PROCESSORS = {"clip": CLIP_IMAGES, "metaclip_2": CLIP_IMAGES}
PROCESSORS |= {"siglip": SIGLIP_IMAGES, "siglip2": SIGLIP2_IMAGES}


def words(kind: str) -> Tokenizer:
    """A tokenizer of whole words, which ends texts as the kind does."""
    # MetaCLIP 2 has the ids of XLM-V, where </s> is 2
    names = ["<pad>", "<s>", "</s>", *WORDS[3:]] if kind == "metaclip_2" else WORDS
    vocabulary = {word: number for number, word in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    end = "<end>" if kind == "clip" else "</s>"
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=f"<s> $A {end}" if kind in CLIPS else f"$A {end}",
        pair="$A $B",
        special_tokens=[(name, vocabulary[name]) for name in ("<s>", end)],
    )
    return tokenizer


def dual_tensors(kind: str, seed: int = 0) -> Tensors:
    """The tensors of a model, by transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "text_model.embeddings.token_embedding.weight": (len(WORDS), WIDTH),
        "vision_model.embeddings.patch_embedding.weight": (
            (WIDTH, 3 * PATCH**2) if kind == "siglip2" else (WIDTH, 3, PATCH, PATCH)
        ),
    }
    halves = {"text_model": ("final_layer_norm", POSITIONS)}
    halves["vision_model"] = ("post_layernorm", PATCHES + (kind in CLIPS))
    linear: dict[str, tuple[int, int]] = {}
    norms = []
    for half, (last, positions) in halves.items():
        shapes[f"{half}.embeddings.position_embedding.weight"] = (positions, WIDTH)
        norms.append(f"{half}.{last}")
        for number in range(LAYERS):
            layer = f"{half}.encoder.layers.{number}"
            linear |= {f"{layer}.self_attn.{n}_proj": (WIDTH, WIDTH) for n in ("q", "k", "v")}
            linear[f"{layer}.self_attn.out_proj"] = (WIDTH, WIDTH)
            linear |= {f"{layer}.mlp.fc1": (WIDE, WIDTH), f"{layer}.mlp.fc2": (WIDTH, WIDE)}
            norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
    if kind in CLIPS:
        shapes["vision_model.embeddings.class_embedding"] = (WIDTH,)
        shapes["text_projection.weight"] = shapes["visual_projection.weight"] = (SPACE, WIDTH)
        norms.append("vision_model.pre_layrnorm")
    else:
        head = "vision_model.head"
        shapes["vision_model.embeddings.patch_embedding.bias"] = (WIDTH,)
        shapes |= {"logit_bias": (), f"{head}.probe": (1, 1, WIDTH)}
        shapes[f"{head}.attention.in_proj_weight"] = (3 * WIDTH, WIDTH)
        shapes[f"{head}.attention.in_proj_bias"] = (3 * WIDTH,)
        linear |= {f"{head}.attention.out_proj": (WIDTH, WIDTH), "text_model.head": (WIDTH, WIDTH)}
        linear |= {f"{head}.mlp.fc1": (WIDE, WIDTH), f"{head}.mlp.fc2": (WIDTH, WIDE)}
        norms.append(f"{head}.layernorm")
    shapes |= with_biases(linear, norms, WIDTH)
    draw = np.random.default_rng(seed)
    return {name: _drawn(draw, name, shape) for name, shape in shapes.items()}


def _drawn(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = draw.standard_normal(shape).astype(np.float32)
    if len(shape) > 1 and name.endswith("weight") and "embedding.weight" not in name:
        return values * np.float32(prod(shape[1:]) ** -0.5)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return np.asarray(values * np.float32(0.3) + np.float32(is_scale), np.float32)


def write_dual(folder: Path, kind: str = "clip", seed: int = 0, **config: Any) -> Path:
    """A directory as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIGS[kind] | config)
    write_json(folder / "preprocessor_config.json", PROCESSORS[kind])
    write_json(folder / "tokenizer_config.json", {"pad_token": "<pad>"})
    words(kind).save(str(folder / "tokenizer.json"))
    write_weights(folder, dual_tensors(kind, seed))
    return folder


# OpenCLIP's names of the parts of tensors' names, in the order in which they are replaced
OPEN_CLIP_NAMES = {
    "text_model.encoder.layers": "transformer.resblocks",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm": "ln_",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "text_model.embeddings.token": "token",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_ln_": "ln_final",
    "vision_model.embeddings.patch_embedding": "visual.conv1",
    "vision_model.embeddings.class": "visual.class",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm": "visual.ln_pre",
    "vision_model.post_layernorm": "visual.ln_post",
    "text_projection.weight": "text_projection",
    "visual_projection.weight": "visual.proj",
}


def open_clip_tensors(tensors: Tensors, prefix: str = "") -> Tensors:
    """The tensors of a CLIP under OpenCLIP's names; `prefix` is that of the names of texts."""
    found = {}
    for name, value in tensors.items():
        if ".q_proj." in name:
            values = [tensors[name.replace(".q_", f".{letter}_")] for letter in "qkv"]
            name, value = name.replace("self_attn.q_proj.", "attn.in_proj_"), np.concatenate(values)
        elif name.endswith("projection.weight"):
            value = np.ascontiguousarray(value.T)
        for old, new in OPEN_CLIP_NAMES.items():
            name = name.replace(old, new)
        if ".k_proj." not in name and ".v_proj." not in name:
            is_text = not name.startswith(("visual.", "logit_scale"))
            found[(prefix if is_text else "") + name] = value
    return found


def open_clip_config(**model: Any) -> dict[str, Any]:
    """The content of open_clip_config.json of CLIP_CONFIG."""
    sizes: dict[str, Any] = {"width": WIDTH, "layers": LAYERS, "mlp_ratio": WIDE / WIDTH}
    text = sizes | {"heads": HEADS, "context_length": POSITIONS, "vocab_size": len(WORDS)}
    image = sizes | {"head_width": WIDTH // HEADS, "image_size": SIDE, "patch_size": PATCH}
    towers = {"vision_cfg": image, "text_cfg": text}
    return {"model_cfg": {"embed_dim": SPACE, "quick_gelu": True, **towers, **model}}


def write_open_clip(folder: Path, kind: str = "clip", prefix: str = "", **model: Any) -> Path:
    """A directory as OpenCLIP saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "open_clip_config.json", open_clip_config(**model))
    words(kind).save(str(folder / "tokenizer.json"))
    write_weights(folder, open_clip_tensors(dual_tensors(kind), prefix))
    (folder / "model.safetensors").rename(folder / "open_clip_model.safetensors")
    return folder


def png(colours: np.ndarray) -> bytes:
    """The file of an image."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return file.getvalue()


def data_uri(colours: np.ndarray) -> str:
    """An image as a data URI."""
    return f"data:image/png;base64,{b64encode(png(colours)).decode()}"


def picture(seed: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Random colours, uint8 `[height, width, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def expected_text(kind: str, tensors: Tensors, ids: list[int]) -> np.ndarray:
    """The vector of a text in float64, from the formulas of transformers' models."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    if kind not in CLIPS:
        ids = ids + [0] * (POSITIONS - len(ids))
    x = t["text_model.embeddings.token_embedding.weight"][ids]
    x = x + t["text_model.embeddings.position_embedding.weight"][: len(ids)]
    x = _tower(t, "text_model", x, kind)
    last = _norm(t, "text_model.final_layer_norm", x, kind)[-1]
    if kind in CLIPS:
        return _unit(t["text_projection.weight"] @ last)
    return _unit(_linear(t, "text_model.head", last))


def expected_image(kind: str, tensors: Tensors, colours: np.ndarray) -> np.ndarray:
    """The vector of an image in float64. Its sides are those that it would be resized to: SIDE by
    SIDE pixels, or for siglip2 a number of whole patches."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    mean, std = np.array([0.5] * 3), np.array([0.5] * 3)
    if kind in CLIPS:
        mean = np.array([0.48145466, 0.4578275, 0.40821073])
        std = np.array([0.26862954, 0.26130258, 0.27577711])
    rows, columns = (side // PATCH for side in colours.shape[:2])
    values = ((colours / 255 - mean) / std).reshape(rows, PATCH, columns, PATCH, 3)
    kernel = t["vision_model.embeddings.patch_embedding.weight"]
    if kind == "siglip2":
        kernel = kernel.reshape(WIDTH, PATCH, PATCH, 3).transpose(0, 3, 1, 2)
    x = np.einsum("aibjc,ocij->abo", values, kernel).reshape(-1, WIDTH)
    if kind in CLIPS:
        x = np.concatenate([t["vision_model.embeddings.class_embedding"][None], x])
    else:
        x = x + t["vision_model.embeddings.patch_embedding.bias"]
    positions = t["vision_model.embeddings.position_embedding.weight"]
    x = x + (_resized(positions, rows, columns) if kind == "siglip2" else positions)
    if kind in CLIPS:
        x = _norm(t, "vision_model.pre_layrnorm", x, kind)
    x = _norm(t, "vision_model.post_layernorm", _tower(t, "vision_model", x, kind), kind)
    if kind in CLIPS:
        return _unit(t["visual_projection.weight"] @ x[0])
    head = "vision_model.head"
    weight, bias = (t[f"{head}.attention.in_proj_{name}"] for name in ("weight", "bias"))
    inputs = (t[f"{head}.probe"][0], x, x)
    parts = zip(inputs, np.split(weight, 3), np.split(bias, 3), strict=True)
    mixed = _attend(*(y @ w.T + b for y, w, b in parts), causal=False)
    found = _linear(t, f"{head}.attention.out_proj", mixed)[0]
    return _unit(found + _mlp(t, f"{head}.mlp", _norm(t, f"{head}.layernorm", found, kind), kind))


def _resized(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A square table of positions, resized to the patches of an image: `[rows * columns, dim]`."""
    side = SIDE // PATCH
    square = table.reshape(side, side, -1)
    by_row, by_column = (_resizing(side, size) for size in (rows, columns))
    return np.einsum("ia,jb,abo->ijo", by_row, by_column, square).reshape(rows * columns, -1)


def _resizing(before: int, after: int) -> np.ndarray:
    """The matrix `[after, before]` that resizes values by a triangle filter."""
    matrix = np.zeros((after, before))
    step = before / after
    for row in range(after):
        for column in range(before):
            distance = abs(column + 0.5 - (row + 0.5) * step) / max(step, 1.0)
            matrix[row, column] = max(1.0 - distance, 0.0)
    return matrix / matrix.sum(axis=1, keepdims=True)


def _tower(t: Tensors, half: str, x: np.ndarray, kind: str) -> np.ndarray:
    for number in range(LAYERS):
        layer = f"{half}.encoder.layers.{number}"
        normal = _norm(t, f"{layer}.layer_norm1", x, kind)
        qkv = (_linear(t, f"{layer}.self_attn.{name}_proj", normal) for name in ("q", "k", "v"))
        causal = half == "text_model" and kind in CLIPS
        x = x + _linear(t, f"{layer}.self_attn.out_proj", _attend(*qkv, causal=causal))
        x = x + _mlp(t, f"{layer}.mlp", _norm(t, f"{layer}.layer_norm2", x, kind), kind)
    return x


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool) -> np.ndarray:
    q, k, v = (x.reshape(len(x), HEADS, -1).swapaxes(0, 1) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) * q.shape[2] ** -0.5
    if causal:
        scores = np.where(np.tri(len(scores[0]), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed = weights / weights.sum(axis=2, keepdims=True) @ v
    return mixed.swapaxes(0, 1).reshape(q.shape[1], -1)


def _mlp(t: Tensors, name: str, x: np.ndarray, kind: str) -> np.ndarray:
    x = _linear(t, f"{name}.fc1", x)
    if kind in CLIPS:
        x = x / (1 + np.exp(-1.702 * x))
    else:
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return _linear(t, f"{name}.fc2", x)


def _linear(t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]


def _norm(t: Tensors, name: str, x: np.ndarray, kind: str) -> np.ndarray:
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + (1e-5 if kind in CLIPS else 1e-6))
    return x * t[f"{name}.weight"] + t[f"{name}.bias"]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)
