"""Several models in one server: which one a request means, and all of them together."""

import asyncio
import threading

import numpy as np
import pytest
from conftest import save_tiny
from fake_embedder import CLASSIFIER, M3, RERANKER, SPEC, FakeEmbedder
from prometheus_client.parser import text_string_to_metric_families
from test_server_app import fetch, fetch_json
from test_server_openai import ask
from test_server_outputs import SPARSE

from jaxembed import Embedder, EngineConfig
from jaxembed.config import ServerConfig
from jaxembed.engine.admission import Capacity, Cost
from jaxembed.errors import (
    BackendError,
    ConfigError,
    InvalidInput,
    Overloaded,
    UnknownModel,
    WrongTask,
)
from jaxembed.server.app import create_app
from jaxembed.server.models import Models, served_names
from jaxembed.spec import DenseLayer
from jaxembed.work import Encoding, work_of

LOGITS = frozenset({"logits"})

SPECS = {"embed": SPEC, "rerank": RERANKER, "classify": CLASSIFIER}


def fake(name: str, task: str = "embed", **attributes) -> FakeEmbedder:
    embedder = FakeEmbedder()
    vars(embedder).update({"name": name, "spec": SPECS[task], **attributes})
    return embedder


def models(**tasks: str) -> Models:
    """Fakes by name and task."""
    return Models([fake(name, task) for name, task in tasks.items()])


@pytest.mark.parametrize("task", ["embed", "rerank", "classify"])
def test_without_a_name_the_only_model_that_can_is_meant(task):
    served = models(e="embed", r="rerank", c="classify")
    for name in (None, ""):
        assert served.find(name, task).loaded.spec.task == task


def test_with_a_name_that_model_is_meant():
    served = models(a="embed", b="embed", r="rerank")
    assert served.find("b", "embed").loaded.name == "b"
    assert served.find("r", "rerank").loaded.name == "r"


def test_a_reranker_classifies_where_no_classifier_is():
    assert models(e="embed", r="rerank").find(None, "classify").loaded.name == "r"
    both = models(r="rerank", c="classify")
    assert both.find(None, "classify").loaded.name == "c"
    assert both.find("r", "classify").loaded.name == "r"


def test_a_task_of_none_is_what_every_model_does():
    assert models(e="embed").find(None, None).loaded.name == "e"
    served = models(e="embed", r="rerank")
    assert served.find("r", None).loaded.name == "r"
    with pytest.raises(InvalidInput, match="`model` must say which: e, r"):
        served.find(None, None)


def test_several_that_can_must_be_told_apart():
    with pytest.raises(InvalidInput, match="`model` must say which: a, b") as raised:
        models(a="embed", b="embed", r="rerank").find(None, "embed")
    assert raised.value.field == "model"


@pytest.mark.parametrize(
    ("specs", "chosen"),
    [
        ({"e": SPEC}, "e"),
        ({"e": SPEC, "c": CLASSIFIER}, "e"),
        ({"e": SPEC, "m": M3}, "m"),  # is listed as one that reranks
        ({"e": SPEC, "m": M3, "r": RERANKER}, "r"),
        ({"e": SPEC, "s": SPARSE}, None),
    ],
)
def test_a_model_that_is_made_to_rerank_comes_first(specs, chosen):
    served = Models([fake(name, spec=spec) for name, spec in specs.items()])
    if chosen is None:
        with pytest.raises(InvalidInput, match="`model` must say which: e, s"):
            served.find(None, "rerank")
    else:
        assert served.find(None, "rerank").loaded.name == chosen
    assert served.find("e", "rerank").loaded.name == "e"


def test_what_a_dense_embedder_is_listed_for_does_not_change():
    _, body = fetch_json("/v1/models", models=models(e="embed"))
    assert body["data"][0]["capabilities"] == ["embed"]


@pytest.mark.parametrize(
    ("specs", "path", "body", "chosen"),
    [
        ({"d": SPEC, "s": SPARSE}, "/embed_sparse", {"inputs": "x"}, "s"),
        ({"d": SPEC, "s": SPARSE}, "/v1/embeddings", {"input": "x", "outputs": ["sparse"]}, "s"),
        ({"s": SPARSE, "d": SPEC}, "/v1/embeddings", {"input": "x"}, "d"),
        ({"s": SPARSE, "d": SPEC}, "/embed", {"inputs": "x"}, "d"),
        ({"s": SPARSE, "d": SPEC}, "/", {"inputs": "x"}, "d"),
        ({"s": SPARSE, "d": SPEC}, "/v1/embed", {"texts": ["x"]}, "d"),
        ({"s": SPARSE, "d": SPEC}, "/v1/contextualizedembeddings", {"inputs": [["x"]]}, None),
        ({"d": SPEC, "m": M3}, "/embed_multi", {"inputs": "x"}, "m"),
        ({"d": SPEC, "m": M3}, "/v1/multi-vector", {"input": "x"}, "m"),
        ({"s": SPARSE}, "/v1/embeddings", {"input": "x"}, "s"),
        ({"s": SPARSE, "d": SPEC}, "/embed_sparse", {"inputs": "x", "model": "d"}, None),
        ({"s": SPARSE, "m": M3}, "/embed_sparse", {"inputs": "x"}, None),
        ({"s": SPARSE, "d": SPEC}, "/embed_all", {"inputs": "x"}, None),
    ],
)
def test_without_a_name_a_model_is_meant_that_gives_what_is_asked_for(specs, path, body, chosen):
    embedders = {name: fake(name, spec=spec) for name, spec in specs.items()}
    response, answer = ask(body, path=path, models=Models(list(embedders.values())))
    assert response.status_code == 200 or chosen is None, answer
    asked = {name for name, embedder in embedders.items() if embedder.asked}
    assert asked == ({chosen} if chosen else set())


def test_no_model_that_gives_what_is_asked_for():
    served = Models([fake("a"), fake("b")])
    body = {"input": "x", "outputs": ["sparse"]}
    _, answer = ask(body, models=served, status=400)
    words = "`model` must say which: a, b; none of them gives sparse"
    assert answer["error"]["message"] == words


def test_an_unknown_name_is_told_those_there_are():
    with pytest.raises(UnknownModel, match=r"`x` does not exist; this server has e, r") as raised:
        models(e="embed", r="rerank").find("x", "embed")
    assert raised.value.field == "model"


def test_a_long_name_is_not_repeated_in_full():
    with pytest.raises(UnknownModel, match=r"xxx\.\.\.` does not exist") as raised:
        models(e="embed").find("x" * 100_000, "embed")
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("r", "embed", r"not an embedding model: `r` is a reranker \(/rerank"),
        ("c", "rerank", r"not a re-ranker model: `c` is a classifier \(/predict"),
        (None, "classify", r"not a classifier model: `e` is an embedding model \(/v1/embeddings"),
    ],
)
def test_a_model_of_another_kind_is_named_with_its_routes(name, task, message):
    served = models(e="embed", r="rerank", c="classify") if name else models(e="embed")
    with pytest.raises(WrongTask, match=message):
        served.find(name, task)


def test_aliases_are_names_and_the_first_is_carried():
    served = Models([fake("a"), fake("b")], {"a": ["one", "uno"]})
    assert served.names == ("one", "uno", "b")
    assert served["uno"] is served["one"]
    assert served.name_of(served["uno"].loaded) == "one"
    with pytest.raises(UnknownModel):
        served["a"]


@pytest.mark.parametrize(
    ("ids", "aliases", "clash"),
    [
        (["a", "a"], {}, "a and a would both be served as a"),
        (["a", "b"], {"a": ["x"], "b": ["x"]}, "a and b would both be served as x"),
        (["a", "b"], {"b": ["a"]}, "a and b would both be served as a"),
    ],
)
def test_two_models_of_one_name_are_refused(ids, aliases, clash):
    with pytest.raises(ConfigError, match=f"{clash}.*--served-model-name"):
        served_names(ids, aliases)
    with pytest.raises(ConfigError, match=clash):
        Models([fake(name) for name in ids], aliases)


def test_an_alias_given_twice_is_one_name():
    assert served_names(["a"], {"a": ["x", "x"]}) == [("x",)]


def test_models_lists_every_name_with_its_task_and_limit():
    _, body = fetch_json("/v1/models", models=models(e="embed", r="rerank"))
    assert [(m["id"], m["task"], m["max_model_len"]) for m in body["data"]] == [
        ("e", "embed", 16),
        ("r", "rerank", 16),
    ]


def test_answers_carry_the_name_of_the_model_that_answered():
    served = Models([fake("a"), fake("b")])
    served.find("b", None).loaded.plan.dtype = "bfloat16"
    for name, dtype in (("a", "float32"), ("b", "bfloat16")):
        response, body = ask({"input": "x", "model": name}, models=served)
        assert body["model"] == name
        assert response.headers["x-compute-type"] == f"cpu+{dtype}"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": "x"}, 400, "`model` must say which: a, b"),
        ({"input": "x", "model": "r"}, 400, "not an embedding model: `r` is a reranker"),
        ({"input": "x", "model": "z"}, 404, "this server has a, b, r"),
    ],
)
def test_a_request_that_means_no_one_model_is_told_why(body, status, message):
    _, answer = ask(body, models=models(a="embed", b="embed", r="rerank"), status=status)
    assert message in answer["error"]["message"]


def test_ready_and_healthy_mean_all_of_them():
    for change in ({"ready": False}, {"healthy": False}, {"draining": True}):
        served = Models([fake("a"), fake("b", **change)])
        assert fetch("/ready", models=served)[0].status_code == 503
    assert (
        fetch("/health", models=Models([fake("a"), fake("b", healthy=False)]))[0].status_code == 503
    )
    assert fetch("/ready", models=models(a="embed", b="rerank"))[0].status_code == 200


def metric_families(served: Models) -> dict:
    text = served.exposition().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(served: Models, name: str, **labels: str) -> dict[str, float]:
    """The samples of one metric by model."""
    family = metric_families(served)[name]
    return {
        sample.labels["model"]: sample.value
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    }


def stage_count(served: Models, stage: str) -> dict[str, float]:
    """How often a stage was timed, by model."""
    return {
        sample.labels["model"]: sample.value
        for sample in metric_families(served)["jaxembed_stage_seconds"].samples
        if sample.name.endswith("_count") and sample.labels["stage"] == stage
    }


def test_one_model_has_the_metrics_of_tei_without_a_label_of_ours():
    served = models(a="embed")
    assert served.exposition() == served.first().telemetry.exposition()
    assert b"model=" not in served.exposition()


def test_requests_are_counted_for_the_model_they_were_for():
    served = models(a="embed", b="embed", r="rerank")
    ask({"input": "x", "model": "b"}, models=served)
    ask({"input": "x", "model": "b", "dimensions": 99}, models=served)  # refused by the model
    ask({"input": "", "model": "b"}, models=served)  # refused before it was asked
    assert values(served, "te_request_count", method="single") == {"a": 0, "b": 2, "r": 0}
    assert values(served, "te_request_success", method="single") == {"a": 0, "b": 1, "r": 0}
    assert values(served, "te_request_failure", err="validation") == {"a": 0, "b": 1, "r": 0}
    assert values(served, "te_request_failure", err="tokenization") == {"a": 0, "b": 1, "r": 0}


def test_a_request_that_never_found_its_model_is_counted_for_the_first():
    served = models(a="embed", b="embed")
    ask({"input": "x", "model": "z"}, models=served)
    ask({"input": "x"}, models=served)
    assert values(served, "te_request_failure", err="validation") == {"a": 2, "b": 0}


def test_stages_are_counted_for_the_model_they_were_for():
    served = models(a="embed", b="embed")
    ask({"input": "x", "model": "b"}, models=served)
    for stage in ("decode", "encode"):
        assert stage_count(served, stage) == {"a": 0, "b": 1}
    ask({"input": "x", "model": "z"}, models=served)  # found no model
    assert stage_count(served, "decode") == {"a": 1, "b": 1}


def test_instances_are_counted_each_for_its_model():
    served = models(a="embed", b="embed", c="embed")
    served["b"].loaded.failure = BackendError("the batch failed")
    body = {"instances": [{"inputs": "x", "model": name} for name in ("a", "b", "c")]}
    ask(body, path="/vertex", models=served, status=424)
    assert values(served, "te_request_count", method="single") == {"a": 1, "b": 1, "c": 1}
    assert values(served, "te_request_success", method="single") == {"a": 1, "b": 0, "c": 1}
    assert values(served, "te_request_failure", err="inference") == {"a": 0, "b": 1, "c": 0}
    assert stage_count(served, "encode") == {"a": 1, "b": 0, "c": 1}
    ask({"instances": [{"inputs": "x", "model": "z"}]}, path="/vertex", models=served)
    assert values(served, "te_request_failure", err="validation") == {"a": 1, "b": 0, "c": 0}


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory, grid_file):
    """A real embedder and a real reranker, on one device and within one capacity."""
    folder = tmp_path_factory.mktemp("pair")
    paths = {
        "e": save_tiny(folder / "embedder"),
        "r": save_tiny(
            folder / "reranker",
            pooling=("cls",),
            modules=(DenseLayer(32, 32), DenseLayer(32, 1, activation="identity")),
            labels=("LABEL_0",),
            score_function="sigmoid",
        ),
    }
    config = EngineConfig(
        dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128, warmup="full"
    )
    capacity = Capacity(1000)
    embedders = [
        Embedder(str(path), cache_dir=folder / "cache", config=config, capacity=capacity)
        for path in paths.values()
    ]
    yield Models(embedders, {str(path): [name] for name, path in paths.items()})
    for embedder in embedders:
        embedder.close()


def test_an_embedder_and_a_reranker_answer_over_one_server(pair):
    _, body = ask({"input": ["the cat sat", "a dog"], "encoding_format": "float"}, models=pair)
    assert body["model"] == "e"
    vectors = [item["embedding"] for item in body["data"]]
    np.testing.assert_allclose(
        vectors, pair["e"].loaded.encode(["the cat sat", "a dog"]), atol=1e-6
    )
    _, body = fetch_json("/v1/models", models=pair)
    assert [(m["id"], m["task"]) for m in body["data"]] == [("e", "embed"), ("r", "rerank")]
    _, body = ask({"input": "the cat", "model": "r"}, models=pair, status=400)
    assert "`r` is a reranker" in body["error"]["message"]


def test_models_share_their_limits(pair):
    e, r = pair["e"].loaded, pair["r"].loaded
    capacity = e.admission.capacity
    assert capacity is r.admission.capacity
    assert capacity.max_tokens == 2 * 64 * 128  # what each would have alone
    with (
        r.admission.admit(Cost(1000, 10)),
        e.admission.admit(Cost(500, 10)),
        pytest.raises(Overloaded),
    ):
        e.admission.admit(Cost(17, 1))  # past the limit it has had its half, and is not small


async def test_two_models_together_have_no_more_programs_in_flight_than_one(pair, monkeypatch):
    inside, most, ran, lock = 0, 0, {"e": 0, "r": 0}, threading.Lock()

    def watched(name, run):
        def call(*arguments):
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
                ran[name] += 1
            try:
                return run(*arguments)
            finally:
                with lock:
                    inside -= 1

        return call

    for name in ran:
        runner = pair[name].loaded.engine.seats[0].runner
        monkeypatch.setattr(runner, "run", watched(name, runner.run))
    client = create_app(pair, ServerConfig()).test_client()
    different = [[n >> bit & 1 for bit in range(30)] for n in range(400)]
    texts = [" ".join("red" if bit else "train" for bit in bits) for bits in different[:200]]
    asked = [
        client.post("/v1/embeddings", json={"input": texts[k : k + 40]}) for k in range(0, 200, 40)
    ]
    sequences = [Encoding(np.array(bits, np.int32) + 7) for bits in different[200:]]
    works = [work_of(sequences[k : k + 40], LOGITS) for k in range(0, 200, 40)]
    tickets = [pair["r"].loaded.engine.submit(work) for work in works]
    responses = await asyncio.gather(*asked)
    for ticket in tickets:
        await asyncio.to_thread(ticket.result, 30.0)
    assert [response.status_code for response in responses] == [200] * 5
    assert most <= pair["e"].loaded.engine.seats[0].turn.permits
    assert ran["e"] > 10
    assert ran["r"] > 10


def test_every_sample_of_several_models_names_its_model_but_those_of_the_process(pair):
    before = values(pair, "te_embed_success")
    ask({"input": ["the", "cat"]}, models=pair)
    families = metric_families(pair)
    assert set(families) >= {f.name for f in pair.first().telemetry.registry.collect()}
    unlabelled = {
        name
        for name, family in families.items()
        if any("model" not in sample.labels for sample in family.samples)
    }
    assert unlabelled == {
        "jaxembed_compile_count",
        "jaxembed_compile_cache_hits",
        "jaxembed_compile_seconds",
    }
    assert all(len(families[name].samples) == 1 for name in unlabelled)
    assert values(pair, "te_embed_success") == {"e": before["e"] + 2, "r": before["r"]}
    assert values(pair, "te_queue_size") == {"e": 0, "r": 0}
    text = pair.exposition().decode()
    for name in families:
        assert text.count(f"# TYPE {name} ") == text.count(f"# HELP {name} ") == 1
