"""A server in a process of its own, and one in this process that answers what a test says."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WAIT_S = 60.0
QUICK = (str(Path(__file__).with_name("quick.py")),)  # the program that starts in less time


@contextmanager
def served(
    *arguments: str, program: Sequence[str] = ("-m", "jaxembed.cli")
) -> Iterator[tuple[str, int]]:
    """Serve with these arguments, on the CPU and on any port: (url, pid). At the end it must stop
    cleanly at SIGTERM, which a test may send before."""
    with subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "listening" in line).split()[-1]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@contextmanager
def answering(reply: Callable[[BaseHTTPRequestHandler, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server on loopback, whose answers are the status and the body that `reply` gives
    for a request and its body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = reply(self, self.rfile.read(int(self.headers.get("content-length", 0))))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
