"""Finds the models of one server by name and by task, and drains and closes all of them."""

import time
from collections.abc import Iterator, Mapping, Sequence

from jaxembed.engine.admission import Capacity
from jaxembed.errors import ConfigError, InvalidInput, UnknownModel, WrongTask
from jaxembed.loaded_model import LoadedModel
from jaxembed.spec import Task
from jaxembed.tasks import KIND, tasks_of
from jaxembed.telemetry import exposition

TASK_ROUTES: dict[Task, str] = {
    "embed": "/v1/embeddings, /embed, /v2/embed",
    "classify": "/predict, /classify",
    "rerank": "/rerank, /v1/rerank, /v2/rerank",
}
UNSPECIFIED = "default/not-specified"  # the name that Infinity's client sends for none
REFUSAL: dict[Task, str] = {  # TEI's words
    "embed": "Model is not an embedding model",
    "classify": "Model is not a classifier model",
    "rerank": "model is not a re-ranker model",
}


class Models:
    """The models of a server, in the order given.

    `aliases` maps a model id to its served names. A model without any is served under its id.
    Raises ConfigError if two models have a name in common.
    """

    def __init__(
        self, models: Sequence[LoadedModel], aliases: Mapping[str, Sequence[str]] | None = None
    ):
        self._loaded = tuple(models)
        names = served_names([loaded.name for loaded in models], aliases or {})
        self._by_name = {
            name: loaded for loaded, owned in zip(models, names, strict=True) for name in owned
        }

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(self._loaded)

    @property
    def capacity(self) -> Capacity:
        """The limits that the models share."""
        return self.first.admission.capacity

    def __len__(self) -> int:
        return len(self._loaded)

    def __getitem__(self, name: str) -> LoadedModel:
        """The model served under `name`, which may name one of its adapters too. Raises
        UnknownModel, which lists the names."""
        try:
            return self._by_name[self._split(name)[0]]
        except KeyError:
            shown = name if len(name) <= 200 else f"{name[:200]}..."
            raise UnknownModel(
                f"the model `{shown}` does not exist; this server has {', '.join(self.names)}",
                field="model",
            ) from None

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter in `<served name>:<adapter>`; None for the model itself."""
        return self._split(name)[1] if name else None

    def _split(self, name: str) -> tuple[str, str | None]:
        """The served name and the adapter; those of an unknown name are unknown too."""
        model, colon, adapter = name.rpartition(":")
        loaded = None if name in self._by_name or not colon else self._by_name.get(model)
        if loaded is not None and adapter in loaded.spec.adapter_names:
            return model, adapter
        return name, None

    @property
    def names(self) -> tuple[str, ...]:
        """Every served name: of each model, and of each of its adapters."""
        names: dict[str, None] = dict.fromkeys(self._by_name)
        for name, loaded in self._by_name.items():
            names.update(dict.fromkeys(f"{name}:{one}" for one in loaded.spec.adapter_names))
        return tuple(names)

    @property
    def first(self) -> LoadedModel:
        return self._loaded[0]

    def name_of(self, loaded: LoadedModel) -> str:
        """The name of the model in its answers: the first of its served names."""
        return next(name for name, served in self._by_name.items() if served is loaded)

    def by_name(self) -> dict[str, LoadedModel]:
        """The models by their names in answers."""
        return {self.name_of(loaded): loaded for loaded in self}

    def meant(self, name: str | None) -> list[LoadedModel]:
        """The model served under `name`, or all models if no name is given. Raises UnknownModel."""
        return [self[name]] if name and name != UNSPECIFIED else list(self)

    def find(self, name: str | None, task: Task | None) -> LoadedModel:
        """The model served under `name` or, without a name, the only model that can do the task.

        A task of None stands for a task that every model can do. A reranker can also classify, but
        a classifier is preferred. Raises UnknownModel if no model has the name, WrongTask if the
        named model, or every model, cannot do the task, and InvalidInput if several models remain.
        """
        asked = self.meant(name)
        able = [e for e in asked if task is None or task in tasks_of(e.spec)]
        if task is not None and not able:
            raise WrongTask(f"{REFUSAL[task]}: {', '.join(map(self._description, asked))}")
        chosen = [e for e in able if e.spec.task == task] or able
        if len(chosen) > 1:
            names = ", ".join(map(self.name_of, chosen))
            raise InvalidInput(f"`model` must say which: {names}", field="model")
        return chosen[0]

    def exposition(self) -> bytes:
        """The metrics of all models in the Prometheus text format."""
        return exposition({name: model.telemetry for name, model in self.by_name().items()})

    @property
    def healthy(self) -> bool:
        return all(loaded.healthy for loaded in self)

    @property
    def ready(self) -> bool:
        return all(loaded.ready for loaded in self)

    @property
    def draining(self) -> bool:
        return any(loaded.draining for loaded in self)

    def drain(self) -> None:
        """Refuse all further requests."""
        for loaded in self:
            loaded.drain()

    def close(self, timeout_s: float) -> None:
        """Close all models, within `timeout_s` seconds in total."""
        deadline = time.monotonic() + timeout_s
        for loaded in self:
            loaded.close(timeout_s=max(deadline - time.monotonic(), 0.0))

    def _description(self, loaded: LoadedModel) -> str:
        task = loaded.spec.task
        return f"`{self.name_of(loaded)}` is {KIND[task]} ({TASK_ROUTES[task]})"


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
