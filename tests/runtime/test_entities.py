"""How the scores of tokens become entities: words worked out by hand, and a tiny model."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import save_tiny
from sources import wordpiece
from tokenizers import Tokenizer as File
from tokenizers import decoders, models, pre_tokenizers

from jaxembed import Embedder, Entity
from jaxembed.data.spec import DenseLayer, PerToken
from jaxembed.data.work import Ragged
from jaxembed.errors import EmptyInput, InputTooLong, InvalidInput, WrongTask
from jaxembed.preprocessing.tokenizer import Tokenizer
from jaxembed.runtime.entities import find_entities
from jaxembed.runtime.options import TokenScores

LABELS = ("O", "B-PER", "I-PER", "LOC")
OUT, BEGIN, IN, PLACE = range(4)
NONE = "none"


def of(label: int, share: float = 0.7) -> np.ndarray:
    """Logits whose softmax gives one label this share, and the same to each of the others."""
    row = np.full(len(LABELS), np.log((1 - share) / 3), np.float32)
    row[label] = np.log(share)
    return row


def pieces(folder: Path) -> Tokenizer:
    """WordPiece of `sources`, which joins its tokens as BERT's does."""
    file = wordpiece()
    file.decoder = decoders.WordPiece()  # pyright: ignore
    return saved(file, folder)


def blanks(folder: Path) -> Tokenizer:
    """Pieces with a blank before each word, without special tokens."""
    scored = [("<unk>", 0.0), ("▁the", -1.0), ("▁dog", -1.0), ("s", -2.0), ("▁", -3.0)]
    file = File(models.Unigram(scored, unk_id=0))
    file.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore
    file.decoder = decoders.Metaspace()  # pyright: ignore
    return saved(file, folder)


def saved(file: File, folder: Path) -> Tokenizer:
    file.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def found(tokenizer: Tokenizer, text: str, rows: list[np.ndarray], strategy: Any) -> list[Entity]:
    """The entities of a text whose tokens have these logits; those of special tokens are LOC."""
    (encoding,) = tokenizer.encode([text], fast=False)
    special = np.array(encoding.special_tokens_mask, bool)
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    offsets[special] = -1
    logits = np.tile(of(PLACE), (len(special), 1))
    logits[~special] = np.reshape(rows, (-1, len(LABELS)))
    other = np.zeros((1, len(LABELS)), np.float32)  # of a text before it
    answer = TokenScores(
        Ragged(np.concatenate([other, logits]), np.array([0, 1, 1 + len(special)])),
        np.array([7, *encoding.ids], np.int32),
        np.concatenate([np.zeros((1, 2), np.int32), offsets]),
        LABELS,
        num_tokens=np.array([1, len(special)]),
        truncated=0,
        tokenization_s=0.0,
        queue_s=0.0,
        inference_s=0.0,
    )
    return find_entities(answer, 1, text, tokenizer, strategy)


def entity(label: str, score: float, *rest: Any) -> Entity:
    return Entity(label, pytest.approx(score), *rest)


TEXT = "Hello unhappy zz world"  # hello un ##happy [UNK] world
ROWS = [of(BEGIN), of(OUT, 0.6), of(IN, 0.9), of(IN, 0.8), of(PLACE)]
STRATEGIES = {
    "none": [
        entity("B-PER", 0.7, "hello", 0, 5, 1),
        entity("I-PER", 0.9, "##happy", 8, 13, 3),
        entity("I-PER", 0.8, "zz", 14, 16, 4),
        entity("LOC", 0.7, "world", 17, 22, 5),
    ],
    "simple": [
        entity("PER", 0.7, "hello", 0, 5),
        entity("PER", 0.85, "##happy zz", 8, 16),
        entity("LOC", 0.7, "world", 17, 22),
    ],
    "first": [
        entity("PER", 0.7, "hello", 0, 5),
        entity("PER", 0.8, "zz", 14, 16),
        entity("LOC", 0.7, "world", 17, 22),
    ],
    # of un ##happy: (0.4 / 3 + 0.9) / 2
    "average": [
        entity("PER", (0.7 + 0.516667 + 0.8) / 3, "hello unhappy zz", 0, 16),
        entity("LOC", 0.7, "world", 17, 22),
    ],
    "max": [
        entity("PER", 0.8, "hello unhappy zz", 0, 16),
        entity("LOC", 0.7, "world", 17, 22),
    ],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_joined_as_the_strategy_says(strategy, tmp_path):
    assert found(pieces(tmp_path), TEXT, ROWS, strategy) == STRATEGIES[strategy]


def test_an_entity_begins_where_its_label_says_so_and_ends_with_its_tag(tmp_path):
    rows = [of(IN), of(IN), of(BEGIN), of(IN), of(OUT), of(PLACE), of(PLACE)]
    text = "hello world hello world a hello a"
    spans = [
        (one.label, one.start, one.end) for one in found(pieces(tmp_path), text, rows, "simple")
    ]
    assert spans == [("PER", 0, 11), ("PER", 12, 23), ("LOC", 26, 33)]


def test_without_a_prefix_of_pieces_a_blank_begins_a_word(tmp_path):
    tokenizer = blanks(tmp_path)
    (encoding,) = tokenizer.encode(["the dogs 犬s"], fast=False)
    assert encoding.tokens == ["▁the", "▁dog", "s", "▁", "犬", "s"]
    rows = [of(OUT), of(BEGIN), of(IN), of(PLACE), of(PLACE), of(BEGIN)]
    # an unknown token is a word, and is spelled as in the text
    assert found(tokenizer, "the dogs 犬s", rows, "first") == [
        entity("PER", 0.7, "dogs", 3, 8),  # with the blank, as the tokenizer says
        entity("LOC", 0.7, "犬s", 8, 11),
    ]
    single = [
        (one.word, one.start, one.end) for one in found(tokenizer, "the dogs 犬s", rows, NONE)
    ]
    assert single == [("▁dog", 3, 7), ("s", 7, 8), ("▁", 8, 9), ("犬", 9, 10), ("s", 10, 11)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_text_of_blanks_has_no_entities(strategy, tmp_path):
    assert found(pieces(tmp_path), "  ", [], strategy) == []


@pytest.fixture(name="tagger", scope="module")
def _tagger(tmp_path_factory, load_model) -> Embedder:
    head = PerToken((DenseLayer(32, len(LABELS), activation="identity"),))
    path = tmp_path_factory.mktemp("tagger") / "checkpoint"
    return load_model(save_tiny(path, heads={"token_logits": head}, labels=LABELS), 2, 64)


TEXTS = ["the cat sat on mat", "a dog", "how is the sky " * 5]


def test_a_model_labels_the_tokens_of_texts_alone_and_together(tagger):
    together = tagger.token_classify(TEXTS)
    assert asyncio.run(tagger.token_classify_async(TEXTS)) == together
    logits = tagger.compute(TEXTS, ["token_logits"])["token_logits"]
    for text, entities, rows in zip(TEXTS, together, logits, strict=True):
        (alone,) = tagger.token_classify(text)
        assert [(one.label, one.index) for one in alone] == [(o.label, o.index) for o in entities]
        words = text.split()
        assert len(rows) == len(words) + 2  # [CLS] and [SEP]
        best = rows.argmax(axis=1)
        wanted = [k for k in range(1, len(words) + 1) if best[k] != OUT]
        assert [one.index for one in entities] == wanted
        assert [text[one.start : one.end] for one in entities] == [words[k - 1] for k in wanted]
    assert tagger.token_classify([]) == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_entities_of_a_long_text_are_where_they_are_in_it(tagger, side):
    text = "the cat sat on mat " * 300
    (entities,) = tagger.token_classify(text, truncation_side=side)
    assert entities
    assert {text[one.start : one.end] for one in entities} <= set(text.split())
    kept = range(62 * 5) if side == "right" else range(len(text) - 62 * 5, len(text))
    assert all(one.start in kept and text[one.start : one.end] == one.word for one in entities)


def test_what_a_token_classifier_cannot_do_is_refused(tagger, embedder):
    with pytest.raises(InputTooLong):
        tagger.token_classify("cat " * 80, truncate=False)
    with pytest.raises(
        InvalidInput, match=r"must be one of none, simple, .*Given: 'best'"
    ) as raised:
        tagger.token_classify("cat", "best")
    assert raised.value.field == "aggregation_strategy"
    with pytest.raises(EmptyInput) as raised:
        tagger.token_classify(["cat", ""])
    assert raised.value.index == 1
    with pytest.raises(InvalidInput, match="only texts can be divided into entities") as raised:
        tagger.token_classify(["cat", ("cat", "dog")])
    assert raised.value.index == 1
    with pytest.raises(WrongTask, match="is a token classifier: it cannot embed"):
        tagger.encode("cat")
    with pytest.raises(WrongTask, match="is an embedding model: it cannot token_classify"):
        embedder.token_classify("cat")
