"""The manifest of a checkpoint, as types. Knows nothing of files or arrays."""

from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import msgspec

from jaxembed.data.outputs import REPRESENTATIONS, OutputName

NO_LIMIT = 2**19  # tokens of an input to a model that cuts nothing; no text that is read has more

STATIC = "static"  # the architecture of a model that is a table of token vectors

FORMAT_VERSION = 4  # of what is written; docs/versions.md says when it grows

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
"""In the order in which several are concatenated, which is that of sentence-transformers."""

PoolingChoice = Pooling | Literal["splade"]
"""What a model may be loaded with: another pooling, or the weights of terms of its masked-LM head,
by TEI's name."""

Activation = Literal[
    "identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid"
]

DType = Literal["float32", "bfloat16", "float16"]

Task = Literal["embed", "classify", "rerank"]
"""What a model is for: vectors, the logits of several labels, or the one logit of a pair."""

ScoreFunction = Literal["sigmoid", "softmax"]


class DenseLayer(msgspec.Struct, frozen=True, tag="dense"):
    """A sentence-transformers Dense module: activation(x @ kernel + bias), with `residual` plus x,
    or plus x @ residual.kernel where the widths differ."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "tanh"
    residual: bool = False

    @property
    def projects_residual(self) -> bool:
        """Whether the residual has a kernel of its own."""
        return self.residual and self.in_features != self.out_features


class NormalizeLayer(msgspec.Struct, frozen=True, tag="normalize"):
    """A sentence-transformers Normalize module: it scales a vector to length one."""


class LayerNormLayer(msgspec.Struct, frozen=True, tag="layer_norm"):
    """A layer norm: mean zero and variance one, then scale and, with `bias`, shift."""

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
    """What heads have in common whose output is what their modules give."""

    @property
    def normalize(self: _WithModules) -> bool:
        """Whether the head ends in a Normalize module. The host runs that one."""
        return bool(self.modules) and isinstance(self.modules[-1], NormalizeLayer)

    @property
    def device_modules(self: _WithModules) -> tuple[Module, ...]:
        """The modules that run on the device: all but a last Normalize."""
        return self.modules[:-1] if self.normalize else self.modules

    def width(self: _WithModules, hidden_size: int) -> int:
        """The number of columns of the output."""
        dense = [layer for layer in self.modules if isinstance(layer, DenseLayer)]
        return dense[-1].out_features if dense else hidden_size


class Pooled(_AfterModules, frozen=True, tag="pooled"):
    """A head that gives one vector for each slot: the poolings of its hidden states, side by side,
    and then the modules, in the order of modules.json."""

    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()

    def width(self, hidden_size: int) -> int:
        """The number of columns of the output."""
        return super().width(hidden_size * len(self.pooling))


class PerToken(_AfterModules, frozen=True, tag="per_token"):
    """A head that gives each token a row of its own: its hidden state, through the modules.

    The rows of the first token, with `drops_first`, and of tokens with the `skipped_ids` are
    computed and not answered.
    """

    modules: tuple[Module, ...]
    drops_first: bool = False
    skipped_ids: tuple[int, ...] = ()


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """A head that gives one weight for each term of the vocabulary: the logits of a masked language
    model, which are a product with a table of terms after the modules, through the activation, and
    over the tokens of a slot their maximum or sum. Formal et al. 2021, arXiv:2109.10086.

    Of a static model, which has no logits, the table is one weight for each term, and the weight of
    a term is that one where it is among the tokens, however often."""

    vocab_size: int
    features: int  # of the table, each term's number of values
    modules: tuple[Module, ...] = ()
    over_tokens: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    """relu: log(1 + max(z, 0)) of a logit z; log1p_relu: log(1 + that)."""
    max_active: int | None = None  # the most weights of an answer, those of the largest size

    normalize = False  # its weights are not

    @property
    def device_modules(self) -> tuple[Module, ...]:
        """The modules before the product with the table: all."""
        return self.modules

    def width(self, hidden_size: int) -> int:
        """The number of columns of the output."""
        return self.vocab_size


class Probed(_AfterModules, frozen=True, tag="probed"):
    """A head that gives one vector for each slot: a learned query attends to its tokens, and what
    it finds goes through a norm and an MLP, with a residual. Zhai et al. 2023, arXiv:2303.15343."""

    width_in: int  # of the hidden states, and of the vector
    num_heads: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    modules: tuple[Module, ...] = ()

    pooling = ("probe",)


Head = Pooled | PerToken | Vocabulary | Probed
"""The union of all kinds of heads. jaxembed.models.heads.HEADS has the layers of each kind."""


def scoring_heads(logits: Pooled) -> dict[OutputName, Head]:
    """The heads of a classifier or reranker: its logits, and the vector that they are computed
    from, which is the pooled one before any module."""
    return {"logits": logits, "dense": Pooled(logits.pooling)}


class Expansion(msgspec.Struct, frozen=True):
    """What a query is filled up with: a token, as often as it takes to have `length` of them.

    The fillers follow the last token, their positions run on, and each has a row in the answer. If
    they are not `attended`, no token attends to them: they are hidden as keys, and their own rows
    tell what they see of the others.
    """

    token_id: int
    length: int
    attended: bool = False


class LateInteraction(msgspec.Struct, frozen=True):
    """How queries and documents are tokenized whose vectors are compared token by token. Khattab
    and Zaharia 2020, arXiv:2004.12832.

    The marker of its role stands second in each sequence, after the first special token; None: the
    role has none. The lengths are the most tokens of a sequence, special ones and the marker
    counted. A query longer than the length of the expansion is not filled up.
    """

    query_length: int
    document_length: int
    query_marker: int | None = None
    document_marker: int | None = None
    expansion: Expansion | None = None


class PairTemplate(msgspec.Struct, frozen=True):
    """The text by which a language model is asked whether a document answers a query.

    The four parts are tokenized one by one, without the tokenizer's own special tokens, and their
    ids put together: `first` holds {query}, and {instruction} if the model takes one, `second`
    holds {document}.
    """

    prefix: str
    first: str
    second: str
    suffix: str
    instruction: str  # where the request gives none
    query_share: float = 1.0  # of the limit: what `first` may take of a pair that is cut

    @property
    def takes_instruction(self) -> bool:
        """Whether a request may give an instruction of its own."""
        return "{instruction}" in self.first


Resample = Literal["nearest", "lanczos", "bilinear", "bicubic"]


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes patches of `patch` by `patch` pixels, as transformers' processors do it,
    and how these become a sequence of tokens.

    It is resized by `resample`: to the `size`, height and width, or so that its shorter side is
    `shortest`, and the middle is cut out, as high and wide as `crop`. Or it keeps its shape, to a
    patch, and has as many patches as it can, of at most `most_patches`; or to a token, with an
    `area` of so many pixels at least and at most.
    On the device a value times `rescale`, less the `mean` of its colour, is divided by the `std`.

    Each block of `merge` by `merge` patches is a token with the id `token_id`. `before` and `after`
    are the ids of the tokens around the patches of an image. `place_numbers` is how many numbers
    tell the tower where a token lies in its image; 0 where its position in the sequence does.
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
        """The height and width that every image is brought to. Only for rules by which all images
        have one size: with `most_patches` or an `area` they have many."""
        size = self.crop or self.size
        assert size is not None
        return size

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of patches of every image; as for `made`."""
        height, width = self.made
        return height // self.patch, width // self.patch


class Adapter(msgspec.Struct, frozen=True):
    """A low-rank adapter: its name, and the number of columns that it has in each layer it changes.

    Layers have the names of their parameters, such as `tower.layers.0.attention.qkv`.
    """

    name: str
    ranks: dict[str, int]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything needed to run a checkpoint, except its parameters and its tokenizer.

    `config` holds the fields of the architecture's own config dataclass. `heads` are what follows
    the tower, by the name of the output that each computes; the first is the primary one, which
    the model is served for. The primary output of an embedder is "dense", "sparse" or
    "multi_vector", that of a classifier or reranker "logits", one for each of the `labels`, which
    `score_function` makes scores. Texts for an `interaction` are queries or documents. `dtype` is
    the dtype of the stored parameters, not the one they are computed in. `token_types` says whether
    the tower is given the tokenizer's types, or zeros. Every text is `filled` up to a length if the
    model was trained so. `image` has the rules of a model that takes images, and no texts unless
    its config has a vocabulary. A request may choose one of the `adapters`, whose numbers count
    from 1. `written_by` names the version that made the checkpoint; early versions did not say.
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
        """The poolings of the primary head; "splade" or "multi_vector" of one without."""
        if isinstance(self.head, Pooled | Probed):
            return self.head.pooling
        return ("splade",) if self.primary == "sparse" else (self.primary,)

    @property
    def representations(self) -> tuple[OutputName, ...]:
        """What a text may be represented by: some of "dense", "sparse" and "multi_vector"."""
        given = {"sparse" if name == "token_weights" else name for name in self.heads}
        return tuple(name for name in REPRESENTATIONS if name in given)

    @property
    def is_static(self) -> bool:
        """Whether the model is a table of token vectors: it has no tower and makes no program."""
        return self.architecture == STATIC

    @property
    def takes_texts(self) -> bool:
        """Whether texts are tokenized for it, as for all but a tower of images alone."""
        return "vocab_size" in self.config

    @cached_property
    def dense(self) -> Pooled | Probed:
        """The head of the one vector of an input. Raises KeyError if the model has none."""
        head = self.heads["dense"]
        assert isinstance(head, Pooled | Probed)
        return head

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their numbers, which count from 1."""
        return tuple(adapter.name for adapter in self.adapters)

    @cached_property
    def task(self) -> Task:
        """What the model is for: with several labels it is a classifier, else a reranker."""
        if self.primary != "logits":
            return "embed"
        return "classify" if len(self.labels) > 1 else "rerank"

    @cached_property
    def widths(self) -> dict[OutputName, int]:
        """The number of columns of each output that the model can give."""
        widths: dict[OutputName, int] = {"tokens": self.hidden_size}
        widths.update((name, head.width(self.hidden_size)) for name, head in self.heads.items())
        return widths

    @property
    def dim(self) -> int:
        """The number of columns of the primary output: of the embedding, or of the logits."""
        return self.widths[self.primary]


TEXT_ROUTE, IMAGE_ROUTE = "text", "image"  # of a model of both, chosen by what an input is
ROUTE_NAME = r"^[A-Za-z0-9_-]+\Z"  # it names a folder, too


class Routes(msgspec.Struct, frozen=True):
    """The specs of a model by route: of one encoder for queries and one for documents, say, whose
    vectors are of one space. A model with one engine has one route, whose name is empty.

    `default` is the route of a request that names none; None refuses such requests. Of a model of
    texts and images the routes are TEXT_ROUTE and IMAGE_ROUTE, which no request names.
    """

    specs: dict[str, ModelSpec]
    default: str | None = ""

    @property
    def main_route(self) -> str:
        """The default route, else the first."""
        return next(iter(self.specs)) if self.default is None else self.default

    @property
    def main(self) -> ModelSpec:
        """The spec of the main route. It stands for all in what they have in common, such as task,
        dimensions and prompts."""
        return self.specs[self.main_route]

    @property
    def image(self) -> ModelSpec | None:
        """The spec of what takes images, if anything does."""
        return next((spec for spec in self.specs.values() if spec.image is not None), None)

    @property
    def is_dual(self) -> bool:
        """Whether there is a tower for texts and another one for images."""
        return self.image is not None and TEXT_ROUTE in self.specs

    @property
    def of_texts(self) -> "Routes":
        """The routes that a text may take; of a model of texts and images the only one."""
        return Routes({"": self.specs[TEXT_ROUTE]}) if self.is_dual else self
