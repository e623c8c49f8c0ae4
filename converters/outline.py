"""Describes a model before its weights are read (Outline), and what reads its folder (Reader)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from converters.family import BuiltIn, TensorRules
from converters.heads import Layout, module_folders
from converters.weights import Tensor
from jaxembed.data.spec import DType, ModelSpec
from jaxembed.errors import CheckpointError, UnsupportedModel

# The patterns of weight files. Files of each are downloaded if there are none of those before.
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors")


@dataclass(frozen=True)
class Options:
    """The arguments of `convert` that choose how a model is converted."""

    name: str  # name of the model; by default the path of its folder
    revision: str | None = None
    dense_path: str | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    splade: bool = False
    cutoff_layer: int | None = None  # the last layer to run, of a model with heads for several

    def refuse_dense_path(self, source: Path, why: str = "has none") -> None:
        """Raise CheckpointError if a dense path is given: the model in `source` takes none. `why`
        follows the name of `source` in the message."""
        if self.dense_path is not None:
            raise CheckpointError(
                f"dense path {self.dense_path!r} takes the place of a Dense module, and {source} "
                f"{why}; leave it out"
            )


@dataclass(frozen=True)
class LowRankFactors:
    """The two matrices of a low-rank adapter for one weight. scale * up . down is added to it."""

    down: Tensor  # [rank, in]; of an embedding table `in` is its number of rows
    up: Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        """The number of rows of down, and of columns of up."""
        return self.down.shape[0]


@dataclass(frozen=True)
class AdapterSource:
    """An adapter whose tensors are not read yet. `factors` has, by the name of a weight in rules,
    the adapter's factors for this weight.

    `copies` are weights of the base model that were saved with the adapter.
    """

    name: str
    factors: Mapping[str, LowRankFactors]
    copies: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outline:
    """A model as its small files describe it, without its weights."""

    source: Path
    tensors: TensorRules  # the rules for all parameters, except those of adapters
    layout: Layout
    spec: ModelSpec  # without content hash; the dtype is that in config.json, or float32
    tokenizer: bytes  # the content of tokenizer.json
    built_in: BuiltIn | None = None  # adapters among the model's own tensors; first in the spec
    adapters: tuple[AdapterSource, ...] = ()  # other adapters, in the order of the spec
    merged: Path | None = None  # the folder of an adapter that is merged into the backbone


@dataclass(frozen=True)
class Reader:
    """The functions that read the folders of one kind of model."""

    recognises: Callable[[Path], bool]
    # folder, options -> the outline of each route, and the name of the default one
    outlines: Callable[[Path, Options], tuple[dict[str, Outline], str | None]]
    # folder, dense path -> the folders within that hold weights; reads only JSON files
    weight_folders: Callable[[Path, str | None], list[str]] = module_folders
    # folder -> the folders within that hold weights which `outlines` reads
    folders_read: Callable[[Path], list[str]] = lambda source: []
    weight_files: tuple[str, ...] = WEIGHT_FILES


def spec_of(
    options: Options, layout: Layout, config: dict[str, Any], hf: Mapping[str, Any], **fields: Any
) -> ModelSpec:
    """Return the spec of a model with this layout, this `config` of its backbone and more `fields`.
    `hf` is the content of config.json, which may name the dtype."""
    dtype: Any = hf.get("dtype") or hf.get("torch_dtype")  # the keys of transformers 5 and 4
    return ModelSpec(
        config=config,
        heads=layout.heads,
        labels=layout.labels,
        score_function=layout.score_function,
        template=layout.template,
        listwise=layout.listwise,
        include_prompt=layout.include_prompt,
        prompts=dict(layout.prompts or {}),
        default_prompt_name=layout.default_prompt_name,
        hidden_size=config["hidden_size"],
        dtype=dtype if dtype in get_args(DType) else "float32",
        source=options.name,
        revision=options.revision,
        content_hash="",  # not known yet
        **fields,
    )


def check_comparable(source: Path, routes: Mapping[str, Outline]) -> None:
    """Raise UnsupportedModel if the primary outputs of routes differ in kind or width: such vectors
    cannot be compared."""
    outputs = {route: model.spec.primary for route, model in routes.items()}
    widths = {route: model.spec.dim for route, model in routes.items()}
    for problem, values in (
        ("its routes give different outputs", outputs),
        ("the vectors of its routes differ in width", widths),
    ):
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{value} of {route}" for route, value in values.items())
            raise UnsupportedModel(f"{source}: {problem}: {shown}; such vectors cannot be compared")
