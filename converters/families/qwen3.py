"""Converts Qwen3 from transformers 4 and 5: its config and its reranker's template.

It also converts voyage-4-nano and pplx-embed-v1, whose own code is Qwen3 without the causal mask,
and jina-reranker-v3, whose own code puts a projector behind Qwen3.
"""

from typing import Any

from converters.families.decoders import decoder_config, decoder_family, is_causal, window_fields
from converters.family import Reranker
from converters.features.scores import labels_of
from converters.fields import LOCAL_LAYER, layers_of_kind
from converters.heads import Projection
from jaxembed.data.spec import DenseLayer, Listwise, PairTemplate
from jaxembed.errors import UnsupportedModel

HEAD_WIDTH = 128  # default head_dim of every Qwen3
# The code of voyage-4-nano and pplx-embed-v1, which is never run.
VOYAGE = "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"
PPLX = "modeling.PPLXQwen3Model"
JINA = "JinaForRanking"  # the class of jina-reranker-v3, and in modeling.py its code

# From jina-reranker-v3's modeling.py: format_docs_prompts_func, rerank.
JINA_PROMPT = Listwise(
    head="<|im_start|>system\nYou are a search relevance expert who can determine a ranking of "
    "the passages based on how relevant they are to the query. If the query is a question, how "
    "relevant a passage is depends on how well it answers the question. If not, try to analyze the "
    "intent of the query and assess how well each passage satisfies the intent. If an instruction "
    "is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
    "<|im_start|>user\nI will provide you with {count} passages, each indicated by a numerical "
    "identifier. Rank the passages based on their relevance to query: {query}\n",
    instructed="<instruct>\n{instruction}\n</instruct>\n",
    document='<passage id="{index}">\n{document}',
    between="\n</passage>\n",
    query="\n</passage>\n<query>\n{query}",
    tail="\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    document_token="<|embed_token|>",
    query_token="<|rerank_token|>",
    block_documents=125,
    query_length=512,
    document_length=2048,
)


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    bias = bool(hf.get("attention_bias", False))
    causal = is_causal(hf, otherwise=_own_code(hf) not in (VOYAGE, PPLX))
    fields = decoder_config(hf, hf.get("head_dim") or HEAD_WIDTH, causal=causal)
    if JINA in (hf.get("architectures") or ()) and layers_of_kind(hf, LOCAL_LAYER):
        raise UnsupportedModel(
            f"{JINA} with a sliding window, as in jina-reranker-v3.5, is not supported; known: "
            "jina-reranker-v3"
        )
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
    listwise={JINA: JINA_PROMPT},
    own_code={"AutoModel": (VOYAGE, PPLX), "listwise": (f"modeling.{JINA}",)},
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
