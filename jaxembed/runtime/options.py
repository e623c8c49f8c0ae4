"""The options of a request to an Embedder, and the answers. Knows no wire format."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from jaxembed.data.inputs import Priority
from jaxembed.data.keyword_options import described
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ScoreFunction
from jaxembed.data.work import Ragged, SparseRows, WorkResult, join_results
from jaxembed.preprocessing.prompts import Role
from jaxembed.preprocessing.tokenizer import Side
from jaxembed.preprocessing.windows import Chunked, Windows
from jaxembed.quantise import EmbeddingDtype
from jaxembed.runtime.postprocess import rank, scores

TRUNCATE = "Whether to truncate an input over the limit; False raises InputTooLong (default: True)."
TRUNCATION_SIDE = 'Side of an input at which tokens are removed, "left" or "right".'
PRIORITY = '"interactive" or "bulk" (default: "interactive" if the request is small).'


@dataclass(frozen=True)
class EncodeOptions:
    """The options of one request. None means the default of the server or of the checkpoint."""

    outputs: frozenset[OutputName] = described(frozenset({"dense"}), "Outputs of the model.")
    prompt: str | None = described(
        None, "Text to put in front of every text (default: the checkpoint's default prompt)."
    )
    prompt_name: str | None = described(None, "Name of a prompt of the checkpoint to put there.")
    route: str | None = described(
        None, "Route of a model with several (default: that of the prompt, or the model's default)."
    )
    truncate: bool | None = described(None, TRUNCATE)
    truncation_side: Side = described("right", TRUNCATION_SIDE)
    dimensions: int | None = described(
        None, "Number of dimensions to truncate the vectors to (default: all)."
    )
    max_active_dims: int | None = described(
        None, "Number of largest weights to keep of a sparse embedding (default: the model's own)."
    )
    normalize: bool | None = described(
        None, "Whether to scale the vectors to length 1 (default: as the checkpoint says)."
    )
    output_dtype: EmbeddingDtype = described(
        "float", 'Data type of the vectors; "int8" and "uint8" need calibration ranges.'
    )
    adapter: str | None = described(
        None, "Name of a low-rank adapter (default: that of the prompt's name, or none)."
    )
    priority: Priority | None = described(None, PRIORITY)
    bare_ids: bool = described(True, "Whether token ids may lack the special tokens.")
    role: Role | None = described(
        None,
        'Whether the texts are a "query" or a "document" (default: as the prompt\'s name says).',
    )


@dataclass(frozen=True)
class Asked:
    """What a client asks for, in its own words, before it is known what that means for a model.

    `purposes` say what the texts are for, by the field of each, such as ("input_type", "query").
    `outputs` are named by the client, in place of those of the options; empty for the model's
    usual ones. `multi_vector` asks for several vectors an input, `tokens` for the names of tokens
    and terms. `dtype` is the one that the client names, if any; `types` are further ones, which
    came in `types_field`. `dimensions_field` has the number of dimensions.
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


@dataclass(frozen=True)
class ScoreOptions:
    """The options of one request to a reranker or classifier. It has no prompts: they are for
    embedding models. `weights` are for embedding models that give several outputs, which take no
    `instruction` and `max_document_tokens`."""

    truncate: bool | None = described(None, TRUNCATE)
    truncation_side: Side = described("right", TRUNCATION_SIDE)
    instruction: str | None = described(
        None, "Instruction for a model with a template (default: the model's own)."
    )
    max_document_tokens: int | None = described(
        None, "Maximum tokens of the second text of a pair, which is truncated to it."
    )
    max_chunks: int = described(
        1, "Maximum windows that a document over the limit is divided into; the best one counts."
    )
    overlap_tokens: int | None = described(
        None, "Tokens that neighbouring windows share (default: chosen from their length)."
    )
    weights: tuple[float, ...] | None = described(
        None, "Weights of the dense, sparse and multi-vector scores (default: all the same)."
    )
    adapter: str | None = described(None, "Name of a low-rank adapter (default: none).")
    priority: Priority | None = described(None, PRIORITY)


class Embeddings(msgspec.Struct, frozen=True, eq=False):
    """The answer to a request, in input order."""

    values: WorkResult  # of each output asked for, cut, normalised and encoded as asked
    num_tokens: np.ndarray  # int [n], tokens really run
    truncated: int  # inputs that were cut
    tokenization_s: float  # this and the next two are means over the inputs
    queue_s: float
    inference_s: float
    cached: int = 0  # inputs whose answers the engine had kept
    chunked: Chunked | None = None  # where the chunks are that each have a vector, of chunked texts
    windows: Windows | None = None  # of documents in windows, each of which is an input
    vector_ids: np.ndarray | None = None  # int32 [rows of `multi_vector`], the token of each

    @staticmethod
    def joined(parts: "Sequence[Embeddings]") -> "Embeddings":
        """The answers, which have the same outputs, as one; there is one or more."""
        counts = [len(one.num_tokens) for one in parts]
        mean = partial(np.average, weights=counts)
        ids = [one.vector_ids for one in parts if one.vector_ids is not None]
        return Embeddings(
            join_results([one.values for one in parts]),
            num_tokens=np.concatenate([one.num_tokens for one in parts]),
            truncated=sum(one.truncated for one in parts),
            tokenization_s=float(mean([one.tokenization_s for one in parts])),
            queue_s=float(mean([one.queue_s for one in parts])),
            inference_s=float(mean([one.inference_s for one in parts])),
            cached=sum(one.cached for one in parts),
            vector_ids=np.concatenate(ids) if ids else None,
        )

    @property
    def dense(self) -> np.ndarray:
        """float32 `[n, dim]`, or of the dtype asked for, as `quantise` gives it. Raises KeyError if
        it was not asked for."""
        return self.values["dense"]

    @property
    def sparse(self) -> SparseRows:
        """The weights of terms, a row for each input. Raises KeyError if they were not asked
        for."""
        return self.values["sparse"]

    @property
    def multi_vector(self) -> Ragged:
        """The vectors of each input to compare token by token: float32 `[vectors, width]`, or of
        the dtype asked for. Raises KeyError if they were not asked for."""
        return self.values["multi_vector"]

    @property
    def tokens(self) -> Ragged:
        """The last hidden states of each input, before pooling: float32 `[length, width]`, or of
        the dtype asked for. Raises KeyError if they were not asked for."""
        return self.values["tokens"]


@dataclass(frozen=True)
class EncodedChunks:
    """The chunks of one text: their vectors `[chunks, dim]`, as `dense` of Embeddings has them, and
    where each starts and ends in the text's offset unit, int64 `[chunks, 2]`."""

    vectors: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True)
class Chunk:
    """A window of a document: its number, its first character and the one after its last."""

    index: int
    start: int
    end: int


def best_windows(
    scores: np.ndarray, windows: Windows
) -> tuple[np.ndarray, np.ndarray, list[Chunk]]:
    """Of documents whose windows have these scores, float `[windows]`: the first window of each,
    the best one, int64 `[documents]`, and which part of the document that is."""
    first = np.cumsum(windows.counts) - windows.counts
    parts = np.split(scores, first[1:])
    numbers = np.array([int(np.argmax(part)) for part in parts], np.int64)
    bounds = windows.bounds[first + numbers].tolist()
    chunks = [Chunk(k, *bound) for k, bound in zip(numbers.tolist(), bounds, strict=True)]
    return first, first + numbers, chunks


@dataclass(frozen=True)
class Ranked:
    """A document's place in the list that was given, and its score; of a request whose documents
    may be divided also the window that has this score."""

    index: int
    score: float
    chunk: Chunk | None = None


@dataclass(frozen=True)
class Label:
    """A class and its score."""

    label: str
    score: float


@dataclass(frozen=True)
class Scores:
    """The answer of a reranker or classifier, in input order."""

    logits: np.ndarray  # float32 [n, labels]
    labels: tuple[str, ...]
    score_function: ScoreFunction
    num_tokens: np.ndarray  # int [n], tokens really run
    truncated: int  # inputs that were cut
    tokenization_s: float  # this and the next two are means over the inputs
    queue_s: float
    inference_s: float
    cached: int = 0  # inputs whose answers the engine had kept
    chunks: list[Chunk] | None = None  # the best window of each document, if they may be divided

    def shown(self, raw_scores: bool) -> np.ndarray:
        """float32 [n, labels]: from 0 to 1, or the logits."""
        return self.logits if raw_scores else scores(self.logits, self.score_function)

    def ranked(self, raw_scores: bool) -> list[Ranked]:
        """Each input by its first label, best first."""
        values = self.shown(raw_scores)[:, 0]
        chunks = self.chunks or [None] * len(values)
        return [Ranked(int(k), float(values[k]), chunks[k]) for k in rank(self.logits[:, 0])]

    def labelled(self, raw_scores: bool) -> list[list[Label]]:
        """Every label of each input, best first."""
        rows = zip(self.logits, self.shown(raw_scores), strict=True)
        return [
            [Label(self.labels[k], float(row[k])) for k in rank(logits)] for logits, row in rows
        ]


@dataclass(frozen=True, kw_only=True)
class Similarities(Scores):
    """How similar documents are to a query. The `logits` are the similarities; `num_tokens` begins
    with the query's."""

    raw: np.ndarray | None = None  # float32 [n, 1], the sums that they are the means of

    def shown(self, raw_scores: bool) -> np.ndarray:
        """float32 [n, 1]: the similarities, or the sums where they are means of such."""
        return self.raw if raw_scores and self.raw is not None else self.logits
