"""/token_classify: forms of input and of entities, and what is refused."""

from typing import get_args

import numpy as np
import pytest
from fake_embedder import CLASSIFIER, SPEC, TOKEN_CLASSIFIER, FakeEmbedder, vector
from test_server_app import fetch_json
from test_server_openai import ask

from jaxembed.data.inputs import AggregationStrategy, Text
from jaxembed.server.registry.models import Models
from jaxembed.server.routes import tei

TEXTS = ["the cat sat", "on  a mat"]
LABELS = TOKEN_CLASSIFIER.labels


def classify(inputs, status=200, spec=TOKEN_CLASSIFIER, path="/token_classify", **body):
    embedder = FakeEmbedder(spec=spec)
    return ask({"inputs": inputs} | body, path=path, embedder=embedder, status=status)


def tokens(text: str) -> list[dict]:
    """The words of a text that have another label than O."""
    found, start = [], 0
    for index, word in enumerate(text.split()):
        start = text.index(word, start)
        powers = np.exp(vector(Text(word))[: len(LABELS)])
        best = int(powers.argmax())
        if best:
            place = {"index": index, "word": word, "start": start, "end": start + len(word)}
            score = pytest.approx(powers[best] / powers.sum(), abs=1e-6)
            found.append({"entity": LABELS[best], "score": score} | place)
        start += len(word)
    return found


def test_a_text_has_a_list_of_entities_and_a_list_of_texts_a_list_of_lists():
    wanted = [tokens(text) for text in TEXTS]
    assert all(wanted)
    response, answer = classify(TEXTS)
    assert answer == wanted
    assert list(answer[0][0]) == ["entity", "score", "index", "word", "start", "end"]
    assert response.headers["x-compute-tokens"] == "6"
    assert response.headers["x-compute-characters"] == "20"
    assert classify(TEXTS[0])[1] == classify(TEXTS[0], aggregation_strategy="none")[1] == wanted[0]
    assert classify(TEXTS[:1])[1] == wanted[:1]


def test_groups_have_names_of_their_own_and_no_index():
    for strategy in get_args(AggregationStrategy)[1:]:
        _, answer = classify(TEXTS, aggregation_strategy=strategy)
        assert {one["entity_group"] for entities in answer for one in entities} == {"PER"}
        assert list(answer[0][0]) == ["entity_group", "score", "word", "start", "end"]


def test_entities_of_long_texts_are_found_in_a_thread(monkeypatch):
    wanted = classify(TEXTS)[1]
    monkeypatch.setattr(tei, "TOKENS_AT_ONCE", 0)
    assert classify(TEXTS)[1] == wanted


def test_a_long_text_is_cut_or_refused():
    response, _ = classify(["cat", "cat " * 20])
    assert response.headers["x-truncated-inputs"] == "1"
    _, answer = classify(["cat", "cat " * 20], 422, truncate=False)
    assert "must have less than 16 tokens. Given: 20" in answer["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": [[1, 2]]}, "token ids and pairs have no place in a text"),
        ({"inputs": "a", "aggregation_strategy": "best"}, "$.aggregation_strategy"),
        ({"inputs": "a", "stride": 16}, "`stride` of 16 is not supported"),
        ({"inputs": "a", "ignore_labels": ["LOC"]}, "`ignore_labels` must be ['O']"),
        ({"inputs": "a", "ignore_labels": []}, "`ignore_labels` must be ['O']"),
        ({"inputs": "a", "parameters": {"aggregation_strategy": "max"}}, "send its fields beside"),
        ({"inputs": "a", "raw_scores": True}, "`raw_scores` of true is not supported"),
        ({"inputs": ["a", ["b"]]}, "$.inputs[1]"),
    ],
)
def test_what_is_not_valid_is_refused_by_its_field(body, words):
    _, answer = classify(status=422, **body)
    assert answer["error_type"] == "Validation"
    assert words in answer["error"]


@pytest.mark.parametrize("inputs", ["", [], ["a", ""]])
def test_what_is_empty_is_refused(inputs):
    assert classify(inputs, 400)[1]["error_type"] == "Empty"


def test_a_model_of_another_task_is_named_with_its_routes():
    for spec in (SPEC, CLASSIFIER):
        _, answer = classify("a", 424, spec)
        assert "Model is not a token classifier: `test/fake` is a" in answer["error"]
    for path in ("/embed", "/predict", "/rerank"):
        body = {"query": "a", "texts": ["a"]} if path == "/rerank" else {}
        _, answer = classify("a", 424, path=path, **body)
        assert "`test/fake` is a token classifier (/token_classify)" in answer["error"]


def test_the_routes_of_hosting_platforms_choose_it_for_a_token_classifier_alone():
    wanted = tokens(TEXTS[0])
    for path in ("/", "/invocations"):
        assert classify(TEXTS[0], path=path)[1] == wanted
    _, answer = classify([], path="/vertex", instances=[{"inputs": TEXTS}, {"inputs": TEXTS[0]}])
    assert answer["predictions"] == [[wanted, tokens(TEXTS[1])], wanted]
    models = Models([FakeEmbedder(spec=TOKEN_CLASSIFIER), FakeEmbedder(spec=SPEC, name="other")])
    _, answer = ask({"inputs": ["a"]}, path="/", models=models, status=200)
    assert np.shape(answer) == (1, SPEC.dim)


def test_the_list_of_models_and_info_say_what_it_is():
    embedder = FakeEmbedder(spec=TOKEN_CLASSIFIER)
    (listed,) = fetch_json("/v1/models", embedder=embedder)[1]["data"]
    assert (listed["task"], listed["capabilities"]) == ("token_classify", ["token_classify"])
    info = fetch_json("/info", embedder=embedder)[1]
    assert info["model_type"]["token_classifier"]["label2id"] == {"O": 0, "B-PER": 1, "I-PER": 2}
