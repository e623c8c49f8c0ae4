"""Answers with an HTML page, and tells the browser what the page may do. Knows no page."""

import re
from base64 import b64encode
from hashlib import sha256

import msgspec
from quart import Response

HTML = "text/html"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(msgspec.Struct, frozen=True):
    """An HTML page, and its Content-Security-Policy."""

    body: bytes
    policy: str


def make_page(body: bytes, *directives: str, files: bool = False) -> Page:
    """The page with a policy: the browser runs only the scripts and styles that are in the page, or
    with `files` in files of this server too, asks this server alone, and shows the page in no frame
    of another. `directives` are further ones of the policy."""
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
    return Page(body, "; ".join(policy))


def page_response(page: Page) -> Response:
    """The answer that shows the page."""
    headers = {
        "Content-Security-Policy": page.policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(page.body, content_type=f"{HTML}; charset=utf-8", headers=headers)
