"""POST /classify in Infinity's words."""

import numpy as np
import pytest
from fake_embedder import CLASSIFIER, RERANKER, FakeEmbedder, logits
from test_server_openai import ask

from jaxembed.data.inputs import Pair, Text
from jaxembed.errors import BackendError
from jaxembed.runtime.postprocess import scores

PATHS = ["/classify", "/v1/classify"]


def classify(body, spec=CLASSIFIER, path="/classify", status=200):
    return ask(body, path=path, embedder=FakeEmbedder(spec=spec), status=status)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a", [Text("a")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([["a", "b"], "c"], [Pair("a", "b"), Text("c")]),
    ],
)
def test_each_input_gets_every_label_best_first(given, wanted, path):
    response, body = classify({"input": given, "model": "test/fake"}, path=path, status=200)
    assert body["object"] == "classify"
    assert body["model"] == "test/fake"
    tokens = sum(2 if isinstance(item, Pair) else 1 for item in wanted)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["id"] == f"classify-{response.headers['x-request-id']}"
    assert isinstance(body["created"], int)
    found = scores(np.stack([logits(item, 3) for item in wanted]), "softmax")
    for row, labels in zip(found, body["data"], strict=True):
        assert [item["label"] for item in labels] == [
            CLASSIFIER.labels[k] for k in np.argsort(-row)
        ]
        np.testing.assert_allclose(
            [item["score"] for item in labels], np.sort(row)[::-1], rtol=1e-6
        )
    assert response.headers["x-compute-tokens"] == str(tokens)


def test_a_reranker_has_one_label():
    _, body = classify({"input": [["a", "a"]]}, spec=RERANKER)
    assert body["data"] == [[{"score": 0.5, "label": "LABEL_0"}]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [["", ""]]}, 400, "input[0]"),
        ({"input": [["a", "b", "c"]]}, 400, "input[0]"),
        ({"input": [1]}, 400, "input[0]"),
        ({"input": "a", "model": "x"}, 404, "model"),
    ],
)
def test_errors_are_those_of_openai(body, status, param, path):
    _, answer = classify(body, path=path, status=status)
    assert answer["detail"] == answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_a_failed_batch_is_a_503_and_a_wrong_model_a_400():
    failing = FakeEmbedder(BackendError("the batch failed"), CLASSIFIER)
    ask({"input": "a"}, path="/classify", embedder=failing, status=503)
    _, answer = ask({"input": "a"}, path="/classify", status=400)
    assert "`test/fake` is an embedding model" in answer["error"]["message"]
