"""Fetches files from URLs that clients send: only from allowed hosts and addresses, and within
limits of time and size.

For each HTTP request the host name is looked up once, and the connection uses an address that was
found and checked: a second lookup could return another address. Proxies that the environment names
are not used, because they would look up host names themselves.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import h11

from jaxembed.errors import MediaUrlError, ShuttingDown
from jaxembed.preprocessing.images.media import excerpt
from jaxembed.preprocessing.images.media_urls import (
    NETWORK_FLAG,
    URLS_FLAG,
    WEB_PORTS,
    Address,
    AllowedHosts,
    MediaUrl,
    is_public_address,
    parse_media_url,
    unmapped,
)

# A function that looks up a host name for connections to a port. It returns the addresses of the
# host as text, and raises OSError if there are none.
Resolve = Callable[[str, int], Sequence[str]]

REDIRECTS = (301, 302, 303, 307, 308)
LONGEST_HEAD = 16 * 1024  # maximum bytes of the status line and the headers together
MAX_INFORMATIONAL = 8  # maximum responses with a status of 1xx before the final response
_READ_BYTES = 64 * 1024
# A body may arrive in at most _PIECES pieces, plus one for each _BYTES_A_PIECE bytes. Parsing a
# piece blocks the event loop, and a piece of one byte takes as long as a piece of thousands.
_PIECES, _BYTES_A_PIECE = 4096, 256


def addresses_of(host: str, port: int) -> list[str]:
    """Look up a host name with the system's resolver, and return its addresses without repetitions.
    Blocks the calling thread. Raises OSError if the host has no address."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers))


class MediaFetcher:
    """Fetches files of at most `max_bytes` from `hosts`, at most `concurrency` files at a time.

    `hosts` are the allowed hosts, and `ports` are the ports of a host that names no port, as in
    AllowedHosts; if `hosts` is empty, every URL is refused. `timeout_s` is the time limit of a
    fetch, which includes waiting for one of the `concurrency` slots, name lookups and redirects. At
    most `max_redirects` redirects are followed. `resolve` looks up names, in a thread.
    `allowed_address` decides which addresses may be connected to. If `tls` is None, the system's
    certificate authorities are trusted.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        max_bytes: int = 20_000_000,
        timeout_s: float = 10.0,
        max_redirects: int = 3,
        concurrency: int = 16,
        ports: Collection[int] = WEB_PORTS,
        resolve: Resolve = addresses_of,
        allowed_address: Callable[[Address], bool] = is_public_address,
        tls: ssl.SSLContext | None = None,
    ):
        """See the class for the arguments. Raises ConfigError if an item of `hosts` is not a
        host."""
        self._hosts = AllowedHosts(hosts, ports)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_redirects = max_redirects
        self._concurrency = concurrency
        self._resolve = resolve
        self._allowed_address = allowed_address
        self._tls = ssl.create_default_context() if tls is None else tls
        self._slots = asyncio.Semaphore(concurrency)
        # Only name lookups use this pool, so that slow lookups take no threads from other work.
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="media-names")
        self._is_closed = False

    async def fetch(self, url: str) -> bytes:
        """Fetch the file at a URL, and return its bytes.

        Raises MediaUrlError if the URL is not allowed, if its file does not arrive in time, or if
        the response is refused, for example because the file is too large. Raises ShuttingDown
        after `aclose`.
        """
        if self._is_closed:
            raise ShuttingDown("the server is stopping and fetches no more URLs")
        # What messages call the URL of the client, and the URL that is requested now.
        source = label = excerpt(url)
        current = parse_media_url(url)
        self._hosts.check(current, source)
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                # Messages do not tell clients where redirects lead.
                for _ in range(self._max_redirects + 1):
                    answer = await self._get(current, label)
                    if isinstance(answer, bytes):  # a str is the location of a redirect
                        return answer
                    label = f"a redirect of {source}"
                    target = parse_media_url(answer, label, current)
                    self._hosts.check(target, label)
                    if current.scheme == "https" and target.scheme != "https":
                        raise MediaUrlError(label, "it redirects from https to http")
                    current = target
                raise MediaUrlError(source, f"it has more than {self._max_redirects} redirects")
        except TimeoutError as error:
            raise MediaUrlError(
                source, f"its file did not arrive within {self._timeout_s:g} s"
            ) from error

    async def aclose(self) -> None:
        """Refuse further fetches, and wait until running fetches end, at most their timeout."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in range(self._concurrency):  # no fetch is running when all slots are taken here
            await self._slots.acquire()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _get(self, url: MediaUrl, source: str) -> bytes | str:
        """Send one GET request. Returns the body (bytes), or the location (str) of a redirect.

        Raises MediaUrlError if the host has no address or an address that is not allowed, if no
        connection can be made, or if the response is refused. `source` is what the message calls
        the URL.
        """
        if url.address is not None:
            addresses = [unmapped(url.address)]
        else:
            try:
                resolved = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._resolve, url.host, url.port
                )
                addresses = [unmapped(ip_address(address)) for address in resolved]
            except (OSError, ValueError) as error:  # ValueError: DNS cannot have such a name
                raise MediaUrlError(source, "its host has no address") from error
        if not addresses:
            raise MediaUrlError(source, "its host has no address")
        if not all(map(self._allowed_address, addresses)):
            raise MediaUrlError(
                source,
                f"not all addresses of its host are public or in a network of {NETWORK_FLAG}; "
                f"{URLS_FLAG} alone admits no other address",
            )
        # Connect to the first address that accepts. Each attempt gets an equal share of the time.
        tls = {"ssl": self._tls, "server_hostname": url.host} if url.scheme == "https" else {}
        failure: OSError | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(self._timeout_s / len(addresses)):
                    reader, writer = await asyncio.open_connection(str(address), url.port, **tls)
                    break
            except OSError as error:  # TimeoutError is an OSError
                failure = error
        else:
            reason = "no connection to its host could be made"
            if isinstance(failure, ssl.SSLCertVerificationError):
                reason = "its host has no certificate that is valid for its name"
            raise MediaUrlError(source, reason) from failure
        headers = [
            ("Host", url.authority),
            ("User-Agent", "jaxembed"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        try:
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=LONGEST_HEAD)
            request = h11.Request(method="GET", target=url.target, headers=headers)
            message = (http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b"")
            if writer.is_closing():
                raise ConnectionResetError  # here uvloop's `write` would raise RuntimeError
            writer.write(message)
            return await _read_response(reader, http, self._max_bytes, source)
        except (OSError, h11.ProtocolError) as error:
            raise MediaUrlError(
                source,
                "its host closed the connection, its response is not HTTP, or its headers are too "
                "long",
            ) from error
        finally:
            writer.transport.abort()  # `close` would wait for the host, which may not answer


async def _read_response(
    reader: asyncio.StreamReader, http: h11.Connection, max_bytes: int, source: str
) -> bytes | str:
    """Read the response to a GET request. Returns the body (bytes) if the status is 200, or the
    location (str) of a redirect. A body without a length ends when the connection is closed.

    Raises MediaUrlError for any other status, and for bodies that are compressed, over `max_bytes`
    or in too many small pieces; `source` is what the message calls the URL. Raises OSError or
    h11.ProtocolError if the response breaks off or is malformed.
    """

    async def next_event() -> object:
        """Return the next h11 event: a response, data or the end of the message."""
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(await reader.read(_READ_BYTES))
        return event

    too_large = f"its file is larger than the limit of {max_bytes} bytes"
    for _ in range(MAX_INFORMATIONAL + 1):
        if isinstance(response := await next_event(), h11.Response):
            break
    else:
        raise MediaUrlError(source, "its host sends too many responses with a status of 1xx")
    headers = dict(response.headers)  # h11 converts the names to lower case
    if response.status_code in REDIRECTS:
        if b"location" not in headers:
            raise MediaUrlError(source, "its redirect has no location")
        try:
            return headers[b"location"].decode()
        except UnicodeDecodeError as error:
            raise MediaUrlError(source, "the location of its redirect is not a URL") from error
    if response.status_code != 200:
        raise MediaUrlError(source, "the status of the response is not 200")
    if b"content-encoding" in headers:
        raise MediaUrlError(source, "its file is compressed; expected no Content-Encoding")
    if int(headers.get(b"content-length", 0)) > max_bytes:
        raise MediaUrlError(source, too_large)
    body, pieces = bytearray(), 0
    while not isinstance(event := await next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += event.data
            pieces += 1
        if len(body) > max_bytes:
            raise MediaUrlError(source, too_large)
        if pieces > _PIECES + len(body) // _BYTES_A_PIECE:
            raise MediaUrlError(source, "its file comes in too small pieces")
    return bytes(body)
