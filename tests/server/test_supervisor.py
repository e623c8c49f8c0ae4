"""What a supervisor such as systemd is told."""

import asyncio
import logging
import os
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import sources
from live_server import WAIT_S, served

from jaxembed.cli.server_options import watchdog_s
from jaxembed.errors import ConfigError
from jaxembed.server.run import READY, feed_watchdog, tell


def listener(address: str | bytes) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.bind(address)
    found.settimeout(WAIT_S)
    return found


def test_a_supervisor_is_told_at_a_path_or_at_a_name_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    places = {"notify": "notify"}
    if Path("/proc").exists():  # only Linux has such names
        name = uuid4().hex
        places[f"\0{name}"] = f"@{name}"
    for address, place in places.items():
        with listener(address) as supervisor:
            tell(place, READY)
            assert supervisor.recv(100) == b"READY=1"


def test_a_supervisor_that_is_gone_is_logged_and_none_is_told_nothing(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    tell(None, READY)
    assert not caplog.records
    tell(str(tmp_path / "gone"), READY)
    assert "READY=1 could not be sent" in caplog.text


async def test_the_watchdog_is_fed_only_while_the_devices_return(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alive, looks, loop = [True], [], asyncio.get_running_loop()

    def is_alive() -> bool:
        looks.append(alive[0])
        return alive[0]

    with listener("notify") as supervisor:
        supervisor.setblocking(False)
        feeding = loop.create_task(feed_watchdog("notify", 0.01, is_alive))
        assert await loop.sock_recv(supervisor, 100) == b"WATCHDOG=1"
        alive[0] = False
        with suppress(BlockingIOError):  # what was sent before the device hung
            while supervisor.recv(100):
                pass
        while looks.count(False) < 3:
            await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            supervisor.recv(100)
        alive[0] = True
        assert await loop.sock_recv(supervisor, 100) == b"WATCHDOG=1"
        feeding.cancel()


def test_the_watchdog_is_that_of_this_process(monkeypatch):
    for microseconds, process, wanted in (
        ("60000000", "", 60.0),
        ("60000000", str(os.getpid()), 60.0),
        ("60000000", "1", None),
        ("60s", "1", None),
    ):
        monkeypatch.setenv("WATCHDOG_USEC", microseconds)
        monkeypatch.setenv("WATCHDOG_PID", process)
        assert watchdog_s() == wanted
    monkeypatch.setenv("WATCHDOG_PID", "")
    with pytest.raises(ConfigError, match="WATCHDOG_USEC is '60s'"):
        watchdog_s()


@pytest.mark.slow
def test_a_server_says_when_it_is_ready_and_when_it_stops(tmp_path, monkeypatch):
    source = sources.write_sentence_bert(tmp_path / "tiny")
    name = uuid4().hex
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    monkeypatch.setenv("WATCHDOG_USEC", "3600000000")
    with listener(f"\0{name}") as supervisor:
        with served(str(source), "--cache-dir", str(tmp_path / "cache")) as (url, _):
            assert {supervisor.recv(100), supervisor.recv(100)} == {b"READY=1", b"WATCHDOG=1"}
            with urllib.request.urlopen(f"{url}/ready", timeout=WAIT_S) as answer:
                assert answer.status == 200
        assert supervisor.recv(100) == b"STOPPING=1"
