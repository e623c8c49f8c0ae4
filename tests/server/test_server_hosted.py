"""/, /invocations and /vertex: what a body without a task is taken for."""

import asyncio

import numpy as np
import pytest
from fake_embedder import CLASSIFIER, DIM, RERANKER, ROUTES, SPEC, FakeEmbedder
from test_server_openai import ask
from test_server_outputs import SEVERAL_VECTORS, SPARSE

from jaxembed.config import ServerConfig
from jaxembed.server.registry.models import Models
from jaxembed.server.routes.cloud import INSTANCES_AT_ONCE

PATHS = ["/", "/invocations"]
QUESTION = {"query": "a b", "texts": ["c", "a", "a b"]}
ORDER = [2, 1, 0]


def three():
    """An embedding model, a reranker and a classifier; the last first."""
    specs = {"c": CLASSIFIER, "r": RERANKER, "e": SPEC}
    return Models([FakeEmbedder(spec=spec, name=name) for name, spec in specs.items()])


@pytest.mark.parametrize("path", PATHS)
def test_a_reranker_ranks_and_a_classifier_predicts(path):
    documents = {"query": QUESTION["query"], "documents": QUESTION["texts"]}
    asked = {"path": path, "embedder": FakeEmbedder(spec=RERANKER)}
    for found in (ask(QUESTION, **asked)[1], ask(documents, **asked)[1]["results"]):
        assert [item["index"] for item in found] == ORDER
    assert [item["label"] for item in ask({"inputs": ["a b", "a"]}, **asked)[1]] == ["LABEL_0"]
    asked = {"path": path, "embedder": FakeEmbedder(spec=CLASSIFIER)}
    labels = {item["label"] for item in ask({"inputs": "a"}, **asked)[1]}
    assert labels == set(CLASSIFIER.labels)
    assert "not a re-ranker model" in ask(QUESTION, **asked, status=424)[1]["error"]


def test_of_several_models_the_body_or_its_name_chooses():
    assert np.shape(ask({"inputs": "a"}, path="/", models=three())[1]) == (1, DIM)
    assert [item["index"] for item in ask(QUESTION, path="/", models=three())[1]] == ORDER
    for name, count in (("c", 3), ("r", 1)):
        assert len(ask({"inputs": "a", "model": name}, path="/", models=three())[1]) == count
    ask({"inputs": "a", "model": "x"}, path="/", models=three(), status=404)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("spec", "other", "shape"),
    [(SPARSE, "/embed_sparse", None), (SEVERAL_VECTORS, "/embed_multi", f"1,2;{DIM}")],
)
def test_a_model_without_dense_vectors_answers_what_it_has(path, spec, other, shape):
    embedder, body = FakeEmbedder(spec=spec), {"inputs": ["a", "b b"]}
    response, answer = ask(body, path=path, embedder=embedder)
    assert response.headers["x-compute-tokens"] == "3"
    assert answer == ask(body, path=other, embedder=embedder)[1]
    accept = {"accept": "application/octet-stream"}  # weights are always JSON
    response, raw_bytes = ask(body, path=path, embedder=embedder, headers=accept)
    assert response.headers.get("x-embedding-shape") == shape
    assert shape or raw_bytes == answer


def test_vertex_answers_each_instance():
    body = {"instances": [{"inputs": "a"}, {"inputs": ["b", "c"], "normalize": False}]}
    embedder = FakeEmbedder()
    response, answer = ask(body, path="/vertex", embedder=embedder)
    assert [np.shape(prediction) for prediction in answer["predictions"]] == [(1, DIM), (2, DIM)]
    assert "x-compute-type" not in response.headers
    text = embedder.telemetry.exposition().decode()
    assert 'te_request_success{method="single"} 1.0' in text
    assert 'te_request_success{method="batch"} 1.0' in text


def test_vertex_takes_instances_of_every_task():
    body = {"instances": [{"inputs": "a"}, QUESTION, {"inputs": [["a"], ["b", "c"]], "model": "c"}]}
    accept = {"accept": "application/octet-stream"}  # no instance may follow it
    _, answer = ask(body, path="/vertex", models=three(), headers=accept)
    vectors, ranks, labels = answer["predictions"]
    assert np.shape(vectors) == (1, DIM)
    assert [item["index"] for item in ranks] == ORDER
    assert [len(item) for item in labels] == [3, 3]


def test_vertex_answers_with_its_first_failure():
    body = {"instances": [{"inputs": "a"}, {"inputs": ""}, {"inputs": "b"}]}
    _, answer = ask(body, path="/vertex", status=400)
    assert answer["error_type"] == "Empty"
    assert ask({"instances": []}, path="/vertex")[1] == {"predictions": []}


def test_vertex_begins_a_bounded_number_of_instances_at_once():
    class Counting(FakeEmbedder):
        now = most = 0

        async def answer(self, request, reservation=None):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await super().answer(request, reservation)

    embedder = Counting()
    body = {"instances": [{"inputs": "a"}] * (3 * INSTANCES_AT_ONCE)}
    config = ServerConfig(max_client_batch_size=1000)
    _, answer = ask(body, path="/vertex", embedder=embedder, config=config)
    assert len(answer["predictions"]) == 3 * INSTANCES_AT_ONCE
    assert embedder.most == INSTANCES_AT_ONCE


def test_vertex_runs_nothing_of_a_request_with_an_instance_it_cannot_read():
    embedder = FakeEmbedder()
    for instances in ([{"inputs": "a"}, {"input": "b"}], 3):
        ask({"instances": instances}, path="/vertex", embedder=embedder, status=422)
    assert embedder.requested == []


@pytest.mark.parametrize(
    ("instances", "count"),
    [
        ([{"inputs": ["a"] * 1500}] * 2, 3000),
        ([{"inputs": [[1]] * 2048}, {"inputs": "a"}], 2049),
        ([{"inputs": [[7] * 300] * 1500}] * 2, 3000),  # sequences of ids, which come as arrays
        ([{"inputs": ["a"] * 2000}] * 20, 4000),  # none is read after the input too many
        ([{"inputs": [1] * 4000}, {"inputs": ["a"] * 2048}], 2049),
        ([{"query": "q", "texts": ["a"] * 1500}] * 2, 3000),
        ([{"query": "q", "documents": ["a"] * 1500}] * 2, 3000),
        ([{"inputs": [["a", "b"]] * 1500, "model": "c"}] * 2, 3000),
        ([{"inputs": ["a", "b"], "model": "c"}, {"inputs": ["a"] * 2048}], 2049),
        ([{"query": "a", "texts": []}] * 2049, 2049),  # counted before they are read
    ],
)
def test_vertex_counts_the_inputs_of_all_instances(instances, count):
    _, answer = ask({"instances": instances}, path="/vertex", models=three(), status=422)
    assert f"batch size {count} > maximum allowed batch size 2048" in answer["error"]


@pytest.mark.parametrize("path", ROUTES)
def test_all_that_a_request_asks_of_a_model_counts_as_one_request(path):
    body, spec = ROUTES[path]
    embedder = FakeEmbedder(spec=spec)
    if path == "/vertex":
        body = {"instances": body["instances"] * 2}
    ask(body, path=path, embedder=embedder, status=200)
    first, *others = embedder.reservation
    assert first is not None
    assert others == ([first] if path == "/vertex" else [])
