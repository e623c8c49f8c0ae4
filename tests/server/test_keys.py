"""API keys of a file: what the file may say, what a server does with them, how they change."""

import asyncio
import hashlib
import json
import os
import signal
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from conftest import save_tiny
from fake_embedder import M3, RERANKER, ROUTES, FakeEmbedder
from fakes import Clock, until
from live_server import WAIT_S, served
from test_server_app import is_error

from jaxembed.config import ServerConfig
from jaxembed.engine.quota import Limits
from jaxembed.errors import CheckpointError, ConfigError, Overloaded
from jaxembed.server.access import format_duration
from jaxembed.server.app import create_app, create_metrics_app
from jaxembed.server.auth import keyring as keyring_module
from jaxembed.server.auth.keyring import Keyring, digest_of, parse_keys, read_key_file
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool

DIGEST = hashlib.sha256(b"secret").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


def table(name: str = "one", key: str = "secret", **fields: object) -> str:
    """The table of a key."""
    lines = [f'name = "{name}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    return "\n".join(["[[key]]", *lines, ""])


def file_of(folder: Path, *tables: str) -> Path:
    path = folder / "keys.toml"
    path.write_text("\n".join(tables))
    return path


def test_a_key_has_what_its_table_says(tmp_path):
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "max_inputs_waiting": 5}
    text = table(models=["a", "a:fr"], routes=["/v1/*", "/embed"], **limits)
    keys = read_key_file(file_of(tmp_path, text, table("two", "other")), {})
    one, two = keys[digest_of(b"secret")], keys[digest_of(b"other")]
    assert one.models == {"a", "a:fr"}
    assert one.limits == Limits(60, 1000, 5)
    assert two.models is two.routes is two.expires is None
    paths = ("/v1/models", "/v1/", "/embed", "/embed_all", "/v2/embed", "/")
    assert tuple(filter(one.may_use_route, paths)) == paths[:3]
    assert two.may_use_route("/anything")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no key; wanted tables [[key]]"),
        ("key = 3", "`key` is not a list of tables"),
        ("[[key]", "is not TOML: "),
        ("\n[[key]]\nname = \n", "(at line 3, column "),
        ("a = " + "9" * 5000, "a number with thousands of digits"),
        ("a = " + "[" * 5000, "nested too deeply"),
        (f"version = 1\n{table()}", "`version` is unknown"),
        ("[[key]]", "[[key]] number 1: `name` is missing; [[key]] number 1: `sha256` is missing"),
        (table(model=["a"]), "number 1 (one): `model` is unknown; wanted one of name, sha256"),
        (table(" a"), "number 1: `name` is ' a'; wanted 1 to 64 letters"),
        ("[[key]]\nname = 'a'\nsha256 = 'jx-secret'", "`sha256` is a string of length 9; wanted"),
        ("[[key]]\nname = 'a'\nsha256 = 3", "`sha256` is not a string; wanted the 64 hexadecimal"),
        (table(models=[]), "`models` is an empty list; wanted"),
        (table(models=[" "]), "`models` contains ' '"),
        (table(routes=["embed"]), "`routes` contains 'embed'; wanted paths such as"),
        (table(requests_per_minute=0), "`requests_per_minute` is 0; wanted an integer of 1"),
        (table(tokens_per_minute=1.5), "`tokens_per_minute` is 1.5; wanted"),
        (table(tokens_per_minute=10**400), "`tokens_per_minute` is 1000"),
        (table(expires="2027-01-31"), "`expires` is '2027-01-31'; wanted a date"),
        (table() + "expires = 12:00:00", "`expires` is datetime.time(12, 0); wanted a date"),
        (table() + table(key="other"), "(one): `name` is the same as that of [[key]] number 1"),
        (table() + table("two"), "(two): `sha256` is the same as that of [[key]] number 1"),
        (table(key="flag"), "number 1 (one): `sha256` is the same as that of --api-key"),
    ],
)
def test_a_wrong_file_is_refused_with_table_field_and_what_was_wanted(text, words):
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, "keys.toml", {digest_of(b"flag"): "--api-key"})
    message = str(refused.value)
    assert message.startswith("keys.toml")
    assert words in message
    assert len(message) < 600
    assert DIGEST not in message
    assert "jx-secret" not in message


def test_all_problems_are_listed_up_to_ten():
    with pytest.raises(ConfigError, match=r"number 10 .k9.: .*; and 2 more; wanted"):
        parse_keys("".join(table(f"k{n}", str(n), x=n) for n in range(12)), "keys.toml", {})


def test_what_is_no_file_of_text_is_refused(tmp_path):
    fifo, latin, huge = (tmp_path / name for name in ("fifo", "latin", "huge"))
    os.mkfifo(fifo)
    latin.write_bytes(b"\xff\xfe")
    with huge.open("wb") as file:
        file.truncate(17 * 2**20)
    for path, words in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "cannot read|not a regular file"),
        (fifo, "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (latin, "not UTF-8 text"),
        (huge, "a key file can have"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_key_file(path, {})


@pytest.mark.parametrize(
    ("expires", "last"),
    [
        ("2027-01-31", datetime(2027, 1, 31, 23, 59, 59, tzinfo=UTC)),
        ("2027-01-31T12:00:00Z", datetime(2027, 1, 31, 11, 59, 59, tzinfo=UTC)),
        ("2027-01-31T12:00:00", datetime(2027, 1, 31, 11, 59, 59, tzinfo=UTC)),
        ("2027-01-31T12:00:00+02:00", datetime(2027, 1, 31, 9, 59, 59, tzinfo=UTC)),
    ],
)
def test_a_key_is_valid_to_the_end_of_a_date_or_to_a_moment(expires, last):
    (key,) = parse_keys(f"{table()}expires = {expires}", "keys.toml", {}).values()
    assert not key.is_expired(last)
    assert key.is_expired(last + timedelta(seconds=1))


def ring(folder: Path, *tables: str, **options) -> Keyring:
    return Keyring(file_of(folder, *tables), **options)


def test_a_broken_file_changes_nothing_and_a_good_one_everything(tmp_path, caplog):
    caplog.set_level("INFO", "jaxembed")
    keys = ring(tmp_path, table(), table("two", "other"))
    text = keys.path.read_text()
    for torn in ("", "[[key]]", text[:-5], text.replace("name", "nom"), "\0"):
        keys.path.write_text(torn)
        assert not keys.read_again()
        assert keys.find(b"secret").name == "one"
        assert keys.find(b"other").name == "two"
    keys.path.unlink()
    assert not keys.read_again()
    assert (keys.done, keys.failed, keys.is_current) == (0, 6, False)
    assert "so the earlier keys stay valid: " in caplog.text
    file_of(tmp_path, table("new", "third"), table("two", "fourth"))
    assert keys.read_again()
    assert keys.find(b"secret") is keys.find(b"other") is None
    assert keys.find(b"third").name == "new"
    assert keys.find(b"fourth").name == "two"
    assert caplog.messages[-1].endswith("was read again (keys: 2; added: new; removed: one)")
    assert not [one for one in ("secret", DIGEST, OTHER) if one in caplog.text]


def test_what_a_key_has_used_stays_used_when_the_file_is_read_again(tmp_path):
    clock = Clock()
    keys = ring(tmp_path, table(requests_per_minute=2), clock=clock)
    quota = keys.quota(keys.find(b"secret"))
    quota.count_request()
    quota.count_request()
    file_of(tmp_path, table(key="rotated", requests_per_minute=2))
    keys.read_again()
    assert keys.quota(keys.find(b"rotated")) is quota
    with pytest.raises(Overloaded):
        quota.count_request()
    file_of(tmp_path, table("other"))
    keys.read_again()
    file_of(tmp_path, table(requests_per_minute=2))
    keys.read_again()
    assert keys.quota(keys.find(b"secret")) is not quota  # it had left the file


def test_the_file_is_read_when_it_has_changed_and_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(keyring_module, "FILE_LOOK_S", 0.05)
    keys = ring(tmp_path, table())
    keys.watch()
    try:
        file_of(tmp_path, table("two", "other"))
        until(lambda: keys.find(b"other"))
        aside = tmp_path / "aside"
        aside.write_text(table("six", "third"))
        os.replace(aside, keys.path)
        until(lambda: keys.find(b"third"))
        keys.path.unlink()
        until(lambda: keys.failed)
        file_of(tmp_path, table())
        until(lambda: keys.find(b"secret"))
        done = keys.done
        keys.wake()  # as SIGHUP does
        until(lambda: keys.done > done)
    finally:
        keys.close()
    assert not [one for one in threading.enumerate() if one.name == "key-file"]


def test_a_wake_after_a_wait_in_vain_is_not_lost(tmp_path):
    class LateEvent(threading.Event):
        """Its first wait ends in vain, and `wake` comes before the thread goes on."""

        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits > 1:
                return super().wait()  # until woken, so that no second look helps
            self.set()
            return False

    keys = ring(tmp_path, table())
    keys._woken = LateEvent()
    keys.watch()
    try:
        until(lambda: keys.done)
    finally:
        keys.close()


def test_a_file_that_is_still_written_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(keyring_module, "FILE_LOOK_S", 0.005)
    keys = ring(tmp_path, table())
    file_of(tmp_path, table("two", "other"))
    done: list[int] = []  # before each look

    def growing(_) -> tuple[int, int, int, int]:
        done.append(keys.done)
        return 0, 0, min(len(done), 6), 0  # the sixth look finds its last size

    monkeypatch.setattr(keyring_module, "_mark_of", growing)
    keys.watch()
    try:
        until(lambda: keys.find(b"other"))
        until(lambda: len(done) > 8)
    finally:
        keys.close()
    assert done[:9] == [0] * 7 + [1] * 2  # read at the seventh look, and once


EMBED = {"/v1/embeddings": "input", "/embed": "inputs", "/v2/embed": "texts"}


class Site:
    """A server with keys and fake models, and what it is asked."""

    def __init__(self, folder: Path, *tables: str, models: Models | None = None, **options):
        self.clock = Clock()
        self.now = datetime(2027, 1, 1, tzinfo=UTC)
        self.keys = ring(folder, *tables, clock=self.clock, now=lambda: self.now)
        self.embedder = FakeEmbedder()
        models = models or Models([self.embedder])
        config = ServerConfig(**options)
        self.app = create_app(models, config, ModelPool(models), keyring=self.keys)
        self.client = self.app.test_client()

    async def get(self, path: str, key: str = "secret", status: int | None = None):
        response = await self.client.get(path, headers={"authorization": f"Bearer {key}"})
        data = await response.get_data()
        assert status in (None, response.status_code), data
        return response, data

    async def post(self, path: str, body: dict, key: str = "secret", status: int | None = None):
        """The answer, which has the status given, if any, and is an error in its route's words."""
        headers = {"authorization": f"Bearer {key}"}
        response = await self.client.post(path, json=body, headers=headers)
        answer = json.loads(await response.get_data())
        assert status in (None, response.status_code), answer
        assert response.status_code < 400 or is_error(path, answer)
        return response, answer

    async def embed(self, inputs=("x",), path="/v1/embeddings", key="secret", status=None, **more):
        purpose = {"input_type": "search_query"} if path == "/v2/embed" else {}
        return await self.post(path, {EMBED[path]: inputs} | purpose | more, key, status)


def said(body: dict) -> str:
    """The message of an error in any dialect."""
    return body.get("message") or body.get("detail") or body["error"]


@pytest.mark.parametrize("path", EMBED)
async def test_a_key_of_the_file_opens_and_another_does_not(path, tmp_path):
    site = Site(tmp_path, table(), api_keys=("flag",))
    for key, status in (("secret", 200), ("flag", 200), ("wrong", 401), ("", 401)):
        response, _ = await site.embed(path=path, key=key, status=status)
        assert not [name for name, _ in response.headers if "ratelimit" in name.lower()]
    await site.get("/health", "wrong", status=200)
    assert site.keys.unknown == 2


@pytest.mark.parametrize("path", EMBED)
async def test_a_key_that_has_expired_or_is_for_other_routes_is_refused_by_its_name(path, tmp_path):
    late = table("late") + "expires = 2027-01-01T00:00:01Z"
    site = Site(tmp_path, late, table("narrow", "other", routes=["/rerank", "/v9/*"]))
    await site.embed(path=path, status=200)
    site.now += timedelta(seconds=1)
    response, body = await site.embed(path=path, status=401)
    assert response.headers["www-authenticate"] == "Bearer"
    assert said(body).startswith("the key `late` has expired: it was valid until 2027-01-01 00:0")
    _, body = await site.embed(path=path, key="other", status=403)
    assert said(body) == f"the key `narrow` may not use {path}; it may use /rerank, /v9/*"


def three() -> Models:
    """An embedder under two names, another, and a reranker."""
    other = FakeEmbedder(spec=M3, name="test/other")
    reranker = FakeEmbedder(spec=RERANKER, name="test/reranker")
    aliases = {"test/fake": ["e", "live"], "test/other": ["o"], "test/reranker": ["r"]}
    return Models([FakeEmbedder(), other, reranker], aliases)


@pytest.mark.parametrize("path", EMBED)
async def test_a_model_that_the_key_may_not_use_is_forbidden_served_or_not(path, tmp_path):
    site = Site(tmp_path, table("narrow", models=["live", "r"]), models=three())
    for named in ({"model": "live"}, {}):  # without a name the only one that the key may use
        await site.embed(path=path, status=200, **named)
    for model in ("e", "o", "nobody", "live:fr"):
        _, body = await site.embed(path=path, model=model, status=403)
        words = f"the key `narrow` may not use the model `{model}`; it may use live, r"
        assert said(body) == words
    assert site.keys.quota(site.keys.find(b"secret")).refused["model"] == 4


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/vertex"])
async def test_every_route_asks_for_the_model_first(path, tmp_path):
    site = Site(tmp_path, table(models=["o"]), models=three())
    for model in ("e", "nobody"):
        await site.post(path, ROUTES[path][0] | {"model": model}, status=403)
    vertex = {"instances": [{"inputs": "x", "model": "o"}, {"inputs": "x", "model": "e"}]}
    await site.post("/vertex", vertex, status=403)


async def test_a_key_sees_the_models_that_it_may_use_and_no_others(tmp_path):
    site = Site(tmp_path, table(models=["o", "r"]), table("all", "other"), models=three())
    for path in ("/v1/models", "/models"):
        _, body = await site.get(path)
        assert [one["id"] for one in json.loads(body)["data"]] == ["o", "r"]
        _, body = await site.get(path, "other")
        assert len(json.loads(body)["data"]) == 4
    for path in ("/v1/models/o", "/info?model=r"):
        await site.get(path, status=200)
    for path in ("/v1/models/e", "/v1/models/nobody", "/info?model=e"):
        await site.get(path, status=403)
    _, body = await site.get("/info")
    info = json.loads(body)
    assert info["served_model_name"] == "o"
    assert [one["name"] for one in info["jaxembed"]["models"]] == ["o", "r"]
    _, body = await site.post("/v1/embeddings", {"input": "x", "model": "r"}, status=400)
    assert "`r` is a" in said(body)


async def test_names_that_are_not_served_are_told_only_those_of_the_key(tmp_path):
    site = Site(tmp_path, table(models=["gone", "o"]), models=three())
    _, body = await site.embed(model="gone", status=404)
    assert said(body) == "the model `gone` does not exist; this server has o"
    for path in ("/v1/models/gone", "/info?model=gone"):
        _, body = await site.get(path, status=404)
        assert said(json.loads(body)) == "the model `gone` does not exist; this server has o"
    site = Site(tmp_path, table("stale", models=["gone"]), models=three())
    words = "none of the models that the API key may use"
    assert words in said((await site.embed(status=403))[1])
    assert words in said(json.loads((await site.get("/info", status=403))[1]))


def loading(folder: Path, load, *names: str, **aliases: str):
    """A client of a server that loads these models, and whose key may use the last of all names."""
    catalog = {name: f"/models/{name}" for name in names}
    models = Models(capacity=FakeEmbedder().admission.capacity, loadable=lambda: catalog)
    for alias, name in aliases.items():
        models.name_alias(alias, name)
    keys = ring(folder, table(models=[[*names, *aliases][-1]]))
    app = create_app(models, ServerConfig(), ModelPool(models, load), keyring=keys)
    headers = {"authorization": "Bearer secret"}

    async def post(path, body):
        response = await app.test_client().post(path, json=body, headers=headers)
        return response.status_code, await response.get_json()

    return post


async def test_a_model_that_the_key_may_not_use_is_never_loaded(tmp_path):
    asked: list[str] = []

    def load(model, reserve):
        asked.append(model)
        return FakeEmbedder()

    post = loading(tmp_path, load, "a", "b")
    for path, body in (
        ("/embed", {"inputs": "x"}),
        ("/", {"inputs": "x"}),
        ("/vertex", {"instances": [{"inputs": "x", "model": "a"}]}),
        ("/tokenize", {"inputs": "x"}),
    ):
        assert (await post(path, body | {"model": "a"}))[0] == 403
    assert not asked
    for named in ({"model": "b"}, {}):  # the only one that it may use
        assert (await post("/embed", {"inputs": "x"} | named))[0] == 200
    assert asked == ["/models/b"]


async def test_a_model_that_cannot_be_loaded_is_called_by_the_name_it_was_asked_for(tmp_path):
    def load(model, reserve):
        raise CheckpointError("no space left")

    post = loading(tmp_path, load, "own", live="own")
    for named in ({"model": "live"}, {}):
        status, body = await post("/embed", {"inputs": "x"} | named)
        assert (status, said(body)) == (503, "live cannot be loaded: no space left")


def rates(response) -> dict[str, str]:
    """The headers about limits, without what all of them begin with."""
    prefix = "x-ratelimit-"
    headers = {name.lower(): value for name, value in response.headers.items()}
    return {name.removeprefix(prefix): headers[name] for name in headers if prefix in name}


@pytest.mark.parametrize("path", EMBED)
async def test_answers_and_refusals_tell_what_is_left(path, tmp_path):
    site = Site(tmp_path, table("batch", requests_per_minute=2, tokens_per_minute=600))
    response, _ = await site.embed(["a b c", "d"], path, status=200)
    assert rates(response) == {
        "limit-requests": "2",
        "remaining-requests": "1",
        "reset-requests": "30s",
        "limit-tokens": "600",
        "remaining-tokens": "596",
        "reset-tokens": "400ms",
    }
    await site.embed(["a"], path, status=200)
    response, body = await site.embed(["a"], path, status=429)
    assert response.headers["retry-after"] == "30"
    assert said(body) == "the key `batch` has used its 2 requests per minute; try again in 30 s"
    assert rates(response)["remaining-requests"] == "0"
    assert rates(response)["reset-requests"] == "1m0s"
    if path.startswith("/v1/"):
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert body["error"]["type"] == "rate_limit_error"
    site.clock.now += 30
    await site.embed(["a"], path, status=200)


async def test_get_requests_are_not_counted_and_all_instances_are_one(tmp_path):
    site = Site(tmp_path, table(requests_per_minute=5, tokens_per_minute=1000))
    assert rates((await site.get("/v1/models"))[0])["remaining-requests"] == "5"
    body = {"instances": [{"inputs": "a b"}, {"inputs": ["c", "d e f"]}]}
    response, _ = await site.post("/vertex", body, status=200)
    assert rates(response)["remaining-requests"] == "4"
    assert rates(response)["remaining-tokens"] == "994"
    response, _ = await site.post("/tokenize", {"inputs": "word " * 100})
    assert rates(response)["remaining-tokens"] == "994"


async def test_inputs_that_wait_are_limited_and_given_back_whatever_ends_the_request(tmp_path):
    site = Site(tmp_path, table("batch", max_inputs_waiting=3), table("other", "other"))
    quota, embedder = site.keys.quota(site.keys.find(b"secret")), site.embedder
    embedder.gate = asyncio.Event()
    waiting = asyncio.create_task(site.embed(["a", "b"]))
    await embedder.entered.wait()
    response, body = await site.embed(["c", "d"], status=429)
    assert response.headers["retry-after"] == "1"
    assert "the key `batch` has 2 waiting inputs, and" in said(body)
    _, body = await site.embed(["a"] * 4, status=400)
    assert "the limit of the key `batch` is 3" in said(body)
    other = asyncio.create_task(site.embed(["a"] * 9, key="other"))
    embedder.gate.set()
    assert [(await one)[0].status_code for one in (waiting, other)] == [200, 200]
    assert quota.waiting == 0

    embedder.failure = RuntimeError("broken")
    await site.embed(["a"], status=500)
    assert quota.waiting == 0
    embedder.failure, embedder.gate = None, asyncio.Event()
    embedder.entered.clear()
    gone = asyncio.create_task(site.embed(["a", "b", "c"]))
    await embedder.entered.wait()
    gone.cancel()
    await asyncio.wait({gone})
    assert quota.waiting == embedder.admission.inputs == 0


async def test_no_message_metric_or_log_line_has_a_key_or_its_digest(tmp_path, caplog):
    caplog.set_level("DEBUG")
    site = Site(tmp_path, table("batch", models=["no"], requests_per_minute=1))
    seen = [await (await site.client.get("/metrics")).get_data()]
    for path in EMBED:
        for key in ("secret", "wrong"):
            response, body = await site.embed(path=path, key=key, model="e")
            seen += [json.dumps(body).encode(), str(response.headers).encode()]
    site.keys.read_again()
    client = create_metrics_app(site.app.service).test_client()  # a port of its own
    seen.append(await (await client.get("/metrics")).get_data())
    seen = b"".join(seen).decode() + caplog.text
    assert 'jaxembed_key_refused{key="batch",reason="model"} 1.0' in seen
    assert 'jaxembed_key_refused{key="batch",reason="requests"} 2.0' in seen
    assert 'jaxembed_key_requests{key="batch"} 1.0' in seen
    assert "jaxembed_unknown_keys 3.0" in seen
    assert 'jaxembed_key_file_reads{result="done"} 1.0' in seen
    assert "\njaxembed_key_file_ok 1.0\n" in seen
    assert not [one for one in ("secret", "wrong`", DIGEST, DIGEST[:12]) if one in seen]


async def test_without_a_key_file_nothing_of_keys_is_shown_or_done():
    client = create_app(Models([FakeEmbedder()]), ServerConfig()).test_client()
    assert rates(await client.post("/embed", json={"inputs": "x"})) == {}
    metrics = await (await client.get("/metrics")).get_data()
    assert b"jaxembed_key" not in metrics
    assert b"jaxembed_audit" not in metrics


def test_a_duration_is_written_as_openai_writes_it():
    texts = map(format_duration, (0.0, 0.12, 8.64, 59.9999, 60.0, 61.5))
    assert list(texts) == ["0ms", "120ms", "8.64s", "1m0s", "1m0s", "1m1.5s"]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGHUP on Windows")
def test_at_sighup_keys_are_read_again_and_the_audit_log_moves_on(tmp_path):
    keys, log, moved = (tmp_path / name for name in ("keys.toml", "audit.jsonl", "audit.1"))
    keys.write_text(table("first", "first"))
    flags = ("--api-key-file", str(keys), "--audit-log", str(log))
    flags += ("--cache-dir", str(tmp_path / "cache"))
    model = str(save_tiny(tmp_path / "model"))
    with served(model, *flags) as (url, pid), httpx.Client(base_url=url, timeout=WAIT_S) as client:

        def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"input": "a secret text"}
            return client.post("/v1/embeddings", json=body, headers=headers).status_code

        def lines() -> list[dict]:
            return [json.loads(line) for line in log.read_text().splitlines()]

        assert (ask("first"), ask("nobody")) == (200, 401)
        until(lambda: len(lines()) == 2)
        line, refused = lines()
        assert (line["key"], line["status"], line["inputs"], line["tokens"]) == ("first", 200, 1, 5)
        assert (refused["key"], refused["status"]) == (None, 401)
        log.rename(moved)
        os.kill(pid, signal.SIGHUP)  # the file of keys is as it was, and is read all the same
        until(log.exists)
        until(lambda: 'key_file_reads{result="done"} 1.0' in client.get("/metrics").text)
        keys.write_text(table("second", "second"))
        until(lambda: ask("second") == 200)
        assert ask("first") == 401
        until(lambda: lines()[-1]["status"] == 401)
        assert "secret" not in moved.read_text() + log.read_text()
