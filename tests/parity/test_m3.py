"""BGE-M3: its three outputs, of random weights, against torch and FlagEmbedding's formulas."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from golden import make
from golden.families import FAMILIES

from jaxembed import Embedder
from jaxembed.outputs import REPRESENTATIONS
from parity import sentences
from parity.reference import relative
from parity.test_splade import as_dense

TOLERANCE = 1e-5  # float32, sums in another order
TEXTS = [*make.TEXTS, *sentences.VARIED[::9]]
LIMIT = 24


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory) -> Path:
    """A narrow XLM-R with BGE-M3's files, as torch.save writes them."""
    folder: Path = tmp_path_factory.mktemp("m3")
    family = FAMILIES["xlm_roberta"]
    make.save_tower(family, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = LIMIT
    tokenizer.save_pretrained(folder)
    width = transformers.AutoConfig.from_pretrained(folder).hidden_size
    torch.manual_seed(0)
    for name, outputs in (("sparse_linear.pt", 1), ("colbert_linear.pt", width)):
        torch.save(torch.nn.Linear(width, outputs).state_dict(), folder / name)
    return folder


@pytest.fixture(name="embedder", scope="module")
def _embedder(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    with Embedder(str(folder), cache_dir=cache, pooling="cls") as embedder:
        yield embedder


class Reference:
    """The model in torch, one text at a time, by the formulas of M3 in FlagEmbedding."""

    def __init__(self, folder: Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.tower = transformers.AutoModel.from_pretrained(folder).eval()
        self.sparse = torch.load(folder / "sparse_linear.pt")
        self.vectors = torch.load(folder / "colbert_linear.pt")
        names = ("cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        self.unused = {getattr(self.tokenizer, name) for name in names}

    @torch.no_grad()
    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        batch = self.tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
        (hidden,) = self.tower(**batch).last_hidden_state
        linear = torch.nn.functional.linear
        weights = torch.relu(linear(hidden, self.sparse["weight"], self.sparse["bias"]))[:, 0]
        terms = np.zeros(self.tower.config.vocab_size, np.float32)
        for number, weight in zip(batch["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if number not in self.unused:
                terms[number] = max(terms[number], weight)
        vectors = linear(hidden[1:], self.vectors["weight"], self.vectors["bias"])
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return hidden[0].numpy(), terms, vectors.numpy()


def test_all_three_outputs_are_those_of_the_formulas(embedder, folder):
    reference = Reference(folder)
    found = embedder.encode_outputs(TEXTS, REPRESENTATIONS, normalize=None)
    sparse = as_dense(found["sparse"])
    assert np.count_nonzero(sparse)
    for number, text in enumerate(TEXTS):
        dense, terms, vectors = reference(text)
        assert relative(found["dense"][number][None], dense[None]) < TOLERANCE
        assert relative(sparse[number][None], terms[None]) < TOLERANCE
        np.testing.assert_array_equal(sparse[number] > 0, terms > 0)
        assert found["multi_vector"][number].shape == vectors.shape
        assert relative(found["multi_vector"][number], vectors) < TOLERANCE


def test_a_text_alone_has_what_it_has_in_a_batch(embedder):
    found = embedder.encode_outputs(TEXTS, REPRESENTATIONS)
    sparse = as_dense(found["sparse"])
    for number, text in enumerate(TEXTS[:12]):
        alone = embedder.encode_outputs(text, REPRESENTATIONS)
        assert relative(alone["dense"], found["dense"][number][None]) < TOLERANCE
        assert relative(as_dense(alone["sparse"]), sparse[number][None]) < TOLERANCE
        assert relative(alone["multi_vector"][0], found["multi_vector"][number]) < TOLERANCE
