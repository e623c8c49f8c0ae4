"""What one machine has compiled, on another: the files of a pack, and packs that are not taken."""

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from jaxembed.cli import cli
from jaxembed.errors import ConfigError
from jaxembed.tools.cache_pack import pack, unpack

FILES = {
    "programs/4f1a/jit_forward-0a1b-cache": b"a program",
    "programs/nvidia-h100/jit_forward-0a1b-cache": b"another",
    "costs/0123456789abcdef-attention.json": b"{}",
    "costs/0123456789abcdef.json": b"{}",
}
OTHERS = {
    "programs/4f1a/jit_forward-0a1b-atime": b"1",
    "models/minilm/params": b"weights",
    "cpu-rates.json": b"{}",
    "native/library.so": b"code",
}


def filled(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in (folder, *folder.rglob("*/")):
        path.chmod(0o700)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_programs_and_measurements_are_copied_and_nothing_else(tmp_path):
    source, target = filled(tmp_path / "a", FILES | OTHERS), tmp_path / "b"
    packed = pack(source, tmp_path / "a.tar")
    assert packed.files == len(FILES)
    assert packed.sha256 == hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()
    filled(target, {"costs/0123456789abcdef.json": b"own"})
    assert unpack(tmp_path / "a.tar", target, packed.sha256.upper()) == len(FILES) - 1
    assert contents(target) == FILES | {"costs/0123456789abcdef.json": b"own"}
    assert {path.stat().st_mode & 0o077 for path in target.rglob("*/")} == {0}
    assert unpack(tmp_path / "a.tar", target, packed.sha256) == 0


def test_equal_directories_make_equal_packs(tmp_path):
    digests = {
        pack(filled(tmp_path / name, FILES), tmp_path / f"{name}.tar").sha256 for name in "ab"
    }
    assert len(digests) == 1


def test_a_pack_that_was_changed_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    packed = pack(filled(tmp_path / "a", FILES), path)
    changed = bytearray(path.read_bytes())
    changed[600] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ConfigError, match=f"a.tar has the SHA-256 .*, not {packed.sha256}"):
        unpack(path, tmp_path / "b", packed.sha256)
    assert contents(tmp_path / "b") == {}


def archive(path: Path, *members: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w") as written:
        for member in members:
            member.size = 4 if member.isreg() else 0
            written.addfile(member, io.BytesIO(b"evil") if member.isreg() else None)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


GOOD = "programs/x/jit_forward-1-cache"


@pytest.mark.parametrize(
    "member",
    [
        *map(
            tarfile.TarInfo,
            (
                "../evil-cache",
                "/tmp/programs/x/y-cache",
                "programs/../../y-cache",
                "programs/../y-cache",
                "programs/x/y/z-cache",
                "programs/x/library.so",
                "models/minilm/params",
                "costs/0123456789abcdef.json\n",
                "costs/../y.json",
            ),
        ),
        link(GOOD, tarfile.SYMTYPE),
        link(GOOD, tarfile.LNKTYPE),
        link(GOOD, tarfile.FIFOTYPE),
        link("programs/x", tarfile.DIRTYPE),
    ],
    ids=lambda member: f"{member.name!r}-{member.type.decode()}",
)
def test_a_pack_with_other_members_is_refused_as_a_whole(tmp_path, member):
    digest = archive(tmp_path / "a.tar", tarfile.TarInfo(GOOD), member)
    with pytest.raises(ConfigError, match=r"a\.tar holds '.*', which is no file of a cache"):
        unpack(tmp_path / "a.tar", tmp_path / "b", digest)
    assert contents(tmp_path / "b") == {}


def test_what_is_no_pack_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"no archive" * 100)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match="is not what `jaxembed cache pack` writes"):
        unpack(path, tmp_path / "b", digest)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other modes")
@pytest.mark.parametrize("shared", [".", "programs", "programs/4f1a"])
def test_folders_that_others_can_write_to_are_refused(tmp_path, shared):
    cache, path = filled(tmp_path / "a", FILES), tmp_path / "a.tar"
    digest = pack(cache, path).sha256
    (cache / shared).chmod(0o770)
    with pytest.raises(ConfigError, match="others can write to it"):
        pack(cache, path)
    (cache / "programs/4f1a/jit_forward-0a1b-cache").unlink()
    with pytest.raises(ConfigError, match="others can write to it"):
        unpack(path, cache, digest)


def run(*arguments: str | Path):
    return CliRunner().invoke(cli, ["cache", *map(str, arguments)])


def test_the_commands_pass_the_digest_on(tmp_path):
    cache, path = filled(tmp_path / "a", FILES), tmp_path / "a.tar"
    packed = run("pack", path, "--cache-dir", cache)
    assert packed.exit_code == 0
    assert packed.stderr == f"4 files packed into {path}\n"
    done = run("unpack", path, "--cache-dir", tmp_path / "b", "--sha256", packed.stdout.strip())
    assert done.exit_code == 0
    assert done.stderr == f"4 new files in {tmp_path / 'b'}\n"
    assert contents(tmp_path / "b") == FILES
    nowhere = run("pack", tmp_path / "none" / "a.tar", "--cache-dir", cache)
    assert "none/a.tar: No such file or directory" in str(nowhere.exception)
    assert "has no compiled programs" in str(
        run("pack", path, "--cache-dir", tmp_path / "c").exception
    )
