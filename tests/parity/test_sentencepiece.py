"""XLM-R's published vocabulary as a SentencePiece model: the tokenizer.json that is built of it."""

import base64
import gzip
import json

import pytest
from tokenizers import Tokenizer

from converters.tokenizers.tokenizer import read_tokenizer
from parity import sentences
from parity.test_xlm_roberta import PUBLISHED, VOCABULARY

sentencepiece = pytest.importorskip("sentencepiece")
protos = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
pytestmark = pytest.mark.skipif(not PUBLISHED.is_file(), reason=f"no {PUBLISHED}")


def sentencepiece_model(stored: dict) -> bytes:
    """The model that a tokenizer.json of XLM-R was made of: its own special pieces come first."""
    proto = protos.ModelProto()
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = 0, 1, 2
    charsmap = stored["normalizer"]["precompiled_charsmap"]
    proto.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap)
    for content, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3)):
        proto.pieces.add(piece=content, score=0.0, type=kind)
    for content, score in stored["model"]["vocab"][4:-1]:
        proto.pieces.add(piece=content, score=score)
    return proto.SerializeToString()


def test_the_published_vocabulary_gives_the_published_ids(tmp_path):
    stored = gzip.decompress(PUBLISHED.read_bytes())
    model = tmp_path / "sentencepiece.bpe.model"
    model.write_bytes(sentencepiece_model(json.loads(stored)))
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    read = read_tokenizer(tmp_path, lowercase=False, vocab_size=VOCABULARY)
    built = Tokenizer.from_str(read.decode())
    published = Tokenizer.from_str(stored.decode())
    published.no_truncation()
    assert built.get_vocab() == published.get_vocab()
    for text in [*sentences.VARIED, *sentences.stsb()]:
        assert built.encode(text).ids == published.encode(text).ids, text
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for text in [*sentences.ENGLISH, *sentences.stsb()]:
        ids = [n + 1 if n else 3 for n in pieces.encode(text)]
        assert built.encode(text).ids == [0, *ids, 2], text
