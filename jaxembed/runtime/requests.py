"""Defines requests as plain data. Each kind of request tokenizes its inputs for the engine, and
makes its answer from the engine's results."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from jaxembed.data.inputs import ChunkSize, Input, Pair, Parts, Priority, Text, parts_of
from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import IMAGE_ROUTE, Head, ModelSpec, PerToken, Vocabulary
from jaxembed.data.work import Ragged, Span, WorkResult
from jaxembed.engine.admission import Cost
from jaxembed.engine.bucket import Bucket
from jaxembed.errors import InvalidInput
from jaxembed.preprocessing.images.processor import Processor
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions, Tokenized
from jaxembed.preprocessing.windows import NO_CHUNKS, pool_slots
from jaxembed.quantise import quantise
from jaxembed.runtime.options import (
    Embeddings,
    EncodeOptions,
    ScoreOptions,
    Scores,
    TokenScores,
    best_windows,
)
from jaxembed.runtime.postprocess import keep_largest, term_weights
from jaxembed.runtime.similarity import list_scores

INPUT_BYTES = 1024  # memory of an input besides text and tokens; measured: 0.8 KB
TOKEN_BYTES = 8  # memory of a token: its id, twice while a batch is packed
OFFSETS_BYTES = 16  # memory of the offsets of a token: two int32, twice while they are joined
FLOAT_BYTES = 4
TERM_BYTES = 8  # memory of a term of a sparse embedding: its value and its index
TERMS_A_TOKEN = 16  # estimated terms of a sparse embedding per token; `excess_bytes` corrects it
LEAST = 5e-324  # the least float64 above zero
SQUARED_AT_ONCE = 64  # vectors; numpy copies them to float64
LOGITS: frozenset[OutputName] = frozenset({"logits"})
TOKEN_LOGITS: frozenset[OutputName] = frozenset({"token_logits"})

Answer = TypeVar("Answer")
Shared = Any  # what all jobs of a request use, such as the tokens of a query; None: nothing


class Run(msgspec.Struct, frozen=True, eq=False):
    """The results of the tokenizer and the engine for one request."""

    values: WorkResult
    tokenized: Tokenized
    tokenization_s: float  # seconds for all inputs together
    queue_s: list[float]  # seconds in the queue of each input
    inference_s: list[float]  # seconds of computation of each input
    cached: int = 0  # number of inputs that were answered from the engine's cache

    @property
    def common_fields(self) -> dict[str, Any]:
        """The fields of RequestStats, which every answer has, by name."""
        return {
            "num_tokens": self.tokenized.work.text_tokens.astype(np.int64),
            "truncated": self.tokenized.truncated,
            "tokenization_s": self.tokenization_s,
            "queue_s": sum(self.queue_s) / max(len(self.queue_s), 1),
            "inference_s": sum(self.inference_s) / max(len(self.inference_s), 1),
            "cached": self.cached,
        }


@dataclass(frozen=True)
class Request(ABC, Generic[Answer]):
    """One request: the `items` to tokenize, the tokenization options, and the outputs to compute.

    The engine of the route `route` computes the `outputs`, with the adapter number `adapter`; 0
    means no adapter. A runner calls `share` once, then `prepare` for each chunk of the items, in
    several threads at the same time, and `finish` after the engine has answered.
    """

    items: Sequence
    tokenization: TokenizationOptions
    outputs: frozenset[OutputName]
    priority: Priority | None
    route: str = field(default="", kw_only=True)
    adapter: int = field(default=0, kw_only=True)

    def share(self, processor: Processor) -> Shared:
        """Tokenize what all chunks use, such as a query; return None if there is nothing. Raises
        InvalidInput or TokenizerError."""
        return None

    def prepare(self, processor: Processor, shared: Shared, chunk: Sequence) -> Tokenized:
        """Tokenize a chunk of the items. `shared` is the result of `share`. Raises InvalidInput or
        TokenizerError."""
        return processor.encode(chunk, self.tokenization)

    @abstractmethod
    def finish(self, spec: ModelSpec, run: Run) -> Answer:
        """Make the answer from the results of the tokenizer and the engine. Raises InvalidInput for
        a value that the requested dtype cannot hold."""

    def inputs(self) -> Sequence[Input]:
        """Return the items as inputs of the model."""
        return self.items

    def cost(self, spec: ModelSpec, sequences: int, tokens: int) -> Cost:
        """Return the cost that admission counts for the request, with an estimate of the bytes.

        `sequences` and `tokens` are the request's numbers of sequences and tokens, exact or
        estimated. Each sequence counts as an input."""
        token_bytes, input_bytes = TOKEN_BYTES, INPUT_BYTES
        if spec.image is not None and self.route == IMAGE_ROUTE:
            token_bytes += 2 * spec.image.token_bytes  # two: pixels are copied to pack a batch
        for name in self.outputs:
            row_bytes = 2 * FLOAT_BYTES * spec.widths[name]  # a row and its normalised copy
            if OUTPUTS[name].sparse:
                token_bytes += min(row_bytes, TERM_BYTES * TERMS_A_TOKEN)
            elif OUTPUTS[name].per == "slot":
                input_bytes += row_bytes  # each sequence has one row
            else:
                # `row_bytes` counts two copies of a row; `finish` may make a third to drop rows
                copies = 3 if name == "multi_vector" else 1
                token_bytes += copies * row_bytes // 2
        return Cost(sequences, tokens, sequences * input_bytes + tokens * token_bytes)


@dataclass(frozen=True)
class EncodeRequest(Request[Embeddings]):
    """A request for embeddings. `items` are Inputs. `ranges` are the calibration ranges for
    `options.output_dtype`, if that dtype needs ranges."""

    options: EncodeOptions
    ranges: np.ndarray | None = field(default=None, kw_only=True)  # float32 [2, dim]

    def finish(self, spec: ModelSpec, run: Run) -> Embeddings:
        """Truncate, normalise and quantize the outputs as the options say.

        Drop the vectors of tokens that the head skips, and make sparse embeddings from token
        weights if no head computes them. Raises InvalidInput for a value that the dtype cannot
        hold.
        """
        values, vector_ids = dict(run.values), None
        if "dense" in values:
            values["dense"] = self._shape(values["dense"], spec.dense)
        if "tokens" in values:
            encoded = quantise(values["tokens"].values, self.options.output_dtype)
            values["tokens"] = Ragged(encoded, values["tokens"].offsets)
        if "multi_vector" in values:
            head, rows = spec.heads["multi_vector"], values["multi_vector"]
            assert isinstance(head, PerToken)
            kept, vector_ids = np.ones(len(rows.values), bool), run.tokenized.work.planes["ids"]
            if head.skipped_ids and self.tokenization.role != "query":
                kept = ~np.isin(vector_ids, head.skipped_ids)
            if head.drops_first:
                kept[rows.offsets[:-1]] = False  # the first vector of each input
            if not kept.all():
                rows, vector_ids = rows.where(kept), vector_ids[kept]
            values["multi_vector"] = Ragged(self._shape(rows.values, head), rows.offsets)
        if "sparse" in self.options.outputs:
            max_active = None
            if "sparse" in values:
                head, terms = spec.heads["sparse"], values["sparse"]
                max_active = head.max_active if isinstance(head, Vocabulary) else None
            else:
                head, work = spec.heads["token_weights"], run.tokenized.work
                assert isinstance(head, PerToken)
                terms = term_weights(
                    values.pop("token_weights").values[:, 0],
                    work.planes["ids"],
                    work.lengths,
                    skipped=head.skipped_ids,
                    vocab_size=int(spec.config["vocab_size"]),
                )
            max_active = self.options.max_active_dims or max_active
            values["sparse"] = terms if max_active is None else keep_largest(terms, max_active)
        return Embeddings(values, **run.common_fields, vector_ids=vector_ids)

    def _shape(self, vectors: np.ndarray, head: Head) -> np.ndarray:
        """Truncate, normalise and quantize vectors as the options say."""
        options = self.options
        normalize = head.normalize if options.normalize is None else options.normalize
        shaped = shape_vectors(vectors, dimensions=options.dimensions, normalize=normalize)
        if options.output_dtype == "float":
            return shaped
        return quantise(shaped, options.output_dtype, self.ranges)


@dataclass(frozen=True)
class DividedRequest(Generic[Answer]):
    """A request that is divided into `parts`, such as one for texts and one for images, whose
    answers are Embeddings or Scores. `places` are the indices of the items of each part in the
    whole request, int `[items]`."""

    parts: Sequence[Request[Answer]]
    places: Sequence[np.ndarray]

    @staticmethod
    def by_size(request: Request[Answer], max_items: int) -> "DividedRequest[Answer]":
        """Divide a request into parts of at most `max_items` items."""
        items, numbers = request.items, np.arange(len(request.items))
        firsts = range(0, len(items), max_items)
        return DividedRequest(
            [replace(request, items=items[k : k + max_items]) for k in firsts],
            [numbers[k : k + max_items] for k in firsts],
        )

    @staticmethod
    def by_kind(
        texts: Request[Answer], images: Request[Answer], is_image: Sequence[bool]
    ) -> "Request[Answer] | DividedRequest[Answer]":
        """Return the request of `texts`, that of `images`, or both if some of their items, which
        are the same, go to one and some to the other, as `is_image` says for each."""
        if not any(is_image):
            return texts
        if all(is_image):
            return images
        places = [np.flatnonzero(np.array(is_image) == value) for value in (False, True)]
        parts = [
            replace(part, items=[part.items[k] for k in numbers.tolist()])
            for part, numbers in zip((texts, images), places, strict=True)
        ]
        return DividedRequest(parts, places)

    @property
    def route(self) -> str:
        """The route of the first part."""
        return self.parts[0].route

    @contextmanager
    def part(self, number: int) -> Iterator[Request[Answer]]:
        """Yield the part with this index, to run it in the `with` block. An InvalidInput that the
        block raises with an index in the part is raised with the index in the whole request."""
        try:
            yield self.parts[number]
        except InvalidInput as error:
            if error.index is None:
                raise
            raise error.at(int(self.places[number][error.index])) from error

    def joined(self, answers: Sequence[Any]) -> Answer:
        """Join the answers to the parts into one answer, in the order of the items."""
        order = np.argsort(np.concatenate(self.places))  # restores the order before the division
        return answers[0].joined(answers).ordered(order)


AnyRequest = Request[Answer] | DividedRequest[Answer]


@dataclass(frozen=True)
class ComparedRequest(EncodeRequest):
    """A request for the outputs of documents to compare with a query. `items` are Texts, which may
    be empty and may be divided into windows."""

    def prepare(self, processor: Processor, shared: Shared, chunk: Sequence) -> Tokenized:
        """Tokenize a chunk of the documents. Raises InvalidInput or TokenizerError."""
        assert isinstance(processor, TextProcessor)
        return processor.encode_documents(chunk, self.tokenization)

    def finish(self, spec: ModelSpec, run: Run) -> Embeddings:
        """Return the outputs of each document, or of each window if documents are divided."""
        return msgspec.structs.replace(super().finish(spec, run), windows=run.tokenized.windows)


@dataclass(frozen=True)
class LateRequest(EncodeRequest):
    """A request for late chunking: a vector of each chunk of texts. `items` are ChunkedTexts."""

    def prepare(self, processor: Processor, shared: Shared, chunk: Sequence) -> Tokenized:
        """Tokenize a chunk of the items. Raises InvalidInput or TokenizerError."""
        assert isinstance(processor, TextProcessor)
        return processor.encode_chunked_texts(
            chunk, self.tokenization, Bucket(1, processor.limit).slots
        )

    def finish(self, spec: ModelSpec, run: Run) -> Embeddings:
        """Pool the vector of each chunk from the vectors of its slots, one for each window that
        holds a piece of the chunk. Truncate, normalise and quantize the results as the options say.

        `num_tokens` counts a token once, even if several windows contain it. Raises InvalidInput
        for a value that the dtype cannot hold.
        """
        chunked = run.tokenized.chunked or NO_CHUNKS
        dense = run.values["dense"]
        if len(dense):
            dense = pool_slots(dense, run.tokenized.work.bounds, chunked)
        answer = super().finish(spec, msgspec.structs.replace(run, values={"dense": dense}))
        return msgspec.structs.replace(answer, num_tokens=chunked.tokens, chunked=chunked)

    def inputs(self) -> Sequence[Input]:
        """Return the texts as inputs, without their chunks."""
        return [Text(item.text) for item in self.items]

    def cost(self, spec: ModelSpec, sequences: int, tokens: int) -> Cost:
        """Return the cost of the request, including a vector for each chunk."""
        base = super().cost(spec, sequences, tokens)
        # A text has a list of chunks, or a ChunkSize, which gives a chunk at each step of tokens.
        chunks: list[Sequence[Span] | ChunkSize] = [item.chunks for item in self.items]
        max_chunks = sum(len(spans) for spans in chunks if not isinstance(spans, ChunkSize))
        steps = [size.tokens - size.overlap for size in chunks if isinstance(size, ChunkSize)]
        if steps:
            max_chunks += len(steps) + tokens // min(steps)
        chunk_bytes = INPUT_BYTES + 2 * FLOAT_BYTES * spec.dim
        return base._replace(bytes=base.bytes + max_chunks * chunk_bytes)


@dataclass(frozen=True)
class ScoreRequest(Request[Scores]):
    """A request for logits. `items` are Texts and Pairs."""

    options: ScoreOptions

    def finish(self, spec: ModelSpec, run: Run) -> Scores:
        """Return the logits, with the labels and the score function."""
        return Scores(run.values["logits"], spec.labels, spec.score_function, **run.common_fields)


@dataclass(frozen=True)
class QueryRequest(ScoreRequest):
    """A request for the logits of one `query` with each document; `items` are documents. Both are
    texts, or on the route of images each is a Content."""

    query: Any

    def share(self, processor: Processor) -> Shared:
        """Tokenize the query. Raises InvalidInput or TokenizerError."""
        return processor.tokenize_query(self.query, self.tokenization)

    def prepare(self, processor: Processor, shared: Shared, chunk: Sequence) -> Tokenized:
        """Tokenize pairs of the query, which `shared` holds, and a chunk of the documents. Raises
        InvalidInput or TokenizerError."""
        return processor.encode_pairs_of_query(shared, chunk, self.tokenization)

    def finish(self, spec: ModelSpec, run: Run) -> Scores:
        """Return the logits of each document, or of the best window of a divided document."""
        answer, windows = super().finish(spec, run), run.tokenized.windows
        if windows is None:
            return answer
        firsts, best, chunks = best_windows(answer.logits[:, 0], windows)
        return msgspec.structs.replace(
            answer,
            logits=answer.logits[best],
            num_tokens=np.add.reduceat(answer.num_tokens, firsts),
            chunks=chunks,
        )

    def inputs(self) -> Sequence[Input]:
        """Return the pairs of the query and each document; with images, one input of both."""
        if self.route != IMAGE_ROUTE:
            return [Pair(self.query, document) for document in self.items]
        query = parts_of(self.query)
        return [Parts((*query, *parts_of(document))) for document in self.items]


@dataclass(frozen=True)
class TokenScoreRequest(Request[TokenScores]):
    """A request for the logits of each token. `items` are Texts."""

    options: ScoreOptions

    def prepare(self, processor: Processor, shared: Shared, chunk: Sequence) -> Tokenized:
        """Tokenize a chunk of the texts, and find the offsets of their tokens. Raises InvalidInput
        or TokenizerError."""
        assert isinstance(processor, TextProcessor)
        return processor.encode_with_offsets(chunk, self.tokenization)

    def finish(self, spec: ModelSpec, run: Run) -> TokenScores:
        """Return the logits, with the labels, and with the ids and offsets of the tokens."""
        work, offsets = run.tokenized.work, run.tokenized.offsets
        if offsets is None:  # there are no texts
            offsets = np.zeros((0, 2), np.int32)
        return TokenScores(
            run.values["token_logits"],
            work.planes["ids"],
            offsets,
            spec.labels,
            **run.common_fields,
        )

    def cost(self, spec: ModelSpec, sequences: int, tokens: int) -> Cost:
        """Return the cost of the request, including the offsets of its tokens."""
        base = super().cost(spec, sequences, tokens)
        return base._replace(bytes=base.bytes + tokens * OFFSETS_BYTES)


@dataclass(frozen=True)
class ListRequest(Request[Scores]):
    """A request for the scores of documents that the model reads together with their `query`. The
    only item is the list of the documents, so that one job has all of them."""

    query: str

    def prepare(self, processor: Processor, shared: Shared, chunk: Sequence) -> Tokenized:
        """Tokenize the query with all documents. Raises InvalidInput or TokenizerError."""
        assert isinstance(processor, TextProcessor)
        (documents,) = chunk
        slots = Bucket(1, processor.limit).slots
        return processor.encode_list(self.query, documents, self.tokenization, slots)

    def finish(self, spec: ModelSpec, run: Run) -> Scores:
        """Return the score of each document. `num_tokens` has the tokens of each block."""
        scores = list_scores(run.values["dense"], run.tokenized.work.slots)
        return Scores(scores[:, None], spec.labels, spec.score_function, **run.common_fields)

    def inputs(self) -> Sequence[Input]:
        """Return the query and the documents as inputs."""
        return list(map(Text, (self.query, *self.items[0])))

    def cost(self, spec: ModelSpec, sequences: int, tokens: int) -> Cost:
        """Return the cost of the request, in which each document counts as an input. The output has
        a row for each document, and one for the query in each sequence."""
        count = len(self.items[0])
        return super().cost(spec, count + sequences, tokens)._replace(inputs=count)


@dataclass(frozen=True)
class ComputeRequest(Request[WorkResult]):
    """A request for any outputs of a model. `items` are Inputs."""

    def finish(self, spec: ModelSpec, run: Run) -> WorkResult:
        """Return the outputs unchanged from the heads of the model."""
        return run.values


def shape_vectors(
    dense: Float[np.ndarray, "rows width"], *, dimensions: int | None, normalize: bool
) -> Float[np.ndarray, "rows dim"]:
    """Truncate vectors to their first `dimensions` (None: all), and normalise them if `normalize`.

    The result is C-contiguous float32. Vectors are truncated before they are normalised, so that
    truncated vectors also have length one. A zero vector stays zero.
    """
    cut = dense if dimensions is None else dense[:, :dimensions]
    cut = np.ascontiguousarray(cut, dtype=np.float32)
    if not normalize:
        return cut
    # In float64, because squares can overflow float32.
    if len(cut) == 1:  # the same result in less time
        row = cut[0].astype(np.float64)
        row /= max(sqrt(np.dot(row, row)), LEAST)
        return row.astype(np.float32)[None]
    lengths = np.empty((len(cut), 1))
    for start in range(0, len(cut), SQUARED_AT_ONCE):
        rows = cut[start : start + SQUARED_AT_ONCE]
        np.vecdot(rows, rows, dtype=np.float64, out=lengths[start : start + SQUARED_AT_ONCE, 0])
    np.sqrt(lengths, out=lengths)
    np.maximum(lengths, LEAST, out=lengths)  # no division by zero
    # Divide in float64 and round once, in numpy's small buffers and not a second matrix.
    return np.divide(cut, lengths, out=np.empty_like(cut), casting="same_kind")


def excess_bytes(answer: Embeddings) -> int:
    """Return the bytes of the terms of a sparse answer beyond the estimate of `Request.cost`."""
    estimated = TERMS_A_TOKEN * answer.total_tokens
    return TERM_BYTES * max(sum(map(len, answer.sparse.values)) - estimated, 0)
