"""Models that are loaded when a request asks for them, and leave memory to make room."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from conftest import collect, save_tiny
from fake_embedder import CLASSIFIER, M3, RERANKER, SPEC, FakeEmbedder

from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import PoolLimits, ServerConfig
from jaxembed.data.spec import Task
from jaxembed.engine.admission import Capacity
from jaxembed.engine.compiles import CompileEvents
from jaxembed.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DeviceStuck,
    InvalidInput,
    ModelUnavailable,
    NoRoom,
    UnknownModel,
)
from jaxembed.memory import MIB
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.app import create_admin_app, create_app
from jaxembed.server.registry import pool as pool_module
from jaxembed.server.registry.models import Catalog, LoadedInstance, Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.service import Service

KEY = {"authorization": "Bearer admin"}
SPECS = {"r": RERANKER, "c": CLASSIFIER}


class RowAllocator:
    """Loads fakes by id, and notes what was loaded. `gate` holds loads back, `errors` fail them."""

    def __init__(self, ids: Sequence[str] = "abcr", size: int = 100):
        self.ids = list(ids)
        self.size = size
        self.loaded: list[FakeEmbedder] = []
        self.errors: dict[str, BaseException] = {}
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> dict[str, str]:
        return {one: one for one in self.ids}

    def load(self, model: str, reserve: Callable[[int], object]) -> FakeEmbedder:
        assert self.gate.wait(10)
        reserve(self.size)
        if (error := self.errors.get(model)) is not None:
            raise error
        spec = SPECS.get(model, SPEC)
        self.loaded.append(FakeEmbedder(spec=spec, name=model, resident_bytes=self.size))
        return self.loaded[-1]

    @property
    def names(self) -> str:
        return "".join(one.name for one in self.loaded)

    @property
    def closed(self) -> str:
        return "".join(one.name for one in self.loaded if one.closed)


def pool_of(
    shelf: RowAllocator, startup_models: Sequence[FakeEmbedder] = (), describe=None, **limits
) -> ModelPool:
    models = Models(list(startup_models), capacity=Capacity(1000), loadable=shelf)
    return ModelPool(models, shelf.load, PoolLimits(**limits), describe=describe)


def opened(
    ids: Sequence[str] = "abcr", size: int = 100, **limits
) -> tuple[RowAllocator, ModelPool]:
    shelf = RowAllocator(ids, size)
    return shelf, pool_of(shelf, **limits)


def rerank_pool(
    shelf: RowAllocator, asked: list[str], startup_models: Sequence[FakeEmbedder] = ()
) -> ModelPool:
    """A pool that notes in `asked` of which models it reads what they are for."""

    def describe(model: str) -> Task:
        asked.append(model)
        if model in shelf.errors:
            raise shelf.errors[model]
        return SPECS.get(model, SPEC).task

    return pool_of(shelf, startup_models, describe)


def fake(instance: LoadedInstance) -> FakeEmbedder:
    assert isinstance(instance.loaded, FakeEmbedder)
    return instance.loaded


async def use(pool: ModelPool, name: str | None, task: Task | None = None) -> FakeEmbedder:
    """Take a lease and give it back, as a request does."""
    instance = await pool.lease(name, task)
    await asyncio.sleep(0)
    instance.give_back()
    return fake(instance)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_a_model_is_loaded_once_for_all_who_ask_at_once():
    shelf, pool = opened()
    shelf.gate.clear()
    asking = [asyncio.create_task(use(pool, "a")) for _ in range(20)]
    await until(lambda: pool.state(pool.models["a"]) == ("LOADING", ""))
    shelf.gate.set()
    assert len(set(await asyncio.gather(*asking))) == 1
    assert pool.state(pool.models["a"]) == ("READY", "")
    assert shelf.names == "a"


async def test_a_reranker_that_may_be_loaded_comes_before_an_embedder_in_memory():
    shelf, asked = RowAllocator("abcr"), []
    pool = rerank_pool(shelf, asked, [FakeEmbedder()])
    assert (await use(pool, None, "embed")).name == "test/fake"
    assert asked == []
    assert (await use(pool, None, "rerank")).name == "r"
    assert (await use(pool, None, "rerank")).name == "r"
    assert (shelf.names, sorted(asked)) == ("r", list("abcr"))  # each read once, one loaded
    await pool.unload(pool.models["r"])
    assert (await use(pool, None, "rerank")).name == "r"
    assert (await use(pool, "a", "rerank")).name == "a"
    instance = await pool.lease(None, "rerank", {"test/fake"})  # a key that may not use it
    assert fake(instance).name == "test/fake"
    instance.give_back()


async def test_an_embedder_reranks_where_no_reranker_can_be_read(caplog):
    shelf, asked = RowAllocator("ar"), []
    shelf.errors["r"] = CheckpointError("no such tensor")
    pool = rerank_pool(shelf, asked, [FakeEmbedder()])
    for _ in range(2):
        assert (await use(pool, None, "rerank")).name == "test/fake"
    assert sorted(asked) == ["a", "r"]  # what fails is not tried again at once
    assert "r may be a reranker, but cannot be read: no such tensor" in caplog.text


async def test_a_reranker_at_the_start_is_meant_whatever_may_be_loaded():
    shelf, asked = RowAllocator("ar"), []
    for one in (FakeEmbedder(spec=RERANKER), FakeEmbedder(spec=M3)):
        assert await use(rerank_pool(shelf, asked, [one]), None, "rerank") is one
    assert asked == []
    with pytest.raises(InvalidInput, match="`model` must name one of a, c"):
        await use(rerank_pool(RowAllocator("ac"), []), None, "rerank")


async def test_ten_models_of_which_two_fit_are_all_served():
    shelf, pool = opened("abcdefghij", bytes=250)
    asking = [use(pool, name) for name in shelf.ids * 2]  # all at once
    assert [one.name for one in await asyncio.gather(*asking)] == shelf.ids * 2
    await until(lambda: not pool._leaving)
    assert len(pool.models) == 2
    assert len(shelf.closed) == len(shelf.loaded) - 2


async def test_the_model_unused_for_longest_goes_and_not_before_its_requests_are_answered():
    shelf, pool = opened(bytes=200)
    await use(pool, "a")
    reservation = await pool.lease("b", None)
    await use(pool, "a")
    await use(pool, "c")  # b is older, but in use
    assert shelf.closed == "a"
    await use(pool, "a")  # c goes, b stays in use
    assert shelf.closed == "ac"
    other = await pool.lease("a", None)
    asking = asyncio.create_task(use(pool, "r"))
    await until(lambda: "UNLOADING" in {pool.state(pool.models[name])[0] for name in "ab"})
    assert not asking.done()
    assert not fake(reservation).closed
    assert not fake(other).closed
    other.give_back()
    reservation.give_back()
    await asking


async def test_a_request_for_a_model_that_is_leaving_waits_until_it_is_back():
    _, pool = opened()
    reservation = await pool.lease("a", None)
    leaving = asyncio.create_task(pool.unload(pool.models["a"]))
    await until(lambda: pool.state(pool.models["a"])[0] == "UNLOADING")
    second = await use(pool, "a")
    assert second is not reservation.loaded
    assert not leaving.done()
    reservation.give_back()
    await leaving
    assert fake(reservation).closed
    assert not second.closed


async def test_what_is_pinned_stays_and_what_cannot_fit_is_refused_with_the_numbers():
    shelf = RowAllocator(size=3 * MIB)
    always = FakeEmbedder(name="always", resident_bytes=6 * MIB)
    pool = pool_of(shelf, [always], bytes=10 * MIB)
    await use(pool, "a")
    await use(pool, "b")
    assert shelf.closed == "a"
    await pool.load(pool.models["b"], pinned=True)
    no_room = r"^a cannot be loaded: it needs 3 MB; .* 10 MB, .* 9 MB are pinned"
    with pytest.raises(ModelUnavailable, match=no_room):
        await pool.lease("a", None)
    with pytest.raises(NoRoom):
        await pool.load(pool.models["a"])
    assert not always.closed
    assert len(pool.models) == 2
    await pool.load(pool.models["b"], pinned=False)
    await pool.load(pool.models["a"])


async def test_a_pin_set_while_another_waits_for_room_refuses_that_and_blocks_nothing():
    shelf, pool = opened(size=3 * MIB, bytes=7 * MIB)
    first, second = await pool.lease("a", None), await pool.lease("b", None)
    asking = asyncio.create_task(use(pool, "c"))
    await until(lambda: pool.state(pool.models["a"])[0] == "UNLOADING")
    shelf.size = 6 * MIB  # what is asked for next
    await pool.load(pool.models["b"], pinned=True)
    first.give_back()
    second.give_back()
    assert (await asking).name == "c"
    with pytest.raises(ModelUnavailable, match="it needs 6 MB"):
        await use(pool, "r")
    await pool.load(pool.models["b"], pinned=False)
    assert (await use(pool, "r")).name == "r"  # no failure was kept


async def test_a_folder_that_goes_while_its_model_is_loaded_is_forgotten_only_with_it():
    shelf, pool = opened("ab")
    shelf.gate.clear()
    asking = asyncio.create_task(use(pool, "a"))
    await until(lambda: pool.state(pool.models["a"])[0] == "LOADING")
    shelf.ids = ["b"]
    pool.models.discover()
    shelf.gate.set()
    assert (await asking).name == "a"
    await pool.unload(pool.models["a"])
    pool.models.discover()
    with pytest.raises(UnknownModel):
        await use(pool, "a")


async def test_models_that_come_to_take_more_than_they_may_leave():
    shelf, pool = opened(bytes=250)
    await use(pool, "a")
    await use(pool, "b")
    pool.sweep()
    assert not shelf.closed
    for one in shelf.loaded:
        vars(one)["resident_bytes"] = 200
    pool.sweep()
    await until(lambda: shelf.closed == "a")
    pool.sweep()
    assert shelf.closed == "a"


async def test_a_model_that_cannot_be_loaded_leaves_all_as_it_was_and_is_not_tried_at_once():
    shelf, pool = opened()
    shelf.errors["b"] = CheckpointError("the config is damaged\nsecond line")
    before = await use(pool, "a")
    for _ in range(3):
        with pytest.raises(ModelUnavailable, match="b cannot be loaded: the config is damaged"):
            await pool.lease("b", None)
    assert pool.state(pool.models["b"]) == ("UNAVAILABLE", str(shelf.errors["b"]))
    assert await use(pool, "a") is before
    del shelf.errors["b"]
    with pytest.raises(ModelUnavailable):
        await pool.lease("b", None)
    await pool.load(pool.models["b"])  # whoever runs the server need not wait
    assert (await use(pool, "b")).name == "b"


async def test_a_load_that_fails_because_the_device_hangs_is_tried_again_at_once():
    shelf, pool = opened()
    shelf.errors["b"] = DeviceStuck()
    with pytest.raises(ModelUnavailable, match="the device does not return"):
        await use(pool, "b")
    del shelf.errors["b"]
    assert (await use(pool, "b")).name == "b"


async def test_without_memory_after_all_another_model_goes_and_it_is_tried_once_more():
    shelf, pool = opened()
    await use(pool, "a")
    shelf.errors["b"] = RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    asking = asyncio.create_task(use(pool, "b"))
    await until(lambda: shelf.closed == "a")
    with pytest.raises(ModelUnavailable, match="b cannot be loaded: RESOURCE_EXHAUSTED"):
        await asking
    with pytest.raises(BackendError, match="RESOURCE_EXHAUSTED"):
        await pool.load(pool.models["b"])


async def test_a_request_waits_for_its_model_so_long_and_the_load_goes_on():
    shelf, pool = opened(load_timeout_s=0.05)
    shelf.gate.clear()
    with pytest.raises(ModelUnavailable, match=r"after 0\.05 s; .*--load-timeout"):
        await pool.lease("a", None)
    shelf.gate.set()
    await until(lambda: pool.models["a"].instance is not None)
    await use(pool, "a")
    assert shelf.names == "a"


async def test_a_client_that_goes_away_while_its_model_is_loaded_holds_nothing():
    shelf, pool = opened(bytes=100)
    shelf.gate.clear()
    asking = asyncio.create_task(pool.lease("a", None))
    await until(lambda: pool.state(pool.models["a"])[0] == "LOADING")
    asking.cancel()
    shelf.gate.set()
    await use(pool, "b")
    assert shelf.closed == "a"


async def test_a_load_that_nobody_waits_for_any_more_ends_without_a_word(caplog):
    gate, threads = threading.Event(), []
    load = asyncio.create_task(
        pool_module._in_thread(lambda: (threads.append(threading.current_thread()), gate.wait()))
    )
    await until(lambda: threads)
    load.cancel()
    await asyncio.wait([load])
    gate.set()
    threads[0].join()
    await asyncio.sleep(0)  # what the thread left for the loop is done first
    assert not caplog.records


async def test_an_alias_moves_without_a_failed_request_and_each_answer_is_of_one_model():
    shelf = RowAllocator("abd", size=100)
    pool = pool_of(shelf, bytes=250)  # two of the three
    await pool.move("live", "a")
    served: set[str] = set()
    done = asyncio.Event()

    async def client() -> None:
        while not done.is_set():
            instance = await pool.lease("live", "embed")
            assert not fake(instance).closed
            await asyncio.sleep(0)
            assert not fake(instance).closed  # nobody who has a lease loses the model
            served.add(instance.loaded.name)
            instance.give_back()

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for k in range(6):
        await pool.move("live", "abd"[k % 3])
    for k in range(200):
        await pool.move("live", "bd"[k % 2])
        await asyncio.sleep(0)
    done.set()
    await asyncio.gather(*clients)
    assert served == {"a", "b", "d"}


async def test_an_alias_stays_where_it_is_if_the_new_model_cannot_be_loaded():
    shelf, pool = opened()
    shelf.errors["b"] = BackendError("not finite")
    await pool.move("live", "a")
    with pytest.raises(BackendError, match="not finite"):
        await pool.move("live", "b")
    assert (await use(pool, "live")).name == "a"
    with pytest.raises(InvalidInput, match="cannot be an alias"):
        await pool.move("b", "a")  # a loadable model's own name
    for alias in ("x:y", " ", "x\ny", "x" * 201, "default/not-specified", "..", "a/.", "\ufffd"):
        with pytest.raises(InvalidInput, match="has no colon and no part"):
            await pool.move(alias, "a")
    with pytest.raises(UnknownModel):
        await pool.move("live", "nothing")


async def test_a_model_left_without_a_name_leaves_memory():
    shelf = RowAllocator()
    always = FakeEmbedder()
    models = Models([always], {"test/fake": ["live"]}, capacity=Capacity(1000), loadable=shelf)
    pool = ModelPool(models, shelf.load)
    reservation = await pool.lease(None, "embed")
    await pool.move("live", "a")
    await until(lambda: pool._leaving)
    assert not always.closed
    reservation.give_back()
    await until(lambda: always.closed)
    assert (await use(pool, "live")).name == "a"
    for permitted in (None, {"live"}):  # nor does a request without a name bring it back
        with pytest.raises(InvalidInput, match="must name one of "):
            await pool.lease(None, "embed", permitted)


async def test_an_unused_model_leaves_memory_after_its_time():
    shelf, first = RowAllocator(), FakeEmbedder()
    pool = pool_of(shelf, [first], keep_alive_s=1e-9)
    reservation = await pool.lease("a", None)
    await use(pool, "b")
    pool.sweep()
    await until(lambda: shelf.closed == "b")
    reservation.give_back()
    pool.sweep()
    assert shelf.closed == "b"  # it was in use until now
    assert not first.closed


async def test_a_request_without_a_name_means_a_model_of_the_command_line():
    shelf, first = RowAllocator("ab"), FakeEmbedder()
    assert await use(pool_of(shelf, [first]), None, "embed") is first
    with pytest.raises(InvalidInput, match="`model` must name one of a, b"):
        await pool_of(shelf).lease(None, "embed")
    assert (await use(pool_of(RowAllocator("a")), None, "embed")).name == "a"
    assert not shelf.loaded


def test_models_that_come_into_the_repository_are_found_and_nothing_outside_of_it(tmp_path):
    inside = tmp_path / "in"
    for name in ("in/one", "out", "in/.hidden", "in/two\nlines", "in/bad\udcff"):
        (tmp_path / name).mkdir(parents=True)
    (inside / "file").write_text("")
    (inside / "long").symlink_to("x" * 300)
    models = Models(capacity=Capacity(10), loadable=Catalog(["org/model"], inside))
    assert models.names_among() == ("org/model", "one")
    (inside / "two").mkdir()
    assert models["two"].id == str(inside / "two")
    for name in ("../out", str(tmp_path / "out"), "one/../../out", "file", ".hidden", "http://x/y"):
        with pytest.raises(UnknownModel):
            models[name]
    (inside / "one").rmdir()
    models.discover()
    assert models.names_among() == ("org/model", "two")
    with pytest.raises(ConfigError, match="is not a directory"):
        Catalog([], tmp_path / "nothing")
    with pytest.raises(ConfigError, match="has the name of a folder"):
        Catalog(["two"], inside)


def test_a_loadable_model_may_have_names_of_its_own():
    catalog = Catalog(["a=s3://bucket/x=1", "b=s3://bucket/x=1", "./c=d", "s3://bucket/e=f"], None)
    models = Models(capacity=Capacity(10), loadable=catalog)
    assert models.names_among() == ("a", "b", "./c=d", "s3://bucket/e=f")
    assert models["a"] is models["b"]
    assert models["a"].id == "s3://bucket/x=1"
    for given in ("=model", " =model", "name="):
        with pytest.raises(ConfigError, match="wanted MODEL or NAME=MODEL"):
            Catalog([given], None)
    with pytest.raises(ConfigError, match="gives the name a to two models"):
        Catalog(["a=one", "a=two"], None)


def served(shelf: RowAllocator, **config):
    """A client of a server, with an admin key if nothing else is said, and its models."""
    pool = pool_of(shelf)
    app = create_app(pool.models, ServerConfig(**(config or {"admin_key": "admin"})), pool)
    return app.test_client(), pool


async def post(client, path: str, body=None, headers=KEY, method="POST"):
    response = await client.open(path, method=method, json=body or {}, headers=headers)
    return response.status_code, await response.get_json()


async def test_triton_clients_load_list_and_unload():
    """As tritonclient 2.62 over HTTP: bodies may be empty, and nothing declares them as JSON."""
    client, _ = served(RowAllocator())

    async def send(path: str, body: bytes = b""):
        response = await client.post(f"/v2/repository/{path}", data=body, headers=KEY)
        return response.status_code, await response.get_json()

    status, listed = await send("index")
    assert status == 200
    assert [(one["name"], one["state"]) for one in listed] == [(k, "UNAVAILABLE") for k in "abcr"]
    status, one = await send("models/a/load", b"{}")
    assert (status, one["state"], one["version"]) == (200, "READY", SPEC.content_hash)
    _, one = await send("models/b/load", b'{"parameters": {"pinned": true}}')
    assert one["pinned"]
    _, listed = await send("index", b'{"ready": true}')
    assert [one["name"] for one in listed] == ["a", "b"]
    unload = b'{"parameters": {"unload_dependents": false}}'
    status, one = await send("models/a/unload", unload)
    assert (status, one["state"], one["bytes"]) == (200, "UNAVAILABLE", 0)
    status, body = await send("models/a/load", b"{")
    assert status == 400
    assert "JSON" in body["error"]


async def test_an_alias_is_moved_and_dropped_over_http_but_no_model_loses_its_last_name():
    client, pool = served(RowAllocator())
    path, asked = "/v2/repository/aliases/org/live", {"model": "org/live", "input": "x"}
    for model in ("b", "a"):
        status, one = await post(client, path, {"model": model}, method="PUT")
        assert (status, one["name"], one["state"]) == (200, "org/live", "READY")
        assert (await post(client, "/v1/embeddings", asked))[0] == 200
        assert pool.models["org/live"] is pool.models[model]
    status, one = await post(client, path, method="DELETE")
    assert (status, one["name"]) == (200, "a")
    assert (await post(client, "/v1/embeddings", asked))[0] == 404
    for name, wanted in (("a", 422), ("org/live", 404)):
        path = f"/v2/repository/aliases/{name}"
        assert (await post(client, path, method="DELETE"))[0] == wanted
    assert pool.models.names_among() == ("a", "b", "c", "r")


async def test_no_page_in_a_browser_may_use_an_admin_port_without_a_key():
    pool = pool_of(RowAllocator())
    open_to_all, keyed = (
        create_admin_app(Service(pool.models, ServerConfig(admin_port=1, admin_key=key), pool))
        for key in (None, "admin")
    )
    client = open_to_all.test_client(use_cookies=False)
    for headers, wanted in (
        ({}, 200),
        ({"host": "localhost:81"}, 200),
        ({"host": "[::1]:81"}, 200),
        ({"host": "evil.example:81"}, 401),
        ({"host": "[1:2:]"}, 401),
        ({"host": "127.0.0.1", "origin": "http://evil.example"}, 401),
    ):
        status, body = await post(client, "/v2/repository/index", headers=headers)
        assert status == wanted, headers
        assert wanted == 200 or "refuses web pages" in body["error"]
    assert (await client.get("/v1/models")).status_code == 404
    for headers, wanted in (({}, 401), (KEY, 200)):
        status, _ = await post(keyed.test_client(), "/v2/repository/index", headers=headers)
        assert status == wanted


ADMIN_ROUTES = [("POST", "index"), ("POST", "models/a/load"), ("POST", "models/a/unload")]
ADMIN_ROUTES += [("PUT", "aliases/x"), ("DELETE", "aliases/x")]


async def test_every_admin_route_is_refused_without_the_admin_key_which_opens_no_other():
    shelf = RowAllocator()
    keyed, _ = served(shelf, admin_key="admin", api_keys=("api",))
    without, _ = served(shelf, api_keys=())
    for method, name in ADMIN_ROUTES:
        path = f"/v2/repository/{name}"
        for key in ({}, {"authorization": "Bearer api"}, {"authorization": "admin"}):
            status, body = await post(keyed, path, {"model": "a"}, key, method)
            assert status == 401, (path, key)
            assert "admin key" in body["error"]
        assert (await post(without, path, {"model": "a"}, KEY, method))[0] == 404, path
    assert not shelf.loaded
    assert (await post(keyed, "/v1/embeddings", {"model": "a", "input": "x"}))[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("models/nothing/load", {}, 404, "the model `nothing` does not exist"),
        ("models//etc/load", {}, 404, "does not exist"),
        ("models/http://x/y/load", {}, 404, "does not exist"),
        ("models/a/load", {"parameters": {"config": "{}"}}, 422, "`parameters.config` is not"),
        ("models/a/load", {"parameters": {"file:1/model": ""}}, 422, "`parameters.file:1/model`"),
        ("models/a/load", {"parameters": {"pinned": "yes"}}, 422, "true or false. Given: 'y"),
        ("models/a/unload", {"parameters": {"pinned": True}}, 422, "only `unload_dependents`"),
        ("models/b/load", {}, 400, "b cannot be loaded: no such tensor"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_by_name(path, body, status, words):
    shelf = RowAllocator()
    shelf.errors["b"] = CheckpointError("no such tensor")
    client, _ = served(shelf)
    got, answer = await post(client, f"/v2/repository/{path}", body)
    assert got == status
    assert words in answer["error"]


async def test_a_request_for_a_model_that_cannot_be_loaded_says_so_in_its_dialect():
    shelf = RowAllocator()
    shelf.errors["b"] = BaseException("no such tensor")  # as an extension in Rust raises it
    client, _ = served(shelf)
    for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs"), ("/v2/embed", "texts")):
        response = await client.post(path, json={"model": "b", field: ["x"]})
        assert response.status_code == 503
        assert response.headers["Retry-After"]
        assert "b cannot be loaded: no such tensor" in await response.get_data(as_text=True)
    for path, body, wanted in (
        ("/v1/embeddings", {"model": "a", "input": "x"}, 200),
        ("/rerank", {"model": "c", "query": "q", "texts": ["t"]}, 424),
        ("/rerank", {"model": "r", "query": "q", "texts": ["t"]}, 200),
        ("/", {"model": "c", "inputs": "x"}, 200),
    ):
        assert (await post(client, path, body))[0] == wanted


async def test_models_and_metrics_show_what_is_in_memory(monkeypatch):
    monkeypatch.setattr(CompileEvents, "compiles", 7)
    client, _ = served(RowAllocator())

    async def shown(model: str):
        listed = (await (await client.get("/v1/models")).get_json())["data"]
        text = await (await client.get("/metrics")).get_data(as_text=True)
        assert (f'te_request_count{{method="single",model="{model}"}}' in text) == bool(model)
        assert "\njaxembed_compile_count 7.0\n" in text
        infos = [await client.get(path) for path in ("/info", "/info?model=a")]
        return [one["id"] for one in listed if one["loaded"]], {one.status_code for one in infos}

    assert await shown("") == ([], {503})
    assert (await client.get("/ready")).status_code == 200
    await post(client, "/v1/embeddings", {"model": "a", "input": "x"})
    assert await shown("a") == (["a"], {200})


CONFIG = EngineConfig(dtype="float32", max_batch_tokens=64, devices=1)


def test_a_freed_model_leaves_no_array_and_no_thread(tmp_path):
    capacity = Capacity(10)
    source = ModelSource(str(save_tiny(tmp_path / "tiny")), cache_dir=tmp_path / "cache")
    loaded = partial(LoadedModel, source, config=CONFIG, capacity=capacity)
    loaded().close()  # what is made once is there then
    arrays = len(jax.live_arrays())
    for _ in range(2):
        one = loaded()
        one.probe()
        before_close = one.resident_bytes
        gc.freeze()  # as a server does
        one.close()
        assert 0 < one.resident_bytes < before_close  # of a model that leaves it is asked, too
        assert len(jax.live_arrays()) == arrays
        assert not any(state.threads for state in one.snapshot().values())
        pools = one.main.processor.executor._small, one.main.processor.executor._large
        assert not any(thread.is_alive() for pool in pools for thread in pool._threads)
        weak = weakref.ref(one), weakref.ref(one.main.engine)
        del one
        gc.unfreeze()
        gc.collect()
        assert [ref() for ref in weak] == [None, None]
        assert capacity.max_tokens == 0


def test_room_is_asked_for_before_parameters_are_read(tmp_path):
    refuse, arrays = Mock(side_effect=NoRoom("none")), len(jax.live_arrays())
    source = ModelSource(str(save_tiny(tmp_path / "tiny")), cache_dir=tmp_path / "cache")
    with pytest.raises(NoRoom):
        LoadedModel(source, config=CONFIG, reserve=refuse)
    refuse.assert_called_once()
    assert refuse.call_args.args[0] > 0
    assert len(jax.live_arrays()) == arrays


async def test_a_server_without_any_model_yet_says_so():
    client, _ = served(RowAllocator(""))
    status, body = await post(client, "/v1/embeddings", {"input": "x"})
    assert status == 503
    assert "the server has no model yet" in body["error"]["message"]


async def test_two_real_models_in_turn_give_their_own_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "_collect", collect)
    pooled = {"a": "mean", "b": "cls"}
    paths = {k: str(save_tiny(tmp_path / k, pooling=(one,))) for k, one in pooled.items()}
    make = partial(Embedder, cache_dir=tmp_path / "cache", config=CONFIG)
    alone = {}
    for name, path in paths.items():
        with make(path) as one:
            alone[name] = one.encode("the cat sat")
    models = Models(capacity=Capacity(1000), loadable=lambda: paths)
    pool = ModelPool(models, lambda model, reserve: make(model, reserve=reserve).model)
    client = create_app(models, ServerConfig(admin_key="admin"), pool).test_client()
    for name in "aba":
        _, answer = await post(client, "/embed", {"model": name, "inputs": "the cat sat"})
        np.testing.assert_allclose(answer[0], alone[name], atol=1e-6)
        assert (await post(client, f"/v2/repository/models/{name}/unload"))[0] == 200
