"""The API keys of a key file while a server runs: found by their digests, read again when the file
changes, with the quota of each. Knows no route and no model."""

import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from jaxembed.engine.quota import Quota
from jaxembed.errors import ConfigError
from jaxembed.server.auth.key_file import ApiKey, digest_of, read_key_file

logger = logging.getLogger(__name__)

FILE_LOOK_S = 1.0  # between looks at whether the file has changed
MOST_NAMED = 10  # keys in a log line

Mark = tuple[int, int, int, int]  # of a version of the file: device, inode, size, time


class Keyring:
    """The keys of a file, and what they have used.

    A thread reads the file again when it has changed and has then been the same for FILE_LOOK_S, so
    that a file that is still being written is not read. A file that is wrong changes nothing. What
    keys have used is kept by their names.
    """

    def __init__(
        self,
        path: Path,
        taken: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        """`taken` are keys that the file may not have, with the flags that give them. Raises
        ConfigError if the file is wrong."""
        self.path = path
        self.unknown = 0  # requests without a key of ours
        self.done = self.failed = 0  # times that the file was read again, or could not be
        self.is_current = True  # whether the keys in use are those of the file as last read
        self.read_at = time.time()  # in seconds since 1970
        self._taken = {digest_of(key.encode()): flag for key, flag in (taken or {}).items()}
        self._clock, self._now = clock, now
        self._mark = _mark_of(path)
        self._quotas: dict[str, Quota] = {}
        self._keys: dict[bytes, ApiKey] = {}
        self._use(read_key_file(path, self._taken))
        self._woken, self._closed = threading.Event(), False
        self._lock = threading.Lock()  # of reading
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        """The key that a client gave."""
        digest = digest_of(given)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def is_expired(self, key: ApiKey) -> bool:
        """Whether the key opens nothing any more."""
        return key.is_expired(self._now())

    def quota(self, key: ApiKey) -> Quota:
        """What the key may use and has used."""
        # of a key that has just left the file: none of its limits is left, but its name
        return self._quotas.get(key.name) or Quota(key.name, key.limits, self._clock)

    def watch(self) -> None:
        """Start to look whether the file has changed, in a thread, until `close`."""
        self._thread = threading.Thread(target=self._watch, name="key-file", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread read the file now, whether or not it has changed."""
        self._woken.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def read_again(self) -> bool:
        """Read the file, whole or not at all. Returns whether its keys are those in use now."""
        with self._lock:
            try:
                keys = read_key_file(self.path, self._taken)
            except ConfigError as error:
                self.failed += 1
                self.is_current = False
                logger.error("the keys in use stay as they are: %s", error)
                return False
            names = {key.name for key in self._keys.values()}
            self._use(keys)
            self.done += 1
            self.is_current = True
            self.read_at = time.time()
            new = {key.name for key in keys.values()}
            logger.info(
                "%s was read again: %d keys, new %s, gone %s",
                self.path,
                len(keys),
                some_of(new - names),
                some_of(names - new),
            )
            return True

    def _use(self, keys: dict[bytes, ApiKey]) -> None:
        """Let these be the keys. Quotas first: a key that is found has one."""
        quotas = {}
        for key in keys.values():
            quota = self._quotas.get(key.name)
            if quota is None:
                quota = Quota(key.name, key.limits, self._clock)
            elif quota.limits != key.limits:
                quota.change(key.limits)
            quotas[key.name] = quota
        self._quotas = quotas
        self._keys = keys

    def _watch(self) -> None:
        before = self._mark
        while True:
            is_asked = self._woken.wait(FILE_LOOK_S)
            if self._closed:
                return
            self._woken.clear()
            mark = _mark_of(self.path)
            if is_asked or (mark != self._mark and mark == before):
                self._mark = mark
                try:
                    self.read_again()
                except Exception:
                    logger.exception("the key file could not be read. This is a bug in jaxembed")
            before = mark

    @property
    def quotas(self) -> Iterable[Quota]:
        """The quota of each key."""
        return list(self._quotas.values())


def _mark_of(path: Path) -> Mark | None:
    """What tells this version of the file from others; None if it is not there."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def some_of(names: Collection[str], most: int = MOST_NAMED) -> str:
    """Some names for a message, and how many more there are."""
    shown = sorted(names)[:most]
    more = len(names) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown) or "none"
