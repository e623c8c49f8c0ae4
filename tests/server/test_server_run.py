"""A real server on loopback: clients that vanish, shutdown, ports, signals."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import httpx
import openai
import pytest
from fake_embedder import FakeEmbedder
from fakes import count_of
from live_server import WAIT_S
from openai import AsyncOpenAI

from jaxembed.config import ServerConfig
from jaxembed.errors import BackendError, ConfigError
from jaxembed.server import run as server_run
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models
from jaxembed.server.run import listen, run, serve, url

ASK = {"inputs": "a"}


@contextlib.asynccontextmanager
async def serving(embedder, config=None, tracer=None, send_buffer: int | None = None):
    """A server on a free port: its client, its shutdown event and its task. `send_buffer` is how
    many bytes the system keeps for a client that does not read."""
    config = config or ServerConfig()
    listener = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.listen()  # `serve` does too, but only in the task's first turn
    address = url(listener)
    shutdown = asyncio.Event()
    app = create_app(Models([embedder]), config, tracer=tracer)
    task = asyncio.create_task(serve(app, shutdown, [listener]))
    try:
        async with httpx.AsyncClient(base_url=address, timeout=WAIT_S, trust_env=False) as client:
            yield client, shutdown, task
    finally:
        shutdown.set()
        await task


async def test_what_was_done_of_late_is_noted_while_the_server_runs(monkeypatch):
    monkeypatch.setattr(server_run, "SAMPLE_S", 0.001)
    shutdown, app = asyncio.Event(), create_app(Models([FakeEmbedder()]), ServerConfig())
    task = asyncio.create_task(serve(app, shutdown, [listen("127.0.0.1", 0)]))
    while len(app.service.history) < 2:
        await asyncio.sleep(0)
    shutdown.set()
    await task


async def test_work_of_a_vanished_client_is_cancelled():
    embedder = FakeEmbedder()
    embedder.gate = asyncio.Event()
    dropped = embedder.telemetry.request_failure.labels("dropped")
    async with serving(embedder) as (client, _, _):
        work = asyncio.create_task(client.post("/embed", json=ASK))
        await embedder.entered.wait()
        work.cancel()
        await embedder.cancelled.wait()
        assert count_of(dropped) == 1
        embedder.gate.set()
        assert (await client.post("/embed", json=ASK)).status_code == 200
    assert count_of(dropped) == 1


async def test_shutdown_answers_what_was_admitted_and_refuses_the_rest():
    embedder = FakeEmbedder()
    embedder.gate = asyncio.Event()
    async with serving(embedder) as (client, shutdown, task):
        await client.get("/health")  # leaves a connection alive and idle
        work = asyncio.create_task(client.post("/embed", json=ASK))
        await embedder.entered.wait()
        shutdown.set()
        while (await client.get("/ready")).status_code == 200:
            pass
        refused = await client.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.headers["connection"] == "close"
        assert not task.done()
        embedder.gate.set()
        assert (await work).status_code == 200
        await task
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_the_drain_ends_when_its_time_is_up(caplog):
    embedder = FakeEmbedder()
    embedder.gate = asyncio.Event()
    async with serving(embedder, ServerConfig(drain_timeout_s=0.05)) as (client, shutdown, task):
        work = asyncio.create_task(client.post("/embed", json=ASK))
        await embedder.entered.wait()
        shutdown.set()
        await task
        late = await work
        assert late.status_code == 503
        assert late.json()["error_type"] == "Unhealthy"
        assert late.headers["connection"] == "close"
        assert late.headers["x-request-id"] != "-"
    assert embedder.cancelled.is_set()
    assert "not answered within 0.05 s: 1; raise" in caplog.text


async def test_the_client_of_openai_is_at_home():
    async with serving(FakeEmbedder()) as (client, _, _):
        base_url = f"{str(client.base_url).rstrip('/')}/v1"
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        ai = AsyncOpenAI(api_key="x", base_url=base_url, http_client=http)
        asked = {"model": "test/fake", "input": ["a", "b"]}
        answer = await ai.embeddings.create(**asked)
        plain = await ai.embeddings.create(**asked, encoding_format="float")
        names = [model.id async for model in ai.models.list()]
        with pytest.raises(openai.NotFoundError, match="this server has test/fake"):
            await ai.embeddings.create(model="other", input="a")
        await ai.close()
    assert answer.usage.total_tokens == 2
    for got, wanted in zip(answer.data, plain.data, strict=True):
        assert got.embedding == pytest.approx(wanted.embedding)
    assert names == ["test/fake"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"\x00\x01\r\n\r\n",
    ],
)
async def test_odd_requests_are_no_server_errors(request_bytes):
    async with serving(FakeEmbedder()) as (client, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(request_bytes)
        first_line = await reader.readline()
        assert first_line.split()[1][:1] in (b"2", b"3", b"4"), first_line
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("path", "config", "status"),
    [
        ("/embed", ServerConfig(payload_limit=1000), 413),
        ("/embed", ServerConfig(api_keys=("key",)), 401),
        ("/nowhere", ServerConfig(), 404),
    ],
)
async def test_a_refusal_reaches_a_client_that_is_still_sending(path, config, status):
    async with serving(FakeEmbedder(), config) as (client, _, _):
        response = await client.post(path, json={"inputs": "a" * 8_000_000})
        assert response.status_code == status
        assert set(response.json()) == {"error", "error_type"}
        assert (await client.get("/health")).status_code == 200


async def test_a_chunked_body_is_limited_too():
    async def chunks():
        yield b'{"inputs": "'
        for _ in range(100):
            yield b"a" * 1000

    async with serving(FakeEmbedder(), ServerConfig(payload_limit=1000)) as (client, _, _):
        headers = {"content-type": "application/json"}
        response = await client.post("/embed", content=chunks(), headers=headers)
        assert response.status_code == 413


async def test_metrics_have_a_port_of_their_own(caplog):
    caplog.set_level(logging.INFO)
    async with serving(FakeEmbedder(), ServerConfig(prometheus_port=0)) as (client, _, _):
        while not (told := re.search(r"listening on (\S+)/metrics", caplog.text)):
            await asyncio.sleep(0)
        assert "te_request_count" in (await client.get(f"{told[1]}/metrics")).text
        assert (await client.get(f"{told[1]}/info")).status_code == 404


def test_the_log_ends_with_what_is_ready_and_where_to_try_it():
    models, address = Models([FakeEmbedder()]), "http://127.0.0.1:8080"
    told = list(server_run._ready_lines(models, ServerConfig(), address))
    lines = ["ready: test/fake on cpu in float32", f"API documentation: {address}/docs"]
    assert told == [*lines, f"try it in a browser: {address}/playground"]
    assert list(server_run._ready_lines(models, ServerConfig(host="0.0.0.0"), address)) == lines


def test_a_busy_port_is_a_config_error_that_names_the_flag():
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*--port"):
            listen("127.0.0.1", port)
        with pytest.raises(ConfigError, match="--prometheus-port"):
            listen("127.0.0.1", port, flag="--prometheus-port")
    with pytest.raises(ConfigError, match="--host"):
        listen("256.256.256.256", 0)


STUCK = """
import threading
from fake_embedder import FakeEmbedder
from jaxembed.config import ServerConfig
from jaxembed.server import run
from jaxembed.server.registry.models import Models

run.WATCHDOG_S = 0.1
threading.Thread(target=threading.Event().wait).start()
print("stuck", flush=True)
run.logging.basicConfig(level="INFO", stream=run.sys.stdout)
run.run(Models([FakeEmbedder()]), ServerConfig(port=0, drain_timeout_s=0.1))
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM on Windows")
def test_the_watchdog_ends_a_process_that_a_thread_holds_up():
    here = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", STUCK],
        env={**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while "listening on" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
            assert "still running" in process.stdout.read()
        finally:
            process.kill()


@pytest.fixture(name="handlers_restored")
def _handlers_restored():
    """What a server does at signals ends with it, as its process does elsewhere."""
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("handlers_restored")
def test_a_model_that_does_not_compile_is_named_and_ends_the_server():
    fault = Mock(side_effect=RuntimeError("no such op\nand a long story"))
    broken = FakeEmbedder(name="broken", wait_ready=fault)
    with pytest.raises(BackendError, match=r"^broken could not be compiled: no such op$"):
        run(Models([FakeEmbedder(), broken]), ServerConfig(port=0))
