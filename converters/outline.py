"""What a model is before its weights are read, and what reads the folders of one kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from converters.family import BuiltIn, TensorRules
from converters.heads import Layout, module_folders
from converters.weights import Tensor
from jaxembed.data.spec import DType, ModelSpec
from jaxembed.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True)
class Options:
    """What `convert` is asked for, as its arguments say."""

    name: str  # of the model; the path of its folder where none is given
    revision: str | None = None
    dense_path: str | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    splade: bool = False

    def refuse_dense_path(self, source: Path, why: str = "has none") -> None:
        """Raise CheckpointError for a dense path, which the model in `source` does not take."""
        if self.dense_path is not None:
            raise CheckpointError(
                f"dense path {self.dense_path!r} takes the place of a Dense module, and {source} "
                f"{why}; leave it out"
            )


@dataclass(frozen=True)
class Factors:
    """Two small matrices whose product an adapter adds to a weight: scale * up . down."""

    down: Tensor  # [rank, in]; of a table in is its number of rows
    up: Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        """The number of columns between the two."""
        return self.down.shape[0]


@dataclass(frozen=True)
class AdapterSource:
    """An adapter that is not read yet: its factors, by the name that rules give the weight.

    `copies` are weights of the base model that were saved with it.
    """

    name: str
    factors: Mapping[str, Factors]
    copies: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outline:
    """A model as its small files describe it, without its weights."""

    source: Path
    tensors: TensorRules  # with the rules for all parameters, without those of adapters
    layout: Layout
    spec: ModelSpec  # without content hash; its dtype is that of config.json, or float32
    tokenizer: bytes  # the content of tokenizer.json
    built_in: BuiltIn | None = None  # adapters among the model's own tensors; they come first
    adapters: tuple[AdapterSource, ...] = ()  # further ones, in the order of their numbers


@dataclass(frozen=True)
class Reader:
    """What reads the folders of one kind of model."""

    recognises: Callable[[Path], bool]
    # the model of each route, and the name of the default one, as in `Routes`
    outlines: Callable[[Path, Options], tuple[dict[str, Outline], str | None]]
    # folder, dense path -> the folders within that hold weights; needs only JSON files
    weight_folders: Callable[[Path, str | None], list[str]] = module_folders
    # those of them whose weights `outlines` needs
    folders_read: Callable[[Path], list[str]] = lambda source: []


def spec_of(
    options: Options, layout: Layout, config: dict[str, Any], hf: Mapping[str, Any], **fields: Any
) -> ModelSpec:
    """The spec of a model with this layout, whose tower has this config, and with more `fields`.
    `hf`, the content of config.json, may name its dtype."""
    dtype: Any = hf.get("dtype") or hf.get("torch_dtype")  # the keys of transformers 5 and 4
    return ModelSpec(
        config=config,
        heads=layout.heads,
        labels=layout.labels,
        score_function=layout.score_function,
        template=layout.template,
        include_prompt=layout.include_prompt,
        prompts=dict(layout.prompts or {}),
        default_prompt_name=layout.default_prompt_name,
        hidden_size=config["hidden_size"],
        dtype=dtype if dtype in get_args(DType) else "float32",
        source=options.name,
        revision=options.revision,
        content_hash="",
        **fields,
    )


def check_comparable(source: Path, routes: Mapping[str, Outline]) -> None:
    """Raise UnsupportedModel for routes whose outputs differ in kind or width."""
    outputs = {route: model.spec.primary for route, model in routes.items()}
    widths = {route: model.spec.dim for route, model in routes.items()}
    for problem, found in (
        ("its routes give different outputs", outputs),
        ("the vectors of its routes differ in width", widths),
    ):
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{value} of {route}" for route, value in found.items())
            raise UnsupportedModel(f"{source}: {problem}: {shown}; they are never compared")
