"""A tokenizer.json made of a SentencePiece model alone, beside SentencePiece and transformers.

Models of each family are trained here. Skipped where sentencepiece is not installed.
"""

import io
import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from converters.tokenizers import sentencepiece_model
from converters.tokenizers.sentencepiece_model import FAMILIES, build_from_sentencepiece
from converters.tokenizers.tokenizer import read_tokenizer
from jaxembed.errors import CheckpointError, UnsupportedModel

sentencepiece = pytest.importorskip("sentencepiece")
sentencepiece_model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

LINES = [
    "the cat sat on the mat, and the dog did not",
    "What is a dog? It isn't a well-known (small) cat. 3.5 of them!",
    "in 1990, 1990, 1990, in 2004, 2004, 2004, and 12,345,678 or 42;",
    "Der Fluß fließt über die Brücke; ﬁne ½ Ⅻ ｶﾀｶﾅ № カタカナ",
    "Le café n'est pas très cher à Noël, garçon.",
    "Синее небо, красное небо и белая кошка",
    "日本語の文章です。猫が好きです。",
    "中文文本,测试。天空是蓝色的。",
    "नमस्ते दुनिया मौसम अच्छा है",
    "مرحبا بالعالم السماء زرقاء",
    "def f(x):\n    return x + 1  # ok\n\n\tpass",
    "https://example.com/a?b=c&d=%20 <table> a-b--c £5 €6 \u2013 \"quoted\" 'single'",
] * 9

# What is put between words of the lines. Nothing starts with an accent or repeats a character,
# where rounding would decide between ways to cut that have the same score.
ODD = [
    *("  ", "\t", "\n", "\n\n", "\u3000", "\u00a0", "\u200b", "\u00ad", "\x00", "\x07", "\ufeff"),
    *("🙂", "𠮷", "👨\u200d👩\u200d👧", "한국어", "ﬁ", "½", "\uff21\uff11", "e\u0301"),
    *("İ", "ǆ", "ﷺ"),
    *("``", "''", "1990,", "9,", "▁", "<0x0A>", "UPPER", "É", "Å", "", " "),
]

LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}
_PAIRS = {
    **{"model_type": "bpe", "byte_fallback": True, "split_digits": True, "vocab_size": 800},
    **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
}
_GEMMA = {
    **{"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
    **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
    "user_defined_symbols": ["<mask>", "\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t\t", "<table>"],
}
_ALBERT = {
    **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
    "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
}
_DEBERTA = {
    **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
    **{"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
}

# How models are trained: as the published ones of the family, but small.
TRAINED: dict[str, dict[str, Any]] = {
    "albert": _ALBERT | {"user_defined_symbols": [*'()"-.£€', "\u2013"]},
    "albert without symbols": _ALBERT,
    "camembert": {},
    "deberta": _DEBERTA,
    "gemma": _PAIRS | _GEMMA,
    "llama": _PAIRS,
    "mistral": _PAIRS | {"control_symbols": ["[INST]", "[/INST]"]},
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "xlm-roberta": {},
}

# Files beside the model, whose name is that of the class.
CONFIGS: dict[str, dict[str, Any]] = {
    "albert": {"tokenizer_class": "AlbertTokenizer"},
    "camembert": {"tokenizer_class": "CamembertTokenizerFast"},
    "deberta": {"tokenizer_class": "DebertaV2Tokenizer"},
    "gemma": {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True},
    "llama": LLAMA,
    "mistral": LLAMA | {"add_eos_token": True, "eos_token": "</s>"},
    "t5": {"tokenizer_class": "T5Tokenizer"},
    "xlm-roberta": {"tokenizer_class": "XLMRobertaTokenizer"},
}


def albert(text: str) -> str:
    """A text as ALBERT's tokenizer hands it to SentencePiece; accents are of Latin script here."""
    text = unicodedata.normalize("NFKD", text.replace("``", '"').replace("''", '"'))
    marks = ("Mn", "Mc", "Me")
    return "".join(one.lower() for one in text if unicodedata.category(one) not in marks)


# The ids of a text by the ids of its pieces, written out for each family.
RULES: dict[str, Callable[[Any, str], list[int]]] = {
    "albert": lambda pieces, text: [2, *pieces(albert(text)), 3],
    "camembert": lambda pieces, text: [5, *(n + 4 if n else 3 for n in pieces(text)), 6],
    "deberta": lambda pieces, text: [1, *pieces(text), 2],
    "gemma": lambda pieces, text: [2, *pieces(text)],
    "llama": lambda pieces, text: [1, *pieces(text)],
    "mistral": lambda pieces, text: [1, *pieces(text), 2],
    "t5": lambda pieces, text: [*pieces(text), 1],
    "xlm-roberta": lambda pieces, text: [0, *(n + 1 if n else 3 for n in pieces(text)), 2],
}


@cache
def trained(name: str) -> bytes:
    # a piece of a digit and a comma would go to ALBERT's rule, which transformers 5 has not
    lines = [line.replace(",", " ,") for line in LINES] if "without" in name else LINES
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        minloglevel=2,
        **({"vocab_size": 400, "hard_vocab_limit": False} | TRAINED[name]),
    )
    if name != "albert":
        return model.getvalue()
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    for content in ("▁1990,", "04,"):  # what the rule of digits and commas is for
        proto.pieces.add(piece=content, score=-1.0)
    return proto.SerializeToString()


def write(folder: Path, name: str, changes: dict[str, Any] | None = None) -> Path:
    """A folder of a family with its SentencePiece model, and with `changes` to its config."""
    kind = name.split()[0]
    config = CONFIGS[kind] | (changes or {})
    file = FAMILIES[config["tokenizer_class"].removesuffix("Fast")].file
    (folder / file).write_bytes(trained(name))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder


def built(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(read_tokenizer(folder, lowercase=False, vocab_size=10**6).decode())


def texts() -> list[str]:
    """200 texts: words of all scripts with odd characters between them, and odd ones alone."""
    draw = random.Random(1)
    words = [word for line in LINES[:12] for word in line.split(" ")]
    drawn = []
    for count in range(200 - len(ODD)):
        parts = draw.choices(words, k=1 + count % 12) + draw.choices(ODD, k=2 + count % 3)
        draw.shuffle(parts)
        drawn.append(draw.choice((" ", "")).join(parts))
    return [*ODD, *drawn]


def with_pieces(name: str) -> Any:
    """SentencePiece itself, from texts to the numbers of pieces."""
    return sentencepiece.SentencePieceProcessor(model_proto=trained(name))


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "albert"])
def test_ids_are_those_of_sentencepiece(name, tmp_path):
    tokenizer, pieces = built(write(tmp_path, name)), with_pieces(name)
    wanted = [RULES[name.split()[0]](pieces.encode, text) for text in texts()]
    assert [tokenizer.encode(text).ids for text in texts()] == wanted


def test_alberts_pieces_of_a_digit_and_a_comma_are_cut_again(tmp_path):
    tokenizer, pieces = built(write(tmp_path, "albert")), with_pieces("albert")
    cut_again = []

    def encode(text: str) -> list[int]:
        ids = []
        for piece in pieces.encode(text, out_type=str):
            parts = [piece]
            if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
                cut_again.append(piece)
                parts = pieces.encode(piece[:-1].replace("▁", ""), out_type=str)
                if piece[0] != "▁":
                    parts = [parts[0].removeprefix("▁"), *parts[1:]]
                parts = [part for part in parts if part] + [","]
            ids += [pieces.piece_to_id(part) for part in parts]
        return ids

    wanted = [RULES["albert"](encode, text) for text in texts()]
    assert [tokenizer.encode(text).ids for text in texts()] == wanted
    assert {"▁1990,", "04,"} <= set(cut_again)


@pytest.mark.parametrize("prefix", [" ", "▁", "\n", "a"])
def test_without_legacy_a_space_is_put_before_a_text_that_has_none(prefix, tmp_path):
    tokenizer, pieces = built(write(tmp_path, "llama", {"legacy": False})), with_pieces("llama")
    text = f"{prefix}cat"
    wanted = pieces.encode(text[1:] if prefix in " ▁" else text)
    assert tokenizer.encode(text).ids == [1, *wanted]


# Texts that hold special tokens, each of some family.
SPECIAL = [
    *("<s>", "a</s>b", "a </s> b", "<unk> a <pad>", "a <mask> b", "a<mask>"),
    "[CLS] a [SEP] b [MASK]",
    *("<extra_id_0>", "a <extra_id_99>b", "<bos>a<eos>", "[UNK]", "[PAD]a", "<table> a"),
]

# What transformers 5 makes of these models itself, with what is compared: it leaves DeBERTa's
# normalization out, and takes symbols of ALBERT's for words of their own.
WITH_TRANSFORMERS = ("albert without symbols", "camembert", "deberta", "gemma", "llama", "t5")
WITH_TRANSFORMERS += ("xlm-roberta",)


def normalized(text: str) -> str:
    """A text that normalization leaves as it is."""
    text = unicodedata.normalize("NFKC", text.replace("▁", " "))
    return " ".join("".join(one for one in text if one.isprintable() or one.isspace()).split())


@pytest.mark.skipif(int(version("transformers").split(".")[0]) < 5, reason="version 4 differs")
@pytest.mark.parametrize("name", WITH_TRANSFORMERS)
def test_ids_and_types_are_those_of_transformers(name, tmp_path):
    from transformers import AutoTokenizer

    folder = write(tmp_path, name, {"legacy": False} if name == "llama" else {})
    ours, theirs = built(folder), AutoTokenizer.from_pretrained(folder).backend_tokenizer
    compared = [*texts(), *SPECIAL]
    if name == "deberta":
        compared = [normalized(text) for text in compared]
    assert ours.get_vocab() == theirs.get_vocab()
    for text, other in zip(compared, reversed(compared), strict=True):
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        mine, other = ours.encode(text, other), theirs.encode(text, other)
        assert (mine.ids, mine.type_ids) == (other.ids, other.type_ids), text


def test_added_tokens_have_the_ids_that_files_say(tmp_path):
    count = len(with_pieces("llama"))
    decoder = {
        "0": {"content": "<unk>", "special": True},
        str(count): {"content": "<|user|>", "special": True, "rstrip": True},
        str(count + 1): {"content": "<|bot|>", "special": True},
    }
    changes = {"added_tokens_decoder": decoder, "pad_token": "<|pad|>"}
    tokenizer = built(write(tmp_path, "llama", changes))
    added = ("<|user|>", "<|bot|>", "<|pad|>")
    assert [tokenizer.token_to_id(token) for token in added] == [count, count + 1, count + 2]
    assert tokenizer.encode("<|user|> <|bot|>").ids == [1, count, count + 1]


def test_added_tokens_json_and_special_tokens_map_are_read(tmp_path):
    folder, count = write(tmp_path, "xlm-roberta"), len(with_pieces("xlm-roberta"))
    added = {"<x>": count + 2, "<mask>": count + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<x>"]}')
    assert built(folder).encode("<x><mask>").ids == [0, count + 2, count + 1, 2]


def test_switches_of_text_are_followed(tmp_path):
    kept = built(write(tmp_path, "albert", {"do_lower_case": False, "keep_accents": True}))
    pieces = with_pieces("albert")
    assert kept.encode("Der Café É").ids == [2, *pieces.encode("Der Café É"), 3]
    lowered = built(write(tmp_path, "deberta", {"do_lower_case": True}))
    pieces = with_pieces("deberta")
    assert lowered.encode("Der Café É").ids == [1, *pieces.encode("der café é"), 2]


def test_deberta_gets_types_and_a_mask_after_its_pieces(tmp_path):
    folder = write(tmp_path, "deberta")
    (folder / "tokenizer_config.json").unlink()  # as microsoft/deberta-v3-base, which has no class
    (folder / "config.json").write_text('{"model_type": "deberta-v2"}')
    tokenizer = built(folder)
    pair = tokenizer.encode("a cat", "the mat")
    sep = pair.ids.index(2) + 1
    assert pair.type_ids == [0] * sep + [1] * (len(pair.ids) - sep)
    assert tokenizer.token_to_id("[MASK]") == len(with_pieces("deberta"))


def test_a_difference_from_sentencepiece_is_refused(tmp_path, monkeypatch):
    # half-width kana with a voicing mark, of which the tokenizers library makes two characters
    monkeypatch.setattr(sentencepiece_model, "FIXED_TEXTS", ("ｶﾞ",))
    with pytest.raises(CheckpointError, match="differs from SentencePiece on 'ｶﾞ'; save one with"):
        build_from_sentencepiece(write(tmp_path, "t5"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"byte_fallback": True, "vocab_size": 800}, "differs from Sentence.* on .*<0x0A>"),
        ("llama", {"user_defined_symbols": ["@@"]}, "differs from SentencePiece on .*@@"),
        ("t5", {"model_type": "char"}, "wanted a unigram or BPE model"),
        ("t5", {"treat_whitespace_as_suffix": True}, "or of spaces after words"),
        ("t5", {"eos_id": -1}, "has no piece '</s>'"),
        ("xlm-roberta", {"bos_id": -1, "eos_id": -1}, "differs from SentencePiece on"),
    ],
)
def test_a_model_that_would_be_misread_is_refused(name, changes, message, tmp_path, monkeypatch):
    monkeypatch.setitem(TRAINED, "other", TRAINED[name] | changes)
    folder = write(tmp_path, name)
    file = folder / FAMILIES[CONFIGS[name]["tokenizer_class"]].file
    file.write_bytes(trained.__wrapped__("other"))
    with pytest.raises(CheckpointError, match=message):
        build_from_sentencepiece(folder)


def test_unused_pieces_are_refused(tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString(trained("t5"))
    proto.pieces[9].type = sentencepiece_model.UNUSED
    folder = write(tmp_path, "t5")
    (folder / "spiece.model").write_bytes(proto.SerializeToString())
    with pytest.raises(UnsupportedModel, match="has pieces marked as unused"):
        build_from_sentencepiece(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deberta", {"split_by_punct": True}, "split_by_punct is True, wanted False"),
        ("t5", {"sp_model_kwargs": {"nbest_size": 4}}, "sp_model_kwargs is .* wanted {}"),
        ("llama", {"add_prefix_space": False}, "add_prefix_space is False, wanted True"),
        ("llama", {"add_bos_token": None}, "lacks add_bos_token, whose default is true in transf"),
        ("gemma", {"add_bos_token": None}, "lacks add_bos_token"),
        ("llama", {"legacy": None}, "lacks legacy, .* set it there, or save one with"),
        ("t5", {"extra_ids": "5"}, 'extra_ids is "5", wanted a whole number'),
        ("t5", {"eos_token": ""}, 'eos_token is "", wanted a token'),
        ("t5", {"added_tokens_decoder": {"x": {}}}, "wanted an object of tokens by id"),
        ("t5", {"added_tokens_decoder": {"3": {"content": "<q>"}}}, "<q>' has id 3, wanted a spe"),
        ("t5", {"added_tokens_decoder": {"3": {"content": "</s>"}}}, "'</s>' has id 3, wanted 1"),
    ],
)
def test_files_that_ask_for_something_else_are_refused(name, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        build_from_sentencepiece(write(tmp_path, name, changes))


def test_a_class_without_a_rule_is_refused(tmp_path):
    folder = write(tmp_path, "t5")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XLNetTokenizer"}')
    with pytest.raises(UnsupportedModel, match="its tokenizer_class is XLNetTokenizer; wanted one"):
        read_tokenizer(folder, lowercase=False, vocab_size=1000)


@pytest.mark.parametrize("content", [b"no model", None])
def test_a_damaged_or_missing_model_is_refused(content, tmp_path):
    model = write(tmp_path, "t5") / "spiece.model"
    model.unlink() if content is None else model.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no tokenizer can be built from .*spiece\.model"):
        build_from_sentencepiece(tmp_path)
