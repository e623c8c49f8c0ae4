"""What holds on every route: keys, CORS, request ids, limits, errors as JSON, health, documents."""

import json
import re
import sys
from base64 import b64encode
from hashlib import sha256

import pytest
from fake_embedder import FakeEmbedder
from prometheus_client.parser import text_string_to_metric_families
from test_server_openai import ask, fetch

from jaxembed import __version__
from jaxembed.config import ServerConfig
from jaxembed.server.app import create_app
from jaxembed.server.errors import COHERE, UNPREFIXED
from jaxembed.server.registry.models import Models

KEYS = ServerConfig(api_keys=("first-key", "second-kéy"))
OPEN = ("/", "/health", "/livez", "/ready", "/ping", "/metrics", "/docs", "/playground")
OPEN += ("/docs/swagger-ui.css", "/openapi.json", "/api-doc/openapi.json")
CLOSED = [("GET", path) for path in ("/info", "/models", "/v1/models", "/nowhere")]
CLOSED += [("POST", path) for path in ("/", "/embed", "/v1/embeddings", "/v1/embed", "/v2/embed")]
CLOSED.append(("POST", "/metrics"))


def fetch_json(path, method="GET", **options):
    response, body = fetch(path, method, **options)
    return response, json.loads(body)


def is_error(path, body):
    if path.startswith("/v2/") or path in COHERE:
        return set(body) == {"message"}
    if path.startswith("/v1/") or path in UNPREFIXED:
        told = body["error"]["message"] == body["detail"]
        return told and set(body["error"]) == {"message", "type", "param", "code"}
    return set(body) == {"error", "error_type"}


def test_open_routes_need_no_key():
    for path in OPEN:
        fetch(path, config=KEYS, status=200)


@pytest.mark.parametrize("given", [None, "Bearer wrong", "first-key", "Basic first-key", "Bearer "])
def test_other_routes_need_a_key(given):
    headers = {} if given is None else {"authorization": given}
    for method, path in CLOSED:
        response, body = fetch_json(path, method, config=KEYS, headers=headers, status=401)
        assert response.headers["www-authenticate"] == "Bearer"
        assert is_error(path, body), path


def test_each_key_opens():
    for key in KEYS.api_keys:
        for scheme in ("Bearer ", "bearer ", "BEARER  "):
            fetch("/info", config=KEYS, headers={"authorization": scheme + key}, status=200)


PREFLIGHT = {
    "origin": "https://a.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


def test_preflight_is_answered_before_the_key_is_asked_for():
    response, _ = fetch("/embed", "OPTIONS", config=KEYS, headers=PREFLIGHT, status=204)
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize(
    ("allowed", "origin", "answer"),
    [
        ((), "https://a.example", None),
        (("*",), "https://a.example", "*"),
        (("https://b.example", "*"), "https://a.example", "*"),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("https://a.example",), None, None),
    ],
)
def test_listed_origins_are_allowed_also_on_errors(allowed, origin, answer):
    config = ServerConfig(cors_allow_origins=allowed)
    headers = {} if origin is None else {"origin": origin}
    for path in ("/health", "/nowhere"):
        response, _ = fetch(path, config=config, headers=headers)
        assert response.headers.get("access-control-allow-origin") == answer


def test_a_sane_request_id_is_kept_and_another_replaced():
    for given in ("trace-1.a", "x" * 200, ""):
        found = fetch("/health", headers={"x-request-id": given})[0].headers["x-request-id"]
        assert found
        assert (found == given) == (given == "trace-1.a")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_json_is_a_415_that_says_what_to_send(kind):
    headers = {} if kind is None else {"content-type": kind}
    for path in ("/v1/embeddings", "/embeddings", "/embed", "/tokenize", "/vertex"):
        _, body = fetch_json(path, "POST", data=b"{}", headers=headers, status=415)
        assert is_error(path, body), path
        assert "-H 'Content-Type: application/json'" in str(body)


def test_json_goes_by_several_names():
    for kind in ("json", "JSON; charset=utf-8", "vnd.x+json"):
        headers = {"content-type": f"Application/{kind}"}
        ask(None, path="/embed", raw=b'{"inputs":"a"}', headers=headers, status=200)


@pytest.mark.parametrize("path", ["/v1/nowhere", "/nowhere", "/docs/index.html", "/docs/../app.py"])
def test_an_unknown_route_is_a_404_in_json(path):
    assert is_error(path, fetch_json(path, status=404)[1])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/embed", "/info"])
def test_a_wrong_method_is_a_405_that_names_the_right_one(path):
    response, body = fetch_json(path, "DELETE", status=405)
    assert is_error(path, body)
    assert ("GET" if path == "/info" else "POST") in response.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_a_body_over_the_limit_is_a_413_that_names_the_flag(path):
    config = ServerConfig(payload_limit=100)
    raw = b'{"input":"' + b"a" * 200 + b'"}'
    _, body = ask(None, path=path, raw=raw, config=config, status=413)
    assert is_error(path, body)
    assert "100 bytes" in str(body)
    assert "--payload-limit" in str(body)


def test_health_follows_the_embedder():
    embedder = FakeEmbedder()
    for path in ("/", "/ping"):
        assert fetch(path, embedder=embedder, status=200)[1] == b""
    fetch("/health", embedder=embedder, status=200)
    embedder.healthy = False
    for path in ("/", "/ping"):
        fetch(path, embedder=embedder, status=503)
    _, body = fetch_json("/health", embedder=embedder, status=503)
    assert body == {"error": "unhealthy", "error_type": "Unhealthy"}
    fetch("/livez", embedder=embedder, status=200)
    embedder.stuck = True  # then only a new process helps
    _, body = fetch_json("/livez", embedder=embedder, status=503)
    assert "restart the server" in body["error"]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"ready": False}, "warming"), ({"draining": True}, "shutting"), ({"healthy": False}, "unh")],
)
def test_ready_says_why_it_is_not(change, why):
    embedder = FakeEmbedder()
    fetch("/ready", embedder=embedder, status=200)
    vars(embedder).update(change)
    _, body = fetch_json("/ready", embedder=embedder, status=503)
    assert why in body["error"]


def test_models_are_also_listed_as_infinitys_client_reads_them():
    embedder = FakeEmbedder()
    embedder.waiting = 2048
    _, body = fetch_json("/models", embedder=embedder)
    (one,) = body["data"]
    assert one["stats"] == {"queue_absolute": 2048, "queue_fraction": 0.25}
    assert one["capabilities"] == ["embed"]
    assert "owned_by" not in one  # the client fails on an owner that is not `infinity`
    models = Models([embedder], {"test/fake": ("org/mine", "/srv/model")})
    _, body = fetch_json("/v1/models", models=models)
    assert body["object"] == "list"
    assert [item["id"] for item in body["data"]] == ["org/mine", "/srv/model"]
    assert body["data"][0] == one | {"id": "org/mine", "owned_by": "jaxembed"}
    for path in ("org/mine", "/srv/model", "%2Fsrv/model"):
        _, one = fetch_json(f"/v1/models/{path}", models=models)
        assert one in body["data"]
    _, error = fetch_json(f"/v1/models/{'x' * 20_000}", models=models, status=404)
    assert error["error"]["code"] == "model_not_found"
    assert len(error["error"]["message"]) < 5000


def test_metrics_parse():
    response, body = fetch("/metrics")
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    found = {one.name: one for one in text_string_to_metric_families(body.decode())}
    assert len(found) > 20
    (build,) = found["jaxembed_build_info"].samples
    assert build.value == 1
    assert build.labels["version"] == __version__
    assert build.labels["platform"] == "cpu"
    if sys.platform == "linux":
        (cpu,) = found["process_cpu_seconds"].samples
        assert cpu.name == "process_cpu_seconds_total"
        assert found["process_resident_memory_bytes"].samples[0].value > 0


LABEL = "a" * 63


def test_a_host_that_cannot_be_one_is_refused():
    hosts = [f"{LABEL}a", f"x.{LABEL}a.de:80", f"{'a.' * 100}{'a' * 1000}@", "a..b", "..", "x:y"]
    hosts += ["x y", "user@x", "http://x", "[::1", "x/", "\xff\xfe"]
    for path in ("/livez", "/embed", "/v1/models/test/fake", "/nowhere"):
        for host in hosts if path == "/livez" else hosts[:1]:
            _, body = fetch_json(path, headers={"host": host}, status=400)
            assert is_error(path, body)
            assert "`Host`" in str(body)


def test_every_host_has_the_same_routes():
    hosts = ["", "x", "X.y.", f"{LABEL}.{LABEL}", "x:", "x:0", "my_service:8080", "[::1]:80"]
    for host in [*hosts, "127.0.0.1"]:
        fetch("/livez", headers={"host": host}, status=200)


def test_no_route_leads_to_another_by_the_name_of_the_host():
    """It is not looked at, so the address would be wrong."""
    app = create_app(Models([FakeEmbedder()]), ServerConfig())
    assert not [rule for rule in app.url_map.iter_rules() if rule.redirect_to or rule.alias]
    assert {rule.rule for rule in app.url_map.iter_rules() if rule.rule.endswith("/")} == {"/"}


@pytest.mark.parametrize("path", ["/docs", "/playground"])
def test_pages_run_only_what_is_this_servers_and_are_shown_in_no_other(path):
    response, _ = fetch(path)
    assert response.content_type == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    policy = response.headers["content-security-policy"].split("; ")
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert f"{name} 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not [one for one in policy if "unsafe" in one or "*" in one or "http" in one]


def test_the_script_in_the_docs_is_the_one_that_may_run_and_needs_nothing_from_elsewhere():
    response, page = fetch("/docs")
    (script,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    digest = b64encode(sha256(script).digest()).decode()
    policy = response.headers["content-security-policy"].split("; ")
    assert f"script-src 'self' 'sha256-{digest}'" in policy
    assert "style-src 'self'" in policy
    links = re.findall(r'(?:src|href|url: )="?([^">}]+)"', page.decode())
    assert links
    for link in links:
        assert "//" not in link
        fetch("/" + link, status=200)
