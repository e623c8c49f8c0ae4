"""What every route needs: the models and the settings. Knows no route."""

from dataclasses import dataclass

from quart import Quart, current_app, g

from jaxembed.config import ServerConfig
from jaxembed.embedder import Embedder
from jaxembed.server.models import Models
from jaxembed.spec import Task
from jaxembed.telemetry import Telemetry

_KEY = "jaxembed"


@dataclass(frozen=True)
class Service:
    """The models, served."""

    models: Models
    config: ServerConfig

    def find(self, name: str | None, task: Task | None) -> Embedder:
        """`Models.find`, noted: from here on the request is counted as one to this model."""
        g.embedder = embedder = self.models.find(name, task)
        return embedder

    def name_of(self, embedder: Embedder) -> str:
        """The name that the model's answers carry."""
        return self.models.name_of(embedder)

    @property
    def telemetry(self) -> Telemetry:
        """Of the model that the current request found, of the first model before that."""
        return g.get("embedder", self.models.first).telemetry


def compute_type(embedder: Embedder) -> str:
    """The device and dtype really used, in the form of TEI's header: `cpu+bfloat16`."""
    return f"{embedder.device.lower().replace(' ', '-')}+{embedder.dtype}"


def install(app: Quart, service: Service) -> None:
    """Make `service` what `current_service()` finds in requests to `app`."""
    app.extensions[_KEY] = service


def current_service() -> Service:
    """The service of the app that handles the current request."""
    return current_app.extensions[_KEY]
