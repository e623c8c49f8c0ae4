"""What is asked for and not served is refused by its value; what asks for nothing is taken."""

import asyncio
import json
from functools import partial

import msgspec
import pytest
from fake_embedder import CLASSIFIER, RERANKER, SPEC, FakeEmbedder
from test_server_openai import ask

from jaxembed.errors import InvalidInput
from jaxembed.server import (
    classify,
    cohere_embed,
    contextualized,
    openai,
    rerank,
    tei,
    tei_scores,
)
from jaxembed.server.body import decode_body
from jaxembed.server.models import UNSPECIFIED
from jaxembed.server.unsupported import NOTHING, unserved
from jaxembed.spec import Pooled

MEAN = msgspec.structs.replace(SPEC, heads={"dense": Pooled(("mean",))})
ROUTES = {  # what each route takes, and the kind of its model
    "/v1/embeddings": ({"input": "a"}, openai.EmbeddingsRequest, SPEC),
    "/embeddings": ({"input": "a"}, openai.EmbeddingsRequest, SPEC),
    "/v1/contextualizedembeddings": (
        {"inputs": [["a"]]},
        contextualized.ContextualizedRequest,
        MEAN,
    ),
    "/v1/embed": ({"texts": ["a"]}, cohere_embed.CohereEmbedRequest, SPEC),
    "/v2/embed": ({"texts": ["a"]}, cohere_embed.CohereEmbedRequest, SPEC),
    "/embed": ({"inputs": "a"}, tei.EmbedRequest, SPEC),
    "/": ({"inputs": "a"}, tei.EmbedRequest, SPEC),
    "/embed_all": ({"inputs": "a"}, tei.EmbedAllRequest, SPEC),
    "/similarity": (
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        tei.SimilarityRequest,
        SPEC,
    ),
    "/rerank": ({"query": "a", "texts": ["b"]}, tei_scores.RerankRequest, RERANKER),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, rerank.DocumentsRequest, RERANKER),
    "/v2/rerank": ({"query": "a", "documents": ["b"]}, rerank.DocumentsRequest, RERANKER),
    "/predict": ({"inputs": "a"}, tei_scores.PredictRequest, CLASSIFIER),
    "/classify": ({"input": ["a"]}, classify.ClassifyRequest, CLASSIFIER),
    "/v1/classify": ({"input": ["a"]}, classify.ClassifyRequest, CLASSIFIER),
}
SOMETHING = {"anything": ["else"]}
KINDS = list({kind: None for _, kind, _ in ROUTES.values()})
cases = partial(pytest.mark.parametrize, "path", ROUTES)


def send(path, **fields):
    body, _, spec = ROUTES[path]
    embedder = FakeEmbedder(spec=spec)
    response, answer = ask(body | fields, path=path, embedder=embedder)
    return response, answer, embedder


def body_of(kind, **fields):
    body = next(body for body, other, _ in ROUTES.values() if other is kind)
    return json.dumps(body | fields).encode()


@cases()
def test_a_modality_other_than_text_is_refused(path):
    response, answer, embedder = send(path, modality="image")
    assert response.status_code in (400, 422)
    serves = path in ("/v1/embeddings", "/embeddings")
    refusal = '`modality` of "image" is not supported: this route takes texts alone'
    assert ("takes texts and no images" if serves else refusal) in str(answer)
    assert not embedder.asked


@cases()
@pytest.mark.parametrize("field", ["adapter", "adapter_id", "lora_path"])
def test_an_adapter_is_asked_for_by_the_model_alone(path, field):
    response, answer, embedder = send(path, **{field: "law"})
    assert response.status_code in (400, 422)
    assert f'`{field}` of "law" is not supported' in str(answer)
    assert "by the model `<served name>:<adapter>`" in str(answer)
    assert not embedder.asked


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_that_is_not_served_is_refused_by_its_name(kind):
    fields = unserved(kind)
    assert len(fields) > 20
    for name, rule in fields.items():
        with pytest.raises(InvalidInput) as refusal:
            asyncio.run(decode_body(body_of(kind, **{name: SOMETHING}), kind))
        assert refusal.value.field == name
        assert str(refusal.value) == (
            f'`{name}` of {{"anything":["else"]}} is not supported: {rule.reason}'
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_asks_for_nothing_is_taken(kind):
    for name, rule in unserved(kind).items():
        for value in (*NOTHING, *rule.harmless):
            asyncio.run(decode_body(body_of(kind, **{name: value}), kind))


@cases()
def test_a_field_that_nobody_knows_is_ignored(path):
    response, _, _ = send(path, metadata={"a": 1}, extra_field="x")
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", ["https://example.org/cat.png"]),
        ("return_multivector", True),
        ("embedding_types", ["float", "int8"]),
        ("output_dtype", "int8"),
        ("enable_auto_chunking", True),
        ("add_special_tokens", False),
        ("instruction", "Find cats"),
        ("prompt", "Find cats: "),
        ("truncate_prompt_tokens", 8),
        ("pool_factor", 2),
        ("precision", "int8"),
        ("chat_template", "{{ messages }}"),
        ("add_generation_prompt", True),
        ("mm_processor_kwargs", {"max_pixels": 10_000}),
    ],
)
def test_a_vector_other_than_the_one_asked_for_is_refused(field, value):
    body = {"input": ["https://example.org/cat.png"], field: value}
    _, answer = ask(body, status=400)
    assert answer["error"]["param"] == field


def test_texts_are_returned_by_their_own_field():
    """A body with `documents` has `return_documents`."""
    response, answer, embedder = send("/rerank", return_documents=True)
    assert response.status_code == 422
    assert "`return_documents` of true is not supported: send `return_text`" in answer["error"]
    assert not embedder.asked


def test_an_instance_for_vertex_is_refused_too():
    response, answer = ask({"instances": [{"inputs": "a", "modality": "image"}]}, path="/vertex")
    assert response.status_code == 422
    assert "`modality`" in answer["error"]


def test_a_long_value_is_not_repeated_in_full():
    _, answer = ask({"input": "a", "images": ["x" * 1000]})
    assert len(answer["detail"]) < 200


@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"output_dimension": 3}, "dimensions", 3),
        ({"output_dimension": 3, "dimensions": 0}, "dimensions", 3),
        ({"output_dimension": 3, "dimensions": 3}, "dimensions", 3),
        ({"output_dimension": 0}, "dimensions", None),
        ({"truncation": True}, "truncate", True),
        ({"truncation": False}, "truncate", False),
        ({"truncation": None}, "truncate", None),
        ({"normalize": False}, "normalize", False),
        ({"normalized": False}, "normalize", False),
        ({"normalized": True}, "normalize", True),
    ],
)
def test_other_clients_names_of_our_fields_are_served(fields, option, value):
    response, _, embedder = send("/v1/embeddings", **fields)
    assert response.status_code == 200
    assert getattr(embedder.asked[0], option) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"dimensions": 3, "output_dimension": 4},
        {"truncate": True, "truncation": False},
        {"normalize": True, "normalized": False},
    ],
)
def test_two_names_that_contradict_each_other_are_refused(fields):
    response, answer, _ = send("/v1/embeddings", **fields)
    assert response.status_code == 400
    assert "contradict each other" in answer["detail"]
    assert all(f"`{name}`" in answer["detail"] for name in fields)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_reranks_take_the_names_of_voyage(path):
    embedder = FakeEmbedder(spec=RERANKER)
    body = {"query": "a", "documents": ["b", "a", "c"], "top_k": 2, "truncation": False}
    _, answer = ask(body, path=path, embedder=embedder)
    assert len(answer["data" if path == "/v1/rerank" else "results"]) == 2
    assert embedder.asked[0].truncate is False
    response, _ = ask(body | {"top_n": 1}, path=path, embedder=embedder)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_an_empty_instruction_asks_for_nothing(path):
    _, _, embedder = send(path, instruction="")
    assert embedder.asked[0].instruction is None


@cases()
def test_the_model_of_no_name_is_the_only_one(path):
    response, _, _ = send(path, model=UNSPECIFIED)
    assert response.status_code == 200
