"""Converts Qwen3-VL-Embedding and Qwen3-VL-Reranker: Qwen3 with an image encoder."""

from pathlib import Path
from typing import Any

from converters.families.decoders import decoder_config, decoder_family, head_width_of
from converters.families.rope import rope_fields
from converters.family import Reranker
from converters.fields import CONFIG_FIELDS, check_fields, given, refuse_unknown
from jaxembed.data.spec import PairTemplate

TEXT = "qwen3_vl_text"
# transformers' defaults for missing fields of text_config.
TEXT_DEFAULTS: dict[str, Any] = {"head_dim": 128}
THETA = 500_000.0
MROPE_KEYS = ("mrope_section", "mrope_interleaved")  # of no effect on texts
EMPTY = "NULL"


def flattened(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `hf` with the fields of its text_config. Raises UnsupportedModel for another kind of
    language model, and CheckpointError for a field of a wrong type."""
    text = given(hf.get("text_config") or {})
    check_fields(f"{folder / 'config.json'}, text_config", text, CONFIG_FIELDS)
    refuse_unknown("text_config of model_type", text.get("model_type", TEXT), (TEXT,))
    return TEXT_DEFAULTS | text | hf


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json with the fields of its text_config to Qwen3Config fields. Raises
    UnsupportedModel and CheckpointError."""
    width, bias = head_width_of(hf), bool(hf.get("attention_bias", False))
    rope = rope_fields(hf, width, THETA, MROPE_KEYS)
    fields = decoder_config(hf, width, causal=True, rope=rope)
    return fields | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


FAMILY = decoder_family(
    classes=("Qwen3VLModel",),
    generators=("Qwen3VLForConditionalGeneration",),
    prefixes=("model.", "language_model.", "model."),
    images=("converters.vision.qwen3_vl", "visual.*"),
    completed=flattened,
    config=config,
    # From the authors' qwen3_vl_embedding.py.
    chat=("Represent the user's input.", EMPTY),
    # From the authors' qwen3_vl_reranker.py. Tokens can span ">:" and a document.
    reranker=Reranker(
        name="qwen3-vl-reranker",
        quote="Judge whether the Document meets the requirements based on the Query and the "
        "Instruct provided.",
        template=PairTemplate(
            prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on "
            'the Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n",
            first="<Instruct>: {instruction}<Query>:{query}\n<Document",
            second=">:{document}",
            suffix="<|im_end|>\n<|im_start|>assistant\n",
            instruction="Given a search query, retrieve relevant candidates that answer the query.",
            empty=EMPTY,
        ),
    ),
)
