"""HTTP/2 of a connection: Hypercorn's class without tunnels and priorities, which this server has
no use for, and with limits on what a client can make it do. Knows no route."""

import asyncio
import re
from contextlib import suppress
from typing import Any

from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hypercorn.events import Event as IoEvent
from hypercorn.events import RawData
from hypercorn.protocol.h2 import H2Protocol

from jaxembed.memory import KIB

MOST_FRAMES = 2 * KIB  # bytes of HTTP/2 that are handled at once: 140 small frames take h2 10 ms
# Streams of a connection with something to send. A client that resets streams and reads nothing can
# have more of them than it may open at a time; Hypercorn fails when there are a thousand.
MOST_STREAMS = 200
# Bytes of response headers that are kept to be named by number: the default of RFC 9113, whatever a
# client allows. All of them are looked through for each response.
MOST_TABLE = 4 * KIB
_METHOD = re.compile(rb"[\w!#$%&'*+.^`|~-]+")
_TARGET = re.compile(rb"[!-~]+")


class Http2(H2Protocol):
    """HTTP/2 that refuses tunnels (CONNECT) and heads with bytes that HTTP/1.1 does not allow, and
    ignores priorities, as RFC 9113, section 5.3.2 allows: Hypercorn keeps those of streams that are
    never opened."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        del self.connection.local_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL]
        receive = self.connection.receive_data
        # lazily: what came before an event is handled when the event is looked at
        self.connection.receive_data = lambda data: filter(  # pyright: ignore[reportAttributeAccessIssue]
            self._is_taken, receive(data)
        )

    async def handle(self, event: IoEvent) -> None:
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        for first in range(0, len(event.data), MOST_FRAMES):
            await super().handle(RawData(event.data[first : first + MOST_FRAMES]))
            await asyncio.sleep(0)  # else no other task would run while there are more

    def _is_taken(self, event: Event) -> bool:
        """Whether Hypercorn is to handle the event; what else there is to do about it is done."""
        match event:
            case PriorityUpdated():
                return False
            case RemoteSettingsChanged() if self.connection.encoder.header_table_size > MOST_TABLE:
                self.connection.encoder.header_table_size = MOST_TABLE
            case RequestReceived() if (
                self.context.terminated.is_set() or len(self.stream_buffers) >= MOST_STREAMS
            ):  # to be sent again elsewhere or later
                self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
                return False
            case RequestReceived() if not _is_well_formed(dict(event.headers)):
                headers = [(b":status", b"400"), (b"content-length", b"0")]
                with suppress(ProtocolError):  # the client has closed the stream already
                    self.connection.send_headers(event.stream_id, headers, end_stream=True)
                return False
            case DataReceived() if event.stream_id not in self.streams:
                # the answer is complete: no more of the body is wanted
                length = event.flow_controlled_length
                self.connection.acknowledge_received_data(length, event.stream_id)
                self._reset(event.stream_id, ErrorCodes.NO_ERROR)
                return False
        return True

    def _reset(self, stream_id: int, why: ErrorCodes) -> None:
        with suppress(ProtocolError):  # the client has closed the stream already
            self.connection.reset_stream(stream_id, why)


def _is_well_formed(head: dict[bytes, bytes]) -> bool:
    method = head[b":method"]
    return (
        method.upper() != b"CONNECT"
        and _METHOD.fullmatch(method) is not None
        and _TARGET.fullmatch(head[b":path"]) is not None
    )
