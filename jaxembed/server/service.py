"""What every route needs: the Embedder, the settings and the served names. Knows no route."""

from dataclasses import dataclass

from quart import Quart, current_app

from jaxembed.config import ServerConfig
from jaxembed.embedder import Embedder
from jaxembed.telemetry import Telemetry

_KEY = "jaxembed"


@dataclass(frozen=True)
class Service:
    """One model, served."""

    embedder: Embedder
    config: ServerConfig

    @property
    def names(self) -> tuple[str, ...]:
        """The names clients may ask for; the first is the one answers carry."""
        return self.config.served_model_names or (self.embedder.name,)

    @property
    def telemetry(self) -> Telemetry:
        return self.embedder.telemetry

    @property
    def compute_type(self) -> str:
        """The device and dtype really used, in the form of TEI's header: `cpu+bfloat16`."""
        device = self.embedder.device.lower().replace(" ", "-")
        return f"{device}+{self.embedder.dtype}"


def install(app: Quart, service: Service) -> None:
    """Make `service` what `current_service()` finds in requests to `app`."""
    app.extensions[_KEY] = service


def current_service() -> Service:
    """The service of the app that handles the current request."""
    return current_app.extensions[_KEY]
