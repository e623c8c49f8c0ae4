"""Runs `jaxembed serve` in a process of its own, and asks it over HTTP."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from .cases import PICTURES, Case

WAIT_S = 180.0
KEPT = ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH")  # of the environment
# One program for each model, and one input in a batch: how vectors are rounded depends on both.
FLAGS = (
    *("--offline", "--dtype", "float32", "--devices", "1", "--kernels", "xla"),
    *("--max-batch-tokens", "22", "--max-batch-requests", "1"),
)


@dataclass(frozen=True)
class Answer:
    """What came back, as it came."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Running:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self._addresses: dict[str, str] = {}  # by the path that the log has after them
        self._is_ending = False

    def read_log(self, log: Path) -> None:
        """Copy the server's log to a file, and note where it listens."""
        assert self._process.stderr is not None
        with log.open("w") as file:
            for line in self._process.stderr:
                print(line, end="", file=file, flush=True)
                if " listening on " in line:
                    url = urlsplit(line.split()[-1])
                    self._addresses[url.path] = url.netloc

    def wait_until(self, status: int) -> None:
        """Wait until /ready answers with this status."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if "" in self._addresses and self.ask(Case("GET", "/ready")).status == status:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready, or did not end: wanted {status} of /ready")

    def ask(self, case: Case) -> Answer:
        """The answer to a request, on a connection of its own."""
        connection = self._connect(case.door)
        try:
            self._send_head(connection, case)
            for part in case.parts:
                connection.send(part)
            return _received(connection.getresponse())
        finally:
            connection.close()

    @contextmanager
    def draining(self, held: Case) -> Iterator[HTTPConnection]:
        """Have the server drain: it was told to end, and waits for the end of a request's body,
        which is sent afterwards. Gives the connection of that request, to receive its answer."""
        connection = self._connect(held.door)
        self._send_head(connection, held)
        connection.send(held.parts[0][:1])
        time.sleep(1.0)  # it must have begun to read
        self.end()
        self.wait_until(503)
        yield connection
        connection.close()

    def end(self) -> None:
        """Tell the server to end, once."""
        if not self._is_ending:
            self._is_ending = True
            self._process.terminate()

    def _connect(self, door: str) -> HTTPConnection:
        host, port = self._addresses[door].split(":")
        return HTTPConnection(host, int(port), timeout=WAIT_S)

    @staticmethod
    def _send_head(connection: HTTPConnection, case: Case) -> None:
        connection.putrequest(case.method, case.path, skip_host=True, skip_accept_encoding=True)
        for name, value in case.all_headers:
            connection.putheader(name, value.encode("utf-8"))
        connection.endheaders()


def finish(connection: HTTPConnection, held: Case) -> Answer:
    """The answer to a request that `draining` held, once the rest of its body is sent."""
    connection.send(held.parts[0][1:])
    return _received(connection.getresponse())


def _received(response: HTTPResponse) -> Answer:
    return Answer(response.status, response.getheaders(), response.read())


@contextmanager
def running(arguments: tuple[str, ...], cache: Path, log: Path) -> Iterator[Running]:
    """A server with these arguments, warmed up; it is ended and must end well."""
    with _started((*arguments, "--port", "0"), cache, stderr=subprocess.PIPE) as process:
        server = Running(process)
        reading = threading.Thread(target=server.read_log, args=(log,), daemon=True)
        reading.start()
        try:
            server.wait_until(200)
            yield server
        finally:
            server.end()
            code = process.wait(WAIT_S)
            reading.join()
    if code:
        raise RuntimeError(f"the server ended with {code}: {log.read_text()}")


def calibrate(model: Path, cache: Path) -> None:
    """Keep the ranges of a model's vectors, which int8 and uint8 need."""
    texts = cache / "texts.txt"
    texts.write_text("cat\nthe dog sat on mat\na red blue sky\nhow the train runs\n")
    arguments = ("calibrate", str(model), str(texts), "--dimensions", "8")
    with _started(arguments, cache / "cache", stderr=subprocess.DEVNULL) as process:
        if process.wait(WAIT_S):
            raise RuntimeError("the model was not calibrated")


def _started(arguments: tuple[str, ...], cache: Path, *, stderr: int) -> subprocess.Popen[str]:
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", "tests.answers.child", *arguments[:1], *FLAGS, *arguments[1:]]
    command += ["--cache-dir", str(cache)]
    return subprocess.Popen(command, stderr=stderr, text=True, env=environment)


class _Pictures(BaseHTTPRequestHandler):
    """Pictures by the names of PICTURES, and two redirects."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        moved = {"moved": "/png", "away": "http://169.254.169.254/png"}.get(name)
        found = PICTURES.get(name, b"")
        self.send_response(302 if moved else 200 if found else 404)
        if moved:
            self.send_header("Location", moved)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@contextmanager
def pictures() -> Iterator[str]:
    """A host of pictures: its name and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"localhost:{server.server_address[1]}"
        server.shutdown()
        thread.join()
