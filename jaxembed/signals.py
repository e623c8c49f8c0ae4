"""What SIGTERM and SIGINT do until a server handles them: they end the process at once."""

import logging
import os
import signal
import socket
import threading
from typing import NoReturn

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOG_S = 1.0  # for a last line in the log, which nobody may read any more


def end_at_signals() -> None:
    """Let a signal end the process with 128 and its number, as shells say of a signal that kills.

    To process 1, as in a container, a signal without a handler does nothing. A thread ends the
    process, for Python runs handlers in the main thread, which may be in XLA for minutes.
    """
    ending, waking = socket.socketpair()
    waking.setblocking(False)

    def wake(number: int, _: object) -> None:  # where an event loop has the wake-up descriptor
        waking.send(bytes([number]))

    for number in STOP_SIGNALS:
        signal.signal(number, wake)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end, args=(ending, waking), name="signals", daemon=True).start()


def _end(ending: socket.socket, waking: socket.socket) -> None:
    """Wait for a signal; `waking` is held so that nothing closes it."""
    number = ending.recv(1)[0]
    leave(128 + number, logging.INFO, f"{signal.Signals(number).name}: exiting at once")


def leave(status: int, level: int, reason: str) -> NoReturn:
    """End the process now, whatever still runs, also where the log is a pipe that nobody reads."""
    told = threading.Thread(target=logger.log, args=(level, "%s", reason), daemon=True)
    told.start()
    told.join(LOG_S)
    os._exit(status)
