"""One model, from inputs to vectors or scores: the library, and the interface of the server.

embedder = Embedder("sentence-transformers/all-MiniLM-L6-v2")
vectors = embedder.encode(["a text", "another"])  # float32 [2, 384]
"""

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxembed import checkpoint, hub
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.engine.admission import Admission, Capacity, Held, capacity_of
from jaxembed.engine.build import build, make_plan
from jaxembed.engine.compiles import compile_events
from jaxembed.engine.engine import EngineState
from jaxembed.errors import ConfigError, InvalidInput, NoInputs
from jaxembed.inputs import Input, Pair, Text
from jaxembed.models import program
from jaxembed.options import Embeddings, EncodeOptions, Label, Ranked, ScoreOptions, Scores
from jaxembed.processors.prompts import Role, prompt_of_role
from jaxembed.processors.text import DECODED_BYTES, PIECE_BYTES, TextProcessor, TokenPiece
from jaxembed.runner import RequestRunner
from jaxembed.spec import ModelSpec, Pooling
from jaxembed.tasks import KIND, Answer, Request, Tasks
from jaxembed.telemetry import Telemetry
from jaxembed.work import WorkResult

QUEUED_BATCHES = 64  # of waiting work a device may have before requests are refused
INPUT_BYTES = 1024  # of memory an input takes beside its text and its tokens: measured 0.8 KB
TOKEN_BYTES = 8  # a token takes: its id, twice while a batch is packed
FLOAT_BYTES = 4


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
        self.plan = make_plan(self.spec, model, self.config, cache_dir)
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
            lambda: checkpoint.stream_params(path, self.spec, model.order),
            self.spec,
            self.config,
            self.telemetry,
            on_progress,
            self.name,
        )
        batches = QUEUED_BATCHES * max(len(self.plan.devices), 1)
        self.admission = Admission(
            capacity or capacity_of(self.config),
            batches * self.plan.max_batch_tokens,
            lambda: self.engine.tokens_per_s,
        )
        self.telemetry.held_bytes.set_function(lambda: self.admission.capacity.bytes)
        self.telemetry.admitted_inputs.set_function(lambda: self.admission.inputs)
        self.telemetry.admitted_tokens.set_function(lambda: self.admission.tokens)
        self.runner = RequestRunner(self.processor.executor, self.engine, self.telemetry, self.spec)
        self.engine.start()

    # -- the library ------------------------------------------------------------------------------

    def encode(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """float32 `[n, dim]`, or `[dim]` for a single text. Normalised if the checkpoint says so.

        Options are the fields of EncodeOptions: prompt, prompt_name, truncate, truncation_side,
        dimensions, normalize, priority. Raises the errors of InvalidInput and BackendError.
        """
        request = self.tasks.embed(_texts(texts), _encode_options(options))
        return _one_or_all(texts, self.runner.run(request))

    async def encode_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` without blocking the event loop. Cancelling the task cancels queued work."""
        request = self.tasks.embed(_texts(texts), _encode_options(options))
        return _one_or_all(texts, await self.runner.run_async(request))

    def encode_query(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's prompt for queries, where it has one."""
        return self.encode(texts, **self._with_prompt("query", options))

    async def encode_query_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_query` without blocking the event loop."""
        return await self.encode_async(texts, **self._with_prompt("query", options))

    def encode_document(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode` with the checkpoint's prompt for documents, where it has one."""
        return self.encode(texts, **self._with_prompt("document", options))

    async def encode_document_async(self, texts: str | Sequence[str], **options) -> np.ndarray:
        """`encode_document` without blocking the event loop."""
        return await self.encode_async(texts, **self._with_prompt("document", options))

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
        request = self.tasks.rerank(query, documents, ScoreOptions(**options))
        return self.runner.run(request).ranked(raw_scores)[:top_n]

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
        request = self.tasks.rerank(query, documents, ScoreOptions(**options))
        return (await self.runner.run_async(request)).ranked(raw_scores)[:top_n]

    def classify(
        self, inputs: str | Sequence[str | tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """Every label of each text, or pair of texts, best first.

        The checkpoint says whether scores add up to one or stand alone; with `raw_scores` they are
        the model's logits. Otherwise as `rerank`.
        """
        request = self.tasks.score(_texts_and_pairs(inputs), ScoreOptions(**options))
        return self.runner.run(request).labelled(raw_scores)

    async def classify_async(
        self, inputs: str | Sequence[str | tuple[str, str]], *, raw_scores: bool = False, **options
    ) -> list[list[Label]]:
        """`classify` without blocking the event loop."""
        request = self.tasks.score(_texts_and_pairs(inputs), ScoreOptions(**options))
        return (await self.runner.run_async(request)).labelled(raw_scores)

    def compute(
        self,
        inputs: str | Sequence[str | tuple[str, str]],
        outputs: Collection[str],
        **options,
    ) -> WorkResult:
        """Several outputs of the model in one pass, by name: of `dense` and `logits` float32
        `[n, width]`, of `tokens` an array `[length, width]` for each input.

        They are as the heads of the model give them: not normalised, and no scores. A classifier's
        `dense` is the vector that its pooling gives, before the layers that make logits. Options
        are prompt, prompt_name (of an embedding model), truncate, truncation_side and priority.
        Raises InvalidInput for outputs that the model does not have (`spec.widths` has them all),
        and the errors of InvalidInput and BackendError.
        """
        request = self.tasks.compute(_texts_and_pairs(inputs), outputs, _compute_options(options))
        return self.runner.run(request)

    async def compute_async(
        self,
        inputs: str | Sequence[str | tuple[str, str]],
        outputs: Collection[str],
        **options,
    ) -> WorkResult:
        """`compute` without blocking the event loop."""
        request = self.tasks.compute(_texts_and_pairs(inputs), outputs, _compute_options(options))
        return await self.runner.run_async(request)

    def _with_prompt(self, role: Role, options: dict) -> dict:
        """The options with the checkpoint's prompt for the role, or with none: its default prompt
        is for neither queries nor documents, as in sentence-transformers."""
        if "prompt" in options or "prompt_name" in options:
            return options
        name = prompt_of_role(role, self.spec.prompts)
        return {**options, "prompt": "" if name is None else self.spec.prompts[name]}

    # -- the server -------------------------------------------------------------------------------

    async def answer(
        self, inputs: Sequence[Input], options: EncodeOptions, held: Held | None = None
    ) -> Embeddings:
        """Admit a request, as a part of the one that `held` counts for, tokenize it off the loop,
        run it, shape its vectors.

        Raises WrongTask, Overloaded before any work is done, and the errors of InvalidInput and
        BackendError. Cancelling the task takes what is queued of the request along.
        """
        return await self._admitted(self.tasks.embed(inputs, options), inputs, held)

    async def score(
        self, inputs: Sequence[Text | Pair], options: ScoreOptions, held: Held | None = None
    ) -> Scores:
        """The logits of each text or pair, from a classifier or reranker; else as `answer`."""
        return await self._admitted(self.tasks.score(inputs, options), inputs, held)

    async def score_documents(
        self,
        query: str,
        documents: Sequence[str],
        options: ScoreOptions,
        held: Held | None = None,
    ) -> Scores:
        """The logits of each document beside the query, from a reranker; else as `answer`."""
        request = self.tasks.rerank(query, documents, options)
        pairs = [Pair(query, document) for document in documents]
        return await self._admitted(request, pairs, held)

    async def _admitted(
        self, request: Request[Answer], inputs: Sequence[Input], held: Held | None
    ) -> Answer:
        if not inputs:
            raise NoInputs()
        shows_tokens = "tokens" in request.outputs
        with self.admission.admit(
            len(inputs),
            self.processor.estimate(inputs),
            held,
            input_bytes=INPUT_BYTES + 2 * FLOAT_BYTES * self.spec.dim,
            token_bytes=TOKEN_BYTES + shows_tokens * FLOAT_BYTES * self.spec.hidden_size,
        ) as permit:
            return await self.runner.run_async(request, permit.correct)

    async def tokenize_async(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        prompt_name: str | None,
        held: Held | None = None,
    ) -> list[list[TokenPiece]]:
        """The tokens of each text with their byte offsets; nothing is cut. A character counts as a
        token, those of the prompt once for each text."""
        prompt = self.processor.prompt(None, prompt_name)
        characters = sum(map(len, texts)) + len(texts) * len(prompt)
        call = partial(self.processor.pieces, texts, special=add_special_tokens, prompt=prompt)
        with self.admission.admit(len(texts), characters, held, token_bytes=PIECE_BYTES):
            return await self.runner.off_loop(call)

    async def decode_async(
        self,
        ids: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool,
        held: Held | None = None,
    ) -> list[str]:
        """The text of each list of ids."""
        call = partial(self.processor.decode, ids, skip_special_tokens=skip_special_tokens)
        tokens = sum(map(len, ids))
        with self.admission.admit(len(ids), tokens, held, token_bytes=DECODED_BYTES):
            return await self.runner.off_loop(call)

    # -- state ------------------------------------------------------------------------------------

    @property
    def max_input_tokens(self) -> int:
        return self.plan.max_input_tokens

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens of a batch, or of an input where that is more: it runs alone."""
        return max(self.plan.max_batch_tokens, self.plan.max_input_tokens)

    @property
    def tokenization_workers(self) -> int:
        """The number of tokenizer threads: by TEI's rule, but four or more, so that one huge text
        does not delay all others."""
        return self.text.workers or min(max((os.cpu_count() or 2) - 1, 4), 64)

    @property
    def tokenizing_bytes(self) -> int:
        """The most bytes that all tokenizer threads together take."""
        return self.tokenization_workers * self.processor.job_bytes

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
    def waiting(self) -> int:
        """The number of inputs that wait for a batch."""
        return self.snapshot().waiting_inputs

    @property
    def stuck(self) -> bool:
        """Whether no device returns from its current call, so that only a restart helps."""
        return self.engine.stuck

    @property
    def draining(self) -> bool:
        return self.admission.draining

    def snapshot(self) -> EngineState:
        """The state of the engine at this moment."""
        return self.engine.snapshot()

    def describe(self) -> dict[str, object]:
        """The fields that /info has in addition to TEI's."""
        return {
            "architecture": self.spec.architecture,
            "task": self.spec.task,
            **self._describe_task(),
            "device": self.device,
            "devices": max(len(self.plan.devices), 1),
            "parallel": self.config.parallel,
            "kernels": self.plan.kernels.describe(),
            "buckets": [str(bucket) for bucket in self.plan.grid.buckets],
            "compiled_buckets": [str(bucket) for bucket in self.engine.warmup.compiled],
            "max_queue_tokens": self.admission.capacity.max_tokens,
            "max_queue_bytes": self.admission.capacity.max_bytes,
            "tokenizing_bytes": self.tokenizing_bytes,
            "content_hash": self.spec.content_hash,
        }

    def _describe_task(self) -> dict[str, object]:
        spec, template = self.spec, self.spec.template
        if spec.task == "embed":
            return {"dimensions": spec.dim, "prompts": sorted(spec.prompts)}
        return {
            "labels": list(spec.labels),
            "score_function": spec.score_function,
            "template": template is not None,
            "instruction": template.instruction if template else None,
        }

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until ready. Raises the error of the compiler for a bucket that is needed."""
        self.engine.warmup.wait(timeout_s)

    def drain(self) -> None:
        """Admit no further request."""
        self.admission.drain()

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish what is queued and stop the threads."""
        self.runner.close()
        self.admission.close()
        self.engine.close(timeout_s)


def _pooled(spec: ModelSpec, pooling: Pooling) -> ModelSpec:
    """The spec with another pooling. Raises ConfigError for a model that was made for its own."""
    if spec.task != "embed":
        raise ConfigError(
            f"--pooling {pooling} is for embedding models; this is {KIND[spec.task]}, and its head "
            "takes only the pooling it was trained with"
        )
    head = spec.heads["dense"]
    if len(head.pooling) > 1:
        raise ConfigError(f"--pooling {pooling}: this checkpoint concatenates {head.pooling}")
    head = msgspec.structs.replace(head, pooling=(pooling,))
    return msgspec.structs.replace(spec, heads={"dense": head})


def _encode_options(options: dict[str, Any]) -> EncodeOptions:
    """Raises TypeError for an option that the methods of the library do not have."""
    if "outputs" in options:
        raise TypeError("encode gives one vector a text; for other outputs use compute()")
    return EncodeOptions(**options)


def _compute_options(options: dict[str, Any]) -> EncodeOptions:
    """Raises TypeError for an option that `compute` does not have."""
    if unknown := sorted({"outputs", "dimensions", "normalize", "bare_ids"} & options.keys()):
        raise TypeError(f"compute takes no {', '.join(unknown)}: it gives outputs as they are")
    return EncodeOptions(**options)


def _texts(texts: str | Sequence[str]) -> list[Input]:
    return [Text(text) for text in ([texts] if isinstance(texts, str) else texts)]


def _texts_and_pairs(inputs: str | Sequence[str | tuple[str, str]]) -> list[Text | Pair]:
    listed = [inputs] if isinstance(inputs, str) else inputs
    return [Text(one) if isinstance(one, str) else Pair(*one) for one in listed]


def _one_or_all(texts: str | Sequence[str], answer: Embeddings) -> np.ndarray:
    return answer.dense[0] if isinstance(texts, str) else answer.dense


def _check_top_n(top_n: int | None) -> None:
    if top_n is not None and top_n < 1:
        raise InvalidInput(f"`top_n` must be 1 or more. Given: {top_n}", field="top_n")
