"""What is asked for and not served is refused by its value; what asks for nothing is taken."""

import asyncio
import json
from functools import partial

import pytest
from fake_embedder import RERANKER, ROUTES, FakeEmbedder
from test_server_openai import ask

from jaxembed.errors import InvalidInput
from jaxembed.server.pipeline.body import check_count
from jaxembed.server.pipeline.decoding import decode
from jaxembed.server.pipeline.fields import NOTHING, refused_fields
from jaxembed.server.registry.models import UNSPECIFIED
from jaxembed.server.routes import cohere, openai, rerank, tei, voyage

SERVED = {  # what each route takes
    "/v1/embeddings": openai.EmbeddingsRequest,
    "/embeddings": openai.EmbeddingsRequest,
    "/v1/contextualizedembeddings": voyage.ContextualizedRequest,
    "/v1/embed": cohere.CohereEmbedRequest,
    "/v2/embed": cohere.CohereEmbedRequest,
    "/embed": tei.EmbedRequest,
    "/": tei.EmbedRequest,
    "/embed_all": tei.EmbedAllRequest,
    "/similarity": tei.SimilarityRequest,
    "/rerank": tei.RerankRequest,
    "/v1/rerank": rerank.DocumentsRequest,
    "/v2/rerank": rerank.DocumentsRequest,
    "/predict": tei.PredictRequest,
    "/classify": rerank.ClassifyRequest,
    "/v1/classify": rerank.ClassifyRequest,
}
SOMETHING = {"anything": ["else"]}
KINDS = list(dict.fromkeys(SERVED.values()))
cases = partial(pytest.mark.parametrize, "path", SERVED)


def send(path, **fields):
    body, spec = ROUTES[path]
    embedder = FakeEmbedder(spec=spec)
    response, answer = ask(body | fields, path=path, embedder=embedder)
    return response, answer, embedder


def body_of(kind, **fields):
    body = next(ROUTES[path][0] for path, other in SERVED.items() if other is kind)
    return json.dumps(body | fields).encode()


@cases()
def test_a_modality_other_than_text_is_refused(path):
    response, answer, embedder = send(path, modality="image")
    assert response.status_code in (400, 422)
    serves = path in ("/v1/embeddings", "/embeddings")
    refusal = '`modality` of "image" is not supported: this route accepts only texts'
    assert ("takes texts and no images" if serves else refusal) in str(answer)
    assert not embedder.requested


@cases()
@pytest.mark.parametrize("field", ["adapter", "adapter_id", "lora_path"])
def test_an_adapter_is_asked_for_by_the_model_alone(path, field):
    response, answer, embedder = send(path, **{field: "law"})
    assert response.status_code in (400, 422)
    assert f'`{field}` of "law" is not supported' in str(answer)
    assert "send `<served name>:<adapter>` as the `model`" in str(answer)
    assert not embedder.requested


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_that_is_not_served_is_refused_by_its_name(kind):
    fields, _ = refused_fields(kind)
    assert len(fields) > 20
    for name, rule in fields.items():
        with pytest.raises(InvalidInput) as refusal:
            asyncio.run(decode(body_of(kind, **{name: SOMETHING}), kind, check_count))
        assert refusal.value.field == name
        assert str(refusal.value) == (
            f'`{name}` of {{"anything":["else"]}} is not supported: {rule.reason}'
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_asks_for_nothing_is_taken(kind):
    for name, rule in refused_fields(kind)[0].items():
        for value in (*NOTHING, *rule.accepted_values):
            asyncio.run(decode(body_of(kind, **{name: value}), kind, check_count))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", ["https://example.org/cat.png" + "x" * 1000]),
        ("return_multivector", True),
        ("output_dtype", "int8"),
    ],
)
def test_another_vector_is_refused_without_repeating_a_long_value(field, value):
    _, answer = ask({"input": ["https://example.org/cat.png"], field: value}, status=400)
    assert answer["error"]["param"] == field
    assert field != "images" or len(answer["detail"]) < 200


@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"output_dimension": 3}, "dimensions", 3),
        ({"output_dimension": 3, "dimensions": 0}, "dimensions", 3),
        ({"output_dimension": 0}, "dimensions", None),
        ({"truncation": False}, "truncate", False),
        ({"normalized": False}, "normalize", False),
    ],
)
def test_other_clients_names_of_our_fields_are_served(fields, option, value):
    response, _, embedder = send("/v1/embeddings", **fields)
    assert response.status_code == 200
    assert getattr(embedder.requested[0], option) == value


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
    assert all(word in answer["detail"] for word in ("contradict each other", *fields))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_reranks_take_the_names_of_voyage(path):
    embedder = FakeEmbedder(spec=RERANKER)
    body = {"query": "a", "documents": ["b", "a", "c"], "top_k": 2, "truncation": False}
    _, answer = ask(body, path=path, embedder=embedder)
    assert len(answer["data" if path == "/v1/rerank" else "results"]) == 2
    assert embedder.requested[0].truncate is False
    response, _ = ask(body | {"top_n": 1}, path=path, embedder=embedder)
    assert response.status_code in (400, 422)


@cases()
def test_the_model_of_no_name_is_the_only_one_and_unknown_fields_are_ignored(path):
    response, _, _ = send(path, model=UNSPECIFIED, nobody_knows="x")
    assert response.status_code == 200
