"""The manifest of a checkpoint, as types."""

from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import msgspec

from jaxembed.data.outputs import REPRESENTATIONS, OutputName

NO_LIMIT = 2**19  # input tokens of a model that truncates nothing; no accepted text has more

STATIC = "static"  # the architecture of a model that is a table of token vectors

FORMAT_VERSION = 4  # of the checkpoints that are written; docs/versions.md says when it grows

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
"""The poolings, in the order in which sentence-transformers concatenates several."""

PoolingChoice = Pooling | Literal["splade"]
"""What a model may be loaded with: another pooling, or "splade", as TEI calls the sparse embeddings
of a masked-LM head."""

Activation = Literal[
    "identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid"
]

DType = Literal["float32", "bfloat16", "float16"]

Task = Literal["embed", "classify", "rerank"]
"""What a model computes: vectors, logits of several labels, or one logit of a pair of texts."""

ScoreFunction = Literal["sigmoid", "softmax"]


class DenseLayer(msgspec.Struct, frozen=True, tag="dense"):
    """A sentence-transformers Dense module: activation(x @ kernel + bias). With `residual` it adds
    x, or x @ residual.kernel if the widths differ."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "tanh"
    residual: bool = False

    @property
    def projects_residual(self) -> bool:
        """Whether the residual has a kernel."""
        return self.residual and self.in_features != self.out_features


class NormalizeLayer(msgspec.Struct, frozen=True, tag="normalize"):
    """A sentence-transformers Normalize module: it scales a vector to length one."""


class LayerNormLayer(msgspec.Struct, frozen=True, tag="layer_norm"):
    """A layer norm: mean zero and variance one, then a scale and, with `bias`, a shift."""

    features: int
    eps: float
    bias: bool = True


Module = DenseLayer | LayerNormLayer | NormalizeLayer


class _WithModules(Protocol):
    @property
    def modules(self) -> tuple[Module, ...]: ...

    @property
    def normalize(self) -> bool: ...


class _AfterModules(msgspec.Struct, frozen=True):
    """The base of heads whose output is the result of their modules."""

    @property
    def normalize(self: _WithModules) -> bool:
        """Whether the last module is a Normalize module, which runs on the host."""
        return bool(self.modules) and isinstance(self.modules[-1], NormalizeLayer)

    @property
    def device_modules(self: _WithModules) -> tuple[Module, ...]:
        """The modules that run on the device: all but a Normalize at the end."""
        return self.modules[:-1] if self.normalize else self.modules

    def width(self: _WithModules, hidden_size: int) -> int:
        """Return the number of columns of the output."""
        dense = [layer for layer in self.modules if isinstance(layer, DenseLayer)]
        return dense[-1].out_features if dense else hidden_size


class Pooled(_AfterModules, frozen=True, tag="pooled"):
    """A head of one vector for each slot. The poolings of the hidden states are concatenated and go
    through the modules, in the order of modules.json."""

    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Return the number of columns of the output."""
        return super().width(hidden_size * len(self.pooling))


class PerToken(_AfterModules, frozen=True, tag="per_token"):
    """A head of one vector for each token: its hidden state, through the modules.

    The vectors of tokens with the `skipped_ids`, and with `drops_first` that of the first token,
    are computed but left out of the answer.
    """

    modules: tuple[Module, ...]
    drops_first: bool = False
    skipped_ids: tuple[int, ...] = ()


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """A head of sparse embeddings: a weight for each term of the vocabulary in each slot.

    The hidden states go through the modules and are multiplied by the table of terms, which gives
    the logits of a masked language model. The activation makes weights of them, and a slot has the
    maximum or the sum over its tokens. Formal et al. 2021, arXiv:2109.10086.

    A static model, or the static query encoder of a model with several routes, has no logits: its
    table holds one weight for each term, and a term among the tokens of a slot has that weight,
    however often it occurs.
    """

    vocab_size: int
    features: int  # rows of the table, which has a column for each term; 1 in a static model
    modules: tuple[Module, ...] = ()
    over_tokens: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    """relu: log(1 + max(z, 0)) of a logit z; log1p_relu: log(1 + relu's weight)."""
    max_active: int | None = None  # the maximum number of weights of an answer, the largest ones

    normalize = False  # the weights are not normalized

    @property
    def device_modules(self) -> tuple[Module, ...]:
        """All modules: they run before the product with the table."""
        return self.modules

    def width(self, hidden_size: int) -> int:
        """Return the number of columns of the output."""
        return self.vocab_size


class AttentionPooling(_AfterModules, frozen=True, tag="probed"):
    """An attention pooling head: one vector for each slot.

    A learned query attends to the tokens of the slot; the result goes through a norm and an MLP
    with a residual connection. Zhai et al. 2023, arXiv:2303.15343.
    """

    width_in: int  # dimensions of the hidden states, and of the vector before the modules
    num_heads: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    modules: tuple[Module, ...] = ()

    pooling = ("probe",)


Head = Pooled | PerToken | Vocabulary | AttentionPooling
"""The union of all kinds of heads. jaxembed.models.heads.HEADS holds the layers of each kind."""


def scoring_heads(logits: Pooled) -> dict[OutputName, Head]:
    """Return the heads of a classifier or reranker: its logits, and its pooled vector. The pooled
    vector is the one that logits are computed from, before any module."""
    return {"logits": logits, "dense": Pooled(logits.pooling)}


class Expansion(msgspec.Struct, frozen=True):
    """The augmentation tokens of a text: copies of `token_id`, up to `length` tokens in total.

    They follow the last token, and their positions continue. If they are not `attended`, they are
    hidden as keys: no token attends to them, and each attends only to the tokens of the text.

    A multi-vector model has them in queries, and returns a vector for each. SigLIP has them in all
    texts: they are its padding tokens, to which the others attend.
    """

    token_id: int
    length: int
    attended: bool = False


class LateInteraction(msgspec.Struct, frozen=True):
    """How queries and documents of a multi-vector model are tokenized.

    Khattab and Zaharia 2020, arXiv:2004.12832. The marker of a role is a token that stands second
    in each sequence, after the first special token; None: the role has no marker. The lengths are
    the maximum tokens of a sequence, including special tokens and the marker. A query longer than
    the length of the expansion gets no augmentation tokens.
    """

    query_length: int
    document_length: int
    query_marker: int | None = None
    document_marker: int | None = None
    expansion: Expansion | None = None


class PairTemplate(msgspec.Struct, frozen=True):
    """The prompt by which a language model judges whether a document answers a query.

    The four parts are tokenized separately, without the tokenizer's special tokens, and their ids
    are concatenated. `first` holds {query}, and {instruction} if the model takes one; `second`
    holds {document}.
    """

    prefix: str
    first: str
    second: str
    suffix: str
    instruction: str  # the default for a request without one
    query_share: float = 1.0  # the share of the limit that `first` may take if a pair is truncated

    @property
    def takes_instruction(self) -> bool:
        """Whether a request may give an instruction."""
        return "{instruction}" in self.first


Resample = Literal["nearest", "lanczos", "bilinear", "bicubic"]


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes patches of `patch` by `patch` pixels, and patches become tokens.

    The image is resized by `resample`, as transformers' processors do it, in one of these ways: to
    the `size`, height and width; so that its shorter side is `shortest`; or with its aspect ratio
    nearly kept, to whole patches, at most `most_patches`, or to whole tokens, with between
    `area[0]` and `area[1]` pixels. If there is a `crop`, its height and width are cut from the
    middle. Sizes are in pixels. The device computes (value * `rescale` - mean) / std, with the
    `mean` and `std` of the value's colour.

    Each block of `merge` by `merge` patches is a token with the id `token_id`. `before` and `after`
    are the ids of the tokens around an image's patches. `place_numbers` is the number of numbers
    that give a token's place in its image; 0 if its position in the sequence is enough.
    """

    patch: int
    resample: Resample = "bicubic"
    size: tuple[int, int] | None = None
    shortest: int | None = None
    area: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    most_patches: int | None = None
    rescale: float = 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    token_id: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    place_numbers: int = 0
    merge: int = 1

    @property
    def patch_bytes(self) -> int:
        """The number of bytes of a patch: three colours of each pixel."""
        return 3 * self.patch**2

    @property
    def token_bytes(self) -> int:
        """The number of bytes of a token's patches."""
        return self.patch_bytes * self.merge**2

    @property
    def token_side(self) -> int:
        """The height and width of a token in pixels."""
        return self.patch * self.merge

    @property
    def made(self) -> tuple[int, int]:
        """The height and width of every image in pixels after resizing and cropping. Only valid if
        all images have one size, that is without a maximum of patches or an `area`."""
        size = self.crop or self.size
        assert size is not None
        return size

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of patches of every image; valid as `made`."""
        height, width = self.made
        return height // self.patch, width // self.patch


class Adapter(msgspec.Struct, frozen=True):
    """A low-rank adapter: its name, and its rank in each layer that it changes.

    `ranks` are by the layer's name in the parameters, such as `tower.layers.0.attention.qkv`.
    """

    name: str
    ranks: dict[str, int]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything needed to run a checkpoint, except its parameters and its tokenizer.

    `config` holds the fields of the architecture's config dataclass. `heads` are the heads on the
    backbone, by the name of the output that each computes. The first head is the primary one, which
    the model is served for: "dense", "sparse" or "multi_vector" of an embedder, "logits" of a
    classifier or reranker. There is a logit for each of the `labels`, and `score_function` turns
    logits into scores.

    `template` is the prompt of a pair. `interaction` says how queries and documents are tokenized.
    If the model was trained so, `filled` adds augmentation tokens to every text. `image` says how
    images are prepared; such a model takes texts only if its config has a vocabulary. `token_types`
    says whether the backbone takes the tokenizer's types, or zeros. A request may choose one of the
    `adapters`, which are numbered from 1. `dtype` is the dtype of the stored parameters; the one
    used in computation may differ. `written_by` is the version that wrote the checkpoint; early
    versions left it out.
    """

    architecture: str
    config: dict[str, Any]
    heads: Annotated[dict[OutputName, Head], msgspec.Meta(min_length=1)]
    labels: tuple[str, ...] = ()
    score_function: ScoreFunction = "softmax"
    template: PairTemplate | None = None
    interaction: LateInteraction | None = None
    filled: Expansion | None = None
    image: ImageRules | None = None
    adapters: tuple[Adapter, ...] = ()
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

    @cached_property
    def primary(self) -> OutputName:
        """The name of the first head, whose output every batch computes."""
        return next(iter(self.heads))

    @property
    def head(self) -> Head:
        """The primary head."""
        return self.heads[self.primary]

    @property
    def pooling(self) -> tuple[str, ...]:
        """The poolings of the primary head, or its output's name if it has no pooling. A head of
        sparse embeddings has "splade"."""
        if isinstance(self.head, Pooled | AttentionPooling):
            return self.head.pooling
        return ("splade",) if self.primary == "sparse" else (self.primary,)

    @property
    def representations(self) -> tuple[OutputName, ...]:
        """The outputs that texts can be compared by, among "dense", "sparse" and "multi_vector"."""
        computed = {"sparse" if name == "token_weights" else name for name in self.heads}
        return tuple(name for name in REPRESENTATIONS if name in computed)

    @property
    def is_static(self) -> bool:
        """Whether the model is a table of token vectors, without backbone and compiled program."""
        return self.architecture == STATIC

    @property
    def takes_texts(self) -> bool:
        """Whether the model tokenizes texts: all do but an image encoder alone."""
        return "vocab_size" in self.config

    @cached_property
    def dense(self) -> Pooled | AttentionPooling:
        """The head that computes one vector for an input. Raises KeyError if the model has none."""
        head = self.heads["dense"]
        assert isinstance(head, Pooled | AttentionPooling)
        return head

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their numbers."""
        return tuple(adapter.name for adapter in self.adapters)

    @cached_property
    def task(self) -> Task:
        """The task: with logits it is "classify" if there are several labels, else "rerank"."""
        if self.primary != "logits":
            return "embed"
        return "classify" if len(self.labels) > 1 else "rerank"

    @cached_property
    def widths(self) -> dict[OutputName, int]:
        """The number of columns of each output that the model can compute."""
        widths: dict[OutputName, int] = {"tokens": self.hidden_size}
        widths.update((name, head.width(self.hidden_size)) for name, head in self.heads.items())
        return widths

    @property
    def dim(self) -> int:
        """The number of columns of the primary output: dimensions of an embedding, or logits."""
        return self.widths[self.primary]


TEXT_ROUTE, IMAGE_ROUTE = "text", "image"  # routes of a model of both; the input's type chooses
ROUTE_NAME = r"^[A-Za-z0-9_-]+\Z"  # the name of a route is also that of a folder


class Routes(msgspec.Struct, frozen=True):
    """The specs of a model by route, such as one encoder for queries and one for documents.

    The vectors of all routes can be compared. A model with one engine has one route, whose name is
    empty. `default` is the route of a request that names no route; None refuses such a request. A
    model of texts and images has the routes TEXT_ROUTE and IMAGE_ROUTE, which a request does not
    name.
    """

    specs: dict[str, ModelSpec]
    default: str | None = ""

    @property
    def main_route(self) -> str:
        """The default route; the first route if there is no default."""
        return next(iter(self.specs)) if self.default is None else self.default

    @property
    def main(self) -> ModelSpec:
        """The spec of the main route. Its task, dimensions and prompts are those of all routes."""
        return self.specs[self.main_route]

    @property
    def image(self) -> ModelSpec | None:
        """The spec of the route that takes images, or None."""
        return next((spec for spec in self.specs.values() if spec.image is not None), None)

    @property
    def is_dual(self) -> bool:
        """Whether the model has a text encoder and a separate image encoder."""
        return self.image is not None and TEXT_ROUTE in self.specs

    @property
    def of_texts(self) -> "Routes":
        """The routes that a text may take: of a model of texts and images one route, named ""."""
        return Routes({"": self.specs[TEXT_ROUTE]}) if self.is_dual else self
