"""HTTP/1.1 as Http1 reads and writes it, with an app that repeats what it was asked."""

import asyncio
import json
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypothesis import given
from hypothesis import strategies as st

from jaxembed.server.http.http1 import Http1

LIMIT = 2000  # bytes of a head


async def repeat(scope, receive, send) -> None:
    """An app that answers with the request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    names = [name.decode() for name, _ in scope["headers"]]
    asked = [scope["method"], scope["path"], names, body.decode()]
    answer = json.dumps(asked).encode()
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


class Connected:
    """A connection of Http1 to an app, without a socket."""

    def __init__(self, app):
        config = Config()
        config.h11_max_incomplete_size = LIMIT
        self.sent, self.is_closed, self.tasks = b"", False, []
        tasks = SimpleNamespace(spawn=self._spawn)
        context = WorkerContext(None)
        self.protocol = Http1(
            ASGIWrapper(app), config, context, tasks, {}, False, ("x", 1), ("y", 2), self._send
        )

    async def _send(self, event) -> None:
        if isinstance(event, RawData):
            self.sent += event.data
        self.is_closed |= isinstance(event, Closed)
        assert isinstance(event, RawData | Closed | Updated)

    def _spawn(self, call, *arguments):
        self.tasks.append(asyncio.create_task(call(*arguments)))

    async def ask(self, *pieces: bytes) -> bytes:
        """Send these bytes, and return all that was sent back."""
        for piece in pieces:
            await self.protocol.handle(RawData(piece))
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.sent


def ask(*pieces: bytes, app=repeat) -> tuple[bytes, bool]:
    """What is sent back by an app, and whether the connection was closed."""

    async def asked():
        connected = Connected(app)
        return await connected.ask(*pieces), connected.is_closed

    return asyncio.run(asked())


def bodies(sent: bytes) -> list:
    """The requests that the responses repeat."""
    found = []
    while sent:
        head, _, rest = sent.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        found.append(json.loads(rest[:length]))
        sent = rest[length:]
    return found


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2;ext=1\r\nab\r\n1\r\nc\r\n0\r\nTrailer: t\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"
REQUESTS = [
    (b"GET /a%20b?c HTTP/1.1\r\nHost: x\r\n\r\n", ["GET", "/a b", ["host"], ""]),
    (
        b"POST / HTTP/1.1\r\nhOst: x\r\nContent-Length: 3\r\n\r\nabc",
        ["POST", "/", ["host", "content-length"], "abc"],
    ),
    (
        b"POST /c HTTP/1.1\r\nHost: x\r\n" + CHUNKED,
        ["POST", "/c", ["host", "transfer-encoding"], "abc"],
    ),
    (
        b"POST /u HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Length: 3\r\n\r\nabc",
        ["POST", "/u", ["host", "connection", "http2-settings", "content-length"], "abc"],
    ),
    (
        b"\r\nGET /u HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        ["GET", "/u", ["host", "connection"], ""],
    ),
]


@given(
    st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_requests_in_any_pieces_are_answered_in_order(requests, cuts):
    data = b"".join(request for request, _ in requests)
    ends = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(ends)]
    sent, is_closed = ask(*pieces)
    assert bodies(sent) == [answer for _, answer in requests]
    assert not is_closed


def test_byte_by_byte():
    data = b"".join(request for request, _ in REQUESTS)
    sent, _ = ask(*(data[k : k + 1] for k in range(len(data))))
    assert bodies(sent) == [answer for _, answer in REQUESTS]


CLOSE = b"HTTP/1.1\r\nHost: x\r\nConnection: a, Close\r\n"


@pytest.mark.parametrize("head", [b"HTTP/1.0\r\n", CLOSE])
@pytest.mark.parametrize("then", [REQUESTS[0][0], b"\r\n", b"garbage", b""])
def test_the_last_request_of_a_connection_closes_it(head, then):
    sent, is_closed = ask(b"GET / " + head + b"\r\n" + then)
    assert is_closed
    assert sent.startswith(b"HTTP/1.1 200 ")
    assert sent.count(b"HTTP/1.1") == 1
    assert b"connection: close\r\n" in sent


PROXY = b"GET / HTTP/1.1\r\nHost: x\r\nProxy-Connection: close\r\n\r\n"
TRAILER = CHUNKED.replace(b"Trailer: t", b"Connection: close")


@pytest.mark.parametrize("first", [PROXY, b"POST / HTTP/1.1\r\nHost: x\r\n" + TRAILER])
def test_a_connection_is_not_left_open_when_the_parser_takes_it_for_closed(first):
    sent, is_closed = ask(first, REQUESTS[0][0])
    assert len(re.findall(rb"HTTP/1.1 200", sent)) == 1
    assert is_closed


def test_white_space_around_a_value_is_no_part_of_it():
    head = b"POST / HTTP/1.1\r\nHost:\tx \t\r\nTransfer-Encoding: chunked  \r\n\r\n"
    sent, is_closed = ask(head + b"1\r\na\r\n0\r\n\r\n")
    assert bodies(sent) == [["POST", "/", ["host", "transfer-encoding"], "a"]]
    assert not is_closed


@pytest.mark.parametrize("end", [b"", b"\r\n"])
def test_the_number_of_headers_is_limited(end):
    sent, is_closed = ask(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 300 + end)
    assert sent.startswith(b"HTTP/1.1 431 ")
    assert is_closed


def test_what_is_no_request_is_refused_after_the_responses_to_those_before():
    sent, is_closed = ask(REQUESTS[0][0] + REQUESTS[1][0] + b"garbage")
    assert re.findall(rb"HTTP/1.1 (\d+)", sent) == [b"200", b"200", b"400"]
    assert is_closed


def test_a_client_that_waits_for_permission_to_send_a_body_gets_it():
    head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n"
    sent, _ = ask(head, b"a")
    assert sent.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


def parts_of(*messages: dict):
    async def app(scope, receive, send) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


START = {"type": "http.response.start", "status": 200, "headers": []}
PART = {"type": "http.response.body", "body": b"ab", "more_body": True}
LAST = {"type": "http.response.body", "body": b"c"}


@pytest.mark.parametrize(
    ("head", "messages", "body", "closes"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            [PART, LAST],
            b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
            False,
        ),
        (b"GET / HTTP/1.0\r\n\r\n", [PART, LAST], b"abc", True),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", [PART, LAST], b"", False),
        (REQUESTS[0][0], [PART], b"2\r\nab\r\n", True),  # then it fails
    ],
)
def test_a_response_without_a_length_is_sent_in_chunks_or_ends_with_the_connection(
    head, messages, body, closes
):
    sent, is_closed = ask(head, app=parts_of(START, *messages))
    response_head, _, rest = sent.partition(b"\r\n\r\n")
    assert (rest, is_closed) == (body, closes)
    assert (b"transfer-encoding: chunked" in response_head) == (b"HTTP/1.0" not in head)


def test_a_response_header_with_a_line_break_is_not_sent():
    split = {**START, "headers": [(b"x-prompt-name", b"a\r\nset-cookie: b")]}
    sent, is_closed = ask(REQUESTS[0][0], app=parts_of(split, LAST))
    assert sent.startswith(b"HTTP/1.1 500 ")
    assert b"cookie" not in sent
    assert is_closed


@pytest.mark.parametrize("rest", [b"1;" + b"e" * 5000, b"0\r\n" + b"T: t\r\n" * 1000])
def test_what_belongs_to_no_body_is_limited(rest):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    gone = []

    async def app(scope, receive, send) -> None:
        while (message := await receive())["type"] == "http.request":
            pass
        gone.append(message["type"])

    sent, is_closed = ask(head, *(rest[k : k + 500] for k in range(0, len(rest), 500)), app=app)
    assert sent.startswith(b"HTTP/1.1 431 ")
    assert is_closed
    assert gone == ["http.disconnect"]


def test_an_answer_before_the_end_of_its_body_closes_the_connection():
    """What follows would be taken for the next request."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    whole = {**START, "headers": [(b"content-length", b"1")]}
    sent, is_closed = ask(head + b"a", app=parts_of(whole, LAST))
    assert sent.endswith(b"\r\n\r\nc")
    assert b"connection: close\r\n" in sent
    assert is_closed
