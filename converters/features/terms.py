"""Reads sparse encoders: a masked language model's head, and how its logits become weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from converters.family import Fields, TermHead
from converters.fields import activation_of, refuse_unknown
from converters.heads import (
    MODEL_CONFIG,
    Layout,
    dense_rules,
    module_config,
    modules_of,
    parameter_of,
    read_optional_json,
    read_prompts,
    refuse_chat_template,
    transformer_config,
)
from converters.weights import Rule, padded, transposed_padded, zeros
from jaxembed.data.spec import Activation, DenseLayer, LayerNormLayer, Vocabulary
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models.heads import padded_terms

SPARSE_ENCODER = "SparseEncoder"  # the class of sentence-transformers

# What the config.json of a SpladePooling may hold; chunk_size only divides the work.
WIDTHS = ("embedding_dimension", "word_embedding_dimension")
CHOICES = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu", "log1p_relu")}


def transform_layers(
    width: int, activation: Activation, eps: float, *, features: int | None = None
) -> tuple[DenseLayer, LayerNormLayer]:
    """The layers before the decoder of BERT and its relatives, from hidden states of `width` to as
    many `features`, or others."""
    features = features or width
    dense = DenseLayer(in_features=width, out_features=features, activation=activation)
    return dense, LayerNormLayer(features=features, eps=eps)


def term_head(
    hf: dict[str, Any],
    layers: tuple[DenseLayer, LayerNormLayer],
    *,
    dense: str,
    norms: Sequence[str],
    decoder: str,
    biases: Sequence[str] = (),
    tied: str = "embeddings.word_embeddings.weight",
    bias: bool = True,
) -> TermHead:
    """The head of a masked language model with these layers before its decoder.

    `dense`, `norms` and `decoder` are the tensors' names without ".weight" and ".bias", of which a
    norm may have several. Unless tie_word_embeddings is false, the decoder's bias may have one of
    the names `biases` too, and the table `tied` is the decoder where none is stored. Without `bias`
    the decoder has none.
    """
    terms, total = hf["vocab_size"], padded_terms(hf["vocab_size"])
    head = Vocabulary(terms, layers[1].features, layers)
    tables, names = [f"{decoder}.weight"], [f"{decoder}.bias"]
    if hf.get("tie_word_embeddings") is not False:
        tables.append(tied)
        names = [*biases, *names]  # one and the same; else only the decoder's own is added
    table = transposed_padded(terms, total)
    rules = [*dense_rules("sparse", 0, layers[0], dense)]
    for norm in norms:
        rules += [
            Rule(f"{norm}.weight", parameter_of("sparse", 1, "scale")),
            Rule(f"{norm}.bias", parameter_of("sparse", 1, "bias")),
        ]
    rules += [Rule(name, "heads.sparse.terms.kernel", table) for name in tables]
    if bias:
        rules += [Rule(name, "heads.sparse.bias", padded(terms, total)) for name in names]
    else:
        rules.append(Rule((), "heads.sparse.bias", zeros(total)))
    return head, tuple(rules)


def transforming(
    activation: Activation | None = None,
    *,
    defaults: Fields | None = None,
    features: str = "hidden_size",
    **tensors: Any,
) -> Callable[[Fields], TermHead]:
    """The `masked_lm` of a family like BERT: a dense layer with the activation, a norm, and the
    decoder.

    Without an `activation` it is that of hidden_act. `defaults` are those of config.json, and
    `features` is the key of the decoder's width there. `tensors` are as in `term_head`.
    """

    def masked_lm(hf: Fields) -> TermHead:
        hf = {**(defaults or {}), **hf}
        layers = transform_layers(
            hf["hidden_size"],
            activation or activation_of(hf, "hidden_act"),
            hf.get("layer_norm_eps", 1e-12),
            features=hf[features],
        )
        return term_head(hf, layers, **tensors)

    return masked_lm


def terms_layout(source: Path, found: TermHead, route: str = "") -> Layout:
    """The layout of a sparse encoder. Without modules.json it takes the maximum over the tokens, as
    sentence-transformers does. Raises UnsupportedModel and CheckpointError."""
    modules = modules_of(source, route)
    (head, rules), folder = found, ""
    if modules is not None:
        folder, pooling = modules[0].path, source / modules[1].path
        config = module_config(pooling)
        if unknown := sorted(set(config) - {*WIDTHS, *CHOICES, "chunk_size"}):
            raise UnsupportedModel(
                f"{pooling}: SpladePooling with {', '.join(unknown)} is not supported"
            )
        for key in WIDTHS:
            if config.get(key) not in (None, head.vocab_size):
                raise CheckpointError(
                    f"{pooling}: {key} is {config[key]}, the model's vocab_size {head.vocab_size}"
                )
        for key, known in CHOICES.items():
            config[key] = config.get(key) or known[0]
            refuse_unknown(f"{pooling}: {key}", config[key], known)
        head = msgspec.structs.replace(
            head, over_tokens=config["pooling_strategy"], activation=config["activation_function"]
        )
    tower = source / folder
    refuse_chat_template(tower)
    layout = sparse_layout(source, folder, head)
    lowercase = bool(transformer_config(tower).get("do_lower_case"))
    return replace(layout, rules=rules, lowercase=lowercase)


def sparse_layout(source: Path, folder: str, head: Vocabulary) -> Layout:
    """The layout of a model that gives weights of terms by a head, with the settings of
    config_sentence_transformers.json. `folder` is that of its weights."""
    prompts, default_prompt_name = read_prompts(source, SPARSE_ENCODER)
    most = read_optional_json(source / MODEL_CONFIG).get("max_active_dims")
    return Layout(
        tower=folder,
        heads={"sparse": msgspec.structs.replace(head, max_active=most)},
        prompts=prompts,
        default_prompt_name=default_prompt_name,
    )
