"""The real server, as a process, under load: nobody hangs, nothing is lost, memory stays flat."""

import asyncio
import hashlib
import json
import os
import re
import signal
from collections import Counter
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from random import Random

import httpx
import numpy as np
import psutil
import pytest
from chaos.wire import STEADY, Http1, Lost, Message
from conftest import save_tiny
from fakes import until
from live_server import WAIT_S, served

pytestmark = pytest.mark.slow

CONNECTIONS = 2000


class Server:
    """`jaxembed serve` with a tiny model."""

    def __init__(self, url: str, pid: int):
        self.url, self.port = url, int(url.rsplit(":", 1)[1])
        self.process = psutil.Process(pid)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT_S)

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0


@pytest.fixture(name="start_server")
def _start_server(tiny_checkpoint, grid_file, tmp_path):
    @contextmanager
    def start(*flags: str, grid: Path = grid_file):
        command = [str(tiny_checkpoint), "--buckets", str(grid), "--max-batch-tokens", "128"]
        command += ["--cache-dir", str(tmp_path / "cache"), "--dtype", "float32", *flags]
        with served(*command) as (url, pid):
            yield Server(url, pid)

    return start


async def post(port: int, texts: list[str]) -> tuple[int, dict]:
    """One request on a connection of its own; status and body."""
    wire = await Http1.open(port)
    try:
        body = json.dumps({"input": texts}).encode()
        reply = await wire.ask(Message("/v1/embeddings", body))
        return reply.status, reply.json()
    finally:
        await wire.close()


async def wave(port: int, count: int = CONNECTIONS) -> Counter:
    """`count` requests at once; how often each status came."""
    texts = ["the cat sat on the mat " * (1 + n % 5) for n in range(8)]
    requests = [post(port, texts[: 1 + n % 8]) for n in range(count)]
    answers = await asyncio.wait_for(asyncio.gather(*requests), WAIT_S)
    for status, body in answers:
        assert (status == 200) == ("data" in body)
    return Counter(status for status, _ in answers)


def test_each_of_2000_requests_is_answered_and_memory_stays_flat(start_server):
    flags = ("--max-queue-tokens", "2000", "--max-concurrent-requests", "200", "--warmup", "full")
    resident: list[int] = []
    with start_server(*flags) as server:
        until(lambda: server.get("/ready").status_code == 200)
        # a leak grows with every wave; what the allocator keeps may grow by a step, once
        while len(resident) < 3 or (len(resident) < 12 and resident[-1] > 1.05 * resident[-3]):
            statuses = asyncio.run(wave(server.port))
            assert set(statuses) == {200, 429}
            until(lambda: server.metric("te_queue_size") == 0)
            until(lambda: server.process.num_fds() < 100)  # connections go with their clients
            resident.append(server.process.memory_info().rss)
        assert resident[-1] <= 1.05 * resident[-3], resident
        assert server.metric("jaxembed_queue_tokens") == 0
        assert asyncio.run(post(server.port, ["the cat"]))[0] == 200


def test_sigterm_under_load_loses_no_admitted_request(start_server):
    with start_server("--max-queue-tokens", "1000000", "--warmup", "full") as server:
        until(lambda: server.get("/ready").status_code == 200)

        # no two texts are the same: what is alike is computed once
        starts = product(["where", "is", "the", "red", "train"], repeat=7)
        texts = [" ".join(start) + " train" * 33 for start in islice(starts, 2_000)]

        async def load() -> list:
            parts = (texts[k : k + 50] for k in range(0, 2_000, 50))
            requests = [asyncio.create_task(post(server.port, part)) for part in parts]
            await asyncio.to_thread(until, lambda: server.metric("te_queue_size") > 0)
            await asyncio.to_thread(server.stop)
            return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), WAIT_S)

        answers = asyncio.run(load())
    # refused with 503 or at the door is an answer; a 200 that never came is a loss
    statuses = Counter(a[0] if isinstance(a, tuple) else type(a) for a in answers)
    assert set(statuses) <= {200, 503, Lost}, statuses
    assert statuses[200] > 0


@pytest.mark.parametrize("warmup", ["full", "minimal"])
def test_sigterm_while_compiling_is_a_clean_stop(start_server, tmp_path, warmup):
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"buckets": [[r, n] for r in (1, 2, 4, 8) for n in (16, 32, 64)]}))
    with start_server("--max-batch-tokens", "512", "--warmup", warmup, grid=grid) as server:
        server.stop()


NAMES = ("mean", "cls", "moved")  # two models by their pooling, and an alias
FLEETING = "fleeting"  # a key that comes and goes


def key_file(*keys: str) -> str:
    return "\n".join(
        f'[[key]]\nname = "{key}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"'
        for key in keys
    )


def asked(name: str, text: str, key: str = STEADY) -> Message:
    body = json.dumps({"input": text, "model": name}).encode()
    return Message("/v1/embeddings", body, {"authorization": f"Bearer {key}"})


async def clients(port: int, each: int, vectors: dict[tuple[str, str], list]) -> Counter:
    """32 clients with so many requests each; how often each status came. `vectors` are those of
    each model and text."""
    texts, statuses = sorted({text for _, text in vectors}), Counter()

    async def client(number: int) -> None:
        choose, wire = Random(number), await Http1.open(port)
        for _ in range(each):
            name, text = choose.choice(NAMES), choose.choice(texts)
            key = choose.choices((STEADY, FLEETING), (9, 1))[0]
            reply = await wire.ask(asked(name, text, key))
            statuses[reply.status] += 1
            if reply.status == 200:
                answer = reply.json()
                assert name in ("moved", answer["model"])
                got = np.array(answer["data"][0]["embedding"])
                assert np.abs(got - vectors[answer["model"], text]).max() < 1e-6
            else:
                assert (reply.status, key) == (401, FLEETING)
        await wire.close()

    await asyncio.gather(*map(client, range(32)))
    return statuses


async def move(wire: Http1, name: str) -> None:
    """Give the alias to a model."""
    body, headers = json.dumps({"model": name}).encode(), {"authorization": "Bearer admin"}
    message = Message("/v2/repository/aliases/moved", body, headers, "PUT")
    assert (await wire.ask(message)).status == 200


async def under_change(port: int, keys: Path, pid: int, vectors: dict) -> tuple[Counter, int]:
    """What `clients` returns while an alias moves and a key comes and goes; how often it moved."""
    wire, moves = await Http1.open(port), 1
    await move(wire, "mean")
    running = asyncio.create_task(clients(port, 625, vectors))
    while not running.done():
        keys.write_text(key_file(STEADY, FLEETING) if moves % 2 else key_file(STEADY))
        os.kill(pid, signal.SIGHUP)  # reads the file again
        await move(wire, NAMES[moves % 2])
        moves += 1
        await asyncio.sleep(0.1)
    await wire.close()
    return await running, moves


@pytest.mark.parametrize("front_ends", ["0", "4"])
def test_names_and_keys_change_under_20000_requests(tmp_path, front_ends):
    """No answer is another model's, and the counters are what the clients count."""
    mean, cls = (save_tiny(tmp_path / name, pooling=(name,)) for name in NAMES[:2])
    keys = tmp_path / "keys.toml"
    keys.write_text(key_file(STEADY, FLEETING))
    command = [str(mean), str(cls), "--served-model-name", f"mean={mean}"]
    command += ["--served-model-name", f"cls={cls}", "--cache-dir", str(tmp_path / "cache")]
    command += ["--max-batch-tokens", "128", "--dtype", "float32", "--front-ends", front_ends]
    with served(*command, "--api-key-file", str(keys), "--admin-key", "admin") as (url, pid):
        server = Server(url, pid)
        until(lambda: server.get("/ready").status_code == 200)
        texts = ["cat", "the dog sat", "a red sky", "the cat sat on the mat"]

        async def vectors() -> dict[tuple[str, str], list]:
            wire = await Http1.open(server.port)
            found = {}
            for name, text in product(NAMES[:2], texts):
                reply = await wire.ask(asked(name, text))
                found[name, text] = reply.json()["data"][0]["embedding"]
            await wire.close()
            return found

        of_models = asyncio.run(vectors())
        assert all(of_models["mean", text] != of_models["cls", text] for text in texts)
        statuses, moves = asyncio.run(
            under_change(server.port, keys, server.process.pid, of_models)
        )
        assert statuses.total() == 20_000
        assert moves > 10
        assert statuses[401] > 0
        shown = server.get("/metrics").text
        for series in (r'te_request_success\{method="single"[^}]*\}', r"te_embed_success\S*"):
            counted = re.findall(rf"^{series} (\S+)$", shown, re.MULTILINE)
            assert sum(map(float, counted)) == statuses[200] + len(of_models)
