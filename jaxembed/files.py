"""Files that are replaced as a whole. Knows nothing of what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`, whose place it takes at the end of the block.

    Readers see the old file or the new one, never half of one. If the block raises, the old file
    stays and what was written is removed.
    """
    # not the process id: two containers that share a folder may have the same one
    partial = path.with_name(f".{path.name}.partial-{uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # gone, as it should be; or the disk has become read-only
            partial.unlink()
