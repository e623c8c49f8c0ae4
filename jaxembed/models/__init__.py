"""Backbones by name, and the model of a checkpoint as a pure function of its parameters."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import ImageRules, ModelSpec, Pooled, Quantize
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import adapters, native, static
from jaxembed.models.heads import HEADS, READ_ENDS
from jaxembed.models.parallel import Cut, divided
from jaxembed.models.quantized import QuantizedWeight
from jaxembed.models.tokens import WORD_BYTES, PackedTokens

ARCHITECTURES = {
    "bert": "jaxembed.models.bert:Bert",
    "clip": "jaxembed.models.clip:Clip",
    "deberta": "jaxembed.models.deberta:Deberta",
    "modernbert": "jaxembed.models.modernbert:ModernBert",
    "modernbert_pages": "jaxembed.models.pages:ModernBertPages",
    "pages": "jaxembed.models.pages:Pages",
    "qwen3": "jaxembed.models.qwen3:Qwen3",
    "t5": "jaxembed.models.t5:T5",
}

_EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in the names of the parameters of a routed expert


class Model(nnx.Module):
    """A backbone and the heads that compute the outputs from its hidden states."""

    def __init__(self, spec: ModelSpec):
        # checkpoints store the parameters as `tower.…`
        self.tower = tower_class(spec.architecture)(tower_config(spec))
        self.image = spec.image
        self.heads = nnx.Dict({name: HEADS[type(head)](head) for name, head in spec.heads.items()})
        adapters.attach(self, spec.adapters)

    def __call__(
        self, tokens: PackedTokens, outputs: Collection[OutputName]
    ) -> dict[OutputName, Array]:
        """Return the requested `outputs` by name. The output "tokens" is the hidden states."""
        if self.image is not None:
            assert tokens.pixels is not None
            tokens = replace(tokens, pixels=normalized_pixels(tokens.pixels, self.image))
        with adapters.chosen(tokens.adapters):
            with native.skipping_padding(tokens.segments):
                hidden = self.tower(tokens)
            # Use the order of OUTPUTS: the order of a set differs by process, which would change
            # the compiled program.
            return {
                name: hidden if name == "tokens" else self.heads[name](hidden, tokens)
                for name in OUTPUTS
                if name in outputs
            }


def normalized_pixels(
    pixels: UInt8[Array, "rows length values"], rules: ImageRules
) -> Float[Array, "rows length values"]:
    """Return pixel values as the backbone takes them: (value * rescale - mean) / std.

    `rules.mean` and `rules.std` have a value for each colour. The last axis of `pixels` holds the
    bytes of a token's patches, pixel by pixel, with the colours of a pixel side by side.
    """
    pixel_count = pixels.shape[-1] // len(rules.mean)
    mean, std = (
        jnp.tile(jnp.array(by_colour, jnp.float32), pixel_count)
        for by_colour in (rules.mean, rules.std)
    )
    scaled = pixels.astype(jnp.float32) * jnp.float32(rules.rescale)
    return (scaled - mean[None, None]) / std[None, None]


def tower_class(architecture: str) -> Any:
    """Return the class of a backbone in ARCHITECTURES. Raises UnsupportedModel for any other name,
    with a message that lists the supported names."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"architecture {architecture!r} is not supported; known: {known}")
    return resolve_name(ARCHITECTURES[architecture])


def tower_config(spec: ModelSpec) -> Any:
    """Build the config of the model's backbone. Raises UnsupportedModel for an unknown
    architecture, and CheckpointError if a field of the config is unknown or missing."""
    config_class = tower_class(spec.architecture).Config
    try:
        return config_class(**spec.config)
    except TypeError as error:  # the message of the error names the field
        raise CheckpointError(
            f"the {spec.architecture} config of this checkpoint, written by "
            f"{spec.written_by or 'an early jaxembed'}, does not fit this version of jaxembed "
            f"({str(error).partition(' ')[2]}): upgrade jaxembed, or convert the model again with "
            "this version"
        ) from error


def position_limit(spec: ModelSpec) -> int | None:
    """Return the maximum tokens of a sequence in the backbone, or None if there is no limit. Raises
    UnsupportedModel or CheckpointError if `tower_config` cannot build the config."""
    if spec.is_static:
        return None
    return tower_class(spec.architecture).position_limit(tower_config(spec))


@dataclass(frozen=True)
class Program:
    """A model as a pure function, with the names and shapes of its parameters.

    `forward(parameters, planes, slots, outputs)` returns float32 arrays by the name of the output:
    `[rows, slots, width]`, or `[rows, length, width]` for an output per token. It computes only the
    requested `outputs`, and normalizes none of them. `planes` is a batch as `PackedTokens.unstack`
    takes it, and `slots` is the number of slots of each row. `slots` and `outputs` are static:
    each combination of the two is compiled separately.

    The field `shapes` holds the shape of each parameter by name, `primary` is the output that the
    model is served for, `outputs` are all outputs that the model can compute, and `planes` is the
    number of planes that `forward` takes.

    If `degree` is more than 1, so many devices hold the model together: `forward` is the part of
    one of them, within a shard_map over the mesh axis parallel.AXIS, and takes this device's share
    of the parameters in `cuts`.
    """

    shapes: dict[str, jax.ShapeDtypeStruct]
    primary: OutputName
    outputs: tuple[OutputName, ...]
    forward: Callable[
        [Sequence[Array], Int[Array, "planes rows length"], int, Collection[OutputName]],
        dict[OutputName, Array],
    ]
    planes: int = PackedTokens.PLANES
    degree: int = 1
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    quantize: Quantize | None = None  # what of the weights and activations is int8 on devices
    reads_images: bool = False  # whether the model takes images, alone or beside texts
    active_experts: int = 0  # routed experts that each token uses in a layer that has some
    of_ends: frozenset[OutputName] = frozenset()  # outputs of one token of a slot

    @property
    def products(self) -> list[tuple[int, ...]]:
        """The shapes of the weights that each token is multiplied with, in the order of layers: of
        routed experts, as many as a token uses."""
        shapes = []
        for name, leaf in self.shapes.items():
            expert = _EXPERT.search(name)
            is_used = expert is None or int(expert[1]) < self.active_experts
            shapes += [leaf.shape] if name.endswith(".kernel") and is_used else []
        return shapes

    def share_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the share of a parameter that one device holds."""
        shape = self.shapes[name].shape
        return self.cuts[name].shape(shape, self.degree) if name in self.cuts else shape

    def placed_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter on all devices that hold the model together: more than
        its own shape if devices have some heads in common."""
        shape = list(self.share_of(name))
        if name in self.cuts:
            shape[self.cuts[name].axis] *= self.degree
        return tuple(shape)

    def order(self, parameters: dict[str, Any]) -> list[Any]:
        """Return the parameters as a list, in the order that `forward` takes. Arrays of JAX are
        those that devices hold already.

        Raises CheckpointError if parameters are missing, unknown or of another shape than the
        model's. The message lists all of these parameters.
        """
        problems = [f"missing: {name}" for name in self.shapes if name not in parameters]
        problems += [f"unknown: {name}" for name in parameters if name not in self.shapes]
        for name in [name for name in self.shapes if name in parameters]:
            actual = native.unpacked_shape(tuple(parameters[name].shape))
            is_placed = isinstance(parameters[name], jax.Array | QuantizedWeight)
            expected = self.placed_shape(name) if is_placed else self.shapes[name].shape
            if actual != expected:
                problems.append(f"{name}: expected shape {expected}, got {actual}")
        if problems:
            raise CheckpointError("the parameters do not fit the model\n  " + "\n  ".join(problems))
        return [parameters[name] for name in self.shapes]


def program(spec: ModelSpec, degree: int = 1, quantize: Quantize | None = None) -> Program:
    """Build the model from the shapes of its parameters, without their values and without starting
    a device.

    With a `degree` of more than 1, so many devices hold the model together. With `quantize`,
    devices hold large weights in int8. Raises UnsupportedModel for an unknown architecture,
    CheckpointError if the config does not fit it, and ConfigError if the model cannot be divided
    among so many devices.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Model(spec)))
    shapes, cuts = {}, {}
    for (path, variable), leaf in zip(
        nnx.to_flat_state(state), jax.tree.leaves(state), strict=True
    ):
        name = ".".join(map(str, path))
        shapes[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if degree > 1 and (cut := variable.get_metadata().get("cut")) is not None:
            cuts[name] = cut
    if degree > 1:  # the graph of one device, which has the same structure
        with divided(degree):
            graph, state = nnx.split(nnx.eval_shape(lambda: Model(spec)))
    structure = jax.tree.structure(state)
    interaction, image = spec.interaction, spec.image
    expansion = spec.filled if interaction is None else interaction.expansion

    def forward(
        parameters, planes, slots: int, outputs: Collection[OutputName]
    ) -> dict[OutputName, Array]:
        model = nnx.merge(graph, jax.tree.unflatten(structure, parameters))
        tokens = PackedTokens.unstack(planes, slots, expansion, image)
        return model(tokens.with_read(planes) if of_ends else tokens, outputs)

    of_ends: frozenset[OutputName] = frozenset(
        name
        for name, head in spec.heads.items()
        if isinstance(head, Pooled) and set(head.pooling) <= READ_ENDS
    )
    # With adapters there is one more plane; with images, planes of the places and of the patches.
    plane_count = PackedTokens.PLANES + bool(spec.adapters)
    if image is not None:
        plane_count += image.place_numbers + image.token_bytes // WORD_BYTES
    outputs = (*spec.heads, "tokens")
    return Program(
        shapes,
        spec.primary,
        outputs,
        forward,
        plane_count,
        degree,
        cuts,
        quantize,
        reads_images=image is not None,
        active_experts=spec.config.get("active_experts", 0),
        of_ends=of_ends,
    )


def parameter_shapes(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every parameter that a checkpoint must hold, by its dotted name. Raises
    UnsupportedModel for an unknown architecture, and CheckpointError if the config does not fit."""
    if spec.is_static:
        shapes = static.static_shapes(spec)
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return program(spec).shapes
