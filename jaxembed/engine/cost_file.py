"""Keeps timings of buckets beside the compile cache, by all that they depend on."""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxembed.cache_folder import make_private
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.costs import Timings
from jaxembed.files import replacing

logger = logging.getLogger(__name__)

# The third quartile of a bucket's timings over the first. On two cores of a shared machine: 1.02 to
# 1.15 while it was quiet, 1.5 and more beside another process.
BUSY_SPREAD = 1.3
KEY = re.compile(r"(\d+)x(\d+) (\w+)", re.ASCII)


class CostFile:
    """The timings of one model on one kind of device.

    `identity` is all that they depend on but the bucket and its kernel, as JSON; another identity
    has another file. `kernel_of` names the kernel that a bucket runs with.
    """

    def __init__(
        self, cache_dir: Path, identity: dict[str, Any], kernel_of: Callable[[Bucket], str]
    ):
        self.identity = identity
        self._kernel_of = kernel_of
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._path = cache_dir / "costs" / f"{digest[:16]}.json"

    def load(self) -> Timings:
        """What an earlier run has kept; nothing where there is no such file, or a damaged one."""
        try:
            return self.decode(json.loads(self._path.read_bytes())["timings"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is ignored: %s: %s", self._path, type(error).__name__, error)
            return {}

    def save(self, timings: Timings, spread: float) -> None:
        """Keep the timings, unless the machine was busy meanwhile: then, and where they cannot be
        written, the log says so."""
        if spread > BUSY_SPREAD:
            logger.warning(
                "timings of one bucket differ by a factor of %.2f: something else uses this "
                "machine. They are not kept, and are taken anew after the next start",
                spread,
            )
            return
        kept = {"identity": self.identity, "timings": self.encode(timings)}
        try:
            make_private(self._path.parent)
            with replacing(self._path) as partial:
                partial.write_text(json.dumps(kept, indent=1))
        except OSError as error:
            logger.warning("cannot keep the costs in %s: %s", self._path, error.strerror)

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
