"""RoBERTa, XLM-R and CamemBERT from transformers: BERT with other positions and
another head."""

from typing import Any

from converters import bert
from converters.scores import Scorer
from jaxembed.errors import CheckpointError

ARCHITECTURE = bert.ARCHITECTURE

_NAMES = ("Camembert", "Roberta", "XLMRoberta")
CLASSES = tuple(f"{name}{kind}" for name in _NAMES for kind in ("Model", "ForMaskedLM"))
CLASSIFIERS = tuple(f"{name}ForSequenceClassification" for name in _NAMES)

PREFIXES = ("roberta.",)
RENAMES = bert.RENAMES
RULES = bert.RULES

# The training heads and the pooler take no part in an embedding, the pooler in no score either.
IGNORED = [
    "embeddings.position_ids",
    "pooler.dense.*",
    "lm_head.*",
    "classifier.dense.*",
    "classifier.out_proj.*",
]


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """RobertaConfig's fields from config.json. Raises UnsupportedModel for what we do not run."""
    fields = bert.config(hf)
    pad = hf.get("pad_token_id", 1)
    if not isinstance(pad, int) or not 0 <= pad < fields["max_positions"] - 1:
        raise CheckpointError(
            f"config.json: pad_token_id is {pad!r}, wanted a number from 0 that leaves some of the "
            f"{fields['max_positions']} positions, which begin after it"
        )
    return fields | {"pad_id": pad}


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """RobertaClassificationHead: on the first token, a dense layer, tanh, and the logits."""
    return bert.two_layers(hf["hidden_size"], labels, "classifier.dense", "classifier.out_proj")
