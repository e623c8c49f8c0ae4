"""Checkpoints in object stores, with fsspec's memory in place of a store: copied whole and as they
are, or not at all."""

import errno
import hashlib
import itertools
import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import pytest
import sources

from jaxembed.checkpoints import checkpoint, hub, stored_checkpoint
from jaxembed.checkpoints.checkpoint import DIGESTS, MANIFEST
from jaxembed.checkpoints.source import ModelSource
from jaxembed.errors import CheckpointError, ConfigError, StoreUnreachable
from jaxembed.platform import extras, object_store

URL = "memory://bucket/tiny"


class Store:
    """The objects of a store, and what was asked of it."""

    def __init__(self):
        self.files = fsspec.filesystem("memory")
        self.asked: list[str] = []
        self.fail_with: Exception | None = None

    def __call__(self, scheme: str, **options):
        assert scheme == "memory"
        assert not options["use_listings_cache"]
        return self

    def __getattr__(self, name: str):
        method = getattr(self.files, name)

        def call(*args, **kwargs):
            self.asked.append(name)
            if self.fail_with is not None:
                raise self.fail_with
            return method(*args, **kwargs)

        return call

    def names(self, url: str = URL) -> list[str]:
        """The objects below a URL, in the order of their creation."""
        root = object_store.location(url).url.partition(":/")[2]
        found = self.files.find(root, detail=True)
        ordered = sorted(found, key=lambda name: found[name]["created"])
        return [name.removeprefix(f"{root}/") for name in ordered]

    def write(self, name: str, content: bytes) -> None:
        self.files.pipe_file(f"/bucket/tiny/{name}", content)

    def read(self, name: str) -> bytes:
        return self.files.cat_file(f"/bucket/tiny/{name}")


@pytest.fixture(name="store")
def _store(monkeypatch) -> Store:
    monkeypatch.setitem(object_store.PACKAGES, "memory", "fsspec")
    monkeypatch.setattr(fsspec.filesystem("memory"), "store", {})
    monkeypatch.setattr(fsspec.filesystem("memory"), "pseudo_dirs", [""])
    store = Store()
    monkeypatch.setattr(fsspec, "filesystem", store)
    return store


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory) -> Path:
    return sources.write_sentence_bert(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(name="converted", scope="module")
def _converted(source) -> Path:
    folder = source.parent / "converted"
    hub.convert_model(ModelSource(str(source)), folder)
    return folder


@pytest.fixture(name="digest")
def _digest(store, converted) -> str:
    """The checkpoint is in the store, and this is its digest."""
    pinned = stored_checkpoint.publish(converted, URL)
    store.asked.clear()
    assert pinned.digest is not None
    return pinned.digest


@pytest.fixture(name="cache")
def _cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(name="resolve")
def _resolve(cache):
    """Resolve the stored checkpoint, or that of a URL that begins with its own."""
    chosen = partial(ModelSource, cache_dir=cache)
    return lambda more="", **options: hub.resolve(chosen(f"{URL}{more}", **options))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != hub.RECORD)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- URLs


def test_urls_of_stores_are_told_from_names_and_paths():
    assert object_store.is_url("s3://bucket/model")
    assert object_store.is_url("gs://bucket/a/b")
    for name in ("owner/name", "/models/s3", "https://example.com/model", "s3:/bucket/model"):
        assert not object_store.is_url(name)


@pytest.mark.parametrize("name", ["s3://bucket", "s3://", "s3://bucket/", "gs:///model"])
def test_a_url_names_a_bucket_and_a_path(name):
    with pytest.raises(CheckpointError, match=r"expected .*://bucket/path"):
        object_store.location(name)


@pytest.mark.parametrize("pin", ["", "abc", "0" * 63, "G" * 64, "sha256:" + "0" * 64])
def test_a_pin_is_a_whole_digest(pin):
    with pytest.raises(CheckpointError, match="64 hexadecimal digits"):
        object_store.location(f"s3://bucket/a@sha256:{pin}")


@pytest.mark.parametrize(
    "name",
    ["s3://key:hidden@bucket/model", "s3://bucket/model?key=hidden", "s3://bucket/model#hidden"],
)
def test_credentials_in_a_url_are_refused_and_not_shown(name, tmp_path):
    with pytest.raises(CheckpointError, match="credentials come from the environment") as caught:
        hub.resolve(ModelSource(name, cache_dir=tmp_path))
    assert "hidden" not in str(caught.value)


# -- Copies


def test_a_copy_is_what_was_converted(store, digest, converted, cache, resolve):
    entry = resolve()
    assert content(entry) == content(converted)
    assert entry.is_relative_to(cache)
    assert entry.stat().st_mode & 0o777 == 0o700
    assert hub.verify_files(ModelSource(URL, cache_dir=cache)) == len(content(converted)) - 1


def test_a_copy_is_made_once(store, digest, resolve):
    entry = resolve()
    store.asked.clear()
    assert resolve() == entry
    assert store.asked == ["cat_file", "cat_file"]  # the manifest and the digests


def test_of_those_who_need_it_at_once_one_makes_the_copy(store, digest, converted, resolve):
    with ThreadPoolExecutor(4) as threads:
        entries = set(threads.map(lambda _: resolve(), range(4)))
    assert len(entries) == 1
    assert store.asked.count("get_file") == len(content(converted)) - 1  # without the digests


def test_a_copy_of_one_content_is_used_without_asking(store, digest, resolve):
    entry = resolve(f"@sha256:{digest}")
    store.fail_with = OSError("no network")
    assert resolve(f"@sha256:{digest}") == entry
    assert resolve(f"@sha256:{digest}", offline=True) == entry


def test_other_content_than_pinned_is_refused(store, digest, cache, resolve):
    with pytest.raises(CheckpointError, match=f"sha256:0{{64}}, but the .* has .*{digest}"):
        resolve(f"@sha256:{'0' * 64}")
    assert not list(cache.glob("models/*"))


def test_replaced_content_is_copied_beside_the_old(store, digest, cache, tmp_path, resolve):
    old = resolve()
    pinned = resolve(f"@sha256:{digest}")
    store.files.rm("/bucket/tiny", recursive=True)
    other = sources.write_sentence_bert(tmp_path / "other", tensors=sources.bert_tensors(1))
    hub.convert_model(ModelSource(str(other)), URL)
    new = resolve()
    assert new != old
    assert old.is_dir()  # a process may read it still
    assert hub.describe_model(ModelSource(URL, cache_dir=cache)) == checkpoint.load_routes(new)
    assert resolve(f"@sha256:{digest}") == pinned


def test_an_incomplete_copy_is_made_anew(store, digest, converted, resolve):
    entry = resolve()
    (entry / checkpoint.TOKENIZER).write_bytes(b"{}")
    killed = entry.with_name(f".{entry.name}.partial-0123")
    killed.mkdir()
    assert resolve() == entry
    assert content(entry) == content(converted)
    assert not killed.exists()


def test_a_model_is_described_without_its_weights(store, digest, converted, cache):
    described = hub.describe_model(ModelSource(URL, cache_dir=cache))
    assert described == checkpoint.load_routes(converted)
    assert store.asked == ["cat_file", "cat_file", "get_file"]
    assert not cache.exists()


def test_a_model_with_routes_is_copied(store, cache, tmp_path, resolve):
    source = sources.write_router(tmp_path / "router")
    hub.convert_model(ModelSource(str(source)), URL)
    described = hub.describe_model(ModelSource(URL, cache_dir=cache))
    assert len(described.specs) > 1
    assert checkpoint.load_routes(resolve()) == described


# -- What is not a checkpoint


def test_half_an_upload_is_no_checkpoint(store, digest, resolve):
    store.files.rm_file(f"/bucket/tiny/{MANIFEST}")
    with pytest.raises(CheckpointError, match=r"has no manifest.json; expected a complete"):
        resolve()


def test_a_hugging_face_folder_is_refused_with_the_command_that_helps(store, source, resolve):
    store.files.put(str(source), "/bucket/tiny", recursive=True)
    with pytest.raises(CheckpointError, match=f"jaxembed convert MODEL {URL}"):
        resolve()


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("which", [checkpoint.TOKENIZER, checkpoint.PARAMETERS])
def test_a_damaged_object_is_never_served(store, digest, converted, cache, damage, which, resolve):
    files = content(converted)
    name = max((one for one in files if one.startswith(which)), key=lambda one: len(files[one]))
    before = store.read(name)
    if damage == "missing":
        store.files.rm_file(f"/bucket/tiny/{name}")
    elif damage == "truncated":
        store.write(name, before[:-1])
    else:
        store.write(name, before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=re.escape(URL)) as caught:
        resolve()
    assert name in str(caught.value)
    assert not [path for path in cache.glob("models/*") if path.is_dir()]


def test_a_manifest_that_was_altered_is_refused(store, digest, resolve):
    store.write(MANIFEST, store.read(MANIFEST).replace(b'"mean"', b'"cls"'))
    with pytest.raises(CheckpointError, match=r"SHA256SUMS does not match manifest.json"):
        resolve()


def test_values_of_another_model_are_refused_though_the_digests_were_made_to_match(
    store, digest, converted, resolve, tmp_path
):
    other = sources.write_sentence_bert(tmp_path / "other", tensors=sources.bert_tensors(1))
    mixed = tmp_path / "mixed"
    hub.convert_model(ModelSource(str(other)), mixed)
    shutil.copy(converted / MANIFEST, mixed / MANIFEST)
    files = {name: data for name, data in sorted(content(mixed).items()) if name != DIGESTS}
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
    (mixed / DIGESTS).write_text("".join(lines))
    assert checkpoint.verify(mixed) > 0
    store.files.rm("/bucket/tiny", recursive=True)
    stored_checkpoint.publish(mixed, URL)
    with pytest.raises(CheckpointError, match=r"do not match its manifest.json"):
        resolve()


@pytest.mark.parametrize(
    "name", ["../outside", "params/../../outside", "/etc/outside", "other/file", "params//x", "x"]
)
def test_a_path_that_no_checkpoint_has_is_refused_at_once(store, digest, resolve, name):
    store.write(DIGESTS, store.read(DIGESTS) + f"{'0' * 64}  {name}\n".encode())
    with pytest.raises(CheckpointError, match="which is not a file of a checkpoint"):
        resolve()
    assert "get_file" not in store.asked


@pytest.mark.parametrize(
    "chosen",
    [{"revision": "main"}, {"dense_path": "2_Dense"}, {"adapters": {"one": Path("one")}}],
    ids=lambda chosen: next(iter(chosen)),
)
def test_what_only_a_conversion_can_do_is_refused_before_anything_is_asked(store, cache, chosen):
    for find in (hub.resolve, hub.describe_model):
        with pytest.raises(CheckpointError, match=re.escape(URL)):
            find(ModelSource(URL, cache_dir=cache, **chosen))
    assert store.asked == []


# -- A store that fails


def test_without_an_answer_the_copy_there_is_is_used(store, digest, cache, caplog, resolve):
    entry = resolve()
    store.fail_with = RuntimeError("no route to //user:hidden@host/x\nand more")
    with caplog.at_level(logging.WARNING):
        assert resolve() == entry
    assert "no route to //host/x; using the copy of memory://bucket/tiny in the" in caplog.text
    with pytest.raises(StoreUnreachable, match=r"cannot read memory://bucket/tiny/manifest.json"):
        hub.resolve(ModelSource(URL, cache_dir=cache / "other"))


def test_offline_nothing_is_asked(store, digest, cache, caplog, resolve):
    with pytest.raises(CheckpointError, match="not copied yet and --offline is set"):
        resolve(offline=True)
    entry = resolve()
    store.asked.clear()
    with caplog.at_level(logging.INFO):
        assert resolve(offline=True) == entry
    assert "using the copy in the cache" in caplog.text
    assert store.asked == []


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PermissionError("Forbidden"), CheckpointError, r"access is denied \(Forbidden\)"),
        (ConnectionResetError("reset by peer"), StoreUnreachable, "reset by peer"),
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "free some"),
    ],
)
def test_an_error_in_the_middle_leaves_nothing(
    store, digest, cache, monkeypatch, error, kind, words, resolve
):
    get, count = store.files.get_file, itertools.count()

    def get_file(*args):
        if next(count) > 1:
            raise error
        return get(*args)

    monkeypatch.setattr(store.files, "get_file", get_file)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve()
    assert type(caught.value) is kind
    assert not [path for path in cache.glob("models/*") if path.is_dir()]


def test_a_store_that_denies_access_ends_what_the_copy_is_used_for(store, digest, resolve):
    resolve()
    store.fail_with = PermissionError("Forbidden")
    with pytest.raises(CheckpointError, match="access is denied"):
        resolve()


def test_a_missing_package_is_named_with_its_extra(monkeypatch, cache):
    monkeypatch.setitem(extras.MODULES, "gs", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install 'jaxembed\[gs\]'"):
        hub.resolve(ModelSource("gs://bucket/model", cache_dir=cache))


# -- Writing


def test_the_manifest_is_written_last(store, source, caplog):
    with caplog.at_level(logging.INFO):
        hub.convert_model(ModelSource(str(source)), URL)
    *others, digests, manifest = store.names()
    assert (digests, manifest) == (DIGESTS, MANIFEST)
    assert checkpoint.TOKENIZER in others
    found = hashlib.sha256(store.read(DIGESTS)).hexdigest()
    assert f"{URL}@sha256:{found} identifies this content" in caplog.text


def test_nothing_is_written_where_something_is(store, source):
    store.write("notes.txt", b"mine")
    with pytest.raises(CheckpointError, match="exists already"):
        hub.convert_model(ModelSource(str(source)), URL)
    with pytest.raises(CheckpointError, match="only after it is written"):
        hub.convert_model(ModelSource(str(source)), f"{URL}-2@sha256:{'0' * 64}")
    assert store.names() == ["notes.txt"]


def test_what_is_converted_is_not_converted_again(digest, tmp_path):
    with pytest.raises(CheckpointError, match="converted already"):
        hub.convert_model(ModelSource(URL), tmp_path / "out")
    with pytest.raises(CheckpointError, match="give the model that it was converted from"):
        hub.fetch_source(ModelSource(URL))


def test_an_upload_that_fails_leaves_no_manifest(store, source, monkeypatch):
    put = store.files.put_file

    def put_file(path, to):
        if to.endswith(DIGESTS):
            raise PermissionError("Forbidden")
        put(path, to)

    monkeypatch.setattr(store.files, "put_file", put_file)
    with pytest.raises(CheckpointError, match=f"cannot write {URL}/{DIGESTS}: access is denied"):
        hub.convert_model(ModelSource(str(source)), URL)
    assert MANIFEST not in store.names()
