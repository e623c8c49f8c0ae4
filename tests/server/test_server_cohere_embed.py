"""/v2/embed and /v1/embed of Cohere."""

import base64

import msgspec
import numpy as np
import pytest
from fake_embedder import DIM, SPEC, FakeEmbedder, vector
from test_server_openai import ask, unit
from test_server_vectors import TEXTS as QUANTISED
from test_server_vectors import calibrated, wanted

from jaxembed.config import ServerConfig
from jaxembed.data.inputs import Text
from jaxembed.server.pipeline.body import MAX_CONTENT

PATHS = ["/v2/embed", "/v1/embed"]
TEXTS = ["the cat", "a"]
VECTORS = np.stack([unit(Text(text)) for text in TEXTS])
TYPES = ["float", "base64", "ubinary", "binary"]

each_path = pytest.mark.parametrize("path", PATHS)


def embed(path="/v2/embed", embedder=None, config=None, status=None, **fields):
    body = {} if "inputs" in fields else {"texts": TEXTS}
    return ask(body | fields, path=path, embedder=embedder, config=config, status=status)


def text_part(text):
    return {"type": "text", "text": text}


def test_version_2_answers_by_type_even_where_none_is_named():
    response, body = embed(status=200)
    assert body == {
        "response_type": "embeddings_by_type",
        "id": response.headers["x-request-id"],
        "embeddings": {"float": body["embeddings"]["float"]},
        "texts": TEXTS,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": 3},
            "tokens": {"input_tokens": 3, "output_tokens": 0},
        },
    }
    np.testing.assert_allclose(body["embeddings"]["float"], VECTORS, rtol=1e-6)


@pytest.mark.parametrize("types", [None, []])
def test_version_1_answers_with_bare_vectors_where_no_type_is_named(types):
    _, body = embed("/v1/embed", embedding_types=types)
    assert body["response_type"] == "embeddings_floats"
    assert body["meta"]["api_version"] == {"version": "1"}
    np.testing.assert_allclose(body["embeddings"], VECTORS, rtol=1e-6)


@each_path
def test_one_pass_gives_every_type(path):
    embedder = FakeEmbedder()
    _, body = embed(path, embedder, embedding_types=[*TYPES, "float"])
    assert len(embedder.requested) == 1
    assert body["response_type"] == "embeddings_by_type"
    found = body["embeddings"]
    assert list(found) == TYPES
    coded = [np.frombuffer(base64.b64decode(one), "<f4") for one in found["base64"]]
    np.testing.assert_array_equal(coded, np.array(found["float"], np.float32))
    np.testing.assert_array_equal(np.unpackbits(np.uint8(found["ubinary"]), axis=1), VECTORS > 0)
    np.testing.assert_array_equal(np.int16(found["ubinary"]) - 128, found["binary"])


@each_path
@pytest.mark.parametrize("given", [0, 3])
def test_whole_numbers_are_those_of_the_calibrated_ranges(path, given):
    size = given or DIM
    asked = {"embedding_types": ["int8", "float", "uint8"], "output_dimension": given}
    found = embed(path, calibrated(size), texts=QUANTISED, **asked)[1]["embeddings"]
    assert list(found) == ["int8", "float", "uint8"]
    assert np.shape(found["int8"]) == (len(QUANTISED), size)
    for name in ("int8", "uint8"):
        np.testing.assert_array_equal(found[name], wanted(name, size))


@each_path
def test_truncate_says_whether_and_where_to_cut(path):
    embedder = FakeEmbedder()
    for given, how in (
        ("NONE", (False, "right")),
        ("START", (True, "left")),
        ("END", (True, "right")),
        (None, (None, "right")),
    ):
        embed(path, embedder, truncate=given, status=200)
        options = embedder.requested[-1]
        assert (options.truncate, options.truncation_side) == how
        assert options.normalize is True


@each_path
def test_inputs_that_were_cut_are_counted_and_those_that_may_not_be_are_named(path):
    texts = ["a", "b " * 20]
    response, _ = embed(path, texts=texts)
    assert response.headers["x-truncated-inputs"] == "1"
    _, body = embed(path, texts=texts, truncate="NONE", status=400)
    assert "`texts[1]` must have less than 16 tokens" in body["message"]


@each_path
@pytest.mark.parametrize(
    ("purpose", "prompt"),
    [("search_query", "query"), ("search_document", "passage"), ("clustering", "")],
)
def test_the_input_type_chooses_the_prompt(path, purpose, prompt):
    prompts = {"query": "query: ", "passage": "passage: "}
    embedder = FakeEmbedder(spec=msgspec.structs.replace(SPEC, prompts=prompts))
    response, _ = embed(path, embedder, input_type=purpose)
    assert response.headers["x-prompt-name"] == prompt
    assert (embedder.requested[0].prompt_name or "") == prompt
    assert "x-prompt-name" not in embed(path, embedder)[0].headers


@each_path
@pytest.mark.parametrize("given", [3, 0, None])
def test_the_output_dimension_cuts(path, given):
    _, body = embed(path, output_dimension=given, embedding_types=["float"])
    assert {len(row) for row in body["embeddings"]["float"]} == {given or DIM}
    np.testing.assert_allclose(np.linalg.norm(body["embeddings"]["float"], axis=1), 1, rtol=1e-6)
    _, body = embed(path, output_dimension=given, embedding_types=["float"], normalize=False)
    raw = [vector(Text(text))[: given or DIM] for text in TEXTS]
    np.testing.assert_allclose(body["embeddings"]["float"], raw, rtol=1e-6)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
LARGE = {"type": "image_url", "image_url": {"url": "A" * 300_000}}


@each_path
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"texts": []}, "`texts` cannot be empty"),
        ({"texts": ["a", ""]}, "`texts[1]` cannot be empty"),
        ({"texts": None}, "missing required field `texts` (or `images`, `inputs`)"),
        ({"texts": ["a", 1]}, "at `$.texts[1]`"),
        ({"texts": ["a"], "inputs": []}, "send one of them"),
        ({"inputs": [{}]}, "at `$.inputs[0]`"),
        ({"inputs": [{"content": []}]}, "an input needs at least one part"),
        (
            {"inputs": [{"content": [text_part("")]}]},
            "cannot be empty - at `$.inputs[0].content[0]`",
        ),
        ({"inputs": [{"content": [text_part("a"), IMAGE]}]}, "takes texts and no images"),
        ({"inputs": [{"content": [text_part("a")]}, {"content": [IMAGE]}]}, "takes texts and no"),
        ({"inputs": [{"content": [text_part("a")]}, {"content": [LARGE]}]}, "takes texts and no"),
        (
            {"inputs": [{"content": [{"type": "video"}]}]},
            "content[0].type`; wanted one of 'text', 'image_url'",
        ),
        ({"images": ["data:image/png;base64,AA"]}, "send one of them"),
        ({"input_type": "image"}, "`input_type` of 'image' is unknown"),
        ({"embedding_types": ["int4"]}, "wanted one of 'float', 'int8'"),
        ({"truncate": "end"}, "wanted one of 'NONE', 'START', 'END'"),
        ({"output_dimension": DIM + 1}, f"from 1 to {DIM}"),
        ({"dimensions": 3}, "send `output_dimension`"),
        ({"normalize": False, "embedding_types": ["int8"]}, "`embedding_types` of int8 is only"),
        ({"max_tokens": 5}, "`max_tokens` of 5 is not supported"),
    ],
)
def test_a_bad_value_is_a_400_in_the_words_of_cohere(path, fields, words):
    embedder = FakeEmbedder()
    _, body = embed(path, embedder, **fields, status=400)
    assert list(body) == ["message"]
    assert words in body["message"]
    assert not embedder.requested


@each_path
@pytest.mark.parametrize("size", [1, 100])
def test_an_input_may_have_many_parts_which_are_lines_of_one_text(path, size):
    config = ServerConfig(max_client_batch_size=4)
    inputs = [{"content": [text_part("a" * size)] * MAX_CONTENT}, {"content": [text_part("b")]}]
    _, body = embed(path, config=config, inputs=inputs, texts=None, status=200)
    assert body["texts"] == ["\n".join(["a" * size] * MAX_CONTENT), "b"]
    _, body = embed(path, config=config, inputs=inputs[1:] * 5, status=400)
    assert "batch size 5 > maximum allowed batch size 4" in body["message"]
    inputs[0]["content"].append(text_part("a"))
    _, body = embed(path, config=config, inputs=inputs, status=400)
    assert f"at most {MAX_CONTENT} parts in an input" in body["message"]
