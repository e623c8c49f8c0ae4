"""The requests that well-known clients send by default, replayed: each is answered with the fields
that its client reads, or refused in words that say why.

`clients/requests.json` was recorded from the real clients against a stub. `reads` are the places in
the answer without which the client fails, or gives its user less; `*` stands for every item.
"""

import json
from pathlib import Path

import msgspec
import pytest
from fake_embedder import CLASSIFIER, M3, RERANKER, SPEC, FakeEmbedder
from test_server_app import fetch

from jaxembed.data.spec import Pooled
from jaxembed.server.registry.models import UNSPECIFIED, Models

WIDTH = 1024  # of the vectors: langchain-jina asks for that many dimensions
EMBEDDER = msgspec.structs.replace(
    SPEC,
    heads={"dense": Pooled(("mean",))},
    hidden_size=WIDTH,
    prompts={"query": "query: ", "passage": "passage: "},
)
ALL_OUTPUTS = msgspec.structs.replace(M3, hidden_size=WIDTH, prompts=EMBEDDER.prompts)
SPECS = {"rerank": RERANKER, "classify": CLASSIFIER}  # by the end of the route
SPECS |= dict.fromkeys(("embed_sparse", "multi-vector"), ALL_OUTPUTS)
RECORDED = json.loads((Path(__file__).parents[1] / "clients" / "requests.json").read_text())

# What is refused because it is not served, and what the client is told.
REFUSED = {
    "lc_openai_default": (400, "check_embedding_ctx_length=False"),  # ids of tiktoken
    "lc_openai_default_query": (400, "check_embedding_ctx_length=False"),
    "ll_cohere": (422, "missing required field `inputs`"),  # a Cohere body, sent to /
    "npm_cohere_image": (400, "takes texts and no images"),
    "voyage_multimodal_both": (400, "takes texts and no images"),
    "ll_voyage": (415, "Content-Type: application/json"),  # it says nothing of what it sends
}

# of EMBEDDER, by what a client says its texts are for
PROMPTS = dict.fromkeys(("query", "retrieval.query", "search_query"), "query")
PROMPTS |= dict.fromkeys(("retrieval.passage", "document", "search_document"), "passage")

# LiteLLM reads a string here for Infinity and an object for vLLM, from the same request.
OBJECT_FOR_A_STRING = ("ll_infinity_rerank", "ll_infinity_rerank_v1")


def spec_of(one):
    """The model that a recorded request is for."""
    asked = one.get("body") or {}
    if "outputs" in asked or "return_multivector" in asked:
        return ALL_OUTPUTS
    return SPECS.get(one["request"].rsplit("/", 1)[-1], EMBEDDER)


def replay(one, embedder=None):
    """The answer to one recorded request, by a model that is served under the name it asks for."""
    method, path = one["request"].split()
    name = (one.get("body") or {}).get("model") or UNSPECIFIED
    embedder = embedder or FakeEmbedder(spec=spec_of(one))
    aliases = {} if name == UNSPECIFIED else {embedder.name: (name,)}
    body = {"data": json.dumps(one["body"])} if "body" in one else {}
    models = Models([embedder], aliases)
    return fetch(path, method, models=models, headers=one["headers"], **body)


def found(answer, place):
    """All values at a place such as `data.*.embedding`. Raises KeyError where there is none."""
    values = [answer]
    for key in place.split("."):
        values = [item for v in values for item in (v if key == "*" else [v[key]])]
    assert values
    return values


def by_name(one):
    return f"{one['client'].split()[0]}-{one['call']}"


def is_of_images(one):
    return "data:image/" in json.dumps(one.get("body"))


SERVED = [one for one in RECORDED if one["call"] not in REFUSED]


@pytest.mark.parametrize("one", SERVED, ids=by_name)
def test_the_client_gets_what_it_reads(one, monkeypatch, request):
    if is_of_images(one):
        response, data = replay(one, request.getfixturevalue("clip").model)
    else:
        monkeypatch.setattr("fake_embedder.DIM", WIDTH)
        response, data = replay(one)
    assert response.status_code == 200, data
    answer = None if response.mimetype == "text/plain" else json.loads(data)
    for place in one.get("reads", ()):
        values = found(answer, place)
        if place == "data.*.embedding":
            coded = one["body"].get("encoding_format") == "base64"
            assert all(isinstance(value, str if coded else list) for value in values)
        if place.endswith(".document"):
            assert one["call"] in (*OBJECT_FOR_A_STRING, "infinity_rerank_docs")
            assert all(list(value) == ["text"] for value in values)


@pytest.mark.parametrize("one", [one for one in RECORDED if one["call"] in REFUSED], ids=by_name)
def test_the_client_is_told_why_it_is_refused(one, embedder):
    status, words = REFUSED[one["call"]]
    response, data = replay(one, embedder.model if "openai" in one["call"] else None)
    assert response.status_code == status
    assert words in data.decode()


def test_the_prompt_follows_what_the_client_says_its_texts_are_for():
    for one in SERVED:
        body = one.get("body") or {}
        purpose = body.get("input_type") or body.get("task")
        embeds = one["request"].endswith(("embeddings", "embed")) and not is_of_images(one)
        if purpose and embeds:
            embedder = FakeEmbedder(spec=msgspec.structs.replace(spec_of(one), hidden_size=8))
            response, _ = replay(one | {"body": body | {"dimensions": 0}}, embedder)
            assert response.headers["x-prompt-name"] == PROMPTS.get(purpose, "")
