"""Exit statuses of the commands: which one an error ends the process with."""

import errno
import socket

from jaxembed.errors import (
    BackendError,
    HubUnreachable,
    JaxembedError,
    NoRoom,
    StoreUnreachable,
)
from jaxembed.platform.files import DISK_FULL

EXIT_AGREES, EXIT_DISAGREES = 0, 1  # of `verify`
EXIT_HEALTHY, EXIT_FINDINGS = 0, 1  # of `doctor`
EXIT_REFUSED = 2  # of all: the command, its options or its files are wrong, and stay so
EXIT_TEMPORARY = 75  # of all: the same command may succeed later; EX_TEMPFAIL of sysexits.h

STATUSES: dict[type[BaseException], int] = {  # the nearest class of an error counts
    JaxembedError: EXIT_REFUSED,
    HubUnreachable: EXIT_TEMPORARY,
    StoreUnreachable: EXIT_TEMPORARY,
    BackendError: EXIT_TEMPORARY,
    NoRoom: EXIT_REFUSED,
    TimeoutError: EXIT_TEMPORARY,  # that of a lock, too
}
TEMPORARY_ERRNOS = {  # of an OSError
    *DISK_FULL,
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    socket.EAI_AGAIN,
}


def exit_status(error: BaseException) -> int:
    """Return EXIT_TEMPORARY if the error, or one that caused it, may pass, else EXIT_REFUSED."""
    reason: BaseException | None = error
    while reason is not None:
        status = next((STATUSES[kind] for kind in type(reason).__mro__ if kind in STATUSES), None)
        if status == EXIT_TEMPORARY:
            return status
        if isinstance(reason, OSError) and reason.errno in TEMPORARY_ERRNOS:
            return EXIT_TEMPORARY
        reason = reason.__cause__
    return EXIT_REFUSED
