"""Fetching files: what arrives, and that nothing is connected to which the rules refuse.

Servers of the tests listen on 127.0.0.1. Most fetchers here may connect to it, so that no rule but
the one under test keeps them from it.
"""

import asyncio
import contextlib
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

import pytest
import uvloop

from jaxembed.errors import MediaUrlError, ShuttingDown
from jaxembed.preprocessing.images.media_fetch import MAX_INFORMATIONAL, REDIRECTS, MediaFetcher
from jaxembed.preprocessing.images.media_urls import AllowedAddresses, parse_media_network

LIMIT = 1000  # bytes
SHORT_S = 0.1  # for what never comes; else the default
PICTURE = b"GIF89a" + bytes(range(256))
AUTHORITIES = ssl.create_default_context()  # made once: it reads hundreds of them
LOOPBACK = ip_address("127.0.0.1")

COUNT = "COUNT\r\n\r\n"  # a request of the tests themselves

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

each_loop = pytest.mark.parametrize("loop_factory", LOOPS.values(), ids=LOOPS)
"""The event loop of the library's users, and that of the server."""


class Server:
    """Answers every connection by `answer` once a request is read, and keeps the requests."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._connections = 0
        self._writers: dict[asyncio.Task, asyncio.StreamWriter] = {}
        self.requests: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        if (task := asyncio.current_task()) is not None:
            self._writers[task] = writer
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            if request != COUNT:
                self.requests.append(request)
                await self._answer(writer)
        writer.close()

    async def end(self) -> None:
        """Break off the connections, by which what serves them ends."""
        for writer in self._writers.values():
            writer.transport.abort()
        await asyncio.gather(*self._writers)

    async def connections(self) -> int:
        """How many there were: those before one of our own, which the system hands over last."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(COUNT.encode())
        await reader.read(1)
        writer.close()
        self._connections -= 1
        return self._connections


@contextlib.asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None):
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await server.end()


async def send(writer: asyncio.StreamWriter, part: bytes) -> None:
    if writer.is_closing():
        raise ConnectionResetError  # as asyncio says and uvloop does not
    writer.write(part)
    await writer.drain()


def says(*parts: bytes) -> Answer:
    """Answers with these bytes, in which PORT stands for the port of the server."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        port = str(writer.get_extra_info("sockname")[1]).encode()
        for part in parts:
            await send(writer, part.replace(b"PORT", port))

    return answer


def says_in_turn(*answers: bytes) -> Answer:
    """Answers each request with the next of these, and the last one again and again."""
    left = list(answers)

    async def answer(writer: asyncio.StreamWriter) -> None:
        await says(left.pop(0) if len(left) > 1 else left[0])(writer)

    return answer


def stalls(*parts: bytes) -> Answer:
    """Answers with these bytes and then not until the client leaves."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await says(*parts)(writer)
        await writer.wait_closed()

    return answer


def repeats(start: bytes, part: bytes) -> Answer:
    """Answers with `start`, and `part` again and again until the client leaves."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await send(writer, start)
        while True:
            await send(writer, part)

    return answer


def ok(body: bytes = PICTURE, *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = ["HTTP/1.1 200 OK", f"Content-Length: {size}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} X\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def fetcher(server: Server, *hosts: str, **settings) -> MediaFetcher:
    """One that fetches from `hosts`, a.test if none are named, which are all at the server."""
    defaults = {
        "max_bytes": LIMIT,
        "ports": [server.port],
        "resolve": lambda host, port: ["127.0.0.1"],
        "allowed_address": LOOPBACK.__eq__,
        "tls": AUTHORITIES,
    }
    return MediaFetcher(hosts or ["a.test"], **(defaults | settings))


async def fetched(answer: Answer, **settings) -> bytes:
    """What comes of a URL whose host is a server that answers so."""
    async with serving(answer) as server:
        return await fetcher(server, **settings).fetch(f"http://a.test:{server.port}/cat.gif")


async def refused(answer: Answer, rule: str, **settings) -> None:
    with pytest.raises(MediaUrlError, match=rule) as caught:
        await fetched(answer, **settings)
    assert "127.0.0.1" not in str(caught.value)


async def refusal(server: Server, fetcher: MediaFetcher, url: str) -> str:
    """The message of a refusal before anything was connected to."""
    try:
        await fetcher.fetch(url)
    except MediaUrlError as error:
        message = str(error)
    else:
        pytest.fail(f"{url} was fetched")
    assert "127.0.0.1" not in message.replace(repr(url), "")
    assert await server.connections() == 0, url
    return message


# What arrives


@pytest.mark.parametrize(
    "parts",
    [
        [ok()],
        [ok(PICTURE, "Content-Type: text/html")],
        [ok(), b"more than was said"],
        [CHUNKED, b"6\r\nGIF89a\r\n", b"100;a=b\r\n" + PICTURE[6:] + b"\r\n", b"0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\n", PICTURE],  # to the end of the connection
        [b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", b"HTTP/1.1 100 C\r\n\r\n", ok()],
        [b"HTTP/1.1 100 C\r\n\r\n" * MAX_INFORMATIONAL, ok()],
    ],
)
@each_loop
async def test_a_file_arrives_however_it_is_framed(parts, loop_factory):
    assert await fetched(says(*parts)) == PICTURE


async def test_the_request_is_of_the_name_and_asks_for_no_compression():
    async with serving(says(ok())) as server:
        media = fetcher(server, "bücher.test")
        await media.fetch(f"http://BÜCHER.test.:{server.port}/ä?q=1#fragment")
        assert await server.connections() == 1
    assert server.requests[0].replace(str(server.port), "PORT").split("\r\n") == [
        "GET /%C3%A4?q=1 HTTP/1.1",
        "Host: xn--bcher-kva.test:PORT",
        "User-Agent: jaxembed",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
        "",
        "",
    ]


async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    async with serving(says(ok(b"of a proxy"))) as proxy, serving(says(ok())) as server:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await fetcher(server).fetch(f"http://a.test:{server.port}/") == PICTURE
        assert await proxy.connections() == 0


async def test_the_next_address_is_tried_if_one_takes_no_connection():
    async with serving(says(ok())) as server:
        media = fetcher(
            server,
            resolve=lambda host, port: ["127.0.0.3", "::ffff:127.0.0.1"],
            allowed_address=lambda address: address.is_loopback,
        )
        assert await media.fetch(f"http://a.test:{server.port}/") == PICTURE


@each_loop
async def test_no_more_than_so_many_are_fetched_at_once(loop_factory):
    """Answers come in pairs: with fewer than two at once none would, and three would be seen."""
    active, seen, pair = 0, [], asyncio.Barrier(2)

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal active
        active += 1
        seen.append(active)
        await pair.wait()
        active -= 1
        await says(ok())(writer)

    async with serving(answer) as server:
        media = fetcher(server, concurrency=2)
        url = f"http://a.test:{server.port}/"
        files = await asyncio.gather(*(media.fetch(url) for _ in range(6)))
        await media.aclose()
        with pytest.raises(ShuttingDown):
            await media.fetch(url)
        await media.aclose()
    assert files == [PICTURE] * 6
    assert max(seen) == 2


# What is refused before anything is connected to


# Hosts that are not allowed, in forms that fool parsers, by the rule that refuses them; more forms
# are in test_media_urls.py.
REFUSED_URLS = {
    "its host is not one of those": [
        "http://127.0.0.1:{port}/",
        "http://127\u30020\u30020\u30021:{port}/",
        "http://[64:ff9b::7f00:1]:{port}/",
        "http://127.0.0.1:{port}#@a.test/",
        "http://c.test:{port}/",
    ],
    "its host is a number": ["http://127.1:{port}/", "http://a.test.127.0.0.1:{port}/"],
    "malformed": ["http://127%2e0%2e0%2e1:{port}/"],
    "user name or password": ["http://a.test:80@127.0.0.1:{port}/"],
    "backslash": ["http://a.test\\@127.0.0.1:{port}/"],
    "control character": ["http://a.test:{port}/ HTTP/1.1\r\nX: y"],
    "its port is not allowed": ["http://b.test:{port}/", "http://a.test/"],
    "expected http:// or https://": ["file:///etc/passwd", "gopher://a.test:{port}/_GET"],
}


async def test_urls_that_are_not_allowed_reach_nothing():
    """Every address is allowed and every name is that of the server: only rules of URLs refuse."""
    async with serving(says(ok())) as server:
        hosts = "a.test", "*.c.test", "b.test:8443"
        media = fetcher(server, *hosts, allowed_address=lambda address: True)
        for rule, urls in REFUSED_URLS.items():
            for url in urls:
                message = await refusal(server, media, url.format(port=server.port))
                assert rule in message, url


@pytest.mark.parametrize(
    ("host", "addresses", "url"),
    [
        ("a.test", ["127.0.0.1"], "http://a.test:{port}/"),
        ("a.test", ["8.8.8.8", "127.0.0.1"], "http://a.test:{port}/"),
        ("a.test", ["2606:4700::1", "::ffff:127.0.0.1"], "http://a.test:{port}/"),
        ("a.test", ["fe80::1%2"], "http://a.test:{port}/"),
        ("127.0.0.1", None, "http://127.0.0.1:{port}/"),
        ("::ffff:127.0.0.1", None, "http://[::ffff:7f00:1]:{port}/"),
        ("[::]:{port}", None, "http://[::]:{port}/"),
    ],
)
async def test_hosts_whose_addresses_are_not_all_public_reach_nothing(host, addresses, url):
    """Of a name, or of an address that is named itself."""
    options = {"resolve": lambda host, port: addresses} if addresses else {}
    async with serving(says(ok())) as server:
        media = MediaFetcher([host.format(port=server.port)], ports=[server.port], **options)
        rule = "not all addresses of its host are pub" if addresses else "public"
        assert rule in await refusal(server, media, url.format(port=server.port))


NETWORK = AllowedAddresses([parse_media_network("127.0.0.0/29")])


@pytest.mark.parametrize(
    ("addresses", "arrives"),
    [
        (["127.0.0.1"], True),
        (["::ffff:127.0.0.1"], True),
        (["127.0.0.1", "127.0.0.9"], False),  # all must be allowed
        (["10.0.0.1", "127.0.0.1"], False),
        (["169.254.169.254"], False),
    ],
)
async def test_a_host_may_be_in_a_network_that_is_named(addresses, arrives):
    async with serving(says(ok())) as server:
        media = fetcher(server, resolve=lambda host, port: addresses, allowed_address=NETWORK)
        url = f"http://a.test:{server.port}/"
        if arrives:
            assert await media.fetch(url) == PICTURE
        else:
            assert "in a network of --allow-media-network" in await refusal(server, media, url)


@pytest.mark.parametrize("location", ["/", "http://a.test:PORT/", "//a.test.:PORT/"])
async def test_a_name_is_looked_up_once_for_each_request(location):
    """A resolver that answers with another address the second time gains nothing by it."""
    asked = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1", "127.0.0.1"]

    assert await fetched(says(ok()), resolve=resolve) == PICTURE
    assert asked == ["a.test"]
    asked.clear()
    await refused(says(redirect(location)), "^a redirect of .*: not all addresses", resolve=resolve)
    assert asked == ["a.test", "a.test"]


@pytest.mark.parametrize(
    "answer", [[], socket.gaierror(socket.EAI_NONAME, "x"), OSError("x"), UnicodeError("x"), ["x"]]
)
async def test_a_name_without_an_address_is_refused(answer):
    def resolve(host: str, port: int) -> list[str]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    await refused(says(ok()), "its host has no address", resolve=resolve)


async def test_names_that_are_never_found_take_no_longer_than_a_fetch_may():
    release = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        release.wait()
        return ["127.0.0.1"]

    async with serving(says(ok())) as server:
        media = fetcher(server, resolve=resolve, timeout_s=SHORT_S, concurrency=2)
        urls = [f"http://a.test:{server.port}/"] * 4  # more than there are threads
        failures = await asyncio.gather(*map(media.fetch, urls), return_exceptions=True)
        release.set()
        assert all("within 0.1 s" in str(failure) for failure in failures)
        assert await server.connections() == 0
        await media.aclose()


# Redirects


async def targets(*answers: bytes, **settings) -> list[str]:
    """The targets that are asked for, one after the other, to get the picture."""
    async with serving(says_in_turn(*answers)) as server:
        media = fetcher(server, "a.test", "b.test", "*.c.test", **settings)
        assert await media.fetch(f"http://a.test:{server.port}/x/y") == PICTURE
        assert await server.connections() == len(server.requests)
        return [request.split()[1] for request in server.requests]


@pytest.mark.parametrize("status", REDIRECTS)
@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/z", "/z"),
        ("", "/x/y"),
        ("//b.test:PORT/z", "/z"),
        ("http://b.test:PORT#fragment", "/"),
        ("HTTP://d.c.test.:PORT/ä", "/%C3%A4"),
    ],
)
async def test_redirects_are_followed(status, location, target):
    assert await targets(redirect(location, status), ok()) == ["/x/y", target]


async def test_so_many_redirects_are_followed_and_no_more():
    hops = [redirect("/1"), redirect("/2"), redirect("/3")]
    assert await targets(*hops, ok()) == ["/x/y", "/1", "/2", "/3"]
    with pytest.raises(MediaUrlError, match="more than 3 redirects"):
        await targets(*hops, redirect("/4"), ok())
    with pytest.raises(MediaUrlError, match="more than 0 redirects"):
        await targets(redirect("/1"), ok(), max_redirects=0)
    with pytest.raises(MediaUrlError, match="more than 3 redirects"):
        await targets(redirect("/x/y"))  # a loop


@pytest.mark.parametrize(
    ("location", "rule"),
    [
        ("http://127.0.0.1:PORT/", "its host is not one of those"),
        ("http://b.test:PORT/", "its host is not one of those"),
        ("http://c.test:PORT/", "not all addresses"),
        ("///127.0.0.1:PORT/", "malformed|more than 3 redirects"),
        ("http://a.test:22/", "its port is not allowed"),
        ("/\\127.0.0.1:PORT/", "backslash"),
        ("/ä\tb", "control character"),
        ("file:///etc/passwd", "expected http:// or https://"),
    ],
)
async def test_redirects_obey_all_rules_and_messages_do_not_say_where_they_lead(location, rule):
    """Also where the hosts are in a network that is named, of which c.test has left."""

    def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.9"] if host == "c.test" else ["127.0.0.1"]

    async with serving(says(redirect(location))) as server:
        media = fetcher(server, "a.test", "c.test", resolve=resolve, allowed_address=NETWORK)
        with pytest.raises(MediaUrlError, match=rule) as caught:
            await media.fetch(f"http://a.test:{server.port}/x")
        followed = "more than" in caught.value.rule  # it led to where it was, again and again
        assert await server.connections() == (4 if followed else 1)
        message = str(caught.value)
        assert followed or message.startswith(
            f"a redirect of 'http://a.test:{server.port}/x' cannot be fetched: "
        )
        for secret in ("127.0.0.1", "passwd", "\\"):
            assert secret not in message


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 302 X\r\n\r\n", b"HTTP/1.1 302 X\r\nLocation: /\xff\xfe\r\n\r\n"]
)
async def test_a_redirect_to_no_url_is_refused(answer):
    await refused(says(answer), "redirect")


# Answers that are refused


@pytest.mark.parametrize("status", [201, 204, 206, 304, 305, 404, 500])
async def test_only_status_200_is_success(status):
    answer = f"HTTP/1.1 {status} Secret\r\nLocation: /\r\nContent-Length: 6\r\n\r\nsecret"
    with pytest.raises(MediaUrlError, match=r"status of the response is not 200$") as caught:
        await fetched(says(answer.encode()))
    assert "ecret" not in str(caught.value)
    assert str(status) not in str(caught.value).replace("200", "").split("cannot")[1]


@pytest.mark.parametrize("coding", ["gzip", "br", "x-gzip, identity"])
async def test_compressed_files_are_refused(coding):
    answer = says(ok(gzip.compress(bytes(100)), f"Content-Encoding: {coding}"))
    await refused(answer, "expected no Content-Encoding")


async def test_the_limit_of_bytes_is_exact():
    chunk = b"%x\r\n%b\r\n"
    for size, fits in ((LIMIT, True), (LIMIT + 1, False)):
        body = b"x" * size
        framed = CHUNKED + chunk % (size, body) + b"0\r\n\r\n"
        for answer in (ok(body), framed, b"HTTP/1.1 200 OK\r\n\r\n" + body):
            if fits:
                assert await fetched(says(answer)) == body
            else:
                await refused(says(answer), f"larger than the limit of {LIMIT} bytes")


async def test_a_length_over_the_limit_is_refused_before_the_file_is_read():
    """Nothing of it ever comes."""
    await refused(stalls(ok(b"", length=LIMIT + 1)), "larger than the limit")
    await refused(stalls(ok(b"", length=10**19)), "larger than the limit")


@pytest.mark.parametrize(
    ("start", "part", "rule"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 100, "larger than the limit"),
        (CHUNKED, b"64\r\n" + b"x" * 100 + b"\r\n", "larger than the limit"),
        (CHUNKED, b"1\r\nx\r\n" * 100, "larger than the limit|too small pieces"),
        (CHUNKED + b"1", b";a" * 100, "headers are too long"),
        (b"HTTP/1.1 200 OK\r\na: ", b"b" * 100, "headers are too long"),
        (b"", b"x" * 100, "is not HTTP"),
        (b"", b"HTTP/1.1 100 C\r\n\r\n" * 10, "too many responses with a status of 1xx"),
    ],
)
@each_loop
async def test_answers_without_an_end_are_refused(start, part, rule, loop_factory):
    await refused(repeats(start, part), rule)


async def test_a_file_in_too_small_pieces_is_refused():
    parts = b"1\r\nx\r\n" * 6000
    await refused(says(CHUNKED, parts, b"0\r\n\r\n"), "too small pieces", max_bytes=10**6)
    parts = (b"200\r\n" + b"x" * 512 + b"\r\n") * 6000
    whole = await fetched(says(CHUNKED, parts, b"0\r\n\r\n"), max_bytes=10**7)
    assert whole == b"x" * 512 * 6000


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
        ok(b"1234", length=5),
        CHUNKED + b"5\r\n12345\r\n",
        CHUNKED + b"x\r\n12345\r\n0\r\n\r\n",
        CHUNKED + b"5\r\n12345xx0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n12345",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
@each_loop
async def test_answers_that_break_off_or_are_no_http_are_refused(answer, loop_factory):
    await refused(says(answer), "its host closed the connection, its response is not HTTP")


@pytest.mark.parametrize(
    "parts", [[], [b"HTTP/1.1 200 OK\r\n"], [ok(b"1234", length=5)], [CHUNKED, b"1\r\nx\r\n"]]
)
@each_loop
async def test_what_does_not_come_in_time_is_refused(parts, loop_factory):
    await refused(stalls(*parts), "did not arrive within 0.1 s", timeout_s=SHORT_S)


async def test_the_time_is_that_of_all_redirects_together():
    endless = {"timeout_s": SHORT_S, "max_redirects": 10**9}
    await refused(says(redirect("/")), "did not arrive within 0.1 s", **endless)


# TLS


@pytest.fixture(scope="module", name="certificate")
def make_certificate(tmp_path_factory) -> tuple[str, str]:
    """The files of a certificate for a.test and of its key; the certificate signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=a.test -addext subjectAltName=DNS:a.test -out {files[0]} -keyout {files[1]}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return files


@contextlib.asynccontextmanager
async def serving_tls(answer: Answer, certificate: tuple[str, str]):
    """A server with TLS, the names that clients asked it for, and settings that trust it."""
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _, name, __: names.append(name)
    async with serving(answer, context) as server:
        yield server, names, {"tls": ssl.create_default_context(cafile=certificate[0])}


@each_loop
async def test_https_asks_for_the_name_and_checks_its_certificate(certificate, loop_factory):
    async with serving_tls(says(ok()), certificate) as (server, names, trust):
        media = fetcher(server, "a.test", "b.test", **trust)
        assert await media.fetch(f"https://A.test.:{server.port}/") == PICTURE
        assert names == ["a.test"]
        assert f"\r\nHost: a.test:{server.port}\r\n" in server.requests[0]
        for stranger, host in ((media, "b.test"), (fetcher(server), "a.test")):
            with pytest.raises(MediaUrlError, match="no certificate that is valid for its"):
                await stranger.fetch(f"https://{host}:{server.port}/")
        assert len(server.requests) == 1


async def test_a_redirect_from_https_to_http_is_refused(certificate):
    async with serving(says(ok())) as plain:
        answer = says(redirect(f"http://a.test:{plain.port}/"))
        async with serving_tls(answer, certificate) as (server, _, trust):
            media = fetcher(server, ports=[server.port, plain.port], **trust)
            with pytest.raises(MediaUrlError, match=r"redirects from https to http$"):
                await media.fetch(f"https://a.test:{server.port}/")
            assert len(server.requests) == 1
            assert await plain.connections() == 0


@pytest.mark.parametrize("greeting", [b"220 mail.test\r\n", b""])
@each_loop
async def test_a_peer_that_does_not_listen_is_refused(greeting, loop_factory):
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    server = Server(says(ok()))
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        with pytest.raises(MediaUrlError, match=r"no connection to its host could be made$"):
            await fetcher(server).fetch(f"https://a.test:{server.port}/")
