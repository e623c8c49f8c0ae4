"""GME-Qwen2-VL: what its files say, and its two resizings. tests/parity/test_gme.py compares its
vectors."""

import numpy as np
import pytest
from colqwen_sources import WIDTH, qwen_words, write_gme
from dual_sources import picture
from sources import change_json
from test_field_types import assert_described_or_refused

from converters import convert, outline
from jaxembed import Parts
from jaxembed.data.spec import NormalizeLayer, Pooled
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.images.prepare import first_size, resized_size

pytest.importorskip("PIL")

PAIRS = [(picture(0, 56, 84), "who wrote it?"), (picture(1, 20, 30), "Größe")]


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory):
    return write_gme(tmp_path_factory.mktemp("gme") / "source")


@pytest.fixture(name="model", scope="module")
def _model(source, load_model):
    return load_model(source, 1, 256)


def test_what_the_checkpoint_says(source, tmp_path):
    spec = convert(source, tmp_path / "out")
    assert spec.heads == {"dense": Pooled(("lasttoken",), (NormalizeLayer(),))}
    assert spec.prompts == {"default": "You are a helpful assistant."}
    assert spec.max_input_tokens == 256
    assert spec.config["rope_sections"] == []  # positions as in texts
    assert spec.takes_parts
    assert (spec.image.first_area, spec.image.area) == ((4 * 784, 16384 * 784), (6 * 784, 40 * 784))


def test_the_text_around_an_input_is_that_of_its_code(model):
    (found,) = model.compute(["who?"], ["tokens"])["tokens"]
    template = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    )
    assert found.shape == (len(qwen_words().encode(template).ids), WIDTH)


def test_inputs_of_several_parts_in_a_batch_equal_each_alone(model):
    inputs = [Parts(pair) for pair in PAIRS] + [image for image, _ in PAIRS] + ["a text"]
    together = model.encode(inputs)
    alone = np.concatenate([model.encode([one]) for one in inputs])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("sides", "first", "second"),
    [
        ((10, 2000), (28, 1988), (28, 1484)),  # a side becomes a token before pixels are counted
        ((3, 3), (56, 56), (84, 84)),
        ((5000, 4000), (4004, 3192), (196, 140)),
        ((100, 90), (112, 84), (112, 84)),
        ((1, 201), (28, 196), (28, 196)),  # is taken, although its sides differ so much
        ((69, 13800), (56, 11200), (28, 2492)),
    ],
)
def test_an_image_is_resized_twice(source, sides, first, second):
    rules = outline(source).spec.image
    assert first_size(*sides, rules) == first
    assert resized_size(*sides, rules) == second


def test_other_code_and_limits_are_refused(tmp_path):
    folder = write_gme(tmp_path / "source")
    files = ("config.json", "preprocessor_config.json")
    assert_described_or_refused(folder, files, outline)
    change_json(folder / "config.json", max_length="long")
    with pytest.raises(CheckpointError, match="max_length is 'long'"):
        outline(folder)
    change_json(folder / "config.json", max_length=256, min_image_tokens=50)
    with pytest.raises(CheckpointError, match="min_image_tokens is 50, more than max_image_tokens"):
        outline(folder)
    change_json(
        folder / "config.json", min_image_tokens=6, auto_map={"AutoModel": "modeling.Other"}
    )
    with pytest.raises(UnsupportedModel):
        outline(folder)
