"""Copies compiled programs and measurements from one cache directory to others.

A fleet of equal machines then compiles once. Whoever can change a compiled program can run code in
the process that loads it, so a pack is read only if it has the digest that the user gives.
"""

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxembed.errors import ConfigError
from jaxembed.platform.cache_folder import make_private, refuse_shared
from jaxembed.platform.files import replacing

# what is packed: JAX's compiled programs by kind of device, and the measurements of SavedFile
PACKED = re.compile(r"programs/\w[\w-]*/\w[\w.-]*-cache|costs/[0-9a-f]{16}[a-z-]*\.json", re.ASCII)
BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Packed:
    """How many files a pack has, and the SHA-256 of the whole pack in hexadecimal digits."""

    files: int
    sha256: str


def pack(cache_dir: Path, target: Path) -> Packed:
    """Write the compiled programs and measurements of a cache directory to the file `target`.

    A target that exists is replaced at the end. Raises ConfigError if other users can write to the
    cache directory or it has nothing to pack, and OSError if a file cannot be read or written.
    """
    refuse_shared(cache_dir, *sorted(path for path in cache_dir.glob("*/**/") if path.is_dir()))
    paths = list(_packed_paths(cache_dir))
    if not paths:
        raise ConfigError(
            f"the cache directory {cache_dir} has no compiled programs; serve a model from it first"
        )
    with replacing(target) as partial, partial.open("w+b") as written:
        with tarfile.open(fileobj=written, mode="w") as archive:
            for path in paths:
                with path.open("rb") as content:
                    info = tarfile.TarInfo(path.relative_to(cache_dir).as_posix())
                    info.size = os.fstat(content.fileno()).st_size
                    archive.addfile(info, content)
        written.seek(0)
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Packed(len(paths), digest)


def unpack(source: Path, cache_dir: Path, sha256: str) -> int:
    """Copy the files of a pack into a cache directory, and return how many were missing there.

    Files that exist are kept. Nothing is copied unless the pack has the digest `sha256`. Raises
    ConfigError for another digest, for a pack that holds anything but files of a cache directory,
    or if other users can write to the cache directory; OSError if a file cannot be read or written.
    """
    for folder in (cache_dir, cache_dir / "programs", cache_dir / "costs"):
        make_private(folder)
        refuse_shared(folder)
    # a copy without a name, which nobody can change after its digest is known
    with tempfile.TemporaryFile(dir=cache_dir) as private:
        with source.open("rb") as content:
            shutil.copyfileobj(content, private, BLOCK_BYTES)
        private.seek(0)
        found = hashlib.file_digest(private, "sha256").hexdigest()
        if found != sha256.lower():
            raise ConfigError(
                f"{source} has the SHA-256 {found}, not {sha256}: it is not the file that was "
                "packed; copy it again"
            )
        private.seek(0)
        try:
            with tarfile.open(fileobj=private, mode="r:") as archive:
                members = archive.getmembers()
                for member in members:
                    if not member.isreg() or not PACKED.fullmatch(member.name):
                        raise ConfigError(
                            f"{source} holds {member.name!r}, which is no file of a cache directory"
                        )
                return sum(_extract(archive, member, cache_dir) for member in members)
        except tarfile.TarError as error:
            raise ConfigError(
                f"{source} is not what `jaxembed cache pack` writes: {error}"
            ) from error


def _packed_paths(cache_dir: Path) -> Iterator[Path]:
    """Yield the files of a cache directory that are packed, in the order of their names."""
    for path in sorted(cache_dir.glob("*/**/*")):
        name = path.relative_to(cache_dir).as_posix()
        if PACKED.fullmatch(name) and path.is_file() and not path.is_symlink():
            yield path


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, cache_dir: Path) -> bool:
    """Write a member of the archive to the cache directory, and return True; False if it exists.
    Raises ConfigError if other users can write to its folder."""
    path = cache_dir / member.name
    if path.exists():
        return False
    make_private(path.parent)
    refuse_shared(path.parent)
    content = archive.extractfile(member)
    assert content is not None  # it is a regular file
    with replacing(path) as partial, partial.open("wb") as target:
        shutil.copyfileobj(content, target, BLOCK_BYTES)
    return True
