"""GET /playground: a page to try the models in a browser; and how HTML pages are answered. It asks
the other routes; knows no model.

The page is one file, which needs nothing else: the browser is told to run only the script and the
style that are in it, and to connect to this server alone.
"""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from quart import Blueprint, Response, request

from jaxembed.config import ServerConfig
from jaxembed.server.access import is_loopback
from jaxembed.server.errors import PlaygroundOff
from jaxembed.server.service import current_service

blueprint = Blueprint("playground", __name__)

FILE = Path(__file__).with_name("playground.html")
HTML = "text/html"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@blueprint.get("/playground")
async def playground() -> Response:
    """The page, for anybody: it holds no data, and its requests carry the key. Raises
    PlaygroundOff."""
    if not is_on(current_service().config):
        raise PlaygroundOff("there is no page here; start the server with --playground to have it")
    # the page makes no markup of texts
    return page_response(_page(), "require-trusted-types-for 'script'", "trusted-types 'none'")


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
def _page() -> bytes:
    """The page, read once."""
    return FILE.read_bytes()


@cache
def _policy(body: bytes, files: bool, *directives: str) -> str:
    """The Content-Security-Policy of a page; the arguments are those of `page_response`."""
    sources = {"script": "", "style": "", "img": " data:"}
    for kind, text in _INLINE.findall(body):
        digest = b64encode(sha256(text).digest()).decode()
        sources[kind.decode()] += f" 'sha256-{digest}'"
    own = " 'self'" * files
    policy = (
        "default-src 'none'",
        *(f"{kind}-src{own}{listed}" for kind, listed in sources.items()),
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        *directives,
    )
    return "; ".join(policy)


def page_response(body: bytes, *directives: str, files: bool = False) -> Response:
    """The answer that shows an HTML page: the browser runs only the scripts and styles that are in
    the page, or with `files` in files of this server too, asks this server alone, and shows the
    page in no frame of another. `directives` are further ones of the page's policy."""
    headers = {
        "Content-Security-Policy": _policy(body, files, *directives),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(body, content_type=f"{HTML}; charset=utf-8", headers=headers)
