"""Replaces files atomically. Knows nothing of their content."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` at the end of the block.

    Readers see the old file or the new one, never a part. If the block raises, the old file stays
    and the temporary one is removed. Raises OSError if the file cannot be replaced.
    """
    # no process id in the name: two containers that share a folder may have the same one
    partial = path.with_name(f".{path.name}.partial-{uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # usually it is already renamed; the disk may also be read-only now
            partial.unlink()
