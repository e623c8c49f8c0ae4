"""ColQwen2, ColQwen2.5, BiQwen: what their files say, places and windows, pages beside others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from colqwen_sources import (
    IMAGE_ID,
    IMAGES,
    SIDE,
    SPACE,
    TEXT,
    VISION,
    WIDTH,
    qwen_words,
    write_biqwen,
    write_colqwen,
)
from dual_sources import picture
from safetensors.numpy import load_file
from sources import change_json, write_json, write_weights
from test_field_types import assert_described_or_refused

from converters import convert, outline
from converters.vision.image_rules import read_rules
from jaxembed.checkpoints.checkpoint import load_routes, verify, verify_values
from jaxembed.errors import (
    CheckpointError,
    ConversionError,
    InvalidImage,
    InvalidInput,
    UnsupportedModel,
)
from jaxembed.models.qwen_vision import at, by_window
from jaxembed.models.tokens import PackedTokens
from jaxembed.preprocessing.images.decode import to_pillow
from jaxembed.preprocessing.images.prepare import mrope_positions, prepare_image, resized_size

pytest.importorskip("PIL")

TEXTS = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]
PAGES = [(56, 84), (300, 100), (84, 280), (500, 350), (20, 30), (28, 28)]

each_kind = pytest.mark.parametrize(
    "kind", [pytest.param("qwen2_vl", marks=pytest.mark.numerics), "qwen2_5_vl"], scope="module"
)


@pytest.fixture(name="model", scope="module")
def _model(kind, tmp_path_factory, load_model):
    return load_model(write_colqwen(tmp_path_factory.mktemp(kind), kind), 1, 256)


@each_kind
def test_what_the_checkpoint_says(tmp_path, kind):
    spec = convert(write_colqwen(tmp_path / "source", kind), tmp_path / "out")
    assert spec == load_routes(tmp_path / "out").main
    assert (spec.architecture, spec.dim, spec.primary) == ("pages", SPACE, "multi_vector")
    assert spec.head.normalize
    assert spec.config["rope_sections"] == [4, 6, 6]
    assert spec.config["causal"]
    rules = spec.image
    assert (rules.token_id, rules.merge, rules.place_numbers) == (IMAGE_ID, 2, 3)
    assert rules.area == (784, 40 * 784)
    tokenizer = qwen_words()
    around = tokenizer.decode([*rules.before, IMAGE_ID, *rules.after], skip_special_tokens=False)
    assert around == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        "<|im_end|><|endoftext|>"
    )
    assert spec.prompts == {"query": "Query: "}
    verify(tmp_path / "out")
    verify_values(tmp_path / "out")


@each_kind
def test_pages_and_queries_have_a_vector_of_length_one_for_each_token(model):
    pages = list(model.encode_multi(images=[picture(0, *sides) for sides in PAGES]))
    rules = model.spec.image
    for one, sides in zip(pages, PAGES, strict=True):
        high, wide = resized_size(*sides, rules)
        around = len(rules.before) + len(rules.after)
        assert one.shape == (high * wide // SIDE**2 + around, SPACE)
        np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, atol=1e-6)
    (query,) = list(model.encode_multi(["who?"]))
    ids = qwen_words().encode("Query: who?" + "<|endoftext|>" * 10 + "\n").ids
    assert query.shape == (len(ids), SPACE)


@each_kind
def test_pages_and_queries_in_a_batch_equal_each_alone(model):
    images = [picture(seed, *sides) for seed, sides in enumerate(PAGES)]
    mixed = [item for pair in zip(images, TEXTS, strict=False) for item in pair]
    mixed += images[len(TEXTS) :]
    together = model.encode_multi(mixed)
    for item, one in zip(mixed, list(together), strict=True):
        (alone,) = list(model.encode_multi([item]))
        np.testing.assert_allclose(one, alone, atol=2e-6)


@pytest.fixture(name="biqwen", scope="module")
def _biqwen(tmp_path_factory, load_model):
    return load_model(write_biqwen(tmp_path_factory.mktemp("biqwen")), 1, 256)


def test_biqwen_makes_one_vector_for_a_page_and_for_a_query(biqwen):
    spec = biqwen.spec
    assert (spec.primary, spec.dim, spec.pooling) == ("dense", WIDTH, ("lasttoken",))
    assert spec.prompts == {"query": ""}
    images = [picture(seed, *sides) for seed, sides in enumerate(PAGES)]
    mixed = [item for pair in zip(images, TEXTS, strict=False) for item in pair]
    together = biqwen.encode(mixed)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    alone = np.concatenate([biqwen.encode([item]) for item in mixed])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    (query,) = biqwen.compute(["who?"], ["tokens"], prompt="")["tokens"]
    assert len(query) == len(qwen_words().encode("who?" + "<|endoftext|>" * 10).ids)
    np.testing.assert_allclose(
        biqwen.encode_query("who?"), query[-1] / np.linalg.norm(query[-1]), atol=1e-6
    )


def test_pages_of_biqwen_are_ranked_by_the_cosine(biqwen):
    images = [picture(seed, *sides) for seed, sides in enumerate(PAGES)]
    wanted = biqwen.encode(images=images) @ biqwen.encode_query("who?")
    found = biqwen.rerank("who?", images=images)
    assert [one.index for one in found] == np.argsort(-wanted).tolist()
    np.testing.assert_allclose([one.score for one in found], np.sort(wanted)[::-1], atol=2e-6)
    for refused in (
        lambda: biqwen.encode_document(["a text"]),
        lambda: biqwen.rerank("who?", ["a text"]),
    ):
        with pytest.raises(InvalidInput, match="takes images as documents, and texts only as quer"):
            refused()


def test_a_projection_beside_biqwen_is_refused(tmp_path):
    """Early versions of BiQwen2 have one, and pooled otherwise."""
    folder = write_biqwen(tmp_path / "source", "qwen2_vl", "BiQwen2")
    tensors = load_file(folder / "model.safetensors")
    write_weights(folder, tensors | {"custom_text_proj.bias": np.zeros(SPACE, np.float32)})
    with pytest.raises(ConversionError, match=r"custom_text_proj\.bias"):
        convert(folder, tmp_path / "out")


def test_the_places_of_a_page_are_those_of_a_plane():
    places = mrope_positions(2, 3, before=2, after=3) + np.arange(11)[:, None]
    text = [[0] * 3, [1] * 3]
    image = [[2, 2 + row, 2 + column] for row in range(2) for column in range(3)]
    after = [[5] * 3, [6] * 3, [7] * 3]
    np.testing.assert_array_equal(places, [*text, *image, *after])


def packed(grids, length: int) -> PackedTokens:
    """Images of so many rows and columns of tokens in a row, each between two tokens of text. The
    pixels of a token are its index in the row."""
    places, segments = np.zeros((1, length, 3), np.int32), np.zeros((1, length), np.int32)
    start = 0
    for number, (rows, columns) in enumerate(grids):
        end = start + rows * columns + 2
        # as if other images came before it in its sequence
        places[0, start:end] = mrope_positions(rows, columns, before=1, after=1) - 7 * number
        segments[0, start + 1 : end - 1] = number + 1
        start = end
    none = jnp.zeros((1, length), jnp.int32)
    return PackedTokens(
        ids=none,
        positions=none,
        segments=jnp.asarray(segments),
        types=none,
        bounds=jnp.zeros((1, 1, 2), jnp.int32),
        pixels=jnp.arange(length)[None, :, None],
        places=jnp.asarray(places),
    )


def test_tokens_are_sorted_by_the_squares_of_their_own_image():
    grids = [(5, 3), (1, 9), (9, 1), (4, 4), (6, 10), (6, 10)]
    length = sum(rows * columns + 2 for rows, columns in grids) + 5
    tokens = packed(grids, length)
    ordered, windows, order = jax.jit(by_window, static_argnums=1)(tokens, 4)
    cells, start = [], 0
    for number, (rows, columns) in enumerate(grids):
        cells += [
            (number, row // 4, column // 4, start + 1 + row * columns + column)
            for row in range(rows)
            for column in range(columns)
        ]
        start += rows * columns + 2
    squares = sorted(cells)
    text = length - len(squares)
    assert not np.asarray(windows)[0, :text].any()
    np.testing.assert_array_equal(np.asarray(order)[0, text:], [one[-1] for one in squares])
    distinct = list(dict.fromkeys(one[:-1] for one in squares))
    wanted = [distinct.index(one[:-1]) + 1 for one in squares]
    np.testing.assert_array_equal(np.asarray(windows)[0, text:], wanted)
    np.testing.assert_array_equal(ordered.pixels[..., 0], order)
    for name in ("segments", "places"):
        unsorted = at(getattr(ordered, name), jnp.argsort(order, axis=1))
        np.testing.assert_array_equal(unsorted, getattr(tokens, name))


def of_images(**changes):
    return {"vision_config": VISION["qwen2_vl"] | changes}


def of_text(**changes):
    return {"text_config": TEXT | changes}


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_vl"}, "vlm_config of model_type 'qwen3_vl'"),
        (of_text(model_type="llama"), "text_config of model_type 'llama'"),
        (of_images(in_channels=1), "in_channels 1"),
        (of_images(hidden_act="mish"), "hidden_act 'mish'"),
        (of_images(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' of images"),
        (of_text(rope_parameters=LINEAR), "rope_type 'linear' with mrope_section"),
        # files that contradict each other
        (of_images(hidden_size=32), "outputs 32 numbers per token"),
        (of_images(num_heads=16), "4 \\* num_heads"),
        ({"image_token_id": 3}, "0 tokens 3, which stand for images"),
        (of_images(spatial_merge_size=4), "merges 2 by 2"),
        (of_text(max_position_embeddings=64), "the model has 64 positions"),
        (of_text(rope_parameters={"mrope_section": [4, 6]}), "mrope_section is \\[4, 6\\]"),
    ],
)
def test_what_is_not_served_is_refused_by_name_before_weights_are_read(tmp_path, change, message):
    folder = write_colqwen(tmp_path, **change)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        outline(folder)


def test_old_files_mean_the_same(tmp_path):
    folder = write_colqwen(tmp_path / "new")
    new = outline(folder)
    hf = json.loads((folder / "config.json").read_text())
    text = hf["vlm_config"].pop("text_config")
    text |= {
        "rope_theta": text.pop("rope_parameters")["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    }
    hf["vlm_config"] = text | hf["vlm_config"]
    hf["vlm_config"]["vision_config"]["model_type"] = "qwen2_vl"
    write_json(folder / "config.json", hf)
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "min_pixels": 784,
            "max_pixels": 40 * 784,
        },
    )
    assert outline(folder).spec == new.spec


def test_texts_of_the_processor_are_used(tmp_path):
    folder = write_colqwen(tmp_path)
    page = "<|vision_start|><|image_pad|><|vision_end|>!"
    prefixes = {"visual_prompt_prefix": page, "query_prefix": "Find: "}
    write_json(folder / "processor_config.json", prefixes)
    spec = outline(folder).spec
    ids = qwen_words().encode(page).ids
    assert [*spec.image.before, IMAGE_ID, *spec.image.after] == ids
    assert spec.prompts == {"query": "Find: "}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"patch_size": 16}, UnsupportedModel, "patch_size 16"),
        ({"do_center_crop": True}, UnsupportedModel, "do_center_crop"),
        ({"do_normalize": False}, UnsupportedModel, "do_normalize"),
        ({"size": {"height": 28, "width": 28}}, UnsupportedModel, "size .*height"),
        ({"min_pixels": 10**9}, CheckpointError, "min_pixels 1000000000 .* over max_pixels"),
        ({"merge_size": 0}, CheckpointError, "merge_size of images has 0"),
        ({"max_pixels": "many"}, CheckpointError, "max_pixels of images has 'many'"),
        ({"image_std": [1, 0, 1]}, CheckpointError, "image_std has a zero"),
    ],
)
def test_a_processor_that_does_something_else_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        read_rules(IMAGES | change, 14)


def test_an_image_too_long_and_narrow_is_refused():
    rules = read_rules(IMAGES, 14)
    assert prepare_image(to_pillow(picture(0, 1, 200)), rules).shape[1] == rules.token_bytes
    with pytest.raises(InvalidImage, match="over 200 times"):
        prepare_image(to_pillow(picture(0, 1, 201)), rules)


@pytest.mark.parametrize(("least", "most"), [(784, 784), (784, 3 * 784), (20 * 784, 40 * 784)])
def test_no_page_has_more_tokens_than_the_limit(tmp_path, least, most):
    folder = write_colqwen(tmp_path)
    change_json(folder / "preprocessor_config.json", size={}, min_pixels=least, max_pixels=most)
    spec = outline(folder).spec
    rules = spec.image
    sides = [
        (high, wide) for high in (1, 7, 28, 99, 400, 3000) for wide in (1, 40, 200, 1400, 2900)
    ]
    for high, wide in sides:
        if max(high, wide) <= 200 * min(high, wide):
            tall, broad = resized_size(high, wide, rules)
            tokens = tall * broad // SIDE**2 + len(rules.before) + len(rules.after)
            assert tokens <= spec.max_input_tokens


@each_kind
def test_a_config_is_described_or_refused_whatever_it_holds(tmp_path, kind):
    folder = write_colqwen(tmp_path, kind)
    more = {"min_pixels": 784, "max_pixels": 7840, "merge_size": 2, "patch_size": 14}
    change_json(folder / "preprocessor_config.json", **more)
    write_json(folder / "processor_config.json", {"query_prefix": "Find: "})
    files = ("config.json", "preprocessor_config.json", "processor_config.json")
    assert_described_or_refused(folder, files, outline)
