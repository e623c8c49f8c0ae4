"""One request as plain data: it makes work for the engine of its inputs, and the answer of results.
Runs nothing."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from jaxembed.data.inputs import ChunkSize, Input, Pair, Priority, Text
from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import Head, ModelSpec, PerToken, Vocabulary
from jaxembed.data.work import Ragged, Span, WorkResult, chosen_rows
from jaxembed.engine.admission import Cost
from jaxembed.engine.bucket import Bucket
from jaxembed.errors import InvalidInput
from jaxembed.preprocessing.images.processor import Processor
from jaxembed.preprocessing.text import Row, Rules, TextProcessor, Tokenized
from jaxembed.preprocessing.windows import NO_CHUNKS, pool_slots
from jaxembed.quantise import quantise
from jaxembed.runtime.options import Embeddings, EncodeOptions, ScoreOptions, Scores, best_windows
from jaxembed.runtime.postprocess import most_active, terms_of_tokens

INPUT_BYTES = 1024  # of memory an input takes beside its text and its tokens: measured 0.8 KB
TOKEN_BYTES = 8  # a token takes: its id, twice while a batch is packed
FLOAT_BYTES = 4
TERM_BYTES = 8  # of a value and its index
TERMS_A_TOKEN = 16  # of a sparse answer, as a guess; `excess_bytes` counts what is more
LEAST = 5e-324  # the least float64 over zero
LOGITS: frozenset[OutputName] = frozenset({"logits"})

Answer = TypeVar("Answer")


class Run(msgspec.Struct, frozen=True, eq=False):
    """The results of the tokenizer and the engine for one request."""

    values: WorkResult
    tokenized: Tokenized
    tokenization_s: float  # of all inputs together
    queue_s: list[float]  # of each input
    inference_s: list[float]  # of each input
    cached: int = 0  # inputs whose answers the engine had kept

    @property
    def figures(self) -> dict[str, Any]:
        """The fields that Embeddings and Scores have in common."""
        return {
            "num_tokens": self.tokenized.work.own_tokens.astype(np.int64),
            "truncated": self.tokenized.truncated,
            "tokenization_s": self.tokenization_s,
            "queue_s": sum(self.queue_s) / max(len(self.queue_s), 1),
            "inference_s": sum(self.inference_s) / max(len(self.inference_s), 1),
            "cached": self.cached,
        }


@dataclass(frozen=True)
class Request(ABC, Generic[Answer]):
    """One request: `items` to tokenize by `rules`, and the `outputs` wanted of the engine of its
    `route`, computed with the `adapter` of that number; 0 is none.

    `share` is called once, then `prepare` for each chunk of the items, in several threads at the
    same time, and `finish` when the engine has answered.
    """

    items: Sequence
    rules: Rules
    outputs: frozenset[OutputName]
    priority: Priority | None
    route: str = field(default="", kw_only=True)
    adapter: int = field(default=0, kw_only=True)

    def share(self, processor: Processor) -> Row | None:
        """What the chunks have in common, tokenized. Raises InvalidInput."""
        return None

    def prepare(self, processor: Processor, shared: Row | None, chunk: Sequence) -> Tokenized:
        """Tokenize some of the items. Raises InvalidInput or TokenizerError."""
        return processor.encode(chunk, self.rules)

    @abstractmethod
    def finish(self, spec: ModelSpec, run: Run) -> Answer:
        """Make the answer from the results."""

    def inputs(self) -> Sequence[Input]:
        """The items as inputs of the model."""
        return self.items

    def cost(self, spec: ModelSpec, sequences: int, tokens: int) -> Cost:
        """The cost of the request if it is made of so many sequences and tokens."""
        token_bytes, input_bytes = TOKEN_BYTES, INPUT_BYTES
        if spec.image is not None:
            token_bytes += 2 * spec.image.token_bytes  # twice while a batch is packed
        for name in self.outputs:
            row_bytes = 2 * FLOAT_BYTES * spec.widths[name]  # twice while they are normalised
            if OUTPUTS[name].sparse:
                token_bytes += min(row_bytes, TERM_BYTES * TERMS_A_TOKEN)
            elif OUTPUTS[name].per == "slot":
                input_bytes += row_bytes
            else:
                copies = 3 if name == "multi_vector" else 1  # rows are dropped, then normalised
                token_bytes += copies * row_bytes // 2
        return Cost(sequences, tokens, sequences * input_bytes + tokens * token_bytes)


@dataclass(frozen=True)
class EncodeRequest(Request[Embeddings]):
    """A request for vectors; `items` are Inputs. `ranges` are those of the dtype asked for, if it
    needs any."""

    options: EncodeOptions
    ranges: np.ndarray | None = field(default=None, kw_only=True)  # float32 [2, dim]

    def finish(self, spec: ModelSpec, run: Run) -> Embeddings:
        """Cut, normalise and encode the outputs as the options say."""
        values, vector_ids = dict(run.values), None
        if "dense" in values:
            values["dense"] = self._shaped(values["dense"], spec.dense)
        if "tokens" in values:
            encoded = quantise(values["tokens"].values, self.options.output_dtype)
            values["tokens"] = Ragged(encoded, values["tokens"].offsets)
        if "multi_vector" in values:
            head, rows = spec.heads["multi_vector"], values["multi_vector"]
            assert isinstance(head, PerToken)
            kept, vector_ids = np.ones(len(rows.values), bool), run.tokenized.work.planes["ids"]
            if head.skipped_ids and self.rules.role != "query":
                kept = ~np.isin(vector_ids, head.skipped_ids)
            if head.drops_first:
                kept[rows.offsets[:-1]] = False
            if not kept.all():
                rows, vector_ids = rows.where(kept), vector_ids[kept]
            values["multi_vector"] = Ragged(self._shaped(rows.values, head), rows.offsets)
        if "sparse" in self.options.outputs:
            most = None
            if "sparse" in values:
                head, terms = spec.heads["sparse"], values["sparse"]
                most = head.max_active if isinstance(head, Vocabulary) else None
            else:
                head, work = spec.heads["token_weights"], run.tokenized.work
                assert isinstance(head, PerToken)
                terms = terms_of_tokens(
                    values.pop("token_weights").values[:, 0],
                    work.planes["ids"],
                    work.lengths,
                    skipped=head.skipped_ids,
                    vocab_size=int(spec.config["vocab_size"]),
                )
            most = self.options.max_active_dims or most
            values["sparse"] = terms if most is None else most_active(terms, most)
        return Embeddings(values, **run.figures, vector_ids=vector_ids)

    def divided(self, most: int) -> "MixedRequest":
        """The request in parts of at most so many items."""
        firsts = range(0, len(self.items), most)
        return MixedRequest(
            self.items,
            self.rules,
            self.outputs,
            self.priority,
            self.options,
            parts=tuple(replace(self, items=self.items[k : k + most]) for k in firsts),
            places=tuple(np.arange(len(self.items))[k : k + most] for k in firsts),
        )

    def _shaped(self, vectors: np.ndarray, head: Head) -> np.ndarray:
        """The vectors cut, normalised and encoded."""
        options = self.options
        normalize = head.normalize if options.normalize is None else options.normalize
        shaped = shape_vectors(vectors, dimensions=options.dimensions, normalize=normalize)
        if options.output_dtype == "float":
            return shaped
        return quantise(shaped, options.output_dtype, self.ranges)


@dataclass(frozen=True)
class MixedRequest(EncodeRequest):
    """A request for vectors of texts and images, in parts: requests of texts or of some images, and
    the places of their inputs, int `[inputs of the part]`, among all."""

    parts: tuple[EncodeRequest, ...] = field(kw_only=True)
    places: tuple[np.ndarray, ...] = field(kw_only=True)

    @contextmanager
    def placed(self, number: int) -> Iterator[EncodeRequest]:
        """The part with this number, to run in the context: an InvalidInput of one of its inputs
        gets the place of that among all."""
        try:
            yield self.parts[number]
        except InvalidInput as error:
            if error.index is None:
                raise
            raise error.at(int(self.places[number][error.index])) from error

    def joined(self, answers: Sequence[Embeddings]) -> Embeddings:
        """The answer of answers to the parts, in the order of the inputs."""
        first = Embeddings.joined(answers)
        order = np.argsort(np.concatenate(self.places))
        values = chosen_rows(first.values, order)
        ids = first.vector_ids
        if ids is not None:
            ids = Ragged(ids, first.multi_vector.offsets).ordered(order).values
        num_tokens = first.num_tokens[order]
        return msgspec.structs.replace(first, values=values, num_tokens=num_tokens, vector_ids=ids)


@dataclass(frozen=True)
class ComparedRequest(EncodeRequest):
    """A request for the outputs of documents that are compared with a query; `items` are Texts,
    which may be empty, and divided into windows."""

    def prepare(self, processor: Processor, shared: Row | None, chunk: Sequence) -> Tokenized:
        """Tokenize some of the documents. Raises InvalidInput or TokenizerError."""
        assert isinstance(processor, TextProcessor)
        return processor.encode_documents(chunk, self.rules)

    def finish(self, spec: ModelSpec, run: Run) -> Embeddings:
        """The outputs of each document, or of each of its windows."""
        return msgspec.structs.replace(super().finish(spec, run), windows=run.tokenized.windows)


@dataclass(frozen=True)
class LateRequest(EncodeRequest):
    """A request for a vector of each chunk of some texts; `items` are ChunkedTexts."""

    def prepare(self, processor: Processor, shared: Row | None, chunk: Sequence) -> Tokenized:
        """Tokenize some of the texts. Raises InvalidInput or TokenizerError."""
        assert isinstance(processor, TextProcessor)
        return processor.encode_late(chunk, self.rules, Bucket(1, processor.limit).slots)

    def finish(self, spec: ModelSpec, run: Run) -> Embeddings:
        """The vectors of all chunks, in order, shaped as the options say. Each token of a text
        counts once, in however many windows it was run."""
        chunked = run.tokenized.chunked or NO_CHUNKS
        dense = run.values["dense"]
        if len(dense):
            dense = pool_slots(dense, run.tokenized.work.bounds, chunked)
        answer = super().finish(spec, msgspec.structs.replace(run, values={"dense": dense}))
        return msgspec.structs.replace(answer, num_tokens=chunked.tokens, chunked=chunked)

    def inputs(self) -> Sequence[Input]:
        """The texts without their chunks."""
        return [Text(item.text) for item in self.items]

    def cost(self, spec: ModelSpec, sequences: int, tokens: int) -> Cost:
        """The cost of the request, with what its vectors take: one for each chunk."""
        whole = super().cost(spec, sequences, tokens)
        # The most chunks of all texts, if they have so many tokens together.
        chunks: list[Sequence[Span] | ChunkSize] = [item.chunks for item in self.items]
        most = sum(len(one) for one in chunks if not isinstance(one, ChunkSize))
        steps = [one.tokens - one.overlap for one in chunks if isinstance(one, ChunkSize)]
        if steps:
            most += len(steps) + tokens // min(steps)
        vectors = most * (INPUT_BYTES + 2 * FLOAT_BYTES * spec.dim)
        return Cost(whole.inputs, whole.tokens, whole.bytes + vectors)


@dataclass(frozen=True)
class ScoreRequest(Request[Scores]):
    """A request for logits; `items` are Texts and Pairs."""

    options: ScoreOptions

    def finish(self, spec: ModelSpec, run: Run) -> Scores:
        """The logits, with what it takes to show them as scores."""
        return Scores(run.values["logits"], spec.labels, spec.score_function, **run.figures)


@dataclass(frozen=True)
class QueryRequest(ScoreRequest):
    """A request for the logits of documents, the `items`, each beside the one query."""

    query: str

    def share(self, processor: Processor) -> Row | None:
        """Tokenize the query."""
        assert isinstance(processor, TextProcessor)
        return processor.query_row(self.query, self.rules)

    def prepare(self, processor: Processor, shared: Row | None, chunk: Sequence) -> Tokenized:
        """Tokenize some of the documents, each beside the tokenized query."""
        assert shared is not None
        assert isinstance(processor, TextProcessor)
        return processor.encode_beside(shared, chunk, self.rules)

    def finish(self, spec: ModelSpec, run: Run) -> Scores:
        """The logits of the best window of each document, if they may be divided."""
        answer, windows = super().finish(spec, run), run.tokenized.windows
        if windows is None:
            return answer
        first, best, chunks = best_windows(answer.logits[:, 0], windows)
        return replace(
            answer,
            logits=answer.logits[best],
            num_tokens=np.add.reduceat(answer.num_tokens, first),
            chunks=chunks,
        )

    def inputs(self) -> Sequence[Input]:
        """The pairs of the query and each document."""
        return [Pair(self.query, document) for document in self.items]


@dataclass(frozen=True)
class ComputeRequest(Request[WorkResult]):
    """A request for any outputs of a model; `items` are Inputs."""

    def finish(self, spec: ModelSpec, run: Run) -> WorkResult:
        """The outputs as the heads give them."""
        return run.values


def shape_vectors(
    dense: Float[np.ndarray, "rows width"], *, dimensions: int | None, normalize: bool
) -> Float[np.ndarray, "rows dim"]:
    """The first `dimensions` of each vector (None: all), normalised to length one if `normalize`.

    The result is C-contiguous float32. Vectors are cut before they are normalised, so that a
    shortened vector has length one too. A zero vector stays zero.
    """
    cut = np.ascontiguousarray(dense[:, :dimensions], dtype=np.float32)
    if not normalize:
        return cut
    # In float64, because squares can overflow float32.
    lengths = np.einsum("nd,nd->n", cut, cut, dtype=np.float64)
    np.sqrt(lengths, out=lengths)
    np.maximum(lengths, LEAST, out=lengths)
    if len(cut) == 1:  # the same in half the time: it takes no buffers
        return (cut / lengths).astype(np.float32)
    # Divided in float64 and rounded once, in numpy's small buffers rather than a second matrix.
    return np.divide(cut, lengths[:, None], out=np.empty_like(cut), casting="same_kind")


def excess_bytes(answer: Embeddings) -> int:
    """The bytes of weights of terms beyond those that `Request.cost` counts: how many a text has,
    only its answer says."""
    usual = TERMS_A_TOKEN * int(answer.num_tokens.sum())
    return TERM_BYTES * max(sum(map(len, answer.sparse.values)) - usual, 0)
