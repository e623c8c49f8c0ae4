"""Several models in one server: which one a request means, all of them together, and GET /info."""

import pytest
from fake_embedder import CLASSIFIER, M3, MAX_TOKENS, RERANKER, SPEC, FakeEmbedder
from prometheus_client.parser import text_string_to_metric_families
from test_server_app import fetch, fetch_json
from test_server_openai import ask
from test_server_outputs import SPARSE

from jaxembed import Embedder, EngineConfig
from jaxembed.engine.admission import Capacity, Cost
from jaxembed.errors import (
    BackendError,
    ConfigError,
    InvalidInput,
    Overloaded,
    UnknownModel,
    WrongTask,
)
from jaxembed.server.registry.models import Models, served_names

SPECS = {"embed": SPEC, "rerank": RERANKER, "classify": CLASSIFIER}


def fake(name: str, task: str = "embed", **attributes) -> FakeEmbedder:
    return FakeEmbedder(**({"name": name, "spec": SPECS[task]} | attributes))


def models(**tasks: str) -> Models:
    """Fakes by name and task."""
    return Models([fake(name, task) for name, task in tasks.items()])


def of_kinds(names: str) -> Models:
    """Fakes whose names begin with the letter of their task."""
    tasks = {"e": "embed", "r": "rerank", "c": "classify"}
    return models(**{name: tasks[name[0]] for name in names.split()})


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
        with pytest.raises(InvalidInput, match="`model` must name one of e, s"):
            served.find(None, "rerank")
    else:
        assert served.find(None, "rerank").loaded.name == chosen
    assert served.find("e", "rerank").loaded.name == "e"


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
    asked = {name for name, embedder in embedders.items() if embedder.requested}
    assert asked == ({chosen} if chosen else set())


def test_no_model_that_gives_what_is_asked_for():
    served = Models([fake("a"), fake("b")])
    _, answer = ask({"input": "x", "outputs": ["sparse"]}, models=served, status=400)
    assert answer["detail"] == "`model` must name one of a, b; none of them supports sparse"


@pytest.mark.parametrize(
    ("tasks", "name", "task", "found"),
    [
        ("e r c", None, "embed", "e"),
        ("e r c", "", "rerank", "r"),
        ("e r c", None, "classify", "c"),
        ("e e2 r", "e2", "embed", "e2"),
        ("e r", None, "classify", "r"),
        ("r c", "r", "classify", "r"),
        ("e", None, None, "e"),
        ("e r", "r", None, "r"),
    ],
)
def test_a_name_means_its_model_and_no_name_the_only_one_that_can(tasks, name, task, found):
    assert of_kinds(tasks).find(name, task).loaded.name == found


@pytest.mark.parametrize(
    ("tasks", "name", "task", "error", "message"),
    [
        ("e r", None, None, InvalidInput, "`model` must name one of e, r"),
        ("e e2 r", None, "embed", InvalidInput, "`model` must name one of e, e2$"),
        ("e r", "x", "embed", UnknownModel, "`x` does not exist; this server has e, r"),
        ("e r", "r", "embed", WrongTask, r"not an embedding model: `r` is a reranker \(/rerank"),
        ("e c", "c", "rerank", WrongTask, r"not a re-ranker model: `c` is a classifier \(/predict"),
        ("e", None, "classify", WrongTask, "not a classifier model: `e` is an embedding model"),
    ],
)
def test_what_means_no_one_model_is_told_why(tasks, name, task, error, message):
    with pytest.raises(error, match=message) as raised:
        of_kinds(tasks).find(name, task)
    assert error is WrongTask or raised.value.field == "model"


def test_aliases_are_names_and_the_first_is_carried():
    served = Models([fake("a"), fake("b")], {"a": ["one", "uno"]})
    assert served.names_among() == ("one", "uno", "b")
    assert served["uno"] is served["one"]
    assert served.name_of(served["uno"].loaded) == "one"
    with pytest.raises(UnknownModel):
        served["a"]


@pytest.mark.parametrize(
    ("ids", "aliases", "clash"),
    [
        (["a", "a"], {}, "a and a cannot both be served as a"),
        (["a", "b"], {"a": ["x"], "b": ["x"]}, "a and b cannot both be served as x"),
        (["a", "b"], {"b": ["a"]}, "a and b cannot both be served as a"),
    ],
)
def test_two_models_of_one_name_are_refused(ids, aliases, clash):
    with pytest.raises(ConfigError, match=f"{clash}.*--served-model-name"):
        served_names(ids, aliases)
    with pytest.raises(ConfigError, match=clash):
        Models([fake(name) for name in ids], aliases)


def test_models_lists_every_name_with_its_task_and_limit():
    served = models(e="embed", r="rerank")
    _, body = fetch_json("/v1/models", models=served)
    listed = [(one["id"], one["task"], one["max_model_len"]) for one in body["data"]]
    assert listed == [("e", "embed", 16), ("r", "rerank", 16)]
    _, body = ask({"query": "x", "documents": ["y"]}, path="/v1/rerank", models=served)
    assert body["model"] == "r"


def test_ready_and_healthy_mean_all_of_them():
    for change in ({"ready": False}, {"healthy": False}, {"draining": True}):
        fetch("/ready", models=Models([fake("a"), fake("b", **change)]), status=503)
    fetch("/health", models=Models([fake("a"), fake("b", healthy=False)]), status=503)
    fetch("/ready", models=models(a="embed", b="rerank"), status=200)


def values(served: Models, name: str, **labels: str) -> dict[str, float]:
    """The samples of one series by model."""
    families = text_string_to_metric_families(served.exposition().decode())
    return {
        sample.labels["model"]: sample.value
        for family in families
        for sample in family.samples
        if name in (family.name, sample.name) and labels.items() <= sample.labels.items()
    }


def stage_count(served: Models, stage: str) -> dict[str, float]:
    """How often a stage was timed, by model."""
    return values(served, "jaxembed_stage_seconds_count", stage=stage)


def test_requests_are_counted_for_the_model_they_were_for():
    served = models(a="embed", b="embed", r="rerank")
    ask({"input": "x", "model": "b"}, models=served)
    ask({"input": "x", "model": "b", "dimensions": 99}, models=served)  # refused by the model
    ask({"input": "", "model": "b"}, models=served)  # refused before it was asked
    assert values(served, "te_request_count", method="single") == {"a": 0, "b": 2, "r": 0}
    assert values(served, "te_request_success", method="single") == {"a": 0, "b": 1, "r": 0}
    assert values(served, "te_request_failure", err="validation") == {"a": 0, "b": 1, "r": 0}
    assert values(served, "te_request_failure", err="tokenization") == {"a": 0, "b": 1, "r": 0}
    assert stage_count(served, "decode") == {"a": 0, "b": 3, "r": 0}
    ask({"input": "x", "model": "z"}, models=served)  # finds no model: it counts for the first
    assert values(served, "te_request_failure", err="validation") == {"a": 1, "b": 1, "r": 0}
    assert stage_count(served, "decode") == {"a": 1, "b": 3, "r": 0}


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


def test_models_share_their_device_and_their_limits(tiny_checkpoint, grid_file, tmp_path):
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    options = {"cache_dir": tmp_path, "config": config, "capacity": Capacity(1000)}
    path = str(tiny_checkpoint)
    with Embedder(path, **options) as first, Embedder(path, **options) as second:
        one, other = first.model, second.model
        assert one.main.engine.workers[0].scheduler is other.main.engine.workers[0].scheduler
        capacity = one.admission.capacity
        assert capacity is other.admission.capacity
        assert capacity.max_tokens == 2 * 64 * 128  # what each would have alone
        with (
            other.admission.admit(Cost(1000, 10)),
            one.admission.admit(Cost(500, 10)),
            pytest.raises(Overloaded),
        ):
            one.admission.admit(Cost(17, 1))  # past the limit it has had its half


KEYS = """
model_id model_sha model_dtype served_model_name model_type max_concurrent_requests
max_input_length max_batch_tokens max_batch_requests max_client_batch_size auto_truncate
tokenization_workers version sha docker_label jaxembed
"""


def info(models, query="", status=200):
    return fetch_json(f"/info{query}", models=models, status=status)[1]


def test_info_has_the_keys_of_tei_in_their_order():
    body = info(Models([FakeEmbedder()], {"test/fake": ("mine",)}))
    assert list(body) == KEYS.split()
    assert body["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert body["served_model_name"] == "mine"
    assert body["max_input_length"] == MAX_TOKENS
    assert "models" not in body["jaxembed"]


def test_models_that_score_list_their_labels():
    body = info(Models([FakeEmbedder(spec=RERANKER)]))
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert body["model_type"] == {"reranker": labels}
    body = info(Models([FakeEmbedder(spec=CLASSIFIER)]))
    labels = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    labels["label2id"] = {"bad": 0, "fair": 1, "good": 2}
    assert body["model_type"] == {"classifier": labels}


def test_of_several_models_the_first_is_shown_or_the_one_asked_for():
    models = Models([FakeEmbedder(name="a"), FakeEmbedder(spec=RERANKER, name="b")])
    body = info(models)
    assert body["model_id"] == "a"
    shown = body["jaxembed"]["models"]
    assert [(one["name"], one["task"]) for one in shown] == [("a", "embed"), ("b", "rerank")]
    assert shown[0]["max_input_length"] == MAX_TOKENS
    body = info(models, "?model=b")
    assert body["model_id"] == "b"
    assert len(body["jaxembed"]["models"]) == 2
    assert "this server has a, b" in info(models, "?model=c", 404)["error"]
