"""Whole models against sentence-transformers: poolings, Dense, Normalize, prompts, dimensions.

The models are random ones that the installed sentence-transformers saves, with more texts and
more of its options than tests/golden can hold.
"""

from dataclasses import replace

import pytest
from golden import make
from sentence_transformers import SentenceTransformer

from jaxembed.models.layers import ACTIVATIONS
from parity import sentences
from parity.reference import assert_within, relative

TEXTS = [*make.TEXTS, *sentences.VARIED[::5], sentences.WEIRD[-1]]

# The activations a Dense may have, as torch.nn calls them
TORCH = {"identity": "Identity", "tanh": "Tanh", "relu": "ReLU", "gelu": "GELU"}
TORCH |= {"silu": "SiLU", "sigmoid": "Sigmoid"}

PROMPTED = make.Case(prompts=make.PROMPTS)
EVERY_KIND = make.Case(
    make.POOLINGS,
    (make.Dense(40), make.NORMALIZE, make.Dense(24, "Identity", bias=False), make.NORMALIZE),
    prompts=make.PROMPTS | {"clustering": "how is the "},
    default_prompt_name="clustering",
    include_prompt=False,
)
CASES = {
    **{f"{name}": replace(PROMPTED, pooling=name) for name in make.POOLINGS},
    **{
        f"{name}, prompt not pooled": replace(PROMPTED, pooling=name, include_prompt=False)
        for name in make.POOLINGS
    },
    **{
        f"dense {name}": make.Case(later=(make.Dense(11, torch), make.NORMALIZE))
        for name, torch in TORCH.items()
    },
    "every kind of module": EVERY_KIND,
}


def assert_every_call_agrees(embedder, reference: SentenceTransformer, case: make.Case, note):
    apart = 0.0
    for call in make.calls(case):
        call = call | {"texts": TEXTS}
        got = getattr(embedder, call["method"])(call["texts"], **call["options"])
        wanted = make.answer(reference, call, batch_size=16)
        assert got.shape == wanted.shape
        apart = max(apart, relative(got, wanted))
    assert_within(apart, note, "vectors")  # 9e-7 was the most


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vectors_agree(case, tmp_path, make_embedder, note):
    make.save(case, tmp_path)
    embedder = make_embedder(tmp_path, [(4, 32)])
    assert_every_call_agrees(embedder, make.load(tmp_path), case, note)


def test_every_activation_of_a_dense_is_compared():
    unsaved = {"gelu_tanh", "quick_gelu"}  # no Dense is saved with them
    assert set(TORCH) == set(ACTIVATIONS) - unsaved


def test_a_model_loaded_and_saved_anew_gives_the_same_vectors(tmp_path, make_embedder, note):
    make.save(EVERY_KIND, tmp_path / "first")
    reference = make.load(tmp_path / "first")
    reference.save_pretrained(str(tmp_path / "second"))
    embedder = make_embedder(tmp_path / "second", [(4, 32)])
    assert_every_call_agrees(embedder, reference, EVERY_KIND, note)
