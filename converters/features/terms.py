"""Reads sparse encoders: the head of a masked language model, and how its logits become weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from converters.family import Fields, SparseHead
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
from converters.weights import Rule, constant, padded, transposed_padded
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
    """Return the layers before the decoder of models like BERT: a dense layer from `width` to
    `features`, which defaults to `width`, and a layer norm."""
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
) -> SparseHead:
    """Return the head of a masked language model with these `layers` before its decoder, and the
    rules for its tensors.

    `dense`, `norms` and `decoder` are names of tensors without ".weight" and ".bias"; `norms` are
    alternative names. Unless tie_word_embeddings is false, `biases` are further names of the
    decoder's bias, and the table `tied` is the decoder if the model stores no decoder. With `bias`
    False the decoder has no bias.
    """
    terms, total = hf["vocab_size"], padded_terms(hf["vocab_size"])  # without and with padding
    head = Vocabulary(terms, layers[1].features, layers)
    tables, names = [f"{decoder}.weight"], [f"{decoder}.bias"]
    if hf.get("tie_word_embeddings") is not False:
        tables.append(tied)
        names = [*biases, *names]  # alternative names of one bias
    transform = transposed_padded(terms, total)
    # the modules of the head: 0 is the dense layer, 1 the layer norm
    rules = [*dense_rules("sparse", 0, layers[0], dense)]
    for norm in norms:
        rules += [
            Rule(f"{norm}.weight", parameter_of("sparse", 1, "scale")),
            Rule(f"{norm}.bias", parameter_of("sparse", 1, "bias")),
        ]
    rules += [Rule(name, "heads.sparse.terms.kernel", transform) for name in tables]
    if bias:
        rules += [Rule(name, "heads.sparse.bias", padded(terms, total)) for name in names]
    else:
        rules.append(Rule((), "heads.sparse.bias", constant(0.0, total)))
    return head, tuple(rules)


def masked_lm_function(
    activation: Activation | None = None,
    *,
    defaults: Fields | None = None,
    features: str = "hidden_size",
    **tensors: Any,
) -> Callable[[Fields], SparseHead]:
    """Return the `masked_lm` function of a family like BERT. Its head is a dense layer with an
    activation, a layer norm and the decoder.

    If `activation` is None, hidden_act in config.json names it. `defaults` are default fields of
    config.json, and `features` is the key of the decoder's width there. `tensors` are further
    arguments of `term_head`.
    """

    def masked_lm(hf: Fields) -> SparseHead:
        hf = {**(defaults or {}), **hf}
        layers = transform_layers(
            hf["hidden_size"],
            activation or activation_of(hf, "hidden_act"),
            hf.get("layer_norm_eps", 1e-12),
            features=hf[features],
        )
        return term_head(hf, layers, **tensors)

    return masked_lm


def terms_layout(source: Path, found: SparseHead, route: str = "") -> Layout:
    """Return the layout of a sparse encoder. `found` is its head with the rules for its tensors.
    Without modules.json the head takes the maximum over the tokens, as sentence-transformers does.
    Raises UnsupportedModel and CheckpointError."""
    modules = modules_of(source, route)
    (head, rules), folder = found, ""
    if modules is not None:
        folder, module = modules[0].path, source / modules[1].path
        config = module_config(module)
        if unknown := sorted(set(config) - {*WIDTHS, *CHOICES, "chunk_size"}):
            raise UnsupportedModel(
                f"{module}: SpladePooling with {', '.join(unknown)} is not supported"
            )
        for key in WIDTHS:
            if config.get(key) not in (None, head.vocab_size):
                raise CheckpointError(
                    f"{module}: {key} is {config[key]}, the model's vocab_size {head.vocab_size}"
                )
        for key, known in CHOICES.items():
            config[key] = config.get(key) or known[0]  # the first is the default
            refuse_unknown(f"{module}: {key}", config[key], known)
        head = msgspec.structs.replace(
            head, over_tokens=config["pooling_strategy"], activation=config["activation_function"]
        )
    backbone = source / folder
    refuse_chat_template(backbone)
    layout = sparse_layout(source, folder, head)
    lowercase = bool(transformer_config(backbone).get("do_lower_case"))
    return replace(layout, rules=rules, lowercase=lowercase)


def sparse_layout(source: Path, folder: str, head: Vocabulary) -> Layout:
    """Return the layout of a sparse encoder with this head, and with the settings of
    config_sentence_transformers.json. `folder`, within `source`, has the weights of the model."""
    prompts, default_prompt_name = read_prompts(source, SPARSE_ENCODER)
    max_active = read_optional_json(source / MODEL_CONFIG).get("max_active_dims")
    return Layout(
        backbone=folder,
        heads={"sparse": msgspec.structs.replace(head, max_active=max_active)},
        prompts=prompts,
        default_prompt_name=default_prompt_name,
    )
