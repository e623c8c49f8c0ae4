"""Random rerankers and classifiers against sentence-transformers' CrossEncoder, in float32."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from golden import make
from golden.families import FAMILIES, WORDS
from sentence_transformers import CrossEncoder
from sources import change_json
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from converters import CONVERTERS
from converters.tokenizers.tokenizer import TYPED_BY_DEFAULT, WITH_TYPES
from jaxembed import Embedder
from jaxembed.data.inputs import Pair
from jaxembed.preprocessing.text import TokenizationOptions
from parity import sentences
from parity.reference import TOLERANCE, assert_within, run
from parity.test_towers import SIZES, ragged

THREE = ("contradiction", "entailment", "neutral")
HEADS = {
    "one label": make.Head(),
    "one label, saved by transformers": make.Head(cross_encoder=False),
    "three labels": make.Head(THREE),
    "three independent labels": make.Head(THREE, "multi_label_classification"),
}
SCORING = [name for name, family in FAMILIES.items() if family.classifier]
REAL = [("bert", "384x6"), ("xlm_roberta", "1024x2")]
LARGE = [("xlm_roberta", "768x12"), ("mpnet", "768x12"), ("gte", "768x12")]
# What families share, as how labels are read, is compared with one of them.
CASES = {
    **{f"bert-{name}": ("bert", "tiny", head) for name, head in HEADS.items()},
    **{f"{family}-one label": (family, "tiny", make.Head()) for family in SCORING},
    **{f"{family}-odd": (family, "odd", make.Head(THREE)) for family in SCORING},
    **{f"{family}-{size}": (family, size, make.Head()) for family, size in (*REAL, *LARGE)},
}
SLOW = {f"{family}-{size}" for family, size in LARGE}
PARAMS = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, case in CASES.items()
]
WITHOUT = {"model_input_names": ["input_ids", "attention_mask"]}
WITH = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
TOKENIZERS: list[tuple[str | None, dict, bool]] = [  # a class, what else is said; do types count?
    ("BertTokenizer", {}, True),
    ("BertTokenizerFast", {}, True),
    (None, {}, True),
    ("BertTokenizer", WITHOUT, False),
    ("PreTrainedTokenizerFast", {}, False),
    ("PreTrainedTokenizerFast", WITH, True),
    ("TokenizersBackend", {}, False),
    ("DistilBertTokenizer", {}, False),
    ("ElectraTokenizerFast", {}, True),
]
QUERY = "Where is the red dog?"


@dataclass(frozen=True)
class Scorers:
    torch: CrossEncoder
    head: make.Head
    embedder: Embedder

    @property
    def documents(self) -> list[str]:
        """Texts of every kind, with all special tokens in one, and one that is cut."""
        special = " ".join(self.torch.tokenizer.all_special_tokens)
        rest = [f"the {special} dog {special} sat", " ".join(WORDS * 60)]
        return [*make.TEXTS, *sentences.VARIED[::7], *rest]


@pytest.fixture(name="scorers", scope="module", params=PARAMS)
def _scorers(request, tmp_path_factory, make_embedder) -> Scorers:
    name, size, head = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    limit = min(FAMILIES[name].positions(SIZES[name, size]), 512)
    case = make.Case(family=name, config=SIZES[name, size], head=head, max_seq_length=limit)
    make.save(case, folder)
    reference = make.load_scorer(folder)
    make.publish(FAMILIES[name], folder)
    return Scorers(reference, head, make_embedder(folder, [(2, limit)]))


def apart(got: np.ndarray, wanted: np.ndarray) -> float:
    """As a share of the largest logit, or of one: the terms that a logit is the sum of are of that
    size even where they cancel."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1))


def test_logits_agree_at_every_length_packed_several_to_a_row(scorers, note):
    encodings = ragged(scorers.torch.model.config, scorers.embedder.max_input_tokens)
    got = run(scorers.embedder, encodings, "logits")["logits"]
    wanted = [make.logits(scorers.torch.model, one.ids, one.types) for one in encodings]
    assert_within(apart(got, np.stack(wanted)), note, "logits")  # 2.3e-6 was the most


def test_scores_of_pairs_agree(scorers, note):
    documents = scorers.documents
    pairs = [(QUERY, document) for document in documents]
    figures = []
    for options in ({}, {"raw_scores": True}):
        wanted = make.score(scorers.torch, scorers.head, {"inputs": pairs, "options": options})
        named = scorers.embedder.classify(pairs, **options)
        by_label = [{one.label: one.score for one in labels} for labels in named]
        got = [[scores[label] for label in scorers.head.labels] for scores in by_label]
        figures.append(apart(np.array(got), wanted))
    assert_within(max(figures), note, "scores")


def test_documents_are_ranked_as_the_cross_encoder_ranks_them(scorers):
    if len(scorers.head.labels) > 1:
        return
    documents = scorers.documents
    ranked = scorers.embedder.rerank(QUERY, documents)
    call = {"query": QUERY, "documents": documents, "options": {}}
    wanted = make.score(scorers.torch, scorers.head, call)[:, 0]
    got = np.array([one.score for one in sorted(ranked, key=lambda one: one.index)])
    assert apart(got, wanted) < TOLERANCE
    assert (np.diff([wanted[one.index] for one in ranked]) < 1e-5).all()  # of equals, either


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_over_the_limit_lose_the_end_of_the_second_text(scorers, side):
    tokenizer, limit = scorers.torch.tokenizer, scorers.embedder.max_input_tokens
    long = " ".join(WORDS * 60)
    pairs = [(QUERY, long), (QUERY, long[:200]), ("the dog " * 8, long), (QUERY, "x")]
    tokenizer.truncation_side = side
    firsts, seconds = (list(texts) for texts in zip(*pairs, strict=True))
    wanted = tokenizer(firsts, seconds, truncation="only_second", max_length=limit)
    tokenization = TokenizationOptions(prompt="", truncate=True, side=side)
    inputs = [Pair(*pair) for pair in pairs]
    encodings = scorers.embedder.model.main.processor.encode(inputs, tokenization).work.encodings
    assert [one.ids.tolist() for one in encodings] == wanted["input_ids"]
    if "token_type_ids" in wanted and scorers.embedder.spec.config.get("type_vocab_size", 0) > 1:
        assert [one.types.tolist() for one in encodings] == wanted["token_type_ids"]
    else:
        assert not any(one.types is not None and one.types.any() for one in encodings)


@pytest.mark.parametrize(("name", "said", "counted"), TOKENIZERS)
def test_types_count_where_transformers_gives_them(name, said, counted, tmp_path, make_embedder):
    head = HEADS["one label, saved by transformers"]
    make.save(make.Case(family="bert", head=head, max_seq_length=32), tmp_path)
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class=name, **said)
    embedder = make_embedder(tmp_path, [(2, 32)])
    assert embedder.spec.token_types == counted
    pairs = [(QUERY, "the dog"), ("a", "how is the sky"), ("a cat", "the red sky")]
    options = {"raw_scores": True}
    wanted = make.score(make.load_scorer(tmp_path), head, {"inputs": pairs, "options": options})
    got = np.array([[labels[0].score] for labels in embedder.classify(pairs, **options)])
    assert apart(got, wanted) < TOLERANCE


@pytest.mark.parametrize("name", sorted(WITH_TYPES))
def test_tokenizers_said_to_give_types_do(name):
    for spelling in (name, f"{name}Fast"):
        kind = tokenizer_class_from_name(spelling)
        assert kind is not None
        assert "token_type_ids" in kind.model_input_names


def test_model_types_said_to_have_types_where_no_tokenizer_is_named_do():
    named = {kind: TOKENIZER_MAPPING_NAMES.get(kind) for kind in CONVERTERS}
    kinds = {kind: tokenizer_class_from_name(name) for kind, name in named.items() if name}
    typed = {kind for kind, one in kinds.items() if "token_type_ids" in one.model_input_names}
    assert typed - {"distilbert"} == TYPED_BY_DEFAULT  # DistilBERT has no use for them
