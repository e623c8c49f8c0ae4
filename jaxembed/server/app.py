"""Builds the ASGI apps of the server: the public app, the metrics app and the admin app."""

from jaxembed.config import ServerConfig
from jaxembed.observability.tracing import Tracer
from jaxembed.runtime.diagnostics.examine import History
from jaxembed.server import access
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.auth.keyring import Keyring
from jaxembed.server.pipeline.body import image_fetcher
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.routes import openapi, ops, playground, triton
from jaxembed.server.server import DIRECT, Server
from jaxembed.server.service import Service

BY_QUART = (  # blueprints whose handlers Quart calls
    ops.blueprint,
    ops.metrics_blueprint,
    openapi.blueprint,
    playground.blueprint,
)


def create_app(
    models: Models,
    config: ServerConfig,
    pool: ModelPool | None = None,
    *,
    keyring: Keyring | None = None,
    audit: AuditLog | None = None,
    tracer: Tracer | None = None,
) -> Server:
    """Build the public app, which serves `models`.

    With a `pool` the app also serves the models that the pool loads later, and has the admin routes
    if the config has an admin key. With a `keyring` a request needs a key of the keyring or of the
    config. `audit` logs and `tracer` traces the requests.
    """
    fetcher = image_fetcher(config)
    service = Service(
        models,
        config,
        pool or ModelPool(models),
        History(),
        keyring=keyring,
        audit=audit,
        tracer=tracer,
        has_keys=keyring is not None,
        fetcher=fetcher,
    )
    has_admin = pool is not None and config.admin_key is not None
    blueprints = (*DIRECT, *BY_QUART, *([triton.blueprint] if has_admin else []))
    app = Server(service, access.Access(service, is_public=True), *blueprints)
    if fetcher is not None:
        app.after_serving(fetcher.aclose)
    return app


def create_metrics_app(service: Service) -> Server:
    """Build an app that has only /metrics, for a separate port."""
    return Server(service, None, ops.metrics_blueprint)


def create_admin_app(service: Service) -> Server:
    """Build an app that has only the routes that load and unload models, for a separate port."""
    return Server(service, access.Access(service, is_public=False), triton.blueprint)
