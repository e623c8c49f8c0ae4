"""The audit log: a file to which a thread appends one line of JSON for each request."""

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

MAX_LINES = 4096  # maximum lines in the queue; further lines are lost
MAX_AT_ONCE = 512  # maximum lines in one write
GATHER_S = 0.02  # seconds to collect further lines, so that the thread wakes less often
COMPLAIN_S = 60.0  # minimum seconds between two log lines about write errors
LAST_LINES_S = 2.0  # seconds to write the last lines, which may block if the file is a pipe
STANDARD_OUTPUT = Path("-")


class AuditLog:
    """The audit log, a file to which a thread appends lines. `write` never blocks. A line that
    cannot be written is counted as lost, and the server's log says so. The request of a lost line
    is still answered."""

    def __init__(self, path: Path):
        """Open the file; `-` is standard output. Raises ConfigError if it cannot be opened."""
        self.path = path
        self.written = self.lost = 0  # lines
        self._told = 0, 0  # what `growth` has told so far
        self._lines: deque[dict[str, Any]] = deque()
        self._woken = threading.Event()
        self._is_closing = self._must_open = False  # set by `close` and `reopen`
        self._is_torn = False  # whether the file ends in an incomplete line
        self._complained_at = float("-inf")
        try:
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError(
                f"--audit-log {path} cannot be opened: {error.strerror}; set it to a writable file "
                "or to - for standard output"
            ) from error
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line for the thread to write; count it as lost if the queue is full."""
        if len(self._lines) >= MAX_LINES:
            self.lost += 1
            return
        self._lines.append(line)
        self._woken.set()

    def growth(self) -> list[int]:
        """Return how many lines were written and lost since the last call."""
        counts = self.written, self.lost
        growth = [now - before for now, before in zip(counts, self._told, strict=True)]
        self._told = counts
        return growth

    def grow(self, growth: list[int]) -> None:
        """Add the lines that another process has written and lost."""
        written, lost = growth
        self.written += int(written)
        self.lost += int(lost)

    def reopen(self) -> None:
        """Have the thread open the path again, because the file may have been moved away."""
        self._must_open = True
        self._woken.set()

    def close(self) -> None:
        """Write the queued lines and end the thread, within LAST_LINES_S seconds."""
        self._is_closing = True
        self._woken.set()
        self._thread.join(LAST_LINES_S)

    def _run(self) -> None:
        """Write queued lines, and open the file again after a call of `reopen`, until the log is
        closed."""
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
                count = min(len(self._lines), MAX_AT_ONCE)
                self._append([self._lines.popleft() for _ in range(count)])
            if is_last:
                return

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Write lines to the file, and count the written and the lost lines. If the file ends in an
        incomplete line, write a line break first."""
        data = b"\n" * self._is_torn + b"".join(_encoded(line) + b"\n" for line in lines)
        written, failure = 0, None
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            failure = error
        # the first line break ends the incomplete line
        complete = data[:written].count(b"\n") - (self._is_torn and written > 0)
        if written:
            self._is_torn = not data[:written].endswith(b"\n")
        self.written += complete
        self.lost += len(lines) - complete
        if failure is not None:
            self._complain(failure)

    def _open_again(self) -> None:
        """Open the path again, and use the new file from now on. On an error, keep the old file."""
        try:
            new_file = _opened(self.path)
        except OSError as error:
            self._complain(error)
            return
        if os.path.samestat(os.fstat(new_file), os.fstat(self._file)):  # the path has not moved
            os.close(new_file)
            return
        old_file, self._file, self._is_torn = self._file, new_file, False
        os.close(old_file)
        logger.info("--audit-log %s: the file was opened again", self.path)

    def _complain(self, error: OSError) -> None:
        """Log an error, at most once every COMPLAIN_S seconds."""
        if time.monotonic() - self._complained_at >= COMPLAIN_S:
            self._complained_at = time.monotonic()
            logger.error(
                "--audit-log %s cannot be written: %s (lines lost so far: %d); requests are still "
                "answered",
                self.path,
                error.strerror or errno.errorcode.get(error.errno or 0, "?"),
                self.lost,
            )


def _encoded(line: dict[str, Any]) -> bytes:
    """Return a line as JSON, even if a path in it is not valid Unicode."""
    try:
        return orjson.dumps(line)
    except TypeError:
        return json.dumps(line).encode()


def _opened(path: Path) -> int:
    """Open a path for appending, and return its file descriptor. Raises OSError, also for a pipe
    without a reader, for which O_NONBLOCK avoids waiting."""
    if path == STANDARD_OUTPUT:
        return os.dup(sys.stdout.fileno())
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o600)
    os.set_blocking(descriptor, True)
    return descriptor
