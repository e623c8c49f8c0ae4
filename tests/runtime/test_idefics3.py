"""ColModernVBERT and ColSmol: what their files say, tiles, and pages beside others."""

import numpy as np
import pytest
from dual_sources import picture
from idefics3_sources import (
    CONFIGS,
    IMAGE_ID,
    IMAGES,
    KINDS,
    LONGEST,
    SPACE,
    TEXT,
    TILE,
    TILE_TOKENS,
    VISION,
    tile_words,
    write_tiled,
)
from sources import change_json, write_json
from test_field_types import assert_described_or_refused

from converters import convert, outline
from converters.vision.image_rules import read_rules
from jaxembed.checkpoints.checkpoint import load_routes, verify, verify_values
from jaxembed.data.inputs import Image
from jaxembed.errors import CheckpointError, InvalidInput, UnsupportedModel
from jaxembed.preprocessing.images.prepare import image_ids, resized_size
from jaxembed.preprocessing.images.processor import ImageProcessor
from jaxembed.preprocessing.text import TokenizationOptions

pytest.importorskip("PIL")

TEXTS = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]
PAGES = [(56, 84), (300, 100), (84, 280), (20, 30), (1, 90)]
END, START = (
    "<end_of_utterance>",
    {"colmodernvbert": "<|begin_of_text|>", "colsmol": "<|im_start|>"},
)
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param("colmodernvbert", marks=pytest.mark.numerics), "colsmol"], scope="module"
)


@pytest.fixture(name="model", scope="module")
def _model(kind, tmp_path_factory, load_model):
    return load_model(write_tiled(tmp_path_factory.mktemp(kind), kind), 2, 256)


@each_kind
def test_what_the_checkpoint_says(tmp_path, kind):
    spec = convert(write_tiled(tmp_path / "source", kind), tmp_path / "out")
    assert spec == load_routes(tmp_path / "out").main
    architecture = "modernbert_pages" if kind == "colmodernvbert" else "pages"
    assert (spec.architecture, spec.dim, spec.primary) == (architecture, SPACE, "multi_vector")
    assert spec.head.normalize
    assert (spec.config.get("causal"), spec.prompts) == (
        None if kind == "colmodernvbert" else True,
        {"query": ""},
    )
    rules = spec.image
    assert (rules.size, rules.tiles.longest) == ((TILE, TILE), LONGEST)
    # 1 by 3 tiles, in the words of the processor
    tile = "<image>" * TILE_TOKENS
    names = "".join(f"<fake_token_around_image><row_1_col_{k}>{tile}" for k in (1, 2, 3))
    image = f"{names}\n\n<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    page = f"{START[kind]}User:{image}Describe the image.{END}\nAssistant:"
    assert image_ids(9, 90, rules) == tile_words(kind).encode(page).ids
    verify(tmp_path / "out")
    verify_values(tmp_path / "out")


@each_kind
def test_pages_and_queries_have_a_vector_of_length_one_for_each_token(model, kind):
    pages = list(model.encode_multi(images=[picture(0, *sides) for sides in PAGES]))
    for one, sides in zip(pages, PAGES, strict=True):
        assert one.shape == (len(image_ids(*sides, model.spec.image)), SPACE)
        np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, atol=1e-6)
    (query,) = list(model.encode_multi(["who?"]))
    assert query.shape == (len(tile_words(kind).encode("who?" + END * 10).ids), SPACE)


@each_kind
def test_pages_and_queries_in_a_batch_equal_each_alone(model):
    images = [picture(seed, *sides) for seed, sides in enumerate(PAGES)]
    mixed = [item for pair in zip(images, TEXTS, strict=False) for item in pair]
    mixed += images[len(TEXTS) :]
    together = model.encode_multi(mixed)
    for item, one in zip(mixed, list(together), strict=True):
        (alone,) = list(model.encode_multi([item]))
        np.testing.assert_allclose(one, alone, atol=2e-6)


@each_kind
def test_a_page_depends_on_each_of_its_tiles(model):
    page = picture(4, TILE, LONGEST)
    other = page.copy()
    other[:, :TILE] = 255 - other[:, :TILE]
    first, again, changed = model.encode_multi(images=[page, page, other])
    np.testing.assert_allclose(first, again, atol=1e-6)
    assert np.abs(first - changed).max() > 1e-3


@each_kind
def test_a_text_with_the_token_of_images_is_refused(model):
    with pytest.raises(InvalidInput, match="'<image>', the token that stands for a part of"):
        model.encode_multi(["who <image>"])


def test_no_page_exceeds_the_estimates_of_tokens_and_memory(tmp_path):
    spec = outline(write_tiled(tmp_path)).spec
    processor = ImageProcessor(spec, workers=1)
    options = TokenizationOptions("", truncate=True, side="right")
    sides = [(a, b) for a in (1, 7, 32, 97, 400, 3000) for b in (1, 31, 32, 200, 2900)]
    lengths = [len(image_ids(*one, spec.image)) for one in sides]
    assert max(lengths) == spec.max_input_tokens == processor.limit
    for (height, width), length in zip(sides, lengths, strict=True):
        high, wide = resized_size(height, width, spec.image)
        assert max(high, wide) <= LONGEST
        image = Image(picture(0, height, width))
        made = processor.encode([image], options).work
        assert made.lengths.tolist() == [length]
        assert processor.estimate([image], options) == (1, spec.max_input_tokens)
        # Pillow's image and two copies of the patches, of whole tiles and one more
        patches = (made.planes["ids"] == IMAGE_ID).sum() * spec.image.token_bytes
        assert patches == 3 * (high * wide + TILE**2)
        assert processor._facts_of_image(image).memory_bytes > 4 * high * wide + 2 * patches


def of(part: str, kind: str = "colmodernvbert", **changes):
    sizes = {"text_config": TEXT, "vision_config": VISION}[part]
    return {part: sizes | changes}


ENGINE = {"text_model_name": "jhu-clsp/ettin-encoder-150m", "hidden_size": 768}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "smolvlm"}, "vlm_config of model_type 'smolvlm'"),
        (of("text_config", model_type="gemma"), "text_config of model_type 'gemma'"),
        (of("vision_config", model_type="clip"), "vision_config of model_type 'clip'"),
        ({"text_config": ENGINE}, "only names the text model, jhu-clsp.*colmodernvbert-merged"),
        (of("vision_config", hidden_act="mish"), "hidden_act 'mish'"),
        # files that contradict each other
        ({"image_token_id": 3}, "image_token_id is 3, and <image> has the id"),
        ({"pixel_shuffle_factor": 3}, "pixel_shuffle_factor is 3, wanted a divisor of the 8"),
        (of("vision_config", image_size=64), r"is \(32, 32\), and the image encoder takes \(64"),
        (of("text_config", max_position_embeddings=64), "the model has 64 positions"),
        (of("vision_config", num_attention_heads=5), "num_attention_heads"),
    ],
)
def test_what_is_not_served_is_refused_by_name_before_weights_are_read(tmp_path, change, message):
    folder = write_tiled(tmp_path, **change)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        outline(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"do_image_splitting": False}, UnsupportedModel, "do_image_splitting False"),
        ({"size": {"height": 96, "width": 96}}, UnsupportedModel, "size .*height"),
        ({"size": {"longest_edge": 32}}, UnsupportedModel, "size 32 of images in tiles of 32"),
        ({"size": {"longest_edge": 5000}}, CheckpointError, "wanted a whole number from 1 to 4096"),
        ({"max_image_size": {"longest_edge": "a"}}, CheckpointError, "max_image_size .* 'a'"),
        ({"do_normalize": False}, UnsupportedModel, "do_normalize"),
    ],
)
def test_a_processor_that_does_something_else_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        read_rules(IMAGES | change, 4)


def test_texts_of_the_processor_are_used(tmp_path):
    folder = write_tiled(tmp_path)
    prefixes = {"visual_prompt_prefix": "Page: <image>!", "query_prefix": "Find: "}
    write_json(folder / "processor_config.json", prefixes)
    spec = outline(folder).spec
    words = tile_words("colmodernvbert")
    before = words.encode("[CLS]Page: ", add_special_tokens=False).ids
    after = words.encode("<fake_token_around_image>![SEP]", add_special_tokens=False).ids
    assert (list(spec.image.before), list(spec.image.after)) == (before, after)
    assert spec.prompts == {"query": "Find: "}
    write_json(folder / "processor_config.json", {"visual_prompt_prefix": "none"})
    with pytest.raises(CheckpointError, match="wanted a text with one <image>"):
        outline(folder)


def test_a_tokenizer_without_the_tokens_of_tiles_is_refused(tmp_path):
    folder = write_tiled(tmp_path)
    text = (folder / "tokenizer.json").read_text().replace(END, "<end>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"lacks the token {END}"):
        outline(folder)


@pytest.mark.parametrize(
    ("kind", "text", "image"),
    [("colmodernvbert", (768, 22, 12), (768, 12)), ("colsmol", (4096, 32, 32), (1152, 12))],
)
def test_sizes_that_transformers_leaves_out_are_its_defaults(kind, text, image, tmp_path):
    stated = {"text_config": {"vocab_size": TEXT["vocab_size"]}}
    stated["vision_config"] = {"image_size": TILE, "patch_size": 4}
    config = outline(write_tiled(tmp_path, kind, **stated)).spec.config
    assert (config["hidden_size"], config["num_layers"], config["num_heads"]) == text
    assert (config["image"]["hidden_size"], config["image"]["num_layers"]) == image


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_described_or_refused_whatever_it_holds(tmp_path, kind):
    folder = write_tiled(tmp_path, kind)
    change_json(folder / "preprocessor_config.json", do_image_splitting=True)
    write_json(folder / "processor_config.json", {"query_prefix": "Find: "})
    files = ("config.json", "preprocessor_config.json", "processor_config.json")
    assert_described_or_refused(folder, files, outline)
    assert CONFIGS[kind]["embedding_dim"] == SPACE
