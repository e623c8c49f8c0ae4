"""GET /info: TEI's keys, and what only several models have to say."""

from fake_embedder import CLASSIFIER, MAX_TOKENS, RERANKER, FakeEmbedder
from test_server_app import fetch_json

from jaxembed.server.registry.models import Models

KEYS = """
model_id model_sha model_dtype served_model_name model_type max_concurrent_requests
max_input_length max_batch_tokens max_batch_requests max_client_batch_size auto_truncate
tokenization_workers version sha docker_label jaxembed
"""


def info(models, query=""):
    response, body = fetch_json(f"/info{query}", models=models)
    return response.status_code, body


def named(name, **arguments):
    embedder = FakeEmbedder(**arguments)
    embedder.name = name
    return embedder


def test_info_has_the_keys_of_tei_in_their_order():
    _, body = info(Models([FakeEmbedder()], {"test/fake": ("mine",)}))
    assert list(body) == KEYS.split()
    assert body["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert body["served_model_name"] == "mine"
    assert body["max_input_length"] == MAX_TOKENS
    assert "models" not in body["jaxembed"]


def test_models_that_score_list_their_labels():
    _, body = info(Models([FakeEmbedder(spec=RERANKER)]))
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert body["model_type"] == {"reranker": labels}
    _, body = info(Models([FakeEmbedder(spec=CLASSIFIER)]))
    assert body["model_type"] == {
        "classifier": {
            "id2label": {"0": "bad", "1": "fair", "2": "good"},
            "label2id": {"bad": 0, "fair": 1, "good": 2},
        }
    }


def test_of_several_models_the_first_is_shown_or_the_one_asked_for():
    models = Models([named("a"), named("b", spec=RERANKER)])
    _, body = info(models)
    assert body["model_id"] == "a"
    assert [(m["name"], m["task"]) for m in body["jaxembed"]["models"]] == [
        ("a", "embed"),
        ("b", "rerank"),
    ]
    assert body["jaxembed"]["models"][0]["max_input_length"] == MAX_TOKENS
    _, body = info(models, "?model=b")
    assert body["model_id"] == "b"
    assert len(body["jaxembed"]["models"]) == 2
    status, body = info(models, "?model=c")
    assert status == 404
    assert "this server has a, b" in body["error"]
