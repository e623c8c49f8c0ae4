"""A cache that others can write is refused, before anything in it is loaded or run."""

import os
import stat
from pathlib import Path

import pytest
import sources

from jaxembed import Embedder
from jaxembed.checkpoints import hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.errors import ConfigError
from jaxembed.platform import cache_folder
from jaxembed.platform.cache_folder import make_private, refuse_shared

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no owners and modes on Windows")


@pytest.fixture(name="folder")
def _folder(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(name="lax_umask")
def _lax_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_is_made_is_for_this_user_alone(tmp_path, lax_umask):
    make_private(tmp_path / "a" / "b")
    make_private(tmp_path / "a" / "b")  # there already
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750])
def test_what_others_can_only_read_is_taken(folder, mode):
    folder.chmod(mode)
    refuse_shared(folder, folder / "not there")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_what_others_can_write_is_refused_with_its_mode_and_the_remedy(folder, mode):
    folder.chmod(mode)
    belongs = rf"{folder} belongs to user .*, mode {mode:04o}"
    with pytest.raises(ConfigError, match=belongs) as error:
        refuse_shared(folder)
    assert f"`chmod -R go-w {folder}`" in str(error.value)
    assert "--cache-dir" in str(error.value)


@pytest.fixture(name="owned_by")
def _owned_by(folder, monkeypatch):
    """Give the folder to another user, as far as can be seen."""
    stat_of = Path.stat

    def give(owner: int) -> None:
        def stat_with_owner(path, **options):
            status = stat_of(path, **options)
            return os.stat_result([*status[:4], owner, *status[5:]])

        monkeypatch.setattr(Path, "stat", stat_with_owner)

    return give


def test_what_belongs_to_root_is_taken_unless_others_can_write(folder, owned_by, monkeypatch):
    """As in an image that brings its cache along."""
    owned_by(0)
    monkeypatch.setattr(cache_folder.os, "geteuid", lambda: 4711)
    refuse_shared(folder)
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="belongs to user 0, mode 0770, and others can write"):
        refuse_shared(folder)
    folder.chmod(0o700)
    owned_by(4712)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, mode 0700, .* as user 4711: "):
        refuse_shared(folder)


@pytest.mark.parametrize("inside", ["", "models"])
def test_the_library_refuses_it_too(folder, tiny_checkpoint, monkeypatch, inside):
    loading = "jaxembed.runtime.routes.checkpoint.load_spec"
    monkeypatch.setattr(loading, lambda _: pytest.fail("loaded"))
    (folder / inside).mkdir(exist_ok=True)
    (folder / inside).chmod(0o777)
    model = None if inside else str(tiny_checkpoint)
    with pytest.raises(ConfigError, match="others can write to it"):
        Embedder(model, cache_dir=folder)


def test_an_entry_is_refused_where_it_is_read(folder, lax_umask, tmp_path):
    model = str(sources.write_sentence_bert(tmp_path / "source"))
    source = ModelSource(model, cache_dir=folder)
    first = hub.resolve(source)
    assert hub.resolve(source) == first  # made private, whatever the umask
    first.chmod(0o777)
    for find in (hub.resolve, hub.describe_model):
        with pytest.raises(ConfigError, match=f"{first} .*others can write"):
            find(source)
