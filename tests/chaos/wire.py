"""Connections that send exactly the given bytes: HTTP/1.1, and HTTP/2 without TLS."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.exceptions

HOST = "127.0.0.1"
READ_BYTES = 64 * 1024
LINE_BYTES = 1024 * 1024
STEADY = "steady"  # the key of every request that does not give another one


class Lost(Exception):
    """The connection ended before the answer did."""


@dataclass
class Message:
    path: str
    body: bytes | None = None  # None is a GET
    headers: dict[str, str] = field(default_factory=dict)
    method: str = ""

    def __post_init__(self):
        self.method = self.method or ("GET" if self.body is None else "POST")
        self.headers = {"authorization": f"Bearer {STEADY}", **self.headers}
        if self.body is not None:
            self.headers = {"content-type": "application/json", **self.headers}

    def http1(self, length: int | None = None) -> bytes:
        """The request as bytes of HTTP/1.1. `length` is a false Content-Length to send."""
        headers = {"host": HOST, **self.headers}
        if self.body is not None:
            headers["content-length"] = str(len(self.body) if length is None else length)
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (self.body or b"")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


class Http1:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Http1":
        """Connect to a port of this machine. Raises Lost if nothing listens there."""
        try:
            return cls(*await asyncio.open_connection(HOST, port, limit=LINE_BYTES))
        except OSError as error:
            raise Lost(f"no connection: {error}") from error

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError as error:
            raise Lost(f"while sending: {error}") from error

    async def reply(self) -> Reply:
        """Read the next answer. Raises Lost if the connection ends before."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").split("\r\n")
            parts = (line.partition(":") for line in lines if line)
            headers = {name.lower(): value.strip() for name, _, value in parts}
            if "chunked" in headers.get("transfer-encoding", ""):
                body = await self._chunks()
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Lost(f"while reading: {error}") from error
        return Reply(int(status.split(" ")[1]), headers, body)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return b"".join(parts)

    async def ask(self, message: Message) -> Reply:
        """Send a request and read its answer. Raises Lost if the connection ends before."""
        await self.send(message.http1())
        return await self.reply()

    async def rest(self) -> bytes:
        """Read everything until the server closes the connection."""
        with suppress(OSError):
            return await self.reader.read()
        return b""

    def half_close(self) -> None:
        self.writer.write_eof()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class Http2:
    """One HTTP/2 connection, on which several requests run at once."""

    def __init__(self, connection: Http1):
        self._wire = connection
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._parts: dict[int, tuple[dict[str, str], list[bytes]]] = {}
        self._room = asyncio.Event()
        self._state.initiate_connection()
        self._reading = asyncio.create_task(self._read())

    async def ask(self, message: Message) -> tuple[int, asyncio.Future[Reply]]:
        """Send a request. Returns its stream, and a future of the answer, which may raise Lost.

        Raises Lost if the connection is closed.
        """
        if self._reading.done():  # nothing would resolve the future
            raise Lost("the server closed the connection before")
        try:
            stream = self._state.get_next_available_stream_id()
            body = message.body or b""
            self._replies[stream] = reply = asyncio.get_running_loop().create_future()
            self._parts[stream] = ({}, [])
            headers = {":method": message.method, ":path": message.path, ":scheme": "http"}
            headers |= {":authority": HOST, **message.headers}
            self._state.send_headers(stream, list(headers.items()), end_stream=not body)
            while body:
                self._room.clear()
                window = self._state.local_flow_control_window(stream)
                most = min(window, self._state.max_outbound_frame_size)
                if most <= 0:
                    await self._flush()
                    await self._room.wait()
                    if self._reading.done():
                        raise Lost("the server closed the connection")
                    continue
                part, body = body[:most], body[most:]
                self._state.send_data(stream, part, end_stream=not body)
            await self._flush()
        except h2.exceptions.ProtocolError as error:  # the connection is closed already
            raise Lost(f"HTTP/2: {error!r}") from error
        return stream, reply

    async def reset(self, stream: int) -> None:
        """Cancel a request by resetting its stream."""
        try:
            self._state.reset_stream(stream)
        except h2.exceptions.ProtocolError:
            return  # the answer has arrived, or the connection is closed
        await self._flush()

    async def close(self) -> None:
        """Close the connection, and cancel the answers that are missing."""
        self._reading.cancel()
        for reply in self._replies.values():
            reply.cancel()
        # awaited, or asyncio would log their errors
        await asyncio.gather(self._reading, *self._replies.values(), return_exceptions=True)
        await self._wire.close()

    async def _flush(self) -> None:
        await self._wire.send(self._state.data_to_send())

    async def _read(self) -> None:
        """Read frames until the connection ends; then the missing answers raise Lost."""
        lost = "the server closed the connection"
        try:
            while data := await self._wire.reader.read(READ_BYTES):
                for event in self._state.receive_data(data):
                    self._handle(event)
                await self._flush()
        except (OSError, Lost, h2.exceptions.ProtocolError) as error:
            lost = repr(error)
        finally:
            self._room.set()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(Lost(lost))

    def _handle(self, event: h2.events.Event) -> None:
        self._room.set()
        match event:
            case h2.events.ResponseReceived(stream_id=stream, headers=headers):
                decoded = {_text(name): _text(value) for name, value in headers}
                self._parts[stream][0].update(decoded)
            case h2.events.DataReceived(stream_id=stream, data=data):
                self._parts[stream][1].append(data)
                self._state.acknowledge_received_data(event.flow_controlled_length, stream)
            case h2.events.StreamEnded(stream_id=stream):
                headers, parts = self._parts.pop(stream)
                if not self._replies[stream].done():
                    status = int(headers[":status"])
                    self._replies[stream].set_result(Reply(status, headers, b"".join(parts)))
            case h2.events.StreamReset(stream_id=stream):
                if not self._replies[stream].done():
                    self._replies[stream].set_exception(Lost("the server reset the stream"))


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
