"""Creates cache directories with access for their owner alone, and refuses those that other users
can write to.

Files in a cache directory are loaded and run unchecked.
"""

import os
import stat
from pathlib import Path

from jaxembed.errors import ConfigError

ROOT = 0  # user id of root, which may own the cache, because root can write anywhere in any case
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create a directory and its missing parents with access for this user alone (mode 700).

    Directories that exist keep their mode, which `refuse_shared` checks. Raises OSError if a
    directory cannot be made.
    """
    for path in [*reversed(folder.parents), folder]:
        # `mkdir` is also called for a `folder` that exists, because it raises if that is a file
        if path == folder or not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def refuse_shared(*folders: Path) -> None:
    """Raise ConfigError if an existing folder belongs to another user, or others can write to it.

    A folder of root is allowed. On Windows, which has other owners and modes, nothing is checked.
    """
    if os.name == "nt":
        return
    for folder in folders:
        try:
            status = folder.stat()
        except OSError:  # the folder does not exist, so nothing is loaded from it
            continue
        owner = f"belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        danger = "whoever can write there can run code in this process"
        if status.st_uid not in (os.geteuid(), ROOT):
            raise ConfigError(
                f"the cache directory {folder} {owner}, and this process runs as user "
                f"{os.geteuid()}: {danger}; set --cache-dir to a directory of its own"
            )
        if status.st_mode & OTHERS_WRITE:
            raise ConfigError(
                f"the cache directory {folder} {owner}, and others can write to it: {danger}; run "
                f"`chmod -R go-w {folder}` if nobody else has written there, or set --cache-dir to "
                "another directory"
            )
