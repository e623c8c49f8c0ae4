"""Converts Qwen3 from transformers 4 and 5: its config, its heads and its tensor rules."""

from typing import Any

from converters.fields import activation_of, require
from converters.heads import parameter_of
from converters.rerankers import Reranker
from converters.rope import rope_fields, scaled_positions
from converters.scores import Scorer
from converters.weights import (
    Rule,
    concatenate,
    concatenate_transposed,
    difference_of_rows,
    transpose,
)
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.spec import DenseLayer, PairTemplate, Pooled

ARCHITECTURE = "qwen3"

CLASSES = ("Qwen3Model",)
CLASSIFIERS = ("Qwen3ForSequenceClassification",)
GENERATORS = ("Qwen3ForCausalLM",)

PREFIXES = ("model.",)
RENAMES: dict[str, str] = {}

LAYER = "layers.{i}"
SELF = f"{LAYER}.self_attn"
TARGET = "tower.layers.{i}"

RULES = [
    Rule("embed_tokens.weight", "tower.embeddings.word.embedding"),
    Rule(f"{LAYER}.input_layernorm.weight", f"{TARGET}.attention_norm.scale"),
    Rule(
        (f"{SELF}.q_proj.weight", f"{SELF}.k_proj.weight", f"{SELF}.v_proj.weight"),
        f"{TARGET}.attention.qkv.kernel",
        concatenate_transposed,
    ),
    Rule(
        (f"{SELF}.q_proj.bias", f"{SELF}.k_proj.bias", f"{SELF}.v_proj.bias"),
        f"{TARGET}.attention.qkv.bias",
        concatenate,
    ),
    Rule(f"{SELF}.q_norm.weight", f"{TARGET}.attention.query_norm.scale"),
    Rule(f"{SELF}.k_norm.weight", f"{TARGET}.attention.key_norm.scale"),
    Rule(f"{SELF}.o_proj.weight", f"{TARGET}.attention.out.kernel", transpose),
    Rule(f"{SELF}.o_proj.bias", f"{TARGET}.attention.out.bias"),
    Rule(f"{LAYER}.post_attention_layernorm.weight", f"{TARGET}.mlp_norm.scale"),
    Rule(
        (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
        f"{TARGET}.mlp.gate_up.kernel",
        concatenate_transposed,
    ),
    Rule(f"{LAYER}.mlp.down_proj.weight", f"{TARGET}.mlp.down.kernel", transpose),
    Rule("norm.weight", "tower.norm.scale"),
]

# The language model's head is not used for embeddings; files may hold it even if it is tied.
IGNORED = ["lm_head.weight"]

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
)

HEAD_WIDTH = 128  # default of every Qwen3, whatever its hidden_size

# From the code in Qwen3-Reranker's README.
RERANKER = Reranker(
    name="qwen3-reranker",
    quote="Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided.",
    template=PairTemplate(
        prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
        'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>'
        "\n<|im_start|>user\n",
        first="<Instruct>: {instruction}\n<Query>: {query}\n<Document>:",
        second=" {document}",
        suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
)


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of Qwen3Config from a config.json.

    Raises UnsupportedModel for settings that we do not run, and CheckpointError for missing or
    inconsistent ones.
    """
    bias = bool(hf.get("attention_bias", False))
    return decoder_config(hf, hf.get("head_dim") or HEAD_WIDTH) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "causal": is_causal(hf, True),
    }


def is_causal(hf: dict[str, Any], otherwise: bool) -> bool:
    """Whether config.json asks for causal attention; `otherwise` if it does not say."""
    value = hf.get("is_causal")
    return otherwise if value is None else bool(value)


def decoder_config(hf: dict[str, Any], head_width: int) -> dict[str, Any]:
    """Read the fields of Qwen3Config that are the same in Qwen2 and Qwen3.

    Raises UnsupportedModel and CheckpointError as `config` does.
    """
    require(hf, REQUIRED)
    if head_width % 2:
        raise CheckpointError(
            f"heads are {head_width} wide; wanted an even number, to rotate pairs"
        )
    heads, key_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    if heads % key_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}"
        )
    _refuse_windows(hf)
    rope = rope_fields(hf, head_width)
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_key_heads": key_heads,
        "head_width": head_width,
        "intermediate_size": hf["intermediate_size"],
        "max_positions": scaled_positions(hf, rope["rope_scaling"]),
        **rope,
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "activation": activation_of(hf, "hidden_act", "silu"),
    }


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """The head of transformers' GenericForSequenceClassification: one layer on the last token."""
    kernel = Rule("score.weight", parameter_of("logits", 0, "kernel"), transpose)
    return Scorer(Pooled(("lasttoken",), (_row_head(hf, labels),)), (kernel,))


def score_head(hf: dict[str, Any], config: dict[str, Any], true_id: int, false_id: int) -> Scorer:
    """A head that gives logit(true_id) - logit(false_id) at the last token.

    `hf` is the content of config.json, `config` that of the tower. Only these two rows of the
    language model's head are converted.
    """
    rows = "embed_tokens.weight" if hf.get("tie_word_embeddings") else "lm_head.weight"
    difference = difference_of_rows(true_id, false_id)
    kernel = Rule(rows, parameter_of("logits", 0, "kernel"), difference)
    return Scorer(Pooled(("lasttoken",), (_row_head(config, 1),)), (kernel,))


def _row_head(config: dict[str, Any], labels: int) -> DenseLayer:
    """A layer from the hidden state to the logits, without bias."""
    return DenseLayer(
        in_features=config["hidden_size"], out_features=labels, bias=False, activation="identity"
    )


def _refuse_windows(hf: dict[str, Any]) -> None:
    """Raise UnsupportedModel if some layers have a sliding window.

    transformers 5 writes layer_types; with version 4 the layers from max_window_layers on have one.
    """
    kinds = sorted({str(kind) for kind in hf.get("layer_types") or ()} - {"full_attention"})
    if kinds:
        raise UnsupportedModel(
            f"layer_types {', '.join(kinds)} are not supported; known: full_attention"
        )
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window") is not None
    if windowed and hf.get("max_window_layers", 28) < hf["num_hidden_layers"]:
        raise UnsupportedModel("use_sliding_window=true is not supported: every layer sees all")
