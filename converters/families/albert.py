"""Converts ALBERT from transformers: BERT with few layers, each of which runs several times."""

from typing import Any

from converters.families import bert
from converters.family import Family
from converters.features.terms import masked_lm_function
from converters.fields import require
from converters.weights import Rule, concatenate, concatenate_transposed, transpose
from jaxembed.errors import CheckpointError

MAPPING = "encoder.embedding_hidden_mapping_in"
DEFAULTS = {  # transformers' defaults where they differ from BERT's
    "embedding_size": 128,
    "hidden_act": "gelu_new",
    "num_hidden_groups": 1,
    "inner_group_num": 1,
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. `layer_order` lists the layers' numbers in the
    order in which they run, each several times. Raises UnsupportedModel and CheckpointError."""
    hf = DEFAULTS | hf
    require(hf, ("embedding_size", "num_hidden_groups", "inner_group_num"))
    fields = bert.config(hf)
    # each run passes through one group of `inner` layers
    runs, groups, inner = hf["num_hidden_layers"], hf["num_hidden_groups"], hf["inner_group_num"]
    if groups > runs:
        raise CheckpointError(
            f"config.json: num_hidden_groups is {groups}; wanted 1 to {runs} groups, which is "
            "num_hidden_layers"
        )
    # the first layer of each run's group, rounded as in transformers
    first_layers = [int(run / (runs / groups)) * inner for run in range(runs)]
    return fields | {
        "num_layers": groups * inner,
        "embedding_size": hf["embedding_size"],
        "layer_order": [layer + n for layer in first_layers for n in range(inner)],
    }


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """Return the tensor rules of all layers. The numbers of layers go on from group to group."""
    hf = DEFAULTS | hf
    group_size = hf["inner_group_num"]
    return [
        rule
        for layer in range(hf["num_hidden_groups"] * group_size)
        for rule in _layer_rules(
            f"encoder.albert_layer_groups.{layer // group_size}.albert_layers.{layer % group_size}",
            f"tower.layers.{layer}",
        )
    ]


def _layer_rules(layer: str, target: str) -> list[Rule]:
    """Return the rules of one layer: `layer` prefixes its tensors, `target` its parameters."""
    attention = f"{layer}.attention"
    qkv = [f"{attention}.{part}" for part in ("query", "key", "value")]
    return [
        Rule(
            tuple(f"{name}.weight" for name in qkv),
            f"{target}.attention.qkv.kernel",
            concatenate_transposed,
        ),
        Rule(tuple(f"{name}.bias" for name in qkv), f"{target}.attention.qkv.bias", concatenate),
        Rule(f"{attention}.dense.weight", f"{target}.attention.out.kernel", transpose),
        Rule(f"{attention}.dense.bias", f"{target}.attention.out.bias"),
        Rule(f"{attention}.LayerNorm.weight", f"{target}.attention_norm.scale"),
        Rule(f"{attention}.LayerNorm.bias", f"{target}.attention_norm.bias"),
        Rule(f"{layer}.ffn.weight", f"{target}.mlp.up.kernel", transpose),
        Rule(f"{layer}.ffn.bias", f"{target}.mlp.up.bias"),
        Rule(f"{layer}.ffn_output.weight", f"{target}.mlp.down.kernel", transpose),
        Rule(f"{layer}.ffn_output.bias", f"{target}.mlp.down.bias"),
        Rule(f"{layer}.full_layer_layer_norm.weight", f"{target}.mlp_norm.scale"),
        Rule(f"{layer}.full_layer_layer_norm.bias", f"{target}.mlp_norm.bias"),
    ]


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("AlbertModel", "AlbertForMaskedLM", "AlbertForPreTraining"),
    classifiers=("AlbertForSequenceClassification",),
    prefixes=("albert.",),
    rules=(  # rules for the embeddings; config_rules returns the rules for the layers
        *(rule for rule in bert.FAMILY.rules if rule.target.startswith("tower.embeddings.")),
        Rule(f"{MAPPING}.weight", "tower.embeddings.projection.kernel", transpose),
        Rule(f"{MAPPING}.bias", "tower.embeddings.projection.bias"),
    ),
    # embeddings do not use these tensors
    ignored=(
        "embeddings.position_ids",
        "pooler.*",
        "predictions.*",
        "sop_classifier.*",
        "classifier.*",
    ),
    config=config,
    config_rules=config_rules,
    classifier=bert.two_layer_classifier("pooler", "classifier"),
    masked_lm=masked_lm_function(  # AlbertMLMHead; it projects to the width of the embeddings
        defaults=DEFAULTS,
        features="embedding_size",
        dense="predictions.dense",
        norms=("predictions.LayerNorm",),
        decoder="predictions.decoder",
        biases=("predictions.bias",),
    ),
)
