"""jina-embeddings-v4: what its files say, and its tasks for texts and images.
tests/parity/test_jina_v4.py compares its vectors."""

import numpy as np
import pytest
from colqwen_sources import IMAGE_ID, JINA_TASKS, PROJECTOR, SPACE, WIDTH, qwen_words, write_jina_v4
from dual_sources import picture
from safetensors.numpy import load_file, save_file
from sources import POOLING, TRANSFORMER, change_json, write_json, write_modules
from test_field_types import assert_described_or_refused

from converters import convert, folders_read, outline
from jaxembed import Parts
from jaxembed.data.spec import DenseLayer, NormalizeLayer, PerToken, Pooled
from jaxembed.errors import (
    CheckpointError,
    ConversionError,
    InvalidInput,
    UnsupportedModel,
    WrongParts,
)

pytest.importorskip("PIL")

TEXTS = ["who wrote it?", "Größe", "a"]


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory):
    return write_jina_v4(tmp_path_factory.mktemp("jina") / "source")


@pytest.fixture(name="model", scope="module")
def _model(source, load_model):
    return load_model(source, 1, 256)


def test_what_the_checkpoint_says(source, tmp_path):
    assert folders_read(source) == ["adapters"]
    spec = convert(source, tmp_path / "out")
    assert spec.heads == {
        "dense": Pooled(("mean",), (NormalizeLayer(),)),
        "multi_vector": PerToken(
            (DenseLayer(WIDTH, SPACE, activation="identity"), NormalizeLayer())
        ),
    }
    assert spec.prompts == {"query": "Query: ", "passage": "Passage: "}
    assert (spec.default_prompt_name, spec.default_adapter) == ("query", "retrieval")
    assert spec.adapter_names == JINA_TASKS
    layers = {"tower.layers.1.attention.qkv": 2, "heads.multi_vector.modules.0": 2}
    assert all(adapter.ranks == layers for adapter in spec.adapters)
    assert not spec.reads_pages
    assert not spec.takes_parts
    rules = spec.image
    around = qwen_words().decode([*rules.before, IMAGE_ID, *rules.after], skip_special_tokens=False)
    assert around == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        "<|im_end|>\n"
    )
    assert rules.pools_image


def test_vectors_of_tokens_go_through_the_projector_of_the_task(model, source):
    adapters = load_file(source / "adapters" / "adapter_model.safetensors")
    for task in JINA_TASKS:
        down, up = (
            adapters[f"base_model.model.{PROJECTOR}.lora_{part}.{task}.weight"] for part in "AB"
        )
        states = model.compute(TEXTS, ["tokens"], prompt_name="passage", adapter=task)["tokens"]
        several = model.encode_multi(TEXTS, prompt_name="passage", adapter=task)
        single = model.encode(TEXTS, prompt_name="passage", adapter=task)
        for one, vectors, vector in zip(states, several, single, strict=True):
            projected = one @ (np.eye(SPACE, WIDTH) + up @ down).T
            projected /= np.linalg.norm(projected, axis=1, keepdims=True)
            np.testing.assert_allclose(vectors, projected, atol=5e-6)
            mean = one.mean(axis=0)
            np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=2e-6)


def test_texts_and_images_of_several_tasks_equal_each_alone(model):
    images = [picture(seed, *sides) for seed, sides in enumerate([(56, 84), (84, 280), (20, 30)])]
    mixed = [item for pair in zip(images, TEXTS, strict=True) for item in pair]
    by_task = [model.encode(mixed, adapter=task) for task in JINA_TASKS]
    assert np.abs(by_task[0] - by_task[1]).max() > 0.001
    for task, together in zip(JINA_TASKS, by_task, strict=True):
        alone = np.concatenate([model.encode([item], adapter=task) for item in mixed])
        np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(model.encode(mixed), by_task[0], atol=2e-6)


def test_documents_are_texts_or_images(model):
    documents = ["a text", picture(0, 56, 84)]
    wanted = model.encode_document(documents) @ model.encode_query("who?")
    found = model.rerank("who?", documents)
    assert [one.index for one in found] == np.argsort(-wanted).tolist()


def test_a_named_prompt_is_for_the_texts_beside_images(model):
    image = picture(0, 56, 84)
    got = model.encode([image, "a"], prompt_name="passage")
    wanted = np.concatenate([model.encode([image]), model.encode(["a"], prompt_name="passage")])
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_other_prompts_beside_images_and_several_parts_are_refused(model):
    with pytest.raises(InvalidInput, match="`prompt` is for texts"):
        model.encode(images=[picture(0, 56, 84)], prompt="Text: ")
    with pytest.raises(WrongParts, match="not several parts"):
        model.encode([Parts(("a caption", picture(0, 56, 84)))])


def test_a_damaged_file_is_described_or_refused(tmp_path):
    folder = write_jina_v4(tmp_path / "source")
    files = ("config.json", "preprocessor_config.json", "adapters/adapter_config.json")
    assert_described_or_refused(folder, files, outline)


def test_other_poolings_and_adapters_of_one_task_are_refused(tmp_path):
    folder = write_jina_v4(tmp_path / "pooling", single_vector_pool_strategy="last")
    with pytest.raises(UnsupportedModel, match="single_vector_pool_strategy 'last'"):
        convert(folder, tmp_path / "out")
    folder = write_jina_v4(tmp_path / "tasks")
    path = folder / "adapters" / "adapter_model.safetensors"
    save_file({k: x for k, x in load_file(path).items() if ".code." not in k}, path)
    with pytest.raises(CheckpointError, match="adapter code changes no layer"):
        convert(folder, tmp_path / "out")
    change_json(folder / "config.json", task_names=["retrieval", "text-matching"])
    assert convert(folder, tmp_path / "out").adapter_names == JINA_TASKS[:2]
    name = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.other.weight"
    save_file(load_file(path) | {name: np.zeros((2, WIDTH), np.float32)}, path)
    with pytest.raises(ConversionError, match=r"lora_A\.other"):
        convert(folder, tmp_path / "again")


def test_modules_of_sentence_transformers_are_read(tmp_path):
    folder = write_jina_v4(tmp_path / "source")
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"))
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    spec = outline(folder).spec
    assert spec.heads["dense"] == Pooled(("cls",), ())
    (folder / "modules.json").unlink()
    assert outline(folder).spec.heads["dense"] == Pooled(("mean",), (NormalizeLayer(),))


def test_a_tokenizer_without_the_tokens_around_an_image_is_refused(tmp_path):
    folder = write_jina_v4(tmp_path / "source", vision_start_token_id=IMAGE_ID - 3)
    with pytest.raises(CheckpointError, match="around an image"):
        outline(folder)
