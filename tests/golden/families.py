"""The families of models that goldens and parity are made of: how transformers builds a tiny one.

A new family is an entry of FAMILIES; test_towers, test_cross_encoders and make.py take it up.

Weights come from numpy and not from transformers' initialisers, whose zero biases and unit norms
would hide a swapped tensor, and which may change from release to release.
"""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden import jina_bert
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SEED = 7

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


MPNET_SPECIAL = ("<s>", "<pad>", "</s>", "[UNK]")


def mpnet_wordpiece(folder: Path) -> Any:
    """As published: BERT's words, RoBERTa's special tokens and its two of them within a pair."""
    tokens = [*MPNET_SPECIAL, *WORDPIECES[5:], "<mask>"]
    return transformers.MPNetTokenizer(vocab={token: n for n, token in enumerate(tokens)})


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


DEBERTA_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
DEBERTA_PIECES = [(name, 0.0) for name in DEBERTA_SPECIAL] + UNIGRAMS[4:-1] + [("[MASK]", 0.0)]


def deberta_unigram(folder: Path) -> Any:
    return transformers.DebertaV2Tokenizer(vocab=DEBERTA_PIECES, unk_id=3)


ALBERT_SPECIAL = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
ALBERT_PIECES = [(name, 0.0) for name in ALBERT_SPECIAL] + UNIGRAMS[4:-1]


def albert_unigram(folder: Path) -> Any:
    """As published: pieces of lower case, which transformers gives without types."""
    return transformers.AlbertTokenizer(vocab=ALBERT_PIECES)


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


LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|mask|>")


def llama3_bytes(folder: Path) -> Any:
    """As published: a byte-level BPE with its special tokens last, the first before each text."""
    return _llama_bytes("")


def eurobert_bytes(folder: Path) -> Any:
    """Llama 3's with an end after each text, which is padding, too."""
    return _llama_bytes(" <|end_of_text|>")


def _llama_bytes(end: str) -> Any:
    tokens, merges = byte_pairs()
    vocabulary = {token: n for n, token in enumerate([*tokens, *LLAMA_SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=f"<|begin_of_text|> $A{end}",
        pair=f"<|begin_of_text|> $A{end} <|begin_of_text|>:1 $B:1{end and end + ':1'}",
        special_tokens=[(token, vocabulary[token]) for token in LLAMA_SPECIAL],
    )
    names = ("bos_token", "eos_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=LLAMA_SPECIAL[1],
        model_input_names=["input_ids", "attention_mask"],
        **dict(zip(names, LLAMA_SPECIAL, strict=True)),
    )


T5_SPECIAL = ("<pad>", "</s>", "<unk>")
T5_PIECES = [(name, 0.0) for name in T5_SPECIAL] + UNIGRAMS[4:-1]


def t5_unigram(folder: Path) -> Any:
    """As published: a text ends with </s>, and only the tokenizer says how long it may be. Without
    the sentinels of its training."""
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return transformers.T5Tokenizer(vocab=T5_PIECES, extra_ids=0, model_max_length=longest)


GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
MISTRAL_SPECIAL = ("<unk>", "<s>", "</s>")


def gemma_pieces(folder: Path) -> Any:
    """As EmbeddingGemma's: pieces of words with bytes for all else, a text begun and ended."""
    vocabulary, merges = word_pieces(GEMMA_SPECIAL)
    return transformers.GemmaTokenizer(vocab=vocabulary, merges=merges, add_eos_token=True)


def mistral_pieces(folder: Path) -> Any:
    """As e5-mistral's: the same with a blank before each text."""
    vocabulary, merges = word_pieces(MISTRAL_SPECIAL)
    return transformers.LlamaTokenizer(
        vocab=vocabulary, merges=merges, add_eos_token=True, pad_token="<unk>"
    )


def word_pieces(special: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Letters, WORDS with a blank, and every byte, by their number; and how they are merged."""
    pieces, merges = ["▁", *LETTERS, *PUNCTUATION], []
    for word in WORDS:
        joined = "▁"
        for letter in word:
            if joined + letter not in pieces:
                pieces.append(joined + letter)
                merges.append((joined, letter))
            joined += letter
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {name: number for number, name in enumerate(names)}, merges


@dataclass(frozen=True)
class Family:
    """`backbone`, `masked_lm` and `classifier` are names of classes, for `class_of`, the last two
    None where there is no such thing; `options` are for the backbone's. `tokenizer` gets a folder
    to keep its vocabulary in, where it needs one. Positions that no token can have are
    `spare_positions`. `odd` are changes to `config`: odd in every size, so that no two axes can be
    swapped unseen. `published` are fields of published configs, which name no class of our own."""

    backbone: str
    masked_lm: str | None
    classifier: str | None
    config: dict[str, Any]
    odd: dict[str, Any]
    tokenizer: Callable[[Path], Any]
    options: dict[str, Any] = field(default_factory=dict)
    spare_positions: int = 0
    published: dict[str, Any] = field(default_factory=dict)

    def positions(self, config: dict[str, Any]) -> int:
        """The longest sequence, of this family's config changed by `config`."""
        return (self.config | config)["max_position_embeddings"] - self.spare_positions


def classes(name: str, trained: str = "MaskedLM") -> tuple[str, str, str]:
    """The classes of a tower, of its training, and of a classifier."""
    return f"{name}Model", f"{name}For{trained}", f"{name}ForSequenceClassification"


def class_of(name: str) -> Any:
    """A class of transformers, or of our own where it has none."""
    return getattr(transformers if hasattr(transformers, name) else jina_bert, name)


def save_tower(family: Family, folder: Path, **changes: Any) -> None:
    """The tower and its tokenizer, as transformers saves them; `changes` are to family.config."""
    kind = class_of(family.backbone)
    backbone = kind(kind.config_class(**family.config | changes), **family.options)
    randomise(backbone)
    backbone.save_pretrained(folder)
    family.tokenizer(folder).save_pretrained(folder)


def randomise(model: torch.nn.Module) -> None:
    """Weights drawn by numpy in the order of their names."""
    draw = np.random.default_rng(SEED)
    for name, parameter in sorted(model.named_parameters()):
        values = draw.standard_normal(tuple(parameter.shape), np.float32)
        if parameter.ndim == 1 and name.endswith("weight"):  # a norm's scale
            values = 1 + 0.2 * values
        elif parameter.ndim == 1:
            values *= 0.2
        elif "embed" in name:
            values *= 0.5
        else:
            values *= parameter.shape[1] ** -0.5
        parameter.data = torch.from_numpy(values)
    for module in model.modules():  # T5 does not divide scores by the root of the heads' width
        if hasattr(module, "key_value_proj_dim"):
            module.q.weight.data *= module.key_value_proj_dim**-0.5


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

ROTARY_ODD = BERT_ODD | {
    "hidden_size": 18,  # whose heads have an even width
    "rope_parameters": {"rope_type": "linear", "rope_theta": 30.0, "factor": 1.5},
}

BERT = TINY | {
    "vocab_size": len(WORDPIECES),
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
}

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

LLAMA = QWEN | {
    "vocab_size": len(byte_pairs()[0]) + len(LLAMA_SPECIAL),
    "pad_token_id": len(byte_pairs()[0]) + 1,  # <|end_of_text|>
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DECODER_ODD = {
    "hidden_size": 15,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "intermediate_size": 37,
    "max_position_embeddings": 41,
    "rms_norm_eps": 1e-2,
}
# of the sizes of Gemma and Mistral, whose heads are wider than their hidden states together
WIDE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}

FAMILIES = {
    "bert": Family(
        *classes("Bert"),
        BERT,
        BERT_ODD,
        wordpiece,
        {"add_pooling_layer": False},
    ),
    "electra": Family(
        *classes("Electra", "PreTraining"),
        BERT | {"embedding_size": 10},
        BERT_ODD | {"embedding_size": 15},  # the hidden size: not projected
        wordpiece,
    ),
    "albert": Family(
        *classes("Albert"),
        BERT | {"vocab_size": len(ALBERT_PIECES), "embedding_size": 10},
        ODD
        | {
            "type_vocab_size": 3,
            "hidden_act": "gelu",
            "num_hidden_groups": 2,  # which run twice and once
            "inner_group_num": 2,
        },
        albert_unigram,
        {"add_pooling_layer": False},
    ),
    "xlm_roberta": Family(
        *classes("XLMRoberta"),
        ROBERTA | {"vocab_size": len(UNIGRAMS)},
        ODD,
        unigram,
        {"add_pooling_layer": False},
        spare_positions=2,
    ),
    "jina_v3": Family(
        *classes("JinaEmbeddingsV3"),
        ROBERTA | {"vocab_size": len(UNIGRAMS)},
        ODD | {"hidden_size": 12},
        unigram,
        {"add_pooling_layer": False},
    ),
    "roberta": Family(
        *classes("Roberta"),
        ROBERTA | {"vocab_size": len(ROBERTA_SPECIAL) + len(byte_pairs()[0])},
        ODD | {"type_vocab_size": 2},
        roberta_bytes,
        {"add_pooling_layer": False},
        spare_positions=2,
    ),
    "mpnet": Family(
        *classes("MPNet"),
        TINY
        | {
            "vocab_size": len(WORDPIECES),
            "max_position_embeddings": 34,
            "layer_norm_eps": 1e-5,
        },
        ODD | {"hidden_act": "gelu_new", "pad_token_id": 3},  # from which it does not count
        mpnet_wordpiece,
        {"add_pooling_layer": False},
        spare_positions=2,
    ),
    "nomic_bert": Family(
        *classes("NomicBert"),
        TINY
        | {
            "vocab_size": len(WORDPIECES),
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        ROTARY_ODD,
        wordpiece,
        {"add_pooling_layer": False},
    ),
    "gte": Family(
        *classes("Gte"),
        TINY
        | {  # as gte-multilingual-base, whose own "ntk" of 8 times is this
            "vocab_size": len(UNIGRAMS),
            "max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 160000.0,
                "factor": 8 ** (2 / 64),
            },
        },
        ROTARY_ODD,
        unigram,
    ),
    "jina_bert": Family(
        "JinaBertModel",
        None,
        "JinaBertForSequenceClassification",
        BERT,
        ODD | {"type_vocab_size": 3},
        wordpiece,
        published=jina_bert.PUBLISHED,
    ),
    "jina_bert_code": Family(
        "JinaBertModel",
        None,
        "JinaBertForSequenceClassification",
        BERT | {"qk_post_norm": True},
        ODD | {"type_vocab_size": 3},
        wordpiece,
        published=jina_bert.PUBLISHED_CODE,
    ),
    "distilbert": Family(
        *classes("DistilBert"),
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
    "deberta": Family(
        *classes("DebertaV2"),
        TINY
        | {  # as published: version 3
            "vocab_size": len(DEBERTA_PIECES),
            "max_position_embeddings": 32,
            "max_relative_positions": -1,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": "p2c|c2p",
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
            "pooler_hidden_act": "gelu",
        },
        ODD
        | {
            "embedding_size": 11,
            "max_relative_positions": 13,
            "position_buckets": -1,
            "pos_att_type": ["c2p"],
            "share_att_key": False,
            "norm_rel_ebd": "none",
            "position_biased_input": True,
            "type_vocab_size": 3,
            "conv_kernel_size": 3,
            "conv_act": "gelu_new",
            "hidden_act": "relu",
            "pooler_hidden_act": "silu",
        },
        deberta_unigram,
    ),
    "modernbert": Family(
        *classes("ModernBert"),
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
        *classes("Qwen3", "CausalLM"),
        QWEN | {"head_dim": 6},  # so that all heads are wider than the hidden states
        DECODER_ODD
        | {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
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
    "gemma2": Family(
        *classes("Gemma2", "CausalLM"),
        WIDE
        | {
            "vocab_size": len(word_pieces(GEMMA_SPECIAL)[0]),
            "hidden_size": 18,
            "intermediate_size": 20,
            "max_position_embeddings": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 6,  # for scores that the cap changes
            "attn_logit_softcapping": 1.5,
        },
        DECODER_ODD
        | {
            "sliding_window": 7,
            "query_pre_attn_scalar": 50,
            "attn_logit_softcapping": 0.7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
            "hidden_activation": "silu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5},
            "is_causal": False,
        },
        gemma_pieces,
    ),
    "gemma3": Family(
        "Gemma3TextModel",
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        WIDE
        | {
            "vocab_size": len(word_pieces(GEMMA_SPECIAL)[0]),
            "hidden_size": 18,
            "intermediate_size": 20,
            "max_position_embeddings": 32,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 48,  # large, for scores of the size that trained ones have
            "use_bidirectional_attention": True,
        },
        DECODER_ODD
        | {
            "num_key_value_heads": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 50,
            "use_bidirectional_attention": False,
            "attention_bias": True,
            "hidden_activation": "silu",
            "rope_theta": 300.0,
            "rope_local_base_freq": 30.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.5},
        },
        gemma_pieces,
    ),
    "llama": Family(
        *classes("Llama", "CausalLM"),
        LLAMA | {"max_position_embeddings": 48, "rope_parameters": LLAMA3_ROPE},
        DECODER_ODD
        | {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5},
            "attention_bias": True,
            "mlp_bias": True,
            "is_causal": False,
        },
        llama3_bytes,
    ),
    "mistral": Family(
        *classes("Mistral", "CausalLM"),
        WIDE
        | {
            "vocab_size": len(word_pieces(MISTRAL_SPECIAL)[0]),
            "hidden_size": 18,
            "intermediate_size": 20,
            "max_position_embeddings": 32,
            "sliding_window": 6,
            "pad_token_id": 0,
        },
        DECODER_ODD
        | {
            "num_key_value_heads": 3,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 3.0,
                "original_max_position_embeddings": 13,
                "beta_fast": 4.0,
            },
        },
        mistral_pieces,
    ),
    "ministral3": Family(
        "Ministral3Model",
        "Ministral3ForCausalLM",
        None,  # scores as Mistral does
        LLAMA
        | {
            "head_dim": 6,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 4,
                "max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            "hidden_size": 15,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "intermediate_size": 37,
            "sliding_window": 9,
            "is_causal": False,
        },
        llama3_bytes,
    ),
    "eurobert": Family(
        *classes("EuroBert"),
        LLAMA | {"num_key_value_heads": 4, "classifier_pooling": "bos"},
        {
            "hidden_size": 18,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 37,
            "max_position_embeddings": 41,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_pooling": "mean",
        },
        eurobert_bytes,
    ),
    "t5": Family(
        "T5EncoderModel",
        "T5ForConditionalGeneration",
        None,  # T5ForSequenceClassification takes the decoder's hidden states
        {  # its own names, but for those of sizes; the tower reads no max_position_embeddings
            "vocab_size": len(T5_PIECES),
            "hidden_size": 16,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 2,
            "d_kv": 4,
            "d_ff": 32,
            "max_position_embeddings": 32,
            "relative_attention_max_distance": 20,
            "is_encoder_decoder": False,
        },
        {  # version 1.1, with a scale of queries that is no power of two
            "hidden_size": 15,
            "num_layers": 3,
            "num_heads": 3,
            "d_kv": 6,
            "d_ff": 37,
            "feed_forward_proj": "gated-gelu",
            "max_position_embeddings": 41,
            "relative_attention_num_buckets": 13,
            "relative_attention_max_distance": 17,
            "layer_norm_epsilon": 1e-2,
        },
        t5_unigram,
    ),
}
