"""Large bodies are decoded in slices, to what msgspec makes of them in one call."""

import asyncio
import gc
import json
import tracemalloc
from array import array
from contextlib import contextmanager

import msgspec
import pytest
from fake_embedder import CLASSIFIER, ROUTES, FakeEmbedder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_server_openai import ask

from jaxembed.config import ServerConfig
from jaxembed.engine.admission import Admission, Capacity
from jaxembed.errors import InvalidInput
from jaxembed.memory import MIB
from jaxembed.server.errors import BadField, BadJson
from jaxembed.server.pipeline import decoding
from jaxembed.server.pipeline.decoding import AT_ONCE, WINDOW, decode
from jaxembed.server.routes.cloud import RouteFields, VertexRequest
from jaxembed.server.routes.cohere import CohereEmbedRequest
from jaxembed.server.routes.openai import EmbeddingsRequest
from jaxembed.server.routes.rerank import ClassifyRequest, DocumentsRequest
from jaxembed.server.routes.tei import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
)

KINDS = [EmbeddingsRequest, CohereEmbedRequest, ClassifyRequest, DocumentsRequest, VertexRequest]
KINDS += [EmbedRequest, EmbedAllRequest, SimilarityRequest, TokenizeRequest, DecodeRequest]
KINDS += [PredictRequest, RerankRequest, RouteFields]


def run(data, kind, max_count=2**40, at_once=0, decode=decode):
    bodies = []  # not what the task returns: asyncio would make a text of it

    def check(place, count):
        if count > max_count:
            raise InvalidInput("too many")

    async def go():
        bodies.append(await decode(data, kind, check, at_once))

    asyncio.run(go())
    return bodies[0]


def filled(unit, opening, closing, size=8 * MIB):
    return opening + unit * (size // len(unit)) + closing


text = st.text(max_size=12) | st.sampled_from(["", "\\", '"', '\\"', "],[", "ä\ud7ff😀", "\n"])
ids = st.integers(0, 2**32 - 1)
wrong = st.none() | st.booleans() | st.floats(-9, 9) | st.integers(-3, 2**70)
item = st.one_of(
    text,
    ids,
    st.lists(ids, max_size=6),
    st.lists(text, max_size=6),
    st.fixed_dictionaries({"text": text}, optional={"x": st.lists(st.lists(wrong))}),
)
part = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])}, optional={"text": text, "image_url": text}
)
value = st.one_of(
    text,
    st.lists(text),
    st.lists(ids),
    st.lists(st.lists(ids)),
    st.lists(st.lists(text)),
    st.lists(item),
    st.lists(item | wrong),
    wrong,
    st.lists(st.fixed_dictionaries({"content": st.lists(part | wrong)})),
    st.fixed_dictionaries({"source_sentence": text, "sentences": st.lists(text)}),
    st.dictionaries(text, item | wrong, max_size=3),
)
layout = st.sampled_from([{}, {"indent": 3}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@st.composite
def bodies(draw, kind):
    names = [field.name for field in msgspec.structs.fields(kind)]
    required = {field.name: value for field in msgspec.structs.fields(kind) if field.required}
    others = {name: value for name in [*names, "other"] if name not in required}
    body = draw(st.fixed_dictionaries(required, optional=others))
    return json.dumps(body, **draw(layout)).encode()


def outcome(make):
    """What `make` returns, as JSON, or the class of its error; JSON may also be of another shape
    where it breaks."""
    try:
        return msgspec.json.encode(make(), enc_hook=list)  # arrays of token ids as lists
    except InvalidInput as error:
        return type(error)


def at_once(data, kind):
    """What msgspec makes of it in one call. A list that starts with an id may hold ids only, which
    routes find out afterwards."""
    body = run(data, kind, at_once=len(data))
    for field in msgspec.structs.fields(kind):
        items = getattr(body, field.name)
        kinds = [type(one) for one in items] if isinstance(items, list) else []
        if kinds[:1] == [int] and set(kinds) != {int}:
            raise BadField("mixed")
    return body


def assert_same_outcome(data, kind):
    """Which of two faults is told may differ."""
    found, expected = outcome(lambda: run(data, kind)), outcome(lambda: at_once(data, kind))
    if isinstance(expected, type):
        assert isinstance(found, type)
    else:
        assert found == expected


@pytest.fixture(name="tiny")
def tiny_slices(monkeypatch):
    """Cut what is longer than a few bytes."""
    monkeypatch.setattr(decoding, "WINDOW", 7)
    monkeypatch.setattr(decoding, "LONG_IDS", 2)


sliced = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)
kinds = st.sampled_from(KINDS)
parts = st.sampled_from([b"", b",", b'"', b"\\", b"]", b"}", b"[", b"\xff", b" ", b"0"])


@sliced
@given(data=st.data(), kind=kinds)
def test_slices_make_what_one_call_makes(tiny, kind, data):
    assert_same_outcome(data.draw(bodies(kind)), kind)


@sliced
@given(data=st.data(), kind=kinds, part=parts)
def test_slices_refuse_what_one_call_refuses(tiny, kind, part, data):
    body = data.draw(bodies(kind))
    i = data.draw(st.integers(0, len(body)))
    assert_same_outcome(body[:i] + part + body[i + 1 :], kind)


@pytest.mark.parametrize(
    "data",
    [
        b'{"inputs": ["", "", 13927222515924992]',
        b'{"inputs": [4294967296], "inputs": "a"}',
        b'{"inputs": [1, 4294967296], "inputs": [2]}',
        b'{"inputs": [4294967296], "x": "\xff"}',
        b'{"inputs": [4294967296], "x": ' + b"[" * 5000,
    ],
)
def test_a_number_out_of_range_before_another_fault_is_refused(data):
    with pytest.raises((BadField, BadJson)):
        run(data, EmbedRequest, at_once=AT_ONCE)


def test_token_ids_come_as_arrays_if_they_are_many():
    body = run(b'{"inputs": [1, 2, 4294967295]}', EmbedRequest)
    assert body.inputs == array("I", [1, 2, 2**32 - 1])
    many = [7] * 300
    body = run(json.dumps({"inputs": [[1], many, "a"]}).encode(), EmbedRequest)
    assert body.inputs == [[1], array("I", many), "a"]
    assert run(b" " * AT_ONCE + b'{"inputs": []}', EmbedRequest).inputs == []


def test_the_last_of_two_equal_keys_counts():
    data = b'{"inputs": ["a"], "truncate": false, "inputs": ["b"]}'
    assert run(data, EmbedRequest) == run(data, EmbedRequest, at_once=AT_ONCE)
    assert run(data, EmbedRequest).inputs == ["b"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("data", [b'{"inputs": [["a"], ["b"]]}', b'{"inputs": [1, {}]}'])
def test_the_collector_is_left_as_it_was(data, enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        outcome(lambda: run(data, PredictRequest))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


COMPARED = '{"source_sentence": "a", "sentences": [%s]}'
FAULTS = [
    (EmbedRequest, '"inputs": 3'),
    (EmbedRequest, '"inputs": [%s, 1.5]'),
    (EmbedRequest, '"inputs": [%s, -1]'),
    (EmbedRequest, '"inputs": [%s, [1, 4294967296]]'),
    (EmbedRequest, '"inputs": [%s, [1, "a"]]'),
    (EmbedRequest, '"inputs": [%s], "truncation_direction": "up"'),
    (EmbedRequest, '"inputs": [%s], "dimensions": -1'),
    (EmbedRequest, '"truncate": true'),
    (EmbeddingsRequest, '"input": [%s], "encoding_format": "hex"'),
    (SimilarityRequest, '"inputs": {"sentences": [%s]}'),
    (SimilarityRequest, '"inputs": {"source_sentence": "a", "sentences": [%s, 3]}'),
    (SimilarityRequest, f'"inputs": {COMPARED}, "parameters": {{"truncation_direction": "up"}}'),
    (TokenizeRequest, '"inputs": [%s, 3]'),
    (DecodeRequest, '"ids": ["a"]'),
    (DecodeRequest, '"ids": [1, 4294967296]'),
    (PredictRequest, '"inputs": [%s, ["a", 3]]'),
    (RerankRequest, '"query": "a", "texts": [%s, ["a"]]'),
    (DocumentsRequest, '"query": "a", "documents": [%s, {"x": 3}]'),
    (DocumentsRequest, '"query": "a", "documents": [%s, {"text": 3}]'),
    (VertexRequest, '"instances": {}'),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_a_bad_field_has_the_same_words_in_a_large_body(kind, fault):
    """Large because of a long item before it, because of many, and because of blanks."""

    def refusal(items, blanks=""):
        body = "{" + fault.replace("%s", items) + blanks + "}"
        with pytest.raises(BadField) as caught:
            run(body.encode(), kind, at_once=AT_ONCE)
        return str(caught.value), caught.value.field

    message, field = refusal('"a"')
    assert refusal('"' + "a" * AT_ONCE + '"', " " * AT_ONCE) == (message, field)
    many, _ = refusal(",".join(['"a"'] * AT_ONCE), " " * AT_ONCE)
    assert many == message.replace("[1]", f"[{AT_ONCE}]", "%s" in fault)


@pytest.mark.parametrize(
    "data",
    [
        b'{"inputs": ["a" "b"]}',
        b'{"inputs": ["a",]}',
        b'{"inputs": ["a"]',
        b'{"inputs": ["a"]} x',
        b'{"inputs": ["\xff"]}',
        b'{"inputs": ["\\ud800"]}',
        b'{"inputs": [01]}',
        b'{"inputs": ["a"], "other": [nul]}',
        b'{"inputs": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_broken_json_is_told_so_in_a_large_body(data):
    with pytest.raises(BadJson) as large:
        run(b" " * AT_ONCE + data, EmbedRequest, at_once=AT_ONCE)
    if b"[[" not in data:  # at once the third bracket is too many
        with pytest.raises(BadJson) as small:
            run(data, EmbedRequest, at_once=AT_ONCE)
        words = [str(error.value).partition(" (byte")[0] for error in (large, small)]
        assert words[0].replace("escaped character", "escape character in string") == words[1]


def test_a_lone_surrogate_in_a_large_body_is_told_of():
    data = b" " * AT_ONCE + b'{"inputs": ["\\ud83dother"}'
    with pytest.raises(BadJson, match="an escape sequence is incomplete, or is a lone surrogate"):
        run(data, EmbedRequest, at_once=AT_ONCE)


def test_a_free_form_field_is_bounded():
    spans = b'"relevant_spans": {"a": [' + b"[]," * AT_ONCE + b"1]}"
    with pytest.raises(BadField, match=f"at most {AT_ONCE} bytes of JSON, got") as caught:
        run(b'{"query": "a", "documents": ["b"], %s}' % spans, DocumentsRequest, at_once=AT_ONCE)
    assert caught.value.field == "relevant_spans"


HOSTILE = [
    pytest.param(kind, filled(unit, *ends), id=f"{kind.__name__} {unit.decode()}")
    for kind, unit, ends in [
        (EmbedRequest, b"[],", (b'{"inputs": [', b"[]]}")),
        (EmbedRequest, b'"",', (b'{"inputs": [', b'""]}')),
        (EmbedRequest, b"[1],", (b'{"inputs": ["a", ', b"[1]]}")),
        (EmbedRequest, b"[", (b'{"inputs": ', b"}")),
        (EmbedRequest, b"[1,[", (b'{"inputs": ', b"}")),
        (SimilarityRequest, b'"",', (b'{"inputs":{"source_sentence":"","sentences":[', b'""]}}')),
        (PredictRequest, b'"",', (b'{"inputs": [[', b'""]]}')),
        (ClassifyRequest, b'"",', (b'{"input": ["a", [', b'""]]}')),
        (RerankRequest, b'"",', (b'{"query": "", "texts": [', b'""]}')),
        (DocumentsRequest, b'{"text":""},', (b'{"query": "", "documents": [', b'""]}')),
        (DocumentsRequest, b"[],", (b'{"query":"","documents":[],"relevant_spans":{"":[', b"1]}}")),
        (DocumentsRequest, b'"",', (b'{"query":"","documents":[],"rank_fields":[', b'""]}')),
        (DecodeRequest, b"[1],", (b'{"ids": [', b"[1]]}")),
        (VertexRequest, b"{},", (b'{"instances": [', b"{}]}")),
    ]
]


class Loop:
    """Decodes beside a task that counts the turns of the loop, and notes what msgspec builds."""

    def __init__(self, monkeypatch):
        self.turns = 0
        self.slices: list[int] = []
        decode_once = msgspec.json.decode

        def decode_noted(data, *, type):
            if not getattr(type, "__struct_fields__", ()):  # a skim builds no lists
                self.slices.append(memoryview(data).nbytes)
            return decode_once(data, type=type)

        monkeypatch.setattr(msgspec.json, "decode", decode_noted)

    def run(self, *arguments):
        return run(*arguments, decode=self._decode)

    async def _decode(self, *arguments):
        ticker = asyncio.create_task(self._count())
        try:
            return await decode(*arguments)
        finally:
            ticker.cancel()

    async def _count(self):
        while True:
            self.turns += 1
            await asyncio.sleep(0)


@pytest.fixture(name="loop")
def counted_loop(monkeypatch):
    return Loop(monkeypatch)


@contextmanager
def max_allocated(count):
    """Fails if more bytes than that are allocated at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("kind", "data"), HOSTILE)
def test_what_is_refused_is_not_built(loop, kind, data):
    """At once 8 MiB of `[],` are 2,800,000 lists."""
    with max_allocated(1 * MIB), pytest.raises(InvalidInput):
        loop.run(data, kind, 2048)
    assert sum(loop.slices) < 4 * WINDOW


def test_token_ids_take_four_bytes_each_while_they_are_read_and_no_list_among_them_is_built():
    data = filled(b"1,", b'{"inputs": [', b"1]}")
    with max_allocated(20 * MIB):  # a list would take 32
        body = run(data, EmbedRequest)
    assert len(body.inputs) == 4 * MIB + 1
    data = filled(b"[],", b'{"inputs": [1, [', b"1]]}")
    refusal = "a token id like the items before it, got `array`"
    with max_allocated(len(data) + 1 * MIB), pytest.raises(BadField, match=refusal):
        run(data, EmbedRequest)  # with one copy of the JSON


@pytest.mark.parametrize("unit", [b"[],", b'"",', b"1,", b"[1,2],", b'"a\\"b",'])
def test_what_is_accepted_is_built_in_slices_with_turns_of_the_loop_between(loop, unit):
    data = filled(unit, b'{"inputs": [', unit.removesuffix(b",") + b"]}", MIB)
    body = loop.run(data, EmbedRequest)
    assert len(body.inputs) == data.count(unit) + 1
    assert max(loop.slices) <= 2 * WINDOW + 2
    assert loop.turns >= len(loop.slices) >= len(data) // (2 * WINDOW)


def test_a_pair_of_millions_of_texts_is_refused_by_its_place():
    raw = filled(b'"",', b'{"inputs": [["a"], [', b'""]]}')
    for limit in (2048, 0):
        asked = {"embedder": FakeEmbedder(spec=CLASSIFIER), "raw": raw}
        config = ServerConfig(max_client_batch_size=limit)
        _, body = ask(None, path="/predict", config=config, status=422, **asked)
        assert "one text or a pair, got more than two texts - at `$.inputs[1]`" in body["error"]


def test_any_number_of_inputs_ends_where_their_memory_could_never_be_had():
    raw = filled(b"[],", b'{"inputs": [', b"[]]}")
    config = ServerConfig(max_client_batch_size=0)
    embedder = FakeEmbedder()
    embedder.admission = Admission(Capacity(1000, 100_000, 48 * MIB), 0, lambda: 0.0)
    _, body = ask(None, path="/embed", raw=raw, embedder=embedder, config=config, status=422)
    count = int(body["error"].split()[0])
    assert 48 * 1024 < count < 48 * 1024 + 2 * WINDOW // 3  # the rest of them is not built
    assert "--max-queue-bytes" in body["error"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_large_body_is_answered_as_a_small_one(path):
    body, spec = ROUTES[path]
    raw = json.dumps(body).encode()
    (_, small), (_, large) = (
        ask(None, path=path, embedder=FakeEmbedder(spec=spec), raw=raw + blanks, status=200)
        for blanks in (b"", b" " * AT_ONCE)
    )
    if isinstance(small, dict):  # what is of one request
        large.update({name: small[name] for name in ("id", "created") if name in small})
    assert large == small


def test_a_long_object_holds_no_more_than_a_short_one():
    for size in (1, 4 * WINDOW):
        body = json.dumps({"input": [{"text": "", "image": "A" * size}]}).encode()
        with pytest.raises(BadField, match=r"neither empty - at `\$\.input\[0\]`"):
            run(body, EmbeddingsRequest)
