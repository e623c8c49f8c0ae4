"""The files that earlier versions left on disk, in tests/upgrades/*, which its make.py makes."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from conftest import open_tiny
from test_golden import answer, assert_agrees, read
from upgrades.make import VERSIONS, write_dated_source

import converters
from jaxembed import Embedder, __version__
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.data.spec import FORMAT_VERSION
from jaxembed.engine.autotune.cost_file import CostFile
from jaxembed.engine.bucket import Bucket, read_grid
from jaxembed.errors import CheckpointError, ConfigError

FIXTURES = Path(__file__).parents[1] / "upgrades"
GOLDENS = Path(__file__).parents[1] / "golden"
LATEST = list(VERSIONS)[-1]
ONE = (2, 32)  # a bucket
TUNED = [name for name, version in VERSIONS.items() if version.tunes]
HUB, COSTS = "jaxembed.checkpoints.hub", "jaxembed.engine.autotune.cost_file"  # modules that log
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),  # as a crash of the machine leaves it
}

each_version = pytest.mark.parametrize("version", VERSIONS)
each_damage = pytest.mark.parametrize("damage", DAMAGES)


def copy_private(source: Path, target: Path) -> Path:
    """A copy that nobody else can write and that is new, whatever the modes and the age of the
    checkout are."""
    shutil.copytree(source, target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path)
    return target


def source_in(folder: Path, version: str) -> Path:
    """What the version converted."""
    name = VERSIONS[version].golden
    return write_dated_source(GOLDENS / f"{name}.npz", folder / name)


def entry_of(cache: Path) -> Path:
    (entry,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    return entry


def cache_in(folder: Path, version: str, source: Path) -> Path:
    """The cache that the version made of the source: entries are named by its path as well."""
    cache = copy_private(FIXTURES / version / "cache", folder / "cache")
    entry = entry_of(cache)
    key = hub._entry(str(source), str(source), None)
    state = "" if entry.name.count("-") == 1 else f"-{entry.name.rpartition('-')[2]}"
    entry.rename(entry.with_name(key + state))
    return cache


def checkpoint_in(folder: Path, version: str) -> Path:
    """What the version's `jaxembed convert` made: an entry of its cache without the record."""
    (entry,) = (FIXTURES / version / "cache" / "models").iterdir()
    target = copy_private(entry, folder / "checkpoint")
    (target / hub.RECORD).unlink()
    return target


def assert_serves(embedder: Embedder, version: str) -> None:
    """Its first call gives what torch gave."""
    arrays = read(GOLDENS / f"{VERSIONS[version].golden}.npz")
    wanted = arrays["scores/0" if "scores/0" in arrays else "vectors/0"]
    assert_agrees(answer(embedder, json.loads(arrays["calls"].item())[0]), wanted)


def damage_files(path: Path, damage: str) -> None:
    """Damage a file, or all in a folder."""
    for one in [path, *path.rglob("*")]:
        if one.is_file():
            one.write_bytes(DAMAGES[damage](one.read_bytes()))


def told(caplog, *names: str) -> list[str]:
    """The log lines of these modules."""
    return [record.getMessage() for record in caplog.records if record.name in names]


@pytest.fixture(autouse=True)
def _info(caplog) -> None:
    caplog.set_level(logging.INFO)


# converted checkpoints


@each_version
def test_a_checkpoint_of_an_earlier_version_serves(version, tmp_path, caplog):
    folder = checkpoint_in(tmp_path, version)
    with open_tiny(folder, tmp_path, ONE) as embedder:
        assert_serves(embedder, version)
    lines = told(caplog, HUB)
    if version == "format-2-without-token-types":
        (line,) = lines
        assert "convert the model again to be sure of its scores" in line
    else:
        assert not lines


@each_version
def test_an_earlier_checkpoint_has_the_heads_of_its_source_converted_today(version, tmp_path):
    old = checkpoint.load_spec(checkpoint_in(tmp_path, version))
    new = converters.outline(source_in(tmp_path, version)).spec
    assert list(old.heads.items()) == list(new.heads.items())
    assert (old.task, old.labels, old.widths) == (new.task, new.labels, new.widths)


def test_a_checkpoint_says_which_version_made_it(tmp_path):
    source = source_in(tmp_path, LATEST)
    assert converters.convert(source, tmp_path / "out").written_by == f"jaxembed {__version__}"


def change_manifest(folder: Path, **fields) -> None:
    path = folder / checkpoint.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@each_damage
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "params"])
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, name, damage):
    folder = checkpoint_in(tmp_path, LATEST)
    damage_files(folder / name, damage)
    with pytest.raises(CheckpointError) as error:
        open_tiny(folder, tmp_path, ONE).close()
    assert str(folder) in str(error.value)
    assert "convert the model again" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


# the cache of converted models


@each_version
def test_a_cache_of_an_earlier_version_is_used_or_made_anew(version, tmp_path, caplog, conversions):
    source = source_in(tmp_path, version)
    cache = cache_in(tmp_path, version, source)
    if version in (LATEST, "format-1"):
        with open_tiny(source, tmp_path, ONE) as embedder:
            assert_serves(embedder, version)
    else:
        hub.resolve(ModelSource(str(source), cache_dir=cache))
    lines = told(caplog, HUB)
    if version == LATEST:
        assert not conversions
        assert not lines
    else:
        assert conversions == [source]
        assert [line.split()[0] for line in lines] == ["converting", "converted"]


def test_the_entry_of_a_later_version_is_left_to_it(tmp_path):
    source = source_in(tmp_path, LATEST)
    cache = cache_in(tmp_path, LATEST, source)
    newer = entry_of(cache)
    newer = newer.rename(newer.with_name(f"{newer.name.rpartition('-')[0]}-{'f' * 16}"))
    change_manifest(newer, format_version=FORMAT_VERSION + 1)
    with open_tiny(source, tmp_path, ONE) as embedder:
        assert_serves(embedder, LATEST)
    assert newer.exists()


@each_damage
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "source.json", "params"])
def test_a_damaged_entry_of_the_cache_is_made_anew(tmp_path, caplog, conversions, name, damage):
    if damage == "zeroed" and name in ("tokenizer.json", "params"):
        pytest.skip("sizes tell: contents are compared by `info --verify` alone")
    source = source_in(tmp_path, LATEST)
    cache = cache_in(tmp_path, LATEST, source)
    entry = entry_of(cache)
    damage_files(entry / name, damage)
    (cache / "models" / f".{entry.name}.partial-dead" / "params").mkdir(parents=True)
    checkpoint.load_spec(hub.resolve(ModelSource(str(source), cache_dir=cache)))
    assert conversions == [source]
    assert not list((cache / "models").glob("*partial*"))
    assert told(caplog, HUB)[0] == f"{entry} is incomplete; making it again"
    assert len(told(caplog, HUB)) == 3  # and of the conversion


# files of figures


@pytest.mark.parametrize("version", TUNED)
def test_kept_costs_of_an_earlier_version_can_be_read(version, tmp_path, caplog):
    (kept,) = (FIXTURES / version / "cache" / "costs").iterdir()
    identity = json.loads(kept.read_bytes())["identity"]
    copy_private(FIXTURES / version / "cache", tmp_path / "cache")
    timings = CostFile(tmp_path / "cache", identity, lambda bucket: "xla").load()
    assert timings
    assert all(isinstance(bucket, Bucket) and ms for bucket, ms in timings.items())
    assert not told(caplog, COSTS)


# compiled programs


@pytest.mark.skipif(sys.platform == "win32", reason="no kinds of CPU on Windows")
def test_programs_that_cannot_be_read_are_compiled_anew_once_and_told_of_in_one_line(tmp_path):
    folder = checkpoint_in(tmp_path, LATEST)
    (tmp_path / "texts.txt").write_text("the cat\n")
    (tmp_path / "grid.json").write_text('{"buckets": [[2, 64]]}')
    command = ["embed", tmp_path / "texts.txt", "-o", tmp_path / "out.npy", "-m", folder]
    command += ["--cache-dir", tmp_path / "cache", "--buckets", tmp_path / "grid.json"]

    def warnings_of_a_run() -> list[str]:
        done = run(*map(str, command), "--max-batch-tokens", "128", "--dtype", "float32")
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        return [line for line in lines if "cannot be read" in line or "Error" in line]

    assert not warnings_of_a_run()
    programs = list((tmp_path / "cache" / "programs").rglob("*-cache"))
    assert len(programs) > 1
    for number, path in enumerate(programs):
        path.write_bytes(path.read_bytes()[: 100 * (number % 2)])  # empty, and truncated
    (line,) = warnings_of_a_run()
    assert f"{len(programs)} were removed" in line
    assert not warnings_of_a_run()
    assert all(path.stat().st_size > 100 for path in programs if path.exists())


# grids


def test_grids_that_earlier_versions_tuned_are_read_and_serve(tmp_path, caplog):
    for version in TUNED:
        assert read_grid(FIXTURES / version / "buckets.json").buckets
    grid = FIXTURES / TUNED[0] / "buckets.json"
    folder = checkpoint_in(tmp_path, TUNED[0])
    with open_tiny(folder, tmp_path, ONE, buckets=grid, max_batch_tokens=None) as embedder:
        assert_serves(embedder, TUNED[0])
        assert set(embedder.model.main.plan.grid.buckets) == set(read_grid(grid).buckets)
    assert len(told(caplog, "jaxembed.engine.build")) <= 1  # tuned on another kind of machine


def test_a_grid_of_a_later_version_serves_where_its_buckets_can_be_read(tmp_path):
    grid = tmp_path / "later.json"
    grid.write_text('{"format": 9, "buckets": [[2, 64]], "max_batch_tokens": 128, "lanes": []}')
    folder = checkpoint_in(tmp_path, LATEST)
    with open_tiny(folder, tmp_path, ONE, buckets=grid, max_batch_tokens=None) as embedder:
        assert_serves(embedder, LATEST)


def test_a_grid_of_a_later_version_that_cannot_be_read_is_refused_with_that_version(tmp_path):
    grid = tmp_path / "buckets.json"
    grid.write_text('{"buckets": [[2, 64, 8]], "tuned": {"versions": {"jaxembed": "9.1.0"}}}')
    with pytest.raises(ConfigError) as error:
        read_grid(grid)
    assert str(error.value).startswith(f"--buckets {grid}: buckets[0] is [2, 64, 8], not two int")
    written = f'; the file was written by jaxembed "9.1.0", and this is {__version__}: run '
    assert str(error.value).endswith(f"{written}`jaxembed tune` again")
