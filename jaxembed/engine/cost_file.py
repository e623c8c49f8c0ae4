"""Keeps what was measured beside the compile cache, by all that it depends on."""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxembed.cache_folder import make_private
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.costs import Timings
from jaxembed.files import replacing

logger = logging.getLogger(__name__)

# The third quartile of a bucket's timings over the first. On two cores of a shared machine: 1.02 to
# 1.15 while it was quiet, 1.5 and more beside another process.
BUSY_SPREAD = 1.3
Kept = TypeVar("Kept")
KEY = re.compile(r"(\d+)x(\d+) (\w+)", re.ASCII)


class KeptFile:
    """A JSON file in the folder `costs` of the cache, named by `identity`, all that it depends on:
    another identity has another file. `what` says what it keeps."""

    def __init__(self, cache_dir: Path, identity: dict[str, Any], what: str, suffix: str = ""):
        self.identity = identity
        self._what = what
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._path = cache_dir / "costs" / f"{digest[:16]}{suffix}.json"

    def load(self, decode: Callable[[Any], Kept]) -> Kept | None:
        """What an earlier run has kept; None where there is no such file, or a damaged one."""
        try:
            return decode(json.loads(self._path.read_bytes())[self._what])
        except FileNotFoundError:
            return None
        except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(
                "%s is ignored, and the %s are taken anew: %s: %s",
                self._path,
                self._what,
                type(error).__name__,
                error,
            )
            return None

    def save(self, value: Any) -> None:
        """Keep it, as JSON; where it cannot be written the log says so."""
        kept = {"identity": self.identity, self._what: value}
        try:
            make_private(self._path.parent)
            with replacing(self._path) as partial:
                partial.write_text(json.dumps(kept, indent=1))
        except OSError as error:
            logger.warning("cannot keep the %s in %s: %s", self._what, self._path, error.strerror)


class CostFile:
    """The timings of one model on one kind of device.

    `identity` is all that they depend on but the bucket and its kernel. `kernel_of` names the
    kernel that a bucket runs with.
    """

    def __init__(
        self, cache_dir: Path, identity: dict[str, Any], kernel_of: Callable[[Bucket], str]
    ):
        self.identity = identity
        self._kernel_of = kernel_of
        self._file = KeptFile(cache_dir, identity, "timings")

    def load(self) -> Timings:
        """What an earlier run has kept; nothing where there is no such file, or a damaged one."""
        return self._file.load(self.decode) or {}

    def save(self, timings: Timings, spread: float) -> None:
        """Keep the timings, unless the machine was busy meanwhile: then the log says so."""
        if spread > BUSY_SPREAD:
            logger.warning(
                "timings of one bucket differ by a factor of %.2f: something else uses this "
                "machine. They are not kept, and are taken anew after the next start",
                spread,
            )
            return
        self._file.save(self.encode(timings))

    def encode(self, timings: Timings) -> dict[str, list[float]]:
        """As JSON: `{"8x128 native": [milliseconds, ...]}`."""
        return {
            f"{bucket} {self._kernel_of(bucket)}": [float(f"{one:.5g}") for one in ms]
            for bucket, ms in sorted(timings.items())
        }

    def decode(self, encoded: dict[str, list[float]]) -> Timings:
        """What `encode` gave, of the buckets that run with the same kernel now. Raises ValueError,
        TypeError or AttributeError for anything else."""
        timings: Timings = {}
        for key, values in encoded.items():
            found = KEY.fullmatch(key)
            ms = [float(one) for one in values]
            if found is None or not ms or not all(0 < one < float("inf") for one in ms):
                raise ValueError(f"{key!r}: no timings of a bucket")
            bucket = Bucket(int(found[1]), int(found[2]))
            if self._kernel_of(bucket) == found[3]:
                timings[bucket] = ms
        return timings
