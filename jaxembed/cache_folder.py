"""Directories of the cache: made for this user alone, refused where others can write.

What lies there is loaded and run unseen. Knows nothing of what that is.
"""

import os
import stat
from pathlib import Path

from jaxembed.errors import ConfigError

ROOT = 0  # it can write anywhere; a cache in an image may be its own
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make the directory and those missing above it, for this user alone. Raises OSError."""
    for path in [*reversed(folder.parents), folder]:
        if path == folder or not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def refuse_shared(*folders: Path) -> None:
    """Raises ConfigError if one of those that exist belongs to another user than this one or root,
    or if others can write to it. Windows has no such owners and modes."""
    if os.name == "nt":
        return
    for folder in folders:
        try:
            status = folder.stat()
        except OSError:  # nothing is loaded from there
            continue
        of = f"belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        danger = "whoever can write there can run code in this process"
        if status.st_uid not in (os.geteuid(), ROOT):
            raise ConfigError(
                f"the cache directory {folder} {of}, and this process runs as user "
                f"{os.geteuid()}: {danger}; set --cache-dir to a directory of its own"
            )
        if status.st_mode & OTHERS_WRITE:
            raise ConfigError(
                f"the cache directory {folder} {of}, and others can write to it: {danger}; run "
                f"`chmod -R go-w {folder}` if nobody else has written there, or set --cache-dir to "
                "another directory"
            )
