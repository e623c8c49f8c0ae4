"""ColQwen2 against transformers: pixels bit for bit, towers, vectors of pages and queries."""

import json
from dataclasses import fields

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from colqwen_sources import IMAGE_ID, IMAGES, KINDS, SPACE, TEXT, VISION, qwen_words, vlm_config
from flax import nnx
from PIL import Image
from transformers import (
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ColQwen2Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from converters import convert
from converters.fields import given
from converters.vision.colqwen import (
    QWEN2_5_VL,
    QWEN2_VL,
    SHARED_DEFAULTS,
    VISION_DEFAULTS,
    vision_config,
    vision_rules,
)
from converters.vision.image_rules import read_rules
from converters.weights import Tensor, plan_steps
from jaxembed.errors import InvalidImage
from jaxembed.models import normalized_pixels
from jaxembed.models.qwen_vision import QwenVision, QwenVisionConfig
from jaxembed.models.tokens import PackedTokens
from jaxembed.preprocessing.images.decode import to_pillow
from jaxembed.preprocessing.images.prepare import mrope_positions, prepare_image
from parity.reference import assert_within, with_odd_norms

SIZES = [(56, 56), (42, 70), (333, 501), (1080, 1920), (30, 2000), (1, 200), (9, 7), (1754, 1240)]
PATCH = 14
KIND = "Qwen2VLImageProcessor"
UNCHANGED = {"do_rescale": False, "do_normalize": False}


def as_ours(patches: np.ndarray, side: int = PATCH) -> np.ndarray:
    """The processor's patches `[patches, colour * frame * row * column]` in our order of values,
    with the four patches of a token in one row."""
    split = patches.reshape(-1, 3, 2, side, side)
    np.testing.assert_array_equal(split[:, :, 0], split[:, :, 1])  # both frames are the image
    return split[:, :, 0].transpose(0, 2, 3, 1).reshape(len(patches) // 4, -1)


CHANGES = [{}, {"resample": 2}, {"min_pixels": 78400}, {"min_pixels": 3136, "max_pixels": 31360}]


@pytest.mark.parametrize(
    "changes", [*CHANGES, {"size": {"shortest_edge": 3136, "longest_edge": 768 * 28 * 28}}]
)
def test_pixels_are_those_of_the_processor(changes):
    processor = Qwen2VLImageProcessorPil(**changes)
    for config in (processor.to_dict(), {"image_processor_type": KIND} | changes):
        rules = read_rules(config, PATCH)
        draw = np.random.default_rng(0)
        for height, width in SIZES:
            colours = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
            made = processor(Image.fromarray(colours), **UNCHANGED, return_tensors="np")
            wanted = as_ours(np.asarray(made["pixel_values"]).astype(np.uint8))
            np.testing.assert_array_equal(prepare_image(to_pillow(colours), rules), wanted)


def test_an_image_that_the_processor_refuses_is_refused():
    rules = read_rules({"image_processor_type": KIND}, PATCH)
    colours = np.zeros((1, 201, 3), np.uint8)
    with pytest.raises(ValueError, match="aspect ratio"):
        Qwen2VLImageProcessorPil()(Image.fromarray(colours))
    with pytest.raises(InvalidImage, match="over 200 times"):
        prepare_image(to_pillow(colours), rules)


SMALL = {"depth": 3, "num_heads": 2, "initializer_range": 0.1}
SMALL_2_5 = SMALL | {"hidden_size": 32, "out_hidden_size": 24, "intermediate_size": 48}
TOWERS = {
    QWEN2_VL: (
        Qwen2VisionTransformerPretrainedModel,
        Qwen2VLVisionConfig(**SMALL, embed_dim=32, hidden_size=24),
    ),
    QWEN2_5_VL: (
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionConfig(**SMALL_2_5, fullatt_block_indexes=[1]),
    ),
}


def as_tensors(model) -> dict[str, Tensor]:
    state = {f"visual.{name}": one.numpy() for name, one in model.state_dict().items()}
    return {k: Tensor(k, "float32", one.shape, lambda one=one: one) for k, one in state.items()}


def vision_tower(model, kind: str) -> QwenVision:
    """Our tower with the weights of transformers'."""
    stated = given(model.config.to_dict())
    config = vision_config(SHARED_DEFAULTS | VISION_DEFAULTS[kind] | stated, kind)
    assert set(config) <= {field.name for field in fields(QwenVisionConfig)}
    backbone = nnx.eval_shape(lambda: QwenVision(QwenVisionConfig(**config)))
    graph, state = nnx.split(backbone)
    paths = nnx.to_flat_state(state)
    names = [".".join(map(str, ("tower", *path))) for path, _ in paths]
    shapes = {name: leaf.shape for name, (_, leaf) in zip(names, paths, strict=True)}
    steps = plan_steps("tiny", vision_rules("visual", "tower"), [], as_tensors(model), shapes)
    made = {step.target: jnp.asarray(step.read()) for step in steps}
    pairs = zip(names, paths, strict=True)
    flat = [(path, leaf.replace(made[name])) for name, (path, leaf) in pairs]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@pytest.mark.parametrize("kind", TOWERS)
def test_the_tower_of_images_is_that_of_transformers(kind):
    cls, config = TOWERS[kind]
    torch.manual_seed(0)
    model = with_odd_norms(cls(config))
    processor = Qwen2VLImageProcessorPil()
    rules = read_rules(processor.to_dict(), PATCH)
    backbone = vision_tower(model, kind)
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
        pixels[row, at], segments[row, at] = prepare_image(to_pillow(image), rules), number % 2 + 1
        places[row, start - 3 : start + count + 2] = mrope_positions(high // 28, wide // 28, 3, 2)
        spots.append((row, at))
    tokens = PackedTokens(
        ids=jnp.asarray(segments),
        positions=jnp.asarray(segments),
        segments=jnp.asarray(segments),
        types=jnp.asarray(segments),
        bounds=jnp.zeros((2, 1, 2), jnp.int32),
        pixels=normalized_pixels(jnp.asarray(pixels), rules),
        places=jnp.asarray(places),
    )
    got = np.concatenate([np.asarray(backbone(tokens)[0])[spot] for spot in spots])
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


PAGES = [(56, 84), (300, 100), (84, 280), (1000, 700), (20, 30)]
QUERIES = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]
BUCKETS = [(1, 128), (2, 256)]

# The widths and heads of colqwen2-v1.0 and colqwen2.5-v0.2, two layers deep.
WIDE_TEXT = {
    "qwen2_vl": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12},
    "qwen2_5_vl": {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16},
}
WIDE_VISION = {
    "qwen2_vl": {"embed_dim": 1280, "hidden_size": 1536},
    "qwen2_5_vl": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
}


def wide_config(kind: str) -> dict:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = TEXT | WIDE_TEXT[kind] | {"num_key_value_heads": 2, "rope_parameters": rope}
    small = {"initializer_range": 0.03}
    vision = VISION[kind] | WIDE_VISION[kind] | {"num_heads": 16} | small
    return vlm_config(kind) | {"text_config": text | small, "vision_config": vision}


@pytest.fixture(
    name="colqwen",
    scope="module",
    params=[*KINDS, *(pytest.param(f"{kind} wide", marks=pytest.mark.slow) for kind in KINDS)],
)
def _colqwen(request, tmp_path_factory):
    """A model with random weights and its processor, saved as transformers does, and the folder."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    kind, *wide = request.param.split()
    vlm = wide_config(kind) if wide else vlm_config(kind)
    config = ColQwen2Config(vlm_config=vlm, embedding_dim=SPACE, initializer_range=0.1)
    model = with_odd_norms(ColQwen2ForRetrieval(config).float())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=qwen_words(), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    images = Qwen2VLImageProcessorPil(size=IMAGES["size"])
    processor = ColQwen2Processor(images, tokenizer)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor, folder


def pictures() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in PAGES]


@torch.no_grad()
def vectors_of_pages(model, processor, *, plain: bool) -> list[np.ndarray]:
    """The vectors of pages, with `plain` positions as ColQwen2ForRetrieval has them, otherwise
    those by which the language model was trained."""
    found = []
    for colours in pictures():
        inputs = processor(images=[Image.fromarray(colours)])
        if plain:
            found.append(model(**inputs).embeddings[0].numpy())
            continue
        ids = inputs["input_ids"]
        hidden = model.vlm(
            input_ids=ids,
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs["pixel_values"][0],
            image_grid_thw=inputs["image_grid_thw"],
            mm_token_type_ids=(ids == IMAGE_ID).int(),
        ).last_hidden_state
        vectors = model.embedding_proj_layer(hidden)[0]
        found.append((vectors / vectors.norm(dim=-1, keepdim=True)).numpy())
    model.vlm.rope_deltas = None  # which it would add to the next input
    return found


@torch.no_grad()
def vectors_of_queries(model, processor) -> list[np.ndarray]:
    return [model(**processor(text=[text])).embeddings[0].numpy() for text in QUERIES]


def assert_alike(got, wanted, note) -> None:
    assert [one.shape for one in got] == [one.shape for one in wanted]
    worst = max(float(np.abs(one - other).max()) for one, other in zip(got, wanted, strict=True))
    assert_within(worst, note, "components")


@pytest.mark.parametrize("plain", [True, False], ids=["plain positions", "its own positions"])
def test_pages_and_queries_are_those_of_transformers(colqwen, tmp_path, make_embedder, plain, note):
    model, processor, folder = colqwen
    convert(folder, tmp_path / "out")
    if plain:
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        manifest["config"]["rope_sections"] = []
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    ours = make_embedder(tmp_path / "out", BUCKETS)
    pages, queries = ours.encode_multi(images=pictures()), ours.encode_multi(QUERIES)
    wanted = vectors_of_pages(model, processor, plain=plain)
    other = vectors_of_pages(model, processor, plain=not plain)
    assert max(np.abs(a - b).max() for a, b in zip(wanted, other, strict=True)) > 0.01
    assert_alike(list(pages), wanted, note)
    assert_alike(list(queries), vectors_of_queries(model, processor), note)
