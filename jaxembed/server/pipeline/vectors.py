"""What clients ask of vectors by several names: their dtype, and what the texts are for."""

from typing import Annotated, Any, Literal

from quart import Response

from jaxembed.errors import InvalidInput
from jaxembed.quantise import EmbeddingDtype, embedding_dtype
from jaxembed.runtime.tasks import Intent
from jaxembed.server.pipeline.unsupported import NOTHING, ModelRequest, Unserved

DTYPE = "x-embedding-dtype"  # response header: the dtype that the request named
PROMPT = "x-prompt-name"  # response header: the name of the prompt that the request chose

Format = Literal["float", "base64"]

BASE64 = ("base64", ["base64"])

VLLM_DTYPES: dict[str, EmbeddingDtype] = {"float32": "float", "float16": "float16"}

_LIST = Unserved("answers have vectors of one dtype; send `output_dtype`", ("float", ["float"]))


class VectorsRequest(ModelRequest, kw_only=True):
    """The base of bodies that are answered with vectors: the dtype of these.

    `output_dtype` is Voyage's name, `embedding_type` Jina's, `encoding_type` that of LlamaIndex's
    client of Jina, `embed_dtype` vLLM's. A list holds one dtype.
    """

    output_dtype: str | list[str] | None = None
    embedding_type: str | list[str] | None = None
    encoding_type: str | list[str] | None = None
    embed_dtype: str | None = None
    embedding_types: Annotated[Any, _LIST] = None


class FormattedRequest(VectorsRequest, kw_only=True):
    """The base of bodies whose vectors may be base64, which is a type of embeddings to Jina."""

    encoding_format: Format | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("embedding_type", "encoding_type"):
            if getattr(self, field) in BASE64:
                if self.encoding_format == "float":
                    raise InvalidInput(
                        f"`{field}` of base64 and `encoding_format` of float contradict each "
                        "other; send one of them",
                        field=field,
                    )
                self.encoding_format = "base64"
                setattr(self, field, None)


def asked_dtype(body: VectorsRequest) -> EmbeddingDtype | None:
    """The dtype that a body asks for, None if it does not say.

    Raises InvalidInput for one that is not served, for several, and for fields that contradict
    each other.
    """
    found: dict[str, EmbeddingDtype] = {}
    for field in ("output_dtype", "embedding_type", "encoding_type"):
        if (value := getattr(body, field)) not in NOTHING:
            found[field] = embedding_dtype(_only(value), field)
    if body.embed_dtype:
        value = body.embed_dtype
        found["embed_dtype"] = embedding_dtype(VLLM_DTYPES.get(value, value), "embed_dtype")
    if len(set(found.values())) > 1:
        shown = " and ".join(f"`{field}` of {dtype}" for field, dtype in found.items())
        raise InvalidInput(
            f"{shown} contradict each other; send one of them", field=next(iter(found))
        )
    return next(iter(found.values()), None)


def with_choices(response: Response, intent: Intent) -> Response:
    """The response, with the header PROMPT if the request chose a prompt: its name, or empty for no
    prompt; and as `with_dtype`."""
    if intent.prompt_name is not None:
        response.headers.add(PROMPT, intent.prompt_name)
    return with_dtype(response, intent)


def with_dtype(response: Response, intent: Intent) -> Response:
    """The response, with the header DTYPE if the request named one."""
    if intent.dtype is not None:
        response.headers.add(DTYPE, intent.dtype)
    return response


def purposes_of(body: ModelRequest) -> tuple[tuple[str, str], ...]:
    """The fields of a body that say what its texts are for, with their values."""
    given = (("input_type", body.input_type), ("task", body.task))
    return tuple((field, purpose) for field, purpose in given if purpose)


def _only(value: str | list[str]) -> str | list[str]:
    """The one item of a list of one; else the value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
