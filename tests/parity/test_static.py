"""The real static embeddings of wordllama, beside sentence-transformers and model2vec."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
        kinds = ["StaticEmbedding", "Normalize"][: 1 + normalize]
        entries = [
            {"idx": n, "name": str(n), "path": "", "type": f"sentence_transformers.models.{kind}"}
            for n, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(entries))
    else:
        save_file({"embeddings": table}, folder / "model.safetensors")
        config = {"model_type": "model2vec", "normalize": normalize}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def vectors(folder: Path) -> np.ndarray:
    with Embedder(str(folder), cache_dir=folder.parent / "cache") as embedder:
        return embedder.encode(TEXTS)


@pytest.mark.parametrize("normalize", [True, False])
def test_wordllama_agrees_with_sentence_transformers(normalize, tmp_path):
    from sentence_transformers import SentenceTransformer

    folder = write_wordllama(tmp_path / "source", normalize=normalize, modules=True)
    wanted = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    # float32 sums of 2,400 rows, which theirs add one after the other
    np.testing.assert_allclose(vectors(folder), wanted, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_wordllama_agrees_with_model2vec(normalize, tmp_path):
    model2vec = pytest.importorskip("model2vec")
    folder = write_wordllama(tmp_path / "source", normalize=normalize, modules=False)
    wanted = model2vec.StaticModel.from_pretrained(str(folder)).encode(TEXTS)
    # float32 sums of 2,400 rows, which theirs add one after the other
    np.testing.assert_allclose(vectors(folder), wanted, atol=1e-5)
