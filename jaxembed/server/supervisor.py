"""Tells a supervisor such as systemd how the server is, by the protocol of sd_notify."""

import logging
import socket

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"


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
