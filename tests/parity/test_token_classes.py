"""Random token classifiers against transformers: logits in float32, and the entities that its
pipeline finds, in the library and over HTTP."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import transformers
from golden import make
from golden.families import WORDS, class_of, randomise
from transformers.pipelines.token_classification import AggregationStrategy as Strategies

from jaxembed import Embedder
from jaxembed.data.inputs import AggregationStrategy
from jaxembed.errors import InputTooLong
from parity import sentences
from parity.reference import TOLERANCE, answers, assert_within, run
from parity.test_cross_encoders import apart
from parity.test_towers import KINDS, SIZES, ragged

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "B-MISC")
STRATEGIES = get_args(AggregationStrategy)
TINY = ("bert", "deberta", "modernbert", "xlm_roberta", "roberta", "distilbert", "electra")
CASES = {
    **{f"{family}-tiny": (family, "tiny") for family in (*TINY, "camembert")},
    **{f"{family}-odd": (family, "odd") for family in TINY[:4]},
    "xlm_roberta-1024x2": ("xlm_roberta", "1024x2"),
    "deberta-768x2": ("deberta", "768x2"),
}
TEXTS = [
    *make.TEXTS,
    *sentences.ENGLISH[::9],
    *sentences.WEIRD,
    "The cat [UNK] sat<unk>on the [MASK] mat",
    "  the   cat\u00a0sat \n on  the mat  ",
    " ".join(WORDS * 60),
    "x" * 600 + " the dog " + "where is the sky " * 400,
]


pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")


@dataclass(frozen=True)
class TokenClassifiers:
    pipeline: Any
    embedder: Embedder

    @cached_property
    def outputs(self) -> list[Any]:
        """What the pipeline computes before it finds entities, of each text alone."""
        return [self._run(text) for text in TEXTS]

    def _run(self, text: str) -> list[Any]:
        return [
            self.pipeline.forward(inputs)
            for inputs in self.pipeline.preprocess(text, is_split_into_words=False)
        ]

    def wanted(self, strategy: str) -> list[list[dict[str, Any]]]:
        """What the pipeline finds in each text."""
        chosen = Strategies(strategy)
        return [self.pipeline.postprocess(one, chosen) for one in self.outputs]

    def wanted_from_the_left(self, text: str) -> list[dict[str, Any]]:
        """What the pipeline finds in the end of a text that is too long."""
        self.pipeline.tokenizer.truncation_side = "left"
        try:
            return self.pipeline.postprocess(self._run(text), Strategies.SIMPLE)
        finally:
            self.pipeline.tokenizer.truncation_side = "right"


@pytest.fixture(name="models", scope="module", params=CASES)
def _models(request, tmp_path_factory, make_embedder) -> TokenClassifiers:
    name, size = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp(name)
    family, changes = KINDS[name], SIZES[name, size]
    kind = class_of(make.token_classifier_of(family))
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {}}
    model = kind(kind.config_class(**family.config | changes | labels))
    randomise(model)
    model.save_pretrained(folder)
    limit = min(family.positions(changes), 512)
    tokenizer = family.tokenizer(folder)
    tokenizer.model_max_length = limit
    tokenizer.save_pretrained(folder)
    # read as anybody would
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    pipeline = transformers.TokenClassificationPipeline(model=model, tokenizer=tokenizer)
    return TokenClassifiers(pipeline, make_embedder(folder, [(2, limit)]))


def assert_equal(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [{**one, "score": 0} for one in got] == [{**one, "score": 0} for one in wanted]
    scores = [[one["score"] for one in entities] for entities in (got, wanted)]
    np.testing.assert_allclose(*scores, rtol=0, atol=TOLERANCE)


def test_logits_agree_at_every_length_packed_several_to_a_row(models, note):
    classifier = models.pipeline.model
    encodings = ragged(classifier.config, models.embedder.max_input_tokens)
    got = run(models.embedder, encodings, "token_logits")["token_logits"]
    wanted = [make.token_logits(classifier, one.ids, one.types) for one in encodings]
    assert_within(apart(np.concatenate(list(got)), np.concatenate(wanted)), note, "logits")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_entities_are_those_of_the_pipeline(models, strategy):
    found = models.embedder.token_classify(TEXTS, strategy)
    name = "entity" if strategy == "none" else "entity_group"
    for wanted, entities in zip(models.wanted(strategy), found, strict=True):
        got = []
        for one in entities:
            fields = {"score": one.score, "word": one.word, "start": one.start, "end": one.end}
            index = {"index": one.index} if strategy == "none" else {}
            got.append({name: one.label, **fields, **index})
        assert_equal(got, wanted)


def test_entities_of_texts_that_are_cut_on_the_left_are_where_they_are_in_the_text(models):
    found = models.embedder.token_classify(TEXTS[-2:], "simple", truncation_side="left")
    for text, entities in zip(TEXTS[-2:], found, strict=True):
        wanted = [(one["start"], one["end"]) for one in models.wanted_from_the_left(text)]
        assert [(one.start, one.end) for one in entities] == wanted
        assert wanted[-1][1] > len(text) - 100


def test_the_route_answers_as_the_pipeline(models):
    bodies = [{"inputs": TEXTS}, {"inputs": TEXTS[::-1]}, *({"inputs": text} for text in TEXTS)]
    bodies += [{"inputs": TEXTS, "aggregation_strategy": strategy} for strategy in STRATEGIES]
    without, reverse, *rest = answers(models.embedder, "/token_classify", bodies)
    alone, lists = rest[: len(TEXTS)], rest[len(TEXTS) :]
    for strategy, found in zip(STRATEGIES, lists, strict=True):
        for wanted, got in zip(models.wanted(strategy), found, strict=True):
            assert_equal(got, wanted)
    assert without == lists[0]
    for others in (reverse[::-1], alone):
        for wanted, got in zip(without, others, strict=True):
            assert_equal(got, wanted)


def test_a_text_over_the_limit_is_refused_unless_it_may_be_cut(models):
    with pytest.raises(InputTooLong):
        models.embedder.token_classify(TEXTS[-1], truncate=False)
