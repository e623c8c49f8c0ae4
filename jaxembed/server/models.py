"""The models of one server: by name, by task, and all of them together. Knows no request."""

import time
from collections.abc import Iterator, Mapping, Sequence

from jaxembed.engine.admission import Capacity
from jaxembed.errors import ConfigError, InvalidInput, UnknownModel, WrongTask
from jaxembed.loaded_model import LoadedModel
from jaxembed.spec import Task
from jaxembed.tasks import DOES, KIND
from jaxembed.telemetry import exposition

TASK_ROUTES: dict[Task, str] = {
    "embed": "/v1/embeddings, /embed",
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
    """What a server serves, in the order given.

    `aliases` gives the served names of a model id; a model without any is served under its id.
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
        """The model served under `name`. Raises UnknownModel, which says what there is."""
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownModel(
                f"the model `{name}` does not exist; this server has {', '.join(self.names)}",
                field="model",
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        """Every served name."""
        return tuple(self._by_name)

    @property
    def first(self) -> LoadedModel:
        return self._loaded[0]

    def name_of(self, loaded: LoadedModel) -> str:
        """The name that the model's answers carry: the first of its own."""
        return next(name for name, served in self._by_name.items() if served is loaded)

    def by_name(self) -> dict[str, LoadedModel]:
        """Each model by the name that its answers carry."""
        return {self.name_of(loaded): loaded for loaded in self}

    def meant(self, name: str | None) -> list[LoadedModel]:
        """The model of that name or, where none is named, all of them. Raises UnknownModel."""
        return [self[name]] if name and name != UNSPECIFIED else list(self)

    def find(self, name: str | None, task: Task | None) -> LoadedModel:
        """The model of that name or, without one, the only model that does the task.

        A task of None is what every model does. A reranker also classifies, where no classifier
        is. Raises UnknownModel, WrongTask, or InvalidInput when several models could be meant.
        """
        asked = self.meant(name)
        able = [e for e in asked if task is None or task in DOES[e.spec.task]]
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
        """Admit no further request."""
        for loaded in self:
            loaded.drain()

    def close(self, timeout_s: float) -> None:
        """Close every model, all within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for loaded in self:
            loaded.close(timeout_s=max(deadline - time.monotonic(), 0.0))

    def _description(self, loaded: LoadedModel) -> str:
        task = loaded.spec.task
        return f"`{self.name_of(loaded)}` is {KIND[task]} ({TASK_ROUTES[task]})"


def served_names(
    models: Sequence[str], aliases: Mapping[str, Sequence[str]]
) -> list[tuple[str, ...]]:
    """The names of each model id. Raises ConfigError if two models have one in common."""
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
