"""GET /playground: a page to try the models in a browser. It asks the other routes; knows no model.

The page is one file, which needs nothing else: the browser is told to run only the script and the
style that are in it, and to connect to this server alone.
"""

from functools import cache
from pathlib import Path

from quart import Blueprint, Response, request

from jaxembed.config import ServerConfig
from jaxembed.server.access import is_loopback
from jaxembed.server.errors import PlaygroundOff
from jaxembed.server.http.html import HTML, Page, make_page, page_response
from jaxembed.server.service import current_service

blueprint = Blueprint("playground", __name__)

FILE = Path(__file__).with_name("playground.html")


@blueprint.get("/playground")
async def playground() -> Response:
    """The page, for anybody: it holds no data, and its requests carry the key. Raises
    PlaygroundOff."""
    if not is_on(current_service().config):
        raise PlaygroundOff("there is no page here; start the server with --playground to have it")
    return page_response(_page())


def is_on(config: ServerConfig) -> bool:
    """Whether there is a page: as the flag says, else where only this machine reaches the
    server."""
    return is_loopback(config.host) if config.playground is None else config.playground


def lead_browsers() -> Response | None:
    """The answer that leads a browser to the page, if there is one: what asks for HTML by name is a
    browser. None for all others."""
    if not is_on(current_service().config):
        return None
    if not any(kind == HTML and quality > 0 for kind, quality in request.accept_mimetypes):
        return None
    # relative, so that it holds behind a path prefix
    return Response(b"", 302, headers={"Location": "playground", "Vary": "Accept"})


@cache
def _page() -> Page:
    """The page, read once. It makes no markup of texts."""
    body = FILE.read_bytes()
    return make_page(body, "require-trusted-types-for 'script'", "trusted-types 'none'")
