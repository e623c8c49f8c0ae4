"""A model with several routes: which engine a request gets, and all engines together."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_, is_not
from pathlib import Path

import numpy as np
import pytest
import sources
from conftest import LIMIT, tiny_spec, word_tokenizer
from fakes import WAIT_S, count_of, until
from safetensors.numpy import load_file
from test_cli import run
from test_server_app import fetch, fetch_json
from test_server_openai import ask

from benchmarks.parameters import random_parameters
from jaxembed import Embedder, EngineConfig, TextConfig
from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.checkpoint import Contents
from jaxembed.config import ServerConfig
from jaxembed.engine.engine import Engine
from jaxembed.engine.host import HostEngine
from jaxembed.errors import BackendError, ConfigError, UnknownPrompt, UnknownRoute
from jaxembed.runtime.diagnostics.examine import History, examine
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models

SHORT = 16  # tokens of a query
PROMPTS = {"query": "what is ", "document": "", "sts": "the cat "}
TEXTS = ["the cat sat", "a dog runs", "blue sky"]


def save_routed(path: Path, default: str | None) -> Path:
    """A checkpoint of a small query encoder and a larger one for documents."""
    specs = {
        "query": tiny_spec(prompts=PROMPTS, max_input_tokens=SHORT),
        "document": tiny_spec(prompts=PROMPTS, pooling=("cls",)),
    }
    tokenizer = word_tokenizer().to_str().encode()
    contents = {
        route: Contents(spec, random_parameters(spec, seed), tokenizer)
        for seed, (route, spec) in enumerate(specs.items())
    }
    checkpoint.save_routes(path, contents, default)
    return path


@pytest.fixture(name="opened", scope="module")
def _opened(tmp_path_factory, closed_late):
    cache = tmp_path_factory.mktemp("cache")
    grid = cache.parent / "routes-buckets.json"
    grid.write_text('{"buckets": [[2, 64]]}')
    config = EngineConfig(dtype="float32", devices=1, buckets=grid, max_batch_tokens=128)

    def opened(path: Path, **options) -> Embedder:
        embedder = Embedder(str(path), cache_dir=cache, config=config, **options)
        return closed_late.enter_context(embedder)

    return opened


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory) -> Path:
    return save_routed(tmp_path_factory.mktemp("routed") / "out", "document")


@pytest.fixture(name="routed", scope="module")
def _routed(opened, saved) -> Embedder:
    """Its default route is that of documents. Shared: do not close or drain it."""
    return opened(saved)


@pytest.fixture(name="undecided", scope="module")
def _undecided(opened, tmp_path_factory) -> Embedder:
    return opened(save_routed(tmp_path_factory.mktemp("undecided") / "out", None))


@pytest.fixture(name="alone", scope="module")
def _alone(opened, saved) -> dict[str, Embedder]:
    return {route: opened(saved / "routes" / route) for route in ("query", "document")}


@pytest.fixture(name="wanted", scope="module")
def _wanted(alone) -> dict[str, np.ndarray]:
    """The vectors of TEXTS by route, with the prompt of the route's name."""
    return {route: one.encode(TEXTS, prompt_name=route) for route, one in alone.items()}


def same(got, wanted) -> bool:
    return np.allclose(np.asarray(got, np.float32), wanted, atol=1e-5)


def test_methods_and_prompt_names_name_a_route_or_the_default(opened, saved, routed, alone, wanted):
    assert not same(wanted["query"], wanted["document"])
    assert same(routed.encode_query(TEXTS), wanted["query"])
    assert same(routed.encode_document(TEXTS), wanted["document"])
    assert same(routed.encode_query(TEXTS[0]), wanted["query"][0])
    for route, vectors in wanted.items():
        assert same(routed.encode(TEXTS, prompt_name=route), vectors)
    for options in ({}, {"prompt_name": "sts"}):
        assert same(routed.encode(TEXTS, **options), alone["document"].encode(TEXTS, **options))
    embedder = opened(saved, text=TextConfig(default_prompt_name="query"))
    assert same(embedder.encode(TEXTS), wanted["query"])
    assert same(embedder.encode_document(TEXTS), wanted["document"])


def test_a_route_can_be_chosen_beside_the_prompt(routed, alone):
    for route, one in alone.items():
        got = routed.encode(TEXTS, route=route, prompt="the ")
        assert same(got, one.encode(TEXTS, prompt="the "))
    got = routed.encode_query(TEXTS, prompt_name="sts")
    assert same(got, alone["query"].encode(TEXTS, prompt_name="sts"))


def test_no_name_is_refused_where_no_route_is_the_default(undecided, wanted):
    for options in ({}, {"prompt_name": "sts"}, {"prompt": "the "}):
        with pytest.raises(UnknownRoute, match="query, document"):
            undecided.encode(TEXTS, **options)
    with pytest.raises(UnknownRoute, match="query, document"):
        undecided.compute(TEXTS, ["dense"])
    assert same(undecided.encode_query(TEXTS), wanted["query"])


def test_unknown_names_are_refused(routed, embedder):
    with pytest.raises(UnknownRoute, match="'image', which is not a route"):
        routed.encode(TEXTS, route="image")
    with pytest.raises(UnknownPrompt):
        routed.encode(TEXTS, prompt_name="passage")
    assert same(embedder.encode(TEXTS, route=""), embedder.encode(TEXTS))
    with pytest.raises(UnknownRoute, match=r"of this model; it has no routes$"):
        embedder.encode(TEXTS, route="query")


def test_another_pooling_is_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="--pooling max: this checkpoint has several routes"):
        Embedder(str(saved), cache_dir=tmp_path, pooling="max")


def over_http(model, path, body, **options):
    _, answer = ask(body, path=path, models=Models([model.model]), **options, status=200)
    return answer


@pytest.mark.parametrize(
    ("fields", "route"),
    [
        ({"prompt_name": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"task": "retrieval.query"}, "query"),
        ({"input_type": "query", "task": "retrieval.query"}, "query"),
        ({"input_type": "passage"}, "document"),
        ({"input_type": "search_document"}, "document"),
        ({"task": "retrieval.passage"}, "document"),
        ({}, "document"),
    ],
)
def test_openai_chooses_the_route_by_the_fields_of_its_prompt(routed, wanted, fields, route):
    answer = over_http(routed, "/v1/embeddings", {"input": TEXTS} | fields)
    assert same([one["embedding"] for one in answer["data"]], wanted[route])


def test_tei_chooses_the_route_by_prompt_name(routed, alone, wanted):
    for route, vectors in wanted.items():
        assert same(over_http(routed, "/embed", {"inputs": TEXTS, "prompt_name": route}), vectors)
    assert same(over_http(routed, "/", {"inputs": TEXTS}), wanted["document"])
    body = {"instances": [{"inputs": TEXTS, "prompt_name": "query"}, {"inputs": TEXTS}]}
    for got, route in zip(over_http(routed, "/vertex", body)["predictions"], wanted, strict=True):
        assert same(got, wanted[route])
    rows = over_http(routed, "/embed_all", {"inputs": ["the cat"], "prompt_name": "query"})
    tokens = alone["query"].compute(["the cat"], ["tokens"], prompt_name="query")["tokens"]
    assert same(rows[0], tokens[0])


def test_similarity_is_of_a_query_with_documents(routed, undecided, wanted):
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    for model in (routed, undecided):
        got = over_http(model, "/similarity", body)
        assert same(got, wanted["document"] @ wanted["query"][0])
    named = body | {"parameters": {"prompt_name": "query"}}
    assert same(over_http(routed, "/similarity", named), wanted["query"] @ wanted["query"][0])


def test_similarity_counts_once_and_names_the_sentence_at_fault(routed):
    before = count_of(routed.model.telemetry.request_count)
    sentences = ["cat", "dog " * 70]
    body = {
        "inputs": {"source_sentence": "cat", "sentences": sentences},
        "parameters": {"truncate": False},
    }
    response, answer = ask(body, path="/similarity", models=Models([routed.model]))
    assert response.status_code == 413 or response.status_code == 422
    assert "less than 64 tokens" in answer["error"]
    assert count_of(routed.model.telemetry.request_count) == before + 1


def test_texts_are_tokenized_by_the_route(routed):
    def count(**fields) -> int:
        (tokens,) = over_http(routed, "/tokenize", {"inputs": "cat"} | fields)
        return len(tokens)

    assert count() == count(prompt_name="document") == 3
    assert count(prompt_name="query") == 5  # with "what is "
    ids = {"ids": [[2, 7, 3]]}
    assert over_http(routed, "/decode", ids) == over_http(
        routed, "/decode", ids | {"prompt_name": "query"}
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/embed", {"inputs": TEXTS}),
        ("/embed_all", {"inputs": TEXTS}),
        ("/tokenize", {"inputs": TEXTS}),
        ("/decode", {"ids": [[2, 7, 3]]}),
    ],
)
def test_a_request_that_names_no_route_is_told_the_fields_and_the_routes(undecided, path, body):
    response, answer = ask(body, path=path, models=Models([undecided.model]))
    assert response.status_code == (400 if "embeddings" in path else 422)
    message = answer["error"]["message"] if "embeddings" in path else answer["error"]
    assert "`prompt_name`" in message
    assert "`input_type`" in message
    assert "query, document" in message
    if "embeddings" in path:
        assert answer["error"]["param"] == "prompt_name"


@pytest.mark.parametrize("field", ["input_type", "task"])
def test_a_purpose_without_a_route_is_refused(routed, field):
    body = {"input": TEXTS, field: "classification"}
    _, answer = ask(body, models=Models([routed.model]), status=400)
    assert answer["error"]["param"] == field
    assert f"`{field}` of 'classification' does not name one of" in answer["error"]["message"]


def test_the_doctor_examines_each_route(routed):
    models, history = {"m": routed.model}, History()
    before = examine(models, history.window(models))["m, query"].facts
    history.note(models)
    routed.encode_query(TEXTS)
    found = examine(models, history.window(models))
    assert list(found) == ["m, query", "m, document"]
    facts = {name: one.facts for name, one in found.items()}
    assert [one.admission.max_input_tokens for one in facts.values()] == [SHORT, LIMIT]
    assert (facts["m, query"].model, facts["m, query"].route) == ("m", "query")
    runs = [sum(bucket.runs for bucket in one.buckets) for one in facts.values()]
    assert runs[0] > 0 == runs[1]
    assert before.window.inputs == 0 < facts["m, query"].window.inputs
    _, info = fetch_json("/info?verbose", models=Models([routed.model]))
    assert list(info["jaxembed"]["doctor"]) == [f"{routed.name}, query", f"{routed.name}, document"]


@contextmanager
def held_back(embedder: Embedder) -> Iterator[None]:
    """Hold the turn of the device, which all engines share: what is asked for meanwhile waits."""
    (worker,) = embedder.model.main.engine.workers
    with worker.scheduler.hold(lambda: math.inf, whole=True):
        yield


async def until_waiting(embedder: Embedder, inputs: int) -> None:
    while embedder.model.waiting < inputs:  # the queue is what there is to wait on
        await asyncio.sleep(0)


@pytest.fixture(name="own")
def _own(opened, saved) -> Iterator[Embedder]:
    """One to close, drain or break."""
    with opened(saved) as embedder:
        yield embedder


def test_a_route_that_fails_leaves_the_others(own, monkeypatch, wanted):
    (worker,) = own.model.routes["query"].engine.workers
    monkeypatch.setattr(worker.runner, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(BackendError):
        own.encode_query(TEXTS)
    assert same(own.encode_document(TEXTS), wanted["document"])


async def test_what_waits_is_counted_over_all_routes(routed, wanted):
    with held_back(routed):
        asked = asyncio.gather(
            routed.encode_query_async(TEXTS), routed.encode_document_async(TEXTS[:2])
        )
        await until_waiting(routed, 5)
        shown = count_of(routed.model.telemetry.queue_size)
        by_route = [state.waiting_inputs for state in routed.model.snapshot().values()]
    queries, documents = await asked
    assert (shown, by_route) == (5, [3, 2])
    assert same(queries, wanted["query"])
    assert same(documents, wanted["document"][:2])


def test_a_model_is_ready_and_healthy_when_all_its_engines_are(routed, monkeypatch):
    models = Models([routed.model])
    assert fetch("/ready", models=models)[0].status_code == 200
    for fact, route in (("ready", "/ready"), ("healthy", "/health"), ("healthy", "/ready")):
        for one in routed.model.routes.values():
            with monkeypatch.context() as patch:
                patch.setattr(Engine, fact, property(partial(is_not, one.engine)))
                assert fetch(route, models=models)[0].status_code == 503
    for one in routed.model.routes.values():
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "stuck", property(partial(is_, one.engine)))
            assert fetch("/livez", models=models)[0].status_code == 503


async def test_draining_and_closing_finish_the_requests_of_all_routes(own, wanted):
    client = create_app(Models([own.model]), ServerConfig()).test_client()

    def send(route: str):
        return client.post("/embed", json={"inputs": TEXTS, "prompt_name": route})

    with held_back(own):
        begun = asyncio.gather(*map(send, wanted))
        await until_waiting(own, 6)
        own.model.drain()
        refused = [(await send(route)).status_code for route in wanted]
        closing = asyncio.create_task(asyncio.to_thread(own.close, WAIT_S))
        await asyncio.to_thread(until, lambda: own.model.snapshot()["query"].closing)
    queries, documents = [await response.get_json() for response in await begun]
    assert refused == [503, 503]
    assert same(queries, wanted["query"])
    assert same(documents, wanted["document"])
    await closing
    assert [state.threads for state in own.model.snapshot().values()] == [0, 0]
    for encode in (own.encode_query, own.encode_document):
        with pytest.raises(BackendError, match="closed"):
            encode("cat")


def test_progress_is_of_all_engines(opened, saved):
    seen: list[tuple[int, int]] = []
    embedder = opened(saved, on_progress=lambda done, total: seen.append((done, total)))
    buckets = sum(len(one.plan.grid.buckets) for one in embedder.model.routes.values())
    until(lambda: seen and seen[-1] == (buckets, buckets))


def test_a_static_query_encoder_runs_beside_a_tower_for_documents(opened, tmp_path):
    source = sources.write_router(tmp_path / "router", static=True, default_route="document")
    embedder = opened(source)
    assert isinstance(embedder.model.routes["query"].engine, HostEngine)
    assert isinstance(embedder.model.routes["document"].engine, Engine)
    texts = ["hello world", "world a"]
    prompted = [f"hello {text}" for text in texts]
    table = load_file(source / "query_0_StaticEmbedding" / "model.safetensors")["embedding.weight"]
    ids = [[sources.WORDS.index(word) for word in text.split()] for text in prompted]
    wanted = np.stack([table[row].mean(axis=0) for row in ids])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert same(embedder.encode_query(texts), wanted)
    assert same(over_http(embedder, "/embed", {"inputs": texts, "prompt_name": "query"}), wanted)
    alone = opened(sources.write_alone(tmp_path / "alone", source, "document"))
    documents = alone.encode(texts)
    assert same(embedder.encode_document(texts), documents)
    got = over_http(
        embedder, "/similarity", {"inputs": {"source_sentence": texts[0], "sentences": texts}}
    )
    assert same(got, documents @ wanted[0])
    models = Models([embedder.model])
    _, info = fetch_json("/info?verbose", models=models)
    assert info["jaxembed"]["routes"]["query"]["buckets"] == []
    assert fetch("/ready", models=models)[0].status_code == 200
    _, metrics = fetch("/metrics", models=models)
    assert metrics.count(b"\nte_queue_size 0.0\n") == 1


def test_a_file_without_a_route_is_refused_before_the_model_is_loaded(tmp_path):
    path = save_routed(tmp_path / "out", None)
    (tmp_path / "texts.txt").write_text("cat")
    out = ["-o", str(tmp_path / "out.npy"), "--cache-dir", str(tmp_path / "cache")]
    refused = run("embed", str(tmp_path / "texts.txt"), "--model", str(path), *out)
    assert refused.returncode != 0
    assert f"--prompt-name must name a route of {path}: query, document" in refused.stderr
