"""Keys and the audit log of a real server: signals, files that change, and limits over HTTP."""

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from conftest import save_tiny
from live_server import WAIT_S, served
from test_keys import table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="no SIGHUP on Windows"),
]


class Site:
    """A server of a tiny model, its files, and what it is asked."""

    def __init__(self, folder: Path, url: str, pid: int):
        self.pid = pid
        self.keys, self.log = folder / "keys.toml", folder / "audit.jsonl"
        self.client = httpx.Client(base_url=url, timeout=WAIT_S)

    def ask(self, key: str, text: str = "the cat") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return self.client.post("/v1/embeddings", json={"input": text}, headers=headers)

    def replace(self, *tables: str) -> None:
        """Put another key file in place."""
        aside = self.keys.with_suffix(".new")
        aside.write_text("\n".join(tables))
        os.replace(aside, self.keys)

    def hang_up(self) -> None:
        os.kill(self.pid, signal.SIGHUP)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def lines(self, path: Path | None = None) -> list[dict]:
        return [json.loads(line) for line in (path or self.log).read_text().splitlines()]


@pytest.fixture(name="site", scope="module")
def _site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    model = save_tiny(folder / "model")
    (folder / "keys.toml").write_text(table("first", "first"))
    flags = [
        "--api-key-file",
        str(folder / "keys.toml"),
        "--audit-log",
        str(folder / "audit.jsonl"),
    ]
    with served(str(model), *flags, "--cache-dir", str(folder / "cache")) as (url, pid):
        site = Site(folder, url, pid)
        yield site
        site.client.close()


def until(held) -> None:
    deadline = time.monotonic() + WAIT_S
    while not held():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_changed_file_is_read_by_itself_and_a_broken_one_changes_nothing(site):
    site.replace(table("first", "first"), table("second", "second"))
    until(lambda: site.ask("second").status_code == 200)
    failed = site.metric('jaxembed_key_file_reads{result="failed"}')
    site.keys.write_text(table("second", "second")[:-10])  # torn
    until(lambda: site.metric('jaxembed_key_file_reads{result="failed"}') > failed)
    assert site.ask("first").status_code == site.ask("second").status_code == 200
    site.replace(table("first", "first"))
    until(lambda: site.ask("second").status_code == 401)


def test_sighup_reads_the_file_and_the_server_goes_on(site):
    for _ in range(3):
        done = site.metric('jaxembed_key_file_reads{result="done"}')
        site.hang_up()
        until(lambda done=done: site.metric('jaxembed_key_file_reads{result="done"}') > done)
    assert site.ask("first").status_code == 200


def test_limits_are_those_of_what_was_tokenized(site):
    limits = {"requests_per_minute": 1000, "tokens_per_minute": 6000, "max_inputs_waiting": 4}
    site.replace(table("first", "first"), table("metered", "metered", **limits))
    site.hang_up()
    until(lambda: site.ask("metered").status_code == 200)
    usages = []
    for words in (1, 5, 30):
        response = site.ask("metered", "cat " * words)
        usages.append(response.json()["usage"]["total_tokens"])
        left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert 6000 - left <= 2 * sum(usages) + 10  # what was used, less what has come in again
        assert response.headers["x-ratelimit-limit-requests"] == "1000"
    assert usages == [3, 7, 32]
    assert site.metric('jaxembed_key_tokens{key="metered"}') >= sum(usages)
    assert site.metric("jaxembed_key_waiting_inputs") == 0


def test_the_audit_log_has_a_line_for_each_and_moves_on_at_sighup(site):
    before = len(site.lines())
    site.ask("first", "a secret text")
    site.ask("nobody")
    until(lambda: len(site.lines()) >= before + 2)
    line, refused = site.lines()[before:]
    assert (line["key"], line["status"], line["inputs"], line["tokens"]) == ("first", 200, 1, 5)
    assert (refused["key"], refused["status"]) == (None, 401)
    moved = site.log.with_suffix(".1")
    site.log.rename(moved)
    site.hang_up()
    until(site.log.exists)
    site.ask("first")
    until(lambda: site.lines())
    assert len(site.lines()) == 1
    assert "secret" not in moved.read_text() + site.log.read_text()
