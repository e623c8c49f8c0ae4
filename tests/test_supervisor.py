"""What a supervisor such as systemd is told."""

import logging
import socket
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest
import sources
from live_server import served

from jaxembed.server.supervisor import READY, STOPPING, tell

WAIT_S = 60.0


def listener(address: str | bytes) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.bind(address)
    found.settimeout(WAIT_S)
    return found


def test_a_supervisor_is_told_at_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    with listener("notify") as supervisor:
        tell("notify", READY)
        assert supervisor.recv(100) == b"READY=1"


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux has such names")
def test_a_supervisor_is_told_at_a_name_without_a_file():
    name = uuid4().hex
    with listener(f"\0{name}") as supervisor:
        tell(f"@{name}", STOPPING)
        assert supervisor.recv(100) == b"STOPPING=1"


def test_no_supervisor_is_told_nothing(caplog):
    tell(None, READY)
    assert not caplog.records


def test_a_supervisor_that_is_gone_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        tell(str(tmp_path / "gone"), READY)
    assert "was not told READY=1" in caplog.text


@pytest.mark.slow
def test_a_server_says_when_it_is_ready_and_when_it_stops(tmp_path, monkeypatch):
    source = sources.write_sentence_bert(tmp_path / "tiny")
    name = uuid4().hex
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with listener(f"\0{name}") as supervisor:
        with served(str(source), "--cache-dir", str(tmp_path / "cache")) as (url, _):
            assert supervisor.recv(100) == b"READY=1"
            with urllib.request.urlopen(f"{url}/ready", timeout=WAIT_S) as answer:
                assert answer.status == 200
        assert supervisor.recv(100) == b"STOPPING=1"


@pytest.mark.slow
def test_a_server_whose_models_are_loaded_later_is_ready_at_once(tmp_path, monkeypatch):
    name = uuid4().hex
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    options = ("--loadable", str(tmp_path / "later"), "--cache-dir", str(tmp_path / "cache"))
    with listener(f"\0{name}") as supervisor, served(*options):
        assert supervisor.recv(100) == b"READY=1"
