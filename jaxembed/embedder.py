"""One model, from inputs to vectors: the library's face, and all that the server uses.

embedder = Embedder("sentence-transformers/all-MiniLM-L6-v2")
vectors = embedder.encode(["a text", "another"])  # float32 [2, 384]
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxembed import checkpoint, hub
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.engine.admission import Admission
from jaxembed.engine.build import build, plan
from jaxembed.engine.compiles import compile_events
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError, ConfigError, EmptyInput, InvalidInput
from jaxembed.inputs import Encoding, Input, Text
from jaxembed.models import program
from jaxembed.models.output import OutputName
from jaxembed.postprocess import shape_vectors
from jaxembed.processors.text import CHUNK, Rules, Side, TextProcessor, Tokenized, TokenPiece
from jaxembed.spec import ModelSpec, Pooling
from jaxembed.telemetry import Telemetry

QUEUED_BATCHES = 64  # of waiting work a device may have before requests are refused
MOST_SHOWN_CHARACTERS = 1_000_000  # in a /tokenize request: an answer takes 900 bytes a token
QUERY_PROMPTS = ("query",)  # names sentence-transformers looks for, in this order
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True)
class EncodeOptions:
    """What one request wants. None means the default of the server or of the checkpoint."""

    outputs: frozenset[OutputName] = frozenset({"dense"})
    prompt: str | None = None  # literal text
    prompt_name: str | None = None
    truncate: bool | None = None
    truncation_side: Side = "right"
    dimensions: int | None = None
    normalize: bool | None = None


@dataclass(frozen=True)
class Embeddings:
    """The answer to a request, in input order."""

    dense: np.ndarray  # float32 [n, dim], cut and normalised as asked
    tokens: list[np.ndarray] | None  # float32 [length, width] each, where asked
    num_tokens: np.ndarray  # int [n], tokens really run
    truncated: int  # inputs that were cut
    tokenization_s: float  # this and the next two are means over the inputs
    queue_s: float
    inference_s: float


class Embedder:
    """A model that is loaded, compiled and ready to encode.

    `model` is a directory (Hugging Face's or a converted checkpoint), a hub id, or None for
    all-MiniLM-L6-v2. With `wait=False` it returns while buckets still compile; what is asked
    meanwhile waits. Raises CheckpointError or ConfigError.
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
        self._closed = False
        self._load(path, cache_dir, on_progress)
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

    def _load(self, path: Path, cache_dir: Path, on_progress) -> None:
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
            self.config.max_concurrent_requests,
            self.config.max_queue_tokens or batches * self.plan.max_batch_tokens,
            lambda: self.engine.tokens_per_s,
        )
        self.engine.start()

    # -- the library ------------------------------------------------------------------------------

    def encode(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """float32 `[n, dim]`, or `[dim]` for a single text. Normalised if the checkpoint says so.

        Options are the fields of EncodeOptions: prompt, prompt_name, truncate, truncation_side,
        dimensions, normalize. Raises the errors of InvalidInput and BackendError.
        """
        wanted = _library_options(options)
        rules = self._rules(wanted)
        inputs = _inputs(texts)
        if not inputs:
            return np.zeros((0, wanted.dimensions or self.spec.dim), np.float32)
        started_at = time.monotonic()
        parts = self.processor.executor.map(
            partial(self.processor.encode, rules=rules), _chunks(inputs)
        )
        tokenized = _join(parts)
        tokenization_s = time.monotonic() - started_at
        ticket = self.engine.submit(tokenized.encodings, wanted.outputs)
        try:
            ticket.result()
        except BaseException:
            self.engine.cancel(ticket)
            raise
        dense = self._embeddings(ticket, tokenized, wanted, tokenization_s).dense
        return dense[0] if isinstance(texts, str) else dense

    def encode_query(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's prompt for queries, where it has one."""
        return self.encode(texts, **self._with_prompt(QUERY_PROMPTS, options))

    def encode_document(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's prompt for documents, where it has one."""
        return self.encode(texts, **self._with_prompt(DOCUMENT_PROMPTS, options))

    async def encode_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` without blocking the event loop. Cancelling the task cancels queued work."""
        inputs = _inputs(texts)
        if not inputs:
            return self.encode([], **options)
        dense = (await self._answer(inputs, _library_options(options))).dense
        return dense[0] if isinstance(texts, str) else dense

    async def encode_query_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_query` without blocking the event loop."""
        return await self.encode_async(texts, **self._with_prompt(QUERY_PROMPTS, options))

    async def encode_document_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_document` without blocking the event loop."""
        return await self.encode_async(texts, **self._with_prompt(DOCUMENT_PROMPTS, options))

    # -- the server -------------------------------------------------------------------------------

    async def answer(self, inputs: Sequence[Input], options: EncodeOptions) -> Embeddings:
        """Admit a request, tokenize it off the loop, run it, shape its vectors.

        Raises Overloaded before any work is done, and the errors of InvalidInput and BackendError.
        Cancelling the task takes what is queued of the request along.
        """
        with self.admission.admit(len(inputs), self.processor.estimate(inputs)) as permit:
            return await self._answer(inputs, options, permit.correct)

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
            return await self._off_loop(call)

    async def decode_async(
        self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """The text of each list of ids."""
        call = partial(self.processor.decode, ids, skip_special_tokens=skip_special_tokens)
        with self.admission.admit(len(ids), sum(map(len, ids))):
            return await self._off_loop(call)

    # -- state ------------------------------------------------------------------------------------

    @property
    def max_input_tokens(self) -> int:
        return self.plan.max_input_tokens

    @property
    def max_batch_tokens(self) -> int:
        return self.plan.max_batch_tokens

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
            "dimensions": self.spec.dim,
            "device": self.device,
            "devices": max(len(self.plan.devices), 1),
            "parallel": self.config.parallel,
            "attention": "xla",
            "buckets": [str(bucket) for bucket in self.plan.grid.buckets],
            "compiled_buckets": [str(bucket) for bucket in self.engine.warmup.compiled],
            "prompts": sorted(self.spec.prompts),
            "max_queue_tokens": self.admission.max_tokens,
            "content_hash": self.spec.content_hash,
        }

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until ready. Raises what the compiler raised on a bucket that is needed."""
        self.engine.warmup.wait(timeout_s)

    def drain(self) -> None:
        """Admit no further request."""
        self.admission.drain()

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish what is queued and stop the threads."""
        self._closed = True
        self.drain()
        self.engine.close(timeout_s)
        self.processor.executor.shutdown(wait=False)

    # -- between ----------------------------------------------------------------------------------

    async def _answer(
        self,
        inputs: Sequence[Input],
        options: EncodeOptions,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> Embeddings:
        if not inputs:
            raise EmptyInput("Input validation error: `inputs` cannot be empty")
        started_at = time.monotonic()
        rules = self._rules(options)
        parts = [
            self._off_loop(partial(self.processor.encode, chunk, rules))
            for chunk in _chunks(inputs)
        ]
        try:
            tokenized = _join(await asyncio.gather(*parts))
        except BaseException:
            for part in parts:  # the others are for nothing now
                part.cancel()
            raise
        tokenization_s = time.monotonic() - started_at
        on_tokens(sum(encoding.length for encoding in tokenized.encodings))
        ticket = await self._run(tokenized.encodings, options.outputs)
        return self._embeddings(ticket, tokenized, options, tokenization_s)

    async def _run(self, encodings: list[Encoding], outputs: frozenset[OutputName]) -> Ticket:
        """Submit and wait; the engine wakes the loop once."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(done.set)

        ticket = self.engine.submit(encodings, outputs, wake)
        try:
            await done.wait()
        except asyncio.CancelledError:
            self.engine.cancel(ticket)
            raise
        return ticket.result(timeout_s=0.0)

    def _off_loop(self, call: Callable):
        return asyncio.get_running_loop().run_in_executor(self.processor.executor, call)

    def _rules(self, options: EncodeOptions) -> Rules:
        if self._closed:
            raise BackendError("this Embedder is closed")
        self._check_dimensions(options.dimensions)
        truncate = self.text.truncate if options.truncate is None else options.truncate
        prompt = self.processor.prompt(options.prompt, options.prompt_name)
        return Rules(prompt, truncate, options.truncation_side)

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and not 0 < dimensions <= self.spec.dim:
            raise InvalidInput(
                f"`dimensions` must be from 1 to {self.spec.dim}, the size of this model's "
                f"embeddings. Given: {dimensions}",
                field="dimensions",
            )

    def _with_prompt(self, names: Sequence[str], options: dict) -> dict:
        """The options with the first of these prompts that the checkpoint has, or with none: its
        default prompt is for neither queries nor documents, as in sentence-transformers."""
        if "prompt" in options or "prompt_name" in options:
            return options
        prompt = next((self.spec.prompts[name] for name in names if name in self.spec.prompts), "")
        return {**options, "prompt": prompt}

    def _embeddings(
        self, ticket: Ticket, tokenized: Tokenized, options: EncodeOptions, tokenization_s: float
    ) -> Embeddings:
        normalize = self.spec.normalize if options.normalize is None else options.normalize
        result = Embeddings(
            dense=shape_vectors(ticket.dense, dimensions=options.dimensions, normalize=normalize),
            tokens=[t for t in ticket.tokens if t is not None] or None,
            num_tokens=np.array([encoding.length for encoding in tokenized.encodings]),
            truncated=tokenized.truncated,
            tokenization_s=tokenization_s,
            queue_s=float(ticket.queue_s.mean()),
            inference_s=float(ticket.inference_s.mean()),
        )
        self._observe(result, ticket)
        return result

    def _observe(self, result: Embeddings, ticket: Ticket) -> None:
        telemetry, count = self.telemetry, len(result.num_tokens)
        telemetry.embed_count.inc(count)
        telemetry.embed_success.inc(count)
        telemetry.truncated_inputs.inc(result.truncated)
        telemetry.input_length.observe_many(result.num_tokens)
        tokenization_s = np.full(count, result.tokenization_s / count)
        telemetry.embed_tokenization.observe_many(tokenization_s)
        telemetry.embed_queue.observe_many(ticket.queue_s)
        telemetry.embed_inference.observe_many(ticket.inference_s)
        telemetry.embed_duration.observe_many(tokenization_s + ticket.queue_s + ticket.inference_s)
        for stage, seconds in (
            ("tokenization", result.tokenization_s),
            ("queue", result.queue_s),
            ("inference", result.inference_s),
        ):
            telemetry.stage.labels(stage).observe(seconds)


def _pooled(spec: ModelSpec, pooling: Pooling) -> ModelSpec:
    """The spec with another pooling. Raises ConfigError if the modules after it don't fit."""
    if len(spec.pooling) > 1:
        raise ConfigError(f"--pooling {pooling}: this checkpoint concatenates {spec.pooling}")
    return msgspec.structs.replace(spec, pooling=(pooling,))


def _library_options(options: dict[str, Any]) -> EncodeOptions:
    """Raises TypeError for an option that the library's verbs don't have."""
    if "outputs" in options:
        raise TypeError("encode gives one vector a text; for token vectors use answer()")
    return EncodeOptions(**options)


def _inputs(texts: str | Sequence[str]) -> list[Input]:
    return [Text(text) for text in ([texts] if isinstance(texts, str) else texts)]


def _chunks(inputs: Sequence[Input]) -> Iterator[Sequence[Input]]:
    return (inputs[k : k + CHUNK] for k in range(0, len(inputs), CHUNK))


def _join(parts) -> Tokenized:
    parts = list(parts)
    encodings = list(chain.from_iterable(part.encodings for part in parts))
    return Tokenized(encodings, sum(part.truncated for part in parts))
