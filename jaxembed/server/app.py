"""Builds the ASGI apps of the server: the public app, the metrics app and the admin app."""

import asyncio

from quart import Quart, Request
from quart.typing import ResponseTypes
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter

from jaxembed.config import ServerConfig
from jaxembed.errors import ShuttingDown
from jaxembed.observability.tracing import Tracer
from jaxembed.preprocessing.images.media_fetch import MediaFetcher
from jaxembed.preprocessing.images.media_urls import AllowedAddresses
from jaxembed.server import access, errors
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.auth.keyring import Keyring
from jaxembed.server.http.connection import Exchange, Routes
from jaxembed.server.pipeline.body import MAX_IMAGE_BYTES
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.routes import (
    cloud,
    cohere,
    openai,
    openapi,
    ops,
    playground,
    rerank,
    tei,
    triton,
    voyage,
)
from jaxembed.server.service import Service

BLUEPRINTS = (
    openai.blueprint,
    voyage.blueprint,
    rerank.blueprint,
    cohere.blueprint,
    tei.blueprint,
    cloud.blueprint,
    ops.blueprint,
    ops.metrics_blueprint,
    openapi.blueprint,
    playground.blueprint,
)


class ModelNameConverter(BaseConverter):
    """The converter for the name of a model in a URL path, which may be any text, slashes
    included."""

    regex = ".+"
    part_isolating = False


class Server(Quart):
    """A Quart app that tracks its unanswered requests, so that the server can drain."""

    asgi_http_class = Exchange
    url_map_class = Routes

    def __init__(self, service: Service):
        super().__init__(__name__, static_folder=None)
        self.url_map.merge_slashes = False  # the name of a model may be a path: /v1/models//srv/m
        self.url_map.converters["model"] = ModelNameConverter
        self.config["MAX_CONTENT_LENGTH"] = None  # `body.read_body` limits the body
        self.register_error_handler(HTTPException, errors.refuse_http)
        self.register_error_handler(Exception, errors.refuse)
        self.service = service
        self.capacity = service.models.capacity
        self.unanswered: set[asyncio.Task] = set()
        self.expired = False  # whether `expire` was called

    async def answered(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds until the requests that are unanswered now are answered.
        Returns how many of these requests are still unanswered."""
        if not self.unanswered:
            return 0
        _, remaining = await asyncio.wait(set(self.unanswered), timeout=timeout_s)
        return len(remaining)

    async def expire(self, timeout_s: float) -> None:
        """Cancel the unanswered requests, so that each gets a 503. Wait up to `timeout_s` seconds
        until these responses are sent."""
        self.expired = True
        for task in self.unanswered:
            task.cancel()
        await self.answered(timeout_s)

    async def refuse_late(self, request: Request) -> ResponseTypes:
        """Return the 503 response to a request that `expire` has cancelled."""
        error = ShuttingDown("the server shut down before it could answer; try again")
        async with self.request_context(request) as context:
            access.name_request()
            response = await errors.refuse(error)
            return await self.finalize_request(response, context, from_error_handler=True)


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
    fetcher = (
        MediaFetcher(
            config.media_hosts,
            max_bytes=MAX_IMAGE_BYTES,
            allowed_address=AllowedAddresses(config.media_networks),
        )
        if config.media_hosts
        else None
    )
    app = Server(
        Service(
            models,
            config,
            pool or ModelPool(models),
            keyring=keyring,
            audit=audit,
            tracer=tracer,
            fetcher=fetcher,
        )
    )
    if fetcher is not None:
        app.after_serving(fetcher.aclose)
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    if pool is not None and config.admin_key is not None:
        app.register_blueprint(triton.blueprint)
    _guard(app, is_public=True)
    return app


def create_metrics_app(service: Service) -> Server:
    """Build an app that has only /metrics, for a separate port."""
    app = Server(service)
    app.register_blueprint(ops.metrics_blueprint)
    return app


def create_admin_app(service: Service) -> Server:
    """Build an app that has only the routes that load and unload models, for a separate port."""
    app = Server(service)
    app.register_blueprint(triton.blueprint)
    _guard(app, is_public=False)
    return app


def _guard(app: Server, *, is_public: bool) -> None:
    """Make the app run the steps of `Access` before and after each request, and write the audit log
    if there is one."""
    guard = access.Access(app.service, is_public=is_public)
    app.before_request(guard.begin)
    app.after_request(guard.finish)
    if app.service.audit is not None:
        app.teardown_request(guard.write_audit)
