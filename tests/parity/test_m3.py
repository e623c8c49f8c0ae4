"""BGE-M3: its three outputs, of random weights, against torch and FlagEmbedding's formulas."""

from pathlib import Path

import numpy as np
import pytest
from golden import make
from golden.m3 import Reference, save
from sparse_matrix import as_dense

from jaxembed.data.outputs import REPRESENTATIONS
from parity import sentences
from parity.reference import TOLERANCE, relative

TEXTS = [*make.TEXTS, *sentences.VARIED[::9]]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("m3")
    save(folder)
    return folder


@pytest.fixture(name="embedder", scope="module")
def _embedder(folder, make_embedder):
    return make_embedder(folder, [(4, 32)])


def test_all_three_outputs_are_those_of_the_formulas_and_of_each_text_alone(embedder, folder):
    reference = Reference(folder)
    found = embedder.encode_outputs(TEXTS, REPRESENTATIONS)
    sparse = as_dense(found["sparse"])
    assert np.count_nonzero(sparse)
    for number, text in enumerate(TEXTS):
        dense, terms, vectors = reference(text)
        assert relative(found["dense"][number][None], dense[None]) < TOLERANCE
        assert relative(sparse[number][None], terms[None]) < TOLERANCE
        np.testing.assert_array_equal(sparse[number] > 0, terms > 0)
        assert found["multi_vector"][number].shape == vectors.shape
        assert relative(found["multi_vector"][number], vectors) < TOLERANCE
        alone = embedder.encode_outputs(text, REPRESENTATIONS)
        assert relative(alone["dense"], found["dense"][number][None]) < TOLERANCE
        assert relative(as_dense(alone["sparse"]), sparse[number][None]) < TOLERANCE
        assert relative(alone["multi_vector"][0], found["multi_vector"][number]) < TOLERANCE
