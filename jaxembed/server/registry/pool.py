"""Loads models into memory when requests need them, and evicts others to make room.

A request has a lease on its model until it is answered. An evicted model is closed when its last
lease is returned, so no request fails. New requests for the model wait until it is loaded again.
Models are loaded one at a time. Only the thread of the event loop changes the state of the pool;
loading and closing run in other threads.
"""

import asyncio
import concurrent.futures
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from operator import itemgetter
from typing import Literal, TypeVar

import jax

from jaxembed import memory
from jaxembed.config import PoolLimits
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ModelSpec, Task
from jaxembed.engine.compiles import compile_events
from jaxembed.errors import (
    INTERRUPTS,
    BackendError,
    DeviceStuck,
    JaxembedError,
    ModelUnavailable,
    NoRoom,
    ShuttingDown,
)
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.registry.models import KnownModel, LoadedInstance, Models, is_name

logger = logging.getLogger(__name__)

FAILURE_S = 30.0  # after a failed load, requests do not retry it for this time
UNUSED_CLOSE_S = 20.0  # that the threads of an unused model have to end
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # the prefix of XLA's error

Returned = TypeVar("Returned")
State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
Load = Callable[[str, Callable[[int], object]], LoadedModel]
"""Loads the model with an id, and returns it when it is ready. Before loading takes memory, it
calls the given function with the number of bytes, so that the pool can make room."""
Describe = Callable[[str], Task]
"""Returns the task of the model with an id, which it reads without loading the model."""


class ModelPool:
    """Loads and evicts the models of a server: requests take leases on models here."""

    def __init__(
        self,
        models: Models,
        load: Load | None = None,
        limits: PoolLimits | None = None,
        describe: Describe | None = None,
    ):
        """`load` loads a model; None: no further model is loaded. `describe` reads the task of a
        model without loading it; None: the task is unknown before the model is loaded."""
        self.models = models
        models.telemetry.set_compile_events(compile_events())
        self._load = load
        self._describe = describe
        self._describe_lock = asyncio.Lock()
        self._undescribed: dict[KnownModel, float] = {}  # when `describe` failed for a model
        self._limits = limits or PoolLimits()
        self._load_lock = asyncio.Lock()  # held while a model is loaded
        self._loading: dict[KnownModel, asyncio.Task[LoadedInstance]] = {}
        self._leaving: dict[LoadedInstance, asyncio.Task[None]] = {}  # evicted, not yet freed
        self._waiting: dict[KnownModel, int] = {}  # requests that wait for a model to be loaded
        self._failed: dict[KnownModel, tuple[float, Exception]] = {}  # when and why a load failed

    def state(self, known: KnownModel) -> tuple[State, str]:
        """Return the state of a model in Triton's terms, and the reason if it is not available."""
        if known in self._loading:
            return "LOADING", ""
        if known.instance is not None:
            return "READY", ""
        if self._evictions_of(known):
            return "UNLOADING", ""
        if known in self._failed:
            return "UNAVAILABLE", str(self._failed[known][1])
        return "UNAVAILABLE", "not in memory"

    async def lease(
        self,
        name: str | None,
        task: Task | None,
        permitted: Collection[str] | None = None,
        outputs: Collection[OutputName] = (),
    ) -> LoadedInstance:
        """Find the model of a request, load it if needed, and return it with a lease on it.

        `Models.find` describes the arguments. Raises the errors of `Models.find`, ModelUnavailable
        if the model cannot be loaded in time, and ShuttingDown.
        """
        if task == "rerank" and not is_name(name):
            await self._look_for_rerankers(permitted)
        known = self.models.find(name, task, permitted, outputs)
        if known.instance is None:
            await self._wait_until_loaded(known, name, permitted)
            # the tasks and adapters of the model are known only now
            known = self.models.find(name, task, permitted, outputs)
        instance = known.instance
        if instance is None:  # the name was moved meanwhile to a model that is not in memory
            return await self.lease(name, task, permitted, outputs)
        instance.leases += 1
        return instance

    async def _look_for_rerankers(self, permitted: Collection[str] | None) -> None:
        """If no reranker is known, read the tasks of the models that were never loaded. A reranker
        that this finds precedes embedding models. Failures are logged."""
        if self._describe is None or self.models.rerankers(permitted):
            return
        self.models.discover()
        async with self._describe_lock:
            for known in self.models.known:
                elapsed_s = time.monotonic() - self._undescribed.get(known, -FAILURE_S)
                if known.task is not None or elapsed_s < FAILURE_S:
                    continue
                call = _in_thread(self._describe, known.id)
                try:
                    known.described = await asyncio.wait_for(call, self._limits.load_timeout_s)
                except Exception as error:  # an unreadable model must not fail the request
                    self._undescribed[known] = time.monotonic()
                    name, why = self._name(known), _reason(error)
                    logger.warning("%s may be a reranker, but cannot be read: %s", name, why)

    async def specs_of(
        self, name: str | None, permitted: Collection[str] | None = None
    ) -> list[ModelSpec]:
        """Return the specs of the models that `Models.candidates` finds for a request. Models
        without a spec are loaded. Raises the errors of `Models.candidates`, ModelUnavailable and
        ShuttingDown."""
        candidates = self.models.candidates(name, permitted)
        for known in candidates:
            if known.spec is None:
                await self._wait_until_loaded(known, name, permitted)
        return [known.spec for known in candidates if known.spec is not None]

    async def load(self, known: KnownModel, *, pinned: bool | None = None) -> None:
        """Load a model unless it is in memory, even if loading it has just failed. There is no
        timeout. `pinned` says whether the model stays when room is needed; None keeps the present
        setting. Raises JaxembedError if the model cannot be loaded."""
        if known.instance is None:
            await asyncio.shield(self._start_loading(known))
        if pinned is not None:
            known.pinned = pinned

    async def unload(self, known: KnownModel) -> None:
        """Evict a model, and wait until its memory is freed. Requests with a lease on the model are
        answered first. Later requests load it again."""
        if (task := self._loading.get(known)) is not None:
            await asyncio.wait({task})
        if known.instance is not None:
            self._evict(known)
        if leaving := self._evictions_of(known):
            await asyncio.wait(leaving)

    async def move(self, alias: str, name: str) -> None:
        """Serve the model `name` under `alias`. If another model had the alias, it loses it.

        The model is loaded before the alias moves, so that no request fails. A model that loses its
        last name is evicted. If loading fails, the alias is unchanged and JaxembedError is raised.
        """
        names_of = self.models.names_of
        await self.load(self.models[name])
        old_models = [known for known in self.models.known if alias in names_of(known)]
        self.models.name_alias(alias, name)
        logger.info("%s is now served as %s", name, alias)
        for known in old_models:
            if not names_of(known) and known.instance is not None:
                self._evict(known)

    def sweep(self) -> None:
        """Evict the models that were unused for the keep-alive time.

        If all models together exceed the memory limit, evict one more. They can exceed it, because
        the memory that a model needs to run is known only when its programs are compiled.
        """
        keep_alive_s, max_bytes = self._limits.keep_alive_s, self._limits.bytes
        oldest_at = -math.inf if keep_alive_s is None else time.monotonic() - keep_alive_s
        for known in self._evictable():
            assert known.instance is not None
            if not known.instance.leases and known.instance.used_at < oldest_at:
                self._evict(known)
        too_much = max_bytes is not None and self._taken_bytes > max_bytes
        if too_much and not self._leaving and len(self.models) > 1 and self._evictable():
            self._evict(self._evictable()[0])

    async def _wait_until_loaded(
        self, known: KnownModel, requested: str | None, permitted: Collection[str] | None
    ) -> None:
        """Wait until a model is in memory, loading it if needed, for at most the load timeout.

        Messages show the name that was `requested`, because the client may not be permitted to see
        other names. Raises ShuttingDown, and ModelUnavailable if loading takes too long, fails, or
        has failed in the last FAILURE_S seconds.
        """
        name = requested or next(iter(self.models.names_of(known, permitted)), known.id)
        failed_at, reason = self._failed.get(known, (-FAILURE_S, None))
        if reason is not None and time.monotonic() - failed_at < FAILURE_S:
            raise _unavailable(name, reason) from reason
        if self.models.draining:
            raise _shutting_down()
        task = self._start_loading(known)
        self._waiting[known] = self._waiting.get(known, 0) + 1
        try:
            await asyncio.wait_for(asyncio.shield(task), self._limits.load_timeout_s)
        except TimeoutError:
            raise ModelUnavailable(
                f"{name} is still being loaded after "
                f"{self._limits.load_timeout_s:g} s; try again, or raise --load-timeout"
            ) from None
        except JaxembedError as error:
            raise _unavailable(name, error) from error
        finally:
            self._waiting[known] -= 1

    def _start_loading(self, known: KnownModel) -> asyncio.Task[LoadedInstance]:
        """Return the task that loads a model. All requests for the model share it."""

        def end(task: asyncio.Task[LoadedInstance]) -> None:
            known.is_loading = False
            del self._loading[known]
            if not task.cancelled():
                task.exception()  # without this, asyncio would warn if nobody awaits the task

        if known not in self._loading:
            self._loading[known] = asyncio.create_task(self._load_in_turn(known))
            self._loading[known].add_done_callback(end)
            known.is_loading = True
        return self._loading[known]

    async def _load_in_turn(self, known: KnownModel) -> LoadedInstance:
        """Load a model as soon as no other model is being loaded, and return it. If loading fails,
        note the failure in `_failed` and raise JaxembedError."""
        async with self._load_lock:
            if known.instance is not None:
                return known.instance
            started_at = time.monotonic()
            try:
                loaded = await self._load_with_retry(known)
            except Exception as error:
                is_expected = isinstance(error, JaxembedError)
                failure = error if is_expected else BackendError(_reason(error))
                logger.error("%s cannot be loaded: %s", self._name(known), failure)
                # the next request tries again if room became free, or if the device returned
                if not isinstance(failure, NoRoom | DeviceStuck):
                    self._failed[known] = time.monotonic(), failure
                await _in_thread(_collect)
                raise failure from error
            self._failed.pop(known, None)
            known.instance, known.spec = LoadedInstance(loaded), loaded.spec
            known.takes_images = loaded.takes_images
            logger.info(
                "%s is in memory after %.1f s: %d MB, all models %d MB",
                self._name(known),
                time.monotonic() - started_at,
                loaded.resident_bytes // memory.MIB,
                self._taken_bytes // memory.MIB,
            )
            return known.instance

    async def _load_with_retry(self, known: KnownModel) -> LoadedModel:
        """Load a model in a thread. If the device has no memory for it, evict the least recently
        used model and retry once."""
        assert self._load is not None
        loop = asyncio.get_running_loop()

        def reserve(num_bytes: int) -> None:  # called in the loading thread
            if loop.is_closed():
                raise _shutting_down()
            making_room = asyncio.run_coroutine_threadsafe(self._make_room(known, num_bytes), loop)
            try:
                making_room.result()
            except concurrent.futures.CancelledError:  # the event loop has ended
                raise _shutting_down() from None

        try:
            return await _in_thread(self._load, known.id, reserve)
        except Exception as error:
            if not str(error).startswith(OUT_OF_MEMORY) or not self._evictable():
                raise
        await asyncio.shield(self._evict(self._evictable()[0]))
        return await _in_thread(self._load, known.id, reserve)

    async def _make_room(self, known: KnownModel, num_bytes: int) -> None:
        """Evict models until there is room for the `num_bytes` that `known` needs. If pinned models
        leave too little memory, raise NoRoom before evicting any further model."""
        max_bytes = self._limits.bytes
        while max_bytes is not None and self._taken_bytes + num_bytes > max_bytes:
            pinned = sum(
                other.instance.loaded.resident_bytes
                for other in self.models.known
                if other.instance is not None and other.pinned
            )
            if pinned + num_bytes > max_bytes:
                raise NoRoom(
                    f"it needs {num_bytes // memory.MIB} MB; models can use "
                    f"{max_bytes // memory.MIB} MB, of which {pinned // memory.MIB} MB are pinned; "
                    "raise --model-memory, or unload other models"
                )
            if self._leaving:
                await asyncio.wait(self._leaving.values(), return_when=asyncio.FIRST_COMPLETED)
            elif self._evictable():
                await asyncio.shield(self._evict(self._evictable()[0]))
            else:  # requests wait for each model left, so none may be evicted before it is leased
                await asyncio.sleep(0.01)

    @property
    def _taken_bytes(self) -> int:
        """The bytes of all models in memory, evicted models that are not yet freed included."""
        leaving = [instance.loaded for instance in self._leaving]
        return sum(loaded.resident_bytes for loaded in [*self.models, *leaving])

    def _evictable(self) -> list[KnownModel]:
        """Return the models that may be evicted, in the order in which to evict them: models
        without leases, then models with leases, in both groups the least recently used first.
        Pinned models and models that requests wait for are left out."""
        evictable = [
            (known.instance.leases > 0, known.instance.used_at, known)
            for known in self.models.known
            if known.instance is not None and not known.pinned and not self._waiting.get(known)
        ]
        return [known for *_, known in sorted(evictable, key=itemgetter(0, 1))]

    def _evict(self, known: KnownModel) -> asyncio.Task[None]:
        """Evict a model, so that new requests no longer find it in memory. Returns the task that
        frees the model when all leases on it are returned."""
        assert known.instance is not None
        instance, known.instance = known.instance, None
        task = asyncio.create_task(self._free(instance, self._name(known)))
        self._leaving[instance] = task
        task.add_done_callback(lambda _: self._leaving.pop(instance))
        return task

    def _evictions_of(self, known: KnownModel) -> list[asyncio.Task[None]]:
        """Return the tasks that are freeing a model. There are several if it was evicted, loaded
        and evicted again."""
        return [task for gone, task in self._leaving.items() if gone.loaded.name == known.id]

    async def _free(self, instance: LoadedInstance, name: str) -> None:
        """Close a model when its leases are returned, and free its memory."""
        await instance.idle()
        await _in_thread(instance.loaded.close, UNUSED_CLOSE_S)
        await _in_thread(_collect)
        logger.info("%s is no longer in memory", name)

    def _name(self, known: KnownModel) -> str:
        return next(iter(self.models.names_of(known)), known.id)


def _unavailable(name: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(f"{name} cannot be loaded: {_reason(error)}")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is shutting down", retry_after_s=5)


async def _in_thread(call: Callable[..., Returned], *arguments: object) -> Returned:
    """Call a function in a new thread, and return its result or raise its error. It is a daemon
    thread: the process can end without it, because it may be waiting for this event loop."""
    done: concurrent.futures.Future[Returned] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # cancelling the awaiting task does not stop the function

    def run() -> None:
        try:
            done.set_result(call(*arguments))
        except BaseException as error:
            # an unusual error, such as a Rust panic, becomes a BackendError
            is_usual = isinstance(error, (Exception, asyncio.CancelledError, *INTERRUPTS))
            failure = error if is_usual else BackendError(_reason(error))
            if not isinstance(error, JaxembedError):
                logger.exception("a model could not be loaded or freed")
            # the tracebacks would keep the parts of the model in memory
            chained: BaseException | None = error
            while chained is not None:
                chained.__traceback__ = None
                chained = chained.__cause__ or chained.__context__
            done.set_exception(failure)

    threading.Thread(target=run, name="model-pool", daemon=True).start()
    return await asyncio.wrap_future(done)


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _collect() -> None:
    """Free memory that closed models have left behind.

    `run.py` calls `gc.freeze` so that garbage collections skip the loaded models. Frozen objects
    are never collected, so unfreeze them here. JAX's caches keep each function that it has traced.
    """
    with suppress(RuntimeError):
        jax.clear_caches()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    memory.trim()
