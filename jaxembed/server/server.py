"""Defines Server, the ASGI app that finds the handler of a request and calls it.

A front-end process has such an app too, so this module does not import JAX.
"""

import asyncio
from typing import Any, cast

from quart import Blueprint, Quart
from quart.routing import QuartMap
from quart.wrappers.base import BaseRequestWebsocket
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter, MapAdapter

from jaxembed.errors import ShuttingDown
from jaxembed.server import access, errors
from jaxembed.server.http.exchange import Exchange, Response, Watches
from jaxembed.server.routes import cloud, cohere, openai, rerank, tei, voyage
from jaxembed.server.service import Service

# Blueprints whose paths have no parameters, and whose handlers need nothing of Quart.
DIRECT = (
    openai.blueprint,
    voyage.blueprint,
    rerank.blueprint,
    cohere.blueprint,
    tei.blueprint,
    cloud.blueprint,
)


class ModelNameConverter(BaseConverter):
    """The converter for the name of a model in a URL path, which may be any text, slashes
    included."""

    regex = ".+"
    part_isolating = False


class Routes(QuartMap):
    """Finds routes by path alone. Quart's QuartMap also encodes the host name, and fails for host
    names that are not valid in DNS."""

    def bind_to_request(
        self, request: BaseRequestWebsocket, subdomain: str | None, server_name: str | None
    ) -> MapAdapter:
        return self.bind(
            "", url_scheme=request.scheme, default_method=request.method, path_info=request.path
        )


class Server(Quart):
    """A Quart app that tracks its unanswered requests, so that the server can drain.

    It calls the handlers of the blueprints in DIRECT itself, because Quart's steps around a handler
    take much of the processor time of a short request. These handlers take no arguments, and get
    the request from `current_exchange`. Quart handles all other requests.
    """

    url_map_class = Routes

    def __init__(self, service: Service, guard: access.Access | None, *blueprints: Blueprint):
        """Make an app with the routes of the blueprints. `guard` has the steps before and after
        each request; None means no steps."""
        super().__init__(__name__, static_folder=None)
        self.url_map.merge_slashes = False  # the name of a model may be a path: /v1/models//srv/m
        self.url_map.converters["model"] = ModelNameConverter
        self.service = service
        self.capacity = service.models.capacity
        self.unanswered: set[asyncio.Task] = set()
        self.watches = Watches()
        self.expired = False  # whether `expire` was called
        self._guard = guard
        for blueprint in blueprints:
            self.register_blueprint(blueprint)
        direct = {blueprint.name for blueprint in DIRECT}
        self._direct = {  # handlers by method and path
            (method, rule.rule): self.view_functions[rule.endpoint]
            for rule in self.url_map.iter_rules()
            for method in (rule.methods or set()) - {"OPTIONS"}
            if rule.endpoint.partition(".")[0] in direct
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request as an Exchange, or let Quart handle another scope of ASGI."""
        if scope["type"] == "http":
            await Exchange(self, scope)(receive, send)
        else:
            await super().__call__(scope, receive, send)

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

    async def respond(self, exchange: Exchange) -> Response:
        """Return the response to a request, which may be an error. Runs the steps of the guard, and
        writes the audit log if there is one."""
        guard = self._guard
        try:
            try:
                response = None if guard is None else await guard.begin(exchange)
                if response is None:
                    response = await self._handle(exchange)
            except HTTPException as error:
                response = errors.refuse_http(error)
            except Exception as error:
                response = errors.refuse(error)
            if guard is not None:
                await guard.finish(exchange, response)
            return response
        finally:
            if guard is not None:
                guard.write_audit(exchange, expired=self.expired)

    async def _handle(self, exchange: Exchange) -> Response:
        """Call the handler of a request. Raises the errors of handlers, and HTTPException if no
        route takes the request."""
        handler = self._direct.get((exchange.method, exchange.path))
        if handler is not None:
            return await cast(Any, handler)()
        scope = exchange.scope
        request = self.request_class(
            exchange.method,
            scope["scheme"],
            exchange.path,
            scope["query_string"],
            Headers([(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]),
            "",
            scope["http_version"],
            scope,
            send_push_promise=_no_push,
        )
        async with self.request_context(request) as context:
            answer: Any = await self.preprocess_request(context)
            if answer is None:
                answer = await self.dispatch_request(context)
            if isinstance(answer, Response):
                return answer
            # Quart's response to OPTIONS
            return Response(
                await answer.get_data(as_text=False),
                answer.status_code,
                headers={name.lower(): value for name, value in answer.headers},
            )

    def route_of(self, exchange: Exchange) -> str | None:
        """Return the pattern of the path of a request; None if no route takes the request."""
        routes = self.url_map.bind("")
        try:
            rule, _ = routes.match(exchange.path, exchange.method, return_rule=True)
        except HTTPException:
            return None
        return rule.rule

    async def refuse_late(self, exchange: Exchange) -> Response:
        """Return the 503 response to a request that `expire` has cancelled."""
        response = errors.refuse(
            ShuttingDown("the server shut down before it could answer; try again")
        )
        if self._guard is not None:
            await self._guard.finish(exchange, response)
        return response


async def _no_push(path: str, headers: Headers) -> None:
    """Do nothing."""
