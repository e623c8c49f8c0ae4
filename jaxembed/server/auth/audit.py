"""Writes a line of JSON for each request to a file, from a thread of its own. Knows no request."""

import errno
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import orjson

from jaxembed.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_LINES = 4096  # that wait to be written; later ones are lost until there is room
MOST_AT_ONCE = 512  # lines of a write
GATHER_S = 0.02  # for further lines, so that the thread is not woken for each
COMPLAIN_S = 60.0  # between log lines about a file that cannot be written
LAST_LINES_S = 2.0  # for the last lines: nobody may read a pipe
STANDARD_OUTPUT = Path("-")


class AuditLog:
    """A file that lines are appended to.

    `write` never waits. A line that cannot be written is counted and lost, and the log says so, but
    the request that it is about is answered.
    """

    def __init__(self, path: Path):
        """`-` is standard output. Raises ConfigError if the file cannot be opened."""
        self._path = path
        self.written = self.lost = 0  # lines
        self._lines: deque[dict[str, Any]] = deque()
        self._woken = threading.Event()
        self._is_closing = self._must_open = False
        self._is_torn = False  # the file ends in a part of a line
        self._complained_at = float("-inf")
        try:
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError(
                f"--audit-log {path} cannot be opened: {error.strerror}; wanted a file that can be "
                "appended to, or - for standard output"
            ) from error
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Have a line written soon."""
        if len(self._lines) >= MOST_LINES:
            self.lost += 1
            return
        self._lines.append(line)
        self._woken.set()

    def reopen(self) -> None:
        """Open the file by its name again, soon: it may have been moved away."""
        self._must_open = True
        self._woken.set()

    def close(self) -> None:
        """Write what waits, within LAST_LINES_S."""
        self._is_closing = True
        self._woken.set()
        self._thread.join(LAST_LINES_S)

    def _run(self) -> None:
        while True:
            self._woken.wait()
            if not self._is_closing:
                time.sleep(GATHER_S)
            self._woken.clear()
            is_last = self._is_closing
            if self._must_open:
                self._must_open = False
                self._open_again()
            while self._lines:
                count = min(len(self._lines), MOST_AT_ONCE)
                self._append([self._lines.popleft() for _ in range(count)])
            if is_last:
                return

    def _append(self, lines: list[dict[str, Any]]) -> None:
        data = b"\n" * self._is_torn + b"".join(_encoded(line) + b"\n" for line in lines)
        written, failure = 0, None
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            failure = error
        ended = data[:written].count(b"\n") - (self._is_torn and written > 0)
        if written:
            self._is_torn = not data[:written].endswith(b"\n")
        self.written += ended
        self.lost += len(lines) - ended
        if failure is not None:
            self._complain(failure)

    def _open_again(self) -> None:
        """Open the file again; if it cannot be, go on with the one there is."""
        try:
            file = _opened(self._path)
        except OSError as error:
            self._complain(error)
            return
        if os.path.samestat(os.fstat(file), os.fstat(self._file)):
            os.close(file)
            return
        before, self._file, self._is_torn = self._file, file, False
        os.close(before)
        logger.info("--audit-log %s was opened again", self._path)

    def _complain(self, error: OSError) -> None:
        if time.monotonic() - self._complained_at >= COMPLAIN_S:
            self._complained_at = time.monotonic()
            logger.error(
                "--audit-log %s cannot be written: %s; %d lines are lost so far, requests go on",
                self._path,
                error.strerror or errno.errorcode.get(error.errno or 0, "?"),
                self.lost,
            )


def _encoded(line: dict[str, Any]) -> bytes:
    """A line as JSON, also where a path holds what is no Unicode."""
    try:
        return orjson.dumps(line)
    except TypeError:
        return json.dumps(line).encode()


def _opened(path: Path) -> int:
    """A file descriptor to append to. A pipe that nobody reads is refused, not waited for."""
    if path == STANDARD_OUTPUT:
        return os.dup(sys.stdout.fileno())
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    file = os.open(path, flags, 0o600)
    os.set_blocking(file, True)
    return file
