"""The checkpoint directory: what is saved comes back, to the bit, or is refused."""

import errno
import json
import os
import shutil
import subprocess
import weakref

import ml_dtypes
import numpy as np
import pytest
from conftest import save_tiny

from jaxembed import Embedder, EngineConfig, __version__
from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.checkpoint import StoredArray
from jaxembed.data.spec import FORMAT_VERSION, DenseLayer, ModelSpec, NormalizeLayer, Pooled
from jaxembed.errors import CheckpointError

TOKENIZER = b'{"version": "1.0"}'


@pytest.fixture(name="spec")
def _spec() -> ModelSpec:
    return ModelSpec(
        architecture="bert",
        config={"hidden_size": 8, "norm_eps": 1e-12},
        heads={"dense": Pooled(("cls", "mean"), (DenseLayer(16, 4), NormalizeLayer()))},
        prompts={"query": "find: "},
        max_input_tokens=16,
        hidden_size=8,
        dtype="float32",
        source="me/tiny",
        content_hash="",
    )


def random_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((3, 5), np.float32)
    return {
        "tower.layers.0.mlp.up.kernel": wide,
        "tower.layers.0.mlp.up.bias": wide[0].astype(np.float16),
        "tower.layers.10.mlp.up.kernel": wide.astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5, np.float32),
    }


def test_what_is_saved_comes_back_to_the_bit(tmp_path, spec):
    params = random_params()
    saved = checkpoint.save(tmp_path / "out", spec, params, TOKENIZER)
    assert checkpoint.is_checkpoint(tmp_path / "out")
    assert checkpoint.load_spec(tmp_path / "out") == saved
    assert checkpoint.tokenizer_path(tmp_path / "out").read_bytes() == TOKENIZER
    restored = checkpoint.load_params(tmp_path / "out", saved)
    assert restored.keys() == params.keys()
    for name, array in params.items():
        assert type(restored[name]) is np.ndarray
        assert restored[name].dtype == array.dtype
        assert restored[name].tobytes() == array.tobytes()


def test_large_parameters_come_in_parts_and_are_read_one_at_a_time(tmp_path, spec, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART_BYTES", 64)
    params = {f"p{i}": np.full(8, i, np.float32) for i in range(5)}
    saved = checkpoint.save(tmp_path / "out", spec, iter(params.items()), TOKENIZER)
    parts = sorted(path.name for path in (tmp_path / "out" / "params").iterdir())
    assert parts == ["part-000", "part-001", "part-002"]
    read = 0
    values = StoredArray.read

    def counted(array):
        nonlocal read
        read += 1
        return values(array)

    monkeypatch.setattr(StoredArray, "read", counted)
    seen = {}
    for name, array in checkpoint.stream_params(tmp_path / "out", saved):
        seen[name] = array
        assert read == len(seen)
    assert seen.keys() == params.keys()
    assert all(np.array_equal(seen[name], params[name]) for name in params)


def test_a_part_is_freed_before_the_next_is_made(tmp_path, spec, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART_BYTES", 64)
    alive = []

    def params():
        for i in range(4):
            array = np.full(16, i, np.float32)  # a part each
            assert sum(one() is not None for one in alive) <= 1, "an earlier part is still held"
            alive.append(weakref.ref(array))
            yield f"p{i}", array
            del array

    checkpoint.save(tmp_path / "out", spec, params(), TOKENIZER)
    assert len(alive) == 4


def test_the_hash_is_of_the_content_and_not_of_its_order(tmp_path, spec):
    def hashed(name, params, tokenizer=TOKENIZER):
        return checkpoint.save(tmp_path / name, spec, params, tokenizer).content_hash

    first = hashed("a", random_params())
    assert hashed("b", dict(reversed(random_params().items()))) == first
    assert hashed("c", random_params(seed=1)) != first
    assert hashed("d", random_params(), b"{}") != first


def test_nothing_is_left_behind_on_failure(tmp_path, spec):
    def broken():
        yield "a", np.ones(3, np.float32)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        checkpoint.save(tmp_path / "out", spec, broken(), TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_can_be_discarded(tmp_path):
    (tmp_path / ".out.partial-1234" / "params").mkdir(parents=True)
    (tmp_path / "outer").mkdir()
    checkpoint.discard_partial(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["outer"]


def test_an_occupied_path_is_refused_and_an_empty_folder_is_not(tmp_path, spec):
    (tmp_path / "file").write_text("mine")
    for path, message in (
        (tmp_path, "exists already"),
        (tmp_path / "file", "exists already"),
        (tmp_path / "file" / "out", r"cannot create .*out: .*Not a directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(path, spec, random_params(), TOKENIZER)
    (tmp_path / "empty").mkdir()
    assert checkpoint.save(tmp_path / "empty", spec, random_params(), TOKENIZER)


@pytest.mark.parametrize("writer", ["jaxembed 9.1.0", None])
def test_a_later_format_is_refused_in_a_line_that_names_its_version(saved, writer):
    manifest = {"format_version": 99, "written_by": writer, "heads": {"unknown": "here"}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    by = writer or "a newer jaxembed"
    refusal = rf"format 99, written by {by}; this is jaxembed {__version__}, which reads formats up"
    with pytest.raises(CheckpointError, match=rf"{refusal} to {FORMAT_VERSION}: upgrade jaxembed"):
        checkpoint.load_spec(saved)


@pytest.mark.parametrize(
    ("setting", "path"),
    [({"later": 1}, "later"), ({"chat": {"before": "", "later": 1}}, r"chat\.later")],
)
def test_a_setting_of_a_later_version_is_refused(saved, setting, path):
    manifest = saved / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | setting))
    with pytest.raises(CheckpointError, match=rf"the setting {path}, which jaxembed .* upgrade"):
        checkpoint.load_spec(saved)


def test_a_missing_or_damaged_manifest_is_refused(tmp_path):
    assert not checkpoint.is_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load_spec(tmp_path)
    for content in ("", "{}", '{"format_version": 2}', "[]"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.load_spec(tmp_path)


@pytest.mark.parametrize("damaged", ["*", "manifest.ocdbt"])
def test_damaged_parameters_are_refused(saved, spec, damaged):
    for path in (saved / "params" / "part-000").rglob(damaged):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:9])
    with pytest.raises(CheckpointError, match="cannot restore the parameters"):
        checkpoint.load_params(saved, spec)


def test_parameters_of_another_dtype_are_refused(tmp_path, spec):
    params = {"a": np.ones(3, np.float16)}
    checkpoint.save(tmp_path / "out", spec, params, TOKENIZER)
    with pytest.raises(CheckpointError, match="says float32, but the parameters are float16"):
        checkpoint.load_params(tmp_path / "out", spec)


@pytest.fixture(name="saved")
def _saved(tmp_path, spec):
    checkpoint.save(tmp_path / "out", spec, random_params(), TOKENIZER)
    return tmp_path / "out"


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_file_is_verified(saved):
    files = files_of(saved)
    assert checkpoint.verify(saved) == len(files) - 1  # SHA256SUMS itself
    (saved / "source.json").write_text("the cache's own record")
    assert checkpoint.verify(saved) == len(files) - 1
    if (checksums := shutil.which("sha256sum")) is not None:
        command = [checksums, "--check", "--strict", checkpoint.DIGESTS]
        subprocess.run(command, cwd=saved, check=True)


def test_a_flipped_bit_is_found_in_whatever_file(saved):
    for file in files_of(saved):
        whole = file.read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1} if whole else ():
            for bit in (1, 32, 128):
                file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
                with pytest.raises(CheckpointError) as error:
                    checkpoint.verify(saved)
                # a digest that is damaged looks like damage of its file
                named = "" if file.name == checkpoint.DIGESTS else f"{file.relative_to(saved)}: "
                assert f"\n  {named}" in str(error.value)
        file.write_bytes(whole)
    checkpoint.verify(saved)


def test_every_file_that_is_not_as_it_was_has_a_line(saved):
    (saved / "tokenizer.json").unlink()
    (saved / "manifest.json").write_text("{}")
    (saved / "params" / "part-001").write_text("more")
    with pytest.raises(CheckpointError, match="damaged: 3 problems") as error:
        checkpoint.verify(saved)
    manifest, more, tokenizer = str(error.value).splitlines()[1:]
    assert manifest.startswith("  manifest.json: its SHA-256 is ")
    assert more == "  params/part-001: is not in SHA256SUMS"
    assert tokenizer == "  tokenizer.json: is missing"


def test_a_checkpoint_without_digests_loads_and_says_that_there_are_none(saved):
    (saved / checkpoint.DIGESTS).unlink()
    assert checkpoint.load_params(saved, checkpoint.load_spec(saved))
    with pytest.raises(CheckpointError, match="no digests to verify"):
        checkpoint.verify(saved)


def test_what_is_written_is_read_back_at_once(tmp_path, spec, monkeypatch):
    save = checkpoint._save_part

    def save_another(path, part):
        save(path, part | {"scalar": np.array(2.25, np.float32)})

    monkeypatch.setattr(checkpoint, "_save_part", save_another)
    with pytest.raises(CheckpointError, match="differ from those that were written for scalar"):
        checkpoint.save(tmp_path / "out", spec, random_params(), TOKENIZER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the space cannot be asked for")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_before_a_part_is_written(tmp_path, spec, monkeypatch, number):
    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(checkpoint, "_checkpointer", lambda: pytest.fail("Orbax was asked"))
    assert_full(tmp_path, spec, os.strerror(number))


def test_a_disk_that_fills_up_while_a_part_is_written(tmp_path, spec, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def save(self, path, args):
            path.mkdir()
            raise ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [...]")

    monkeypatch.setattr(checkpoint, "_checkpointer", Full)
    assert_full(tmp_path, spec, "No space left on device")


def assert_full(tmp_path, spec, reason):
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path / "out", spec, random_params(), TOKENIZER)
    said = f"cannot write the converted checkpoint in {tmp_path}: {reason}; free some space, or set"
    assert str(error.value).startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_without_a_known_head_is_refused(saved):
    manifest = saved / "manifest.json"
    for heads in ({}, {"colour": {"type": "pooled", "pooling": ["cls"]}}, None):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"heads": heads}))
        with pytest.raises(CheckpointError, match=r"is damaged .*heads"):
            checkpoint.load_spec(saved)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", -1), ("num_heads", 0)])
def test_sizes_that_make_no_model_are_refused_by_name(tmp_path, field, value):
    path = save_tiny(tmp_path / "tiny")
    said = json.loads((path / "manifest.json").read_text())
    said["config"][field] = value
    (path / "manifest.json").write_text(json.dumps(said))
    config = EngineConfig(dtype="float32", devices=1)
    with pytest.raises(CheckpointError, match=r"sizes in the manifest of \S+ do not make a model"):
        Embedder(str(path), cache_dir=tmp_path / "cache", config=config)


def test_half_a_converted_checkpoint_says_what_it_lacks(tmp_path):
    path = save_tiny(tmp_path / "tiny")
    shutil.rmtree(path / "params")
    with pytest.raises(CheckpointError, match=r"it has manifest\.json but not params/"):
        Embedder(str(path), cache_dir=tmp_path / "cache")
