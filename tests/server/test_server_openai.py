"""POST /v1/embeddings, from JSON to vectors and back."""

import asyncio
import json

import numpy as np
import pytest
from fake_embedder import DIM, FakeEmbedder, vector

from jaxembed.config import ServerConfig
from jaxembed.data.inputs import Text, Tokens
from jaxembed.errors import BackendError, DeviceStuck, NotFinite, Overloaded, ShuttingDown
from jaxembed.preprocessing.text import TokenizationOptions
from jaxembed.server.app import create_app
from jaxembed.server.http.encoding import (
    MAX_JOINED,
    SLICE_FLOATS,
    json_items,
    json_matrix,
    json_stream,
)
from jaxembed.server.registry.models import Models


def fetch(path, method="GET", *, embedder=None, models=None, config=None, status=None, **options):
    """One request; the response and its body as bytes. Fails if its status is not the one given."""

    async def go():
        served = models or Models([embedder or FakeEmbedder()])
        client = create_app(served, config or ServerConfig()).test_client(use_cookies=False)
        response = await client.open(path, method=method, **options)  # cookies would read the host
        return response, await response.get_data(as_text=False)

    response, data = asyncio.run(go())
    assert status in (None, response.status_code), data
    return response, data


def ask(body, *, path="/v1/embeddings", raw=None, headers=None, **options):
    """One POST; the response and its body as JSON, or as bytes if it is none."""
    if raw is None:
        options |= {"json": body, "headers": headers}
    else:
        options |= {"data": raw, "headers": {"content-type": "application/json"} | (headers or {})}
    response, data = fetch(path, "POST", **options)
    return response, json.loads(data) if response.mimetype == "application/json" else data


def unit(item):
    row = vector(item)
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_a_text_becomes_one_normalised_vector(path):
    _, body = ask({"input": "hello world", "model": "test/fake"}, path=path, status=200)
    assert list(body) == ["object", "data", "model", "usage"]
    assert body["object"] == "list"
    assert body["model"] == "test/fake"
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    (item,) = body["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    np.testing.assert_allclose(item["embedding"], unit(Text("hello world")), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a", [Text("a")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2, 3], [Tokens([1, 2, 3])]),
        ([[1, 2], [3]], [Tokens([1, 2]), Tokens([3])]),
        (["a", [1, 2]], [Text("a"), Tokens([1, 2])]),
        ([{"text": "a"}, "b", {"text": "c"}], [Text("a"), Text("b"), Text("c")]),
    ],
)
def test_every_shape_of_input_is_understood(given, wanted):
    _, body = ask({"input": given})
    got = [item["embedding"] for item in body["data"]]
    np.testing.assert_allclose(got, [unit(item) for item in wanted], rtol=1e-6)
    assert [item["index"] for item in body["data"]] == list(range(len(wanted)))


@pytest.mark.parametrize("field", ["embedding_type", "encoding_type"])
@pytest.mark.parametrize("given", ["base64", ["base64"]])
def test_base64_has_other_names_at_jina(field, given):
    _, coded = ask({"input": ["a", "b"], "encoding_format": "base64"})
    assert ask({"input": ["a", "b"], field: given, "output_dtype": "float"})[1] == coded
    _, body = ask({"input": "a", field: given, "encoding_format": "float"}, status=400)
    assert f"`{field}` of base64 and `encoding_format` of float" in body["detail"]


@pytest.mark.parametrize("given", [0, None, 3])
def test_fewer_dimensions_are_renormalised(given):
    _, body = ask({"input": "a", "dimensions": given})
    assert np.linalg.norm(body["data"][0]["embedding"]) == pytest.approx(1)
    assert len(body["data"][0]["embedding"]) == (given or DIM)


@pytest.mark.parametrize("field", ["dimensions", "output_dimension"])
@pytest.mark.parametrize("given", [-1, DIM + 1])
def test_impossible_dimensions_name_the_limit(field, given):
    _, body = ask({"input": "a", field: given}, status=400)
    assert body["error"]["param"] == field
    assert f"from 1 to {DIM}, the size of this model's embeddings. Given: {given}" in body["detail"]


def test_served_names_and_none_are_answered_by_the_first_and_others_are_told_them():
    models = Models([FakeEmbedder()], {"test/fake": ("mine", "alias")})
    for model in (None, "", "mine", "alias"):
        _, body = ask({"input": "a", "model": model}, models=models)
        assert body["model"] == "mine"
    _, body = ask({"input": "a", "model": "gpt"}, models=models, status=404)
    assert body["error"]["code"] == "model_not_found"
    assert body["error"]["message"] == "the model `gpt` does not exist; this server has mine, alias"


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        (b"{", None, "the body is incomplete"),
        (b"", None, "the body is empty"),
        (b'{"input": NaN}', None, "malformed"),
        (b'{"input": "a"} x', None, "trailing"),
        (b'{"input": "\xff"}', None, "UTF-8"),
        (b'{"input": "\\ud800"}', None, "lone surrogate"),
        (b'{"input": "a\\ud800b"}', None, "lone surrogate"),
        (b'{"x": ' + b"[" * 100_000, None, "deeply"),
        (b"[]", None, "Expected `object`"),
        (b"{}", "input", "missing required field `input`"),
        (b'{"input": 3}', "input", "Expected `str | array`"),
        (b'{"input": "a", "encoding_format": "hex"}', "encoding_format", "one of 'float', 'b"),
        (b'{"input": ["a", 1]}', "input[1]", "at `$.input[1]`"),
        (b'{"input": [1, "a"]}', "input[1]", "at `$.input[1]`"),
        (b'{"input": [{"text": ""}]}', "input[0]", "`input[0]` cannot be empty"),
        (b'{"input": ["a", {"image": "u"}]}', None, "takes texts and no images"),
        (b'{"input": [{"text": "", "image": "u"}]}', "input[0]", "with `text`, `image` or both"),
        (b'{"input": [[1], 2]}', "input[1]", "at `$.input[1]`"),
        (b'{"input": [-1]}', "input[0]", ">= 0"),
        (b'{"input": [4294967296]}', "input[0]", "<= 4294967295"),
        (b'{"input": ""}', "input", "`input` cannot be empty"),
        (b'{"input": []}', "input", "`input` cannot be empty"),
        (b'{"input": [[1], []]}', "input[1]", "`input[1]` cannot be empty"),
        (b'{"input": ["a", ""]}', "input[1]", "`input[1]` cannot be empty"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "messages[0].content", "be empty"),
    ],
)
def test_a_bad_request_is_a_400_naming_the_field(raw, param, message):
    embedder = FakeEmbedder()
    _, body = ask(None, raw=raw, embedder=embedder, status=400)
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert not embedder.requested


def test_too_many_inputs_name_the_flag():
    config = ServerConfig(max_client_batch_size=2)
    _, body = ask({"input": ["a", "b", "c"]}, config=config, status=400)
    assert body["error"]["message"].startswith("batch size 3 > maximum allowed batch size 2")
    assert "--max-client-batch-size" in body["error"]["message"]


@pytest.mark.parametrize(
    ("failure", "status", "code", "err"),
    [
        (Overloaded("Model is overloaded", retry_after_s=3), 429, "overloaded", "overloaded"),
        (ShuttingDown("shutting down", retry_after_s=3), 503, "shutting_down", "overloaded"),
        (DeviceStuck(), 503, "device_stuck", "inference"),
        (BackendError("the batch failed"), 503, None, "inference"),
        (NotFinite("input 0 is not finite"), 503, None, "inference"),
        (ZeroDivisionError("secret"), 500, None, "inference"),
    ],
)
def test_a_failure_has_its_status_and_is_counted(failure, status, code, err):
    embedder = FakeEmbedder(failure)
    response, body = ask({"input": "a"}, embedder=embedder, status=status)
    assert body["error"]["code"] == code
    assert "secret" not in body["error"]["message"]
    if isinstance(failure, Overloaded):
        assert response.headers["retry-after"] == "3"
    else:
        assert response.headers["x-request-id"] in body["error"]["message"]
    assert (response.headers.get("connection") == "close") == isinstance(failure, ShuttingDown)
    assert f'te_request_failure{{err="{err}"}} 1.0' in embedder.telemetry.exposition().decode()


def test_too_long_is_an_error_only_without_truncation():
    texts = ["a", " ".join("x" * 20)]
    response, body = ask({"input": texts})
    assert response.headers["x-truncated-inputs"] == "1"
    assert body["usage"]["prompt_tokens"] == 17
    _, body = ask({"input": texts, "truncate": False}, status=400)
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "input[1]"
    assert "`input[1]` must have less than 16 tokens" in body["error"]["message"]
    _, body = ask({"input": texts[1], "truncate": False}, status=400)
    assert body["error"]["param"] == "input"


def test_a_request_is_counted_and_timed():
    embedder = FakeEmbedder()
    ask({"input": ["a", "b"]}, embedder=embedder)
    text = embedder.telemetry.exposition().decode()
    for line in (
        'te_request_count{method="batch"} 1.0',
        'te_request_success{method="batch"} 1.0',
        "te_request_duration_count 1.0",
        "te_request_queue_duration_sum 0.002",
        'jaxembed_stage_seconds_count{stage="decode"} 1.0',
        'jaxembed_stage_seconds_count{stage="encode"} 1.0',
    ):
        assert line in text


async def joined(parts) -> bytes:
    return b"".join([part async for part in parts])


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64])
def test_slices_join_to_the_whole(count):
    rows = np.random.default_rng(0).normal(size=(count, SLICE_FLOATS // 8)).astype(np.float32)
    got = json.loads(asyncio.run(joined(json_matrix(rows))))
    np.testing.assert_array_equal(np.array(got, np.float32).reshape(rows.shape), rows)


async def test_the_loop_gets_a_turn_between_slices():
    turns = []

    async def tick():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await joined(json_items(4, SLICE_FLOATS, lambda start, stop: [0]))
    ticking.cancel()
    assert len(turns) >= 3


async def test_a_large_answer_leaves_as_it_is_made_and_a_small_one_as_a_whole():
    made = []

    async def parts(count):
        for k in range(count):
            made.append(k)
            yield bytes(MAX_JOINED // 4)

    small = await json_stream(parts(3))
    assert small.headers["content-length"] == str(len(await small.read()))
    made.clear()
    large = await json_stream(parts(40))
    assert "content-length" not in large.headers
    assert len(made) == 4  # the others wait for the client
    assert len(await large.read()) == 10 * MAX_JOINED


def test_a_body_that_is_compressed_is_told_so():
    _, answer = ask(None, raw=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"}, status=400)
    assert "`Content-Encoding: gzip`" in answer["error"]["message"]


TIKTOKEN = [7, 8, 9]
FAR = [791, 8415, 13]  # beyond the tiny model's ids


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
@pytest.mark.parametrize("given", [TIKTOKEN, FAR, [[2, 7, 3], TIKTOKEN], [[2, 7, 3], FAR]])
def test_token_ids_of_another_tokenizer_are_refused_with_both_ways_out(embedder, path, given):
    _, answer = ask({"input": given}, path=path, embedder=embedder.model, status=400)
    assert answer["error"]["param"] == ("input" if len(given) == 3 else "input[1]")
    assert "check_embedding_ctx_length=False" in answer["detail"]
    assert "--accept-bare-token-ids" in answer["detail"]
    assert "[2] before and [3] after" in answer["detail"]


def test_token_ids_of_the_models_own_tokenizer_give_the_vector_of_the_text(embedder):
    options = TokenizationOptions("", True, "right")
    planes = embedder.model.main.processor.encode([Text("the cat")], options).work.planes
    _, answer = ask({"input": ["the cat", planes["ids"].tolist()]}, embedder=embedder.model)
    assert answer["data"][0]["embedding"] == answer["data"][1]["embedding"]


def test_bare_token_ids_run_where_a_flag_allows_them_and_on_routes_of_tei(embedder):
    config = ServerConfig(accept_bare_token_ids=True)
    ask({"input": [TIKTOKEN]}, embedder=embedder.model, config=config, status=200)
    ask({"inputs": [TIKTOKEN]}, path="/embed", embedder=embedder.model, status=200)
