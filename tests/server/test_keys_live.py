"""Keys and the audit log of a real server, which reads and moves them on at SIGHUP."""

import json
import os
import signal

import httpx
import pytest
from conftest import save_tiny
from fakes import until
from live_server import WAIT_S, served
from test_keys import table

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="no SIGHUP on Windows")]


def test_at_sighup_keys_are_read_again_and_the_audit_log_moves_on(tmp_path):
    keys, log, moved = (tmp_path / name for name in ("keys.toml", "audit.jsonl", "audit.1"))
    keys.write_text(table("first", "first"))
    flags = ("--api-key-file", str(keys), "--audit-log", str(log))
    flags += ("--cache-dir", str(tmp_path / "cache"))
    model = str(save_tiny(tmp_path / "model"))
    with (
        served(model, *flags) as (url, pid),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
    ):

        def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"input": "a secret text"}
            return client.post("/v1/embeddings", json=body, headers=headers).status_code

        def lines() -> list[dict]:
            return [json.loads(line) for line in log.read_text().splitlines()]

        assert (ask("first"), ask("nobody")) == (200, 401)
        until(lambda: len(lines()) == 2)
        line, refused = lines()
        assert (line["key"], line["status"], line["inputs"], line["tokens"]) == ("first", 200, 1, 5)
        assert (refused["key"], refused["status"]) == (None, 401)
        log.rename(moved)
        os.kill(pid, signal.SIGHUP)  # the file of keys is as it was, and is read all the same
        until(log.exists)
        until(lambda: 'key_file_reads{result="done"} 1.0' in client.get("/metrics").text)
        keys.write_text(table("second", "second"))
        until(lambda: ask("second") == 200)
        assert ask("first") == 401
        until(lambda: lines()[-1]["status"] == 401)
        assert "secret" not in moved.read_text() + log.read_text()
