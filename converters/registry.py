"""Which family converts a model, by its config.json. Families are loaded when they are needed."""

from importlib import import_module
from typing import Any

from converters.family import Family

CONVERTERS: dict[str, str] = {
    "albert": "converters.families.albert",
    "bert": "converters.families.bert",
    "camembert": "converters.families.roberta",
    "deberta-v2": "converters.families.deberta",
    "distilbert": "converters.families.distilbert",
    "electra": "converters.families.electra",
    "eurobert": "converters.families.eurobert",
    "gemma2": "converters.families.gemma2",
    "gemma3_text": "converters.families.gemma3",
    "gte": "converters.families.gte",
    "jina_embeddings_v3": "converters.families.jina",
    "llama": "converters.families.llama",
    "llama_bidirec": "converters.families.llama",
    "ministral3": "converters.families.ministral3",
    "mistral": "converters.families.mistral",
    "modernbert": "converters.families.modernbert",
    "mpnet": "converters.families.mpnet",
    "new": "converters.families.gte",
    "nomic_bert": "converters.families.nomic_bert",
    "qwen2": "converters.families.qwen2",
    "qwen3": "converters.families.qwen3",
    "roberta": "converters.families.roberta",
    "t5": "converters.families.t5",
    "xlm-roberta": "converters.families.roberta",
}

# Families whose configs have the model_type of another one.
VARIANTS = {"bert": "converters.families.jina_bert", "xlm-roberta": "converters.families.jina"}


def family_of_type(kind: str) -> Family:
    """The family of a model_type, of which a config may be a variant."""
    return import_module(CONVERTERS[kind]).FAMILY


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a config, whose model_type is one of CONVERTERS."""
    kind = hf["model_type"]
    if kind in VARIANTS:
        variant: Family = import_module(VARIANTS[kind]).FAMILY
        if variant.is_variant(hf):
            return variant
    return family_of_type(kind)
