"""Converts jina-embeddings-v4: Qwen2.5-VL with adapters for tasks, which makes one vector of a text
or image, and vectors of its tokens."""

from functools import partial
from typing import Any

from converters.families.decoders import decoder_family, flattened
from converters.families.jina_v5 import tasks
from converters.families.qwen2_vl import LM_DEFAULTS, text_config
from converters.fields import refuse_unknown
from converters.heads import Projection
from jaxembed.data.spec import DenseLayer

# From the authors' modeling_jina_embeddings_v4.py and configuration_jina_embeddings_v4.py.
CLASS = "JinaEmbeddingsV4Model"
MAX_TOKENS = 32_768  # of a text
PROMPTS = {"query": "Query: ", "passage": "Passage: "}
VECTOR_WIDTH = 128  # of a token


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json with the fields of its text_config to Qwen3Config fields. Raises
    UnsupportedModel and CheckpointError."""
    pooling = hf.get("single_vector_pool_strategy", "mean")
    refuse_unknown("single_vector_pool_strategy", pooling, ("mean",))
    fields = text_config(hf)
    return fields | {"max_positions": min(fields["max_positions"], MAX_TOKENS)}


def token_vectors(hf: dict[str, Any]) -> Projection:
    """Return the layer that makes a vector of each token, and the name of its tensors."""
    width = hf.get("multi_vector_projector_dim", VECTOR_WIDTH)
    return DenseLayer(hf["hidden_size"], width, activation="identity"), "multi_vector_projector"


FAMILY = decoder_family(
    classes=(CLASS,),
    own_code={
        "AutoModel": tuple(
            f"{repo}modeling_jina_embeddings_v4.{CLASS}"
            for repo in ("", "jinaai/jina-embeddings-v4--")
        )
    },
    prefixes=("model.", "language_model.", "model."),
    images=("converters.vision.jina_v4", "visual.*"),
    completed=partial(flattened, kinds=("qwen2_5_vl_text", "qwen2_5_vl"), defaults=LM_DEFAULTS),
    config=config,
    token_vectors=token_vectors,
    tasks=tasks,
    prompts=(PROMPTS, "query"),
)
