"""The fields that the bodies of several APIs share, and what the fields mean.

If the value of a field asks for something that the server does not do, the request is refused,
because ignoring the field would give a plausible but wrong vector or score. Fields that are not
listed here are ignored, because clients send many that change nothing. Some options have several
names, such as the dtype of vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np

from jaxembed.data.outputs import OutputName
from jaxembed.errors import InvalidInput
from jaxembed.quantise import EmbeddingDtype, embedding_dtype
from jaxembed.runtime.postprocess import to_base64
from jaxembed.runtime.tasks import Intent
from jaxembed.server.http.exchange import Response

DTYPE = "x-embedding-dtype"  # response header: the dtype that the request named
ADAPTER = "x-adapter-name"  # response header: the name of the adapter that computed the vectors
PROMPT = "x-prompt-name"  # response header: the name of the prompt that the request chose
WINDOWS = "x-late-windows"  # response header: the number of windows in which the texts were run

DENSE: frozenset[OutputName] = frozenset({"dense"})

# Names of one field in different clients.
TRUNCATE = ("truncate", "truncation")
DIMENSIONS = ("dimensions", "output_dimension")
NORMALIZE = ("normalize", "normalized")

Format = Literal["float", "base64"]

TermNames = Callable[[Sequence[int]], list[str]]  # from indices of a vocabulary to its terms

# The function for each format that converts a vector to a value for JSON. orjson writes an array as
# a list of numbers; base64 encodes its little-endian bytes.
ENCODERS: dict[Format | None, Callable[[np.ndarray], np.ndarray | str]] = {
    None: np.asarray,
    "float": np.asarray,
    "base64": to_base64,
}

VLLM_DTYPES: dict[str, EmbeddingDtype] = {"float32": "float", "float16": "float16"}  # vLLM's names

NOTHING = (None, "", [], {})  # values that ask for nothing, whatever the field


@dataclass(frozen=True, eq=False)  # hashed by identity: `accepted_values` may hold lists
class Unserved:
    """Why a field is refused. `accepted_values` are values of the field that are not refused,
    because they ask for what the server does anyway; the values in NOTHING are not refused
    either."""

    reason: str
    accepted_values: tuple = ()


_TEXTS = Unserved("this route accepts only texts", ("text",))
_WHERE = Unserved("where a route takes images, they belong in the field of its inputs")
_CHUNKS = "only /v1/embeddings and /embeddings support chunks"
_FLOAT = Unserved("only routes that return vectors accept it", ("float", ["float"]))
_RIGHT = Unserved("texts are truncated on the right", ("right", "Right"))
_RERANKS = "only routes that rerank accept it"
_OTHERS = "only /v1/embeddings and /embeddings accept it"
_EMBEDDERS = "only routes that embed accept it, under the name that each documents"
_OUTPUTS = f"{_OTHERS}; /embed_sparse and /embed_multi return one output"
_LIMIT = "the model defines the limit"
_ADAPTER = Unserved("send `<served name>:<adapter>` as the `model`")
_NORMALIZE = Unserved("only routes that return one vector for each input accept it", (True,))
_ACTIVATION = Unserved("send `raw_scores` for logits", (True,))
_TEMPLATE = "the checkpoint defines the template of inputs"
_IMAGES = Unserved("the checkpoint defines how images are decoded and resized")


class RefusedFields(msgspec.Struct, kw_only=True):
    """The base of bodies, with fields that may ask for what the server does not do. Decoding raises
    InvalidInput if one does. A route that serves a field declares it again in its subclass."""

    modality: Annotated[Any, _TEXTS] = None
    image: Annotated[Any, _WHERE] = None
    images: Annotated[Any, _WHERE] = None
    messages: Annotated[Any, _TEXTS] = None
    late_chunking: Annotated[Any, Unserved(_CHUNKS, (False,))] = None
    chunks: Annotated[Any, Unserved(_CHUNKS)] = None
    chunk_size: Annotated[Any, Unserved(_CHUNKS)] = None
    chunk_overlap: Annotated[Any, Unserved(_CHUNKS, (0,))] = None
    offset_unit: Annotated[Any, Unserved(_CHUNKS)] = None
    enable_auto_chunking: Annotated[
        Any, Unserved("only /v1/contextualizedembeddings accepts it; use `chunk_size`", (False,))
    ] = None
    return_multivector: Annotated[Any, Unserved(_OUTPUTS, (False,))] = None
    outputs: Annotated[Any, Unserved(_OUTPUTS, (["dense"],))] = None
    pool_factor: Annotated[Any, Unserved("each token keeps its vector", (1,))] = None
    max_active_dims: Annotated[
        Any, Unserved("only /embed_sparse, and /v1/embeddings for a sparse output, accept it")
    ] = None
    return_tokens: Annotated[
        Any,
        Unserved(
            "only /embed_sparse, and /v1/embeddings for a sparse or multi-vector output, accept it",
            (False,),
        ),
    ] = None
    normalize: Annotated[Any, _NORMALIZE] = None
    normalized: Annotated[Any, _NORMALIZE] = None
    precision: Annotated[Any, Unserved("use `output_dtype` of /v1/embeddings", ("float32",))] = None
    embedding_type: Annotated[Any, _FLOAT] = None
    embedding_types: Annotated[Any, _FLOAT] = None
    encoding_type: Annotated[Any, _FLOAT] = None
    output_dtype: Annotated[Any, _FLOAT] = None
    embed_dtype: Annotated[Any, Unserved(_FLOAT.reason, ("float32",))] = None
    endianness: Annotated[Any, Unserved("vectors are little-endian", ("little", "native"))] = None
    encoding_format: Annotated[Any, Unserved(_OTHERS, ("float",))] = None
    output_dimension: Annotated[Any, Unserved(_EMBEDDERS, (0,))] = None
    input_type: Annotated[Any, Unserved(_EMBEDDERS)] = None
    task: Annotated[Any, Unserved(_OTHERS)] = None
    dimensions: Annotated[
        Any, Unserved("only routes that embed and truncate vectors accept it", (0,))
    ] = None
    prompt: Annotated[
        Any, Unserved("only routes that embed accept it (/similarity: in `parameters`)")
    ] = None
    prompt_name: Annotated[
        Any, Unserved("only routes that embed accept it (/similarity: in `parameters`)")
    ] = None
    instruction: Annotated[
        Any, Unserved("only routes that embed or rerank accept it (/similarity: in `parameters`)")
    ] = None
    chat_template: Annotated[Any, Unserved(_TEMPLATE)] = None
    chat_template_kwargs: Annotated[Any, Unserved(_TEMPLATE)] = None
    add_generation_prompt: Annotated[Any, Unserved(_TEMPLATE, (False,))] = None
    continue_final_message: Annotated[Any, Unserved(_TEMPLATE, (False,))] = None
    mm_processor_kwargs: Annotated[Any, _IMAGES] = None
    media_io_kwargs: Annotated[Any, _IMAGES] = None
    min_pixels: Annotated[Any, _IMAGES] = None
    max_pixels: Annotated[Any, _IMAGES] = None
    adapter: Annotated[Any, _ADAPTER] = None
    adapters: Annotated[Any, _ADAPTER] = None
    adapter_id: Annotated[Any, _ADAPTER] = None
    adapter_name: Annotated[Any, _ADAPTER] = None
    lora_name: Annotated[Any, _ADAPTER] = None
    lora_path: Annotated[Any, _ADAPTER] = None
    add_special_tokens: Annotated[Any, Unserved("special tokens are always added", (True,))] = None
    truncation: Annotated[Any, Unserved("send `truncate`", (True,))] = None
    truncation_side: Annotated[Any, _RIGHT] = None
    truncation_direction: Annotated[Any, _RIGHT] = None
    truncate_prompt_tokens: Annotated[Any, Unserved(_LIMIT, (-1,))] = None
    max_tokens: Annotated[Any, Unserved(_LIMIT, (0,))] = None
    use_activation: Annotated[Any, _ACTIVATION] = None
    activation: Annotated[Any, _ACTIVATION] = None
    softmax: Annotated[Any, _ACTIVATION] = None
    labels: Annotated[Any, Unserved("the checkpoint defines the labels")] = None
    cutoff_layer: Annotated[
        Any, Unserved("the conversion chooses the layer, by --cutoff-layer")
    ] = None
    cutoff_layers: Annotated[
        Any, Unserved("the conversion chooses the layer, by --cutoff-layer")
    ] = None
    compress_ratio: Annotated[Any, Unserved("tokens are not compressed", (1,))] = None
    compress_layer: Annotated[Any, Unserved("tokens are not compressed")] = None
    compress_layers: Annotated[Any, Unserved("tokens are not compressed")] = None
    rank_fields: Annotated[Any, Unserved("documents are ranked by `text`", (["text"],))] = None
    max_chunks_per_doc: Annotated[Any, Unserved(_RERANKS, (1,))] = None
    overlap_tokens: Annotated[Any, Unserved(_RERANKS, (0,))] = None
    long_documents: Annotated[Any, Unserved(_RERANKS, ("truncate",))] = None
    weights: Annotated[Any, Unserved("only routes that rerank accept it")] = None
    aggregation: Annotated[Any, Unserved("the best window gives the score", ("max",))] = None
    max_tokens_per_query: Annotated[Any, Unserved("documents are truncated first", (0,))] = None
    relevant_spans: Annotated[
        Any, Unserved("a document is scored as a whole", ({"mode": "disabled"},))
    ] = None

    def __post_init__(self) -> None:
        """Raise InvalidInput for the first refused field whose value is not accepted."""
        fields, read_values = refused_fields(type(self))
        values = read_values(self)
        if values.count(None) == len(values):
            return  # true of nearly all requests
        for (name, rule), value in zip(fields.items(), values, strict=True):
            if value not in NOTHING and value not in rule.accepted_values:
                raise InvalidInput(
                    f"`{name}` of {_shown(value)} is not supported: {rule.reason}", field=name
                )


class ModelRequest(RefusedFields, kw_only=True):
    """The base of the bodies of all requests that run a model."""

    model: str | None = None


@lru_cache
def refused_fields(kind: type[RefusedFields]) -> tuple[dict[str, Unserved], Callable[[Any], tuple]]:
    """Return the refused fields of a type of body, and a function. The function takes a body and
    returns the values of these fields, in the same order, in about 1 us."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        name: rule
        for name, hint in hints.items()
        for rule in getattr(hint, "__metadata__", ())
        if isinstance(rule, Unserved)
    }
    return fields, attrgetter(*fields)


def _shown(value: object) -> str:
    """Return the value as JSON, shortened to 40 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else f"{text[:40]}..."


def merged_values(body: ModelRequest, *groups: tuple[str, ...]) -> list[Any]:
    """Return one value for each group. A group has the names that different clients use for the
    same field.

    The value is None if all fields of the group are unset. Empty values and 0 count as unset, but
    False does not. Raises InvalidInput if the fields of a group have different values.
    """
    merged = []
    for group in groups:
        sent: dict[str, Any] = {}
        for name in group:
            value = getattr(body, name)
            if value or value is False:
                sent[name] = value
        values = list(sent.values())
        if any(value != values[0] for value in values[1:]):
            shown = " and ".join(f"`{name}` of {_shown(value)}" for name, value in sent.items())
            raise InvalidInput(
                f"{shown} contradict each other; send one of them", field=next(iter(sent))
            )
        merged.append(values[0] if values else None)
    return merged


def prompt_options(body: Any) -> dict[str, Any]:
    """Return the options of EncodeOptions that the fields prompt_name, prompt and instruction of a
    body set. The name of a special token in words of a request is plain text."""
    if not (body.prompt or body.instruction):
        return {"prompt_name": body.prompt_name}
    return {
        "prompt_name": body.prompt_name,
        "prompt": body.prompt or None,
        "instruction": body.instruction or None,
        "special_names": False,
    }


class VectorsRequest(ModelRequest, kw_only=True):
    """The base of bodies whose responses have vectors. Its fields name the dtype of the vectors.

    Clients use different names: Voyage `output_dtype`, Jina `embedding_type`, LlamaIndex's client
    of Jina `encoding_type`, vLLM `embed_dtype`. A list must contain one dtype.
    """

    output_dtype: str | list[str] | None = None
    embedding_type: str | list[str] | None = None
    encoding_type: str | list[str] | None = None
    embed_dtype: str | None = None
    embedding_types: Annotated[
        Any,
        Unserved("a response has vectors of one dtype; send `output_dtype`", ("float", ["float"])),
    ] = None


class FormattedRequest(VectorsRequest, kw_only=True):
    """The base of bodies that may ask for vectors in base64. In Jina's API, base64 is a value of
    `embedding_type`."""

    encoding_format: Format | None = None

    def __post_init__(self) -> None:
        """If a dtype field is base64, unset it and set `encoding_format` to base64. Raises
        InvalidInput if `encoding_format` is float, and for fields that the base class refuses."""
        super().__post_init__()
        for field in ("embedding_type", "encoding_type"):
            if getattr(self, field) in ("base64", ["base64"]):
                if self.encoding_format == "float":
                    raise InvalidInput(
                        f"`{field}` of base64 and `encoding_format` of float contradict each "
                        "other; send one of them",
                        field=field,
                    )
                self.encoding_format = "base64"
                setattr(self, field, None)


def requested_dtype(body: VectorsRequest) -> EmbeddingDtype | None:
    """Return the dtype that a body names; None if it names none. Raises InvalidInput for an unknown
    dtype, several dtypes, or fields that contradict each other."""
    dtypes: dict[str, EmbeddingDtype] = {}
    for field in ("output_dtype", "embedding_type", "encoding_type"):
        if (value := getattr(body, field)) not in NOTHING:
            is_single = isinstance(value, list) and len(value) == 1
            dtypes[field] = embedding_dtype(value[0] if is_single else value, field)
    if body.embed_dtype:
        value = body.embed_dtype
        dtypes["embed_dtype"] = embedding_dtype(VLLM_DTYPES.get(value, value), "embed_dtype")
    if len(set(dtypes.values())) > 1:
        shown = " and ".join(f"`{field}` of {dtype}" for field, dtype in dtypes.items())
        raise InvalidInput(
            f"{shown} contradict each other; send one of them", field=next(iter(dtypes))
        )
    return next(iter(dtypes.values()), None)


def with_choices(response: Response, intent: Intent) -> Response:
    """Add the headers that name the prompt, the adapter and the dtype of the vectors, and return
    the response. The header PROMPT is empty if the request chose to have no prompt."""
    if intent.prompt_name is not None:
        response.headers[PROMPT] = intent.prompt_name
    return with_kind(response, intent)


def with_kind(response: Response, intent: Intent) -> Response:
    """Add the headers ADAPTER, if an adapter computed the vectors, and DTYPE, if the request named
    a dtype. Return the response."""
    if intent.adapter_name is not None:
        response.headers[ADAPTER] = intent.adapter_name
    if intent.dtype is not None:
        response.headers[DTYPE] = intent.dtype
    return response


def purposes_of(body: ModelRequest) -> tuple[tuple[str, str], ...]:
    """Return the names and values of the fields that say what the texts of a body are for, such as
    ("input_type", "query")."""
    purposes = {"input_type": body.input_type, "task": body.task}
    return tuple((field, purpose) for field, purpose in purposes.items() if purpose)
