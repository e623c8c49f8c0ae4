"""GET /playground, a page to try the models in a browser; and the function that makes the response
of every HTML page.

The page is one file, whose script calls the other routes. A Content-Security-Policy tells the
browser to run only the script and the style in the file, and to connect to this server alone.
"""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from quart import Blueprint, request

from jaxembed.config import ServerConfig
from jaxembed.server.access import is_loopback
from jaxembed.server.errors import PlaygroundOff
from jaxembed.server.http.exchange import Response
from jaxembed.server.service import current_service

blueprint: Any = Blueprint("playground", __name__)

PAGE = Path(__file__).with_name("playground.html").read_bytes()
HTML = "text/html"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@blueprint.get("/playground")
async def playground() -> Response:
    """Return the page. Reading it needs no API key, because it holds no data; its script sends the
    key with each request. Raises PlaygroundOff if the server runs without the page."""
    if not is_on(current_service().config):
        raise PlaygroundOff("the playground is off; start the server with --playground")
    # the script never parses texts as HTML; the browser forbids it
    return page_response(PAGE, "require-trusted-types-for 'script'", "trusted-types 'none'")


def is_on(config: ServerConfig) -> bool:
    """Return whether the page is served. If `config.playground` is None, it is served if the server
    listens on a loopback address."""
    return is_loopback(config.host) if config.playground is None else config.playground


def redirect_to_playground() -> Response | None:
    """Return a redirect to the page if the client is a browser and the page is served, else None. A
    client whose `Accept` header names text/html counts as a browser."""
    if not is_on(current_service().config) or not any(
        kind == HTML and quality > 0 for kind, quality in request.accept_mimetypes
    ):
        return None
    # relative, so that it works behind a path prefix
    return Response(b"", 302, headers={"location": "playground", "vary": "Accept"})


@cache
def _policy(body: bytes, files: bool, *directives: str) -> str:
    """Return the Content-Security-Policy of a page, with digests of the scripts and styles in it.
    `page_response` describes the arguments."""
    sources = {"script": "", "style": "", "img": " data:"}
    for kind, text in _INLINE.findall(body):
        digest = b64encode(sha256(text).digest()).decode()
        sources[kind.decode()] += f" 'sha256-{digest}'"
    own_files = " 'self'" * files
    policy = (
        "default-src 'none'",
        *(f"{kind}-src{own_files}{allowed}" for kind, allowed in sources.items()),
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        *directives,
    )
    return "; ".join(policy)


def page_response(body: bytes, *directives: str, files: bool = False) -> Response:
    """Return a response with an HTML page and its Content-Security-Policy.

    The browser runs the scripts and styles in the page, and with `files` also scripts and styles in
    files of this server. It connects to this server alone, and shows the page in no frame.
    `directives` are added to the policy.
    """
    headers = {
        "content-security-policy": _policy(body, files, *directives),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return Response(body, content_type=f"{HTML}; charset=utf-8", headers=headers)
