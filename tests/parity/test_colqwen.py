"""ColQwen2 against transformers: pixels bit for bit, towers, vectors of pages and queries."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from converters.image_rules import read_rules
from jaxembed.errors import InvalidImage
from jaxembed.images.prepare import prepare_image

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
