"""Qwen3-VL-Embedding on images: one vector for each, beside texts, and what its files may say.
tests/parity/test_qwen3_vl.py compares the vectors with transformers'."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dual_sources import picture
from sources import change_json
from test_families import golden
from test_field_types import assert_described_or_refused
from test_golden import write_source
from test_server_openai import ask

from converters import outline
from jaxembed.data.inputs import Image
from jaxembed.errors import CheckpointError, InvalidInput, UnsupportedModel
from jaxembed.preprocessing.images.prepare import image_positions, max_tokens
from jaxembed.server.registry.models import Models

Pillow = pytest.importorskip("PIL.Image")

SIDES = [(16, 24), (60, 20), (9, 31), (5, 5), (40, 40), (8, 8)]
TEXTS = ["the cat", "Is it a dog?", "the sky", "a mat", "red", "blue"]


def write(folder: Path, **config: Any) -> Path:
    write_source(golden("qwen3_vl_embedder"), folder)
    change_json(folder / "config.json", **config)
    return folder


def data_uri(colours: np.ndarray) -> str:
    Pillow.fromarray(colours).save(buffer := io.BytesIO(), "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.fixture(name="embedder", scope="module")
def _embedder(tmp_path_factory, load_model):
    return load_model(write(tmp_path_factory.mktemp("vl") / "model"), 2, 256)


@pytest.fixture(name="images", scope="module")
def _images() -> list[np.ndarray]:
    return [picture(seed, *sides) for seed, sides in enumerate(SIDES)]


def test_vectors_of_images_are_those_of_transformers(embedder):
    arrays = golden("qwen3_vl_embedder")
    images = [arrays[name] for name in sorted(arrays) if name.startswith("images/")]
    got = embedder.encode(images=images)
    np.testing.assert_allclose(got, arrays["image_vectors"], atol=1e-5)


def test_images_and_texts_in_a_batch_equal_each_alone(embedder, images):
    mixed = [item for pair in zip(images, TEXTS, strict=True) for item in pair]
    together = embedder.encode(mixed)
    assert together.shape == (len(mixed), embedder.spec.dim)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    alone = np.concatenate([embedder.encode([item]) for item in mixed])
    np.testing.assert_allclose(together, alone, atol=2e-6)


def test_vectors_do_not_depend_on_the_bucket(embedder, images, tmp_path, load_model):
    other = load_model(write(tmp_path / "model"), 1, 128)
    for got, wanted in ((other.encode(one), embedder.encode(one)) for one in (images, TEXTS)):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_an_image_is_between_the_tokens_of_the_chat(embedder):
    rules = embedder.spec.image
    processor = embedder.model.routes["image"].processor
    (encoding,) = processor.encode([Image(picture(0, 16, 24))], None).work.encodings
    assert encoding.length == len(rules.before) + 6 + len(rules.after) <= max_tokens(rules)
    file = embedder.model.main.text_processor._tokenizer.file
    assert file.decode(encoding.ids.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    places = image_positions(16, 24, rules)
    assert places[:, 3:].tolist() == [[2, 3]] * encoding.length


def test_http_embeds_images_and_ranks_them_beside_texts(embedder, images):
    models, uri = Models([embedder.model], {embedder.name: ["vl"]}), data_uri(images[0])
    asked = {"input": [{"image": uri}, {"text": TEXTS[0]}]}
    response, body = ask(asked, path="/v1/embeddings", models=models)
    assert response.status_code == 200, body
    vectors = np.array([one["embedding"] for one in body["data"]])
    wanted = embedder.encode([images[0], TEXTS[0]])
    np.testing.assert_allclose(vectors, wanted, atol=2e-6)
    asked = {"query": TEXTS[1], "documents": [{"image": uri}, TEXTS[0]]}
    response, body = ask(asked, path="/v1/rerank", models=models)
    assert response.status_code == 200, body
    scores = {one["index"]: one["relevance_score"] for one in body["results"]}
    (query,) = embedder.encode([TEXTS[1]], prompt_name="query")
    assert [scores[0], scores[1]] == pytest.approx(list(wanted @ query), abs=1e-5)


def test_the_reranker_refuses_images_in_pairs(tmp_path, load_model, images):
    write_source(golden("qwen3_vl_reranker"), tmp_path / "model")
    reranker = load_model(tmp_path / "model", 1, 512)
    models = Models([reranker.model], {reranker.name: ["vl"]})
    asked = {"query": "a", "documents": ["b", {"image": data_uri(images[0])}]}
    response, body = ask(asked, path="/v1/rerank", models=models)
    assert response.status_code == 400
    assert body["error"]["param"] == "documents"
    assert "takes texts and no images in pairs; send texts" in body["error"]["message"]


def test_an_instruction_beside_images_is_refused(embedder, images):
    with pytest.raises(InvalidInput, match="`instruction` is for texts"):
        embedder.encode(images=images, instruction="Find it")


def test_an_image_has_the_tokens_of_the_authors_code(tmp_path):
    source = write(tmp_path / "source")
    change_json(source / "sentence_bert_config.json", max_seq_length=None)
    text = json.loads((source / "config.json").read_text())["text_config"]
    change_json(source / "config.json", text_config=text | {"max_position_embeddings": 4096})
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    change_json(source / "preprocessor_config.json", size=size)
    assert outline(source).spec.image.area == (4 * 64, 1800 * 64)


VISION = {
    "depth": 3,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 20,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
    "out_hidden_size": 20,
}


def of_images(**changes: Any) -> dict[str, Any]:
    return {"vision_config": VISION | changes}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (of_images(model_type="siglip"), UnsupportedModel, "vision_config of model_type 'siglip'"),
        (of_images(in_channels=1), UnsupportedModel, "in_channels 1"),
        (of_images(out_hidden_size=24), CheckpointError, "outputs 24 numbers per token"),
        (of_images(deepstack_visual_indexes=[2, 0]), CheckpointError, "wanted ascending numbers"),
        (of_images(deepstack_visual_indexes=[3]), CheckpointError, "from 0 to 2"),
        (of_images(num_position_embeddings=15), CheckpointError, "wanted a square number"),
        (of_images(spatial_merge_size=4), CheckpointError, "its encoder merges 4 by 4"),
    ],
    ids=["model", "colours", "width", "order", "layer", "table", "merge"],
)
def test_other_image_encoders_are_refused(tmp_path, config, error, message):
    with pytest.raises(error, match=message):
        outline(write(tmp_path / "source", **config))


def test_an_image_with_more_tokens_than_an_input_is_refused(tmp_path):
    source = write(tmp_path / "source")
    change_json(source / "preprocessor_config.json", size={}, min_pixels=64, max_pixels=64 * 400)
    with pytest.raises(CheckpointError, match=r"an image has up to \d+ tokens, and an input 112"):
        outline(source)


def test_a_model_of_images_takes_no_adapter(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"--adapter: .* is a model of texts and images"):
        outline(write(tmp_path / "source"), adapters={"mine": tmp_path})


def test_a_config_is_described_or_refused_whatever_it_holds(tmp_path):
    folder = write(tmp_path)
    files = ("config.json", "preprocessor_config.json")
    assert_described_or_refused(folder, files, outline)
