"""Front-end processes: real ones, beside an engine in this process."""

import asyncio
import base64
import contextlib
import os
import signal
import socket
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from colqwen_sources import write_jina_v4
from conftest import save_tiny
from dual_sources import data_uri, picture, png
from live_server import WAIT_S
from test_front_frames import WORKS, framed, submit

from jaxembed import __version__
from jaxembed.config import ServerConfig
from jaxembed.data.spec import DenseLayer, PerToken
from jaxembed.engine.admission import Cost
from jaxembed.errors import BackendError
from jaxembed.memory import MIB, resident_bytes
from jaxembed.server.app import create_app
from jaxembed.server.front import frames, supervisor
from jaxembed.server.front.backend import Backend
from jaxembed.server.front.client import EngineClient
from jaxembed.server.front.process import RemoteAccess
from jaxembed.server.front.supervisor import FrontEnds
from jaxembed.server.http.listening import listen, share, url
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.run import serve
from jaxembed.server.service import Service

ASK = {"input": "cat", "model": "tiny"}
PAIR = {"input": ["cat", "dog"], "model": "tiny"}


class Fronted:
    """A server with front ends."""

    def __init__(self, app: Any, fronts: FrontEnds, address: str):
        self.app, self.fronts, self.url = app, fronts, address
        self.models = app.service.models
        self.capacity = self.models.capacity

    def client(self) -> httpx.AsyncClient:
        """A client with a connection of its own."""
        return httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, trust_env=False)

    async def ask(self, body: dict = ASK, path: str = "/v1/embeddings", method: str = "POST"):
        async with self.client() as client:
            return await client.request(method, path, json=body)

    async def waiting(self, count: int) -> list[asyncio.Task]:
        """So many requests, all of which are admitted and wait for the device."""
        asks = [asyncio.create_task(self.ask()) for _ in range(count)]
        while self.capacity.inputs < count:
            await asyncio.sleep(0.01)
        return asks

    async def until_serving(self, count: int) -> None:
        while self.fronts.serving < count:
            await asyncio.sleep(0.01)

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self.fronts._fronts if one.process is not None]

    @property
    def idle(self) -> bool:
        """Whether nothing is admitted."""
        one = self.capacity
        return not (one.inputs or one.tokens or one.small_inputs or one.small_tokens)


@contextlib.asynccontextmanager
async def serving(embedder: Any, count: int = 2, tracer: Any = None, **settings: Any):
    """Serve a tiny model with some front ends; all of them serve at the start."""
    config = ServerConfig(front_ends=count, admin_key="admin", **settings)
    models = Models([embedder.model], {embedder.model.name: ("tiny", "other")})
    app = create_app(models, config, ModelPool(models), tracer=tracer)
    listeners = share(listen("127.0.0.1", 0), count)
    fronts = app.service.fronts = FrontEnds(app, listeners)
    shutdown = asyncio.Event()
    task = asyncio.create_task(serve(app, shutdown, listeners))
    server = Fronted(app, fronts, url(listeners[0]))
    waiting = asyncio.create_task(server.until_serving(count))
    await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield server
    finally:
        shutdown.set()
        await task
        embedder.model.admission.draining = False  # the embedder is shared


@pytest.fixture(name="fronted")
def _fronted(embedder):
    return partial(serving, embedder)


async def test_answers_are_those_of_one_process(fronted, embedder):
    texts = ["cat", "the dog sat on mat " * 3, "a red blue sky"]
    async with fronted() as server:
        answers = [await server.ask({"input": texts, "model": "tiny"}) for _ in range(4)]
        vectors = [item["embedding"] for item in answers[0].json()["data"]]
        assert {answer.text for answer in answers} == {answers[0].text}
        np.testing.assert_allclose(vectors, embedder.encode(texts), atol=1e-6)
        info = (await server.ask(path="/info", method="GET")).json()
        assert info["jaxembed"]["front_ends"] == 2
        shown = (await server.ask(path="/metrics", method="GET")).text
        assert 'te_request_success{method="batch"}' in shown
        assert server.idle


async def test_front_ends_find_entities(load_model, tmp_path):
    labels = ("O", "B-PER", "I-PER", "LOC")
    head = PerToken((DenseLayer(32, len(labels), activation="identity"),))
    path = save_tiny(tmp_path / "tagger", heads={"token_logits": head}, labels=labels)
    tagger = load_model(path, 2, 64)
    texts = ["the cat sat on mat", "a red blue sky " * 3]
    async with serving(tagger, 1) as server:
        body = {"inputs": texts, "aggregation_strategy": "simple", "model": "tiny"}
        answer = (await server.ask(body, path="/token_classify")).json()
        found = tagger.token_classify(texts, "simple")
        wanted = [[(one.label, one.word, one.start, one.end) for one in some] for some in found]
        keys = ("entity_group", "word", "start", "end")
        assert [[tuple(one[key] for key in keys) for one in some] for some in answer] == wanted
        refused = await server.ask({"inputs": [[1, 2]], "model": "tiny"}, path="/token_classify")
        assert (refused.status_code, server.idle) == (422, True)


async def test_front_ends_embed_images_with_the_adapter_of_a_task(load_model, tmp_path):
    jina, image = load_model(write_jina_v4(tmp_path / "jina"), 1, 256), picture(0, 56, 84)
    wanted = jina.encode([image, "a"], prompt_name="passage", adapter="code")
    async with serving(jina, 1) as server:
        body = {"input": [{"image": data_uri(image)}, {"text": "a"}], "task": "code.passage"}
        answer = (await server.ask(body)).json()
        got = [one["embedding"] for one in answer["data"]]
        np.testing.assert_allclose(got, wanted, atol=2e-6)


async def test_a_front_end_returns_the_memory_of_large_images(clip):
    def body(*sides: int) -> dict:
        data = base64.b64encode(png(np.zeros((*sides, 4), np.uint8))).decode()
        image = {"type": "image", "url": f"data:image/png;base64,{data}"}
        return {"inputs": [image], "model": "tiny"}

    async with serving(clip, 1) as server, asyncio.timeout(WAIT_S):
        assert (await server.ask(body(8, 8), path="/embed")).status_code == 200  # imports Pillow
        statm = Path(f"/proc/{server.pids[0]}/statm")
        before, large = resident_bytes(statm), body(4000, 4000)
        answers = await asyncio.gather(*(server.ask(large, path="/embed") for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        while resident_bytes(statm) > before + 100 * MIB:
            await asyncio.sleep(0.05)


async def test_four_front_ends_admit_what_one_process_would(fronted, embedder, held, monkeypatch):
    # with two inputs a request is not small, so the reserve does not take it
    monkeypatch.setattr(embedder.model.admission.capacity, "max_inputs", 127)
    async with fronted(4) as server:
        asks = [asyncio.create_task(server.ask(PAIR)) for _ in range(150)]
        for answered in islice(asyncio.as_completed(asks), 150 - 64):
            assert (await answered).status_code == 429
        assert server.capacity.inputs == 128
        held.set()
        statuses = Counter([(await ask).status_code for ask in asks])
        assert statuses == {200: 64, 429: 86}
        assert server.idle


async def test_a_killed_front_end_loses_its_own_requests_and_nothing_else(fronted, held):
    async with fronted(2) as server:
        asks = await server.waiting(40)
        victim = server.pids[0]
        os.kill(victim, signal.SIGKILL)
        await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
        while server.capacity.inputs != sum(not ask.done() for ask in asks):
            await asyncio.sleep(0.01)
        held.set()
        results = await asyncio.gather(*asks, return_exceptions=True)
        lost = [one for one in results if isinstance(one, httpx.TransportError)]
        assert lost
        assert all(one.status_code == 200 for one in results if one not in lost)
        await server.until_serving(2)
        assert victim not in server.pids
        assert {(await server.ask()).status_code for _ in range(8)} == {200}
        assert server.idle


async def test_a_stopped_front_end_makes_nobody_else_wait(fronted, monkeypatch):
    monkeypatch.setattr(supervisor, "COLLECT_S", 0.2)
    monkeypatch.setattr(supervisor, "UPDATE_S", 0.2)
    async with fronted(2) as server:
        connections = [server.client() for _ in range(16)]
        for client in connections:  # each keeps the front end that it has
            assert (await client.post("/v1/embeddings", json=ASK)).status_code == 200
        victim = server.pids[0]
        os.kill(victim, signal.SIGSTOP)
        asks = [asyncio.create_task(one.post("/v1/embeddings", json=ASK)) for one in connections]
        done, waiting = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
        assert {(await ask).status_code for ask in done} == {200}
        await server.fronts.collect()  # without it
        server.models.name_alias("new", "tiny")
        await server.fronts.update()  # kills it: it would not know the name
        await asyncio.gather(*waiting, return_exceptions=True)
        await server.until_serving(2)
        assert victim not in server.pids
        asked = {**ASK, "model": "new"}
        assert {(await server.ask(asked)).status_code for _ in range(8)} == {200}
        for client in connections:
            await client.aclose()


async def test_names_are_in_use_everywhere_when_the_change_is_answered(fronted):
    auth = {"authorization": "Bearer admin"}
    async with fronted(2) as server, server.client() as client:
        for k in range(5):
            path = f"/v2/repository/aliases/name-{k}"
            moved = await client.put(path, json={"model": "tiny"}, headers=auth)
            assert moved.status_code == 200
            asked = {**ASK, "model": f"name-{k}"}
            assert {(await server.ask(asked)).status_code for _ in range(6)} == {200}
            assert (await client.delete(path, headers=auth)).status_code == 200
            assert {(await server.ask(asked)).status_code for _ in range(6)} == {404}


async def test_draining_answers_what_was_admitted_and_refuses_the_rest(fronted, held):
    async with fronted(2) as server, server.client() as client:
        assert (await client.get("/ready")).status_code == 200
        asks = await server.waiting(6)
        server.models.drain()
        draining = asyncio.create_task(server.fronts.drain(WAIT_S))
        while (await client.get("/ready")).status_code != 503:
            pass
        late = await client.post("/v1/embeddings", json=ASK)
        assert late.status_code == 503
        assert not draining.done()
        held.set()
        assert {(await ask).status_code for ask in asks} == {200}
        await draining


async def test_a_front_end_that_is_killed_while_it_drains_takes_no_other_with_it(fronted, held):
    async with fronted(2) as server:
        asks = await server.waiting(30)
        server.models.drain()
        draining = asyncio.create_task(server.fronts.drain(WAIT_S))
        os.kill(server.pids[0], signal.SIGKILL)
        while server.capacity.inputs == 30:
            await asyncio.sleep(0.01)
        left = server.capacity.inputs
        held.set()
        results = await asyncio.gather(*asks, return_exceptions=True)
        answered = [one for one in results if isinstance(one, httpx.Response)]
        assert [one.status_code for one in answered] == [200] * left
        await draining


async def test_front_ends_hold_a_model_apart_from_the_leases_of_requests(fronted):
    async with fronted(2) as server:
        assert (await server.ask()).status_code == 200
        (instance,) = [known.instance for known in server.models.known]
        while instance.leases:
            await asyncio.sleep(0.01)
        assert instance.holds == 2


def test_keys_of_a_file_open_the_server_to_web_pages(embedder):
    service = Service(Models([embedder.model]), ServerConfig(), None, has_keys=True)
    assert RemoteAccess(service, EngineClient())._origins == ("*",)


async def test_front_ends_that_always_end_end_the_server(fronted, monkeypatch):
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor.sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match="front-end processes ended 5 times"):
        async with fronted(1):
            pass


async def test_a_client_that_leaves_frees_what_its_request_held(fronted, held):
    async with fronted(1) as server:
        (ask,) = await server.waiting(1)
        ask.cancel()
        while server.capacity.inputs:
            await asyncio.sleep(0.01)
        held.set()
        assert (await server.ask()).status_code == 200


class Impostor:
    """A front end that sends what it likes, and the engine's side of its connection."""

    def __init__(self, backend: Backend, writer: asyncio.StreamWriter, ended: asyncio.Event):
        self.backend, self.writer, self.ended = backend, writer, ended

    def send(self, *sent: Any) -> None:
        for frame in sent:
            self.writer.write(frame if isinstance(frame, bytes) else framed(frame))


@pytest.fixture(name="impostor")
async def _impostor(embedder):
    models = Models([embedder.model])
    app = create_app(models, ServerConfig(), ModelPool(models))
    ours, theirs = socket.socketpair()
    ended = asyncio.Event()

    async def load(_: Any) -> int:
        return 1

    backend = Backend(app, load, lambda: None, ended.set)
    await asyncio.get_running_loop().create_connection(lambda: backend.link, sock=ours)
    backend.give(1, models.startup_models[0].instance)
    _, writer = await asyncio.open_connection(sock=theirs)
    impostor = Impostor(backend, writer, ended)
    impostor.send(frames.Hello(__version__))
    yield impostor
    writer.close()
    await ended.wait()
    one = models.startup_models[0].instance
    assert (one.leases, one.holds) == (0, 0)


HOSTILE = {
    "unknown model": [submit(WORKS["one text"], model=7)],
    "unknown route": [submit(WORKS["one text"], model=1, route="x")],
    "unknown outputs": [submit(WORKS["one text"], model=1, outputs=("logits",))],
    "no outputs": [submit(WORKS["one text"], model=1, outputs=())],
    "unknown adapter": [submit(WORKS["one text"], model=1, adapter=3)],
    "negative adapter": [submit(WORKS["one text"], model=1, adapter=-1)],
    "token ids": [submit(WORKS["one text"], model=1, planes={"ids": b"\xff" * 20})],
    "pixels for texts": [submit(WORKS["pixels"], model=1)],
    "reserves twice": [frames.Reserve(1, 1, 1, Cost(1, 1), True)] * 2,
    "releases nothing": [frames.Release(1, 1)],
    "negative cost": [frames.Reserve(1, 1, 1, Cost(-5, 1), True)],
    "negative bytes": [frames.Reserve(1, 1, 1, Cost(1, 1, -1), True)],
    "negative charge": [frames.End(1, {1: -1})],
    "gives back too much": [frames.GiveBack(1)],
    "gives back less than nothing": [frames.GiveBack(-1)],
    "borrows nothing": [frames.Lend(1, 0, 5, 1)],
    "borrows less than nothing": [frames.Lend(1, -1, -1, 1)],
    "returns a model twice": [frames.Returned(1)] * 2,
    "growth": [frames.Metrics(0, {"1": {"0": {"single": "x"}}})],
    "negative growth": [frames.Metrics(0, {"1": {"0": {"single": -1.0}}})],
    "forwards twice": [frames.Forward(1, "GET", "/", b"/", b"", [], "1.1", "http", None)] * 2,
    "engine's frame": [frames.Alive()],
    "another hello": [frames.Hello(__version__)],
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_front_end_loses_its_connection_and_nothing_else(sent, impostor, embedder):
    capacity = embedder.model.admission.capacity
    impostor.send(frames.Reserve(90, 90, 1, Cost(2, 10, 100), True), *sent)
    await impostor.ended.wait()
    assert (capacity.inputs, capacity.tokens, capacity.bytes) == (0, 0, 0)
    assert embedder.encode("cat").shape == (32,)


async def test_a_front_end_of_another_version_is_refused(embedder):
    app = create_app(Models([embedder.model]), ServerConfig())
    ours, theirs = socket.socketpair()
    ended = asyncio.Event()
    backend = Backend(app, None, lambda: None, ended.set)
    await asyncio.get_running_loop().create_connection(lambda: backend.link, sock=ours)
    _, writer = await asyncio.open_connection(sock=theirs)
    writer.write(framed(frames.Hello("0.0.1")))
    await ended.wait()
    writer.close()


async def test_what_a_front_end_holds_falls_with_its_connection(impostor, embedder, held):
    capacity = embedder.model.admission.capacity
    ids = msgspec.structs.replace(submit(WORKS["one text"]), model=1)
    impostor.send(ids, frames.Reserve(5, 5, 1, Cost(3, 30, 300), True), frames.Lend(6, 10, 99, 10))
    while capacity.inputs < 4 or capacity.bytes < 399:
        await asyncio.sleep(0)
    impostor.writer.close()
    await impostor.ended.wait()
    assert (capacity.inputs, capacity.tokens, capacity.bytes) == (0, 0, 0)
    held.set()
    assert embedder.encode("cat").shape == (32,)
