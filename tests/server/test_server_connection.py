"""A connection on loopback: when it ends, and in how many pieces an answer comes."""

import asyncio
import contextlib
import logging
import re
import socket
from types import SimpleNamespace

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
import test_server_run
from fake_embedder import FakeEmbedder
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.typing import ConnectionState
from test_server_body import turns
from test_server_pool import until

from jaxembed.memory import KIB
from jaxembed.server.http import encoding, listening
from jaxembed.server.http.connection import (
    MAX_TABLE,
    SLICE_BYTES,
    Connection,
    Http2,
    use_connections,
)

PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _warnings_alone(caplog) -> None:
    """Commands that other tests run leave a level that logs more."""
    caplog.set_level(logging.WARNING, "jaxembed")


@contextlib.asynccontextmanager
async def serving(embedder=None, *, send_buffer: int | None = None):
    """A server on a free port, and its host and port. `send_buffer` is how many bytes the system
    keeps for a client that does not read."""
    made = test_server_run.serving(embedder or FakeEmbedder(), send_buffer=send_buffer)
    async with made as (client, _, _):
        yield client.base_url.host, client.base_url.port


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
    return (await answer(reader))[1]


async def status(reader) -> int:
    return (await answer(reader))[0]


async def answer(reader) -> tuple[int, bytes]:
    """The status and the body of the next answer of HTTP/1.1."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    (length,) = re.findall(rb"\r\ncontent-length: (\d+)", head)
    return int(head.split()[1]), await reader.readexactly(int(length))


async def test_a_large_answer_comes_whole_however_it_is_made(monkeypatch):
    async with test_server_run.serving(FakeEmbedder()) as (client, _, _):
        asked = {"inputs": [f"a b c {k}" for k in range(2000)]}
        whole = await client.post("/embed_all", json=asked)
        monkeypatch.setattr(encoding, "MAX_JOINED", 1)
        made = await client.post("/embed_all", json=asked)
    assert made.headers["transfer-encoding"] == "chunked"
    assert made.content == whole.content
    assert len(whole.content) > 64 * KIB


async def test_a_connection_that_waits_for_an_answer_is_not_idle(monkeypatch):
    monkeypatch.setattr(listening, "KEEP_ALIVE_S", 0.05)
    embedder = FakeEmbedder()
    embedder.gate = asyncio.Event()
    async with serving(embedder) as address, connected(address) as streams:
        asking = asyncio.create_task(embed(*streams, ["a"]))
        await embedder.entered.wait()
        async with connected(address) as (reader, _):  # idle for as long, and closed
            assert await reader.read() == b""
        embedder.gate.set()
        assert await asking


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://x/livez", 200),
        ("http://x?y", 200),
        ("http://x/v1/models/test%2Ffake", 200),
        ("http://a/%00", 404),
        ("*", 404),
    ],
)
async def test_a_target_may_be_more_or_less_than_a_path(target, expected, caplog):
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + PING)
        assert await status(reader) == expected
        assert await status(reader) == 200
    assert not caplog.records


LENGTH = "Content-Length: 5\r\n"


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("GET urn:[ HTTP/1.1\r\nHost: x\r\n", 400),
        ("GET ?x HTTP/1.1\r\nHost: x\r\n", 400),
        ("GET /caf\u00e9 HTTP/1.1\r\nHost: x\r\n", 400),
        ("CONNECT x:443 HTTP/1.1\r\nHost: x\r\n", 501),  # there are no tunnels
        ("BREW /livez HTTP/1.1\r\nHost: x\r\n", 400),
        ("GET /livez HTTP/2.0\r\nHost: x\r\n", 505),
        ("GET /livez HTTP/1.1\r\n", 400),  # no `Host`
        ("GET /livez HTTP/1.1\r\nHost: x\r\nHost: y\r\n", 400),
        ("GET /livez HTTP/1.1\r\nHost : x\r\n", 400),
        ("GET /livez HTTP/1.1\r\nHost: x\r\n folded: y\r\n", 400),
        ("GET /livez HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n", 400),
        ("GET /livez HTTP/1.1\nHost: x\n", 400),
        (f"POST /embed HTTP/1.1\r\nHost: x\r\n{LENGTH}{LENGTH}", 400),
        ("POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n", 400),
        ("POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n", 400),
        ("POST /embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
        ("POST /embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n", 400),
        ("POST /embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n", 501),
        ("POST /embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        ("X: y\r\n" * 20_000, 400),
        ("GET /livez HTTP/1.1\r\nHost: x\r\n" + "X: y\r\n" * 20_000, 431),
        ("GET /" + "a" * 100_000, 431),
        ("\r\n" * 50_000, 431),
    ],
)
async def test_a_head_that_http_does_not_allow_is_refused_and_its_connection_closed(head, expected):
    """What follows it may be a part of it, or smuggled."""
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(f"{head}\r\n".encode("latin-1") + PING)
        with contextlib.suppress(ConnectionError):  # bytes that were not read reset it
            said = await reader.read()
            assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"%d" % expected]


WEBSOCKET = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
VERSION, KEY = "Sec-WebSocket-Version: 13\r\n", "Sec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n"
H2C = "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: "


@pytest.mark.parametrize(
    "upgrade",
    [
        WEBSOCKET,
        WEBSOCKET + VERSION + KEY,
        H2C + "AAMAAABkAAQAAP__\r\n",
        H2C + "AAAAA\r\n",
        "Upgrade: TLS/1.0, websocket, h2c\r\nConnection: Upgrade\r\n",
    ],
)
async def test_an_upgrade_is_ignored_and_the_connection_goes_on(upgrade, caplog):
    request = f"GET /livez HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n".encode()
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(request)
        assert await status(reader) == 200
        writer.write(request + PING)
        assert await status(reader) == 200
        assert await status(reader) == 200
    assert not caplog.records


async def test_a_connection_ends_after_an_upgrade(monkeypatch):
    monkeypatch.setattr(listening, "KEEP_ALIVE_S", 0.05)
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(f"GET /livez HTTP/1.1\r\nHost: x\r\n{WEBSOCKET}\r\n".encode())
        assert await status(reader) == 200
        assert await reader.read() == b""


async def test_a_bug_beside_the_handlers_leaves_no_task_behind(monkeypatch, running):
    """Also if the body was not read."""

    async def fail(*_):
        raise LookupError("a bug")

    monkeypatch.setattr("jaxembed.server.access.Access.finish", fail)
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n"
    async with serving() as address:
        async with connected(address) as (_, writer):
            writer.write(b"?")  # the server has begun its own tasks
        await until(lambda: running.one_has_ended)
        running.one_has_ended, before = False, asyncio.all_tasks()
        async with connected(address) as (reader, writer):
            writer.write(head + bytes(400_000))
            with contextlib.suppress(ConnectionError):
                assert (await reader.read()).startswith(b"HTTP/1.1 500 ")
        await until(lambda: running.one_has_ended and not asyncio.all_tasks() - before)


async def test_a_small_answer_leaves_in_one_piece():
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(PING)
        said = await reader.read(65536)
        writer.write(PING.replace(b"/ping", b"/health"))
        said += await reader.read(65536)
    assert said.count(b"HTTP/1.1 200") == 2
    assert b'{"unix":' in said


async def test_a_connection_ends_though_more_comes_than_is_discarded(monkeypatch, running):
    monkeypatch.setattr("jaxembed.server.http.exchange.MAX_DISCARDED", 256 * KIB)
    async with serving() as address, connected(address) as (_, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not running.one_has_ended:
                writer.write(bytes(64 * KIB))
                await writer.drain()
        await until(lambda: running.one_has_ended)
        assert not [one for one in asyncio.all_tasks() if "Body.watch" in repr(one.get_coro())]


def h2_client(*, validates: bool = True) -> h2.connection.H2Connection:
    """A client of HTTP/2. Without validation it also sends what is not well-formed."""
    names = ("validate_outbound_headers", "normalize_outbound_headers")
    checks = dict.fromkeys(names, validates)
    settings = h2.config.H2Configuration(client_side=True, header_encoding=None, **checks)
    client = h2.connection.H2Connection(settings)
    client.initiate_connection()
    return client


HEAD = {":method": "GET", ":path": "/livez", ":scheme": "http", ":authority": "x"}
POST = HEAD | {":method": "POST", ":path": "/embed", "content-type": "application/json"}


async def h2_events(streams, client, stream_id: int, last: type) -> list:
    """The events of a stream until one of the type `last`."""
    reader, writer = streams
    events = []
    while not any(isinstance(event, last) for event in events):
        writer.write(client.data_to_send())
        data = await reader.read(65536)
        assert data, "the connection was closed"
        found = client.receive_data(data)
        events += [event for event in found if getattr(event, "stream_id", None) == stream_id]
    return events


async def h2_status(streams, client, stream_id: int, head: dict, *, ends: bool = True) -> int:
    """Send a request with this head; the status of its answer."""
    client.send_headers(stream_id, list(head.items()), end_stream=ends)
    for event in await h2_events(streams, client, stream_id, h2.events.StreamEnded):
        if isinstance(event, h2.events.ResponseReceived):
            return int(dict(event.headers)[b":status"])
    raise AssertionError("an answer without a head")


@pytest.mark.parametrize("gives_up", ["resets", "leaves"])
async def test_a_lost_connection_tells_a_request_that_waits_to_be_told_already(gives_up):
    """Hypercorn forgets a request that its client gave up, and then waits to tell it until it has
    taken its body."""
    asked, gate, told = asyncio.Event(), asyncio.Event(), []

    async def app(scope, receive, send, *_):
        asked.set()
        await gate.wait()
        while "http.disconnect" not in told:
            told.append((await receive())["type"])

    client = h2_client()
    client.send_headers(1, list(POST.items()))
    client.send_data(1, b"{}", end_stream=True)
    if gives_up == "resets":
        client.reset_stream(1)
    use_connections()
    ours, theirs = socket.socketpair()
    streams = await asyncio.open_connection(sock=ours)
    loop, config = asyncio.get_running_loop(), Config.from_mapping(max_app_queue_size=2)
    connection = Connection(app, loop, config, WorkerContext(None), ConnectionState({}), *streams)
    running = asyncio.create_task(connection.run())
    with theirs:
        theirs.sendall(client.data_to_send())
        if gives_up == "leaves":
            theirs.shutdown(socket.SHUT_WR)
        await until(lambda: asked.is_set() and not connection.protocol.protocol.streams)
        connection.abort()
        await turns(10)
        gate.set()
        await turns(10)
        running.cancel()
        await asyncio.wait([running])
    assert told == ["http.request", "http.request", "http.disconnect"]


async def test_a_body_that_goes_on_after_its_answer_is_stopped_and_the_connection_goes_on(caplog):
    async with serving() as address, connected(address) as streams:
        client = h2_client()
        assert await h2_status(streams, client, 1, HEAD, ends=False) == 200
        client.send_data(1, b"late" * 1000)
        client.send_data(1, b"late" * 1000)
        events = await h2_events(streams, client, 1, h2.events.StreamReset)
        assert events[-1].error_code == h2.errors.ErrorCodes.NO_ERROR
        assert await h2_status(streams, client, 3, HEAD) == 200
    assert not caplog.records


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {":path": b"/\xff"},
        {":path": "/ /"},
        {":method": b"G\xff"},
        {":method": ""},
        {":method": "connect"},
        {":method": "CONNECT", ":protocol": "websocket"},
        {":method": "CONNECT", ":path": None, ":scheme": None},
    ],
)
async def test_a_head_that_is_not_well_formed_ends_no_connection(change, ends, caplog):
    head = {name: value for name, value in (HEAD | change).items() if value is not None}
    pseudo = {":protocol": head.pop(":protocol")} if ":protocol" in head else {}
    async with serving() as address, connected(address) as streams:
        client = h2_client(validates=False)
        assert await h2_status(streams, client, 1, pseudo | head, ends=ends) == 400
        if not ends:
            client.send_data(1, b"body", end_stream=True)
        assert await h2_status(streams, client, 3, HEAD) == 200
        assert not client.remote_settings.enable_connect_protocol
    assert not caplog.records


async def test_priorities_of_any_number_of_streams_are_taken(caplog):
    async with serving() as address, connected(address) as streams:
        client = h2_client()
        for stream in range(1, 4001, 2):
            client.prioritize(stream, weight=16, depends_on=stream + 2)
        assert await h2_status(streams, client, 4001, HEAD) == 200
    assert not caplog.records


async def test_a_client_cannot_make_a_server_keep_its_own_headers():
    async with serving() as address, connected(address) as streams:
        client = h2_client()
        client.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 2**30})
        assert [await h2_status(streams, client, stream, HEAD) for stream in (1, 3)] == [200] * 2
        assert client.decoder.header_table_size == MAX_TABLE


async def test_a_frame_longer_than_allowed_ends_its_connection_before_it_has_come():
    settings, head = bytes(3) + b"\4" + bytes(5), b"\xff\xff\xff\0\0" + bytes(3) + b"\1"
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + head + bytes(2**20))
        with contextlib.suppress(ConnectionError):
            await reader.read()


async def test_the_longest_frames_that_are_allowed_may_come_in_any_pieces(monkeypatch):
    """Between two pieces all of a frame but its last byte may be there, with the frame's head."""
    monkeypatch.setattr("jaxembed.server.http.connection.SLICE_BYTES", 5)
    client = h2_client()
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(client.data_to_send())
        client.receive_data(await reader.read(65536))
        body = b'{"inputs": "a"}'.ljust(client.max_outbound_frame_size)
        client.send_headers(1, list(POST.items()))
        client.send_data(1, body, end_stream=True)
        events = await h2_events((reader, writer), client, 1, h2.events.ResponseReceived)
    (answered,) = [one for one in events if isinstance(one, h2.events.ResponseReceived)]
    assert dict(answered.headers)[b":status"] == b"200"


async def test_a_body_with_two_lengths_is_refused_and_its_connection_closed():
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(head + lengths + b'f\r\n{"inputs": "a"}\r\n0\r\n\r\n' + PING)
        said = await reader.read()
    assert said.startswith(b"HTTP/1.1 400")
    assert b"not both" in said
    assert said.count(b"HTTP/1.1") == 1


async def test_an_http2_connection_that_asks_nothing_is_idle(monkeypatch):
    monkeypatch.setattr(listening, "KEEP_ALIVE_S", 0.05)
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(h2_client().data_to_send() + b"\0\0\6")  # half a frame's head
        await reader.read()


async def test_floods_of_small_http2_frames_are_read_by_and_by(monkeypatch):
    handled = []
    handle = H2Protocol.handle

    async def watched(self, event):
        handled.append(len(getattr(event, "data", b"")))
        await handle(self, event)

    monkeypatch.setattr(H2Protocol, "handle", watched)
    settings = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0])
    async with serving() as address, connected(address) as (reader, writer):
        writer.write(h2_client().data_to_send() + settings * 10_000)
        while sum(handled) < 10_000 * len(settings):
            assert await reader.read(65536)
    assert max(handled) <= SLICE_BYTES


class Running(list):
    """The connections that have begun and not ended."""

    one_has_ended = False


@pytest.fixture(name="running")
def running_fixture(monkeypatch):
    running = Running()
    run_connection = Connection.run

    async def watched(connection):
        running.append(connection)
        await run_connection(connection)
        running.remove(connection)
        running.one_has_ended = True

    monkeypatch.setattr(Connection, "run", watched)
    return running


@contextlib.asynccontextmanager
async def deaf(address):
    """A socket that is connected and takes hardly anything."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(client, address)
        yield client
    finally:
        client.close()


def has_unread(connection: Connection) -> int:
    """The bytes that its client does not take."""
    return connection.writer.transport.get_write_buffer_size()


SMALL = 4096  # bytes that the system keeps of what is sent
FILE = HEAD | {":path": "/docs/swagger-ui-bundle.js"}  # an answer of a megabyte


def h2_requests(head: dict, count: int, *, resets: bool) -> bytes:
    """What a client sends that has room for answers of any size."""
    client = h2_client()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
    client.increment_flow_control_window(2**30)
    for stream in range(1, 2 * count, 2):
        client.send_headers(stream, list(head.items()), end_stream=True)
        if resets and stream > 1:
            client.reset_stream(stream)
    return client.data_to_send()


DOCS = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "then"),
    [
        pytest.param(lambda: 3 * DOCS, "stays", id="sends ahead"),
        pytest.param(lambda: DOCS + PING, "leaves", id="sends ahead and leaves"),
        pytest.param(lambda: 300 * PING, "is idle", id="is idle"),
        pytest.param(lambda: h2_requests(FILE, 1, resets=False), "is done", id="is done"),
        pytest.param(lambda: h2_requests(FILE, 3000, resets=True), "stays", id="resets streams"),
    ],
)
async def test_a_client_that_does_not_read_is_disconnected_and_leaves_nothing_behind(
    sent, then, monkeypatch, running, caplog
):
    monkeypatch.setattr(listening, "KEEP_ALIVE_S", 0.1)
    if then != "is idle":
        monkeypatch.setattr("jaxembed.server.http.connection.SEND_S", 0.5)
    monkeypatch.setattr("jaxembed.server.http.connection.CLOSE_TIMEOUT_S", 0.1)
    async with serving(send_buffer=SMALL) as address:
        async with connected(address) as streams:
            await embed(*streams, ["a"])  # the server has begun its own tasks
        await until(lambda: not running)
        running.one_has_ended, before = False, asyncio.all_tasks()
        async with deaf(address) as client:
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(client, sent())
            await until(lambda: running.one_has_ended or any(map(has_unread, running)))
            if then == "is done":
                client.shutdown(socket.SHUT_WR)
            if then != "leaves":
                await until(lambda: not running)
        await until(lambda: not asyncio.all_tasks() - before)
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_unforeseen_error_ends_its_connection_in_one_line(monkeypatch, running, caplog):
    """Also while a request of it waits, which is given up."""
    receive_data = h2.connection.H2Connection.receive_data

    def failing(connection, data):
        if data.endswith(b"unforeseen"):
            raise LookupError("a bug")
        return receive_data(connection, data)

    monkeypatch.setattr(h2.connection.H2Connection, "receive_data", failing)
    embedder = FakeEmbedder()
    embedder.gate = asyncio.Event()
    async with serving(embedder) as address, connected(address) as (reader, writer):
        client = h2_client()
        client.send_headers(1, list(POST.items()))
        client.send_data(1, b'{"inputs": "a"}', end_stream=True)
        writer.write(client.data_to_send())
        await embedder.entered.wait()
        writer.write(b"unforeseen")
        await reader.read()
        await until(lambda: not running)
    (record,) = caplog.records
    assert "LookupError('a bug')" in record.getMessage()
    assert record.exc_info is None


async def test_a_request_to_a_server_that_closes_may_be_sent_to_another():
    """Also if the client has given it up."""
    sent = []

    async def send(event):
        sent.append(getattr(event, "data", b""))

    context = WorkerContext(None)
    tasks = SimpleNamespace(spawn=lambda action: None)
    state = ConnectionState({})
    protocol = Http2(None, Config(), context, tasks, state, False, None, None, send)
    await protocol.initiate()
    await context.terminated.set()
    client = h2_client()
    for stream in (1, 3):
        client.send_headers(stream, list(HEAD.items()), end_stream=True)
    client.reset_stream(3)
    await protocol.handle(RawData(client.data_to_send()))
    answer = client.receive_data(b"".join(sent))
    resets = [one for one in answer if isinstance(one, h2.events.StreamReset)]
    refused = h2.errors.ErrorCodes.REFUSED_STREAM
    assert [(one.stream_id, one.error_code) for one in resets] == [(1, refused)]
