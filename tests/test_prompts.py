"""Which of a checkpoint's prompts a text gets."""

import asyncio

import msgspec
import pytest
from fake_embedder import SPEC, FakeEmbedder
from test_server_openai import ask

from jaxembed.errors import UnknownPurpose
from jaxembed.inputs import Text
from jaxembed.options import EncodeOptions
from jaxembed.processors.prompts import prompt_for, prompt_of_role, role_of
from jaxembed.server.models import Models

NOMIC = {"search_query": "q: ", "search_document": "d: ", "clustering": "c: "}
E5 = {"query": "query: ", "passage": "passage: "}
JINA = {"retrieval.query": "Query: ", "retrieval.passage": "Passage: ", "text-matching": "Match: "}
QWEN = {"query": "Instruct: ", "document": ""}


def test_the_prompt_of_a_purpose():
    for purpose, prompts, name in (
        ("query", E5, "query"),
        ("search_query", E5, "query"),
        ("retrieval.query", E5, "query"),
        ("code.query", E5, "query"),
        ("document", E5, "passage"),
        ("search_document", E5, "passage"),
        ("retrieval.passage", E5, "passage"),
        ("passage", QWEN, "document"),
        ("search_query", NOMIC, "search_query"),
        ("query", NOMIC, "search_query"),
        ("passage", NOMIC, "search_document"),
        ("clustering", NOMIC, "clustering"),
        ("classification", NOMIC, None),
        ("retrieval.query", JINA, "retrieval.query"),
        ("query", JINA, "retrieval.query"),
        ("document", JINA, "retrieval.passage"),
        ("text-matching", JINA, "text-matching"),
        ("separation", JINA, None),
        ("query", {}, None),
        ("document", {"query": "q"}, None),
        ("text-matching", E5, None),
    ):
        assert prompt_for(purpose, prompts) == name, (purpose, prompts)


def test_an_unknown_purpose_is_told_the_known_ones():
    for purpose in ("image", "Query", "queries", "none"):
        with pytest.raises(UnknownPurpose, match=r"wanted one of query, search_query.*\*\.passage"):
            prompt_for(purpose, E5)
        assert role_of(purpose) is None


def test_the_library_takes_the_names_of_sentence_transformers_alone():
    assert prompt_of_role("document", {"corpus": "", "passage": ""}) == "passage"
    assert prompt_of_role("query", NOMIC) is None


def embed(prompts, **fields):
    embedder = FakeEmbedder(spec=msgspec.structs.replace(SPEC, prompts=prompts))
    response, answer = ask({"input": "a", **fields}, embedder=embedder)
    return response, answer, embedder.asked


@pytest.mark.parametrize("field", ["input_type", "task"])
def test_a_field_that_says_the_purpose_chooses_the_prompt_and_a_header_names_it(field):
    response, _, (options,) = embed(E5, **{field: "retrieval.query"})
    assert (options.prompt, options.prompt_name) == (None, "query")
    assert response.headers["x-prompt-name"] == "query"


def test_a_purpose_without_a_prompt_gets_none_instead_of_the_default():
    response, _, (options,) = embed({"query": "q"}, input_type="document")
    assert (options.prompt, options.prompt_name) == ("", None)
    assert response.headers["x-prompt-name"] == ""


@pytest.mark.parametrize("fields", [{}, {"input_type": None, "task": None}, {"input_type": ""}])
def test_a_request_that_says_no_purpose_gets_the_default_prompt(fields):
    response, _, (options,) = embed(E5, **fields)
    assert (options.prompt, options.prompt_name) == (None, None)
    assert "x-prompt-name" not in response.headers


def test_a_header_names_the_prompt_that_was_asked_for_by_name():
    response, _, _ = embed(E5, prompt_name="passage")
    assert response.headers["x-prompt-name"] == "passage"


@pytest.mark.parametrize("field", ["input_type", "task"])
def test_a_purpose_that_is_unknown_is_refused(field):
    response, answer, asked = embed(E5, **{field: "question"})
    assert response.status_code == 400
    assert answer["error"]["param"] == field
    assert answer["detail"].startswith(f"`{field}` of 'question' is unknown; wanted one of query,")
    assert not asked


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_name": "query", "input_type": "document"},
        {"prompt_name": "passage", "input_type": "query"},
        {"prompt_name": "other", "task": "retrieval.query"},
        {"input_type": "query", "task": "retrieval.passage"},
    ],
)
def test_fields_that_ask_for_different_prompts_are_refused(fields):
    response, answer, asked = embed(E5 | {"other": "o"}, **fields)
    assert response.status_code == 400
    assert all(f"`{field}`" in answer["detail"] for field in fields)
    assert "ask for different prompts" in answer["detail"]
    assert not asked


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_name": "query", "input_type": "search_query"},
        {"input_type": "query", "task": "retrieval.query"},
    ],
)
def test_fields_that_agree_are_taken(fields):
    response, _, (options,) = embed(E5, **fields)
    assert response.status_code == 200
    assert options.prompt_name == "query"


def test_the_vector_is_the_one_with_the_prompt(embedder):
    body = {"input": "the cat", "encoding_format": "float"}

    def vector(**fields):
        _, answer = ask(body | fields, models=Models([embedder]))
        return answer["data"][0]["embedding"]

    query = asyncio.run(
        embedder.answer(embedder.tasks.embed([Text("the cat")], EncodeOptions(prompt_name="query")))
    )
    assert vector(input_type="search_query") == pytest.approx(query.dense[0].tolist(), abs=1e-6)
    assert vector(input_type="search_query") != pytest.approx(vector(), abs=1e-3)
    assert vector(task="clustering") == pytest.approx(vector(), abs=1e-6)
