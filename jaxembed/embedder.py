"""The library: a model from texts to vectors or scores.

embedder = Embedder("sentence-transformers/all-MiniLM-L6-v2")
vectors = embedder.encode(["a text", "another"])  # float32 [2, 384]
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from jaxembed.data.inputs import ChunkedText, Image, Input, Pair, Text
from jaxembed.data.keyword_options import KeywordOptions
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.work import Ragged, SparseRows, WorkResult
from jaxembed.errors import InvalidInput
from jaxembed.preprocessing.images.sources import read_image
from jaxembed.preprocessing.late import NO_CHUNKS, join_texts
from jaxembed.preprocessing.prompts import Role
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import (
    Embeddings,
    EncodedChunks,
    EncodeOptions,
    Label,
    Ranked,
    ScoreOptions,
    Scores,
)
from jaxembed.runtime.requests import ComputeRequest, EncodeRequest, LateRequest, ScoreRequest
from jaxembed.runtime.similarity import compare_outputs, compare_pairs
from jaxembed.runtime.tasks import check_task

TextOrPair = str | tuple[str, str]
NO_OPTIONS = EncodeOptions()

_PROMPT = ("prompt", "prompt_name", "route")
_VECTORS = ("dimensions", "normalize", "output_dtype")
_RUN = ("adapter", "priority")
_CUT = ("truncate", "truncation_side")
_PAIRS = (*_CUT, "instruction", "max_document_tokens", *_RUN)

encode_options = KeywordOptions(EncodeOptions, (*_PROMPT, *_CUT, *_VECTORS, *_RUN))
output_options = KeywordOptions(
    EncodeOptions, (*_PROMPT, "role", *_CUT, *_VECTORS, "max_active_dims", *_RUN)
)
chunk_options = KeywordOptions(EncodeOptions, (*_PROMPT, "truncate", *_VECTORS, *_RUN))
compute_options = KeywordOptions(EncodeOptions, (*_PROMPT, "role", *_CUT, *_RUN))
score_options = KeywordOptions(ScoreOptions, _PAIRS)
rerank_options = KeywordOptions(ScoreOptions, (*_PAIRS, "max_chunks", "overlap_tokens", "weights"))


class Embedder(LoadedModel):
    """A model to call from Python: it encodes, reranks or classifies.

    The arguments are those of LoadedModel: `model` is a directory (Hugging Face's or a converted
    checkpoint), a hub id, or None for all-MiniLM-L6-v2. Each method has a twin for event loops.
    """

    def __enter__(self) -> "Embedder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @encode_options
    def encode(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> np.ndarray:
        """float32 `[n, dim]`, or `[dim]` for a single text. Normalised if the checkpoint says so.

        Of a model of texts and images `images` has the images to encode after the texts: each a
        path, the bytes of a file, an image of Pillow or an array of colours, uint8
        `[height, width, 3]`. Images may also be among the texts, but a string is a text there.
        Prompts are for texts alone.

        With another `output_dtype` than "float" the array is as `quantise` gives it. Raises the
        errors of InvalidInput and BackendError, and TypeError for an unknown option.
        """
        texts = _with_images(texts, images)
        return _one_or_all(texts, self.run(self._to_encode(texts, options)))

    @encode_options
    async def encode_async(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> np.ndarray:
        """`encode` without blocking the event loop. Cancelling the task cancels queued work."""
        texts = await asyncio.to_thread(_with_images, texts, images)
        return _one_or_all(texts, await self.run_async(self._to_encode(texts, options)))

    @encode_options
    def encode_query(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's route and prompt for queries, where it has them."""
        return _one_or_all(texts, self.run(self._to_encode_as("query", texts, options)))

    @encode_options
    async def encode_query_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_query` without blocking the event loop."""
        request = self._to_encode_as("query", texts, options)
        return _one_or_all(texts, await self.run_async(request))

    @encode_options
    def encode_document(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's route and prompt for documents, where it has them."""
        return _one_or_all(texts, self.run(self._to_encode_as("document", texts, options)))

    @encode_options
    async def encode_document_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_document` without blocking the event loop."""
        request = self._to_encode_as("document", texts, options)
        return _one_or_all(texts, await self.run_async(request))

    @output_options
    def encode_outputs(
        self,
        texts: str | Sequence[Any],
        outputs: Collection[OutputName],
        *,
        images: Any = None,
        **options,
    ) -> dict[OutputName, Any]:
        """Several representations of each text from one pass, by name: of "dense" float32
        `[n, dim]`, of "sparse" SparseRows with a row for each text, of "multi_vector" a Ragged with
        an array `[vectors, width]` for each.

        They are what `encode`, `encode_sparse` and `encode_multi` give alone. `images` follow the
        texts, as of `encode`. Raises WrongTask for an output that the model does not give:
        `spec.representations` has them all.
        """
        texts = _with_images(texts, images)
        return dict(self.run(self._to_encode_outputs(texts, outputs, options)).values)

    @output_options
    async def encode_outputs_async(
        self,
        texts: str | Sequence[Any],
        outputs: Collection[OutputName],
        *,
        images: Any = None,
        **options,
    ) -> dict[OutputName, Any]:
        """`encode_outputs` without blocking the event loop."""
        texts = await asyncio.to_thread(_with_images, texts, images)
        return dict((await self.run_async(self._to_encode_outputs(texts, outputs, options))).values)

    @output_options
    def encode_sparse(self, texts: str | Sequence[str], **options) -> SparseRows:
        """The weights of the vocabulary's terms in each text, a row for each; `to_scipy` makes a
        matrix of them. Otherwise as `encode_outputs`."""
        return self.encode_outputs(texts, ("sparse",), **options)["sparse"]

    @output_options
    async def encode_sparse_async(self, texts: str | Sequence[str], **options) -> SparseRows:
        """`encode_sparse` without blocking the event loop."""
        return (await self.encode_outputs_async(texts, ("sparse",), **options))["sparse"]

    @output_options
    def encode_multi(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> Ragged:
        """The vectors of each text, and of each of `images`, to compare token by token, float32
        `[vectors, width]`. Otherwise as `encode_outputs`."""
        found = self.encode_outputs(texts, ("multi_vector",), images=images, **options)
        return found["multi_vector"]

    @output_options
    async def encode_multi_async(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> Ragged:
        """`encode_multi` without blocking the event loop."""
        found = await self.encode_outputs_async(texts, ("multi_vector",), images=images, **options)
        return found["multi_vector"]

    @chunk_options
    def encode_chunks(
        self, texts: Sequence[ChunkedText | Sequence[str]], **options
    ) -> list[EncodedChunks]:
        """Late chunking: for each text a vector of each of its chunks, pooled from the tokens of
        the whole text, so that they know their context.

        A list of strings is one text, whose chunks these are; neighbours are joined by a space
        where there is no white space between them. One over the model's limit is run in windows, or
        with `truncate` False refused.

        Raises the errors of InvalidInput, which has no late chunking for models that pool otherwise
        than by the mean, and of BackendError.
        """
        return _by_text(self.run(self._to_encode_chunks(texts, options)))

    @chunk_options
    async def encode_chunks_async(
        self, texts: Sequence[ChunkedText | Sequence[str]], **options
    ) -> list[EncodedChunks]:
        """`encode_chunks` without blocking the event loop."""
        return _by_text(await self.run_async(self._to_encode_chunks(texts, options)))

    @rerank_options
    def rerank(
        self,
        query: str,
        documents: Sequence[Any] = (),
        *,
        images: Any = None,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options,
    ) -> list[Ranked]:
        """The documents that answer the query best, best first; equal ones in the order given.

        Of a model that reads pages the documents are `images`, as `encode` takes them.

        Scores are from 0 to 1, with `raw_scores` the model's logits. An embedding model compares
        its outputs for the query and for each document. The score is the cosine of dense vectors,
        from -1 to 1, the product of weights of terms, or of several vectors a text a mean of
        cosines, whose raw score is the sum. Raises WrongTask for a classifier, and the errors of
        InvalidInput and BackendError.
        """
        _check_top_n(top_n)
        asked = ScoreOptions(**options)
        documents = _documents(documents, images)
        if self.spec.task == "embed":
            of_query, of_documents, weights = self.tasks.compare(query, documents, asked)
            both = self.run(of_query), self.run(of_documents)
            found = compare_outputs(*both, weights, documents)
        else:
            found = self.run(self.tasks.rerank(query, documents, asked))
        return found.ranked(raw_scores)[:top_n]

    @rerank_options
    async def rerank_async(
        self,
        query: str,
        documents: Sequence[Any] = (),
        *,
        images: Any = None,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options,
    ) -> list[Ranked]:
        """`rerank` without blocking the event loop."""
        _check_top_n(top_n)
        asked = ScoreOptions(**options)
        documents = await asyncio.to_thread(_documents, documents, images)
        if self.spec.task == "embed":
            of_query, of_documents, weights = self.tasks.compare(query, documents, asked)
            both = await self.run_async(of_query), await self.run_async(of_documents)
            found = await self.runner.off_loop(compare_outputs, *both, weights, documents)
        else:
            found = await self.run_async(self.tasks.rerank(query, documents, asked))
        return found.ranked(raw_scores)[:top_n]

    @score_options
    def score(
        self, pairs: Sequence[tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> np.ndarray:
        """The score of each pair of a query and a document, float32 `[n]`: those of `rerank`, in
        the order given."""
        if self.spec.task == "embed":
            compared = self.tasks.compare_pairs(pairs, ScoreOptions(**options))
            of_queries, of_documents, weights, numbers = compared
            with _of_pairs(numbers):
                queries = self.run(of_queries)
            both, texts = (queries, self.run(of_documents)), [text for _, text in pairs]
            return compare_pairs(*both, weights, texts, numbers, raw_scores=raw_scores)
        return _of_first_label(self.run(self._to_score_pairs(pairs, options)), raw_scores)

    @score_options
    async def score_async(
        self, pairs: Sequence[tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> np.ndarray:
        """`score` without blocking the event loop."""
        if self.spec.task == "embed":
            compared = self.tasks.compare_pairs(pairs, ScoreOptions(**options))
            of_queries, of_documents, weights, numbers = compared
            with _of_pairs(numbers):
                queries = await self.run_async(of_queries)
            both, texts = (queries, await self.run_async(of_documents)), [text for _, text in pairs]
            call = partial(compare_pairs, raw_scores=raw_scores)
            return await self.runner.off_loop(call, *both, weights, texts, numbers)
        answer = await self.run_async(self._to_score_pairs(pairs, options))
        return _of_first_label(answer, raw_scores)

    @score_options
    def classify(
        self, inputs: str | Sequence[TextOrPair], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """Every label of each text, or pair of texts, best first.

        The checkpoint says whether scores add up to one or stand alone; with `raw_scores` they are
        the model's logits. Otherwise as `rerank`.
        """
        return self.run(self._to_score(inputs, options)).labelled(raw_scores)

    @score_options
    async def classify_async(
        self, inputs: str | Sequence[TextOrPair], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """`classify` without blocking the event loop."""
        return (await self.run_async(self._to_score(inputs, options))).labelled(raw_scores)

    @compute_options
    def compute(
        self,
        inputs: str | Sequence[TextOrPair],
        outputs: Collection[str],
        **options,
    ) -> WorkResult:
        """Several outputs of the model in one pass, by name: of `dense` and `logits` float32
        `[n, width]`, of `tokens` an array `[length, width]` for each input.

        They are as the heads of the model give them: not normalised, and no scores. A classifier's
        `dense` is the vector that its pooling gives, before the layers that make logits. Prompts
        are for embedding models. Raises InvalidInput for outputs that the model does not have
        (`spec.widths` has them all), and the errors of InvalidInput and BackendError.
        """
        return self.run(self._to_compute(inputs, outputs, options))

    @compute_options
    async def compute_async(
        self,
        inputs: str | Sequence[TextOrPair],
        outputs: Collection[str],
        **options,
    ) -> WorkResult:
        """`compute` without blocking the event loop."""
        return await self.run_async(self._to_compute(inputs, outputs, options))

    def _to_encode_as(
        self, role: Role, texts: str | Sequence[str], options: dict[str, Any]
    ) -> EncodeRequest:
        return self.tasks.embed(_texts(texts), self.tasks.for_role(role, _encode_options(options)))

    def _to_encode_outputs(
        self, texts: str | Sequence[Any], outputs: Collection[OutputName], options: dict[str, Any]
    ) -> EncodeRequest:
        unknown = [name for name in outputs if name not in REPRESENTATIONS]
        if unknown or not outputs:
            raise InvalidInput(
                f"`outputs` must be some of {', '.join(REPRESENTATIONS)}. "
                f"Given: {', '.join(map(str, unknown)) or 'none'}",
                field="outputs",
            )
        role = options.pop("role", None)
        chosen = EncodeOptions(outputs=frozenset(outputs), **options)
        chosen = chosen if role is None else self.tasks.for_role(role, chosen)
        return self.tasks.embed(_texts(texts), chosen)

    def _to_encode(self, texts: str | Sequence[Any], options: dict[str, Any]) -> EncodeRequest:
        return self.tasks.embed(_texts(texts), _encode_options(options))

    def _to_encode_chunks(
        self, texts: Sequence[ChunkedText | Sequence[str]], options: dict[str, Any]
    ) -> LateRequest:
        chunked = [_chunked(text) for text in texts]
        return self.tasks.embed_chunks(chunked, _encode_options(options))

    def _to_score(
        self, inputs: str | Sequence[TextOrPair], options: dict[str, Any]
    ) -> ScoreRequest:
        return self.tasks.score(_texts_and_pairs(inputs), ScoreOptions(**options))

    def _to_score_pairs(
        self, pairs: Sequence[tuple[str, str]], options: dict[str, Any]
    ) -> ScoreRequest:
        check_task(self.name, self.spec, "rerank")
        return self.tasks.score([Pair(*pair) for pair in pairs], ScoreOptions(**options))

    def _to_compute(
        self,
        inputs: str | Sequence[TextOrPair],
        outputs: Collection[str],
        options: dict[str, Any],
    ) -> ComputeRequest:
        return self.tasks.compute(_texts_and_pairs(inputs), outputs, EncodeOptions(**options))


def _encode_options(options: dict[str, Any]) -> EncodeOptions:
    return EncodeOptions(**options) if options else NO_OPTIONS


def _texts(texts: str | Sequence[Any]) -> list[Input]:
    listed = [texts] if isinstance(texts, str) else texts
    return [Text(one) if isinstance(one, str) else read_image(one) for one in listed]


def _with_images(texts: str | Sequence[Any], images: Any) -> str | Sequence[Any]:
    """The texts, and the images after them. Raises TypeError for an image that is in no list."""
    if images is None:
        return texts
    if isinstance(images, str | bytes | PathLike | np.ndarray) or not isinstance(images, Iterable):
        raise TypeError("images is a list of images, not one")
    return [*([texts] if isinstance(texts, str) else texts), *map(read_image, images)]


def _documents(documents: Sequence[Any], images: Any) -> list[str | Image]:
    """Documents to rank: texts, and images after them."""
    listed = _with_images(documents, images)
    return [one if isinstance(one, str) else read_image(one) for one in listed]


def _texts_and_pairs(inputs: str | Sequence[TextOrPair]) -> list[Text | Pair]:
    listed = [inputs] if isinstance(inputs, str) else inputs
    return [Text(one) if isinstance(one, str) else Pair(*one) for one in listed]


def _one_or_all(texts: str | Sequence[Any], answer: Embeddings) -> np.ndarray:
    return answer.dense[0] if isinstance(texts, str) else answer.dense


def _of_first_label(answer: Scores, raw_scores: bool) -> np.ndarray:
    return np.ascontiguousarray(answer.shown(raw_scores)[:, 0])


@contextmanager
def _of_pairs(numbers: Sequence[int]) -> Iterator[None]:
    """Let an error of a query have the index of the first pair with the query; `numbers` are those
    of the queries of all pairs."""
    try:
        yield
    except InvalidInput as error:
        if error.index is None:
            raise
        raise error.at(numbers.index(error.index), error.field or "query") from error


def _chunked(text: ChunkedText | Sequence[str]) -> ChunkedText:
    """Raises TypeError for a string: nothing says what its chunks are."""
    if isinstance(text, str):
        raise TypeError("a text is a list of its chunks or a ChunkedText, not one string")
    return text if isinstance(text, ChunkedText) else join_texts(text)


def _by_text(answer: Embeddings) -> list[EncodedChunks]:
    chunked = answer.chunked or NO_CHUNKS
    ends = np.cumsum(chunked.counts).tolist()
    return [
        EncodedChunks(answer.dense[end - count : end], chunked.bounds[end - count : end])
        for count, end in zip(chunked.counts.tolist(), ends, strict=True)
    ]


def _check_top_n(top_n: int | None) -> None:
    if top_n is not None and top_n < 1:
        raise InvalidInput(f"`top_n` must be 1 or more. Given: {top_n}", field="top_n")
