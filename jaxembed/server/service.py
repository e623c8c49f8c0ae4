"""Defines Service, the objects that all routes share, such as the models and the settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxembed.config import ServerConfig
from jaxembed.observability.tracing import Tracer
from jaxembed.preprocessing.images.media_fetch import MediaFetcher
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.http.exchange import current_exchange

if TYPE_CHECKING:  # front-end processes import no JAX
    from jaxembed.runtime.diagnostics.examine import History
    from jaxembed.server.auth.keyring import Keyring
    from jaxembed.server.front.supervisor import FrontEnds
    from jaxembed.server.registry.models import Models
    from jaxembed.server.registry.pool import ModelPool


@dataclass
class Service:
    """The models of a server, and the other objects that the handlers of all routes need."""

    models: "Models"
    config: ServerConfig
    pool: "ModelPool"
    history: "History | None" = None  # None in a front-end process, which forwards /info
    keyring: "Keyring | None" = None  # the keys of the key file; None: there is none
    audit: AuditLog | None = None
    tracer: Tracer | None = None  # None: no request is traced
    has_keys: bool = False  # whether requests need a key of the key file
    fronts: "FrontEnds | None" = None  # None: this process reads HTTP itself
    fetcher: MediaFetcher | None = None  # None: no URL of an image is fetched


def current_service() -> Service:
    """Return the service of the app that handles the current request."""
    return current_exchange().app.service
