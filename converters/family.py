"""What a family of models is to the converter, everything that differs from family to family, and
which family converts a model. Families are loaded when they are needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from converters import weights
from converters.weights import Rule, Tensor
from jaxembed.data.spec import PairTemplate, Pooled, Vocabulary

Fields = dict[str, Any]  # the content of a config.json, or the fields of a tower's config


# A head and the rules for its tensors: that with which a family scores, and that of its masked
# language models.
Scorer = tuple[Pooled, tuple[Rule, ...]]
TermHead = tuple[Vocabulary, tuple[Rule, ...]]


@dataclass(frozen=True)
class Reranker:
    """The published rerankers of a family, whose checkpoints do not contain their template."""

    name: str  # lower case, within the name of the model
    quote: str  # or within its README.md
    template: PairTemplate
    answers: tuple[str, str] = ("yes", "no")  # the tokens whose logits are subtracted


@dataclass(frozen=True)
class BuiltIn:
    """The adapters of Jina v3, one for each task, beside every weight: two tensors hold all."""

    names: tuple[str, ...]
    rank: int
    scale: float
    prompts: Mapping[str, str]  # by the names of the adapters


@dataclass(frozen=True, kw_only=True)
class TensorRules:
    """How the tensors of a model become parameters."""

    rules: Sequence[Rule] = ()  # for the parameters; of a family, those of its tower
    ignored: Sequence[str] = ()  # patterns of tensors without a use
    prefixes: Sequence[str] = ()  # dropped from the front of a tensor's name, one after the other
    renames: Mapping[str, str] = field(default_factory=dict)  # what endings of a name become
    find: Callable[[Path], dict[str, Tensor]] = weights.find  # the tensors of a folder, by name


@dataclass(frozen=True, kw_only=True)
class Family(TensorRules):
    """A family of models. Functions of `hf` are given the content of config.json; they raise
    UnsupportedModel for what is not run, and CheckpointError for what is missing or makes no
    sense."""

    architecture: str  # of the tower, a key of ARCHITECTURES in jaxembed.models
    classes: tuple[str, ...]  # of transformers, those that embed
    config: Callable[[Fields], Fields]  # hf -> the fields of the tower's config
    classifiers: tuple[str, ...] = ()  # classes that score, with the head of `classifier`
    classifier: Callable[[Fields, int], Scorer] | None = None  # hf, number of labels -> their head
    generators: tuple[str, ...] = ()  # classes of language models, of which some are rerankers
    # hf, the tower's config, ids of yes and no -> the head of a reranker that is a generator
    score_head: Callable[[Fields, Fields, int, int], Scorer] | None = None
    reranker: Reranker | None = None  # the published ones, whose template is known
    masked_lm: Callable[[Fields], TermHead] | None = None  # hf -> the head whose logits weigh terms
    sparse_classes: tuple[str, ...] = ()  # of `classes`, whose classifier of tokens weighs terms
    # code that the tower computes alike, by the use for which auto_map names it
    own_code: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # of one in VARIANTS: whether hf, whose model_type is another's, is of this one
    is_variant: Callable[[Fields], bool] = lambda hf: False
    # hf, the folder -> hf with what only the weights tell
    completed: Callable[[Fields, Path], Fields] = lambda hf, folder: hf
    config_rules: Callable[[Fields], Sequence[Rule]] = lambda hf: ()  # hf -> further rules
    built_in: Callable[[Fields], BuiltIn | None] = lambda hf: None  # hf -> adapters of the model


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
