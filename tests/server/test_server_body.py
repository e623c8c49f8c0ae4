"""The body of a request as it arrives, and its answer as it leaves: what is kept of them."""

import asyncio
import contextlib

import pytest
from fake_embedder import FakeEmbedder

from jaxembed.config import ServerConfig
from jaxembed.engine.admission import RESERVE_DIVISOR, SMALL_DIVISOR, Admission, Capacity
from jaxembed.memory import KIB, MIB
from jaxembed.server.app import create_app
from jaxembed.server.http import exchange
from jaxembed.server.http.exchange import COPIES, Body
from jaxembed.server.pipeline import body as server_body
from jaxembed.server.registry.models import Models
from jaxembed.server.server import Server

PIECE = bytes(64 * KIB)


class Client:
    """One request as an ASGI server hands it over: a body without an end, or the one given."""

    def __init__(self, app: Server, method: str, path: str, body: bytes | None = None):
        self.app = app
        self.scope = {
            "type": "http",
            "http_version": "2",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "extensions": {},
        }
        self.sent: list[dict] = []
        self.received = 0  # bytes of the body that the server took
        self.max_held = 0
        self.reads = asyncio.Event()  # whether the client reads the answer
        self.reads.set()
        self._body = body

    async def ask(self) -> int:
        """The status of the answer."""
        await self.app(self.scope, self._receive, self._send)
        return self.sent[0]["status"]

    async def _receive(self) -> dict:
        await asyncio.sleep(0)
        self.max_held = max(self.max_held, self.app.capacity.bytes)
        if self._body is None:
            self.received += len(PIECE)
            return {"type": "http.request", "body": PIECE, "more_body": True}
        if self.received:
            await asyncio.Event().wait()  # connected, and done
        self.received += len(self._body)
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: dict) -> None:
        await self.reads.wait()
        self.sent.append(message)


@pytest.fixture(name="app")
def app_fixture() -> Server:
    embedder = FakeEmbedder()
    embedder.admission = Admission(Capacity(1000, 100_000, 16 * MIB), 0, lambda: 0.0)
    return create_app(Models([embedder]), ServerConfig())


@contextlib.asynccontextmanager
async def running(coroutine):
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns(count: int = 5000) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/metrics", 200), ("GET", "/info", 200), ("POST", "/nowhere", 404)],
)
async def test_a_body_that_nobody_reads_is_not_kept(app, monkeypatch, method, path, status):
    monkeypatch.setattr(exchange, "MAX_DISCARDED", 8 * MIB)
    client = Client(app, method, path)
    client.reads.clear()  # nor does the answer get away
    async with running(client.ask()) as asking:
        await turns()
        assert not asking.done()
        assert client.received <= 8 * MIB + 4 * len(PIECE)  # nor is it read for ever
        assert client.max_held <= COPIES * len(PIECE)  # of its answer
        client.reads.set()
        await asking
    assert client.sent[0]["status"] == status
    assert app.capacity.bytes == 0


@pytest.mark.parametrize(("size", "held", "status"), [(1, 7, 429), (4, 0, 422)])  # 422: for good
async def test_a_body_without_room_is_refused_and_nothing_of_it_is_kept(app, size, held, status):
    with app.capacity.request() as one, app.capacity.request() as other:
        for reservation in (one, other):
            reservation.charge(held * MIB)
        body = b'{"inputs": "%s"}' % bytes(size * MIB).hex().encode()
        client = Client(app, "POST", "/embed", body)
        assert await client.ask() == status
        assert b"--max-queue-bytes" in client.sent[1]["body"]
        assert app.capacity.bytes == 2 * held * MIB


@contextlib.contextmanager
def full(capacity: Capacity):
    """All of it held, to the last byte: by one request and many small ones."""
    small = capacity.max_bytes // SMALL_DIVISOR
    with contextlib.ExitStack() as stack:
        stack.enter_context(capacity.request()).charge(
            capacity.max_bytes // RESERVE_DIVISOR * (RESERVE_DIVISOR - 1)
        )
        while left := capacity.max_bytes - capacity.bytes:
            stack.enter_context(capacity.request()).charge(min(small, left))
        yield


async def test_a_large_answer_without_room_is_503_and_says_when_to_come_back(app, monkeypatch):
    monkeypatch.setattr(exchange, "SMALL_ANSWER", 10)
    with full(app.capacity):
        client = Client(app, "GET", "/info", b"")
        status, headers = await client.ask(), dict(client.sent[0]["headers"])
    assert status == 503
    assert headers[b"retry-after"] == b"1"
    assert b"x-request-id" in headers
    assert app.capacity.bytes == 0


async def test_a_refused_client_that_pauses_is_not_waited_for(app, monkeypatch):
    monkeypatch.setattr(server_body, "DISCARD_S", 0.01)
    client, pieces = Client(app, "POST", "/no-such-route"), [PIECE] * 20

    async def receive():
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    client._receive = receive
    assert await client.ask() == 404
    assert not pieces


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [("GET", "/health", b"", 200), ("POST", "/embed", b'{"inputs": "a"}', 429)],
)
async def test_a_full_server_answers_probes_and_refuses_the_rest(app, method, path, body, status):
    client = Client(app, method, path, body)
    with full(app.capacity):
        assert await client.ask() == status
    assert any(message.get("body") for message in client.sent)
    assert app.capacity.bytes == 0


async def test_the_bytes_of_a_request_are_held_until_its_answer_is_sent(app):
    body = b'{"inputs": "%s"}' % bytes(50 * KIB).hex().encode()
    client = Client(app, "POST", "/embed", body)
    client.reads.clear()
    async with running(client.ask()) as asking:
        await turns()
        reservation = app.capacity.bytes
        client.reads.set()
        await asking
    assert reservation >= COPIES * 100 * KIB
    assert app.capacity.bytes == 0


async def test_memory_for_a_body_is_reserved_piece_by_piece_as_it_is_read():
    pieces, held = [PIECE, b"", b"x"], []

    async def receive():
        held.append(reservation.bytes)
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    with Capacity(1).request() as reservation:
        body = Body(receive, reservation, lambda: None)
        assert await body.read(2 * len(PIECE)) == PIECE + b"x"
        assert reservation.bytes == COPIES * (len(PIECE) + 1)
    assert held == [0, COPIES * len(PIECE), COPIES * len(PIECE)]


async def test_a_client_that_leaves_ends_its_request(app):
    """While its body is read, and while it is computed."""
    embedder = app.service.models.first(None)
    embedder.gate = asyncio.Event()
    tasks = asyncio.all_tasks()
    whole = {"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}
    for message in ({**whole, "more_body": True}, whole):
        client, messages = Client(app, "POST", "/embed"), [message, {"type": "http.disconnect"}]

        async def receive(messages=messages):
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        client._receive = receive
        await client.app(client.scope, client._receive, client._send)
        await turns(10)
        assert asyncio.all_tasks() == tasks  # none waits for more of the body
        assert not client.sent
        assert not messages
        assert app.capacity.bytes == 0
    assert embedder.cancelled.is_set()
