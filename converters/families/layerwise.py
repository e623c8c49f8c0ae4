"""What the converters of BAAI's layerwise rerankers share. These models have a head for each of
their upper layers. One layer and its head are converted; the layers above are left out."""

from typing import Any

from converters.family import Scorer
from converters.fields import refuse_unknown
from converters.heads import parameter_of
from converters.weights import Rule, transpose
from jaxembed.data.spec import DenseLayer, Pooled

KERNEL = parameter_of("logits", number=0, name="kernel")


def layers_with_heads(hf: dict[str, Any], start: int, step: int) -> range:
    """Return the numbers of layers with a head after them: from start_layer, or `start`, in steps
    of layer_sep, or `step`."""
    first, apart = hf.get("start_layer", start), hf.get("layer_sep", step)
    return range(first, hf["num_hidden_layers"] + 1, apart)


def cut(hf: dict[str, Any], heads: range) -> dict[str, Any]:
    """Return the config of a model without the layers above cutoff_layer; without cutoff_layer all
    layers stay. Raises UnsupportedModel if there is no head after the last layer that stays."""
    layers = hf["num_hidden_layers"]
    count = layers if hf.get("cutoff_layer") is None else hf["cutoff_layer"]
    refuse_unknown("cutoff layer", count, heads)
    kinds = hf.get("layer_types")
    return hf | {"num_hidden_layers": count, "layer_types": kinds and kinds[:count]}


def head_after(layer: int, heads: range, width: int) -> Scorer:
    """Return the head after a layer, which is linear, and its tensor rules. `width` is that of the
    backbone."""
    linear = DenseLayer(width, 1, bias=False, activation="identity")
    name = f"lm_head.{heads.index(layer)}.linear_head.weight"
    return Pooled(("lasttoken",), (linear,)), (Rule(name, KERNEL, transpose),)


def unused(hf: dict[str, Any], heads: range) -> list[str]:
    """Return patterns of the tensors above cutoff_layer, and of the other heads."""
    last = cut(hf, heads)["num_hidden_layers"]
    return [
        *(f"layers.{number}.*" for number in range(last, hf["num_hidden_layers"])),
        *(f"lm_head.{number}.*" for number, layer in enumerate(heads) if layer != last),
    ]
