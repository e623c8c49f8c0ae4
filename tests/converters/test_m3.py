"""The three heads of BGE-M3: from its files, in one pass, by its formulas."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sources
from safetensors.numpy import save_file
from sparse_matrix import as_dense

from converters import convert, outline, weights
from converters.features.m3 import SPARSE_FILE, VECTORS_FILE
from jaxembed.bulk.vectors import embed_file
from jaxembed.config import EngineConfig
from jaxembed.data.outputs import OutputName
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError, InvalidInput, UnsupportedModel

SMALL = EngineConfig(devices=1, max_batch_tokens=64)
TEXTS = ["hello world unhappy ab a", "world", "a hello", "a a a"]
NAMES = {"cls_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory) -> Path:
    """A tiny BERT with BGE-M3's files, which are safetensors here: torch is not needed."""
    folder: Path = tmp_path_factory.mktemp("m3")
    sources.write_bert(folder)
    later = (sources.POOLING, "1_Pooling"), (sources.NORMALIZE, "2_Normalize")
    sources.write_modules(folder, (sources.TRANSFORMER, ""), *later)
    sources.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    sources.write_json(folder / "tokenizer_config.json", NAMES)
    draw = np.random.default_rng(3)
    for name, width in ((SPARSE_FILE, 1), (VECTORS_FILE, sources.HIDDEN)):
        tensors = {
            "weight": draw.standard_normal((width, sources.HIDDEN), np.float32),
            "bias": draw.standard_normal(width, np.float32) + 3 * (width == 1),
        }
        save_file(tensors, folder / name)
    return folder


@pytest.fixture(name="embedder", scope="module")
def _embedder(files, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "torch_file", weights.safetensors_of)
        out = tmp_path_factory.mktemp("converted") / "m3"
        convert(files, out)
    cache = tmp_path_factory.mktemp("cache")
    with Embedder(str(out), cache_dir=cache, config=SMALL) as embedder:
        yield embedder


@pytest.mark.parametrize("names", [(SPARSE_FILE, VECTORS_FILE), (VECTORS_FILE, SPARSE_FILE)])
def test_one_of_the_two_files_is_refused(files, tmp_path, names):
    """Its copy is a part: dense vectors alone would be served in silence."""
    found, missing = names
    source = Path(shutil.copytree(files, tmp_path / "source"))
    (source / missing).unlink()
    with pytest.raises(UnsupportedModel, match=f"has {found} but not {missing}, and BGE-M3 has"):
        outline(source)
    (source / found).unlink()
    assert outline(source).spec.representations == ("dense",)


def test_one_call_gives_all_three(embedder):
    assert embedder.spec.representations == ("dense", "sparse", "multi_vector")
    together = embedder.encode_outputs(TEXTS, ("multi_vector", "sparse", "dense"))
    np.testing.assert_array_equal(together["dense"], embedder.encode(TEXTS))
    sparse, multi = embedder.encode_sparse(TEXTS), embedder.encode_multi(TEXTS)
    np.testing.assert_array_equal(as_dense(together["sparse"]), as_dense(sparse))
    for one, other in zip(together["multi_vector"], multi, strict=True):
        np.testing.assert_array_equal(one, other)


def test_options_shorten_what_they_are_for(embedder):
    every = ("dense", "sparse", "multi_vector")
    cut = embedder.encode_outputs(TEXTS, every, dimensions=3, max_active_dims=1)
    assert cut["dense"].shape == (len(TEXTS), 3)
    assert {rows.shape[1] for rows in cut["multi_vector"]} == {3}
    for rows in cut["multi_vector"]:
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
    full = as_dense(embedder.encode_sparse(TEXTS))
    kept = as_dense(cut["sparse"])
    assert (np.count_nonzero(kept, axis=1) <= 1).all()
    np.testing.assert_array_equal(kept.max(axis=1), full.max(axis=1))


def test_outputs_that_are_none_or_unknown_are_refused(embedder):
    for outputs in ([], ["dense", "nothing"]):
        with pytest.raises(InvalidInput) as error:
            embedder.encode_outputs(TEXTS, outputs)
        assert error.value.field == "outputs"


def test_files_hold_an_object_for_each_text(embedder, tmp_path):
    out = tmp_path / "out.jsonl"
    names: tuple[OutputName, ...] = ("sparse", "dense")
    assert embed_file(embedder, iter(TEXTS), out, outputs=names) == len(TEXTS)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = embedder.encode_outputs(TEXTS, names)
    for number, line in enumerate(lines):
        assert list(line) == list(names)
        assert line["sparse"]["indices"] == wanted["sparse"].indices[number].tolist()
        np.testing.assert_allclose(line["sparse"]["values"], wanted["sparse"].values[number])
        np.testing.assert_allclose(line["dense"], wanted["dense"][number], rtol=1e-6)
    with pytest.raises(ConfigError, match=r"a \.npy file holds only dense vectors"):
        embed_file(embedder, iter(TEXTS), tmp_path / "out.npy", outputs=names)
