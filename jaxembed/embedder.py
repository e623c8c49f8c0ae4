"""One model, from inputs to vectors or scores: the library's face, and all that the server uses.

embedder = Embedder("sentence-transformers/all-MiniLM-L6-v2")
vectors = embedder.encode(["a text", "another"])  # float32 [2, 384]
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxembed import checkpoint, hub
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.engine.admission import Admission, Capacity
from jaxembed.engine.build import build, plan
from jaxembed.engine.compiles import compile_events
from jaxembed.errors import ConfigError, EmptyInput, InvalidInput
from jaxembed.inputs import Input, Pair, Text
from jaxembed.models import program
from jaxembed.models.output import OutputName
from jaxembed.options import Embeddings, EncodeOptions, Label, Ranked, ScoreOptions, Scores
from jaxembed.postprocess import rank, scores, shape_vectors
from jaxembed.processors.text import TextProcessor, TokenPiece
from jaxembed.runner import Run, Runner
from jaxembed.spec import ModelSpec, Pooling
from jaxembed.tasks import Tasks
from jaxembed.telemetry import Telemetry

QUEUED_BATCHES = 64  # of waiting work a device may have before requests are refused
MOST_SHOWN_CHARACTERS = 1_000_000  # in a /tokenize request: an answer takes 900 bytes a token
QUERY_PROMPTS = ("query",)  # names sentence-transformers looks for, in this order
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
LOGITS: frozenset[OutputName] = frozenset({"dense"})  # they are a scorer's vectors
OnTokens = Callable[[int], object]  # told how many tokens a request holds


class Embedder:
    """A model that is loaded, compiled and ready to encode.

    `model` is a directory (Hugging Face's or a converted checkpoint), a hub id, or None for
    all-MiniLM-L6-v2. With `wait=False` it returns while buckets still compile; what is asked
    meanwhile waits. Embedders of one process may share a `capacity`. Raises CheckpointError or
    ConfigError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        token: str | None = None,
        dense_path: str | None = None,
        pooling: Pooling | None = None,
        cache_dir: Path | None = None,
        config: EngineConfig | None = None,
        text: TextConfig | None = None,
        capacity: Capacity | None = None,
        wait: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
    ):
        self.config = config or EngineConfig()
        self.text = text or TextConfig()
        cache_dir = cache_dir or hub.default_cache_dir()
        path = hub.resolve(
            model,
            revision=revision,
            offline=offline,
            cache_dir=cache_dir,
            token=token,
            dense_path=dense_path,
        )
        self.name = model or hub.DEFAULT_MODEL
        self.spec = checkpoint.load_spec(path)
        if pooling is not None:
            self.spec = _pooled(self.spec, pooling)
        self._load(path, cache_dir, capacity, on_progress)
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()  # or its threads would keep it, and the device's memory
                raise

    def __enter__(self) -> "Embedder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, path: Path, cache_dir: Path, capacity: Capacity | None, on_progress) -> None:
        events = compile_events()
        model = program(self.spec)
        self.plan = plan(self.spec, model, self.config, cache_dir)
        self.telemetry = Telemetry(self.plan.max_input_tokens)
        self.telemetry.compile_count.set_function(lambda: events.compiles)
        self.telemetry.compile_cache_hits.set_function(lambda: events.cache_hits)
        self.telemetry.compile_seconds.set_function(lambda: events.seconds)
        self.processor = TextProcessor(
            checkpoint.tokenizer_path(path),
            self.spec,
            self.plan.max_input_tokens,
            self.text,
            self.tokenization_workers,
        )
        self.tasks = Tasks(self.name, self.spec, self.processor, self.text)
        self.engine = build(
            self.plan,
            model,
            lambda: checkpoint.load_params(path, self.spec),
            self.spec,
            self.config,
            self.telemetry,
            on_progress,
        )
        batches = QUEUED_BATCHES * max(len(self.plan.devices), 1)
        self.admission = Admission(
            capacity or Capacity(self.config.max_concurrent_requests, self.config.max_queue_tokens),
            batches * self.plan.max_batch_tokens,
            lambda: self.engine.tokens_per_s,
        )
        self.runner = Runner(self.processor.executor, self.engine, self.telemetry, self.spec.task)
        self.engine.start()

    # -- the library ------------------------------------------------------------------------------

    def encode(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """float32 `[n, dim]`, or `[dim]` for a single text. Normalised if the checkpoint says so.

        Options are the fields of EncodeOptions: prompt, prompt_name, truncate, truncation_side,
        dimensions, normalize. Raises the errors of InvalidInput and BackendError.
        """
        wanted, inputs = _encode_options(options), _texts(texts)
        tokenize = self.tasks.embed(wanted)
        if not inputs:
            return np.zeros((0, wanted.dimensions or self.spec.dim), np.float32)
        dense = self._embeddings(self.runner.run(inputs, tokenize, wanted.outputs), wanted).dense
        return dense[0] if isinstance(texts, str) else dense

    def encode_query(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's prompt for queries, where it has one."""
        return self.encode(texts, **self._with_prompt(QUERY_PROMPTS, options))

    def encode_document(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's prompt for documents, where it has one."""
        return self.encode(texts, **self._with_prompt(DOCUMENT_PROMPTS, options))

    async def encode_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` without blocking the event loop. Cancelling the task cancels queued work."""
        inputs = _texts(texts)
        if not inputs:
            return self.encode([], **options)
        dense = (await self._answer(inputs, _encode_options(options))).dense
        return dense[0] if isinstance(texts, str) else dense

    async def encode_query_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_query` without blocking the event loop."""
        return await self.encode_async(texts, **self._with_prompt(QUERY_PROMPTS, options))

    async def encode_document_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_document` without blocking the event loop."""
        return await self.encode_async(texts, **self._with_prompt(DOCUMENT_PROMPTS, options))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options,
    ) -> list[Ranked]:
        """The documents that answer the query best, best first; equal ones in the order given.

        Scores are from 0 to 1, with `raw_scores` the model's logits. Other options are the fields
        of ScoreOptions. Raises WrongTask and the errors of InvalidInput and BackendError.
        """
        _check_top_n(top_n)
        tokenize = self.tasks.rerank(query, ScoreOptions(**options))
        if not documents:
            return []
        run = self.runner.run(documents, tokenize, LOGITS)
        return _ranked(_scores_of(run), raw_scores)[:top_n]

    async def rerank_async(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options,
    ) -> list[Ranked]:
        """`rerank` without blocking the event loop."""
        _check_top_n(top_n)
        if not documents:
            return self.rerank(query, [], **options)
        answer = await self._score_documents(query, documents, ScoreOptions(**options))
        return _ranked(answer, raw_scores)[:top_n]

    def classify(
        self, inputs: str | Sequence[str | tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """Every label of each text, or pair of texts, best first.

        The checkpoint says whether scores add up to one or stand alone; with `raw_scores` they are
        the model's logits. Otherwise as `rerank`.
        """
        wanted, items = ScoreOptions(**options), _texts_and_pairs(inputs)
        tokenize = self.tasks.score(wanted)
        if not items:
            return []
        return self._labelled(_scores_of(self.runner.run(items, tokenize, LOGITS)), raw_scores)

    async def classify_async(
        self, inputs: str | Sequence[str | tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """`classify` without blocking the event loop."""
        items = _texts_and_pairs(inputs)
        if not items:
            return self.classify([], **options)
        return self._labelled(await self._score(items, ScoreOptions(**options)), raw_scores)

    # -- the server -------------------------------------------------------------------------------

    async def answer(self, inputs: Sequence[Input], options: EncodeOptions) -> Embeddings:
        """Admit a request, tokenize it off the loop, run it, shape its vectors.

        Raises Overloaded before any work is done, and the errors of InvalidInput and BackendError.
        Cancelling the task takes what is queued of the request along.
        """
        with self.admission.admit(len(inputs), self.processor.estimate(inputs)) as permit:
            return await self._answer(inputs, options, permit.correct)

    async def score(self, inputs: Sequence[Text | Pair], options: ScoreOptions) -> Scores:
        """The logits of each text or pair, from a classifier or reranker; else as `answer`.

        Raises WrongTask of an embedding model.
        """
        with self.admission.admit(len(inputs), self.processor.estimate(inputs)) as permit:
            return await self._score(inputs, options, permit.correct)

    async def score_documents(
        self, query: str, documents: Sequence[str], options: ScoreOptions
    ) -> Scores:
        """The logits of each document beside the query, which is tokenized once; from a reranker.

        Raises WrongTask of any other model; else as `answer`.
        """
        tokens = self.processor.estimate([Pair(query, document) for document in documents])
        with self.admission.admit(len(documents), tokens) as permit:
            return await self._score_documents(query, documents, options, permit.correct)

    async def tokenize_async(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[TokenPiece]]:
        """The tokens of each text with their byte offsets; nothing is cut."""
        prompt = self.processor.prompt(None, prompt_name)
        characters = sum(map(len, texts))
        if characters > MOST_SHOWN_CHARACTERS:
            raise InvalidInput(
                f"`inputs` may hold {MOST_SHOWN_CHARACTERS} characters in all, because every token "
                f"is shown. Given: {characters}. Send fewer texts at a time",
                field="inputs",
            )
        call = partial(self.processor.pieces, texts, special=add_special_tokens, prompt=prompt)
        with self.admission.admit(len(texts), characters // 4):
            return await self.runner.off_loop(call)

    async def decode_async(
        self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """The text of each list of ids."""
        call = partial(self.processor.decode, ids, skip_special_tokens=skip_special_tokens)
        with self.admission.admit(len(ids), sum(map(len, ids))):
            return await self.runner.off_loop(call)

    # -- state ------------------------------------------------------------------------------------

    @property
    def max_input_tokens(self) -> int:
        return self.plan.max_input_tokens

    @property
    def max_batch_tokens(self) -> int:
        """Of a batch, or of the longest input where that is more: it stands alone."""
        return max(self.plan.max_batch_tokens, self.plan.max_input_tokens)

    @property
    def tokenization_workers(self) -> int:
        """TEI's rule, and four at least: one huge text must not hold up everybody's."""
        return self.text.workers or min(max((os.cpu_count() or 2) - 1, 4), 64)

    @property
    def device(self) -> str:
        return self.plan.device_name

    @property
    def dtype(self) -> str:
        return self.plan.dtype

    @property
    def ready(self) -> bool:
        """Whether every request has a compiled bucket and the device answers."""
        return self.engine.ready

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    @property
    def draining(self) -> bool:
        return self.admission.draining

    def describe(self) -> dict[str, object]:
        """What /info adds to TEI's fields."""
        return {
            "architecture": self.spec.architecture,
            "task": self.spec.task,
            **self._describe_task(),
            "device": self.device,
            "devices": max(len(self.plan.devices), 1),
            "parallel": self.config.parallel,
            "attention": "xla",
            "buckets": [str(bucket) for bucket in self.plan.grid.buckets],
            "compiled_buckets": [str(bucket) for bucket in self.engine.warmup.compiled],
            "max_queue_tokens": self.admission.capacity.max_tokens,
            "content_hash": self.spec.content_hash,
        }

    def _describe_task(self) -> dict[str, object]:
        spec, template = self.spec, self.spec.template
        if spec.task == "embed":
            return {"dimensions": spec.dim, "prompts": sorted(spec.prompts)}
        return {
            "labels": list(spec.labels),
            "score_function": "sigmoid" if spec.task == "rerank" else spec.score_function,
            "template": template is not None,
            "instruction": template.instruction if template else None,
        }

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until ready. Raises what the compiler raised on a bucket that is needed."""
        self.engine.warmup.wait(timeout_s)

    def drain(self) -> None:
        """Admit no further request."""
        self.admission.drain()

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish what is queued and stop the threads."""
        self.runner.closed = True
        self.drain()
        self.engine.close(timeout_s)
        self.processor.executor.shutdown(wait=False)

    # -- between ----------------------------------------------------------------------------------

    async def _answer(
        self,
        inputs: Sequence[Input],
        options: EncodeOptions,
        on_tokens: OnTokens = lambda tokens: None,
    ) -> Embeddings:
        tokenize = self.tasks.embed(options)
        _check_any(inputs)
        run = await self.runner.run_async(inputs, tokenize, options.outputs, on_tokens)
        return self._embeddings(run, options)

    async def _score(
        self,
        inputs: Sequence[Text | Pair],
        options: ScoreOptions,
        on_tokens: OnTokens = lambda tokens: None,
    ) -> Scores:
        tokenize = self.tasks.score(options)
        _check_any(inputs)
        return _scores_of(await self.runner.run_async(inputs, tokenize, LOGITS, on_tokens))

    async def _score_documents(
        self,
        query: str,
        documents: Sequence[str],
        options: ScoreOptions,
        on_tokens: OnTokens = lambda tokens: None,
    ) -> Scores:
        tokenize = self.tasks.rerank(query, options)
        _check_any(documents)
        return _scores_of(await self.runner.run_async(documents, tokenize, LOGITS, on_tokens))

    def _with_prompt(self, names: Sequence[str], options: dict) -> dict:
        """The options with the first of these prompts that the checkpoint has, or with none: its
        default prompt is for neither queries nor documents, as in sentence-transformers."""
        if "prompt" in options or "prompt_name" in options:
            return options
        prompt = next((self.spec.prompts[name] for name in names if name in self.spec.prompts), "")
        return {**options, "prompt": prompt}

    def _embeddings(self, run: Run, options: EncodeOptions) -> Embeddings:
        normalize = self.spec.normalize if options.normalize is None else options.normalize
        dense = shape_vectors(run.ticket.dense, dimensions=options.dimensions, normalize=normalize)
        tokens = [hidden for hidden in run.ticket.tokens if hidden is not None]
        return Embeddings(dense=dense, tokens=tokens or None, **run.figures)

    def _labelled(self, answer: Scores, raw_scores: bool) -> list[list[Label]]:
        logits, labels = answer.logits, self.spec.labels
        values = logits if raw_scores else scores(logits, self.spec.score_function)
        return [
            [Label(labels[k], float(row[k])) for k in rank(order)]
            for row, order in zip(values, logits, strict=True)
        ]


def _pooled(spec: ModelSpec, pooling: Pooling) -> ModelSpec:
    """The spec with another pooling. Raises ConfigError if the modules after it don't fit."""
    if len(spec.pooling) > 1:
        raise ConfigError(f"--pooling {pooling}: this checkpoint concatenates {spec.pooling}")
    return msgspec.structs.replace(spec, pooling=(pooling,))


def _encode_options(options: dict[str, Any]) -> EncodeOptions:
    """Raises TypeError for an option that the library's verbs don't have."""
    if "outputs" in options:
        raise TypeError("encode gives one vector a text; for token vectors use answer()")
    return EncodeOptions(**options)


def _texts(texts: str | Sequence[str]) -> list[Input]:
    return [Text(text) for text in ([texts] if isinstance(texts, str) else texts)]


def _texts_and_pairs(inputs: str | Sequence[str | tuple[str, str]]) -> list[Text | Pair]:
    listed = [inputs] if isinstance(inputs, str) else inputs
    return [Text(one) if isinstance(one, str) else Pair(*one) for one in listed]


def _scores_of(run: Run) -> Scores:
    return Scores(logits=run.ticket.dense, **run.figures)


def _ranked(answer: Scores, raw_scores: bool) -> list[Ranked]:
    """Ordered by logits: far from zero, different ones have the same score."""
    logits = answer.logits[:, 0]
    values = logits if raw_scores else scores(answer.logits, "sigmoid")[:, 0]
    return [Ranked(int(k), float(values[k])) for k in rank(logits)]


def _check_any(inputs: Sequence) -> None:
    if not inputs:
        raise EmptyInput("Input validation error: `inputs` cannot be empty")


def _check_top_n(top_n: int | None) -> None:
    if top_n is not None and top_n < 1:
        raise InvalidInput(f"`top_n` must be 1 or more. Given: {top_n}", field="top_n")
