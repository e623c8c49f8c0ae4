"""What clients can make a server hold: never more than twice the total it states."""

import asyncio
import contextlib
import json
import threading

import h2.config
import h2.connection
import h2.settings
import httpx
import psutil
import pytest
from fakes import until
from live_server import WAIT_S, served

pytestmark = pytest.mark.slow

MIB = 2**20
HELD = 48 * MIB  # --max-queue-bytes
ATTACK_S = 2.0


class Peak:
    """The resident memory of a process, watched in a thread."""

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self.start = self.highest = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.highest = max(self.highest, self._process.memory_info().rss)


@pytest.fixture(name="server", scope="module")
def _server(tiny_checkpoint, tmp_path_factory):
    """A server of constants: (url, pid)."""
    flags = ["--null-model", "--max-queue-bytes", str(HELD)]
    flags += ["--tokenization-workers", "1", "--max-queue-tokens", "100000000"]
    flags += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    with served(str(tiny_checkpoint), *flags) as (url, pid):
        until(lambda: httpx.get(url + "/ready").status_code == 200)
        httpx.post(url + "/embed", json={"inputs": "the cat"}).raise_for_status()
        yield url, pid


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def embed(inputs: bytes) -> bytes:
    return post("/embed", b'{"inputs": %s}' % inputs)


async def pour(port: int, data: bytes, read: bool) -> None:
    """Send the bytes again and again, each time on a connection of its own."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                await writer.drain()
                if read:
                    while await reader.read(MIB):
                        pass
                await asyncio.sleep(WAIT_S)
            finally:
                writer.transport.abort()


async def flood(port: int, *_: object) -> None:
    """DATA of HTTP/2 without an end to a route that takes no body, by a client that reads none of
    the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    head = [(":method", "GET"), (":path", "/metrics"), (":scheme", "http"), (":authority", "x")]
    client.send_headers(1, head)

    async def acknowledge() -> None:
        while data := await reader.read(65536):
            client.receive_data(data)

    reading = asyncio.create_task(acknowledge())
    try:
        while not reading.done():
            room = min(16384, client.local_flow_control_window(1))
            if room:
                client.send_data(1, bytes(room))
            writer.write(client.data_to_send())
            await writer.drain()
            await asyncio.sleep(0)
    finally:
        reading.cancel()
        writer.transport.abort()


TEXTS = [f'"{"the cat sat " * 80_000}"'] * 8
TOKENS = json.dumps({"inputs": [f"the cat sat {k}" for k in range(2000)]})
ATTACKS = {
    "bodies that never end": (pour, post("/embed", bytes(4 * MIB), 30 * MIB), False),
    "bodies nobody asked for": (flood,),
    "lists of nothing": (pour, embed(b"[" + b"[]," * (2 * MIB) + b"[]]"), True),
    "token ids": (pour, embed(b"[" + b"5," * (4 * MIB) + b"5]"), True),
    "texts": (pour, embed(f"[{','.join(TEXTS)}]".encode()), True),
    "wide texts": (pour, embed(f'"🙂{"the cat sat " * 600_000}"'.encode()), True),
    "answers that nobody reads": (pour, post("/embed_all", TOKENS.encode()), False),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_takes_at_most_twice_what_is_stated(server, name):
    url, pid = server
    attack, *arguments = ATTACKS[name]
    stated = httpx.get(url + "/info").json()["jaxembed"]["accounted_bytes"]

    async def attacked() -> None:
        port = int(url.rsplit(":", 1)[1])
        attackers = [asyncio.create_task(attack(port, *arguments)) for _ in range(20)]
        await asyncio.sleep(ATTACK_S)
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)

    with Peak(pid) as peak:
        asyncio.run(attacked())
        until(lambda: reservation(url) == 0)
    assert peak.highest - peak.start < 2 * stated
    assert httpx.post(url + "/embed", json={"inputs": "the cat"}, timeout=WAIT_S).status_code == 200


def reservation(url: str) -> float:
    """Bytes that requests hold, by the server's own count; its own request holds none."""
    lines = httpx.get(url + "/metrics", timeout=WAIT_S).text.splitlines()
    return float(next(line for line in lines if line.startswith("jaxembed_held_bytes ")).split()[1])
