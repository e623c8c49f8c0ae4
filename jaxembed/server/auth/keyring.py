"""The API keys of a key file, and the quotas of the keys.

The file is TOML with a table for each key. A table has the digest of the key and what the key may
use. A running server finds a key by its digest, and reads the file again when the file changes.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from jaxembed.engine.quota import Limits, Quota
from jaxembed.errors import ConfigError
from jaxembed.memory import MIB

logger = logging.getLogger(__name__)

KEY_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # names are also labels of metrics
HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
NO_LIMITS = Limits()
LARGEST_FILE = 16 * MIB  # bytes
LARGEST_LIMIT = 2**53
MAX_PROBLEMS = 10  # maximum problems of the file in a message
LONGEST_VALUE = 60  # maximum characters of a value in a message
WANTED_TABLES = "wanted tables [[key]] with `name` and `sha256`, as `jaxembed key new` prints them"
FILE_LOOK_S = 1.0  # seconds between two checks whether the file has changed
MAX_NAMED = 10  # maximum keys in a log line

FileVersion = tuple[int, int, int, int]  # device, inode, bytes and change time (ns) of a file


@dataclass(frozen=True)
class ApiKey:
    """One key of the file, and what it may use."""

    name: str
    digest: bytes  # SHA-256
    models: frozenset[str] | None = None  # model names as in requests; None: all
    routes: tuple[str, ...] | None = None  # paths, or prefixes that end in *; None: all
    limits: Limits = NO_LIMITS
    expires: date | None = None  # the value in the file; a date includes the whole day
    expires_at: datetime | None = None  # the moment from which on the key is invalid

    def is_expired(self, now: datetime) -> bool:
        """Return whether the key has expired at the time `now`."""
        return self.expires_at is not None and now >= self.expires_at

    def may_use_route(self, path: str) -> bool:
        """Return whether the key may use the route at `path`."""
        return self.routes is None or any(
            path.startswith(route[:-1]) if route.endswith("*") else path == route
            for route in self.routes
        )


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key. A fast hash is safe, because a key has 256 random
    bits."""
    return hashlib.sha256(key).digest()


def read_key_file(path: Path, taken: Mapping[bytes, str]) -> dict[bytes, ApiKey]:
    """Read a key file, and return its keys by their digests.

    `taken` maps the digests of keys that flags set, which the file must not repeat, to the names of
    the flags. Raises ConfigError, whose message lists the problems without keys and digests.
    """
    try:
        # without O_NONBLOCK, opening a pipe would wait for a writer
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a regular file; {WANTED_TABLES}")
            if status.st_size > LARGEST_FILE:
                raise ConfigError(
                    f"{path} has {status.st_size} bytes; a key file can have at most {LARGEST_FILE}"
                )
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {WANTED_TABLES}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; {WANTED_TABLES}") from error
    return parse_keys(text, str(path), taken)


def parse_keys(text: str, file: str, taken: Mapping[bytes, str]) -> dict[bytes, ApiKey]:
    """Parse the text of a key file, and return its keys by their digests. `file` is the name of the
    file in messages. `taken` maps digests that the file must not have to the names of the flags
    that set them. Raises ConfigError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}; {WANTED_TABLES}") from error
    except (RecursionError, ValueError) as error:  # Python reads integers of at most 4,300 digits
        raise ConfigError(
            f"{file} is nested too deeply, or has a number with thousands of digits"
        ) from error
    tables = document.get("key", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: `key` is not a list of tables; {WANTED_TABLES}")
    problems = [f"`{name[:LONGEST_VALUE]}` is unknown" for name in document if name != "key"]
    if not tables:
        problems.append("there is no key")
    keys: dict[bytes, ApiKey] = {}
    place_by_name: dict[str, str] = {}
    owner_by_digest = dict(taken)
    for number, table in enumerate(tables, 1):
        place, name = f"[[key]] number {number}", table.get("name")
        if isinstance(name, str) and KEY_NAME.fullmatch(name):
            place = f"{place} ({name})"
        key, faults = _read_table(table)
        if key is not None:
            if key.name in place_by_name:
                faults.append(f"`name` is the same as that of {place_by_name[key.name]}")
            if key.digest in owner_by_digest:
                faults.append(f"`sha256` is the same as that of {owner_by_digest[key.digest]}")
            place_by_name[key.name], owner_by_digest[key.digest] = place, place
            keys[key.digest] = key
        problems += [f"{place}: {problem}" for problem in faults]
    if problems:
        shown = problems[:MAX_PROBLEMS]
        if more := len(problems) - len(shown):
            shown.append(f"and {more} more")
        raise ConfigError(f"{file}: {'; '.join(shown)}; {WANTED_TABLES}")
    return keys


def _read_table(table: Mapping[str, Any]) -> tuple[ApiKey | None, list[str]]:
    """Return the key that a table of the file describes, and the problems of the table. If there
    are problems, the key is None."""
    problems = [
        f"`{field[:LONGEST_VALUE]}` is unknown; wanted one of {', '.join(KEY_FIELDS)}"
        for field in table
        if field not in KEY_FIELDS
    ]
    values: dict[str, Any] = {}
    for field, read in KEY_FIELDS.items():
        if field in table:
            try:
                values[field] = read(table[field])
            except ValueError as error:
                problems.append(f"`{field}` {error}")
        elif field in REQUIRED_FIELDS:
            problems.append(f"`{field}` is missing")
    if problems:
        return None, problems
    limits = Limits(*[values.get(field) for field in LIMIT_FIELDS])
    expires = values.get("expires", (None, None))  # as in the file, and as a moment
    models, routes = values.get("models"), values.get("routes")
    return ApiKey(values["name"], values["sha256"], models, routes, limits, *expires), []


def _shown_value(value: Any) -> str:
    """Return a value's repr for a message, shortened to LONGEST_VALUE characters."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def _read_name(value: Any) -> str:
    if not isinstance(value, str) or not KEY_NAME.fullmatch(value):
        raise ValueError(
            f"is {_shown_value(value)}; wanted 1 to 64 letters, digits, dots, dashes and "
            "underscores, with a letter or digit first"
        )
    return value


def _read_digest(value: Any) -> bytes:
    """Convert a digest to bytes. Raises ValueError, whose message does not quote the value, because
    it may be the key itself."""
    if not isinstance(value, str) or not HEX_DIGEST.fullmatch(value):
        received = f"a string of length {len(value)}" if isinstance(value, str) else "not a string"
        raise ValueError(f"is {received}; wanted the 64 hexadecimal digits of the key's SHA-256")
    return bytes.fromhex(value)


def _read_texts(
    collection: Callable[[list[str]], Collection[str]],
    wanted: str,
    is_right: Callable[[str], bool],
    value: Any,
) -> Collection[str]:
    """Check that `value` is a list of texts, and return it as a `collection`, such as a tuple.
    `is_right` checks each text; `wanted` describes a valid text in messages. Raises ValueError."""
    if not isinstance(value, list) or not value:
        received = "an empty list" if value == [] else _shown_value(value)
        raise ValueError(f"is {received}; wanted a list of {wanted}; leave it out to allow all")
    for text in value:
        if not isinstance(text, str) or not is_right(text):
            raise ValueError(f"contains {_shown_value(text)}; wanted {wanted}")
    return collection(value)


def _read_limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST_LIMIT:
        raise ValueError(
            f"is {_shown_value(value)}; wanted an integer of 1 or more; leave it out for no limit"
        )
    return value


def _read_expiry(value: Any) -> tuple[date, datetime]:
    """Return `value` and the moment when the key expires. If the value is a date, the key is valid
    to the end of that day. Times without a zone are UTC. Raises ValueError."""
    if isinstance(value, datetime):
        return value, value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date) and value < date.max:
        return value, datetime.combine(value + timedelta(days=1), datetime.min.time(), UTC)
    raise ValueError(
        f"is {_shown_value(value)}; wanted a date or a date and time without quotes, such as "
        "2027-01-31 or 2027-01-31T12:00:00Z"
    )


LIMIT_FIELDS = ("requests_per_minute", "tokens_per_minute", "max_inputs_waiting")
KEY_FIELDS: dict[str, Callable[[Any], Any]] = {
    "name": _read_name,
    "sha256": _read_digest,
    "models": partial(
        _read_texts,
        frozenset,
        "model names as sent in requests",
        lambda name: bool(name.strip()),
    ),
    "routes": partial(
        _read_texts,
        tuple,
        "paths such as '/v1/embeddings', or prefixes that end in * such as '/v1/*'",
        lambda path: path.startswith("/") and "*" not in path[:-1],
    ),
    **dict.fromkeys(LIMIT_FIELDS, _read_limit),
    "expires": _read_expiry,
}
REQUIRED_FIELDS = ("name", "sha256")


class Keyring:
    """The keys of a key file, and the quota of each key.

    A thread reads the file again when it has changed and has then stayed the same for FILE_LOOK_S
    seconds, so that a partly written file is not read. If the new file is invalid, the current keys
    stay valid. A key of the same name as before keeps its quota.
    """

    def __init__(
        self,
        path: Path,
        taken: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        """Read the file. `taken` maps keys that flags set, which the file must not repeat, to the
        names of the flags. Quotas use `clock`, which returns seconds, and the expiry of keys uses
        `now`. Raises ConfigError if the file is invalid."""
        self.path = path
        self.unknown = 0  # requests with a missing or unknown key
        self.done = self.failed = 0  # number of repeated reads, successful and failed
        self.is_current = True  # whether the last read succeeded
        self.read_at = time.time()  # in seconds since 1970
        self._taken = {digest_of(key.encode()): flag for key, flag in (taken or {}).items()}
        self._clock, self.now = clock, now
        self._mark = _mark_of(path)
        self._quotas: dict[str, Quota] = {}
        self._keys: dict[bytes, ApiKey] = {}
        self._use(read_key_file(path, self._taken))
        self._woken, self._closed = threading.Event(), False
        self._lock = threading.Lock()  # held while the file is read
        self._thread = threading.Thread(target=self._watch, name="key-file", daemon=True)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        """Return the ApiKey of the key `given` by a client; None if it is not in the file."""
        digest = digest_of(given)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def quota(self, key: ApiKey) -> Quota:
        """Return the quota of a key: its limits and what it has used."""
        # a key that is new, or has just left the file, gets a new quota
        return self._quotas.get(key.name) or Quota(key.name, key.limits, self._clock)

    def watch(self) -> None:
        """Start the thread that reads the file when it changes. It runs until `close`."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread read the file now, even if it has not changed."""
        self._woken.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def read_again(self) -> bool:
        """Read the file again, and use its keys if the whole file is valid. Returns whether it is;
        if not, the error is logged and the current keys stay in use."""
        with self._lock:
            try:
                keys = read_key_file(self.path, self._taken)
            except ConfigError as error:
                self.failed += 1
                self.is_current = False
                logger.error(
                    "the key file cannot be used, so the earlier keys stay valid: %s", error
                )
                return False
            old_names = {key.name for key in self._keys.values()}
            self._use(keys)
            self.done += 1
            self.is_current = True
            self.read_at = time.time()
            new_names = {key.name for key in keys.values()}
            logger.info(
                "%s was read again (keys: %d; added: %s; removed: %s)",
                self.path,
                len(keys),
                some_of(new_names - old_names),
                some_of(old_names - new_names),
            )
            return True

    def _use(self, keys: dict[bytes, ApiKey]) -> None:
        """Replace the keys in use by `keys`. Quotas are replaced before the keys, so that each key
        that `find` returns has a quota."""
        quotas = {key.name: self.quota(key) for key in keys.values()}
        for key in keys.values():
            if quotas[key.name].limits != key.limits:
                quotas[key.name].change(key.limits)
        self._quotas = quotas
        self._keys = keys

    def _watch(self) -> None:
        """Read the file again after a call of `wake`, or when the file has changed and then stayed
        the same from one check to the next. Ends after a call of `close`."""
        last_version = self._mark
        while True:
            if is_woken := self._woken.wait(FILE_LOOK_S):
                self._woken.clear()  # never after a wait in vain: `wake` may have come since
            if self._closed:
                return
            version = _mark_of(self.path)
            if is_woken or (version != self._mark and version == last_version):
                self._mark = version
                try:
                    self.read_again()
                except Exception:
                    logger.exception("the key file could not be read. This is a bug in jaxembed")
            last_version = version

    @property
    def quotas(self) -> Iterable[Quota]:
        """The quotas of all keys."""
        return list(self._quotas.values())


def _mark_of(path: Path) -> FileVersion | None:
    """Return what identifies the present version of the file; None if the file cannot be found."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def some_of(names: Collection[str], most: int = MAX_NAMED) -> str:
    """Return names for a message: at most `most` of them, sorted, and how many more there are."""
    shown = sorted(names)[:most]
    more = len(names) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown) or "none"
