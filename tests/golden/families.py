"""The families of models that goldens and parity are made of: how transformers builds a tiny one.

A new family is an entry of FAMILIES; test_towers, test_cross_encoders and make.py take it up.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

_SENTENCE = "the a of cat dog sat on mat runs red blue sky how what is where query document"
WORDS = _SENTENCE.split()
LETTERS = string.ascii_lowercase + string.digits
PUNCTUATION = ",.?!:"

WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDPIECES += [*PUNCTUATION, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]

# and their scores, the logarithms of their shares
UNIGRAMS = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")]
UNIGRAMS += [(f"▁{word}", -3.0 - 0.01 * n) for n, word in enumerate(WORDS)]
UNIGRAMS += [(piece, -6.0 - 0.01 * n) for n, piece in enumerate(["▁", *PUNCTUATION, *LETTERS])]
UNIGRAMS += [("<mask>", 0.0)]


def byte_pairs() -> tuple[list[str], list[tuple[str, str]]]:
    """Byte-level tokens and merges: every byte, and a blank and one of WORDS, letter by letter."""
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    for word in WORDS:
        joined = "Ġ"
        for letter in word:
            if joined + letter not in tokens:
                tokens.append(joined + letter)
                merges.append((joined, letter))
            joined += letter
    return tokens, merges


def wordpiece(folder: Path) -> Any:
    return _wordpiece(folder, transformers.BertTokenizerFast)


def distilbert_wordpiece(folder: Path) -> Any:
    """As published: gives no types to the model, though tokenizer.json has them."""
    return _wordpiece(folder, transformers.DistilBertTokenizerFast)


def _wordpiece(folder: Path, kind: Any) -> Any:
    (folder / "vocab.txt").write_text("\n".join(WORDPIECES) + "\n")
    return kind.from_pretrained(folder, do_lower_case=True)


def unigram(folder: Path) -> Any:
    return transformers.XLMRobertaTokenizer(vocab=UNIGRAMS)


ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def roberta_bytes(folder: Path) -> Any:
    tokens, merges = byte_pairs()
    vocabulary = {token: n for n, token in enumerate([*ROBERTA_SPECIAL, *tokens])}
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=merges)


MODERNBERT_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


def modernbert_bytes(folder: Path) -> Any:
    """As published: a byte-level BPE with BERT's special tokens, every type 0."""
    tokens, merges = byte_pairs()
    vocabulary = {token: n for n, token in enumerate([*MODERNBERT_SPECIAL, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:0 [SEP]:0",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, MODERNBERT_SPECIAL, strict=True))
    )


QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def qwen3_bytes(folder: Path) -> Any:
    """As published: a byte-level BPE with its special tokens last, and nothing around a text."""
    return _qwen_bytes()


def qwen2_bytes(folder: Path) -> Any:
    """As gte-Qwen2's: a text ends with the first of them."""
    return _qwen_bytes(add_eos_token=True)


def _qwen_bytes(**options: Any) -> Any:
    tokens, merges = byte_pairs()
    vocabulary = {token: n for n, token in enumerate([*tokens, *QWEN_SPECIAL])}
    special = list(QWEN_SPECIAL[1:])
    return transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, additional_special_tokens=special, **options
    )


@dataclass(frozen=True)
class Family:
    """`tower`, `masked_lm` and `classifier` are classes of transformers, the last two None where
    there is no such thing; `options` are for the tower's. `tokenizer` gets a folder to keep its
    vocabulary in, where it needs one. Positions that no token can have are `spare_positions`.
    `odd` are changes to `config`: odd in every size, so that no two axes can be swapped unseen."""

    tower: str
    masked_lm: str | None
    classifier: str | None
    config: dict[str, Any]
    odd: dict[str, Any]
    tokenizer: Callable[[Path], Any]
    options: dict[str, Any] = field(default_factory=dict)
    spare_positions: int = 0

    def positions(self, config: dict[str, Any]) -> int:
        """The longest sequence, of this family's config changed by `config`."""
        return (self.config | config)["max_position_embeddings"] - self.spare_positions


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
ODD = {
    "hidden_size": 15,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "max_position_embeddings": 29,
    "layer_norm_eps": 1e-2,  # large, so that one that is ignored shows
}
BERT_ODD = ODD | {"type_vocab_size": 3, "hidden_act": "gelu_new"}

# as published: no types, positions from pad_token_id + 1
ROBERTA = TINY | {
    "max_position_embeddings": 34,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}

QWEN = {
    "vocab_size": len(byte_pairs()[0]) + len(QWEN_SPECIAL),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "pad_token_id": len(byte_pairs()[0]),  # <|endoftext|>
}

FAMILIES = {
    "bert": Family(
        "BertModel",
        "BertForMaskedLM",
        "BertForSequenceClassification",
        TINY | {"vocab_size": len(WORDPIECES), "max_position_embeddings": 32, "type_vocab_size": 2},
        BERT_ODD,
        wordpiece,
        {"add_pooling_layer": False},
    ),
    "xlm_roberta": Family(
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        ROBERTA | {"vocab_size": len(UNIGRAMS)},
        ODD,
        unigram,
        {"add_pooling_layer": False},
        spare_positions=2,
    ),
    "roberta": Family(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        ROBERTA | {"vocab_size": len(ROBERTA_SPECIAL) + len(byte_pairs()[0])},
        ODD | {"type_vocab_size": 2},
        roberta_bytes,
        {"add_pooling_layer": False},
        spare_positions=2,
    ),
    "distilbert": Family(
        "DistilBertModel",
        "DistilBertForMaskedLM",
        "DistilBertForSequenceClassification",
        {  # hidden_size and the like are saved under its own names
            "vocab_size": len(WORDPIECES),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 32,
        },
        {
            "hidden_size": 15,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "hidden_dim": 37,
            "max_position_embeddings": 29,
            "activation": "relu",
            "layer_norm_eps": 1e-2,  # which it does not read
            "sinusoidal_pos_embds": True,  # the table is read from the file nevertheless
        },
        distilbert_wordpiece,
    ),
    "modernbert": Family(
        "ModernBertModel",
        "ModernBertForMaskedLM",
        "ModernBertForSequenceClassification",
        {
            "vocab_size": len(MODERNBERT_SPECIAL) + len(byte_pairs()[0]),
            "hidden_size": 12,
            "num_hidden_layers": 4,  # the first and the last are global
            "num_attention_heads": 2,
            "intermediate_size": 20,
            "max_position_embeddings": 32,
            "local_attention": 8,
            "pad_token_id": 3,
        },
        {
            "hidden_size": 18,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 13,
            "max_position_embeddings": 41,
            "local_attention": 7,  # of which the half is 3
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "global_rope_theta": 700.0,
            "local_rope_theta": 30.0,
            "norm_eps": 1e-2,
            "hidden_activation": "gelu_pytorch_tanh",
            "classifier_activation": "silu",
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
        },
        modernbert_bytes,
    ),
    "qwen3": Family(
        "Qwen3Model",
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        QWEN | {"head_dim": 6},  # so that all heads are wider than the hidden states
        {
            "hidden_size": 15,
            "num_hidden_layers": 3,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "intermediate_size": 37,
            "max_position_embeddings": 41,
            "rms_norm_eps": 1e-2,
            "rope_theta": 300.0,
            "attention_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
        qwen3_bytes,
    ),
    "qwen2": Family(
        "Qwen2Model",
        "Qwen2ForCausalLM",
        None,  # would score the token before the padding that its texts end with
        QWEN,
        {
            "hidden_size": 18,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 37,
            "max_position_embeddings": 41,
            "rms_norm_eps": 1e-2,
            "is_causal": False,
        },
        qwen2_bytes,
    ),
}
