"""The manifest of a checkpoint, as types."""

from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import msgspec

from jaxembed.data.outputs import REPRESENTATIONS, OutputName

# The `max_input_tokens` of a model that never truncates. No accepted text has more tokens.
NO_LIMIT = 2**19

# The names of prompts for documents that sentence-transformers looks for, in this order.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")

STATIC = "static"  # the architecture of a model that is a table of token vectors

# The format of the checkpoints that this version writes; docs/versions.md says when it changes.
FORMAT_VERSION = 4

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
"""The names of the poolings, in the order in which sentence-transformers concatenates the vectors
of a model with several poolings."""

PoolingChoice = Pooling | Literal["splade"]
"""The values of the option `pooling` when a model is loaded: a pooling that replaces the model's
own, or "splade", TEI's name for the sparse embeddings of a masked-LM head."""

Activation = Literal[
    "identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid"
]

Quantize = Literal["int8-weights", "int8"]  # weights in int8, or also the inputs of layers
DType = Literal["float32", "bfloat16", "float16"]

Task = Literal["embed", "classify", "rerank", "token_classify"]
"""What a model computes: "embed" is vectors of texts, "classify" is a logit for each of several
labels, "rerank" is a score for each document of a query, and "token_classify" is a logit for each
token and label."""

ScoreFunction = Literal["sigmoid", "softmax", "cosine"]
"""How scores are made: of logits by the sigmoid or the softmax, or as cosines of vectors."""


class DenseLayer(msgspec.Struct, frozen=True, tag="dense"):
    """A sentence-transformers Dense module: activation(x @ kernel + bias). With `residual` it also
    adds x, or x @ residual.kernel if `in_features` and `out_features` differ."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "tanh"
    residual: bool = False

    @property
    def projects_residual(self) -> bool:
        """Whether the residual is x @ residual.kernel instead of x."""
        return self.residual and self.in_features != self.out_features


class NormalizeLayer(msgspec.Struct, frozen=True, tag="normalize"):
    """A sentence-transformers Normalize module: it scales a vector to length one."""


class LayerNormLayer(msgspec.Struct, frozen=True, tag="layer_norm"):
    """A layer norm: mean zero and variance one, then a scale and, with `bias`, a shift."""

    features: int
    eps: float
    bias: bool = True


class TanhLayer(msgspec.Struct, frozen=True, tag="tanh"):
    """tanh of each value, so that all are between -1 and 1."""


Module = DenseLayer | LayerNormLayer | NormalizeLayer | TanhLayer


class _WithModules(Protocol):
    @property
    def modules(self) -> tuple[Module, ...]: ...

    @property
    def normalize(self) -> bool: ...


class _AfterModules(msgspec.Struct, frozen=True):
    """The base class of heads that end with their modules: the output is what these compute."""

    @property
    def normalize(self: _WithModules) -> bool:
        """Whether the last module is a Normalize module, which runs on the host."""
        return bool(self.modules) and isinstance(self.modules[-1], NormalizeLayer)

    @property
    def range(self: _WithModules) -> tuple[float, float] | None:
        """The calibration range of every dimension if the model fixes it, else None. After tanh,
        int8 is round(127 x), as in the quantizer of pplx-embed-v1 (st_quantize.py): with this
        range, the level floor(255 (x - low) / (high - low)) is floor(127 x + 128.5)."""
        is_fixed = bool(self.modules) and isinstance(self.modules[-1], TanhLayer)
        return (-128.5 / 127, 126.5 / 127) if is_fixed else None

    @property
    def device_modules(self: _WithModules) -> tuple[Module, ...]:
        """The modules that run on the device: all but a Normalize at the end."""
        return self.modules[:-1] if self.normalize else self.modules

    def width(self: _WithModules, hidden_size: int) -> int:
        """Return the number of columns of the output."""
        dense = [layer for layer in self.modules if isinstance(layer, DenseLayer)]
        return dense[-1].out_features if dense else hidden_size


class Pooled(_AfterModules, frozen=True, tag="pooled"):
    """A head of one vector for each slot, a range of tokens that are pooled together. The results
    of all poolings are concatenated, and then go through the modules in the order of
    modules.json."""

    pooling: tuple[Pooling, ...]
    modules: tuple[Module, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Return the number of columns of the output."""
        return super().width(hidden_size * len(self.pooling))


class PerToken(_AfterModules, frozen=True, tag="per_token"):
    """A head of one vector for each token: its hidden state, through the modules.

    Some vectors are computed but left out of the answer: those of tokens with one of the
    `skipped_ids`, and if `drops_first` is true the vector of the first token.
    """

    modules: tuple[Module, ...]
    drops_first: bool = False
    skipped_ids: tuple[int, ...] = ()


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """A head of sparse embeddings: a weight for each term of the vocabulary in each slot.

    The hidden states go through the modules and are multiplied by the table of terms, which gives
    the logits of a masked language model. The activation turns logits into term weights, and the
    weight of a term in a slot is the maximum or the sum over the tokens of the slot. Formal et al.
    2021, arXiv:2109.10086.

    A static model, or the static query encoder of a model with several routes, has no logits: its
    table holds one weight for each term. A term that occurs in a slot, once or more often, gets
    this weight; other terms get zero.
    """

    vocab_size: int
    features: int  # rows of the table, which has a column for each term; 1 in a static model
    modules: tuple[Module, ...] = ()
    over_tokens: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    """With "relu" the weight of a logit z is w = log(1 + max(z, 0)), and with "log1p_relu" it is
    log(1 + w)."""
    max_active: int | None = None  # an answer has only this many weights, the largest; None: all

    normalize = False  # term weights are not normalized

    @property
    def device_modules(self) -> tuple[Module, ...]:
        """The modules that run on the device: all, because the product with the table follows."""
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
    """Return the heads of a classifier or reranker by output. The head "logits" is the argument,
    and "dense" gives the pooled vector that the modules compute the logits from."""
    return {"logits": logits, "dense": Pooled(logits.pooling)}


class Expansion(msgspec.Struct, frozen=True):
    """The augmentation tokens of a text: copies of `token_id`, up to `length` tokens in total.

    The copies follow the last token of the text, and their positions continue those of the text.
    If `attended` is False, the copies are hidden as keys: no token attends to a copy, and the
    copies attend only to the tokens of the text.

    A multi-vector model adds copies to queries, and returns a vector for each copy. SigLIP pads
    every text with copies, which all tokens attend to.
    """

    token_id: int
    length: int
    attended: bool = False


class LateInteraction(msgspec.Struct, frozen=True):
    """How queries and documents of a multi-vector model are tokenized.

    Khattab and Zaharia 2020, arXiv:2004.12832. `query_marker` and `document_marker` are the ids of
    a token that is inserted after the first special token; None inserts no token. `query_length`
    and `document_length` are the maximum tokens of a sequence, including special tokens and the
    marker. `expansion` describes the augmentation tokens of queries. A query longer than
    expansion.length gets no augmentation tokens.
    """

    query_length: int
    document_length: int
    query_marker: int | None = None
    document_marker: int | None = None
    expansion: Expansion | None = None


class PairTemplate(msgspec.Struct, frozen=True):
    """The prompt by which a language model judges whether a document answers a query.

    `prefix`, `first`, `second` and `suffix` are tokenized separately, without the tokenizer's
    special tokens, and the ids are concatenated in this order, or with `document_first` those of
    `second` before those of `first`. The ids of `separator` follow those of `first` and of
    `second`. `first` contains {query}, and {instruction} if the model takes an instruction.
    `second` contains {document}; what follows it stays if a document is truncated at its end.
    """

    prefix: str
    first: str
    second: str
    suffix: str
    instruction: str  # the instruction for requests that give none
    # The share (0 to 1) of the token limit that `first` may take if a pair is truncated.
    query_share: float = 1.0
    separator: str = ""
    empty: str = ""  # stands for an empty query or document
    document_first: bool = False
    end_ids: tuple[int, ...] = ()  # after `suffix`: the ids of tokens that no text becomes

    @property
    def takes_instruction(self) -> bool:
        """Whether a request may give an instruction."""
        return "{instruction}" in self.first


class Listwise(msgspec.Struct, frozen=True):
    """The prompt in which a reranker reads a query and several documents together, a block.

    The parts follow each other as `head`, `instructed` if the request has an instruction, for each
    document `document` and the token `document_token`, with `between` before each further one, then
    `query`, the token `query_token`, and `tail`. {query} and {instruction} stand for those texts,
    {count} for the number of documents in the block, and {index}, from 0, and {document} for each
    document. The states at the two tokens give the vectors of the documents and of the query. The
    other fields are maximum numbers: of documents in a block, and of tokens of a text.
    """

    head: str
    instructed: str
    document: str
    between: str
    query: str
    tail: str
    document_token: str
    query_token: str
    block_documents: int
    query_length: int
    document_length: int


class Chat(msgspec.Struct, frozen=True):
    """How an embedder puts texts into its chat template, with their prompt as the system message.

    `before` is put before each text, with the prompt in the place of {prompt}. A text without a
    prompt gets the default one. The tokenizer adds the end of the template. `empty` stands for an
    empty text. With `completes` an instruction in words is stripped, and gets a full stop if it
    ends without punctuation.
    """

    before: str
    empty: str = ""
    completes: bool = True


BLANK_SIDE = 2  # tokens on a side of the blank image before texts: see models.pages

Resample = Literal["nearest", "lanczos", "bilinear", "bicubic"]


class Tiles(msgspec.Struct, frozen=True):
    """How an image is cut into tiles of equal size, which an image encoder takes one by one.

    The image is resized so that its longer side has `longest` pixels, and then to whole tiles. Its
    tiles are in the order of rows; one more tile shows the whole image. The other fields are ids of
    tokens: `names` those before a tile, by its row and column, `row_end` those after each row but
    the last, and `whole` those between the last row and the tile of the whole image.
    """

    longest: int
    names: tuple[tuple[tuple[int, ...], ...], ...]
    row_end: tuple[int, ...]
    whole: tuple[int, ...]


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes patches of `patch` by `patch` pixels, and patches become tokens.

    The image is resized with the filter `resample`, as transformers' processors do it. Exactly one
    of four fields says to which size. With `size` all images get this height and width, or if there
    are `tiles` all tiles. With `shortest` the shorter side gets this length. The other two nearly
    keep the aspect ratio: with `most_patches` an image is resized to whole patches, at most so
    many, and with `area` to whole tokens, which have between area[0] and area[1] pixels together;
    with `first_area` it is resized to whole tokens between these limits before that, and with
    `clamps_aspect` this also widens images that are too narrow for the model.
    After that, if `crop` is given, a rectangle of this height and width is cut from the middle; its
    corner is rounded down, or with `rounds_crop` to the nearest pixel, as by torchvision. Pixels at
    the right and the bottom that make no whole patch are left out.
    Sizes are in pixels. The device computes (value * rescale - mean) / std for each value, with the
    `mean` and `std` of its colour.

    Each block of `merge` by `merge` patches is a token with the id `token_id`. `before` and `after`
    are the ids of the tokens around an image's patches. With `pools_image` the vector of an image
    is pooled from its tokens, the one before them and the one after them, otherwise from all tokens
    of the input. A token's place in its image is given by `place_numbers` numbers; 0 for models
    that need only the token's position in the sequence.
    """

    patch: int
    resample: Resample = "bicubic"
    size: tuple[int, int] | None = None
    shortest: int | None = None
    area: tuple[int, int] | None = None
    first_area: tuple[int, int] | None = None
    clamps_aspect: bool = False
    crop: tuple[int, int] | None = None
    rounds_crop: bool = False
    most_patches: int | None = None
    rescale: float = 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    token_id: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    pools_image: bool = False
    place_numbers: int = 0
    merge: int = 1
    tiles: Tiles | None = None

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
        """The height and width in pixels of every image after resizing and cropping, or of every
        tile. The rules must have a `crop` or a `size`."""
        size = self.crop or self.size
        assert size is not None
        return size

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of patches of every image or tile. The rules must have a
        `crop` or a `size`."""
        height, width = self.made
        return height // self.patch, width // self.patch


class Adapter(msgspec.Struct, frozen=True):
    """A low-rank adapter: its name, and its rank in each layer that it changes.

    The keys of `ranks` are the names of layers in the parameters, such as
    `tower.layers.0.attention.qkv`.
    """

    name: str
    ranks: dict[str, int]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything needed to run a checkpoint, except its parameters and its tokenizer.

    `config` holds the fields of the architecture's config dataclass. `heads` are the heads on the
    backbone, by the name of the output that each computes. The first head is the primary one, which
    the model is served for: "dense", "sparse" or "multi_vector" for an embedder, "logits" for a
    classifier or reranker, and "token_logits" for a token classifier. There is a logit for each of
    the `labels`, and `score_function` turns logits into scores.

    `template` is the prompt of a pair, `listwise` that of several documents, whose vectors a
    reranker compares with the query's, and `chat` the template of a text. `interaction` says how a
    multi-vector model tokenizes queries and documents. `filled` describes augmentation tokens that
    are added to every text. `image` says how images are prepared; a model with `image` takes texts
    only if its config has a vocabulary. If `token_types` is false, the backbone takes zeros instead
    of the tokenizer's types. A request may choose one of the `adapters`, which are numbered from 1;
    without a choice it gets the `default_adapter`, if that is not None. `dtype` is the dtype of the
    stored parameters; computation may use another one. `written_by` is the jaxembed
    version that wrote the checkpoint, or None for early versions.
    """

    architecture: str
    config: dict[str, Any]
    heads: Annotated[dict[OutputName, Head], msgspec.Meta(min_length=1)]
    labels: tuple[str, ...] = ()
    score_function: ScoreFunction = "softmax"
    template: PairTemplate | None = None
    listwise: Listwise | None = None
    chat: Chat | None = None
    interaction: LateInteraction | None = None
    filled: Expansion | None = None
    image: ImageRules | None = None
    adapters: tuple[Adapter, ...] = ()
    default_adapter: str | None = None
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
    def takes_parts(self) -> bool:
        """Whether an input may consist of texts and images, in the model's template."""
        return self.image is not None and (self.chat is not None or self.template is not None)

    @property
    def pooling(self) -> tuple[str, ...]:
        """The poolings of the primary head. A head without pooling has one entry: "splade" for
        sparse embeddings, and the name of its output for other heads."""
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
        """Whether the model is a table of token vectors, which needs no compiled program."""
        return self.architecture == STATIC

    @property
    def takes_texts(self) -> bool:
        """Whether the model tokenizes texts. Only models that are an image encoder do not."""
        return "vocab_size" in self.config

    @property
    def reads_pages(self) -> bool:
        """Whether documents are images and texts are queries. A model of both alike puts them into
        a template, has a prompt for documents, or has a route of its own for images."""
        has_documents = self.takes_parts or any(name in self.prompts for name in DOCUMENT_PROMPTS)
        return self.image is not None and self.takes_texts and not has_documents

    @cached_property
    def dense(self) -> Pooled | AttentionPooling:
        """The head that computes one vector for an input. Raises KeyError if there is no such
        head."""
        head = self.heads["dense"]
        assert isinstance(head, Pooled | AttentionPooling)
        return head

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their numbers."""
        return tuple(adapter.name for adapter in self.adapters)

    @cached_property
    def task(self) -> Task:
        """The task of the model: "rerank" if it reads documents together; else "embed", with logits
        of tokens "token_classify", and with logits of texts "classify" if there are several labels
        and "rerank" if there is one."""
        if self.listwise is not None:
            return "rerank"
        if self.primary == "token_logits":
            return "token_classify"
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


# The routes of a model with a text encoder and an image encoder. The type of an input chooses one.
TEXT_ROUTE, IMAGE_ROUTE = "text", "image"
ROUTE_NAME = r"^[A-Za-z0-9_-]+\Z"  # a route's folder in the checkpoint has the name of the route


class Routes(msgspec.Struct, frozen=True):
    """The specs of a model by route, such as one encoder for queries and one for documents.

    The vectors of all routes can be compared. Most models have one route, whose name is empty.
    `default` is the route of a request that names no route; if it is None, such a request is
    refused. A model with separate encoders for texts and images has the routes TEXT_ROUTE and
    IMAGE_ROUTE, which the type of the input chooses instead of the request.
    """

    specs: dict[str, ModelSpec]
    default: str | None = ""

    @property
    def main_route(self) -> str:
        """The default route; the first route if there is no default."""
        return next(iter(self.specs)) if self.default is None else self.default

    @property
    def main(self) -> ModelSpec:
        """The spec of the main route. All routes have the same task, dimensions and prompts."""
        return self.specs[self.main_route]

    @property
    def image(self) -> ModelSpec | None:
        """The spec of the route that takes images, or None if no route does."""
        return next((spec for spec in self.specs.values() if spec.image is not None), None)

    @property
    def is_dual(self) -> bool:
        """Whether the model has a text encoder and a separate image encoder."""
        return self.image is not None and TEXT_ROUTE in self.specs

    @property
    def of_texts(self) -> "Routes":
        """The routes that a text may take. If the model has a separate image encoder, this is only
        the text encoder, as a route named ""."""
        return Routes({"": self.specs[TEXT_ROUTE]}) if self.is_dual else self
