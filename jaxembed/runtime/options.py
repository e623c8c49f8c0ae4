"""Defines the options of requests to an Embedder, and their answers, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxembed.data.inputs import Priority
from jaxembed.data.keyword_options import described
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ScoreFunction
from jaxembed.data.work import Ragged, SparseRows, WorkResult, join_results, select_inputs
from jaxembed.preprocessing.prompts import Role
from jaxembed.preprocessing.tokenizer import Side
from jaxembed.preprocessing.windows import PooledChunks, Windows
from jaxembed.quantise import EmbeddingDtype
from jaxembed.runtime.postprocess import rank, scores

TRUNCATE = "Whether to truncate an input over the limit; False raises InputTooLong (default: True)."
TRUNCATION_SIDE = 'Side of an input at which tokens are removed, "left" or "right".'
PRIORITY = '"interactive" or "bulk" (default: "interactive" if the request is small).'


class EncodeOptions(msgspec.Struct, frozen=True):
    """The options of one request for embeddings. An option of None means the default of the server
    or of the checkpoint."""

    outputs: Annotated[frozenset[OutputName], described("Outputs of the model.")] = frozenset(
        {"dense"}
    )
    prompt: Annotated[
        str | None,
        described("Text to put in front of every text (default: the checkpoint's default prompt)."),
    ] = None
    instruction: Annotated[
        str | None,
        described(
            "Instruction in words, which replaces that of the checkpoint's prompt for queries, or "
            "stands before every text if there is no such prompt."
        ),
    ] = None
    prompt_name: Annotated[
        str | None, described("Name of a prompt of the checkpoint to put there.")
    ] = None
    route: Annotated[
        str | None,
        described(
            "Route of a model with several (default: that of the prompt, or the model's default)."
        ),
    ] = None
    truncate: Annotated[bool | None, described(TRUNCATE)] = None
    truncation_side: Annotated[Side, described(TRUNCATION_SIDE)] = "right"
    dimensions: Annotated[
        int | None, described("Number of dimensions to truncate the vectors to (default: all).")
    ] = None
    max_active_dims: Annotated[
        int | None,
        described(
            "Number of largest weights to keep of a sparse embedding (default: the model's own)."
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        described("Whether to scale the vectors to length 1 (default: as the checkpoint says)."),
    ] = None
    output_dtype: Annotated[
        EmbeddingDtype,
        described('Data type of the vectors; "int8" and "uint8" need calibration ranges.'),
    ] = "float"
    adapter: Annotated[
        str | None,
        described("Name of a low-rank adapter (default: that of the prompt's name, or none)."),
    ] = None
    priority: Annotated[Priority | None, described(PRIORITY)] = None
    bare_ids: Annotated[bool, described("Whether token ids may lack the special tokens.")] = True
    special_names: Annotated[
        bool, described("Whether names of special tokens in `prompt` become these tokens.")
    ] = True
    role: Annotated[
        Role | None,
        described(
            'Whether the texts are a "query" or a "document" (default: as the prompt\'s name says).'
        ),
    ] = None


class RequestedOptions(msgspec.Struct, frozen=True):
    """What a request for embeddings asks for. `Tasks.intent` resolves it for a model.

    `purposes` say what the texts are for: pairs of a request field and its value, such as
    ("input_type", "query"). `outputs` are the outputs that the request names; they replace
    `options.outputs`. If `outputs` is empty, the model's default outputs are used; if it is None,
    `options.outputs`. `multi_vector` asks for several vectors for each input, and `tokens` asks for
    the names of tokens and terms. `dtype` is the dtype that the request names, if any. `types` are
    further dtypes, from the request field `types_field`. `dimensions_field` is the request field
    of the dimensions.
    """

    options: EncodeOptions
    purposes: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] | None = None
    multi_vector: bool = False
    tokens: bool = False
    types: tuple[EmbeddingDtype, ...] = ()
    types_field: str = "embedding_types"
    dtype: EmbeddingDtype | None = None
    dimensions_field: str = "dimensions"


class ScoreOptions(msgspec.Struct, frozen=True):
    """The options of one request for scores or a ranking. `weights` are only for embedding models,
    `instruction` and `max_document_tokens` only for models that score pairs."""

    truncate: Annotated[bool | None, described(TRUNCATE)] = None
    truncation_side: Annotated[Side, described(TRUNCATION_SIDE)] = "right"
    instruction: Annotated[
        str | None, described("Instruction for a model with a template (default: the model's own).")
    ] = None
    max_document_tokens: Annotated[
        int | None,
        described("Maximum tokens of the second text of a pair, which is truncated to it."),
    ] = None
    max_chunks: Annotated[
        int,
        described(
            "Maximum windows that a document over the limit is divided into; the best one counts."
        ),
    ] = 1
    overlap_tokens: Annotated[
        int | None,
        described("Tokens that neighbouring windows share (default: chosen from their length)."),
    ] = None
    weights: Annotated[
        tuple[float, ...] | None,
        described("Weights of the dense, sparse and multi-vector scores (default: all the same)."),
    ] = None
    adapter: Annotated[str | None, described("Name of a low-rank adapter (default: none).")] = None
    priority: Annotated[Priority | None, described(PRIORITY)] = None


class RequestStats(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The tokens and the times of an answered request."""

    num_tokens: np.ndarray  # int [n], tokens of each input after truncation
    truncated: int  # number of inputs that were truncated
    tokenization_s: float  # seconds for all inputs together
    queue_s: float  # seconds in the queue, mean over the inputs
    inference_s: float  # seconds of computation, mean over the inputs
    cached: int = 0  # inputs that were answered from the engine's cache

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all inputs together."""
        return sum(self.num_tokens.tolist())  # ndarray.sum takes longer for a few inputs

    @staticmethod
    def joined_stats(parts: "Sequence[RequestStats]") -> dict[str, Any]:
        """Return the fields of this class for the answers to all parts of a request. Times are
        means weighted by inputs."""
        mean = partial(np.average, weights=[len(part.num_tokens) for part in parts])
        return {
            "num_tokens": np.concatenate([part.num_tokens for part in parts]),
            "truncated": sum(part.truncated for part in parts),
            "tokenization_s": float(mean([part.tokenization_s for part in parts])),
            "queue_s": float(mean([part.queue_s for part in parts])),
            "inference_s": float(mean([part.inference_s for part in parts])),
            "cached": sum(part.cached for part in parts),
        }


class Embeddings(RequestStats, frozen=True, eq=False):
    """The answer to a request for embeddings, in the order of the inputs."""

    values: WorkResult  # each output, truncated, normalised and quantized as the options say
    chunked: PooledChunks | None = None  # for late chunking: the chunks that the vectors belong to
    # the windows of documents that may be divided; each window then counts as an input
    windows: Windows | None = None
    vector_ids: np.ndarray | None = None  # int32 [vectors]: token id of each vector of multi_vector

    @staticmethod
    def joined(parts: "Sequence[Embeddings]") -> "Embeddings":
        """Join answers that have the same outputs."""
        ids = [part.vector_ids for part in parts if part.vector_ids is not None]
        return Embeddings(
            join_results([part.values for part in parts]),
            **RequestStats.joined_stats(parts),
            vector_ids=np.concatenate(ids) if ids else None,
        )

    def ordered(self, order: np.ndarray) -> "Embeddings":
        """Return the answer for the inputs in the given order, int `[n]`. Each input has one slot
        and no windows."""
        ids = self.vector_ids
        if ids is not None:
            ids = Ragged(ids, self.multi_vector.offsets).ordered(order).values
        return msgspec.structs.replace(
            self,
            values=select_inputs(self.values, order),
            num_tokens=self.num_tokens[order],
            vector_ids=ids,
        )

    @property
    def dense(self) -> np.ndarray:
        """The dense vectors: float32 `[n, dim]`, or another dtype as `quantise` returns it. Raises
        KeyError if the request did not ask for them."""
        return self.values["dense"]

    @property
    def sparse(self) -> SparseRows:
        """The sparse embeddings: a row of term weights for each input. Raises KeyError if the
        request did not ask for them."""
        return self.values["sparse"]

    @property
    def multi_vector(self) -> Ragged:
        """The multi-vector embeddings: for each input float32 `[vectors, width]`, or another dtype.
        Raises KeyError if the request did not ask for them."""
        return self.values["multi_vector"]

    @property
    def tokens(self) -> Ragged:
        """The last hidden states: for each input float32 `[length, width]`, or another dtype.
        Raises KeyError if the request did not ask for them."""
        return self.values["tokens"]


@dataclass(frozen=True)
class EncodedChunks:
    """The vectors of the chunks of one text.

    `vectors` has the shape `[chunks, dim]` and the dtype of `Embeddings.dense`. `bounds` has the
    start and the end of each chunk, int64 `[chunks, 2]`, in the offset unit of the text.
    """

    vectors: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True)
class Chunk:
    """A window of a document: its number, its first character, and the character after its last."""

    index: int
    start: int
    end: int


def best_windows(
    scores: np.ndarray, windows: Windows
) -> tuple[np.ndarray, np.ndarray, list[Chunk]]:
    """Find the window of each document that has the highest score.

    `scores` are float `[windows]`, for the windows of all documents. Returns three things for each
    document: the index in `scores` of its first window, that of its best window, both int64
    `[documents]`, and its best window.
    """
    firsts = np.cumsum(windows.counts) - windows.counts
    # for each document, the index of the best window among its own windows
    best = np.array([np.argmax(part) for part in np.split(scores, firsts[1:])], np.int64)
    bounds = windows.bounds[firsts + best].tolist()
    chunks = [Chunk(k, *bound) for k, bound in zip(best.tolist(), bounds, strict=True)]
    return firsts, firsts + best, chunks


@dataclass(frozen=True)
class Ranked:
    """The score of a document, and its index in the request. `chunk` is the window that has this
    score, if documents may be divided."""

    index: int
    score: float
    chunk: Chunk | None = None


@dataclass(frozen=True)
class Label:
    """A label of the model and its score for an input."""

    label: str
    score: float


class TokenScores(RequestStats, frozen=True, eq=False):
    """The answer of a token classifier, in the order of the texts. `find_entities` makes entities
    of it."""

    logits: Ragged  # for each text float32 [tokens, labels]
    ids: np.ndarray  # int32 [tokens of all texts]
    offsets: np.ndarray  # int32 [tokens of all texts, 2], as in Tokenized
    labels: tuple[str, ...]


class Scores(RequestStats, frozen=True, eq=False):
    """The answer of a reranker or classifier, in the order of the inputs."""

    logits: np.ndarray  # float32 [n, labels]
    labels: tuple[str, ...]
    score_function: ScoreFunction
    chunks: list[Chunk] | None = None  # best window of each document, if documents may be divided

    @staticmethod
    def joined(parts: "Sequence[Scores]") -> "Scores":
        """Join answers of one model."""
        logits = np.concatenate([part.logits for part in parts])
        labels, function = parts[0].labels, parts[0].score_function
        return Scores(logits, labels, function, **RequestStats.joined_stats(parts))

    def ordered(self, order: np.ndarray) -> "Scores":
        """Return the answer for the inputs in the given order, int `[n]`."""
        return msgspec.structs.replace(
            self, logits=self.logits[order], num_tokens=self.num_tokens[order]
        )

    def shown(self, raw_scores: bool) -> np.ndarray:
        """Return scores from 0 to 1, or with `raw_scores` the logits: float32 `[n, labels]`."""
        return self.logits if raw_scores else scores(self.logits, self.score_function)

    def ranked(self, raw_scores: bool) -> list[Ranked]:
        """Return the inputs, sorted by the score of their first label, the best first."""
        values = self.shown(raw_scores)[:, 0]
        chunks = self.chunks or [None] * len(values)
        return [Ranked(int(k), float(values[k]), chunks[k]) for k in rank(self.logits[:, 0])]

    def labelled(self, raw_scores: bool) -> list[list[Label]]:
        """Return the labels of each input with their scores, the best first."""
        return [
            [Label(self.labels[k], float(row[k])) for k in rank(logits)]
            for logits, row in zip(self.logits, self.shown(raw_scores), strict=True)
        ]


class Similarities(Scores, frozen=True, eq=False, kw_only=True):
    """The similarities of documents to a query. `logits` holds the similarities, and `num_tokens`
    has the tokens of the query first, then those of the documents."""

    raw: np.ndarray | None = None  # float32 [n, 1]: the sums of which `logits` are the means

    def shown(self, raw_scores: bool) -> np.ndarray:
        """Return the similarities, float32 `[n, 1]`, or with `raw_scores` the sums in `raw`, if
        there are any."""
        return self.raw if raw_scores and self.raw is not None else self.logits
