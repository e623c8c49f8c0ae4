"""GET /playground: who gets the page, and what a browser is told it may do. `make page` uses it."""

import re
from base64 import b64encode
from hashlib import sha256

import pytest
from fake_embedder import M3, RERANKER, FakeEmbedder
from test_server_app import fetch, fetch_json

from jaxembed.config import ServerConfig
from jaxembed.server.registry.models import Models
from jaxembed.server.routes.playground import PAGE

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
HTML = PAGE.decode()


@pytest.mark.parametrize("kind", ["script", "style"])
def test_only_what_is_in_the_file_may_run(kind):
    """The hashes are of what is between the tags, which a browser hashes."""
    (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", HTML, re.DOTALL)
    digest = b64encode(sha256(text.encode()).digest()).decode()
    response, body = fetch("/playground", status=200)
    assert body == PAGE
    policy = response.headers["content-security-policy"].split("; ")
    assert f"{kind}-src 'sha256-{digest}'" in policy
    assert len(re.findall(f"<{kind}[ >]", HTML)) == 1


def test_the_page_names_no_other_site_and_writes_no_markup():
    assert "//" not in re.sub(r"^\s*//.*$|;\s*//.*$", "", HTML, flags=re.MULTILINE)
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in HTML
    assert not re.search(r"<[^>]*\s(?:style|on\w+)=", HTML)  # the policy forbids them


def test_the_key_is_kept_in_the_tab_and_never_in_an_address():
    assert "localStorage" not in HTML
    assert "document.cookie" not in HTML
    uses = [line.strip() for line in HTML.splitlines() if "getItem(KEY)" in line]
    assert not any("address(" in line or "URL" in line for line in uses)


HERE = ("127.0.0.1", "127.9.9.9", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::", "192.168.1.5", "embeddings.internal")


def test_there_is_a_page_where_only_this_machine_reaches_the_server_or_where_it_is_asked_for():
    with_page = [*((host, None) for host in HERE), ("0.0.0.0", True)]
    without = [*((host, None) for host in EVERYWHERE), ("127.0.0.1", False)]
    for host, flag in with_page + without:
        config = ServerConfig(host=host, playground=flag)
        status, root = (200, 302) if (host, flag) in with_page else (404, 200)
        _, body = fetch("/playground", config=config, status=status)
        assert status == 200 or b"--playground" in body
        fetch("/", headers=BROWSER, config=config, status=root)  # a browser that asks for the root


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_browser_is_led_to_the_page(method):
    response, _ = fetch("/", method, headers=BROWSER, status=302)
    assert response.headers["location"] == "playground"  # relative: behind a path prefix too
    assert response.headers["vary"] == "Accept"


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/*", "text/html;q=0"])
def test_others_are_answered_as_before(accept):
    headers = {} if accept is None else {"accept": accept}
    response, body = fetch("/", headers=headers)
    assert (response.status_code, body) == (200, b"")
    assert "location" not in response.headers


def test_a_probe_that_asks_for_html_sees_an_unhealthy_server():
    embedder = FakeEmbedder()
    embedder.healthy = False
    fetch("/", headers=BROWSER, embedder=embedder, status=503)
    assert fetch("/playground", embedder=embedder)[0].status_code == 200


def test_the_list_of_models_says_what_each_gives():
    """By which the page chooses its panels."""
    specs = {"several": M3, "reranker": RERANKER}
    models = Models([FakeEmbedder(spec=spec, name=name) for name, spec in specs.items()])
    _, body = fetch_json("/v1/models", models=models)
    outputs = {one["id"]: one["outputs"] for one in body["data"]}
    assert outputs == {"several": ["dense", "sparse", "multi_vector"], "reranker": []}
