"""A tokenizer.json made of a SentencePiece model. Skipped where sentencepiece is not installed."""

import io
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from converters import sentencepiece_model
from converters.sentencepiece_model import build_from_sentencepiece
from converters.tokenizer import read_tokenizer
from jaxembed.errors import CheckpointError, UnsupportedModel

sentencepiece = pytest.importorskip("sentencepiece")

LINES = ["the cat sat on the mat", "what is a dog?", "ｶﾀｶﾅ ﬁne ½ Ⅻ", "blue sky, red sky; 42!"] * 9


@pytest.fixture(name="folder")
def _folder(tmp_path) -> Path:
    """As microsoft/deberta-v3-base: spm.model and a tokenizer_config.json without a class."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
        **{"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    )
    (tmp_path / "spm.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    return tmp_path


def test_ids_are_those_of_sentencepiece_where_text_is_normalized(folder):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    stored = read_tokenizer(folder, lowercase=False, vocab_size=1000)
    tokenizer = Tokenizer.from_str(stored.decode())
    for text in ("  the  ｶﾀｶﾅ", "ﬁne ½ Ⅻ e\u0301", "日本 cat 🙂", "", " "):
        assert tokenizer.encode(text).ids == [1, *pieces.encode(text), 2]
    pair = tokenizer.encode("a cat", "the mat")
    sep = pair.ids.index(2) + 1
    assert pair.type_ids == [0] * sep + [1] * (len(pair.ids) - sep)
    assert tokenizer.token_to_id("[MASK]") == pieces.get_piece_size()


def test_a_difference_from_sentencepiece_is_refused(folder, monkeypatch):
    monkeypatch.setattr(sentencepiece_model, "NORMALIZED", "what [SEP] is")
    with pytest.raises(CheckpointError, match=r"differs from SentencePiece on 'what \[SEP\] is'"):
        build_from_sentencepiece(folder)


def test_a_damaged_model_is_refused(folder):
    (folder / "spm.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="no tokenizer can be built from"):
        build_from_sentencepiece(folder)


@pytest.mark.parametrize("switch", ["do_lower_case", "split_by_punct"])
def test_a_switch_that_would_be_lost_is_refused(folder, switch):
    (folder / "tokenizer_config.json").write_text(json.dumps({switch: True}))
    with pytest.raises(UnsupportedModel, match=f"{switch} is not supported without"):
        build_from_sentencepiece(folder)
