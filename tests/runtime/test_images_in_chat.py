"""Qwen3-VL-Embedding on images: one vector for each, beside texts, and what its files may say. Also
Qwen3-VL-Reranker and jina-reranker-m0 on images. tests/parity/test_qwen3_vl.py and test_jina_m0.py
compare vectors and scores with transformers'."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dual_sources import data_uri, picture
from sources import change_json
from test_families import golden
from test_field_types import assert_described_or_refused
from test_golden import write_source
from test_server_openai import ask, fetch

from converters import outline
from jaxembed.config import ServerConfig
from jaxembed.data.inputs import Image, Parts, Text
from jaxembed.errors import (
    CheckpointError,
    EmptyInput,
    InputTooLong,
    InvalidImage,
    InvalidInput,
    UnsupportedModel,
    WrongParts,
)
from jaxembed.preprocessing.images.prepare import image_positions, max_tokens
from jaxembed.runtime.options import EncodeOptions, ScoreOptions
from jaxembed.server.registry.models import Models

pytest.importorskip("PIL")

SIDES = [(16, 24), (60, 20), (9, 31), (5, 5), (40, 40), (8, 8)]
TEXTS = ["the cat", "Is it a dog?", "the sky", "a mat", "red", "blue"]


def write(folder: Path, **config: Any) -> Path:
    write_source(golden("qwen3_vl_embedder"), folder)
    change_json(folder / "config.json", **config)
    return folder


def of_image(tokens: int) -> str:
    return f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>"


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


def read(embedder, item: Any, **options: Any) -> Any:
    """The request of an input, and the sequence that the model reads."""
    request = embedder.model.tasks.embed([item], EncodeOptions(**options))
    processor = embedder.model.routes["image"].processor
    (encoding,) = processor.encode([item], request.tokenization).work.encodings
    return encoding


def shown(embedder, encoding: Any) -> str:
    file = embedder.model.main.text_processor._tokenizer.file
    return file.decode(encoding.ids.tolist(), skip_special_tokens=False)


def framed(user: str, system: str = "Represent the user's input.") -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
        f"{user}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_image_is_between_the_tokens_of_the_chat(embedder):
    encoding = read(embedder, Image(picture(0, 16, 24)))
    assert shown(embedder, encoding) == framed(of_image(6))
    processor = embedder.model.routes["image"].processor
    around = encoding.length - 8
    assert processor.limit == max_tokens(embedder.spec.image) + around
    places = encoding.pixels[around - 4 :, :5]  # the template ends with five tokens and the image
    assert image_positions(16, 24, embedder.spec.image)[:, 3:].tolist() == [[2, 3]] * 8
    assert places[-1].tolist() == [-3, -3, -3, 0, 0]


def test_only_requests_with_images_are_admitted_with_pixels(embedder):
    costs = []
    for item in (Text("a"), Image(picture(0, 16, 24))):
        request = embedder.model.tasks.embed([item], EncodeOptions())
        costs.append(request.cost(embedder.spec, sequences=1, tokens=10).bytes)
    assert costs[1] - costs[0] == 10 * 2 * embedder.spec.image.token_bytes


def test_parts_are_read_in_order_and_count_their_positions(embedder):
    images = [Image(picture(seed, 16, 24)) for seed in range(2)]
    parts = Parts(("a", "b", images[0], images[1], " c"))
    encoding = read(embedder, parts, instruction="Find it")
    assert shown(embedder, encoding) == framed(f"a\nb{of_image(6) * 2} c", "Find it.")
    starts = np.flatnonzero(encoding.ids == embedder.spec.image.token_id).reshape(2, 6)[:, 0]
    of_images = [encoding.pixels[start : start + 6] for start in starts]
    moved = of_images[1][:, :3] - of_images[0][:, :3]
    assert (moved == 3 - 6).all()  # an image of six tokens counts as three positions
    assert (encoding.pixels[: starts[0], :3] == 0).all()
    assert (encoding.pixels[starts[1] + 6 :, :3] == 2 * (3 - 6)).all()


def test_a_long_text_beside_an_image_is_cut_at_its_end(embedder):
    image = Image(picture(0, 16, 24))
    encoding = read(embedder, Parts(("the cat sat " * 200, image, "on the mat")))
    text = shown(embedder, encoding)
    assert encoding.length == embedder.max_input_tokens
    assert text.startswith(framed("the cat sat the").partition("the<|im_end|>")[0])
    assert f"{of_image(6)}o<|im_end|>" in text  # one token of the last text stays
    long = Parts(("the cat sat " * 200, image))
    with pytest.raises(InputTooLong):
        read(embedder, long, truncate=False)
    with pytest.raises(WrongParts):
        read(embedder, long, truncation_side="left")


@pytest.mark.parametrize(
    ("parts", "error", "part"),
    [
        (("a", ""), EmptyInput, 1),
        (("a", Image(b"no image")), InvalidImage, 1),
        ((Image(picture(0, 40, 24)),) * 40, WrongParts, None),
        (("<|image_pad|>", Image(picture(0, 16, 24))), InvalidInput, None),
        ((Image(picture(0, 16, 24)), Parts(("a",))), InvalidInput, None),
    ],
    ids=["empty", "damaged", "too-many", "token", "nested"],
)
def test_a_bad_part_is_refused(embedder, parts, error, part):
    image = Image(picture(0, 16, 24))
    with pytest.raises(error) as caught:
        embedder.encode([image, Parts((image, "a")), Parts(parts)])
    assert (caught.value.index, caught.value.part) == (2, part)


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


def parts_over_http(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """The forms of an input of the text "the cat" and an image, with the paths of their routes."""
    image = {"type": "image_url", "image_url": {"url": uri}}
    content = [image, {"type": "text", "text": "the cat"}]
    voyage = [{"type": "image_base64", "image_base64": uri}, content[1]]
    return [
        ("/v1/embeddings", {"messages": [{"role": "user", "content": content}]}),
        ("/v1/embeddings", {"input": [{"text": "the cat", "image": uri}]}),
        ("/v2/embed", {"inputs": [{"content": content}], "embedding_types": ["float"]}),
        ("/v1/multimodalembeddings", {"inputs": [{"content": voyage}]}),
    ]


def test_http_takes_several_parts_in_every_form(embedder, images):
    models, wanted = Models([embedder.model], {embedder.name: ["vl"]}), None
    wanted = embedder.encode([Parts((Image(images[0]), "the cat"))])[0]
    for path, asked in parts_over_http(data_uri(images[0])):
        response, body = ask(asked, path=path, models=models)
        assert response.status_code == 200, body
        found = (
            body["embeddings"]["float"]
            if "embeddings" in body
            else [one["embedding"] for one in body["data"]]
        )
        np.testing.assert_allclose(found, [wanted], atol=2e-6)
        assert int(response.headers["x-compute-characters"]) == len("the cat")


def test_all_images_of_a_request_count_as_inputs(embedder, images):
    models, uri = Models([embedder.model], {embedder.name: ["vl"]}), data_uri(images[0])
    two = {"content": [{"type": "image_url", "image_url": uri}] * 2}
    config = ServerConfig(max_client_batch_size=3)
    for count, status in ((1, 200), (2, 400)):
        asked = {"inputs": [two] * count, "embedding_types": ["float"]}
        response, body = ask(asked, path="/v2/embed", models=models, config=config)
        assert response.status_code == status, body
    assert "batch size 4 > maximum allowed batch size 3" in body["message"]


def test_a_system_message_is_the_prompt(embedder, images):
    models, uri = Models([embedder.model], {embedder.name: ["vl"]}), data_uri(images[0])
    user = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}
    asked = {"messages": [{"role": "system", "content": "Find it."}, user]}
    response, body = ask(asked, path="/v1/embeddings", models=models)
    assert response.status_code == 200, body
    wanted = embedder.encode(images=[images[0]], instruction="Find it")
    np.testing.assert_allclose([body["data"][0]["embedding"]], wanted, atol=2e-6)
    response, body = ask(asked | {"prompt": "a"}, path="/v1/embeddings", models=models)
    assert (response.status_code, body["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("path", "asked", "place"),
    [
        ("/v1/embeddings", {"input": ["a", {"text": "a", "image": "AAAA"}]}, "input[1].image"),
        ("/v1/rerank", {"query": {"image": "AAAA"}, "documents": ["a"]}, "query"),
        (
            "/v1/rerank",
            {"query": {"image": "AA", "text": "b"}, "documents": ["a"]},
            "query.image",
        ),
        (
            "/v1/rerank",
            {
                "query": "a",
                "documents": [
                    "b",
                    {
                        "content": [
                            {"type": "text", "text": "a"},
                            {"type": "image_url", "image_url": "http://10.0.0.1/a.png"},
                        ]
                    },
                ],
            },
            "documents[1].content[1]",
        ),
    ],
    ids=["input", "query", "part", "url"],
)
def test_http_names_the_part_that_is_refused(embedder, path, asked, place):
    models = Models([embedder.model], {embedder.name: ["vl"]})
    response, body = ask(asked, path=path, models=models)
    assert response.status_code == 400
    assert body["error"]["param"] == place
    assert body["error"]["message"].startswith(f"`{place}`: ")


def test_a_pair_loses_texts_of_the_document_before_those_of_the_query(tmp_path, load_model):
    write_source(golden("qwen3_vl_reranker"), tmp_path / "model")
    reranker, image = load_model(tmp_path / "model", 1, 512), Image(picture(0, 16, 24))
    processor = reranker.model.routes["image"].processor

    def read(query: str, document: Parts) -> str:
        request = reranker.model.tasks.rerank(query, [document], ScoreOptions())
        shared = request.share(processor)
        (encoding,) = request.prepare(processor, shared, [document]).work.encodings
        assert encoding.length <= reranker.max_input_tokens
        return shown(reranker, encoding)

    text = read("the cat", Parts((image, "on the mat " * 200)))
    assert f"<Query>:the cat\n<Document>:{of_image(6)}on the mat on" in text
    text = read("the cat " * 200, Parts((image, "on the mat")))
    assert "<Query>:the cat the cat" in text
    assert f"\n<Document>:{of_image(6)}o<|im_end|>" in text
    with pytest.raises(InvalidInput, match="data URI of an image") as caught:
        reranker.rerank("a", ["b", Parts(("data:image/png;base64,AAAA", image))])
    assert (caught.value.index, caught.value.part) == (1, 0)


@pytest.mark.parametrize("name", ["qwen3_vl_reranker", "qwen2_vl_reranker"])
def test_a_reranker_takes_images_on_both_sides(name, tmp_path, load_model, images):
    write_source(golden(name), tmp_path / "model")
    reranker = load_model(tmp_path / "model", 1, 512)
    models = Models([reranker.model], {reranker.name: ["vl"]})
    uris = [data_uri(image) for image in images[:2]]
    documents = ["b", {"image": uris[0]}, {"text": "a", "image": uris[1]}]
    ours = ["b", Image(images[0]), Parts((Image(images[1]), "a"))]
    both = {"image": uris[0], "text": "a"}, Parts((Image(images[0]), "a"))
    for query, asked in (("a", "a"), both):
        sent = {"query": query, "documents": documents}
        response, body = ask(sent, path="/v1/rerank", models=models)
        assert response.status_code == 200, body
        found = {one["index"]: one["relevance_score"] for one in body["results"]}
        wanted = {one.index: one.score for one in reranker.rerank(asked, ours)}
        assert found == pytest.approx(wanted, abs=1e-5)
        assert len({round(score, 5) for score in found.values()}) == 3
    _, data = fetch("/v1/models", "GET", models=models)
    assert json.loads(data)["data"][0]["capabilities"] == ["rerank", "classify"]
    asked = {"query": "a", "documents": documents, "max_chunks_per_doc": 2}
    response, body = ask(asked, path="/v1/rerank", models=models)
    assert (response.status_code, body["error"]["param"]) == (400, "max_chunks_per_doc")


def test_a_document_with_an_image_comes_before_the_query_and_is_cut(tmp_path, load_model, images):
    write_source(golden("qwen2_vl_reranker"), tmp_path / "model")
    reranker = load_model(tmp_path / "model", 1, 128)
    processor = reranker.model.routes["image"].processor
    document = Parts((Image(picture(0, 16, 24)), "the cat sat " * 50))
    for query in ("Is it?", Parts(("Is it?", Image(picture(1, 16, 24))))):
        tokenization = reranker.model.tasks.rerank(query, [document], ScoreOptions()).tokenization
        shared = processor.tokenize_query(query, tokenization)
        made = processor.encode_pairs_of_query(shared, [document], tokenization)
        (encoding,) = made.work.encodings
        assert (encoding.length, encoding.ids[-1], made.truncated) == (128, 100, 1)
        text = shown(reranker, encoding)
        assert text.startswith(f"**Document**:\n{of_image(6)}the cat sat the")
        assert text[:-1].endswith("\n**Query**:\nIs it?" + of_image(6) * isinstance(query, Parts))
        moved = encoding.pixels[-1, :3].tolist()
        assert moved == [(3 - 6) * (1 + isinstance(query, Parts))] * 3


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
