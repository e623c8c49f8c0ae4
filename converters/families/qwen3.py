"""Converts Qwen3 from transformers 4 and 5: its config and its reranker's template.

It also converts voyage-4-nano and pplx-embed-v1, whose own code is Qwen3 without the causal mask.
"""

from typing import Any

from converters.families.decoders import decoder_config, decoder_family, is_causal, window_fields
from converters.family import Reranker
from converters.features.scores import labels_of
from converters.heads import Projection
from jaxembed.data.spec import DenseLayer, PairTemplate

HEAD_WIDTH = 128  # default head_dim of every Qwen3
# The code of voyage-4-nano and pplx-embed-v1, which is never run.
VOYAGE = "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"
PPLX = "modeling.PPLXQwen3Model"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    bias = bool(hf.get("attention_bias", False))
    causal = is_causal(hf, otherwise=_own_code(hf) not in (VOYAGE, PPLX))
    fields = decoder_config(hf, hf.get("head_dim") or HEAD_WIDTH, causal=causal)
    return (
        fields
        | qwen_windows(hf, causal)
        | {
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": True,
        }
    )


def qwen_windows(hf: dict[str, Any], causal: bool) -> dict[str, Any]:
    """Return the window fields of Qwen3Config; empty without use_sliding_window. The layers with a
    window are those of layer_types, which transformers 5 writes, or else the layers from
    max_window_layers on. Raises UnsupportedModel for an unknown layer type, and CheckpointError if
    the window or layer_types is wrong."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first_layer = hf["num_hidden_layers"] if window is None else hf.get("max_window_layers", 28)
    return window_fields(hf, window, range(first_layer, hf["num_hidden_layers"]), causal)


def projection(hf: dict[str, Any], width: int) -> Projection | None:
    """Return the linear layer of voyage-4-nano's own code, from the backbone's width to num_labels;
    None for other models."""
    if _own_code(hf) != VOYAGE:
        return None
    layer = DenseLayer(width, len(labels_of(hf)), bias=False, activation="identity")
    return layer, "linear"


def _own_code(hf: dict[str, Any]) -> str | None:
    return (hf.get("auto_map") or {}).get("AutoModel")


FAMILY = decoder_family(
    classes=("Qwen3Model", "PPLXQwen3Model"),
    classifiers=("Qwen3ForSequenceClassification",),
    generators=("Qwen3ForCausalLM",),
    own_code={"AutoModel": (VOYAGE, PPLX)},
    config=config,
    projection=projection,
    # From the code in Qwen3-Reranker's README.
    reranker=Reranker(
        name="qwen3-reranker",
        quote="Judge whether the Document meets the requirements based on the Query and the "
        "Instruct provided.",
        template=PairTemplate(
            prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on "
            'the Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n",
            first="<Instruct>: {instruction}\n<Query>: {query}\n<Document>:",
            second=" {document}",
            suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            instruction="Given a web search query, retrieve relevant passages that answer the "
            "query",
        ),
    ),
)
