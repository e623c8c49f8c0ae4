"""The OpenAPI document, held against what the server really takes and answers."""

import re

import pytest
from fake_embedder import MEAN, ROUTES, SPEC, FakeEmbedder

from jaxembed.config import ServerConfig
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.routes.openapi import document


def app_of(embedder):
    """A server with all of its routes."""
    models = Models([embedder])
    pool = ModelPool(models, lambda model, reserve: embedder)
    return create_app(models, ServerConfig(admin_key="key"), pool)


RULES = list(app_of(FakeEmbedder()).url_map.iter_rules())
DOCUMENT = document(RULES)
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
TYPES["number"] = (int, float)
BODIES = {path: body for path, (body, _) in ROUTES.items()} | {
    "/v2/repository/index": {},
    "/v2/repository/models/{name}/load": {"parameters": {"pinned": True}},
    "/v2/repository/models/{name}/unload": {},
    "/v2/repository/aliases/{alias}": {"model": "test/fake"},
}
OPERATIONS = [(path, method) for path, item in DOCUMENT["paths"].items() for method in item]


def mismatch(value, schema, place="$"):
    """The first place where a value is not what the schema says, or None."""
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if value is None:
        return None if schema.get("nullable") or schema == {} else f"{place} is null"
    if "anyOf" in schema:
        found = [mismatch(value, choice, place) for choice in schema["anyOf"]]
        return None if None in found else found[0]
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return f"{place} is no {schema['type']}: {value!r}"
    if value not in schema.get("enum", [value]):
        return f"{place} is none of {schema['enum']}"
    return inner_mismatch(value, schema, place)


def inner_mismatch(value, schema, place):
    if isinstance(value, list):
        inner = [(item, schema.get("items", {}), f"{place}[{i}]") for i, item in enumerate(value)]
    elif isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        missing = set(schema.get("required", ())) - set(value)
        unknown = set(value) - set(known) if known else set()
        if missing or unknown:
            return f"{place}: missing {missing}, unknown {unknown}"
        inner = [(item, known.get(key, rest), f"{place}.{key}") for key, item in value.items()]
    else:
        return None
    return next((bad for args in inner if (bad := mismatch(*args))), None)


def test_it_lists_exactly_the_routes_there_are():
    routes = {
        (re.sub(r"<model:(\w+)>", r"{\1}", rule.rule), method.lower())
        for rule in RULES
        for method in rule.methods - {"HEAD", "OPTIONS"}
        if rule.rule != "/docs/<name>"
    }
    assert routes == set(OPERATIONS)
    assert DOCUMENT["openapi"] == "3.0.3"  # which has neither of these
    assert not [word for word in ("'null'", "$defs") if word in str(DOCUMENT)]


async def test_it_describes_the_answer_with_places_of_chunks():
    client = app_of(FakeEmbedder(spec=MEAN)).test_client()
    body = {"input": "a b", "chunks": [[0, 1], [2, 3]]}
    answer = await (await client.post("/v1/embeddings", json=body)).get_json()
    assert answer["data"][1]["start"] == 2
    content = DOCUMENT["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["content"]
    assert mismatch(answer, content["application/json"]["schema"]) is None


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_it_describes_the_real_answer(path, method):
    _, spec = ROUTES.get(path, (None, SPEC))
    client = app_of(FakeEmbedder(spec=spec)).test_client()
    real = path.replace("{name}", "test/fake").replace("{alias}", "live")
    sent = {"json": BODIES[path]} if method in ("post", "put") else {}
    key = {"authorization": "Bearer key"}
    if method == "delete":  # only what was made before can be dropped
        await client.put(real, headers=key, json=BODIES[path])
    response = await client.open(real, method=method.upper(), headers=key, **sent)
    data, body = await response.get_data(), await response.get_json()
    operation = DOCUMENT["paths"][path][method]
    assert (response.status_code == 200) == ("200" in operation["responses"])
    name = "200" if response.status_code == 200 else "default"
    content = operation["responses"][name].get("content")
    if content is None:
        assert data == b""
        return
    assert response.mimetype in content
    if response.mimetype == "application/json":
        schema = content["application/json"]["schema"]
        assert mismatch(body, schema) is None
        if method == "post" and name == "200":
            request = operation["requestBody"]["content"]["application/json"]["schema"]
            assert mismatch(BODIES[path], request) is None


@pytest.mark.parametrize("body", ["/embed", "/embed_sparse", "/rerank", "/v1/rerank", "/predict"])
@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_a_route_without_a_task_takes_the_bodies_of_all(path, body):
    operation = DOCUMENT["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert mismatch(BODIES[body], schema) is None
    assert mismatch({"input": "a"}, schema) is not None


@pytest.mark.parametrize("path", ROUTES)
async def test_it_describes_the_real_error(path):
    response = await app_of(FakeEmbedder()).test_client().post(path, json={"nothing": 1})
    assert response.status_code >= 400
    content = DOCUMENT["paths"][path]["post"]["responses"]["default"]["content"]
    assert mismatch(await response.get_json(), content["application/json"]["schema"]) is None


@pytest.mark.parametrize("path", BODIES)
def test_the_priority_is_a_header_of_what_runs_a_model(path):
    (operation,) = [one for way, one in DOCUMENT["paths"][path].items() if way in ("post", "put")]
    found = {one["name"]: one for one in operation.get("parameters", [])}
    if path in ("/tokenize", "/decode") or path.startswith("/v2/repository/"):
        assert "x-priority" not in found
    else:
        assert found["x-priority"]["in"] == "header"
        assert found["x-priority"]["schema"]["enum"] == ["interactive", "bulk"]


def test_info_takes_a_model_and_says_more_if_asked():
    model, verbose = DOCUMENT["paths"]["/info"]["get"]["parameters"]
    assert (model["name"], verbose["name"]) == ("model", "verbose")
    assert {model["in"], verbose["in"]} == {"query"}
    assert verbose["allowEmptyValue"] is True  # `?verbose` alone
