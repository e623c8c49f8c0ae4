"""What a checkpoint says of itself: the manifest, as types. Knows nothing of files or arrays."""

from typing import Any, Literal

import msgspec

from jaxembed.outputs import OutputName

FORMAT_VERSION = 2  # of what is written; docs/versions.md says when it grows

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
"""Order of concatenation when a checkpoint names several, as in sentence-transformers."""

Activation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]

DType = Literal["float32", "bfloat16", "float16"]

Task = Literal["embed", "classify", "rerank"]
"""What comes out: a vector, the logits of several labels, or one logit of a pair."""

ScoreFunction = Literal["sigmoid", "softmax"]


class DenseLayer(msgspec.Struct, frozen=True, tag="dense"):
    """A sentence-transformers Dense module: activation(x @ kernel + bias)."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "tanh"


class NormalizeLayer(msgspec.Struct, frozen=True, tag="normalize"):
    """Scale to length one."""


class LayerNormLayer(msgspec.Struct, frozen=True, tag="layer_norm"):
    """Mean zero and variance one, then scale and, with `bias`, shift."""

    features: int
    eps: float
    bias: bool = True


Module = DenseLayer | LayerNormLayer | NormalizeLayer


class PairTemplate(msgspec.Struct, frozen=True):
    """How a language model is asked whether a document answers a query.

    The four parts are tokenized one by one, without the tokenizer's own special tokens, and their
    ids put together: `first` holds {instruction} and {query}, `second` holds {document}.
    """

    prefix: str
    first: str
    second: str
    suffix: str
    instruction: str  # where the request gives none


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to run a checkpoint, except its parameters and its tokenizer.

    `config` holds the fields of the architecture's own config dataclass. `modules` are the layers
    after pooling, in the order of modules.json. `dtype` is the dtype of the stored parameters,
    not the one they are computed in. `token_types` says whether the tower is given the tokenizer's
    types, or zeros. A cross-encoder or classifier is built like an embedder: what comes out of its
    last module are the logits of `labels`, which `score_function` makes scores. `written_by` names
    the version that made the checkpoint; early ones did not say.
    """

    architecture: str
    config: dict[str, Any]
    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()
    task: Task = "embed"
    labels: tuple[str, ...] = ()
    score_function: ScoreFunction = "softmax"
    template: PairTemplate | None = None
    token_types: bool = True
    include_prompt: bool = True
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    max_input_tokens: int
    hidden_size: int
    dtype: DType
    source: str
    revision: str | None = None
    content_hash: str
    format_version: int = FORMAT_VERSION
    written_by: str | None = None

    @property
    def normalize(self) -> bool:
        """Whether the checkpoint ends in a Normalize module. The host does that one."""
        return bool(self.modules) and isinstance(self.modules[-1], NormalizeLayer)

    @property
    def device_modules(self) -> tuple[Module, ...]:
        """The modules that run on the device: all but a last Normalize."""
        return self.modules[:-1] if self.normalize else self.modules

    @property
    def widths(self) -> dict[OutputName, int]:
        """How many floats each output has, of a slot or of a token."""
        return {"dense": self.dim, "tokens": self.hidden_size}

    @property
    def dim(self) -> int:
        """Width of what comes out: the embedding, or the logits."""
        dense = [layer for layer in self.modules if isinstance(layer, DenseLayer)]
        return dense[-1].out_features if dense else self.hidden_size * len(self.pooling)
