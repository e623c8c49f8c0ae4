"""The library's API: a model that computes vectors or scores of texts and images.

embedder = Embedder("sentence-transformers/all-MiniLM-L6-v2")
vectors = embedder.encode(["a text", "another"])  # float32 [2, 384]
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import numpy as np

from jaxembed.checkpoints.source import ModelSource, default_cache_dir
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.inputs import (
    AggregationStrategy,
    ChunkedText,
    Content,
    Pair,
    Parts,
    Text,
)
from jaxembed.data.keyword_options import KeywordOptions
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.spec import ModelSpec, PoolingChoice
from jaxembed.data.work import Ragged, SparseRows, WorkResult
from jaxembed.engine.admission import Capacity
from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.preprocessing.images.decode import read_image
from jaxembed.preprocessing.prompts import Role
from jaxembed.preprocessing.windows import NO_CHUNKS, join_texts
from jaxembed.runtime.entities import Entity, find_entities
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import (
    Embeddings,
    EncodedChunks,
    EncodeOptions,
    Label,
    Ranked,
    ScoreOptions,
)
from jaxembed.runtime.requests import Answer, AnyRequest
from jaxembed.runtime.similarity import compare_outputs, compare_pairs
from jaxembed.runtime.tasks import check_positive, check_task

T = TypeVar("T")
TextOrPair = str | tuple[str, str]
NO_OPTIONS = EncodeOptions()
# values that a call may take for a list of texts
NO_LISTS = (bytes, bytearray, Mapping, set, frozenset)
NO_IMAGES = (int, float, list, tuple, dict)

_PROMPT = ("prompt", "prompt_name", "route")
_WORDS = ("instruction", *_PROMPT)
_VECTORS = ("dimensions", "normalize", "output_dtype")
_RUN = ("adapter", "priority")
_CUT = ("truncate", "truncation_side")
_PAIRS = (*_CUT, "instruction", "max_document_tokens", *_RUN)

encode_options = KeywordOptions(EncodeOptions, (*_WORDS, *_CUT, *_VECTORS, *_RUN))
output_options = KeywordOptions(
    EncodeOptions, (*_WORDS, "role", *_CUT, *_VECTORS, "max_active_dims", *_RUN)
)
chunk_options = KeywordOptions(EncodeOptions, (*_WORDS, "truncate", *_VECTORS, *_RUN))
compute_options = KeywordOptions(EncodeOptions, (*_PROMPT, "role", *_CUT, *_RUN))
score_options = KeywordOptions(ScoreOptions, _PAIRS)
token_options = KeywordOptions(ScoreOptions, (*_CUT, *_RUN))
rerank_options = KeywordOptions(ScoreOptions, (*_PAIRS, "max_chunks", "overlap_tokens", "weights"))


class Embedder:
    """A model to use from Python: it encodes, reranks or classifies texts and images.

    `model` is a directory (Hugging Face's or a converted checkpoint), the URL of a checkpoint in an
    object store, a hub id, or None for all-MiniLM-L6-v2. ModelSource documents `revision`,
    `offline`, `token`, `dense_path`, `cutoff_layer`, `adapters`, `pooling` and `cache_dir`, and
    LoadedModel the other arguments; both document the errors that loading raises. Each method that
    computes has a variant for event loops, whose name ends in `_async`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        token: str | None = None,
        dense_path: str | None = None,
        cutoff_layer: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        pooling: PoolingChoice | None = None,
        cache_dir: str | Path | None = None,
        config: EngineConfig | None = None,
        text: TextConfig | None = None,
        capacity: Capacity | None = None,
        wait: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
        reserve: Callable[[int], object] = lambda count: None,
        compile_cache: bool = True,
    ):
        """Load the model. ModelSource describes the arguments up to `cache_dir`, and LoadedModel
        the others."""
        source = ModelSource(
            None if model is None else str(model),
            revision=revision,
            offline=offline,
            token=token,
            cache_dir=Path(cache_dir or default_cache_dir()),
            dense_path=dense_path,
            cutoff_layer=cutoff_layer,
            adapters={} if adapters is None else adapters,
            pooling=pooling,
        )
        self.model = LoadedModel(
            source,
            config=config,
            text=text,
            capacity=capacity,
            wait=wait,
            on_progress=on_progress,
            reserve=reserve,
            compile_cache=compile_cache,
        )

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """Make an Embedder of a model that is loaded already."""
        embedder = cls.__new__(cls)
        embedder.model = model
        return embedder

    # Each method that computes is written once, as a coroutine that awaits `_run`, `_read` and
    # `_compute`. In a _BlockingEmbedder these never suspend the coroutine, so `_finish` can run it
    # without an event loop.

    @cached_property
    def _blocking(self) -> "Embedder":
        """An Embedder of the same model, whose coroutines block the calling thread."""
        return _BlockingEmbedder.of(self.model)

    async def _run(self, request: AnyRequest[Answer]) -> Answer:
        """Run a request on the model, and return the answer. Raises InvalidInput and
        BackendError."""
        return await self.model.run_async(request)

    async def _read(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads files, without blocking the event loop."""
        return await asyncio.to_thread(call, *arguments)

    async def _compute(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a function that keeps a core busy for a while, without blocking the event loop."""
        return await self.model.runner.off_loop(call, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name of the model: the argument `model`, or the hub id of the default model."""
        return self.model.name

    @property
    def spec(self) -> ModelSpec:
        """The specification of the checkpoint; for a model with several routes, that of the main
        route."""
        return self.model.spec

    @property
    def max_input_tokens(self) -> int:
        """The maximum number of tokens in an input."""
        return self.model.max_input_tokens

    @property
    def device(self) -> str:
        """The name of the device that the model runs on."""
        return self.model.device

    @property
    def dtype(self) -> str:
        """The data type in which the device computes."""
        return self.model.dtype

    @property
    def ready(self) -> bool:
        """Whether the device answers and all buckets (batch shapes) that requests need are
        compiled."""
        return self.model.ready

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until `ready` is True. Raises TimeoutError after `timeout_s` seconds, the error of
        the compiler if a needed bucket cannot be compiled, and BackendError if the model is
        closed."""
        self.model.wait_ready(timeout_s)

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish the queued work, stop the threads, and free the memory of the model."""
        self.model.close(timeout_s)

    @encode_options
    def encode(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> np.ndarray:
        """Return the dense vectors of texts, float32 `[n, dim]`, or `[dim]` for a single string.
        Without the option `normalize`, the checkpoint says whether the vectors have length 1.

        The vectors of `images` follow those of the texts. An image is a path, the bytes of a file,
        a Pillow image, or RGB values, uint8 `[height, width, 3]`. Images may also be among `texts`,
        but a string there is a text, not a path. Only texts get a prompt.

        With an `output_dtype` other than "float", `quantise` encodes the vectors. Raises
        InvalidInput, BackendError, and TypeError for an unknown option.
        """
        return _finish(self._blocking.encode_async(texts, images=images, **options))

    @encode_options
    async def encode_async(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> np.ndarray:
        """`encode` without blocking the event loop. Cancelling the task cancels queued work."""
        return await self._encode(texts, images, None, options)

    @encode_options
    def encode_query(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """Return what `encode` does, with the checkpoint's route and prompt for queries, if any."""
        return _finish(self._blocking.encode_query_async(texts, **options))

    @encode_options
    async def encode_query_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_query` without blocking the event loop."""
        return await self._encode(texts, None, "query", options)

    @encode_options
    def encode_document(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """Return what `encode` does, with the checkpoint's route and prompt for documents, if
        any."""
        return _finish(self._blocking.encode_document_async(texts, **options))

    @encode_options
    async def encode_document_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_document` without blocking the event loop."""
        return await self._encode(texts, None, "document", options)

    @output_options
    def encode_outputs(
        self,
        texts: str | Sequence[Any],
        outputs: Collection[OutputName],
        *,
        images: Any = None,
        **options,
    ) -> dict[OutputName, Any]:
        """Return several representations of each text from one pass, by name: "dense" as float32
        `[n, dim]`, "sparse" as SparseRows with a row for each text, "multi_vector" as a Ragged with
        an array `[vectors, width]` for each text.

        The results equal those of `encode`, `encode_sparse` and `encode_multi`. The rows of
        `images`, which `encode` describes, follow those of the texts. Raises WrongTask for an
        output that is not in `spec.representations`, and the errors of `encode`.
        """
        return _finish(
            self._blocking.encode_outputs_async(texts, outputs, images=images, **options)
        )

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
        unknown = [name for name in outputs if name not in REPRESENTATIONS]
        if unknown or not outputs:
            raise InvalidInput(
                f"`outputs` must be some of {', '.join(REPRESENTATIONS)}. "
                f"Given: {', '.join(map(str, unknown)) or 'none'}",
                field="outputs",
            )
        role, merged = options.pop("role", None), {"outputs": frozenset(outputs), **options}
        return dict((await self._embed(texts, images, role, merged)).values)

    @output_options
    def encode_sparse(self, texts: str | Sequence[str], **options) -> SparseRows:
        """Return the sparse embedding of each text, the weights of vocabulary terms, as a row of
        SparseRows, whose method `to_scipy` makes a matrix. Options and errors are those of
        `encode_outputs`."""
        return _finish(self._blocking.encode_sparse_async(texts, **options))

    @output_options
    async def encode_sparse_async(self, texts: str | Sequence[str], **options) -> SparseRows:
        """`encode_sparse` without blocking the event loop."""
        return (await self.encode_outputs_async(texts, ("sparse",), **options))["sparse"]

    @output_options
    def encode_multi(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> Ragged:
        """Return the multi-vector embedding of each text, and after the texts of each image: an
        array `[vectors, width]` of float32, to compare token by token. Options and errors are those
        of `encode_outputs`."""
        return _finish(self._blocking.encode_multi_async(texts, images=images, **options))

    @output_options
    async def encode_multi_async(
        self, texts: str | Sequence[Any] = (), *, images: Any = None, **options
    ) -> Ragged:
        """`encode_multi` without blocking the event loop."""
        outputs = await self.encode_outputs_async(
            texts, ("multi_vector",), images=images, **options
        )
        return outputs["multi_vector"]

    @chunk_options
    def encode_chunks(
        self, texts: Sequence[ChunkedText | Sequence[str]], **options
    ) -> list[EncodedChunks]:
        """Encode by late chunking: return for each text one vector per chunk. The model runs the
        whole text before the tokens of a chunk are pooled, so that the vector reflects the context.

        A list of strings is one text, and each string is one chunk of it. Where two chunks have no
        white space between them, a space joins them. A text over the model's limit is run in
        windows, or refused if `truncate` is False.

        Raises InvalidInput, also for a model whose pooling is not the mean, BackendError, and
        TypeError if a text is a single string.
        """
        return _finish(self._blocking.encode_chunks_async(texts, **options))

    @chunk_options
    async def encode_chunks_async(
        self, texts: Sequence[ChunkedText | Sequence[str]], **options
    ) -> list[EncodedChunks]:
        """`encode_chunks` without blocking the event loop."""
        if any(isinstance(text, str) for text in texts):
            raise TypeError("a text must be a list of its chunks or a ChunkedText, not a string")
        listed = [text if isinstance(text, ChunkedText) else join_texts(text) for text in texts]
        request = self.model.tasks.embed_chunks(listed, EncodeOptions(**options))
        answer = await self._run(request)
        chunked = answer.chunked or NO_CHUNKS
        ends = np.cumsum(chunked.counts).tolist()  # index after the last chunk of each text
        return [
            EncodedChunks(answer.dense[end - count : end], chunked.bounds[end - count : end])
            for count, end in zip(chunked.counts.tolist(), ends, strict=True)
        ]

    @rerank_options
    def rerank(
        self,
        query: Any,
        documents: Sequence[Any] = (),
        *,
        images: Any = None,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options,
    ) -> list[Ranked]:
        """Score documents against a query, and return the best `top_n`, or all, best first.
        Documents of equal score keep their order. For a model that reads page images, pass the
        documents as `images`, which `encode` describes.

        A reranker's scores are from 0 to 1; with `raw_scores` they are its logits. An embedding
        model compares its outputs for the query and for each document: the score is the cosine of
        dense vectors, from -1 to 1, the inner product of sparse embeddings, or the mean of the
        cosines of multi-vector embeddings (with `raw_scores` their sum). Raises WrongTask for a
        classifier, InvalidInput and BackendError.
        """
        return _finish(
            self._blocking.rerank_async(
                query, documents, images=images, top_n=top_n, raw_scores=raw_scores, **options
            )
        )

    @rerank_options
    async def rerank_async(
        self,
        query: Any,
        documents: Sequence[Any] = (),
        *,
        images: Any = None,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options,
    ) -> list[Ranked]:
        """`rerank` without blocking the event loop."""
        check_positive("top_n", top_n)
        settings, tasks = ScoreOptions(**options), self.model.tasks
        listed, asked = await self._inputs(documents, images), query
        if not isinstance(query, str):
            asked = await self._read(_content, query, None)
        if self.spec.task == "embed":  # rank by the similarity of embeddings
            query_request, documents_request, weights = tasks.compare(asked, listed, settings)
            outputs = await self._run(query_request), await self._run(documents_request)
            scored = await self._compute(compare_outputs, *outputs, weights, listed)
        else:
            scored = await self._run(tasks.rerank(asked, listed, settings))
        return scored.ranked(raw_scores)[:top_n]

    @score_options
    def score(
        self, pairs: Sequence[tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> np.ndarray:
        """Return the score of each pair of a query and a document, float32 `[n]`, in the order of
        the pairs. `rerank` describes the scores, the options and the errors."""
        return _finish(self._blocking.score_async(pairs, raw_scores=raw_scores, **options))

    @score_options
    async def score_async(
        self, pairs: Sequence[tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> np.ndarray:
        """`score` without blocking the event loop."""
        settings, tasks = ScoreOptions(**options), self.model.tasks
        if self.spec.task != "embed":
            check_task(self.name, self.spec, "rerank")
            answer = await self._run(tasks.score([Pair(*pair) for pair in pairs], settings))
            return np.ascontiguousarray(answer.shown(raw_scores)[:, 0])
        # Each distinct query runs once; `query_of` has the index of the query for each pair.
        query_request, text_request, weights, query_of = tasks.compare_pairs(pairs, settings)
        try:
            queries = await self._run(query_request)
        except InvalidInput as error:
            if error.index is None:
                raise
            # name the first pair that has the refused query
            raise error.at(query_of.index(error.index), error.field or "query") from error
        outputs, texts = (queries, await self._run(text_request)), [text for _, text in pairs]
        compare = partial(compare_pairs, raw_scores=raw_scores)
        return await self._compute(compare, *outputs, weights, texts, query_of)

    @score_options
    def classify(
        self, inputs: str | Sequence[TextOrPair], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """Return for each text, or pair of texts, every label with its score, best first.

        The checkpoint says whether the scores of a text add up to 1 or are independent; with
        `raw_scores` they are the model's logits. Raises WrongTask for a model that cannot classify,
        InvalidInput and BackendError.
        """
        return _finish(self._blocking.classify_async(inputs, raw_scores=raw_scores, **options))

    @score_options
    async def classify_async(
        self, inputs: str | Sequence[TextOrPair], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """`classify` without blocking the event loop."""
        request = self.model.tasks.score(_texts_and_pairs(inputs), ScoreOptions(**options))
        return (await self._run(request)).labelled(raw_scores)

    @token_options
    def token_classify(
        self,
        texts: str | Sequence[str],
        aggregation_strategy: AggregationStrategy = "none",
        **options,
    ) -> list[list[Entity]]:
        """Return for each text the entities in it, such as names, as TokenClassificationPipeline of
        transformers does.

        With the `aggregation_strategy` "none" each token with another label than O is an entity.
        "simple" joins neighbours of the same label. "first", "average" and "max" also give the
        tokens of a word one label: that of its first token, or that of the mean scores or of the
        largest score of its tokens. Raises WrongTask for a model that is no token classifier,
        InvalidInput and BackendError.
        """
        return _finish(self._blocking.token_classify_async(texts, aggregation_strategy, **options))

    @token_options
    async def token_classify_async(
        self,
        texts: str | Sequence[str],
        aggregation_strategy: AggregationStrategy = "none",
        **options,
    ) -> list[list[Entity]]:
        """`token_classify` without blocking the event loop."""
        known = get_args(AggregationStrategy)
        if aggregation_strategy not in known:
            raise InvalidInput(
                f"`aggregation_strategy` must be one of {', '.join(known)}. "
                f"Given: {aggregation_strategy!r}",
                field="aggregation_strategy",
            )
        listed, tokenizer = _listed(texts), self.model.main.text_processor.tokenizer
        inputs = [Text(item) if isinstance(item, str) else item for item in listed]
        answer = await self._run(self.model.tasks.score_tokens(inputs, ScoreOptions(**options)))

        def find() -> list[list[Entity]]:
            return [
                find_entities(answer, number, text, tokenizer, aggregation_strategy)
                for number, text in enumerate(listed)
            ]

        return await self._compute(find)

    @compute_options
    def compute(
        self,
        inputs: str | Sequence[TextOrPair],
        outputs: Collection[str],
        **options,
    ) -> WorkResult:
        """Return several outputs of the model from one pass, by name: `dense` and `logits` as
        float32 `[n, width]`, `tokens` as an array `[length, width]` for each input.

        The values are the direct outputs of the model's heads: vectors are not normalised, and
        logits are not converted to scores. A classifier's `dense` is the vector after pooling,
        before the layers that make logits. Only embedding models take the options for prompts.
        Raises InvalidInput, also for an output that is not in `spec.widths`, and BackendError.
        """
        return _finish(self._blocking.compute_async(inputs, outputs, **options))

    @compute_options
    async def compute_async(
        self,
        inputs: str | Sequence[TextOrPair],
        outputs: Collection[str],
        **options,
    ) -> WorkResult:
        """`compute` without blocking the event loop."""
        listed, settings = _texts_and_pairs(inputs), EncodeOptions(**options)
        return await self._run(self.model.tasks.compute(listed, outputs, settings))

    async def _encode(
        self, texts: str | Sequence[Any], images: Any, role: Role | None, options: dict[str, Any]
    ) -> np.ndarray:
        """Return the dense vectors of texts and `images`, `[dim]` for a single string. `role`
        chooses the prompt and the route of the texts."""
        dense = (await self._embed(texts, images, role, options)).dense
        return dense[0] if isinstance(texts, str) and images is None else dense

    async def _inputs(self, texts: str | Sequence[Any], images: Any) -> Sequence[Content]:
        """Return `texts`, which may contain images and Parts, followed by `images`. All image files
        are read. Raises TypeError if `texts` is no list or `images` is a single image, OSError for
        a file that cannot be read, and InvalidImage for what is not an image."""
        listed = _listed(texts)
        if images is None and all(isinstance(item, str) for item in listed):
            return listed
        after = () if images is None else images
        is_single = isinstance(after, str | bytes | PathLike | np.ndarray)
        if is_single or not isinstance(after, Iterable):
            raise TypeError("images must be a list of images, not a single image")
        return await self._read(
            lambda: [
                *(_content(item, index) for index, item in enumerate(listed)),
                *map(read_image, after),
            ]
        )

    async def _embed(
        self, texts: str | Sequence[Any], images: Any, role: Role | None, options: dict[str, Any]
    ) -> Embeddings:
        """Return the embeddings of texts, followed by those of `images`. `role` chooses the prompt
        and the route of the texts; `options` are fields of EncodeOptions."""
        settings = EncodeOptions(**options) if options else NO_OPTIONS
        listed = await self._inputs(texts, images)
        if role is not None:
            settings = self.model.tasks.for_role(role, settings)
        inputs = [Text(item) if isinstance(item, str) else item for item in listed]
        return await self._run(self.model.tasks.embed(inputs, settings))


class _BlockingEmbedder(Embedder):
    """An Embedder whose coroutines block the calling thread, so that `_finish` can run them."""

    async def _run(self, request: AnyRequest[Answer]) -> Answer:
        return self.model.run(request)

    async def _read(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments)

    _compute = _read


def _finish(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a _BlockingEmbedder to its end, and return the result."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking call has awaited something that was not done")


def _listed(inputs: Any) -> list[Any]:
    """Return a string in a list, and other inputs as a list. Raises TypeError for what has no order
    or is no list."""
    if isinstance(inputs, str):
        return [inputs]
    is_list = isinstance(inputs, Iterable) and not isinstance(inputs, NO_LISTS)
    if not is_list:
        raise TypeError(f"got a {type(inputs).__name__}; expected a string or a list of inputs")
    return list(inputs)


def _content(item: Any, index: int | None) -> Content:
    """Return a text unchanged, an image as an input, and Parts with such images, or the only one of
    the Parts. Raises InvalidInput for any other item, InvalidImage, and OSError for a file that
    cannot be read."""
    if isinstance(item, str):
        return item
    if isinstance(item, Parts):
        if not item.parts:
            raise EmptyInput().at(index)
        if Parts in map(type, item.parts):
            message = "an input has Parts among its parts; expected texts and images"
            raise InvalidInput(message, index=index)
        if len(item.parts) == 1:
            return _content(item.parts[0], index)
        return Parts(tuple(_content(part, index) for part in item.parts))
    if item is None or isinstance(item, NO_IMAGES):
        message = f"an input is a {type(item).__name__}; expected a text or an image"
        raise InvalidInput(message, index=index)
    return read_image(item)


def _texts_and_pairs(inputs: str | Sequence[TextOrPair]) -> list[Text | Pair]:
    """Convert strings to Text, and tuples of two strings to Pair."""
    return [Text(item) if isinstance(item, str) else Pair(*item) for item in _listed(inputs)]
