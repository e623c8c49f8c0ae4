"""One end of the connection between two processes: sends and receives frames."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec

from jaxembed.memory import KIB, MIB
from jaxembed.server.front.frames import LENGTH, Frame, ProtocolError

logger = logging.getLogger(__name__)

READ_BYTES = 64 * KIB  # read at once: to allocate more takes longer than a query
MAX_UNSENT = 64 * MIB  # bytes that the other process may leave unread, besides large answers


class Link(asyncio.BufferedProtocol):
    """Sends frames, joined in one write for each turn of the event loop, and calls `on_frame` for
    each frame of type `kind` that arrives. `on_end` is called once, when the connection has ended.

    A frame of more than `max_bytes` bytes, or one that `on_frame` refuses with ProtocolError, ends
    the connection. So does a process that does not read.
    """

    def __init__(
        self,
        kind: Any,
        max_bytes: int,
        on_frame: Callable[[Any], object],
        on_end: Callable[[], object],
    ):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_bytes = max_bytes
        self._on_frame, self._on_end = on_frame, on_end
        self._transport: asyncio.Transport | None = None
        self._read = bytearray(READ_BYTES)
        self._kept = bytearray()  # the begin of a frame that has not arrived whole
        self._missing = 0  # bytes of that frame that have not arrived
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.is_open = False

    def send(self, frame: Frame) -> None:
        """Send a frame. After the end of the connection it is dropped."""
        if not self.is_open:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        data = self._encoder.encode(frame)
        self._unsent += (LENGTH.pack(len(data)), data)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is None or not self.is_open:
            return
        self._transport.write(b"".join(unsent))
        if self._transport.get_write_buffer_size() > self._max_bytes + MAX_UNSENT:
            logger.error("a process does not read: its connection is closed")
            self.close()

    def close(self) -> None:
        """End the connection. Unsent frames are dropped."""
        if self._transport is not None:
            self._transport.abort()

    # the methods of asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._on_end()

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._take(memoryview(self._read)[:nbytes])
        except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.error("a connection between processes is closed: %.200s", error)
            self.close()

    def _take(self, data: memoryview) -> None:
        """Handle received bytes, which may begin and end within a frame."""
        if self._kept:
            take = min(self._missing, len(data))
            self._kept += data[:take]
            self._missing -= take
            data = data[take:]
            if self._missing:
                return
            if len(self._kept) == LENGTH.size:
                self._missing = self._length(self._kept)
                if self._missing:
                    self._take(data)
                    return
            frame, self._kept = self._kept, bytearray()
            self._handle(memoryview(frame)[LENGTH.size :])
        start = 0
        while len(data) - start >= LENGTH.size:
            end = start + LENGTH.size + self._length(data[start:])
            if end > len(data):
                self._missing = end - len(data)
                self._kept += data[start:]
                return
            self._handle(data[start + LENGTH.size : end])
            if not self.is_open:
                return
            start = end
        if start < len(data):
            self._missing = LENGTH.size - (len(data) - start)
            self._kept += data[start:]

    def _length(self, data: memoryview | bytearray) -> int:
        (length,) = LENGTH.unpack_from(data)
        if length > self._max_bytes:
            raise ProtocolError(f"a frame of {length} bytes; the limit is {self._max_bytes}")
        return length

    def _handle(self, data: memoryview) -> None:
        self._on_frame(self._decoder.decode(data))
