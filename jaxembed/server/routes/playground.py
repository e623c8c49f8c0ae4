"""GET /playground: a page to try the models in a browser; and the responses of all HTML pages.

The page is one file, whose script calls the other routes. A Content-Security-Policy tells the
browser to run only the script and the style in the file, and to connect to this server alone.
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

PAGE = Path(__file__).with_name("playground.html").read_bytes()
HTML = "text/html"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@blueprint.get("/playground")
async def playground() -> Response:
    """Return the page. It needs no key, because it holds no data and its requests carry the key.
    Raises PlaygroundOff."""
    if not is_on(current_service().config):
        raise PlaygroundOff("the playground is off; start the server with --playground")
    # the script never parses texts as HTML; the browser forbids it
    return page_response(PAGE, "require-trusted-types-for 'script'", "trusted-types 'none'")


def is_on(config: ServerConfig) -> bool:
    """Return whether the page is served: as `config.playground` says, or if that is None, whether
    the server listens on a loopback address."""
    return is_loopback(config.host) if config.playground is None else config.playground


def redirect_to_playground() -> Response | None:
    """Return a redirect to the page for a browser; None if the page is off or the client is no
    browser. A client whose `Accept` header names text/html counts as a browser."""
    if not is_on(current_service().config) or not any(
        kind == HTML and quality > 0 for kind, quality in request.accept_mimetypes
    ):
        return None
    # relative, so that it works behind a path prefix
    return Response(b"", 302, headers={"Location": "playground", "Vary": "Accept"})


@cache
def _policy(body: bytes, files: bool, *directives: str) -> str:
    """Return the Content-Security-Policy of a page, with digests of its scripts and styles. The
    arguments are those of `page_response`."""
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

    The browser runs the scripts and styles in the page, or with `files` also those in files of this
    server. It connects to this server alone. No page may show this one in a frame. `directives` are
    added to the policy.
    """
    headers = {
        "Content-Security-Policy": _policy(body, files, *directives),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(body, content_type=f"{HTML}; charset=utf-8", headers=headers)
