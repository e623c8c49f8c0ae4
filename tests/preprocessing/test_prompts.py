"""Which of a checkpoint's prompts a text gets."""

import msgspec
import pytest
from fake_embedder import SPEC, FakeEmbedder
from test_server_openai import ask

from jaxembed.errors import UnknownPurpose
from jaxembed.preprocessing.prompts import prompt_for, prompt_of_role, role_of

NOMIC = {"search_query": "q: ", "search_document": "d: ", "clustering": "c: "}
E5 = {"query": "query: ", "passage": "passage: "}
JINA = {"retrieval.query": "Query: ", "retrieval.passage": "Passage: ", "text-matching": "Match: "}
QWEN = {"query": "Instruct: ", "document": ""}


def test_the_prompt_of_a_purpose():
    for prompts, names in (
        (E5, dict.fromkeys(("query", "search_query", "retrieval.query", "code.query"), "query")),
        (E5, dict.fromkeys(("document", "search_document", "retrieval.passage"), "passage")),
        (QWEN, {"passage": "document"}),
        (NOMIC, {"search_query": "search_query", "query": "search_query"}),
        (NOMIC, {"passage": "search_document", "clustering": "clustering", "classification": None}),
        (JINA, dict.fromkeys(("retrieval.query", "query"), "retrieval.query")),
        (JINA, {"document": "retrieval.passage", "text-matching": "text-matching"}),
        (JINA, {"separation": None}),
        ({}, {"query": None}),
        ({"query": "q"}, {"document": None}),
        (E5, {"text-matching": None}),
    ):
        for purpose, name in names.items():
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
    return response, answer, embedder.requested


@pytest.mark.parametrize(
    ("prompts", "fields", "chosen", "named"),
    [
        (E5, {"input_type": "retrieval.query"}, (None, "query"), "query"),
        (E5, {"task": "retrieval.query"}, (None, "query"), "query"),
        # a purpose without a prompt gets none instead of the default
        ({"query": "q"}, {"input_type": "document"}, ("", None), ""),
        # no purpose
        (E5, {}, (None, None), None),
        (E5, {"input_type": None, "task": None}, (None, None), None),
        (E5, {"input_type": ""}, (None, None), None),
        (E5, {"prompt_name": "passage"}, (None, "passage"), "passage"),
        # fields that agree
        (E5, {"prompt_name": "query", "input_type": "search_query"}, (None, "query"), "query"),
        (E5, {"input_type": "query", "task": "retrieval.query"}, (None, "query"), "query"),
    ],
    ids=str,
)
def test_fields_of_a_purpose_choose_the_prompt_that_a_header_names(prompts, fields, chosen, named):
    response, _, (options,) = embed(prompts, **fields)
    assert (options.prompt, options.prompt_name) == chosen
    assert response.headers.get("x-prompt-name") == named


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_type": "question"}, "of 'question' is unknown; wanted one of query,"),
        ({"task": "question"}, "of 'question' is unknown; wanted one of query,"),
        ({"prompt_name": "query", "input_type": "document"}, "ask for different prompts"),
        ({"prompt_name": "passage", "input_type": "query"}, "ask for different prompts"),
        ({"prompt_name": "other", "task": "retrieval.query"}, "ask for different prompts"),
        ({"input_type": "query", "task": "retrieval.passage"}, "ask for different prompts"),
    ],
)
def test_purposes_that_are_unknown_or_differ_are_refused(fields, words):
    response, answer, asked = embed(E5 | {"other": "o"}, **fields)
    assert response.status_code == 400
    assert all(f"`{field}`" in answer["detail"] for field in fields)
    assert words in answer["detail"]
    assert not asked
