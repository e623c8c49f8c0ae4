"""A model in memory: its tokenizer, its engine, its metrics and what it may admit."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from jaxembed import checkpoint, hub
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.engine.admission import Admission, Capacity, Cost, Held, capacity_of
from jaxembed.engine.compiles import compile_events
from jaxembed.engine.state import EngineState
from jaxembed.engines import plan_engine
from jaxembed.errors import ConfigError, NoInputs
from jaxembed.processors.pieces import TokenPiece
from jaxembed.processors.text import DECODED_BYTES, PIECE_BYTES, TextProcessor
from jaxembed.request import Answer, Request
from jaxembed.runner import RequestRunner
from jaxembed.spec import ModelSpec, Pooling
from jaxembed.tasks import KIND, Tasks
from jaxembed.telemetry import Telemetry

QUEUED_BATCHES = 64  # of waiting work a device may have before requests are refused


class LoadedModel:
    """A model that is loaded, compiled and ready to run requests, which its `tasks` make.

    `model` is a directory (Hugging Face's or a converted checkpoint), a hub id, or None for
    all-MiniLM-L6-v2. With `wait=False` the constructor returns while buckets still compile;
    requests wait until then. The models of one process may share a `capacity`. Raises
    CheckpointError or ConfigError.
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

    def _load(self, path: Path, cache_dir: Path, capacity: Capacity | None, on_progress) -> None:
        events = compile_events()
        planned = plan_engine(self.spec, self.config, cache_dir)
        self.plan = planned.plan
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
        self.engine = planned.load(path, self.telemetry, on_progress, self.name)
        batches = QUEUED_BATCHES * max(len(self.plan.devices), 1)
        self.admission = Admission(
            capacity or capacity_of(self.config),
            batches * self.plan.max_batch_tokens,
            lambda: self.engine.tokens_per_s,
        )
        self.telemetry.held_bytes.set_function(lambda: self.admission.capacity.bytes)
        self.telemetry.admitted_inputs.set_function(lambda: self.admission.inputs)
        self.telemetry.admitted_tokens.set_function(lambda: self.admission.tokens)
        self.runner = RequestRunner(self.processor, self.engine, self.telemetry, self.spec)
        self.engine.start()

    def run(self, request: Request[Answer]) -> Answer:
        """Run a request and block until it is answered. Nothing is refused for want of room.

        Raises the errors of InvalidInput and BackendError.
        """
        return self.runner.run(request)

    async def run_async(self, request: Request[Answer]) -> Answer:
        """`run` without blocking the event loop. If the task is cancelled, what is still queued of
        the request is dropped."""
        return await self.runner.run_async(request)

    async def answer(self, request: Request[Answer], held: Held | None = None) -> Answer:
        """`run_async` for a server: admit the request first, as a part of the one that `held`
        counts for.

        Raises also NoInputs, and Overloaded, RequestTooLarge or ShuttingDown before any work.
        """
        if not request.items:
            raise NoInputs()
        tokens = self.processor.estimate(request.inputs())
        with self.admission.admit(request.cost(self.spec, tokens), held) as permit:
            return await self.runner.run_async(
                request, lambda tokens: permit.correct(request.cost(self.spec, tokens))
            )

    async def tokenize_async(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        prompt_name: str | None,
        held: Held | None = None,
    ) -> list[list[TokenPiece]]:
        """The tokens of each text with their byte offsets; nothing is cut.

        For admission each character counts as a token, those of the prompt once for each text.
        """
        prompt = self.processor.prompt(None, prompt_name)
        characters = sum(map(len, texts)) + len(texts) * len(prompt)
        call = partial(self.processor.pieces, texts, special=add_special_tokens, prompt=prompt)
        cost = Cost(len(texts), characters, characters * PIECE_BYTES)
        with self.admission.admit(cost, held):
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
        with self.admission.admit(Cost(len(ids), tokens, tokens * DECODED_BYTES), held):
            return await self.runner.off_loop(call)

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
            "compiled_buckets": [str(bucket) for bucket in self.snapshot().compiled],
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
        self.engine.wait_ready(timeout_s)

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
    return msgspec.structs.replace(spec, heads=spec.heads | {"dense": head})
