"""ColQwen2 against transformers: pixels bit for bit, towers, vectors of pages and queries."""

from dataclasses import fields

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from converters.image_rules import read_rules
from converters.qwen_vision import (
    SECOND,
    SECOND_AND_HALF,
    vision_config,
    vision_rules,
    with_defaults,
)
from converters.weights import Tensor, plan_steps
from jaxembed.errors import InvalidImage
from jaxembed.images.places import page_places
from jaxembed.images.prepare import prepare_image
from jaxembed.models import normalised
from jaxembed.models.qwen_vision import QwenVision, QwenVisionConfig
from jaxembed.models.tokens import PackedTokens

SIZES = [(56, 56), (42, 70), (333, 501), (1080, 1920), (30, 2000), (1, 200), (9, 7), (1754, 1240)]
PATCH = 14


def as_ours(patches: np.ndarray) -> np.ndarray:
    """The processor's patches `[patches, colour * frame * row * column]` in our order of values,
    with the four patches of a token in one row."""
    split = patches.reshape(-1, 3, 2, PATCH, PATCH)
    np.testing.assert_array_equal(split[:, :, 0], split[:, :, 1])  # both frames are the image
    return split[:, :, 0].transpose(0, 2, 3, 1).reshape(len(patches) // 4, -1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resample": 2},
        {"size": {"shortest_edge": 3136, "longest_edge": 768 * 28 * 28}},
        {"min_pixels": 4 * 28 * 28, "max_pixels": 40 * 28 * 28},
        {"min_pixels": 100 * 28 * 28},
    ],
)
def test_pixels_are_those_of_the_processor(changes):
    processor = Qwen2VLImageProcessorPil(**changes)
    for config in (
        processor.to_dict(),
        changes | {"image_processor_type": "Qwen2VLImageProcessor"},
    ):
        rules = read_rules(config, PATCH)
        draw = np.random.default_rng(0)
        for height, width in SIZES:
            colours = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
            made = processor(
                Image.fromarray(colours), do_rescale=False, do_normalize=False, return_tensors="np"
            )
            wanted = as_ours(np.asarray(made["pixel_values"]).astype(np.uint8))
            np.testing.assert_array_equal(prepare_image(colours, rules), wanted)


def test_an_image_that_the_processor_refuses_is_refused():
    rules = read_rules({"image_processor_type": "Qwen2VLImageProcessor"}, PATCH)
    colours = np.zeros((1, 201, 3), np.uint8)
    with pytest.raises(ValueError, match="aspect ratio"):
        Qwen2VLImageProcessorPil()(Image.fromarray(colours))
    with pytest.raises(InvalidImage, match="over 200 times"):
        prepare_image(colours, rules)


VISION = {"depth": 3, "num_heads": 2, "initializer_range": 0.1}
TOWERS = {
    SECOND: (
        Qwen2VisionTransformerPretrainedModel,
        Qwen2VLVisionConfig(**VISION, embed_dim=32, hidden_size=24),
    ),
    SECOND_AND_HALF: (
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionConfig(
            **VISION,
            hidden_size=32,
            out_hidden_size=24,
            intermediate_size=48,
            fullatt_block_indexes=[1],
        ),
    ),
}


def drawn(model):
    """The model with norms and biases that are no ones and zeros."""
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim == 1:
                one.add_(0.1 * torch.randn_like(one))
    return model.eval()


def as_tensors(model) -> dict[str, Tensor]:
    state = {f"visual.{name}": one.numpy() for name, one in model.state_dict().items()}
    return {
        name: Tensor(name, "float32", one.shape, lambda one=one: one) for name, one in state.items()
    }


def vision_tower(model, kind: str) -> QwenVision:
    """Our tower with the weights of transformers'."""
    config = vision_config(with_defaults(model.config.to_dict(), kind), kind)
    assert set(config) <= {field.name for field in fields(QwenVisionConfig)}
    tower = nnx.eval_shape(lambda: QwenVision(QwenVisionConfig(**config)))
    graph, state = nnx.split(tower)
    paths = nnx.to_flat_state(state)
    names = [".".join(map(str, ("tower", *path))) for path, _ in paths]
    shapes = {name: leaf.shape for name, (_, leaf) in zip(names, paths, strict=True)}
    steps = plan_steps("tiny", vision_rules("visual", "tower"), [], as_tensors(model), shapes)
    made = {step.target: jnp.asarray(step.read()) for step in steps}
    flat = [
        (path, leaf.replace(made[name])) for name, (path, leaf) in zip(names, paths, strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@pytest.mark.parametrize("kind", TOWERS)
def test_the_tower_of_images_is_that_of_transformers(kind):
    cls, config = TOWERS[kind]
    torch.manual_seed(0)
    model = drawn(cls(config))
    processor = Qwen2VLImageProcessorPil()
    rules = read_rules(processor.to_dict(), PATCH)
    tower = vision_tower(model, kind)
    draw = np.random.default_rng(2)
    # two images in a row, with tokens of text and padding around them
    sides = [(56, 56), (280, 84), (84, 252), (196, 280)]
    colours = [draw.integers(0, 256, (*one, 3), dtype=np.uint8) for one in sides]
    made = processor([Image.fromarray(one) for one in colours], return_tensors="pt")
    with torch.no_grad():
        wanted = model(made["pixel_values"], grid_thw=made["image_grid_thw"]).pooler_output.numpy()
    counts = [high * wide // 784 for high, wide in sides]
    length = max(sum(counts[:2]), sum(counts[2:])) + 20
    pixels = np.zeros((2, length, rules.token_bytes), np.uint8)
    places, segments = np.zeros((2, length, 3), np.int32), np.zeros((2, length), np.int32)
    spots = []
    for number, (image, (high, wide), count) in enumerate(zip(colours, sides, counts, strict=True)):
        row, start = number // 2, 3 if number % 2 == 0 else counts[number - 1] + 9
        at = slice(start, start + count)
        pixels[row, at], segments[row, at] = prepare_image(image, rules), number % 2 + 1
        places[row, start - 3 : start + count + 2] = page_places(high // 28, wide // 28, 3, 2)
        spots.append((row, at))
    tokens = PackedTokens(
        ids=segments,
        positions=segments,
        segments=jnp.asarray(segments),
        types=segments,
        bounds=np.zeros((2, 1, 2), np.int32),
        pixels=normalised(jnp.asarray(pixels), rules),
        places=jnp.asarray(places),
    )
    got = np.concatenate([np.asarray(tower(tokens))[spot] for spot in spots])
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())
