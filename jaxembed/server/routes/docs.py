"""Swagger UI and the OpenAPI document, served from what is installed: nothing comes from a CDN."""

from functools import cache

import orjson
import swagger_ui_bundle
from quart import Blueprint, Response, current_app
from werkzeug.exceptions import NotFound

from jaxembed.server.http.encoding import json_response
from jaxembed.server.http.html import make_page, page_response
from jaxembed.server.routes.openapi import document

blueprint = Blueprint("docs", __name__)

ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>jaxembed</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui"})</script>
</body>
</html>
"""
SWAGGER_UI = make_page(PAGE, files=True)


@blueprint.get("/docs")
async def page() -> Response:
    """The page; its links are relative so that it works behind a path prefix."""
    return page_response(SWAGGER_UI)


@blueprint.get("/docs/<name>")
async def asset(name: str) -> Response:
    """One of the three files the page needs."""
    if name not in ASSETS:
        raise NotFound
    headers = {"Cache-Control": "max-age=86400"}
    return Response(_read(name), content_type=ASSETS[name], headers=headers)


@blueprint.get("/openapi.json")
@blueprint.get("/api-doc/openapi.json")
async def openapi() -> Response:
    """The document, made once."""
    return json_response(_document())


@cache
def _read(name: str) -> bytes:
    return (swagger_ui_bundle.swagger_ui_path / name).read_bytes()


@cache
def _document() -> bytes:
    return orjson.dumps(document(current_app.url_map.iter_rules()))
