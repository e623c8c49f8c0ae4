"""Qwen3-VL-Embedding and Qwen3-VL-Reranker against transformers: pixels, vectors and scores."""

from pathlib import Path

import numpy as np
import pytest
from golden import qwen3_vl
from golden.families import sized
from golden.qwen3_vl import IMAGES, LIMIT, PROMPTS, TEXT, VISION
from PIL import Image as Pictures
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from converters.vision.image_rules import read_rules
from jaxembed.data.inputs import Image, Parts
from jaxembed.preprocessing.images.decode import to_pillow
from jaxembed.preprocessing.images.prepare import prepare_image
from parity import sentences
from parity.reference import assert_within
from parity.test_colqwen import SIZES, UNCHANGED, as_ours

PATCH = 16
# The limits of the authors' code, with the file's name of the processor.
PUBLISHED = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * 1024, "longest_edge": 1800 * 1024},
    "patch_size": PATCH,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# The widths and heads of Qwen3-VL-Embedding-2B, with two layers and an image encoder of three.
WIDE = sized(2048, 2, 16, 6144, 2048, num_key_value_heads=8, head_dim=128)
WIDE |= {"rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [24, 20, 20]}}
WIDE_VISION = {"depth": 3, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
WIDE_VISION |= {"deepstack_visual_indexes": [0, 2]}
FEW = PUBLISHED | {"size": {"shortest_edge": 4 * 1024, "longest_edge": 40 * 1024}}
TINY = TEXT, VISION, IMAGES, LIMIT
EACH = [
    pytest.param(TINY, id="tiny"),
    pytest.param((WIDE, WIDE_VISION, FEW, 400), id="2048x2", marks=pytest.mark.slow),
]
TEXTS = [*sentences.WEIRD, *sentences.ENGLISH[:5]]
QUERY = "What is the capital of China?"
SIDES = [(64, 96), (300, 100), (84, 280), (20, 30), (7, 1000), (500, 350)]
BUCKETS = [(1, 512), (2, 1024)]
SMALL = np.random.default_rng(7).integers(0, 256, (40, 40, 3), dtype=np.uint8)
# Inputs of several parts: texts and images in several orders, also neighbouring images.
MIXED: list[qwen3_vl.Parts] = [
    [np.full((90, 50, 3), 200, np.uint8), "A grey page"],
    ["Ein Bild:", SMALL, " und noch eins\n", SMALL[::-1]],
    [SMALL, SMALL[:, ::-1]],
    ["before", SMALL, "after"],
]


def colours_of(sides: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*sides, 3), dtype=np.uint8)


def test_pixels_are_those_of_the_processor():
    processor = Qwen2VLImageProcessorPil(**PUBLISHED)
    rules = read_rules(PUBLISHED, PATCH)
    for sides in SIZES:
        colours = colours_of(sides)
        made = processor(Pictures.fromarray(colours), **UNCHANGED, return_tensors="np")
        wanted = as_ours(np.asarray(made["pixel_values"]).astype(np.uint8), PATCH)
        np.testing.assert_array_equal(prepare_image(to_pillow(colours), rules), wanted)


@pytest.fixture(name="saved", scope="module", params=EACH)
def _saved(request, tmp_path_factory) -> tuple[Path, qwen3_vl.Answer]:
    """The folder of a model with random weights, and its vector of a text or an image."""
    text, vision, images, limit = request.param
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = qwen3_vl.save_model(folder, text, vision, images)
    qwen3_vl.write_embedder(folder, text["hidden_size"], PROMPTS, limit)
    return folder, qwen3_vl.answer_of(model, tokenizer, limit, images)


@pytest.fixture(name="ours", scope="module")
def _ours(saved, make_embedder):
    return make_embedder(saved[0], BUCKETS)


@pytest.mark.parametrize(
    "options",
    [{}, {"prompt_name": "query"}, {"instruction": "Find the text"}],
    ids=["default", "name", "instruction"],
)
def test_vectors_of_texts_are_those_of_transformers(saved, ours, options, note):
    got = ours.encode(TEXTS, **options)
    wanted = np.stack([saved[1](text, options)["dense"] for text in TEXTS])
    assert_within(float(np.abs(got - wanted).max()), note, "components")


def test_vectors_of_images_are_those_of_transformers(saved, ours, note):
    images = [colours_of(sides, seed) for seed, sides in enumerate(SIDES)]
    got = ours.encode(images=images)
    wanted = np.stack([saved[1](one, {})["dense"] for one in images])
    assert np.abs(wanted[1:] - wanted[:-1]).max(axis=1).min() > 1e-3
    assert_within(float(np.abs(got - wanted).max()), note, "components")


def as_parts(parts: qwen3_vl.Parts) -> Parts:
    return Parts(tuple(part if isinstance(part, str) else Image(part) for part in parts))


@pytest.mark.parametrize("options", [{}, {"instruction": "Find it"}], ids=["default", "words"])
def test_vectors_of_several_parts_are_those_of_transformers(saved, ours, options, note):
    got = ours.encode([as_parts(parts) for parts in MIXED], **options)
    wanted = np.stack([saved[1](parts, options)["dense"] for parts in MIXED])
    assert np.abs(wanted[1:] - wanted[:-1]).max(axis=1).min() > 1e-3
    assert_within(float(np.abs(got - wanted).max()), note, "components")


@pytest.mark.parametrize("sizes", EACH)
def test_scores_of_images_are_those_of_transformers(sizes, tmp_path, make_embedder, note):
    judge = qwen3_vl.save_reranker(tmp_path, *sizes[:3])
    ours = make_embedder(tmp_path, BUCKETS)
    documents = [*MIXED, "a text", [MIXED[0][0]], [SMALL]]
    for query in (QUERY, [SMALL], ["Which one?", SMALL]):
        listed = [as_parts(one) if isinstance(one, list) else one for one in documents]
        asked = query if isinstance(query, str) else as_parts(query)
        found = ours.rerank(asked, listed, raw_scores=True)
        got = np.array([one.score for one in sorted(found, key=lambda one: one.index)])
        wanted = np.array([judge(query, one) for one in documents])
        assert wanted.std() > 0.01
        # a score is a small difference of two large logits
        apart = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        assert_within(apart, note, "logits", tolerance=5e-5)


@pytest.mark.parametrize("sizes", EACH)
def test_scores_of_pairs_are_those_of_transformers(sizes, tmp_path, make_embedder, note):
    judge = qwen3_vl.save_reranker(tmp_path, *sizes[:3])
    found = make_embedder(tmp_path, BUCKETS).rerank(QUERY, TEXTS, raw_scores=True)
    got = np.array([one.score for one in sorted(found, key=lambda one: one.index)])
    wanted = np.array([judge(QUERY, text) for text in TEXTS])
    assert wanted.std() > 0.01
    assert_within(float(np.abs(got - wanted).max() / np.abs(wanted).max()), note, "logits")
