"""Saves measurements in JSON files of the cache directory.

The name of a file is a hash of its identity: everything that the measurements depend on, such as
the model, the device and the versions of packages.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxembed.engine.autotune.costs import Timings
from jaxembed.engine.bucket import Bucket
from jaxembed.platform.cache_folder import make_private
from jaxembed.platform.files import replacing

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")
KEY = re.compile(r"(\d+)x(\d+) (\w+)", re.ASCII)


def save_json(path: Path, content: Any, what: str) -> None:
    """Write `content` to a file as JSON. An OSError is only logged, with `what` as the name of the
    content."""
    try:
        make_private(path.parent)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1))
    except OSError as error:
        logger.warning("cannot save %s in %s: %s", what, path, error.strerror)


class SavedFile:
    """A JSON file in the folder `costs` of the cache directory.

    The name of the file is a hash of `identity`, everything that the content depends on, and then
    `suffix`. `what` names the content: it is a key in the file, and appears in log messages.
    """

    def __init__(self, cache_dir: Path, identity: dict[str, Any], what: str, suffix: str = ""):
        self.identity = identity
        self._what = what
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._path = cache_dir / "costs" / f"{digest[:16]}{suffix}.json"

    def load(self, decode: Callable[[Any], Kept]) -> Kept | None:
        """Read the content that an earlier run saved, and return `decode(content)`.

        Returns None if there is no file. If the file is damaged, also logs a warning.
        """
        try:
            return decode(json.loads(self._path.read_bytes())[self._what])
        except FileNotFoundError:
            return None
        except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(
                "%s is ignored, and its content is measured again: %s: %s",
                self._path,
                type(error).__name__,
                error,
            )
            return None

    def save(self, value: Any) -> None:
        """Write `value` to the file as JSON. An OSError is logged."""
        save_json(self._path, {"identity": self.identity, self._what: value}, f"the {self._what}")


class CostFile:
    """The file with the timings of one model on one kind of device.

    `identity` is everything that the timings depend on, except the bucket and its kernel, which are
    in the key of each timing. `kernel_of` returns the name of the kernel that a bucket runs with.
    """

    def __init__(
        self, cache_dir: Path, identity: dict[str, Any], kernel_of: Callable[[Bucket], str]
    ):
        self.identity = identity
        self._kernel_of = kernel_of
        self._file = SavedFile(cache_dir, identity, "timings")

    def load(self) -> Timings:
        """Return the timings that an earlier run saved; empty if the file is missing or damaged."""
        return self._file.load(self.decode) or {}

    def save(self, timings: Timings) -> None:
        """Save the timings. An OSError is logged."""
        self._file.save(self.encode(timings))

    def encode(self, timings: Timings) -> dict[str, list[float]]:
        """Convert timings to values for JSON: `{"8x128 native": [milliseconds, ...]}`."""
        return {
            f"{bucket} {self._kernel_of(bucket)}": [float(f"{value:.5g}") for value in ms]
            for bucket, ms in sorted(timings.items())
        }

    def decode(self, encoded: dict[str, list[float]]) -> Timings:
        """Convert the result of `encode` back to timings.

        Buckets that run with another kernel now are left out. Raises ValueError, TypeError or
        AttributeError for values that `encode` does not return.
        """
        timings: Timings = {}
        for key, values in encoded.items():
            match = KEY.fullmatch(key)
            ms = [float(value) for value in values]
            if match is None or not ms or not all(0 < value < float("inf") for value in ms):
                raise ValueError(f"{key!r}: these are not timings of a bucket")
            bucket = Bucket(int(match[1]), int(match[2]))
            if self._kernel_of(bucket) == match[3]:
                timings[bucket] = ms
        return timings
