"""jina-clip-v1 and v2 against the formulas of the models' code in torch: pixels bit for bit, and
vectors of texts and images."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from dual_sources import data_uri, words
from golden.jina_bert import slopes
from jina_clip_sources import (
    IMAGE,
    LIMIT,
    PROMPT,
    TASK,
    VERSIONS,
    jina_clip_config,
    jina_clip_tensors,
    without_adapter,
    write_jina_clip,
)
from PIL import Image
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, silu

from converters import outline_routes
from jaxembed.data.spec import IMAGE_ROUTE
from jaxembed.preprocessing.images.decode import to_pillow
from jaxembed.preprocessing.images.prepare import prepare_image
from parity.reference import answers, assert_within

TEXTS = ["w1 w2 w3", "w5", "w7 w8 w9 w10 w11", "w0 " * 100]
SIDES = [(36, 36), (50, 90), (201, 70), (333, 501), (1, 7), (37, 43), (512, 515), (600, 512)]
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def prepared(image: Image.Image, size: int) -> np.ndarray:
    """Colours as torchvision's Resize, to the length of the shorter side, and CenterCrop give."""
    short, long = sorted(image.size)
    longer = int(size * long / short)
    sides = (size, longer) if image.width <= image.height else (longer, size)
    image = image.resize(sides, Image.Resampling.BICUBIC)
    left, top = (round((side - size) / 2.0) for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def turned(x: Tensor, angles: Tensor, *, adjacent: bool) -> Tensor:
    """Heads `[heads, length, width]`, whose pairs are next to each other or half a head apart."""
    pairs = x.unflatten(-1, (-1, 2) if adjacent else (2, -1))
    first, second = pairs.unbind(-1 if adjacent else -2)
    cos, sin = angles.cos(), angles.sin()
    both = first * cos - second * sin, second * cos + first * sin
    return torch.stack(both, dim=-1 if adjacent else -2).flatten(-2)


def frequencies(width: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2).float() / width)


class Reference:
    """A model by the formulas of hf_model.py, eva_model.py and rope_embeddings.py, in float32."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        self._text = config["text_config"]["hf_model_config_kwargs"]
        self._image = config["vision_config"]
        self._is_v2 = "lora_rank" in self._text
        merged = without_adapter(tensors)
        self._t = {name: torch.from_numpy(value) for name, value in (tensors | merged).items()}

    @torch.no_grad()
    def of_text(self, text: str) -> np.ndarray:
        ids = words("metaclip_2").encode(text).ids
        ids = ids if len(ids) <= LIMIT else [*ids[: LIMIT - 1], ids[-1]]
        x = self._t["embeddings.word_embeddings.weight"][ids]
        x = self._norm_of_text(x + self._t["embeddings.token_type_embeddings.weight"][0], "emb_ln")
        for number in range(self._text["num_hidden_layers"]):
            layer = f"encoder.layers.{number}"
            mixed = self._linear(self._mixed(x, f"{layer}.mixer"), f"{layer}.mixer.out_proj")
            x = self._norm_of_text(x + mixed, f"{layer}.norm1")
            if self._is_v2:
                wide, last = gelu(self._linear(x, f"{layer}.mlp.fc1")), "fc2"
            else:
                weight = self._t[f"{layer}.mlp.gated_layers.weight"]
                gate, up = linear(x, weight).chunk(2, dim=-1)
                wide, last = gelu(gate) * up, "wo"
            x = self._norm_of_text(x + self._linear(wide, f"{layer}.mlp.{last}"), f"{layer}.norm2")
        return normalize(x.mean(dim=0), dim=0).numpy()

    def _mixed(self, x: Tensor, name: str) -> Tensor:
        heads = self._text["num_attention_heads"]
        qkv = self._linear(x, f"{name}.Wqkv").unflatten(-1, (3, heads, -1))
        q, k, v = (one.transpose(0, 1) for one in qkv.unbind(1))
        places, bias = torch.arange(len(x)).float(), 0.0
        if self._is_v2:
            angles = places[:, None] * frequencies(q.shape[-1], 20000.0)
            q, k = (turned(one, angles, adjacent=False) for one in (q, k))
        else:
            distance = (places[:, None] - places).abs()
            bias = -torch.tensor(slopes(heads))[:, None, None] * distance
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    @torch.no_grad()
    def of_image(self, colours: np.ndarray) -> np.ndarray:
        config, t = self._image, self._t
        pixels = prepared(Image.fromarray(colours), config["image_size"]).copy()
        values = ((torch.from_numpy(pixels) / 255 - MEAN) / STD).permute(2, 0, 1)[None]
        kernel, bias = (t[f"{IMAGE}patch_embed.proj.{one}"] for one in ("weight", "bias"))
        patches = torch.conv2d(values, kernel, bias, stride=config["patch_size"])
        side = patches.shape[-1]
        x = (
            torch.cat([t[f"{IMAGE}cls_token"][0], patches[0].flatten(1).T])
            + t[f"{IMAGE}pos_embed"][0]
        )
        half, span = config["head_width"] // 2, config["pt_hw_seq_len"]
        places = torch.arange(side) / side * span if config["intp_freq"] else torch.arange(span)
        by_place = places[:, None].float() * frequencies(half, 10000.0)
        angles = torch.cat([by_place.repeat_interleave(side, 0), by_place.repeat(side, 1)], dim=1)
        for number in range(config["layers"]):
            x = self._block(x, f"{IMAGE}blocks.{number}", angles)
        return normalize(self._norm(x, f"{IMAGE}norm", 1e-6)[0], dim=0).numpy()

    def _block(self, x: Tensor, block: str, angles: Tensor) -> Tensor:
        heads, t = x.shape[-1] // self._image["head_width"], self._t
        normal = self._norm(x, f"{block}.norm1", 1e-6)
        biases = t[f"{block}.attn.q_bias"], None, t[f"{block}.attn.v_bias"]
        qkv = [
            linear(normal, t[f"{block}.attn.{letter}_proj.weight"], bias)
            for letter, bias in zip("qkv", biases, strict=True)
        ]
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(0, 1) for one in qkv)
        q, k = (
            torch.cat([one[:, :1], turned(one[:, 1:], angles, adjacent=True)], 1) for one in (q, k)
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
        mixed = (weights @ v).transpose(0, 1).flatten(1)
        x = x + self._linear(
            self._norm(mixed, f"{block}.attn.inner_attn_ln", 1e-6), f"{block}.attn.proj"
        )
        normal = self._norm(x, f"{block}.norm2", 1e-6)
        gate, up = (self._linear(normal, f"{block}.mlp.{one}") for one in ("w1", "w2"))
        wide = self._norm(silu(gate) * up, f"{block}.mlp.ffn_ln", 1e-6)
        return x + self._linear(wide, f"{block}.mlp.w3")

    def _norm_of_text(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name, 1e-5 if self._is_v2 else 1e-12)

    def _norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], self._t[f"{name}.weight"], self._t[f"{name}.bias"], eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._t[f"{name}.weight"], self._t[f"{name}.bias"])


def pictures() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in SIDES]


@pytest.mark.parametrize("version", VERSIONS)
def test_pixels_are_those_of_the_models_code(tmp_path, version):
    folder = write_jina_clip(tmp_path, jina_clip_config(version))
    rules = outline_routes(folder)[0][IMAGE_ROUTE].spec.image
    size, patch = rules.made[0], rules.patch
    whole = size // patch
    draw = np.random.default_rng(2)
    sizes = [*SIDES, *draw.integers(1, 300, (40, 2)).tolist()]
    for height, width in sizes:
        colours = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        wanted = prepared(Image.fromarray(colours), size)[: whole * patch, : whole * patch]
        wanted = wanted.reshape(whole, patch, whole, patch, 3).swapaxes(1, 2)
        got = prepare_image(to_pillow(colours), rules)
        np.testing.assert_array_equal(got, wanted.reshape(whole**2, -1), f"{height}x{width}")


@pytest.mark.parametrize("size", ["tiny", pytest.param("wide", marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", VERSIONS)
def test_vectors_of_texts_and_images_are_those_of_the_formulas(
    version, size, tmp_path, make_embedder, note
):
    config = jina_clip_config(version, wide=size == "wide")
    folder = write_jina_clip(tmp_path, config)
    reference = Reference(config, jina_clip_tensors(config))
    ours = make_embedder(folder, [(1, 64), (2, 64)] if size == "tiny" else [(1, 1312)])
    images = pictures() if size == "tiny" else pictures()[2:5]
    wanted = np.stack([*map(reference.of_text, TEXTS), *map(reference.of_image, images)])
    backwards = ours.encode([*TEXTS, *images][::-1])[::-1]
    assert_within(float(np.abs(backwards - wanted).max()), note, "vectors")
    items = [*({"text": one} for one in TEXTS), *({"image": data_uri(one)} for one in images)]
    bodies = [{"input": items}, *({"input": [one]} for one in items)]
    together, *alone = [
        [one["embedding"] for one in answer["data"]]
        for answer in answers(ours, "/v1/embeddings", bodies)
    ]
    found = np.array([together, [one for (one,) in alone]])
    assert_within(float(np.abs(found - wanted).max()), note, "vectors over HTTP")
    if version == "v2":
        prompted = ours.encode([f"{PROMPT}{text}" for text in TEXTS])
        np.testing.assert_allclose(ours.encode(TEXTS, prompt_name=TASK), prompted, atol=1e-6)
