"""Converts Qwen3-VL-Embedding and Qwen3-VL-Reranker: Qwen3 with an image encoder."""

from functools import partial
from typing import Any

from converters.families.decoders import decoder_config, decoder_family, flattened, head_width_of
from converters.families.rope import mrope_sections, rope_fields, rope_parameters
from converters.family import Reranker
from jaxembed.data.spec import PairTemplate

# transformers' defaults for missing fields of text_config.
TEXT_DEFAULTS: dict[str, Any] = {"head_dim": 128}
THETA, ROPE_SECTIONS = 500_000.0, (24, 20, 20)
MROPE_KEYS = ("mrope_section", "mrope_interleaved")
EMPTY = "NULL"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json with the fields of its text_config to Qwen3Config fields. Raises
    UnsupportedModel and CheckpointError."""
    width, bias = head_width_of(hf), bool(hf.get("attention_bias", False))
    rope = rope_fields(hf, width, THETA, MROPE_KEYS)
    fields = decoder_config(hf, width, causal=True, rope=rope)
    sections = mrope_sections(rope_parameters(hf), ROPE_SECTIONS, width)
    return fields | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "rope_sections": sections,
        "rope_interleaved": True,
    }


FAMILY = decoder_family(
    classes=("Qwen3VLModel",),
    generators=("Qwen3VLForConditionalGeneration",),
    prefixes=("model.", "language_model.", "model."),
    images=("converters.vision.qwen_vl", "visual.*"),
    completed=partial(flattened, kinds=("qwen3_vl_text",), defaults=TEXT_DEFAULTS),
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
