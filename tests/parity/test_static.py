"""The real static embeddings of wordllama, beside sentence-transformers and model2vec."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sources import NORMALIZE, STATIC, write_json, write_modules

from jaxembed import Embedder

TEXTS = ["hello world", "", "☃ 日本 🙂", "The quick brown fox jumps over the lazy dog. " * 200]


def write_wordllama(folder: Path, *, normalize: bool, modules: bool) -> Path:
    found = importlib.util.find_spec("wordllama")
    if found is None or found.origin is None:
        pytest.skip("wordllama is not installed")
    package = Path(found.origin).parent
    (weights,) = package.glob("weights/*_256.safetensors")
    (tokenizer,) = package.glob("tokenizers/*.json")
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    table = load_file(weights)["embedding.weight"].astype(np.float32)
    if modules:
        save_file({"embedding.weight": table}, folder / "model.safetensors")
        write_modules(folder, *[(STATIC, ""), (NORMALIZE, "")][: 1 + normalize])
    else:
        save_file({"embeddings": table}, folder / "model.safetensors")
        write_json(folder / "config.json", {"model_type": "model2vec", "normalize": normalize})
    return folder


def vectors(folder: Path) -> np.ndarray:
    with Embedder(str(folder), cache_dir=folder.parent / "cache") as embedder:
        return embedder.encode(TEXTS)


@pytest.mark.parametrize("package", ["sentence_transformers", "model2vec"])
@pytest.mark.parametrize("normalize", [True, False])
def test_wordllama_agrees_with_both_libraries(normalize, package, tmp_path):
    library = pytest.importorskip(package)
    modules = package == "sentence_transformers"
    folder = write_wordllama(tmp_path / "source", normalize=normalize, modules=modules)
    if modules:
        model = library.SentenceTransformer(str(folder), device="cpu")
    else:
        model = library.StaticModel.from_pretrained(str(folder))
    # float32 sums of 2,400 rows, which theirs add one after the other
    np.testing.assert_allclose(vectors(folder), model.encode(TEXTS), atol=1e-5)
