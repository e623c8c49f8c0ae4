"""Requests that name an adapter: in the library, and over HTTP in each dialect."""

import numpy as np
import pytest
from conftest import save_tiny, tiny_spec
from fake_embedder import FakeEmbedder
from test_server_app import fetch_json
from test_server_openai import ask

from jaxembed import Embedder
from jaxembed.config import TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.spec import Adapter, Routes
from jaxembed.errors import InvalidInput
from jaxembed.runtime.options import EncodeOptions, RequestedOptions
from jaxembed.runtime.tasks import Tasks
from jaxembed.server.registry.models import Models

RANKS = {"tower.layers.0.attention.qkv": 4, "tower.layers.1.mlp.up": 2}
NAMES = ("retrieval.query", "retrieval.passage", "text-matching", "sql")
ADAPTERS = tuple(Adapter(name, RANKS) for name in NAMES)
PROMPTS = {"retrieval.query": "what is ", "retrieval.passage": "the ", "text-matching": ""}


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory, load_model) -> Embedder:
    """Three adapters for tasks, as those of Jina v3, and one for none."""
    folder = tmp_path_factory.mktemp("adapted")
    return load_model(save_tiny(folder / "tiny", prompts=PROMPTS, adapters=ADAPTERS), 2, 64)


@pytest.fixture(name="models")
def _models(model) -> Models:
    return Models([model.model], {model.name: ["tiny", "alias"]})


def same(vector, wanted) -> bool:
    return bool(np.allclose(vector, wanted, rtol=1e-5, atol=1e-5))


def test_an_adapter_has_the_prompt_of_its_name_and_a_prompt_the_adapter(model):
    wanted = model.encode("cat", adapter="retrieval.query", prompt="what is ")
    assert same(model.encode("cat", adapter="retrieval.query"), wanted)
    assert same(model.encode("cat", prompt_name="retrieval.query"), wanted)
    assert same(model.encode_query("cat"), wanted)
    assert not same(model.encode("cat", prompt="what is "), wanted)
    assert same(model.encode("cat", adapter="sql"), model.encode("cat", adapter="sql", prompt=""))


def test_a_role_without_a_prompt_gets_none_beside_adapters_either(model):
    spec = tiny_spec(prompts={"sts": "the "}, default_prompt_name="sts", adapters=ADAPTERS)
    tasks = Tasks("tiny", Routes({"": spec}), model.model.main.processor, TextConfig())
    assert tasks.for_role("query", EncodeOptions()).prompt == ""
    assert model.model.tasks.for_role("query", EncodeOptions()).prompt_name == "retrieval.query"


def test_an_adapter_with_the_prompt_of_another_is_refused(model):
    with pytest.raises(InvalidInput, match=r"`retrieval\.query` selects the adapter of that name"):
        model.encode("cat", adapter="sql", prompt_name="retrieval.query")


def test_an_unknown_adapter_is_told_those_there_are(model):
    with pytest.raises(InvalidInput, match=f"`x`; its adapters are {', '.join(NAMES)}") as raised:
        model.encode("cat", adapter="x")
    assert raised.value.field == "adapter"
    with pytest.raises(InvalidInput, match="no adapter `x`; it has no adapters"):
        FakeEmbedder().tasks.embed([Text("cat")], EncodeOptions(adapter="x"))


def test_compute_takes_an_adapter_too(model):
    got = model.compute(["cat"], ["dense"], adapter="sql")["dense"][0]
    assert same(got / np.linalg.norm(got), model.encode("cat", adapter="sql"))


def test_the_default_prompt_brings_its_adapter(model, tmp_path):
    text = TextConfig(default_prompt_name="retrieval.passage")
    other = Embedder(model.name, config=model.model.config, text=text, cache_dir=tmp_path)
    try:
        assert same(other.encode("cat"), model.encode("cat", adapter="retrieval.passage"))
        assert same(other.encode("cat", prompt=""), model.encode("cat"))
    finally:
        other.close()


@pytest.mark.parametrize(
    ("path", "fields", "adapter", "named"),
    [
        *(("/v1/embeddings", {"task": name}, name, "tiny") for name in PROMPTS),
        ("/v1/embeddings", {"input_type": "search_query"}, "retrieval.query", "tiny"),
        ("/v1/embeddings", {}, None, "tiny"),
        ("/v1/embeddings", {"model": "tiny:sql"}, "sql", "tiny:sql"),
        ("/v1/embeddings", {"model": "alias:sql"}, "sql", "tiny:sql"),
        ("/embed", {"prompt_name": "text-matching"}, "text-matching", None),
        ("/embed", {"model": "tiny:sql"}, "sql", None),
    ],
)
def test_each_of_these_fields_chooses_the_adapter(path, fields, adapter, named, model, models):
    text = {"inputs" if path == "/embed" else "input": "cat"}
    response, body = ask(text | fields, path=path, models=models)
    vector = body[0] if path == "/embed" else body["data"][0]["embedding"]
    assert same(vector, model.encode("cat", adapter=adapter))
    if path != "/embed":
        assert body["model"] == named
    if "task" in fields:
        assert response.headers["x-prompt-name"] == adapter


@pytest.mark.parametrize("field", ["task", "input_type"])
def test_a_task_that_the_model_lacks_is_refused_with_those_it_has(field, models):
    response, body = ask({"input": "cat", field: "classification"}, models=models)
    assert response.status_code == 400
    assert body["error"]["param"] == field
    assert body["error"]["message"].endswith(
        "not a task of this model; its tasks are retrieval.query, retrieval.passage, text-matching"
    )


FREE = {"query": "what is ", "document": "the "}  # prompts that no adapter depends on


@pytest.fixture(name="free", scope="module")
def _free(tmp_path_factory, load_model) -> Embedder:
    """Adapters for tasks, one of them the default, and prompts for roles, as those of Jina v5."""
    adapters = tuple(Adapter(name, RANKS) for name in ("retrieval", "text-matching"))
    options = {"prompts": FREE, "default_prompt_name": "document", "default_adapter": "retrieval"}
    folder = tmp_path_factory.mktemp("free")
    return load_model(save_tiny(folder / "tiny", adapters=adapters, **options), 2, 64)


@pytest.mark.parametrize(
    ("fields", "adapter", "prompt"),
    [
        ({}, "retrieval", "document"),
        ({"input_type": "query"}, "retrieval", "query"),
        ({"task": "retrieval.passage"}, "retrieval", "document"),
        ({"task": "retrieval"}, "retrieval", "document"),
        ({"task": "text-matching"}, "text-matching", "document"),
        ({"task": "text-matching", "prompt_name": "query"}, "text-matching", "query"),
        ({"task": "text-matching", "input_type": "query"}, "text-matching", "query"),
        ({"model": "tiny:text-matching", "prompt_name": "query"}, "text-matching", "query"),
        ({"model": "tiny:retrieval", "task": "retrieval.query"}, "retrieval", "query"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_tasks_and_prompts_are_chosen_independently(fields, adapter, prompt, free):
    models = Models([free.model], {free.name: ["tiny"]})
    response, body = ask({"input": "cat"} | fields, models=models)
    wanted = free.encode("cat", adapter=adapter, prompt=FREE[prompt])
    assert same(body["data"][0]["embedding"], wanted)
    assert response.headers["x-adapter-name"] == adapter
    response, [vector] = ask({"inputs": "cat"}, path="/embed", models=models)
    assert same(vector, free.encode_document("cat"))
    assert response.headers["x-adapter-name"] == "retrieval"


def test_the_default_adapter_by_name_has_the_prompts_of_roles(free):
    named = free.encode_query("cat", adapter="retrieval")
    assert same(named, free.encode_query("cat"))
    assert not same(named, free.encode_document("cat"))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"task": "separation"}, "task", "of 'separation' is not a task of this model; its tasks"),
        ({"task": "code.query"}, "task", "not a task of this model; its tasks are retrieval, text"),
        (
            {"task": "retrieval.query", "prompt_name": "document"},
            "task",
            "ask for different prompts",
        ),
        (
            {"task": "text-matching", "model": "tiny:retrieval"},
            "task",
            "ask for different adapters",
        ),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_tasks_that_contradict_or_do_not_exist_are_refused(fields, param, message, free):
    models = Models([free.model], {free.name: ["tiny"]})
    response, body = ask({"input": "cat"} | fields, models=models)
    assert response.status_code == 400
    assert body["error"]["param"] == param
    assert message in body["error"]["message"]


def test_an_unknown_adapter_is_an_unknown_model(models):
    response, body = ask({"input": "cat", "model": "tiny:other"}, models=models)
    assert response.status_code == 404
    assert "tiny:sql" in body["error"]["message"]


def test_adapters_are_listed(models):
    _, body = fetch_json("/v1/models", models=models)
    listed = {one["id"]: one.get("parent") for one in body["data"]}
    assert listed["tiny"] is None
    assert listed["tiny:sql"] == "tiny"
    assert listed["alias:retrieval.query"] == "alias"
    assert fetch_json("/v1/models/tiny:sql", models=models)[1]["id"] == "tiny:sql"
    _, info = fetch_json("/info", models=models)
    assert info["jaxembed"]["adapters"] == list(NAMES)


def test_no_long_purpose_is_kept(model):
    asked = RequestedOptions(EncodeOptions(), purposes=(("input_type", "x" * 10_000 + ".query"),))
    kept = model.model.tasks._cached_intent.cache_info().currsize
    assert model.model.tasks.intent(asked).prompt_name == "retrieval.query"
    assert model.model.tasks._cached_intent.cache_info().currsize == kept
