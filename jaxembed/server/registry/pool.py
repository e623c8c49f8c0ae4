"""Brings models into memory when they are asked for, and takes others out of it to make room.

A request has a lease on its model until it is answered. A model that has to go is taken out of the
table of names first, so that new requests wait for it to be loaded again, and is closed when its
last lease is given back: no request fails. Models are loaded one at a time.

The state is the event loop's; loading and closing are done in threads.
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
from typing import Literal, TypeVar

import jax

from jaxembed import memory
from jaxembed.config import PoolLimits
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ModelSpec, Task
from jaxembed.errors import (
    INTERRUPTS,
    BackendError,
    JaxembedError,
    ModelUnavailable,
    NoRoom,
    ShuttingDown,
)
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.registry.models import KnownModel, Models, Residence, is_name

logger = logging.getLogger(__name__)

FAILURE_S = 30.0  # a model that could not be loaded is not tried again for a request before
UNUSED_CLOSE_S = 20.0  # for the threads of a model that nobody uses
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA's error begins

Returned = TypeVar("Returned")
State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
Load = Callable[[str, Callable[[int], object]], LoadedModel]
"""Loads a model by its id. It calls the function with the bytes it will take before it takes them,
and returns once the model is ready."""
Describe = Callable[[str], Task]
"""Reads from the description of a model what it is for, by its id, without loading it."""


class ModelPool:
    """The models of a server that may be in memory."""

    def __init__(
        self,
        models: Models,
        load: Load | None = None,
        limits: PoolLimits | None = None,
        describe: Describe | None = None,
    ):
        """Without `load` the models are those in memory now. Without `describe` nothing is known of
        a model before it is loaded."""
        self.models = models
        self._load = load
        self._describe = describe
        self._describing = asyncio.Lock()
        self._undescribed: dict[KnownModel, float] = {}  # when it was tried in vain
        self._limits = limits or PoolLimits()
        self._turn = asyncio.Lock()  # of the one model that is being loaded
        self._loading: dict[KnownModel, asyncio.Task[Residence]] = {}
        self._leaving: dict[Residence, asyncio.Task[None]] = {}
        self._waiting: dict[KnownModel, int] = {}  # requests that wait for a model to be loaded
        self._failed: dict[KnownModel, tuple[float, Exception]] = {}  # when, and why

    def state(self, known: KnownModel) -> tuple[State, str]:
        """The state of a model in Triton's words, and the reason if it is not available."""
        if known in self._loading:
            return "LOADING", ""
        if known.residence is not None:
            return "READY", ""
        if self._leaving_of(known):
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
    ) -> Residence:
        """The model that `Models.find` gives, with a lease on it, loaded if it must be.

        Raises what `find` does, ModelUnavailable if it cannot be loaded or not in time, and
        ShuttingDown.
        """
        if task == "rerank" and not is_name(name):
            await self._look_for_rerankers(permitted)
        known = self.models.find(name, task, permitted, outputs)
        if known.residence is None:
            await self._arrival(known, name, permitted)
            # only now is it known what it can do, and which adapters it has
            known = self.models.find(name, task, permitted, outputs)
        residence = known.residence
        if residence is None:  # moved meanwhile to another model, which is not in memory
            return await self.lease(name, task, permitted, outputs)
        residence.leases += 1
        return residence

    async def _look_for_rerankers(self, permitted: Collection[str] | None) -> None:
        """Learn what the models are for that were never loaded, unless a reranker is known: one of
        them may be a reranker, which comes before an embedding model."""
        if self._describe is None or self.models.rerankers(permitted):
            return
        self.models.discover()
        async with self._describing:
            for known in self.models.known:
                since_s = time.monotonic() - self._undescribed.get(known, -FAILURE_S)
                if known.task is not None or since_s < FAILURE_S:
                    continue
                call = _in_thread(self._describe, known.id)
                try:
                    known.described = await asyncio.wait_for(call, self._limits.load_timeout_s)
                except Exception as error:  # whatever its folder holds, other models can rerank
                    self._undescribed[known] = time.monotonic()
                    name, why = self._name(known), _reason(error)
                    logger.warning("%s may be a reranker; it cannot be read: %s", name, why)

    async def specs_of(
        self, name: str | None, permitted: Collection[str] | None = None
    ) -> list[ModelSpec]:
        """The specs of the models that a request means. Raises as `lease`."""
        meant = self.models.meant(name, permitted)
        for known in meant:
            if known.spec is None:
                await self._arrival(known, name, permitted)
        return [known.spec for known in meant if known.spec is not None]

    async def load(self, known: KnownModel, *, pinned: bool | None = None) -> None:
        """Load a model, whatever failed before, unless it is in memory; wait as long as it takes.

        `pinned` says whether it may be taken out of memory to make room. Raises JaxembedError.
        """
        if known.residence is None:
            await asyncio.shield(self._start(known))
        if pinned is not None:
            known.pinned = pinned

    async def unload(self, known: KnownModel) -> None:
        """Take a model out of memory, and wait until it is freed. Requests that have it are
        answered before; later ones wait until it is loaded again."""
        if (task := self._loading.get(known)) is not None:
            await asyncio.wait({task})
        if known.residence is not None:
            self._leave(known)
        if leaving := self._leaving_of(known):
            await asyncio.wait(leaving)

    async def move(self, alias: str, name: str) -> None:
        """Serve the model `name` under `alias`, which may be another's until now.

        The model is loaded and has answered before the alias moves, so that no request fails. A
        model that is left without a name is taken out of memory. Raises JaxembedError, and then the
        alias is whose it was.
        """
        before = self.models.names_of
        await self.load(self.models[name])
        left = [known for known in self.models.known if alias in before(known)]
        self.models.name_alias(alias, name)
        logger.info("%s is served as %s from now on", name, alias)
        for known in left:
            if not before(known) and known.residence is not None:
                self._leave(known)

    def sweep(self) -> None:
        """Take models out of memory that nobody has used for the time that they are kept, and one
        more where models have come to take more than they may: what runs take is known only when
        their programs are compiled."""
        kept_s, most = self._limits.keep_alive_s, self._limits.bytes
        oldest_at = -math.inf if kept_s is None else time.monotonic() - kept_s
        for known in self._evictable():
            assert known.residence is not None
            if not known.residence.leases and known.residence.used_at < oldest_at:
                self._leave(known)
        too_much = most is not None and self._taken_bytes > most
        if too_much and not self._leaving and len(self.models) > 1 and self._evictable():
            self._leave(self._evictable()[0])

    async def _arrival(
        self, known: KnownModel, asked: str | None, permitted: Collection[str] | None
    ) -> None:
        """Wait until a model is in memory, within the time that a request may wait. Errors name it
        as it was asked for: a key need not know its other names."""
        name = asked or next(iter(self.models.names_of(known, permitted)), known.id)
        failed_at, reason = self._failed.get(known, (-FAILURE_S, None))
        if reason is not None and time.monotonic() - failed_at < FAILURE_S:
            raise _unavailable(name, reason) from reason
        if self.models.draining:
            raise _shutting_down()
        task = self._start(known)
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

    def _start(self, known: KnownModel) -> asyncio.Task[Residence]:
        """The task that loads a model, the same for all who ask for it."""

        def end(task: asyncio.Task[Residence]) -> None:
            known.is_loading = False
            del self._loading[known]
            if not task.cancelled():
                task.exception()  # is noted: perhaps nobody waits for it any more

        if known not in self._loading:
            self._loading[known] = asyncio.create_task(self._bring(known))
            self._loading[known].add_done_callback(end)
            known.is_loading = True
        return self._loading[known]

    async def _bring(self, known: KnownModel) -> Residence:
        """Load a model when its turn comes."""
        async with self._turn:
            if known.residence is not None:
                return known.residence
            started_at = time.monotonic()
            try:
                loaded = await self._loaded(known)
            except Exception as error:
                is_ours = isinstance(error, JaxembedError)
                failure = error if is_ours else BackendError(_reason(error))
                logger.error("%s cannot be loaded: %s", self._name(known), failure)
                if not isinstance(failure, NoRoom):  # there may be room at any moment
                    self._failed[known] = time.monotonic(), failure
                await _in_thread(_collect)
                raise failure from error
            self._failed.pop(known, None)
            known.residence, known.spec = Residence(loaded), loaded.spec
            known.takes_images = loaded.takes_images
            logger.info(
                "%s is in memory after %.1f s: %d MB, all models %d MB",
                self._name(known),
                time.monotonic() - started_at,
                loaded.resident_bytes // memory.MIB,
                self._taken_bytes // memory.MIB,
            )
            return known.residence

    async def _loaded(self, known: KnownModel) -> LoadedModel:
        """The model, loaded in a thread. If the device has no memory for it after all, the model
        that was not used for the longest time goes, and it is tried once more."""
        assert self._load is not None
        loop = asyncio.get_running_loop()

        def reserve(count: int) -> None:
            if loop.is_closed():
                raise _shutting_down()
            room = asyncio.run_coroutine_threadsafe(self._make_room(known, count), loop)
            try:
                room.result()
            except concurrent.futures.CancelledError:  # the loop has ended meanwhile
                raise _shutting_down() from None

        try:
            return await _in_thread(self._load, known.id, reserve)
        except Exception as error:
            if not str(error).startswith(OUT_OF_MEMORY) or not self._evictable():
                raise
        await asyncio.shield(self._leave(self._evictable()[0]))
        return await _in_thread(self._load, known.id, reserve)

    async def _make_room(self, known: KnownModel, count: int) -> None:
        """Take models out of memory until there is room for so many bytes. Raises NoRoom, and then
        takes no further one out, if all that may go would not be enough."""
        most = self._limits.bytes
        while most is not None and self._taken_bytes + count > most:
            staying = sum(
                one.residence.loaded.resident_bytes
                for one in self.models.known
                if one.residence is not None and one.pinned
            )
            if staying + count > most:
                raise NoRoom(
                    f"it takes {count // memory.MIB} MB, and models may take "
                    f"{most // memory.MIB} MB, of which {staying // memory.MIB} MB are pinned; "
                    "raise --model-memory, or unload others"
                )
            if self._leaving:
                await asyncio.wait(self._leaving.values(), return_when=asyncio.FIRST_COMPLETED)
            elif self._evictable():
                await asyncio.shield(self._leave(self._evictable()[0]))
            else:  # those that may go were loaded for requests that have not begun yet
                await asyncio.sleep(0.01)

    @property
    def _taken_bytes(self) -> int:
        """The memory of all models, until they are freed."""
        leaving = [one.loaded for one in self._leaving]
        return sum(loaded.resident_bytes for loaded in [*self.models, *leaving])

    def _evictable(self) -> list[KnownModel]:
        """The models in memory that may go: first that which was not used for the longest time,
        last those in use."""
        may_go = {
            known.residence: known
            for known in self.models.known
            if known.residence is not None and not known.pinned and not self._waiting.get(known)
        }
        oldest = sorted(may_go, key=lambda residence: (residence.leases > 0, residence.used_at))
        return [may_go[residence] for residence in oldest]

    def _leave(self, known: KnownModel) -> asyncio.Task[None]:
        """Take a model out of the table now, and free it when nobody uses it any more."""
        assert known.residence is not None
        residence, known.residence = known.residence, None
        task = asyncio.create_task(self._free(residence, self._name(known)))
        self._leaving[residence] = task
        task.add_done_callback(lambda _: self._leaving.pop(residence))
        return task

    def _leaving_of(self, known: KnownModel) -> list[asyncio.Task[None]]:
        """What frees a model that has left the table; several where it has come back meanwhile."""
        return [task for one, task in self._leaving.items() if one.loaded.name == known.id]

    async def _free(self, residence: Residence, name: str) -> None:
        await residence.idle()
        await _in_thread(residence.loaded.close, UNUSED_CLOSE_S)
        await _in_thread(_collect)
        logger.info("%s is no longer in memory", name)

    def _name(self, known: KnownModel) -> str:
        return next(iter(self.models.names_of(known)), known.id)


def _unavailable(name: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(f"{name} cannot be loaded: {_reason(error)}")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is shutting down", retry_after_s=5)


async def _in_thread(call: Callable[..., Returned], *arguments: object) -> Returned:
    """Make a call in a thread of its own, for which a process that ends does not wait: it may be
    waiting for this event loop."""
    done: concurrent.futures.Future[Returned] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # whoever waits may be cancelled, the call is not

    def run() -> None:
        try:
            done.set_result(call(*arguments))
        except BaseException as error:
            is_usual = isinstance(error, (Exception, asyncio.CancelledError, *INTERRUPTS))
            failure = error if is_usual else BackendError(_reason(error))
            if not isinstance(error, JaxembedError):
                logger.exception("a model could not be loaded or freed")
            # tracebacks keep what was half loaded
            behind: BaseException | None = error
            while behind is not None:
                behind.__traceback__ = None
                behind = behind.__cause__ or behind.__context__
            done.set_exception(failure)

    threading.Thread(target=run, name="model-pool", daemon=True).start()
    return await asyncio.wrap_future(done)


def _reason(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _collect() -> None:
    """Free what models have left behind.

    `gc.freeze`, which a server calls so that collections do not walk over its models, keeps what
    was frozen for good; and JAX keeps what it knows of each function that it has traced.
    """
    with suppress(RuntimeError):
        jax.clear_caches()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    memory.trim()
