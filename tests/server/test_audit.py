"""The audit log: a line for each request, never its texts, and never in the way of the request."""

import asyncio
import json
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_embedder import FakeEmbedder
from fakes import WAIT_S, until
from test_keys import ring, table, three
from test_server_pool import KEY, RowAllocator, pool_of

from jaxembed.config import ServerConfig
from jaxembed.errors import ConfigError
from jaxembed.server.app import create_admin_app, create_app
from jaxembed.server.auth import audit as audit_module
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.service import Service


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended_in_order_and_the_last_ones_before_it_closes(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "LAST_LINES_S", WAIT_S)
    path = tmp_path / "audit.jsonl"
    path.write_text('{"n": "before"}\n')
    log = AuditLog(path)
    for n in range(2000):
        log.write({"n": n})
    log.close()
    assert [line["n"] for line in lines_of(path)] == ["before", *range(2000)]
    assert (log.written, log.lost) == (2000, 0)
    assert not [one for one in threading.enumerate() if one.name == "audit-log"]


def test_a_new_log_is_for_its_user_alone_and_takes_what_is_no_unicode(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0
    log.write({"route": "/\udcff"})
    log.close()
    assert lines_of(tmp_path / "audit.jsonl") == [{"route": "/\udcff"}]


def test_what_cannot_be_opened_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # nobody reads it
    for path in (tmp_path, tmp_path / "no" / "file", tmp_path / "fifo"):
        with pytest.raises(ConfigError, match=f"--audit-log {path} cannot be opened: .*set it"):
            AuditLog(path)


def test_a_full_disk_loses_lines_says_so_once_and_goes_on(caplog):
    log = AuditLog(Path("/dev/full"))
    for n in range(10):
        log.write({"n": n})
        until(lambda n=n: log.lost == n + 1)
    log.close()
    assert log.written == 0
    (message,) = caplog.messages
    assert message.startswith("--audit-log /dev/full cannot be written: No space left")
    assert message.endswith("(lines lost so far: 1); requests are still answered")


def test_a_line_that_was_cut_is_ended_before_the_next_one(tmp_path, monkeypatch):
    path, write = tmp_path / "audit.jsonl", os.write
    log = AuditLog(path)
    calls = iter([lambda file, data: write(file, data[:5]), Mock(side_effect=OSError(28, "full"))])
    monkeypatch.setattr(audit_module.os, "write", lambda *given: next(calls, write)(*given))
    log.write({"number": 1})
    until(lambda: log.lost)
    log.write({"number": 2})
    log.close()
    assert path.read_text() == '{"num\n{"number":2}\n'
    assert (log.written, log.lost) == (1, 1)


def test_lines_that_nobody_takes_are_lost_and_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "MAX_LINES", 10)
    monkeypatch.setattr(audit_module, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(audit_module, "LAST_LINES_S", 0.1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = AuditLog(fifo)
    for _ in range(200):
        log.write({"long": "x" * 10_000})
    assert log.lost
    log.close()  # its thread still waits in the pipe
    os.close(reader)
    until(lambda: not [one for one in threading.enumerate() if one.name == "audit-log"])


def test_it_is_opened_again_by_its_name_or_goes_on_with_the_one_there_is(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    path, moved = folder / "audit.jsonl", folder / "audit.jsonl.1"
    log = AuditLog(path)
    log.write({"n": 1})
    until(lambda: log.written == 1)
    path.rename(moved)
    log.write({"n": 2})
    until(lambda: log.written == 2)
    log.reopen()
    until(path.exists)
    log.write({"n": 3})
    until(lambda: log.written == 3)
    assert [line["n"] for line in lines_of(moved)] == [1, 2]
    path.unlink()
    moved.unlink()
    folder.rmdir()
    log.reopen()
    log.write({"n": 4})
    until(lambda: log.written == 4)
    log.close()


def audited(tmp_path: Path, scenario, *, models: Models | None = None, config=None) -> list[dict]:
    """The lines about the requests of a scenario, which is called with a client and the app."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)

    async def go() -> None:
        served = models or Models([FakeEmbedder()])
        keys = ring(tmp_path, table("batch", models=["test/fake", "live", "o"]))
        pool = ModelPool(served)
        app = create_app(served, config or ServerConfig(), pool, keyring=keys, audit=log)
        await scenario(app.test_client(), app)

    asyncio.run(go())
    log.close()
    return lines_of(path)


SECRET = {"authorization": "Bearer secret"}


def test_a_line_says_who_asked_what_of_which_model_and_never_a_text(tmp_path):
    async def scenario(client, app) -> None:
        body = {"input": ["private words", "more"], "model": "live"}
        headers = SECRET | {"x-request-id": "my-id"}
        await client.post("/v1/embeddings?private=words", json=body, headers=headers)
        await client.post("/embed", json={"inputs": "private"}, headers={})
        await client.post("/embed", json={"inputs": "private", "model": "private"}, headers=SECRET)
        await client.get("/v1/models", headers=SECRET)
        await client.get("/health")
        await client.get("/metrics")

    lines = audited(tmp_path, scenario, models=three())
    first = lines[0]
    assert first.pop("ms") >= 0
    assert first.pop("time")[10] == "T"
    assert first == {
        "key": "batch",
        "method": "POST",
        "route": "/v1/embeddings",
        "model": "e",
        "inputs": 2,
        "tokens": 3,
        "status": 200,
        "request_id": "my-id",
    }
    others = [(one["key"], one["status"], one["model"]) for one in lines[1:]]
    assert others == [(None, 401, None), ("batch", 403, None), ("batch", 200, None)]
    text = (tmp_path / "audit.jsonl").read_text()
    assert "private" not in text
    assert "secret" not in text


def test_a_client_that_went_away_has_a_line_too(tmp_path):
    embedder = FakeEmbedder()

    async def scenario(client, app) -> None:
        embedder.gate = asyncio.Event()
        body = {"inputs": "a b"}
        task = asyncio.create_task(client.post("/embed", json=body, headers=SECRET))
        await embedder.entered.wait()
        task.cancel()
        await asyncio.wait({task})
        task = asyncio.create_task(client.post("/embed", json=body, headers=SECRET))
        while not (app.unanswered and embedder.admission.inputs):
            await asyncio.sleep(0)
        await app.expire(WAIT_S)
        assert (await task).status_code == 503

    gone, late = audited(tmp_path, scenario, models=Models([embedder]))
    assert (gone["key"], gone["status"], gone["inputs"], gone["tokens"]) == ("batch", 499, 1, 0)
    assert (late["key"], late["status"]) == ("batch", 503)


def test_a_line_names_the_flag_of_a_key_cuts_a_long_method_and_counts_all_instances(tmp_path):
    async def scenario(client, app) -> None:
        headers = {"authorization": "Bearer flag"}
        await client.open("/embed", method="A" * 3000, headers=headers)
        body = {"instances": [{"inputs": "a b"}, {"inputs": ["c", "d"]}]}
        await client.post("/vertex", json=body, headers=headers)

    cut, line = audited(tmp_path, scenario, config=ServerConfig(api_keys=("flag",)))
    assert cut["method"] == "A" * 20
    assert (line["key"], line["model"]) == ("--api-key", "test/fake")
    assert (line["inputs"], line["tokens"]) == (3, 4)


async def test_admin_calls_are_noted_with_their_models(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    pool = pool_of(RowAllocator())
    config = ServerConfig(admin_key="admin")
    app = create_app(pool.models, config, pool, audit=log)
    beside = create_admin_app(Service(pool.models, ServerConfig(), pool, audit=log))
    for served in (app.test_client(), beside.test_client()):
        await served.post("/v2/repository/models/a/load", json={}, headers=KEY)
        body = {"model": "b"}
        await served.put("/v2/repository/aliases/live", json=body, headers=KEY)
        await served.post("/v2/repository/index", json={}, headers={"authorization": "x"})
    log.close()
    fields = ("key", "method", "route", "model", "status")
    found = [tuple(map(one.get, fields)) for one in lines_of(tmp_path / "audit.jsonl")]
    wanted = []
    for key, status in (("--admin-key", 401), (None, 200)):
        wanted += [
            (key, "POST", "/v2/repository/models/a/load", "a", 200),
            (key, "PUT", "/v2/repository/aliases/live", "b", 200),
            (None, "POST", "/v2/repository/index", None, status),
        ]
    assert found == wanted
