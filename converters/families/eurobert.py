"""Converts EuroBERT from transformers 5 and its own code: Llama's layers without causal mask."""

from typing import Any

from converters.families.bert import two_layer_head
from converters.families.decoders import decoder_family
from converters.families.llama import llama_config
from converters.family import Scorer
from converters.fields import lookup
from jaxembed.data.spec import Pooling
from jaxembed.errors import UnsupportedModel

_REPOS = ("", *(f"EuroBERT/EuroBERT-{size}--" for size in ("210m", "610m", "2.1B")))
_MODEL, _CLASSIFIER = (
    tuple(f"{repo}modeling_eurobert.EuroBert{name}" for repo in _REPOS)
    for name in ("Model", "ForSequenceClassification")
)

# "late" is missing, because this mean of the logits of all tokens needs the head before the pooling
POOLINGS_OF_CLASSES: dict[str, Pooling] = {"bos": "cls", "mean": "mean"}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    if hf.get("is_causal"):
        raise UnsupportedModel("is_causal=true is not supported: EuroBERT is an encoder")
    return llama_config({"rms_norm_eps": 1e-5} | hf, causal=False)


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """Return the head of EuroBertForSequenceClassification and its tensor rules. It computes
    classifier(gelu(dense(pooled))). Raises UnsupportedModel for an unknown pooling, and for
    the default, late."""
    name = hf.get("classifier_pooling", "late")
    pooling = lookup("classifier_pooling", name, POOLINGS_OF_CLASSES)
    return two_layer_head(
        hf["hidden_size"], labels, "dense", "classifier", activation="gelu", pooling=pooling
    )


FAMILY = decoder_family(
    classes=("EuroBertModel", "EuroBertForMaskedLM"),
    classifiers=("EuroBertForSequenceClassification",),
    own_code={"AutoModel": _MODEL, "AutoModelForSequenceClassification": (*_MODEL, *_CLASSIFIER)},
    # embeddings do not use these tensors
    ignored=("lm_head.*", "dense.*", "classifier.*"),
    config=config,
    classifier=classifier,
)
