"""Tells a supervisor such as systemd how the server is, by the protocol of sd_notify."""

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


def tell(address: str | None, state: str) -> None:
    """Send a state to the socket at `address`, a path, or a name that begins with "@". None: there
    is no supervisor. What goes wrong is logged, and the server runs on."""
    if address is None:
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), name)
    except OSError as error:
        logger.warning("the supervisor at %s was not told %s: %s", address, state, error)


async def feed_watchdog(
    address: str | None, interval_s: float | None, is_alive: Callable[[], bool]
) -> None:
    """Tell the supervisor ALIVE twice in each `interval_s` seconds, but not while `is_alive` is
    False: after such an interval of silence it ends the process.

    It runs until it is cancelled. Without a supervisor or an interval it returns at once.
    """
    while address is not None and interval_s is not None:
        if is_alive():
            tell(address, ALIVE)
        await asyncio.sleep(interval_s / 2)
