"""What each class of tokenizer does with the pieces of its SentencePiece model.

The rules are those of transformers 4, with which the models were trained and published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import read_optional_json


@dataclass(frozen=True)
class Family:
    """How a class of tokenizers makes ids of the pieces of its SentencePiece model.

    The vocabulary is `before`, then the pieces without the first `dropped`, then `extra_ids` more.
    `template` is a text between special tokens, and after the bar what a second text adds; `:1` is
    a token type. `tokens` are the special tokens where tokenizer_config.json names no others.
    """

    file: str
    template: str
    tokens: Mapping[str, str]
    before: tuple[str, ...] = ()
    dropped: int = 0
    extra_ids: int = 0  # <extra_id_0> and so on, of which the first is last
    lowercase: bool | None = None  # the default of do_lower_case; None: it has no such switch
    is_albert: bool = False  # replaces quotes and accents; no piece ends with a digit and a comma
    has_ends: bool = False  # the switches add_bos_token and add_eos_token
    has_legacy: bool = False  # the switch legacy: a space before each part of a text, or the first


_CLS_SEP = "cls $A sep | $B:1 sep:1"
_BOS_EOS = "bos $A eos | eos $B eos"
_FAIRSEQ = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}

FAMILIES = {
    "AlbertTokenizer": Family(
        "spiece.model",
        _CLS_SEP,
        {"cls": "[CLS]", "sep": "[SEP]", "unk": "<unk>", "pad": "<pad>", "mask": "[MASK]"},
        lowercase=True,
        is_albert=True,
    ),
    "CamembertTokenizer": Family(
        "sentencepiece.bpe.model",
        _BOS_EOS,
        _FAIRSEQ,
        before=("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"),
        dropped=1,
    ),
    "DebertaV2Tokenizer": Family(
        "spm.model",
        _CLS_SEP,
        {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"},
        lowercase=False,
    ),
    "GemmaTokenizer": Family(
        "tokenizer.model",
        "bos $A eos | bos:1 $B:1 eos:1",
        {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"},
        has_ends=True,
    ),
    "LlamaTokenizer": Family(
        "tokenizer.model",
        "bos $A eos | bos:1 $B:1 eos:1",
        {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
        has_ends=True,
        has_legacy=True,
    ),
    "T5Tokenizer": Family(
        "spiece.model",
        "$A eos | $B eos",
        {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
        extra_ids=100,
    ),
    "XLMRobertaTokenizer": Family(
        "sentencepiece.bpe.model",
        _BOS_EOS,
        _FAIRSEQ,
        before=("<s>", "<pad>", "</s>", "<unk>"),
        dropped=3,
    ),
}

# The classes that transformers takes if none is named; for Mistral's, the one that models name.
CLASSES_BY_TYPE = {
    "albert": "AlbertTokenizer",
    "camembert": "CamembertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gte": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer",
    "llama": "LlamaTokenizer",
    "llama_bidirec": "LlamaTokenizer",
    "ministral3": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "new": "XLMRobertaTokenizer",
    "t5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}


def class_name(folder: Path) -> str | None:
    """The class of the tokenizer in a folder, without "Fast": the one that its files name, or the
    one of its model type where they name none."""
    path = folder / "config.json"
    config = read_optional_json(path)
    check_fields(
        str(path), config, {key: CONFIG_FIELDS[key] for key in ("model_type", "tokenizer_class")}
    )
    named = read_optional_json(folder / "tokenizer_config.json").get("tokenizer_class")
    name = named or config.get("tokenizer_class")
    return (
        name.removesuffix("Fast") if name else CLASSES_BY_TYPE.get(config.get("model_type") or "")
    )
