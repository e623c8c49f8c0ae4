"""Finds the models of one server by name and by task, drains and closes all of them; and lists what
the operator lets it load while it runs."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ModelSpec, Task
from jaxembed.engine.admission import Capacity
from jaxembed.engine.compiles import compile_events
from jaxembed.errors import (
    ConfigError,
    Forbidden,
    InvalidInput,
    ModelUnavailable,
    UnknownModel,
    WrongTask,
)
from jaxembed.observability.metrics import NO_MODEL, Telemetry, exposition
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.tasks import KIND, fit

logger = logging.getLogger(__name__)

TASK_ROUTES: dict[Task, str] = {
    "embed": "/v1/embeddings, /embed, /v2/embed",
    "classify": "/predict, /classify",
    "rerank": "/rerank, /v1/rerank, /v2/rerank",
}
UNSPECIFIED = "default/not-specified"  # the name that Infinity's client sends for none
LONGEST_ALIAS = 200  # characters
NONE_PERMITTED = "none of the models that the API key may use is served here"
REFUSAL: dict[Task, str] = {  # TEI's words
    "embed": "Model is not an embedding model",
    "classify": "Model is not a classifier model",
    "rerank": "model is not a re-ranker model",
}


@dataclass(eq=False)
class Residence:
    """A model in memory, and the requests that use it, which hold a lease each.

    Only the thread of the event loop may call its methods.
    """

    loaded: LoadedModel
    leases: int = 0  # while there are any, the model is not closed
    used_at: float = field(default_factory=time.monotonic)
    _idle: asyncio.Event | None = None

    def give_back(self) -> None:
        """Give a lease back."""
        self.leases -= 1
        self.used_at = time.monotonic()
        if not self.leases and self._idle is not None:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nobody has a lease; nobody may take one any more."""
        if self.leases:
            self._idle = asyncio.Event()
            await self._idle.wait()


@dataclass(eq=False)
class KnownModel:
    """A model that the server knows, in memory or not."""

    id: str  # a directory or a hub id, by which it is loaded
    residence: Residence | None = None  # None: not in memory
    spec: ModelSpec | None = None  # None until it was loaded once
    takes_images: bool = False  # as far as is known
    pinned: bool = False  # never taken out of memory to make room
    is_loading: bool = False
    described: Task | None = None  # what it is for, as read without loading it

    @property
    def loaded(self) -> LoadedModel:
        """The model, which must be in memory."""
        assert self.residence is not None
        return self.residence.loaded

    @property
    def task(self) -> Task | None:
        """What the model is for, as far as is known."""
        return self.described if self.spec is None else self.spec.task


class Models:
    """The models of a server: those loaded at its start, in the order given, and others.

    `aliases` maps a model id to its served names. A model without any is served under its id.
    `loadable` gives ids by served name, again whenever it is called: these models may be loaded
    later. A request that names no model means one of them only if it is a reranker and the request
    reranks.
    Raises ConfigError if two models have a name in common.
    """

    def __init__(
        self,
        models: Sequence[LoadedModel] = (),
        aliases: Mapping[str, Sequence[str]] | None = None,
        *,
        capacity: Capacity | None = None,
        loadable: Callable[[], Mapping[str, str]] | None = None,
    ):
        names = served_names([loaded.name for loaded in models], aliases or {})
        self.lasting = [  # the models that were loaded at the start
            KnownModel(
                loaded.name, Residence(loaded), loaded.spec, loaded.takes_images, pinned=True
            )
            for loaded in models
        ]
        self._by_name = {
            name: known for known, owned in zip(self.lasting, names, strict=True) for name in owned
        }
        self._loadable = loadable
        self.changes = loadable is not None  # whether models come and go
        self._own: dict[str, str] = {}  # ids of loadable models, by the names that are theirs alone
        self.capacity = capacity or models[0].admission.capacity
        self.telemetry = Telemetry()  # of requests that no model is known for
        self.telemetry.show_compiles(compile_events())
        self.draining = False  # whether all further requests are refused
        self.discover()

    @property
    def known(self) -> list[KnownModel]:
        """Every model, once."""
        return list(dict.fromkeys([*self.lasting, *self._by_name.values()]))

    def __iter__(self) -> Iterator[LoadedModel]:
        """The models in memory."""
        return iter([known.loaded for known in self.known if known.residence is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> KnownModel:
        """The model served under `name`, which may name one of its adapters too. Raises
        UnknownModel, which lists the names."""
        return self.named(name, None)

    def named(self, name: str, permitted: Collection[str] | None) -> KnownModel:
        """As `self[name]`; with `permitted` names, UnknownModel lists those of them alone."""
        known = self._by_name.get(self._split(name)[0])
        if known is None and self.changes:
            self.discover()
            known = self._by_name.get(self._split(name)[0])
        if known is None:
            shown = name if len(name) <= 200 else f"{name[:200]}..."
            raise UnknownModel(
                f"the model `{shown}` does not exist; this server has "
                + (", ".join(self.names_among(permitted)) or "none that the key may use"),
                field="model",
            )
        return known

    def discover(self) -> None:
        """Look which models may be loaded now. A name that is taken stays whose it is."""
        found = self._loadable() if self._loadable is not None else {}
        for name in self._own.keys() - found.keys():
            known = self._by_name[name]
            if known.residence is None and not known.is_loading:  # else it stays until it leaves
                del self._by_name[name], self._own[name]
        by_id = {known.id: known for known in self.known}
        for name, model in found.items():
            known = by_id.setdefault(model, KnownModel(model))
            self._by_name.setdefault(name, known)
        self._own |= {
            name: model for name, model in found.items() if self._by_name[name].id == model
        }

    def name_alias(self, alias: str, name: str) -> KnownModel:
        """Serve the model `name` under `alias` too from now on, in place of any other model.
        Returns the model. Raises UnknownModel, and InvalidInput for a name that is a model's own or
        could mean an adapter."""
        known = self[name]
        is_name = alias.strip() and alias.isprintable() and len(alias) <= LONGEST_ALIAS
        if not is_name or ":" in alias or alias in self._own or alias == UNSPECIFIED:
            raise InvalidInput(
                f"{alias[:LONGEST_ALIAS]!r} cannot be moved: wanted a name that is no loadable "
                f"model's own, of at most {LONGEST_ALIAS} characters, without a colon",
                field="alias",
            )
        self._by_name.pop(alias, None)  # the model's own name comes first in its answers
        self._by_name[alias] = known
        return known

    def drop_alias(self, alias: str) -> KnownModel:
        """Serve nothing under `alias` any more. Returns the model that had it. Raises UnknownModel,
        and InvalidInput for a name that is a model's own or its only one."""
        known = self[alias]
        if alias not in self._by_name or alias in self._own or len(self.names_of(known)) == 1:
            raise InvalidInput(
                f"{alias!r} cannot be dropped: it is no alias, or the model's only name",
                field="alias",
            )
        del self._by_name[alias]
        logger.info("%s is no longer a name of %s", alias, known.id)
        return known

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter in `<served name>:<adapter>`; None for the model itself."""
        return self._split(name)[1] if name and name not in self._by_name else None

    def _split(self, name: str) -> tuple[str, str | None]:
        """The served name and the adapter; those of an unknown name are unknown too."""
        model, colon, adapter = name.rpartition(":")
        known = None if name in self._by_name or not colon else self._by_name.get(model)
        if known is None:
            return name, None
        if known.spec is None:  # it must be loaded to know
            return model, None
        return (model, adapter) if adapter in known.spec.adapter_names else (name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Every served name: of each model, and of each of its adapters."""
        return self.names_among(None)

    def names_among(self, permitted: Collection[str] | None) -> tuple[str, ...]:
        """Those of the served names that are permitted; all of them for None."""
        names = dict.fromkeys(self._by_name)
        for name, known in self._by_name.items():
            adapters = known.spec.adapter_names if known.spec else ()
            names.update(dict.fromkeys(f"{name}:{one}" for one in adapters))
        return tuple([name for name in names if permitted is None or name in permitted])

    def names_of(self, known: KnownModel, permitted: Collection[str] | None = None) -> list[str]:
        """The served names of a model, of those that are permitted if not all are; none if they
        were all moved to others."""
        return [
            name
            for name, served in self._by_name.items()
            if served is known and (permitted is None or name in permitted)
        ]

    def first(self, permitted: Collection[str] | None = None) -> LoadedModel:
        """The first model in memory, of those with a permitted name if not all are. Raises
        ModelUnavailable if there is none, and Forbidden if none has a permitted name."""
        for loaded in self.among(permitted):
            return loaded
        if permitted is not None and not self.names_among(permitted):
            raise Forbidden(NONE_PERMITTED)
        raise ModelUnavailable(
            f"no model is in memory; one is loaded when a request asks for it, of "
            f"{', '.join(self.names_among(permitted))}"
        )

    def among(self, permitted: Collection[str] | None) -> list[LoadedModel]:
        """The models in memory that have a permitted name; all of them for None."""
        if permitted is None:
            return list(self)
        named = [known for known in self.known if self.names_of(known, permitted)]
        return [known.loaded for known in named if known.residence is not None]

    def name_of(self, loaded: LoadedModel, permitted: Collection[str] | None = None) -> str:
        """The name of the model in its answers: the first of its served names, of those that are
        permitted if any is, or its id when they were moved."""
        names = [
            name
            for name, known in self._by_name.items()
            if known.residence is not None and known.residence.loaded is loaded
        ]
        shown = [name for name in names if permitted is None or name in permitted]
        return next(iter(shown or names), loaded.name)

    def by_name(self) -> dict[str, LoadedModel]:
        """The models in memory by their names in answers."""
        return {self.name_of(loaded): loaded for loaded in self}

    def meant(self, name: str | None, permitted: Collection[str] | None = None) -> list[KnownModel]:
        """The model served under `name`, or, if no name is given, those loaded at the start that
        still have one; where none was, the only one there is. With `permitted` names, which a given
        one must be among, there are no models but theirs. Raises UnknownModel, InvalidInput if a
        name is needed, Forbidden if no model remains, and ModelUnavailable if there is none."""
        if name and is_name(name):
            return [self.named(name, permitted)]
        known = [one for one in self.lasting or self.known if self.names_of(one, permitted)]
        if (self.lasting and known) or len(known) == 1:
            return known
        names = self.names_among(permitted)
        if not names and permitted is None:
            raise ModelUnavailable("there is no model yet; put one into --model-repository")
        if not names:
            raise Forbidden(NONE_PERMITTED)
        raise InvalidInput(f"`model` must say which: {', '.join(names)}", field="model")

    def rerankers(self, permitted: Collection[str] | None = None) -> list[KnownModel]:
        """The models with a permitted name that are listed as ones that rerank, of those loaded at
        the start; where there is none, any other reranker, loaded or not."""
        named = [one for one in self.known if self.names_of(one, permitted)]
        listed = [one for one in named if one in self.lasting and _fit(one, "rerank") in (0, 1)]
        return listed or [one for one in named if one.task == "rerank"]

    def find(
        self,
        name: str | None,
        task: Task | None,
        permitted: Collection[str] | None = None,
        outputs: Collection[OutputName] = (),
    ) -> KnownModel:
        """The model served under `name` or, without a name, the only model that fits the task best
        and gives these outputs.

        A task of None stands for a task that every model can do. `fit` says how well a model fits a
        task: a classifier is preferred to a reranker that classifies, and any reranker to an
        embedding model that reranks. A model that was never loaded counts as one that can. Where no
        model gives the outputs they do not count; the request is refused later. Raises UnknownModel
        if no model has the name, WrongTask if the named model, or every model, cannot do the task,
        InvalidInput if several models remain, and what `meant` does, whose `permitted` it takes.
        """
        known = None if permitted is not None else self._by_name.get(name or "")
        if (
            known is not None
            and name != UNSPECIFIED
            and (task is None or known.spec is None or fit(known.spec, task) is not None)
        ):
            return known  # nearly all requests
        is_open = task == "rerank" and not is_name(name)
        asked = (is_open and self.rerankers(permitted)) or self.meant(name, permitted)
        fits = {known: how for known in asked if (how := _fit(known, task)) is not None}
        if task is not None and not fits:
            described = []
            for one in asked:
                assert one.spec is not None  # else it can do what it is asked for
                names = self.names_of(one, permitted)
                shown = f"`{names[0]}`" if names else "the model"  # of a key for its adapters alone
                described.append(f"{shown} is {KIND[one.spec.task]} ({TASK_ROUTES[one.spec.task]})")
            raise WrongTask(f"{REFUSAL[task]}: {', '.join(described)}")
        best = [known for known, how in fits.items() if how == min(fits.values())]
        giving = [
            known
            for known in best
            if known.spec is None or set(outputs) <= {*known.spec.representations}
        ]
        chosen = giving or best
        if len(chosen) > 1:
            names = [name for known in chosen for name in self.names_of(known, permitted)[:1]]
            lack = "" if giving else f"; none of them gives {' and '.join(outputs)}"
            raise InvalidInput(f"`model` must say which: {', '.join(names)}{lack}", field="model")
        return chosen[0]

    def exposition(self) -> bytes:
        """The metrics of all models in memory in the Prometheus text format. Where models come and
        go, each series has the label `model`, however many there are."""
        telemetries = {name: model.telemetry for name, model in self.by_name().items()}
        if self.changes:
            telemetries[NO_MODEL] = self.telemetry
        return exposition(telemetries, label_one=self.changes)

    @property
    def healthy(self) -> bool:
        return all(loaded.healthy for loaded in self)

    @property
    def stuck(self) -> bool:
        """Whether no device of a model returns from its call, so that only a new process helps."""
        return any(loaded.stuck for loaded in self)

    @property
    def ready(self) -> bool:
        return all(loaded.ready for loaded in self)

    def drain(self) -> None:
        """Refuse all further requests."""
        self.draining = True
        for loaded in self:
            loaded.drain()

    def close(self, timeout_s: float) -> None:
        """Close all models, within `timeout_s` seconds in total."""
        deadline = time.monotonic() + timeout_s
        for loaded in self:
            loaded.close(timeout_s=max(deadline - time.monotonic(), 0.0))


def is_name(name: str | None) -> bool:
    """Whether the `model` of a request names one."""
    return bool(name) and name != UNSPECIFIED


def _fit(known: KnownModel, task: Task | None) -> int | None:
    return 0 if task is None or known.spec is None else fit(known.spec, task)


def served_names(
    models: Sequence[str], aliases: Mapping[str, Sequence[str]]
) -> list[tuple[str, ...]]:
    """The served names of each model id. Raises ConfigError if two models have a name in common."""
    names = [tuple(dict.fromkeys(aliases.get(model) or (model,))) for model in models]
    taken: dict[str, str] = {}
    for model, owned in zip(models, names, strict=True):
        for name in owned:
            if name in taken:
                raise ConfigError(
                    f"{taken[name]} and {model} would both be served as {name}; "
                    "give each a name of its own with --served-model-name NAME=MODEL"
                )
            taken[name] = model
    return names


class Catalog:
    """Ids of models by the names they are served under: each of `ids`, a hub id, a directory or a
    URL in an object store, under the NAME of `NAME=ID`, or without one under its own; and each
    folder of a repository under the folder's name."""

    def __init__(self, ids: Sequence[str], repository: Path | None):
        """Raises ConfigError if the repository is no directory, a name is meant twice, or what one
        names is not given."""
        if repository is not None and not repository.is_dir():
            raise ConfigError(
                f"--model-repository {repository} is no directory; a model in an object store is "
                "named with --loadable"
            )
        self._ids: dict[str, str] = {}
        for given in ids:
            name, equals, model = given.partition("=")
            if not equals or "/" in name:  # of no name: paths and URLs may hold "="
                name = model = given
            elif not name.strip() or not model:
                raise ConfigError(f"--loadable {given}: wanted MODEL or NAME=MODEL")
            if self._ids.setdefault(name, model) != model:
                raise ConfigError(f"--loadable names two models {name}; give each its own name")
        self._repository = repository
        if twice := self._ids.keys() & self._folders().keys():
            raise ConfigError(
                f"--loadable {min(twice)} is also the name of a folder in {repository}; rename it"
            )

    def __call__(self) -> Mapping[str, str]:
        """The models that there are now: folders may come and go."""
        return self._ids | self._folders()

    def _folders(self) -> dict[str, str]:
        if self._repository is None:
            return {}
        try:
            entries = sorted(self._repository.iterdir())
        except OSError as error:
            logger.warning("--model-repository %s: %s", self._repository, error.strerror)
            return {}
        return {
            entry.name: str(entry.absolute())
            for entry in entries
            # names that no request could have are left out
            if not entry.name.startswith(".") and ":" not in entry.name
            if entry.name.isprintable() and os.path.isdir(entry)
        }
