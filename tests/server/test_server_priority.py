"""Who waits for a request: what its body or its header says, on every route that runs a model."""

import pytest
from fake_embedder import ROUTES, SPEC, FakeEmbedder
from test_server_openai import ask
from werkzeug.datastructures import Headers

RUN = [path for path in ROUTES if path not in ("/tokenize", "/decode", "/vertex")]


def post(path: str, spec, body: dict, *header: str | None):
    """The response, its JSON and the priorities that the model was asked with."""

    embedder = FakeEmbedder(spec=spec)
    headers = Headers([("x-priority", one) for one in header if one is not None])
    response, answer = ask(body, path=path, embedder=embedder, headers=headers)
    return response, answer, [one.priority for one in embedder.requested]


@pytest.mark.parametrize("path", RUN)
def test_the_body_says_before_the_header_does(path):
    body, spec = ROUTES[path]
    for field, header, candidates in (
        (None, None, None),
        ("bulk", None, "bulk"),
        (None, "interactive", "interactive"),
        ("bulk", "interactive", "bulk"),
    ):
        _, _, asked = post(path, spec, body | {"priority": field}, header)
        assert asked == [candidates], (field, header)


@pytest.mark.parametrize("path", RUN)
def test_a_number_changes_nothing_where_another_dialect_has_one_and_is_refused_elsewhere(path):
    body, spec = ROUTES[path]
    response, found, asked = post(path, spec, body | {"priority": 3}, "bulk")
    if path.startswith(("/v1/", "/v2/", "/embeddings", "/classify")):
        assert (response.status_code, asked) == (200, ["bulk"])
    else:
        wanted = "got `int` - at `$.priority`; wanted one of 'interactive', 'bulk'"
        assert wanted in str(found)
        assert not asked


def test_each_instance_has_its_own_priority():
    instances = [{"inputs": "a", "priority": "bulk"}, {"inputs": "b"}]
    response, _, asked = post("/vertex", SPEC, {"instances": instances}, "interactive")
    assert response.status_code == 200
    assert sorted(asked) == ["bulk", "interactive"]


WRONG = [
    ("priority", "high", "high"),
    ("priority", [], "`array`"),
    ("priority", {}, "`object`"),
    ("priority", True, "`bool`"),
    ("priority", 1.5, "`float`"),
    ("x-priority", ["high"], "high"),
    ("x-priority", ["bulk", "interactive"], "bulk, interactive"),
    ("x-priority", ["bulk", "bulk"], "bulk, bulk"),
]


@pytest.mark.parametrize("path", RUN)
def test_a_wrong_priority_is_an_error_that_says_where_and_what_is_allowed(path):
    body, spec = ROUTES[path]
    cohere = path in ("/v1/embed", "/v2/embed", "/v2/rerank")
    openai = not cohere and (path.startswith("/v1/") or path in ("/embeddings", "/classify"))
    for place, sent, shown in WRONG:
        fields, header = ({place: sent}, []) if place == "priority" else ({}, sent)
        response, found, asked = post(path, spec, body | fields, *header)
        assert response.status_code == (400 if openai or cohere else 422), sent
        error = found.get("error", found)
        message = error if isinstance(error, str) else error["message"]
        assert f"`{place}`" in message or f"`$.{place}`" in message
        assert "'interactive', 'bulk'" in message
        assert shown in message
        assert not openai or error["param"] == place
        assert not asked
