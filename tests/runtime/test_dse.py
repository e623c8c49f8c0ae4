"""DSE-Qwen2 and mcdse: what their files say, and the blank image before texts.
tests/parity/test_dse.py compares their vectors."""

import numpy as np
import pytest
from colqwen_sources import (
    DSE_README,
    IMAGE_ID,
    MCDSE_README,
    TEXT,
    VOCAB,
    WIDTH,
    qwen_words,
    write_dse,
)
from dual_sources import picture
from sources import NORMALIZE, change_json, write_json, write_modules
from test_field_types import assert_described_or_refused

from converters import convert, outline
from jaxembed import Parts
from jaxembed.data.spec import NormalizeLayer, Pooled
from jaxembed.errors import (
    CheckpointError,
    InvalidImage,
    InvalidInput,
    UnsupportedModel,
    WrongParts,
)

pytest.importorskip("PIL")

START = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
BLANK = f"<|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>"
PIXELS = {"shortest_edge": 3136, "longest_edge": 16384 * 784}  # as published
LONG = TEXT | {"max_position_embeddings": 32768}
TEXTS = ["who wrote it?", "Größe", "a"]


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory):
    return write_dse(tmp_path_factory.mktemp("dse") / "source")


@pytest.fixture(name="model", scope="module")
def _model(source, load_model):
    return load_model(source, 2, 256)


def around_a_page(spec) -> str:
    ids = [*spec.image.before, IMAGE_ID, *spec.image.after]
    return qwen_words().decode(ids, skip_special_tokens=False)


def test_what_the_checkpoint_says(tmp_path):
    source = write_dse(tmp_path / "source", text_config=LONG)
    change_json(source / "preprocessor_config.json", size=PIXELS)
    spec = convert(source, tmp_path / "out")
    assert spec.heads == {"dense": Pooled(("lasttoken",), (NormalizeLayer(),))}
    assert spec.prompts == {"query": "Query: ", "document": "Document: "}
    assert spec.default_prompt_name == "query"
    assert not spec.takes_parts
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    page = f"{START}{image}What is shown in this image?<|im_end|>\n"
    assert around_a_page(spec) == f"{page}<|im_start|>assistant\n<|endoftext|>"
    assert (spec.image.first_area, spec.image.area) == ((4 * 784, 16384 * 784), (784, 2560 * 784))
    (source / "README.md").write_text(MCDSE_README)
    other = convert(source, tmp_path / "other")
    assert around_a_page(other) == f"{page}<|endoftext|>"
    assert (other.image.first_area, other.image.area) == (None, (784, 960 * 784))


@pytest.mark.parametrize(
    ("name", "most"), [("dse-qwen2-2b-mrl-v1", 2560), ("mcdse-2b-v1", 960), ("vdr-2b-v1", 768)]
)
def test_a_model_is_known_by_the_name_of_its_folder(tmp_path, name, most):
    folder = write_dse(tmp_path / name, "", text_config=LONG)
    change_json(folder / "preprocessor_config.json", size=PIXELS)
    if name == "vdr-2b-v1":  # whose modules are its own, and whose prompts are whole templates
        write_modules(folder, ("custom_st.Transformer", ""), (NORMALIZE, "1_Normalize"))
        prompts = {"query": f"{START}<|image_pad|>Query: %s", "image": START}
        write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    spec = outline(folder).spec
    assert spec.image.area == (784, most * 784)
    assert spec.prompts == {"query": "Query: ", "document": "Document: "}
    assert spec.heads["dense"] == Pooled(("lasttoken",), (NormalizeLayer(),))


def test_the_text_around_a_text_is_that_of_its_code(model):
    (found,) = model.compute(["who?"], ["tokens"], prompt_name="document")["tokens"]
    whole = f"{START}{BLANK}Document: who?<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    assert found.shape == (len(qwen_words().encode(whole).ids), WIDTH)


def test_texts_and_pages_in_a_batch_equal_each_alone(model):
    images = [picture(seed, *sides) for seed, sides in enumerate([(56, 84), (84, 280), (20, 30)])]
    mixed = [item for pair in zip(images, TEXTS, strict=True) for item in pair]
    together = model.encode(mixed)
    alone = np.concatenate([model.encode([item]) for item in mixed])
    np.testing.assert_allclose(together, alone, atol=2e-6)


def test_a_text_equals_a_page_of_the_blank_image_with_the_same_text(model):
    """What is computed at conversion is what the image encoder would compute."""
    blank = np.zeros((56, 56, 3), np.uint8)
    got = model.encode(["What is shown in this image?"], prompt="")
    np.testing.assert_allclose(got, model.encode([blank]), atol=2e-6)


@pytest.mark.parametrize("name", ["<|image_pad|>", "<|video_pad|>", "<|video_pad|>" * 4])
def test_a_text_with_the_name_of_a_part_of_an_image_is_refused(model, name):
    with pytest.raises(InvalidInput, match="stands for a part of an image"):
        model.encode([f"a {name}"])


def test_a_page_that_is_too_narrow_is_refused(model):
    with pytest.raises(InvalidImage, match="over 200 times"):
        model.encode([picture(0, 201, 1)])


def test_several_parts_are_refused_and_one_is_an_image_or_a_text(model):
    image = picture(0, 56, 84)
    got = model.encode([Parts((image,)), Parts(("a caption",))])
    np.testing.assert_allclose(got, model.encode([image, "a caption"]), atol=2e-6)
    with pytest.raises(WrongParts, match="not several parts"):
        model.encode([Parts(("a caption", picture(0, 56, 84)))])


def test_a_readme_and_a_name_of_different_models_are_refused(tmp_path):
    folder = write_dse(tmp_path / "mcdse-2b-v1", DSE_README)
    with pytest.raises(UnsupportedModel, match="those of dse-qwen2, mcdse"):
        outline(folder)
    (folder / "README.md").write_text(MCDSE_README + DSE_README)
    assert around_a_page(outline(folder).spec).endswith("<|im_end|>\n<|endoftext|>")
    with pytest.raises(UnsupportedModel, match="dse-qwen2, mcdse"):
        outline(folder.rename(tmp_path / "model"))


@pytest.mark.parametrize("name", ["im_start", "im_end", "endoftext", "video_pad"])
def test_a_tokenizer_without_a_token_of_the_template_is_refused(tmp_path, name):
    folder = write_dse(tmp_path / "source")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace(f"<|{name}|>", "<|other|>"))
    with pytest.raises(CheckpointError, match=rf"has no token <\|{name}\|>"):
        outline(folder)


def test_other_models_of_the_class_and_damaged_files_are_refused(tmp_path):
    folder = write_dse(tmp_path / "source", "A model that answers questions about images.")
    with pytest.raises(UnsupportedModel, match=r"Qwen2VLForConditionalGeneration .*README"):
        outline(folder)
    (folder / "README.md").write_text(DSE_README)
    assert_described_or_refused(folder, ("config.json", "preprocessor_config.json"), outline)
    change_json(folder / "config.json", vision_start_token_id=VOCAB)
    with pytest.raises(CheckpointError, match="wanted ids of the vocabulary"):
        outline(folder)
