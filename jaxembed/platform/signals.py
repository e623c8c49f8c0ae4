"""Ends the process at SIGTERM and SIGINT, until a server handles these signals itself."""

import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from jaxembed.platform.files import remove_unfinished

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOG_S = 1.0  # timeout in seconds of the last log line, which blocks on a pipe that nobody reads

_resume_hint = ""


def set_resume_hint(hint: str) -> None:
    """Set `hint` as the end of the log line that `end_at_signals` writes. It says how the user can
    resume the work."""
    global _resume_hint
    _resume_hint = f"; {hint}"


def end_at_signals() -> None:
    """Let a signal end the process with the exit status 128 plus its number, as shells report it.

    Unfinished files are removed. The handlers are needed because the kernel ignores a signal
    without one for process 1, the first process of a container. A thread ends the process: Python
    runs handlers in the main thread only, which may be inside XLA for minutes.
    """
    # signal numbers are written to `waking`; the thread reads them from `ending`
    ending, waking = socket.socketpair()
    waking.setblocking(False)

    # an event loop may take the wake-up descriptor, so the handler also writes to `waking`
    def wake(number: int, _: object) -> None:
        waking.send(bytes([number]))

    for number in STOP_SIGNALS:
        signal.signal(number, wake)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end, args=(ending, waking), name="signals", daemon=True).start()


def _end(ending: socket.socket, waking: socket.socket) -> None:
    """Wait for a signal and end the process. The parameter `waking` only keeps that socket open."""
    number = ending.recv(1)[0]
    name = signal.Signals(number).name
    leave(128 + number, logging.INFO, f"{name}: exiting at once{_resume_hint}")


def leave(status: int, level: int, reason: str) -> NoReturn:
    """Log the reason and end the process at once, without waiting for other threads.

    `status` is the exit status, and `level` the log level. The log line has a timeout of LOG_S
    seconds, because nobody may read the pipe that it is written to.
    """

    def write() -> None:
        if sys.stderr.isatty():  # a progress bar may have left the cursor within a line
            print(file=sys.stderr)
        logger.log(level, "%s", reason)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOG_S)
    remove_unfinished()
    os._exit(status)
