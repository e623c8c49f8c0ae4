"""Defines a family of models: all that the converter does differently from family to family. Finds
the family of a config, whose module is imported when it is needed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from converters import weights
from converters.heads import Projection
from converters.weights import Rule, Tensor
from jaxembed.data.spec import ImageRules, Listwise, Module, PairTemplate, Pooled, Vocabulary

ADAPTERS = "adapters"  # the folder of the adapters that belong to a model, one for each task

Fields = dict[str, Any]  # the content of a config.json, or the fields of a backbone's config


# A head and the rules for its tensors. The first is for logits of labels, the second for the logits
# of a masked language model. The third has only the modules before a token's logits of labels.
Scorer = tuple[Pooled, tuple[Rule, ...]]
SparseHead = tuple[Vocabulary, tuple[Rule, ...]]
TokenModules = tuple[tuple[Module, ...], tuple[Rule, ...]]


@dataclass(frozen=True)
class Reranker:
    """The published rerankers of a family, whose checkpoints lack their template."""

    name: str  # words in the names of these models, in lower case
    quote: str  # words in their README.md, which also identify them
    template: PairTemplate
    # Tokens: the score is the logit of the first, less that of the second if there is one. Empty: a
    # head gives the score, and every model of the family is such a reranker.
    answers: tuple[str, ...] = ("yes", "no")


@dataclass(frozen=True)
class BuiltIn:
    """Adapters among the model's own tensors, as in Jina v3: one for each task. For every weight
    there are two more tensors, which stack the factors of all adapters."""

    names: tuple[str, ...]
    rank: int
    scale: float
    prompts: Mapping[str, str]  # the prompt of each adapter, by its name


@dataclass(frozen=True)
class Images:
    """How a family's models take images beside texts: with the backbone "pages"."""

    config: Fields  # fields of its config, besides those of a backbone of texts
    rules: tuple[Rule, ...]  # for the parameters of the image encoder
    # with the tokens directly around an image; the chat template adds others
    image: ImageRules


@dataclass(frozen=True, kw_only=True)
class TensorRules:
    """How the tensors of a model become parameters."""

    rules: Sequence[Rule] = ()  # rules for the parameters; a family has those for its backbone
    ignored: Sequence[str] = ()  # patterns of names of unused tensors
    prefixes: Sequence[str] = ()  # that are removed from a tensor's name, one after the other
    renames: Mapping[str, str] = field(default_factory=dict)  # old ending of a name -> new ending
    find: Callable[[Path], dict[str, Tensor]] = weights.find  # the tensors of a folder, by name


@dataclass(frozen=True, kw_only=True)
class Family(TensorRules):
    """A family of models. Its functions get the content of config.json as `hf`. They raise
    UnsupportedModel for what is not supported, and CheckpointError for missing or inconsistent
    fields."""

    architecture: str  # name of the backbone, a key of ARCHITECTURES in jaxembed.models
    classes: tuple[str, ...]  # classes of transformers that embed
    config: Callable[[Fields], Fields]  # hf -> the fields of the backbone's config
    classifiers: tuple[str, ...] = ()  # classes that score, with the head of `classifier`
    classifier: Callable[[Fields, int], Scorer] | None = None  # hf, number of labels -> the head
    token_classifiers: tuple[str, ...] = ()  # classes with logits of labels for each token
    # hf -> what their head computes from a hidden state before the layer `classifier`
    token_modules: Callable[[Fields], TokenModules] = lambda hf: ((), ())
    generators: tuple[str, ...] = ()  # classes of language models, some of which are rerankers
    # hf, the backbone's config, ids of the answers -> the head of a reranker that is a generator
    score_head: Callable[..., Scorer] | None = None
    reranker: Reranker | None = None  # the published ones
    # rerankers that read the documents of a query together: class -> prompt
    listwise: Mapping[str, Listwise] = field(default_factory=dict)
    masked_lm: Callable[[Fields], SparseHead] | None = None  # hf -> the head of term weights
    sparse_classes: tuple[str, ...] = ()  # those of `classes` with a head of term weights
    # hf -> a linear layer that makes a vector of each token beside the pooled one, and the name of
    # its tensors without ".weight"
    token_vectors: Callable[[Fields], Projection | None] = lambda hf: None
    # a model's own code that the backbone reproduces, by its key in auto_map
    own_code: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # for a family in VARIANTS: whether hf, with another family's model_type, is of this family
    is_variant: Callable[[Fields], bool] = lambda hf: False
    # hf, the model's folder -> hf with fields that can only be read from the weights
    completed: Callable[[Fields, Path], Fields] = lambda hf, folder: hf
    config_rules: Callable[[Fields], Sequence[Rule]] = lambda hf: ()  # hf -> further rules
    built_in: Callable[[Fields], BuiltIn | None] = lambda hf: None  # hf -> own adapters
    # for a family with a head after each of several layers: hf, whose cutoff_layer may name one ->
    # patterns of the tensors above that layer
    unused: Callable[[Fields], Sequence[str]] | None = None
    # hf -> the names of adapters in the folder ADAPTERS; without one the model is not meant to run
    tasks: Callable[[Fields], Sequence[str]] = lambda hf: ()
    # hf, the backbone's width -> a linear layer of the model's own code behind its last norm
    projection: Callable[[Fields, int], Projection | None] = lambda hf, width: None
    # prompts by name, and the name of the default one, of a model whose code has them
    prompts: tuple[Mapping[str, str], str] | None = None
    # for embedders that put texts into their chat template: the system message of a text without a
    # prompt, and the text that stands for an empty one; and the template if the model's code has it
    chat: tuple[str, str] | tuple[str, str, str] | None = None
    # for embedders whose code puts fixed texts around each text: hf -> those before and after it
    frame: Callable[[Fields], tuple[str, str]] | None = None
    # for models of images beside texts: a module with the function `images`, hf and the model's
    # folder -> Images; and a pattern of the image encoder's tensors, which other uses ignore
    images: tuple[str, str] | None = None


CONVERTERS: dict[str, str] = {
    "albert": "converters.families.albert",
    "bert": "converters.families.bert",
    "bidirectional_pplx_qwen3": "converters.families.qwen3",
    "camembert": "converters.families.roberta",
    "cost_wise_gemma": "converters.families.cost_wise_gemma",
    "deberta-v2": "converters.families.deberta",
    "distilbert": "converters.families.distilbert",
    "electra": "converters.families.electra",
    "eurobert": "converters.families.eurobert",
    "gemma": "converters.families.gemma",
    "gemma2": "converters.families.gemma2",
    "gemma3_text": "converters.families.gemma3",
    "gte": "converters.families.gte",
    "jina_embeddings_v3": "converters.families.jina",
    "jina_embeddings_v5": "converters.families.jina_v5",
    "llama": "converters.families.llama",
    "llama_bidirec": "converters.families.llama",
    "minicpm": "converters.families.minicpm",
    "ministral3": "converters.families.ministral3",
    "mistral": "converters.families.mistral",
    "modernbert": "converters.families.modernbert",
    "mpnet": "converters.families.mpnet",
    "new": "converters.families.gte",
    "nomic_bert": "converters.families.nomic_bert",
    "qwen2": "converters.families.qwen2",
    "qwen2_5_vl": "converters.families.jina_v4",
    "qwen2_vl": "converters.families.qwen2_vl",
    "qwen3": "converters.families.qwen3",
    "qwen3_vl": "converters.families.qwen3_vl",
    "roberta": "converters.families.roberta",
    "t5": "converters.families.t5",
    "xlm-roberta": "converters.families.roberta",
}

# Families whose configs have the model_type of another family, by this model_type.
VARIANTS = {
    "bert": ("converters.families.jina_bert",),
    "qwen2_vl": ("converters.families.gme", "converters.families.dse"),
    "xlm-roberta": ("converters.families.jina",),
}


def brings(hf: Fields, codes: Collection[str]) -> bool:
    """Return whether auto_map in a config names one of these codes for embedding."""
    named = hf.get("auto_map")
    return isinstance(named, dict) and named.get("AutoModel") in codes


def family_of_type(kind: str) -> Family:
    """Return the family of a model_type of CONVERTERS. Variants are not considered."""
    return import_module(CONVERTERS[kind]).FAMILY


def family_of(hf: dict[str, Any]) -> Family:
    """Return the family of a config whose model_type is in CONVERTERS: a variant or its own."""
    kind = hf["model_type"]
    variants: Iterable[Family] = (import_module(one).FAMILY for one in VARIANTS.get(kind, ()))
    own = next((variant for variant in variants if variant.is_variant(hf)), None)
    return own or family_of_type(kind)
