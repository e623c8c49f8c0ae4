"""From what the user names to a checkpoint, without a network: the hub is a folder here."""

import contextlib
import errno
import importlib.util
import os
import shutil
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import huggingface_hub.constants
import msgspec
import pytest
import sources
from commands import FORKS
from huggingface_hub import errors
from sources import HIDDEN
from test_adapter_conversion import QUERY, write_adapter

import converters
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.ranges import save_ranges
from jaxembed.checkpoints.source import DEFAULT_MODEL, ModelSource, default_cache_dir
from jaxembed.cli.options import EXIT_REFUSED, EXIT_TEMPORARY, exit_status
from jaxembed.data.spec import Routes
from jaxembed.errors import CheckpointError, ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(name="cache")
def _cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    return sources.write_sentence_bert(tmp_path / "tiny model")


@pytest.fixture(name="downloads")
def _downloads(monkeypatch, tmp_path) -> list[SimpleNamespace]:
    """A hub with one model, copied file by file as its patterns ask; every call to it."""
    remote = sources.write_sentence_bert(tmp_path / "remote")
    for name in ("pytorch_model.bin", "onnx/model.onnx", "model.h5"):
        (remote / name).parent.mkdir(exist_ok=True)
        (remote / name).write_bytes(b"large")
    calls = []

    def snapshot_download(name, **asked):
        calls.append(SimpleNamespace(name=name, **asked))
        found = tmp_path / "hub" / COMMIT
        for path in remote.rglob("*"):
            inside = path.relative_to(remote)
            allowed = any(inside.match(pattern) for pattern in asked["allow_patterns"])
            refused = any(inside.match(pattern) for pattern in asked["ignore_patterns"])
            if path.is_file() and allowed and not refused:
                (found / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, found / inside)
        return str(found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


@pytest.fixture(name="resolve")
def _resolve_in_cache(cache):
    return lambda model, **options: hub.resolve(ModelSource(model, cache_dir=cache, **options))


def test_a_directory_is_converted_once(source, cache, resolve, conversions):
    first = resolve(str(source))
    assert resolve(str(source)) == first
    assert conversions == [source]
    assert checkpoint.load_spec(first).source == str(source)
    assert first.parent == cache / "models"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert default_cache_dir() == Path.home() / ".cache" / "jaxembed"
    assert first.name.startswith(hub._entry(str(source), str(source), None))


def test_a_checkpoint_is_used_as_it_is(source, cache, tmp_path):
    converters.convert(source, tmp_path / "out")
    assert hub.resolve(ModelSource(str(tmp_path / "out"), cache_dir=cache)) == tmp_path / "out"
    assert not cache.exists()
    with pytest.raises(CheckpointError, match="is converted already"):
        hub.resolve(ModelSource(str(tmp_path / "out"), cache_dir=cache, dense_path="2_Dense"))


def test_a_missing_path_is_not_taken_for_a_hub_id(cache):
    for model in ("./nowhere", "/nowhere/at/all", "~/no/such/model"):
        with pytest.raises(CheckpointError, match="does not exist"):
            hub.resolve(ModelSource(model, cache_dir=cache))


def test_a_file_a_revision_of_a_directory_and_a_file_as_cache_are_refused(source, cache):
    with pytest.raises(CheckpointError, match="is a file"):
        hub.resolve(ModelSource(str(source / "config.json"), cache_dir=cache))
    with pytest.raises(CheckpointError, match="leave out the revision 'main'"):
        hub.resolve(ModelSource(str(source), cache_dir=cache, revision="main"))
    with pytest.raises(CheckpointError, match="cannot create the cache directory"):
        hub.resolve(ModelSource(str(source), cache_dir=source / "config.json"))


def test_a_changed_source_is_converted_again(source, resolve, conversions):
    entry = resolve(str(source))
    before = checkpoint.load_spec(entry)
    change(source, seed=7)
    another = resolve(str(source))
    assert len(conversions) == 2
    assert checkpoint.load_spec(another).content_hash != before.content_hash


def test_ranges_kept_in_an_entry_leave_it_current(source, cache, conversions, resolve):
    entry = resolve(str(source))
    path = save_ranges(entry, [])
    assert resolve(str(source)) == entry
    assert path.is_file()
    assert len(conversions) == 1
    assert hub.verify_files(ModelSource(str(source), cache_dir=cache)) > 0


def change(source, seed):
    sources.write_weights(source, sources.bert_tensors(seed=seed))
    os.utime(source / "model.safetensors", ns=(seed, seed))


def unused_for(entry, hours):
    then = time.time() - 3600 * hours
    os.utime(entry, (then, then))


def test_what_a_source_was_before_stays_for_those_who_read_it(source, resolve):
    entry = resolve(str(source))
    spec = checkpoint.load_spec(entry)
    parameters = checkpoint.stream_params(entry, spec)
    next(parameters)
    unused_for(entry, 23)
    change(source, seed=7)
    assert resolve(str(source)) != entry
    list(parameters)
    assert checkpoint.load_params(entry, spec)


def test_what_a_source_was_before_is_removed_a_day_after_its_last_use(source, resolve, tmp_path):
    other = resolve(str(sources.write_sentence_bert(tmp_path / "another model")))
    old = resolve(str(source))
    change(source, seed=7)
    now = resolve(str(source))
    for entry in (old, now, other):
        unused_for(entry, 25)
    resolve(str(source))
    assert (old.exists(), now.exists(), other.exists()) == (False, True, True)
    assert time.time() - now.stat().st_mtime < 3600  # it was used


def test_another_dense_path_is_another_entry(source, resolve):
    later = (sources.POOLING, "1_Pooling"), (sources.DENSE, "2_Dense")
    sources.write_modules(source, (sources.TRANSFORMER, ""), *later)
    sources.write_dense(source / "2_Dense", 8, 4)
    sources.write_dense(source / "2_Dense_6", 8, 6)
    paths = [resolve(str(source), dense_path=path) for path in (None, "2_Dense_6")]
    assert [checkpoint.load_spec(path).dim for path in paths] == [4, 6]


def _resolve(source: Path, cache: Path, ready: Any, converted: Any) -> None:
    """What a process of the next test does."""
    convert = converters.convert

    def counted(*given, **options):
        converted.put(source)
        return convert(*given, **options)

    converters.convert = counted
    ready.wait(60)
    hub.resolve(ModelSource(str(source), cache_dir=cache))


def test_two_processes_convert_once(source, cache):
    ready, converted = FORKS.Barrier(2), FORKS.Queue()
    given = source, cache, ready, converted
    both = [FORKS.Process(target=_resolve, args=given) for _ in range(2)]
    for process in both:
        process.start()
    assert converted.get(timeout=60) == source
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert converted.empty()


def test_a_disk_that_is_full_at_the_last_file_leaves_no_entry(source, cache, monkeypatch, resolve):
    @contextlib.contextmanager
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield

    monkeypatch.setattr(hub, "replacing", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*models: No space left on device; "):
        resolve(str(source))
    assert [path.suffix for path in (cache / "models").iterdir()] in ([".lock"], [])


def test_a_hub_model_is_fetched_and_converted(cache, downloads, conversions, resolve):
    entry = hub.resolve(ModelSource("me/tiny", cache_dir=cache, revision="v1", token="secret"))
    spec = checkpoint.load_spec(entry)
    assert (spec.source, spec.revision) == ("me/tiny", COMMIT)
    assert [call.revision for call in downloads] == ["v1", COMMIT]
    assert all(call.token == "secret" for call in downloads)
    paths = conversions[0].rglob("*.*")
    fetched = {str(path.relative_to(conversions[0])) for path in paths if path.is_file()}
    assert "model.safetensors" in fetched
    assert not fetched & {"pytorch_model.bin", "onnx/model.onnx", "model.h5"}
    assert resolve("me/tiny") == entry
    assert len(conversions) == 1
    assert len(downloads) == 3  # its descriptions, its weights, and which commit it is now


def test_torch_files_are_fetched_where_there_is_nothing_else(downloads, tmp_path, resolve):
    (tmp_path / "remote" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"torch is not installed|damaged"):
        resolve("me/tiny")
    fetched = tmp_path / "hub" / COMMIT / "pytorch_model.bin"
    assert fetched.exists()
    for path in (fetched, tmp_path / "remote" / "pytorch_model.bin"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"wanted model\.safetensors or"):
        resolve("me/tiny")


def answered(status: int) -> errors.HfHubHTTPError:
    answer: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return errors.HfHubHTTPError("x", response=answer)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (errors.LocalEntryNotFoundError("x"), EXIT_TEMPORARY, "the hub cannot be reached"),
        (answered(503), EXIT_TEMPORARY, ""),
        (answered(429), EXIT_TEMPORARY, ""),
        (answered(403), EXIT_REFUSED, ""),
        (ConnectionResetError(errno.ECONNRESET, "x"), EXIT_TEMPORARY, ""),
        (OSError(errno.ENOSPC, "full"), EXIT_TEMPORARY, "cannot download me/tiny at v1: "),
        (PermissionError(errno.EACCES, "x"), EXIT_REFUSED, ""),
        (errors.HFValidationError("x"), EXIT_REFUSED, "neither a directory nor a hub id"),
    ],
)
def test_a_failure_of_the_hub_names_the_model_and_may_pass(
    resolve, monkeypatch, error, status, message
):
    download = Mock(side_effect=error)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="me/tiny") as caught:
        resolve("me/tiny", revision="v1")
    assert message in str(caught.value)
    assert download.call_args.kwargs["local_files_only"] is False
    assert exit_status(caught.value) == status
    wrapped = ConfigError("a cannot be served")
    wrapped.__cause__ = caught.value  # as `serve` has it of several models
    assert exit_status(wrapped) == status


def test_the_hub_that_a_variable_turns_off_is_a_setting(resolve, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set") as caught:
        resolve("me/tiny")
    assert exit_status(caught.value) == EXIT_REFUSED


def test_offline_for_real(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="me/tiny is not downloaded yet and --offline is set"):
        hub.resolve(ModelSource("me/tiny", cache_dir=cache, offline=True))


@pytest.fixture(name="package")
def _package(source, tmp_path, monkeypatch) -> Path:
    """The default model's package, which fails if it is imported."""
    package = tmp_path / "site" / hub.DEFAULT_MODEL_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('torch')")
    shutil.copytree(source, package / "model")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package


def test_the_default_model_comes_from_its_package_unimported(package, cache, conversions):
    for model in (None, DEFAULT_MODEL):
        spec = checkpoint.load_spec(hub.resolve(ModelSource(model, cache_dir=cache)))
        assert spec.source == DEFAULT_MODEL
    assert conversions == [package / "model"]
    assert hub.DEFAULT_MODEL_PACKAGE not in sys.modules


@pytest.mark.parametrize("revision", ["v1", None])
def test_the_default_model_comes_from_the_hub_by_revision_or_without_its_package(
    package, resolve, downloads, monkeypatch, revision
):
    if revision is None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    resolve(None, revision=revision)
    assert downloads[0].name == DEFAULT_MODEL


def test_convert_of_a_hub_model_brings_its_weights(downloads, tmp_path):
    hub.convert_model(ModelSource("owner/name"), tmp_path / "out")
    assert any("model*.safetensors" in call.allow_patterns for call in downloads)
    assert checkpoint.is_checkpoint(tmp_path / "out")


def test_what_cannot_be_converted_is_refused_without_its_weights(downloads, tmp_path, cache):
    sources.change_json(tmp_path / "remote" / "config.json", model_type="mamba")
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        hub.resolve(ModelSource("owner/name", cache_dir=cache))
    assert all("model*.safetensors" not in call.allow_patterns for call in downloads)


def test_describe_converts_nothing_and_fetches_no_weights(downloads, source, cache, conversions):
    described = [
        hub.describe_model(ModelSource("owner/name", cache_dir=cache)),
        hub.describe_model(ModelSource(str(source), cache_dir=cache)),
    ]
    assert conversions == []
    assert [call.allow_patterns for call in downloads] == [hub.DESCRIPTIONS]
    for model, routes in zip(("owner/name", str(source)), described, strict=True):
        spec = routes.main
        assert spec.content_hash == ""
        converted = checkpoint.load_spec(hub.resolve(ModelSource(model, cache_dir=cache)))
        assert msgspec.structs.replace(converted, content_hash="", written_by=None) == spec
        assert hub.describe_model(ModelSource(model, cache_dir=cache)) == Routes({"": converted})


def test_a_foreign_converters_package_is_named(source, resolve, monkeypatch):
    monkeypatch.delattr(converters, "CONVERTERS")
    with pytest.raises(CheckpointError, match="is not jaxembed's"):
        resolve(str(source))


def test_an_empty_name_is_no_model():
    """Of an unset variable in a script; an empty path would be the current directory."""
    with pytest.raises(CheckpointError, match="empty string"):
        ModelSource("")


def test_the_base_of_an_adapter_is_downloaded_at_the_revision_that_it_names(
    resolve, cache, downloads, tmp_path
):
    names = {"base_model_name_or_path": "owner/base", "revision": "v2"}
    adapter = write_adapter(tmp_path / "adapter", {QUERY: (HIDDEN, HIDDEN)}, **names)
    hub.describe_model(ModelSource(str(adapter), cache_dir=cache))
    assert [(one.name, one.revision) for one in downloads] == [("owner/base", "v2")]
    assert "model*.safetensors" not in downloads[0].allow_patterns
    entry = resolve(str(adapter))
    assert (downloads[-1].name, downloads[-1].revision) == ("owner/base", COMMIT)
    assert checkpoint.load_spec(entry).source == str(adapter)
