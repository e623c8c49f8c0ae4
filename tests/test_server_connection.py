"""A connection on loopback: when it ends, and in how many pieces an answer comes."""

import asyncio
import contextlib
import socket

import h2.config
import h2.connection
import h2.events
import pytest
from fake_embedder import FakeEmbedder
from hypercorn.protocol.h2 import H2Protocol

from jaxembed.config import ServerConfig
from jaxembed.memory import KIB
from jaxembed.server import run
from jaxembed.server.app import create_app
from jaxembed.server.connection import MOST_FRAMES, MOST_HELD, Connection
from jaxembed.server.models import Models

PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(embedder=None):
    """A server on a free port, and its host and port."""
    listener = run.listen("127.0.0.1", 0)
    listener.listen()
    host, port = listener.getsockname()
    shutdown = asyncio.Event()
    models = Models([embedder or FakeEmbedder()])
    config = ServerConfig()
    app = create_app(models, config)
    task = asyncio.create_task(run.serve(app, models, config, shutdown, listener))
    try:
        yield host, port
    finally:
        shutdown.set()
        await asyncio.wait_for(task, 10)


@contextlib.asynccontextmanager
async def connected(address):
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()


async def embed(reader, writer, texts: list[str]) -> bytes:
    body = b'{"inputs": [%s]}' % b",".join(b'"%s"' % text.encode() for text in texts)
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return await answer(reader)


async def answer(reader) -> bytes:
    """The body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith("http/1.1 200")
    (length,) = (
        int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")
    )
    return await reader.readexactly(length)


@pytest.fixture(name="written")
def written_fixture(monkeypatch):
    """How many bytes each write of a connection had."""
    sizes = []
    start = Connection.__init__

    def watched(connection, *arguments):
        start(connection, *arguments)
        write = connection.writer.write
        connection.writer.write = lambda data: (sizes.append(len(data)), write(data))[1]

    monkeypatch.setattr(Connection, "__init__", watched)
    return sizes


def test_a_small_answer_leaves_in_one_piece(written):
    async def go():
        async with serving() as address, connected(address) as streams:
            body = await embed(*streams, ["a"])
            assert len(written) == 1
            assert written[0] > len(body)
            await embed(*streams, ["a b"])
            assert len(written) == 2

    asyncio.run(go())


def test_a_large_answer_comes_whole(written):
    async def go():
        async with serving() as address, connected(address) as streams:
            body = await embed(*streams, [f"a {k}" for k in range(2000)])
            assert len(body) > MOST_HELD
            assert sum(written) > len(body)
            assert len(await embed(*streams, ["a"])) < MOST_HELD

    asyncio.run(go())


def test_requests_sent_ahead_are_answered_in_order(written):
    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(PING * 3)
            for _ in range(3):
                assert await answer(reader) == b""

    asyncio.run(go())


def test_an_idle_connection_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.05)

    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(PING)
            await answer(reader)
            assert await asyncio.wait_for(reader.read(), 5) == b""

    asyncio.run(go())


def test_a_connection_that_waits_for_an_answer_is_not_idle(monkeypatch):
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.05)

    async def go():
        embedder = FakeEmbedder()
        embedder.gate = asyncio.Event()
        async with serving(embedder) as address, connected(address) as streams:
            asking = asyncio.create_task(embed(*streams, ["a"]))
            await embedder.entered.wait()
            async with connected(address) as (reader, _):  # idle for as long, and closed
                assert await asyncio.wait_for(reader.read(), 5) == b""
            embedder.gate.set()
            assert await asyncio.wait_for(asking, 5)

    asyncio.run(go())


class Writer:
    """What is written, by a client that reads at once."""

    def __init__(self):
        self.written = []
        self.write = self.written.append

    async def drain(self):
        """There is room."""


def bare_connection() -> tuple[Connection, Writer]:
    """A connection without a socket, in the running loop."""
    connection, writer = Connection.__new__(Connection), Writer()
    connection.loop, connection.writer = asyncio.get_running_loop(), writer
    connection._held, connection._bytes_held = [], 0
    return connection, writer


def test_a_target_that_is_a_query_alone_is_the_root():
    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n")
            return await reader.readline()

    assert asyncio.run(go()).startswith(b"HTTP/1.1 200")


def test_an_empty_piece_does_not_keep_the_next_answer_back():
    async def scenario():
        connection, writer = bare_connection()
        connection._send(b"")  # the end of an answer whose length was told
        connection._send(b"the next answer")
        await asyncio.sleep(0)
        return writer.written

    assert asyncio.run(scenario()) == [b"the next answer"]


def test_many_small_pieces_are_not_held_until_there_are_no_more():
    async def scenario():
        connection, writer = bare_connection()
        for _ in range(40):  # as HTTP/2 sends a large answer, within one turn of the loop
            connection._send(bytes(MOST_HELD // 4))
        return writer.written

    assert [len(piece) for piece in asyncio.run(scenario())] == [MOST_HELD] * 10


def test_a_connection_ends_though_more_of_a_body_comes_than_is_discarded(monkeypatch):
    monkeypatch.setattr("jaxembed.server.bounded_body.MOST_DISCARDED", 256 * KIB)
    run_connection = Connection.run

    async def go():
        ended = asyncio.Event()

        async def watched(one):
            await run_connection(one)
            ended.set()

        monkeypatch.setattr(Connection, "run", watched)
        async with serving() as address, connected(address) as (_, writer):
            writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    writer.write(bytes(64 * KIB))
                    await writer.drain()
            await asyncio.wait_for(ended.wait(), 5)
            assert not [one for one in asyncio.all_tasks() if "_receive" in repr(one.get_coro())]

    asyncio.run(go())


def h2_client() -> h2.connection.H2Connection:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    return client


def test_a_body_that_goes_on_after_its_answer_ends_the_connection_quietly(caplog):
    head = [(":method", "GET"), (":path", "/health"), (":scheme", "http"), (":authority", "x")]

    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            client, ended = h2_client(), False
            client.send_headers(1, head)  # and no end: a body is to come
            writer.write(client.data_to_send())
            while not ended:
                events = client.receive_data(await asyncio.wait_for(reader.read(65536), 5))
                ended = any(isinstance(event, h2.events.StreamEnded) for event in events)
            client.send_data(1, b"late")
            writer.write(client.data_to_send())
            while await asyncio.wait_for(reader.read(65536), 5):
                pass

    asyncio.run(go())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_frame_longer_than_allowed_ends_its_connection_before_it_has_come():
    settings, head = bytes(3) + b"\4" + bytes(5), b"\xff\xff\xff\0\0" + bytes(3) + b"\1"

    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + head + bytes(2**20))
            with contextlib.suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(65536), 5):
                    pass

    asyncio.run(go())


def test_the_longest_frames_that_are_allowed_may_come_in_any_pieces(monkeypatch):
    """Between two pieces all of a frame but its last byte may be there, with the frame's head."""
    monkeypatch.setattr("jaxembed.server.connection.MOST_FRAMES", 5)
    head = {":method": "POST", ":path": "/embed", ":scheme": "http", ":authority": "x"}

    async def go():
        client = h2_client()
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(client.data_to_send())
            client.receive_data(await asyncio.wait_for(reader.read(65536), 5))
            body = b'{"inputs": "a"}'.ljust(client.max_outbound_frame_size)
            client.send_headers(1, [*head.items(), ("content-type", "application/json")])
            client.send_data(1, body, end_stream=True)
            writer.write(client.data_to_send())
            while data := await asyncio.wait_for(reader.read(65536), 20):
                for event in client.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived):
                        return dict(event.headers)
        return {}

    assert asyncio.run(go()).get(b":status") == b"200"


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed():
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(head + lengths + b'f\r\n{"inputs": "a"}\r\n0\r\n\r\n' + PING)
            return await asyncio.wait_for(reader.read(), 10)

    said = asyncio.run(go())
    assert said.startswith(b"HTTP/1.1 400")
    assert b"not both" in said
    assert said.count(b"HTTP/1.1") == 1


def test_a_client_that_sends_ahead_and_leaves_an_answer_unread_leaves_nothing_behind(caplog):
    texts = b",".join([b'"%s"' % (b"a " * 16)] * 2000)  # an answer of some megabytes
    body = b'{"inputs": [%s]}' % texts
    head = b"POST /embed_all HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def go():
        loop = asyncio.get_running_loop()
        async with serving() as address:
            async with connected(address) as streams:
                await embed(*streams, ["a"])  # the server has begun its own tasks
                before = asyncio.all_tasks()
            for _ in range(5):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, address)
                await loop.sock_sendall(client, request + PING)
                await asyncio.sleep(0.1)  # its answer fills what the client can take
                client.close()
            async with asyncio.timeout(10):
                while asyncio.all_tasks() - before:
                    await asyncio.sleep(0.01)

    asyncio.run(go())
    assert not [record for record in caplog.records if record.exc_info]


def test_an_http2_connection_that_asks_nothing_is_idle(monkeypatch):
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.05)

    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(h2_client().data_to_send() + b"\0\0\6")  # half a frame's head
            while await asyncio.wait_for(reader.read(65536), 5):
                pass

    asyncio.run(go())


def test_floods_of_small_http2_frames_are_read_by_and_by(monkeypatch):
    handled = []
    handle = H2Protocol.handle

    async def watched(self, event):
        handled.append(len(getattr(event, "data", b"")))
        await handle(self, event)

    monkeypatch.setattr(H2Protocol, "handle", watched)
    settings = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0])

    async def go():
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(h2_client().data_to_send() + settings * 10_000)
            while sum(handled) < 10_000 * len(settings):
                assert await asyncio.wait_for(reader.read(65536), 10)

    asyncio.run(go())
    assert max(handled[1:]) <= MOST_FRAMES
