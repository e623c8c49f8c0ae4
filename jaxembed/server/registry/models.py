"""Finds a server's models by name and task, drains them and closes them. Also lists the models that
the operator lets the server load while it runs."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ModelSpec, Task
from jaxembed.engine.admission import Capacity
from jaxembed.errors import (
    ConfigError,
    Forbidden,
    InvalidInput,
    ModelUnavailable,
    UnknownModel,
    WrongTask,
)
from jaxembed.observability.metrics import NO_MODEL, Telemetry, exposition
from jaxembed.runtime.tasks import KIND, fit

if TYPE_CHECKING:  # front-end processes import no JAX
    from jaxembed.runtime.model import LoadedModel

logger = logging.getLogger(__name__)

TASK_ROUTES: dict[Task, str] = {
    "embed": "/v1/embeddings, /embed, /v2/embed",
    "classify": "/predict, /classify",
    "rerank": "/rerank, /v1/rerank, /v2/rerank",
    "token_classify": "/token_classify",
}
UNSPECIFIED = "default/not-specified"  # the name that Infinity's client sends by default
LONGEST_ALIAS = 200  # maximum characters
NONE_PERMITTED = "this server has none of the models that the API key may use"
REFUSAL: dict[Task, str] = {  # TEI's messages, but for the last
    "embed": "Model is not an embedding model",
    "classify": "Model is not a classifier model",
    "rerank": "model is not a re-ranker model",
    "token_classify": "Model is not a token classifier",
}


@dataclass(eq=False)
class LoadedInstance:
    """A model in memory, and the number of leases on it. Each request that uses the model has a
    lease, and each front-end process that knows it holds it. Only the thread of the event loop may
    call the methods."""

    loaded: "LoadedModel"
    leases: int = 0  # the model is not closed before all leases are returned
    holds: int = 0  # nor before all front ends have let it go
    used_at: float = field(default_factory=time.monotonic)  # when loaded, or last lease returned
    _idle: asyncio.Event | None = None

    def give_back(self) -> None:
        """Return a lease."""
        self.leases -= 1
        self.used_at = time.monotonic()
        self._tell_if_idle()

    def let_go(self) -> None:
        """Stop holding the model for a front end."""
        self.holds -= 1
        self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if not self.leases and not self.holds and self._idle is not None:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until all leases are returned and no front end holds the model. The caller makes
        sure that no further lease is taken."""
        if self.leases or self.holds:
            self._idle = asyncio.Event()
            await self._idle.wait()


@dataclass(eq=False)
class KnownModel:
    """A model that the server knows, in memory or not."""

    id: str  # the directory or hub id from which it is loaded
    instance: LoadedInstance | None = None  # None: not in memory
    spec: ModelSpec | None = None  # None before the first load
    takes_images: bool = False  # False before the first load
    pinned: bool = False  # never evicted to make room
    is_loading: bool = False
    described: Task | None = None  # the task, if it was read without loading the model

    @property
    def loaded(self) -> "LoadedModel":
        """The model, which must be in memory."""
        assert self.instance is not None
        return self.instance.loaded

    @property
    def task(self) -> Task | None:
        """The task of the model; None if it is unknown."""
        return self.described if self.spec is None else self.spec.task


class Models:
    """The models of a server: `models`, which were loaded at its start, and loadable models.

    `aliases` maps the id of a startup model to its served names; without aliases it is served under
    its id. `loadable` is called again whenever the server looks for new models. It returns the ids
    of models that may be loaded later, by served name. Raises ConfigError if two startup models
    have the same served name.
    """

    def __init__(
        self,
        models: "Sequence[LoadedModel]" = (),
        aliases: Mapping[str, Sequence[str]] | None = None,
        *,
        capacity: Capacity | None = None,
        loadable: Callable[[], Mapping[str, str]] | None = None,
    ):
        names_by_model = served_names([loaded.name for loaded in models], aliases or {})
        self.startup_models = [
            KnownModel(
                loaded.name, LoadedInstance(loaded), loaded.spec, loaded.takes_images, pinned=True
            )
            for loaded in models
        ]
        self._by_name = {
            name: known
            for known, model_names in zip(self.startup_models, names_by_model, strict=True)
            for name in model_names
        }
        self._loadable = loadable
        self.can_load = loadable is not None  # whether models are loaded and evicted
        self._own: dict[str, str] = {}  # ids of loadable models by the names that `loadable` gives
        self.capacity = capacity or models[0].admission.capacity
        self.telemetry = Telemetry()  # counts requests without a known model
        self.draining = False  # whether all further requests are refused
        self.discover()

    @property
    def known(self) -> list[KnownModel]:
        """Every model that the server knows, once."""
        return list(dict.fromkeys([*self.startup_models, *self._by_name.values()]))

    @property
    def names(self) -> dict[str, KnownModel]:
        """The models by their served names."""
        return dict(self._by_name)

    def __iter__(self) -> "Iterator[LoadedModel]":
        """Iterate over the models in memory."""
        return iter([known.loaded for known in self.known if known.instance is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> KnownModel:
        """Return the model served under `name`, or the model of the adapter with that name. Raises
        UnknownModel, whose message lists all names."""
        return self.named(name, None)

    def named(self, name: str, permitted: Collection[str] | None) -> KnownModel:
        """Return the model served under `name`, or the model of the adapter with that name. Raises
        UnknownModel, whose message lists only the names in `permitted`, or all names for None."""
        known = self._by_name.get(self._split(name)[0])
        if known is None and self.can_load:
            self.discover()
            known = self._by_name.get(self._split(name)[0])
        if known is None:
            shown = name if len(name) <= 200 else f"{name[:200]}..."
            raise UnknownModel(
                f"the model `{shown}` does not exist; this server has "
                + (", ".join(self.names_among(permitted)) or "no model that the key may use"),
                field="model",
            )
        return known

    def discover(self) -> None:
        """Call `loadable` again, and add and remove models accordingly. A name that is in use keeps
        its model. A model that `loadable` no longer returns stays while it is in memory or
        loading."""
        loadable = self._loadable() if self._loadable is not None else {}
        for name in self._own.keys() - loadable.keys():
            known = self._by_name[name]
            if known.instance is None and not known.is_loading:  # else keep it for now
                del self._by_name[name], self._own[name]
        by_id = {known.id: known for known in self.known}
        for name, model in loadable.items():
            known = by_id.setdefault(model, KnownModel(model))
            self._by_name.setdefault(name, known)
        self._own |= {
            name: model for name, model in loadable.items() if self._by_name[name].id == model
        }

    def name_alias(self, alias: str, name: str) -> None:
        """Serve the model `name` under `alias` as well. If another model had the alias, it loses
        it.

        Raises UnknownModel, and InvalidInput for an alias that is the name of a loadable model, is
        empty, reserved or too long, has a colon (a colon precedes the name of an adapter), is not
        UTF-8, or could not be part of a URL.
        """
        known = self[name]
        is_text = alias.strip() and alias.isprintable() and "\N{REPLACEMENT CHARACTER}" not in alias
        is_segment = ":" not in alias and not {".", ".."} & {*alias.split("/")}
        is_free = alias not in self._own and alias != UNSPECIFIED
        if not (is_text and is_segment and is_free and len(alias) <= LONGEST_ALIAS):
            raise InvalidInput(
                f"{alias[:LONGEST_ALIAS]!r} cannot be an alias: an alias has at most "
                f"{LONGEST_ALIAS} printable characters in UTF-8, at least one of them not blank, "
                "has no colon and no part `.` or `..`, and is neither reserved nor the name of a "
                "loadable model",
                field="alias",
            )
        # Add the alias as the last name, because responses show the first name of a model.
        self._by_name.pop(alias, None)
        self._by_name[alias] = known

    def drop_alias(self, alias: str) -> KnownModel:
        """Stop serving a model under `alias`, and return the model. Raises UnknownModel, and
        InvalidInput if `alias` is an adapter, the name of a loadable model, or the only name of its
        model."""
        known = self[alias]
        if alias not in self._by_name or alias in self._own or len(self.names_of(known)) == 1:
            raise InvalidInput(
                f"{alias!r} cannot be dropped: it is not an alias, or it is the model's only name",
                field="alias",
            )
        del self._by_name[alias]
        logger.info("%s is no longer served as %s", known.id, alias)
        return known

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter if `name` is `<served name>:<adapter>`; None if `name` is the name of
        a model."""
        return self._split(name)[1] if name and name not in self._by_name else None

    def _split(self, name: str) -> tuple[str, str | None]:
        """Divide a name into the served name and the adapter. The adapter is None if the name has
        no adapter or is unknown."""
        model, colon, adapter = name.rpartition(":")
        known = None if name in self._by_name or not colon else self._by_name.get(model)
        if known is None:
            return name, None
        if known.spec is None:  # the adapters of a model are unknown until it is loaded
            return model, None
        return (model, adapter) if adapter in known.spec.adapter_names else (name, None)

    def names_among(self, permitted: Collection[str] | None = None) -> tuple[str, ...]:
        """Return the served names of models and of their adapters that are in `permitted`; all
        served names for None."""
        names = dict.fromkeys(self._by_name)
        for name, known in self._by_name.items():
            adapters = known.spec.adapter_names if known.spec else ()
            names.update(dict.fromkeys(f"{name}:{adapter}" for adapter in adapters))
        return tuple([name for name in names if permitted is None or name in permitted])

    def names_of(self, known: KnownModel, permitted: Collection[str] | None = None) -> list[str]:
        """Return the served names of a model that are in `permitted`; all its names for None. The
        list is also empty if all names of the model were moved to other models."""
        return [
            name
            for name, served in self._by_name.items()
            if served is known and (permitted is None or name in permitted)
        ]

    def first(self, permitted: Collection[str] | None = None) -> "LoadedModel":
        """Return the first model in memory that has a name in `permitted`; None permits all names.
        Raises Forbidden if no model has a permitted name, and ModelUnavailable if no model with a
        permitted name is in memory."""
        if loaded := self.loaded_among(permitted):
            return loaded[0]
        if permitted is not None and not self.names_among(permitted):
            raise Forbidden(NONE_PERMITTED)
        raise ModelUnavailable(
            "no model is in memory; the server loads a model when a request needs it. Models: "
            f"{', '.join(self.names_among(permitted))}"
        )

    def loaded_among(self, permitted: Collection[str] | None) -> "list[LoadedModel]":
        """Return the models in memory that have a name in `permitted`; all models in memory for
        None."""
        if permitted is None:
            return list(self)
        named = [known for known in self.known if self.names_of(known, permitted)]
        return [known.loaded for known in named if known.instance is not None]

    def name_of(self, loaded: "LoadedModel", permitted: Collection[str] | None = None) -> str:
        """Return the name that responses show for a model: its first served name in `permitted`. If
        none is permitted, return its first served name; if it has none left, its id."""
        names = [
            name
            for name, known in self._by_name.items()
            if known.instance is not None and known.instance.loaded is loaded
        ]
        shown = [name for name in names if permitted is None or name in permitted]
        return next(iter(shown or names), loaded.name)

    def by_name(self) -> "dict[str, LoadedModel]":
        """Return the models in memory by the names that responses show for them."""
        return {self.name_of(loaded): loaded for loaded in self}

    def candidates(
        self, name: str | None, permitted: Collection[str] | None = None
    ) -> list[KnownModel]:
        """Return the models that a request may mean, from which `find` chooses one.

        `permitted` has the names that the API key may use; None means all. With a `name`, the
        candidate is the model served under that name; the caller has checked that the name is
        permitted. Without a `name`, the candidates are the startup models with a permitted name. On
        a server without startup models, the candidate is the only model with a permitted name.
        Raises UnknownModel, InvalidInput if the request must name a model, Forbidden if no model is
        permitted, and ModelUnavailable if the server has no model.
        """
        if name and is_name(name):
            return [self.named(name, permitted)]
        named = [k for k in self.startup_models or self.known if self.names_of(k, permitted)]
        if (self.startup_models and named) or len(named) == 1:
            return named
        names = self.names_among(permitted)
        if not names and permitted is None:
            raise ModelUnavailable("the server has no model yet; add one to --model-repository")
        if not names:
            raise Forbidden(NONE_PERMITTED)
        raise InvalidInput(f"`model` must name one of {', '.join(names)}", field="model")

    def rerankers(self, permitted: Collection[str] | None = None) -> list[KnownModel]:
        """Return the rerankers that have a name in `permitted`. Startup models that can rerank,
        other than embedding models, come alone if there are any. If not, all models whose task is
        reranking are returned, in memory or not."""
        named = [k for k in self.known if self.names_of(k, permitted)]
        listed = [k for k in named if k in self.startup_models and _fit(k, "rerank") in (0, 1)]
        return listed or [k for k in named if k.task == "rerank"]

    def find(
        self,
        name: str | None,
        task: Task | None,
        permitted: Collection[str] | None = None,
        outputs: Collection[OutputName] = (),
    ) -> KnownModel:
        """Return the model served under `name`, or without a name the best candidate for `task`.

        `fit` ranks the candidates, the lowest rank first: to classify, a classifier precedes a
        reranker; to rerank, any reranker precedes an embedding model. A model that was never loaded
        ranks first, and all candidates rank equal if `task` is None. Among the first, those that
        have the requested `outputs` are preferred. `permitted` has the names that the API key may
        use; None means all. Raises UnknownModel, WrongTask if no candidate can do the task,
        InvalidInput if several are equally good, Forbidden and ModelUnavailable.
        """
        known = None if permitted is not None else self._by_name.get(name or "")
        if (
            known is not None
            and name != UNSPECIFIED
            and (task is None or known.spec is None or fit(known.spec, task) is not None)
        ):
            return known  # a shortcut for nearly all requests
        is_unnamed = task == "rerank" and not is_name(name)
        candidates = (is_unnamed and self.rerankers(permitted)) or self.candidates(name, permitted)
        fits = {known: rank for known in candidates if (rank := _fit(known, task)) is not None}
        if task is not None and not fits:
            described = []
            for one in candidates:
                assert one.spec is not None  # a model without a spec would be in `fits`
                names = self.names_of(one, permitted)
                shown = f"`{names[0]}`" if names else "the model"  # the key may use only adapters
                described.append(f"{shown} is {KIND[one.spec.task]} ({TASK_ROUTES[one.spec.task]})")
            raise WrongTask(f"{REFUSAL[task]}: {', '.join(described)}")
        best = [known for known, rank in fits.items() if rank == min(fits.values())]
        suitable = [
            known
            for known in best
            if known.spec is None or set(outputs) <= {*known.spec.representations}
        ]
        chosen = suitable or best
        if len(chosen) > 1:
            names = [name for known in chosen for name in self.names_of(known, permitted)[:1]]
            suffix = "" if suitable else f"; none of them supports {' and '.join(outputs)}"
            raise InvalidInput(
                f"`model` must name one of {', '.join(names)}{suffix}", field="model"
            )
        return chosen[0]

    def exposition(self) -> bytes:
        """Return the metrics of all models in memory in the Prometheus text format. If the server
        loads and evicts models, each series has the label `model`, even with one model in
        memory."""
        telemetries = {name: model.telemetry for name, model in self.by_name().items()}
        if self.can_load:
            telemetries[NO_MODEL] = self.telemetry
        return exposition(telemetries, label_one=self.can_load)

    @property
    def healthy(self) -> bool:
        return all(loaded.healthy for loaded in self)

    @property
    def stuck(self) -> bool:
        """Whether all devices of some model hang, so that only a restart of the process helps."""
        return any(loaded.stuck for loaded in self)

    @property
    def ready(self) -> bool:
        return all(loaded.ready for loaded in self)

    def drain(self) -> None:
        """Refuse all further requests. The models finish the requests already admitted."""
        self.draining = True
        for loaded in self:
            loaded.drain()

    def close(self, timeout_s: float) -> None:
        """Close all models, within `timeout_s` seconds in total."""
        deadline = time.monotonic() + timeout_s
        for loaded in self:
            loaded.close(timeout_s=max(deadline - time.monotonic(), 0.0))


def is_name(name: str | None) -> bool:
    """Return whether the field `model` of a request names a model; False if it is empty or
    UNSPECIFIED."""
    return bool(name) and name != UNSPECIFIED


def _fit(known: KnownModel, task: Task | None) -> int | None:
    """Return the rank that `fit` gives a model for a task, None if it cannot do the task. Without a
    task or a spec, return 0, the best rank."""
    return 0 if task is None or known.spec is None else fit(known.spec, task)


def served_names(
    models: Sequence[str], aliases: Mapping[str, Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return the served names of each id in `models`: its aliases, or the id itself if it has none.
    Raises ConfigError if two models would have the same name."""
    names_by_model = [tuple(dict.fromkeys(aliases.get(model) or (model,))) for model in models]
    taken: dict[str, str] = {}
    for model, model_names in zip(models, names_by_model, strict=True):
        for name in model_names:
            if name in taken:
                raise ConfigError(
                    f"{taken[name]} and {model} cannot both be served as {name}; "
                    "give one of them another name with --served-model-name NAME=MODEL"
                )
            taken[name] = model
    return names_by_model


class Catalog:
    """Returns the ids of the models that a server may load, by served name.

    Each entry of `ids` is a hub id, a directory or a URL in an object store, under which the model
    is served; an entry `NAME=ID` serves the model ID under NAME. Each folder in `repository` is a
    model served under the name of the folder.
    """

    def __init__(self, ids: Sequence[str], repository: Path | None):
        """Raises ConfigError if the repository is not a directory, two models have the same name,
        or NAME or ID is missing in `NAME=ID`."""
        if repository is not None and not repository.is_dir():
            raise ConfigError(
                f"--model-repository {repository} is not a directory; for a model in an object "
                "store use --loadable"
            )
        self._ids: dict[str, str] = {}
        for entry in ids:
            name, separator, model = entry.partition("=")
            if not separator or "/" in name:  # no NAME: paths and URLs may contain "="
                name = model = entry
            elif not name.strip() or not model:
                raise ConfigError(f"--loadable {entry}: wanted MODEL or NAME=MODEL")
            if self._ids.setdefault(name, model) != model:
                raise ConfigError(
                    f"--loadable gives the name {name} to two models; give one of them another"
                )
        self._repository = repository
        if clashes := self._ids.keys() & self._folders().keys():
            raise ConfigError(
                f"--loadable {min(clashes)} has the name of a folder in {repository}; rename one"
            )

    def __call__(self) -> Mapping[str, str]:
        """Return the ids by served name. The folders of the repository are listed again."""
        return self._ids | self._folders()

    def _folders(self) -> dict[str, str]:
        """Return the paths of the folders in the repository by name; an empty dict if the
        repository cannot be read."""
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
            # leave out names that no request can have
            if not entry.name.startswith(".") and ":" not in entry.name
            if entry.name.isprintable() and os.path.isdir(entry)
        }
