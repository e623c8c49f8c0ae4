"""The families of models that goldens and parity are made of: how transformers builds a tiny one.

A new family is an entry of FAMILIES; test_towers, test_cross_encoders and make.py take it up.

Weights come from numpy and not from transformers' initialisers, whose zero biases and unit norms
would hide a swapped tensor, and which may change from release to release.
"""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden import jina_bert, nomic_moe
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
    return _with_words(sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ")


def word_pieces(special: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Letters, WORDS with a blank, and every byte, by their number; and how they are merged."""
    pieces, merges = _with_words(["▁", *LETTERS, *PUNCTUATION], "▁")
    return numbered(*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces), merges


def _with_words(tokens: list[str], blank: str) -> tuple[list[str], list[tuple[str, str]]]:
    merges = []
    for word in WORDS:
        joined = blank
        for letter in word:
            if joined + letter not in tokens:
                tokens.append(joined + letter)
                merges.append((joined, letter))
            joined += letter
    return tokens, merges


def numbered(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def wordpiece(folder: Path, kind: Any = transformers.BertTokenizerFast) -> Any:
    (folder / "vocab.txt").write_text("\n".join(WORDPIECES) + "\n")
    return kind.from_pretrained(folder, do_lower_case=True)


MPNET_SPECIAL = ("<s>", "<pad>", "</s>", "[UNK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
MODERNBERT_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
DEBERTA_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
ALBERT_SPECIAL = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|mask|>")
T5_SPECIAL = ("<pad>", "</s>", "<unk>")
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
MISTRAL_SPECIAL = ("<unk>", "<s>", "</s>")

DEBERTA_PIECES = [(name, 0.0) for name in DEBERTA_SPECIAL] + UNIGRAMS[4:-1] + [("[MASK]", 0.0)]
ALBERT_PIECES = [(name, 0.0) for name in ALBERT_SPECIAL] + UNIGRAMS[4:-1]
T5_PIECES = [(name, 0.0) for name in T5_SPECIAL] + UNIGRAMS[4:-1]


def mpnet_wordpiece(folder: Path) -> Any:
    """As published: BERT's words, RoBERTa's special tokens and its two of them within a pair."""
    return transformers.MPNetTokenizer(vocab=numbered(*MPNET_SPECIAL, *WORDPIECES[5:], "<mask>"))


def unigram(folder: Path) -> Any:
    return transformers.XLMRobertaTokenizer(vocab=UNIGRAMS)


def roberta_bytes(folder: Path) -> Any:
    tokens, merges = byte_pairs()
    return transformers.RobertaTokenizer(vocab=numbered(*ROBERTA_SPECIAL, *tokens), merges=merges)


def modernbert_bytes(folder: Path) -> Any:
    """As published: a byte-level BPE with BERT's special tokens, every type 0."""
    names = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")
    return _byte_level(
        numbered(*MODERNBERT_SPECIAL, *byte_pairs()[0]),
        ("[CLS]", "[SEP]"),
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:0 [SEP]:0",
        normalizers.NFC(),
        **dict(zip(names, MODERNBERT_SPECIAL, strict=True)),
    )


def qwen_bytes(folder: Path, more: tuple[str, ...] = (), **options: Any) -> Any:
    """As published: a byte-level BPE with its special tokens last."""
    tokens, merges = byte_pairs()
    options["additional_special_tokens"] = [*QWEN_SPECIAL[1:], *more]
    vocabulary = numbered(*tokens, *QWEN_SPECIAL, *more)
    return transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges, **options)


def llama_bytes(folder: Path, end: str = "") -> Any:
    """As published: a byte-level BPE with its special tokens last, the first before each text."""
    names = ("bos_token", "eos_token", "mask_token")
    return _byte_level(
        numbered(*byte_pairs()[0], *LLAMA_SPECIAL),
        LLAMA_SPECIAL,
        f"<|begin_of_text|> $A{end}",
        f"<|begin_of_text|> $A{end} <|begin_of_text|>:1 $B:1{end and end + ':1'}",
        pad_token=LLAMA_SPECIAL[1],
        model_input_names=["input_ids", "attention_mask"],
        **dict(zip(names, LLAMA_SPECIAL, strict=True)),
    )


def _byte_level(
    vocabulary: dict[str, int],
    special: tuple[str, ...],
    single: str,
    pair: str,
    normalizer: Any = None,
    **options: Any,
) -> Any:
    tokenizer = Tokenizer(models.BPE(vocabulary, byte_pairs()[1]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=single, pair=pair, special_tokens=[(token, vocabulary[token]) for token in special]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def t5_unigram(folder: Path) -> Any:
    """As published: a text ends with </s>, and only the tokenizer says how long it may be. Without
    the sentinels of its training."""
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return transformers.T5Tokenizer(vocab=T5_PIECES, extra_ids=0, model_max_length=longest)


def gemma_pieces(folder: Path) -> Any:
    """As EmbeddingGemma's: pieces of words with bytes for all else, a text begun and ended."""
    vocabulary, merges = word_pieces(GEMMA_SPECIAL)
    return transformers.GemmaTokenizer(vocab=vocabulary, merges=merges, add_eos_token=True)


def gemma_words(folder: Path) -> Any:
    """As Gemma 1's, which has a token for Yes."""
    vocabulary, merges = word_pieces(GEMMA_SPECIAL)
    vocabulary["Yes"] = len(vocabulary)
    return transformers.GemmaTokenizer(vocab=vocabulary, merges=merges)


def mistral_pieces(folder: Path) -> Any:
    """As e5-mistral's: the same with a blank before each text."""
    vocabulary, merges = word_pieces(MISTRAL_SPECIAL)
    return transformers.LlamaTokenizer(
        vocab=vocabulary, merges=merges, add_eos_token=True, pad_token="<unk>"
    )


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
    modules = (transformers, jina_bert, nomic_moe)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


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


def sized(
    hidden: int, layers: int, heads: int, wide: int, positions: int | None = None, **others: Any
) -> dict[str, Any]:
    """The sizes of a config by transformers' names, and `others`."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes: dict[str, Any] = dict(zip(names, (hidden, layers, heads, wide), strict=True))
    return sizes | ({"max_position_embeddings": positions} if positions else {}) | others


# with a large epsilon, so that one that is ignored shows
ODD = sized(15, 3, 3, 37, 29, layer_norm_eps=1e-2)
BERT_ODD = ODD | {"type_vocab_size": 3, "hidden_act": "gelu_new"}

ROTARY_ODD = BERT_ODD | {
    "hidden_size": 18,  # whose heads have an even width
    "rope_parameters": {"rope_type": "linear", "rope_theta": 30.0, "factor": 1.5},
}

BERT = sized(16, 2, 2, 32, 32, vocab_size=len(WORDPIECES), type_vocab_size=2)

# as published: no types, positions from pad_token_id + 1
ROBERTA = sized(16, 2, 2, 32, 34, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1)
ROBERTA |= {"bos_token_id": 0, "eos_token_id": 2}

BYTES = len(byte_pairs()[0])
QWEN = sized(16, 2, 4, 20, 32, num_key_value_heads=2)
QWEN |= {"vocab_size": BYTES + len(QWEN_SPECIAL), "pad_token_id": BYTES}  # <|endoftext|>

LLAMA = QWEN | {
    "vocab_size": BYTES + len(LLAMA_SPECIAL),
    "pad_token_id": BYTES + 1,  # <|end_of_text|>
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0}
MINISTRAL_ROPE |= {"original_max_position_embeddings": 4, "max_position_embeddings": 64}
MINISTRAL_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL_ROPE |= {"llama_4_scaling_beta": 0.1}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 3.0, "beta_fast": 4.0}
YARN |= {"original_max_position_embeddings": 13}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5}
DECODER_ODD = sized(15, 3, 3, 37, 41, num_key_value_heads=1, head_dim=10, rms_norm_eps=1e-2)
# of Gemma and Mistral, whose heads are wider than their hidden states together
WIDE = sized(18, 2, 2, 20, 32, num_key_value_heads=1, head_dim=12)
UNPOOLED = {"add_pooling_layer": False}
ELECTRA_ODD = BERT_ODD | {"embedding_size": 15}  # the hidden size: not projected
XLM_ROBERTA = ROBERTA | {"vocab_size": len(UNIGRAMS)}
MPNET = sized(16, 2, 2, 32, 34, vocab_size=len(WORDPIECES), layer_norm_eps=1e-5)
MPNET_ODD = ODD | {"hidden_act": "gelu_new", "pad_token_id": 3}  # from which it does not count
NOMIC_BERT = sized(16, 2, 2, 32, 32, vocab_size=len(WORDPIECES))
NOMIC_BERT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
# as gte-multilingual-base, whose own "ntk" of 8 times is this
GTE = sized(16, 2, 2, 32, 32, vocab_size=len(UNIGRAMS))
GTE |= {"rope_parameters": LINEAR | {"rope_theta": 160000.0, "factor": 8 ** (2 / 64)}}
JINA_BERT = ("JinaBertModel", None, "JinaBertForSequenceClassification")
JINA_ODD = ODD | {"type_vocab_size": 3}
JINA_CODE = BERT | {"qk_post_norm": True}

FAMILIES = {
    "bert": Family(*classes("Bert"), BERT, BERT_ODD, wordpiece, UNPOOLED),
    "electra": Family(
        *classes("Electra", "PreTraining"), BERT | {"embedding_size": 10}, ELECTRA_ODD, wordpiece
    ),
    "albert": Family(
        *classes("Albert"),
        BERT | {"vocab_size": len(ALBERT_PIECES), "embedding_size": 10},
        ODD
        | {"type_vocab_size": 3, "hidden_act": "gelu"}
        | {"num_hidden_groups": 2, "inner_group_num": 2},  # groups that run twice and once
        # as published: pieces of lower case, which transformers gives without types
        lambda folder: transformers.AlbertTokenizer(vocab=ALBERT_PIECES),
        UNPOOLED,
    ),
    "xlm_roberta": Family(
        *classes("XLMRoberta"), XLM_ROBERTA, ODD, unigram, UNPOOLED, spare_positions=2
    ),
    "jina_v3": Family(
        *classes("JinaEmbeddingsV3"), XLM_ROBERTA, ODD | {"hidden_size": 12}, unigram, UNPOOLED
    ),
    "roberta": Family(
        *classes("Roberta"),
        ROBERTA | {"vocab_size": len(ROBERTA_SPECIAL) + BYTES},
        ODD | {"type_vocab_size": 2},
        roberta_bytes,
        UNPOOLED,
        spare_positions=2,
    ),
    "mpnet": Family(
        *classes("MPNet"), MPNET, MPNET_ODD, mpnet_wordpiece, UNPOOLED, spare_positions=2
    ),
    "nomic_bert": Family(*classes("NomicBert"), NOMIC_BERT, ROTARY_ODD, wordpiece, UNPOOLED),
    "nomic_moe": Family(
        *("NomicMoeModel", None, None),
        XLM_ROBERTA | {"max_position_embeddings": 32},
        ODD
        | {"hidden_size": 18, "num_hidden_layers": 5}  # experts in layers 1 and 4
        | {"num_experts": 5, "moe_top_k": 3, "moe_every_n_layers": 3, "type_vocab_size": 3},
        unigram,
        published=nomic_moe.PUBLISHED,
    ),
    "gte": Family(*classes("Gte"), GTE, ROTARY_ODD, unigram),
    "jina_bert": Family(*JINA_BERT, BERT, JINA_ODD, wordpiece, published=jina_bert.PUBLISHED),
    "jina_bert_code": Family(
        *JINA_BERT, JINA_CODE, JINA_ODD, wordpiece, published=jina_bert.PUBLISHED_CODE
    ),
    "distilbert": Family(  # hidden_size and the like are saved under its own names
        *classes("DistilBert"),
        {"vocab_size": len(WORDPIECES), "hidden_size": 16, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32},
        {"hidden_size": 15, "num_hidden_layers": 3, "num_attention_heads": 3, "hidden_dim": 37}
        | {"max_position_embeddings": 29, "activation": "relu"}
        | {"layer_norm_eps": 1e-2}  # which it does not read
        | {"sinusoidal_pos_embds": True},  # the table is read from the file nevertheless
        # gives no types to the model, though tokenizer.json has them
        partial(wordpiece, kind=transformers.DistilBertTokenizerFast),
    ),
    "deberta": Family(  # as published: version 3
        *classes("DebertaV2"),
        sized(16, 2, 2, 32, 32, vocab_size=len(DEBERTA_PIECES), max_relative_positions=-1)
        | {"relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p"}
        | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
        | {"type_vocab_size": 0, "pooler_hidden_act": "gelu"},
        ODD
        | {"embedding_size": 11, "max_relative_positions": 13, "position_buckets": -1}
        | {"pos_att_type": ["c2p"], "share_att_key": False, "norm_rel_ebd": "none"}
        | {"position_biased_input": True, "type_vocab_size": 3, "conv_kernel_size": 3}
        | {"conv_act": "gelu_new", "hidden_act": "relu", "pooler_hidden_act": "silu"},
        lambda folder: transformers.DebertaV2Tokenizer(vocab=DEBERTA_PIECES, unk_id=3),
    ),
    "modernbert": Family(
        *classes("ModernBert"),
        sized(12, 4, 2, 20, 32, vocab_size=len(MODERNBERT_SPECIAL) + BYTES)  # global: first, last
        | {"local_attention": 8, "pad_token_id": 3},
        sized(18, 3, 3, 13, 41, global_rope_theta=700.0, local_rope_theta=30.0, norm_eps=1e-2)
        | {"local_attention": 7}  # of which the half is 3
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"hidden_activation": "gelu_pytorch_tanh", "classifier_activation": "silu"}
        | dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
        modernbert_bytes,
    ),
    "qwen3": Family(
        *classes("Qwen3", "CausalLM"),
        QWEN | {"head_dim": 6},  # so that all heads are wider than the hidden states
        DECODER_ODD
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 300.0}
        | {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        qwen_bytes,
    ),
    "qwen2": Family(
        "Qwen2Model",
        "Qwen2ForCausalLM",
        None,  # would score the token before the padding that its texts end with
        QWEN,
        sized(18, 3, 3, 37, 41, num_key_value_heads=1, rms_norm_eps=1e-2, is_causal=False),
        partial(qwen_bytes, add_eos_token=True),  # as gte-Qwen2's
    ),
    "gemma": Family(
        *classes("Gemma", "CausalLM"),
        WIDE | {"vocab_size": len(word_pieces(GEMMA_SPECIAL)[0]) + 1},
        DECODER_ODD
        | {"attention_bias": True, "hidden_act": "silu", "is_causal": False}
        | {"rope_parameters": LINEAR},
        gemma_words,
    ),
    "gemma2": Family(
        *classes("Gemma2", "CausalLM"),
        WIDE
        | {"vocab_size": len(word_pieces(GEMMA_SPECIAL)[0]), "sliding_window": 12}
        # for scores that the cap changes
        | {"query_pre_attn_scalar": 6, "attn_logit_softcapping": 1.5},
        DECODER_ODD
        | {"sliding_window": 7, "query_pre_attn_scalar": 50, "attn_logit_softcapping": 0.7}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"attention_bias": True, "hidden_activation": "silu", "is_causal": False}
        | {"rope_parameters": LINEAR},
        gemma_pieces,
    ),
    "gemma3": Family(
        "Gemma3TextModel",
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        WIDE
        | {"vocab_size": len(word_pieces(GEMMA_SPECIAL)[0]), "sliding_window": 12}
        | {"sliding_window_pattern": 2, "use_bidirectional_attention": True}
        | {"query_pre_attn_scalar": 48},  # large, for scores of the size that trained ones have
        DECODER_ODD
        | {"num_key_value_heads": 3, "sliding_window": 7, "sliding_window_pattern": 3}
        | {"query_pre_attn_scalar": 50, "use_bidirectional_attention": False}
        | {"attention_bias": True, "hidden_activation": "silu", "rope_theta": 300.0}
        | {"rope_local_base_freq": 30.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        gemma_pieces,
    ),
    "llama": Family(
        *classes("Llama", "CausalLM"),
        LLAMA | {"max_position_embeddings": 48, "rope_parameters": LLAMA3_ROPE},
        DECODER_ODD
        | {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True, "is_causal": False},
        llama_bytes,
    ),
    "mistral": Family(
        *classes("Mistral", "CausalLM"),
        WIDE
        | {"vocab_size": len(word_pieces(MISTRAL_SPECIAL)[0]), "sliding_window": 6}
        | {"pad_token_id": 0},
        DECODER_ODD | {"num_key_value_heads": 3, "sliding_window": None, "rope_parameters": YARN},
        mistral_pieces,
    ),
    "ministral3": Family(
        "Ministral3Model",
        "Ministral3ForCausalLM",
        None,  # scores as Mistral does
        LLAMA | {"head_dim": 6, "max_position_embeddings": 64, "rope_parameters": MINISTRAL_ROPE},
        sized(15, 3, 3, 37, num_key_value_heads=1, head_dim=10, sliding_window=9, is_causal=False),
        llama_bytes,
    ),
    "eurobert": Family(
        *classes("EuroBert"),
        LLAMA | {"num_key_value_heads": 4, "classifier_pooling": "bos"},
        sized(18, 3, 3, 37, 41, num_key_value_heads=1, rms_norm_eps=1e-2)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
        | {"attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"},
        # an end after each text, which is padding, too
        partial(llama_bytes, end=" <|end_of_text|>"),
    ),
    "t5": Family(
        "T5EncoderModel",
        "T5ForConditionalGeneration",
        None,  # T5ForSequenceClassification takes the decoder's hidden states
        # its own names, but for those of sizes; the tower reads no max_position_embeddings
        {"vocab_size": len(T5_PIECES), "hidden_size": 16, "num_layers": 2, "num_decoder_layers": 1}
        | {"num_heads": 2, "d_kv": 4, "d_ff": 32, "max_position_embeddings": 32}
        | {"relative_attention_max_distance": 20, "is_encoder_decoder": False},
        # version 1.1, with a scale of queries that is no power of two
        {"hidden_size": 15, "num_layers": 3, "num_heads": 3, "d_kv": 6, "d_ff": 37}
        | {"feed_forward_proj": "gated-gelu", "max_position_embeddings": 41}
        | {"relative_attention_num_buckets": 13, "relative_attention_max_distance": 17}
        | {"layer_norm_epsilon": 1e-2},
        t5_unigram,
    ),
}
