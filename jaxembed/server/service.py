"""Defines Service, the objects that all routes share, such as the models and the settings."""

from dataclasses import dataclass, field

from jaxembed.config import ServerConfig
from jaxembed.observability.tracing import Tracer
from jaxembed.preprocessing.images.media_fetch import MediaFetcher
from jaxembed.runtime.diagnostics.examine import History
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.auth.keyring import Keyring
from jaxembed.server.http.exchange import current_exchange
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool


@dataclass(frozen=True)
class Service:
    """The models of a server, and the other objects that the handlers of all routes need."""

    models: Models
    config: ServerConfig
    pool: ModelPool
    history: History = field(default_factory=History)
    keyring: Keyring | None = None  # the keys of the key file; None: there is none
    audit: AuditLog | None = None
    tracer: Tracer | None = None  # None: no request is traced
    fetcher: MediaFetcher | None = None  # None: no URL of an image is fetched


def current_service() -> Service:
    """Return the service of the app that handles the current request."""
    return current_exchange().app.service
