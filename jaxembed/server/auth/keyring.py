"""The API keys of a file: TOML with a table for each key, which holds the key's digest and what the
key may do. While a server runs they are found by their digests and read again when the file
changes, with the quota of each. Knows no route and no model."""

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

KEY_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # also a label of metrics
HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
NO_LIMITS = Limits()
LARGEST_FILE = 16 * MIB
LARGEST_LIMIT = 2**53
MOST_PROBLEMS = 10  # that a message lists
LONGEST_VALUE = 60  # characters of a value in a message
WANTED_TABLES = "wanted tables [[key]] with `name` and `sha256`, as `jaxembed key new` prints them"
FILE_LOOK_S = 1.0  # between looks at whether the file has changed
MOST_NAMED = 10  # keys in a log line

Mark = tuple[int, int, int, int]  # of a version of the file: device, inode, size, time


@dataclass(frozen=True)
class ApiKey:
    """What the file says of one key."""

    name: str
    digest: bytes  # SHA-256
    models: frozenset[str] | None = None  # names of models as requests give them; None: any
    routes: tuple[str, ...] | None = None  # paths; one that ends in * is a prefix; None: any
    limits: Limits = NO_LIMITS
    expires: date | None = None  # a datetime, or a date, which is valid to its end
    expires_at: datetime | None = None

    def is_expired(self, now: datetime) -> bool:
        """Whether the key opens nothing any more."""
        return self.expires_at is not None and now >= self.expires_at

    def may_take(self, path: str) -> bool:
        """Whether the key opens the route of this path."""
        return self.routes is None or any(
            path.startswith(route[:-1]) if route.endswith("*") else path == route
            for route in self.routes
        )


def digest_of(key: bytes) -> bytes:
    """The SHA-256 of a key. A slow hash is for passwords; a key of 256 random bits needs none."""
    return hashlib.sha256(key).digest()


def read_key_file(path: Path, taken: Mapping[bytes, str]) -> dict[bytes, ApiKey]:
    """The keys in a file by their digests. `taken` are digests that no key may have, with the flags
    that give them. Raises ConfigError, which lists every problem but no key and no digest."""
    try:
        # else opening a pipe would wait for a writer
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path} is no regular file; {WANTED_TABLES}")
            if facts.st_size > LARGEST_FILE:
                raise ConfigError(
                    f"{path} has {facts.st_size} bytes, a key file may have {LARGEST_FILE}"
                )
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {WANTED_TABLES}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8; {WANTED_TABLES}") from error
    return parse_keys(text, str(path), taken)


def parse_keys(text: str, file: str, taken: Mapping[bytes, str]) -> dict[bytes, ApiKey]:
    """The keys in the text of a file, which messages call `file`; as `read_key_file`."""
    try:
        whole = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}; {WANTED_TABLES}") from error
    except (RecursionError, ValueError) as error:  # Python reads integers of at most 4,300 digits
        raise ConfigError(
            f"{file} is nested too deeply, or holds a number of thousands of digits"
        ) from error
    tables = whole.get("key", [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ConfigError(f"{file}: `key` is no list of tables; {WANTED_TABLES}")
    problems = [f"`{name[:LONGEST_VALUE]}` is unknown" for name in whole if name != "key"]
    if not tables:
        problems.append("there is no key")
    keys: dict[bytes, ApiKey] = {}
    names: dict[str, str] = {}
    digests: dict[bytes, str] = {digest: flag for digest, flag in taken.items()}
    for number, table in enumerate(tables, 1):
        place, name = f"[[key]] number {number}", table.get("name")
        if isinstance(name, str) and KEY_NAME.fullmatch(name):
            place = f"{place} ({name})"
        key, found = _read_table(table)
        if key is not None:
            if key.name in names:
                other = names[key.name]
                found.append(f"`name` is also that of {other}; each key needs one of its own")
            if key.digest in digests:
                other = digests[key.digest]
                found.append(f"`sha256` is that of a key that {other} has already")
            names[key.name], digests[key.digest] = place, place
            keys[key.digest] = key
        problems += [f"{place}: {problem}" for problem in found]
    if problems:
        more = len(problems) - MOST_PROBLEMS
        shown = problems[:MOST_PROBLEMS] + [f"and {more} more"] * (more > 0)
        raise ConfigError(f"{file}: {'; '.join(shown)}; {WANTED_TABLES}")
    return keys


def _read_table(table: Mapping[str, Any]) -> tuple[ApiKey | None, list[str]]:
    """The key of a table, None if it has problems, and these."""
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
    expires = values.get("expires", (None, None))
    models, routes = values.get("models"), values.get("routes")
    return ApiKey(values["name"], values["sha256"], models, routes, limits, *expires), []


def _shown_value(value: Any) -> str:
    """A value in a message: it may be of any size."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def _read_name(value: Any) -> str:
    if not isinstance(value, str) or not KEY_NAME.fullmatch(value):
        raise ValueError(
            f"is {_shown_value(value)}; wanted 1 to 64 letters, digits, dots, dashes and "
            "underscores, a letter or digit first"
        )
    return value


def _read_digest(value: Any) -> bytes:
    """What came is not shown: it may be the key itself."""
    if not isinstance(value, str) or not HEX_DIGEST.fullmatch(value):
        came = f"a text of {len(value)} characters" if isinstance(value, str) else "no text"
        raise ValueError(f"is {came}; wanted the 64 hexadecimal digits of the key's SHA-256")
    return bytes.fromhex(value)


def _read_texts(
    kind: Callable[[list[str]], Collection[str]],
    wanted: str,
    is_right: Callable[[str], bool],
    value: Any,
) -> Collection[str]:
    if not isinstance(value, list) or not value:
        came = "an empty list" if value == [] else _shown_value(value)
        raise ValueError(f"is {came}; wanted a list of {wanted}, or no such field for all")
    for one in value:
        if not isinstance(one, str) or not is_right(one):
            raise ValueError(f"holds {_shown_value(one)}; wanted {wanted}")
    return kind(value)


def _read_limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST_LIMIT:
        raise ValueError(
            f"is {_shown_value(value)}; wanted a whole number from 1 on, or no such field for no "
            "limit"
        )
    return value


def _read_expiry(value: Any) -> tuple[date, datetime]:
    """The value, and the moment from which on the key opens nothing."""
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
        "names of models as requests give them",
        lambda name: bool(name.strip()),
    ),
    "routes": partial(
        _read_texts,
        tuple,
        "paths such as '/v1/embeddings', or with a * at the end such as '/v1/*'",
        lambda path: path.startswith("/") and "*" not in path[:-1],
    ),
    **dict.fromkeys(LIMIT_FIELDS, _read_limit),
    "expires": _read_expiry,
}
REQUIRED_FIELDS = ("name", "sha256")


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
        self._clock, self.now = clock, now
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
