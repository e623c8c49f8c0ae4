"""A model written to an S3 server of moto's, and served from there over HTTP. Skipped where moto or
s3fs is not installed: the extra `deploy`."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import commands
import pyarrow.parquet as pq
import pytest
import sources
from commands import Done
from fakes import until
from live_server import WAIT_S, served

from jaxembed.cli.options import EXIT_TEMPORARY

pytest.importorskip("moto", reason="the extra `deploy` brings moto")
pytest.importorskip("s3fs", reason="the extra `deploy` brings s3fs")

pytestmark = pytest.mark.slow

SECRET = "sEcReT0123456789"
URL = "s3://models/tiny"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(url: str, content: bytes | None = None, method: str | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, content, headers, method=method)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return answer.read()


def answers(url: str, process: subprocess.Popen) -> bool:
    """Whether a bucket could be made."""
    assert process.poll() is None
    try:
        ask(url, method="PUT")
    except OSError:
        return False
    return True


@pytest.fixture(name="store", scope="module")
def _store() -> Iterator[str]:
    """The address of an S3 server with one empty bucket."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    unseen = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **unseen) as process:
        until(lambda: answers(f"{url}/models", process))
        yield url
        process.terminate()
        process.wait(WAIT_S)


@pytest.fixture(name="environment", autouse=True, scope="module")
def _environment(store) -> Iterator[None]:
    variables = {"ENDPOINT_URL": store, "ACCESS_KEY_ID": "AKIAEXAMPLE"}
    variables |= {"SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


def run(*arguments: str, **environment: str) -> Done:
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return commands.run(*arguments, **store | environment)


@pytest.fixture(name="pinned", scope="module")
def _pinned(environment, tmp_path_factory) -> str:
    """The model is in the store; the URL that names its content."""
    source = sources.write_sentence_bert(tmp_path_factory.mktemp("source") / "tiny")
    done = run("convert", str(source), URL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{URL}: bert, embed, 8 dimensions, 16 tokens\n"
    return next(word for word in done.stderr.split() if word.startswith(f"{URL}@sha256:"))


def vectors(url: str, model: str) -> list[list[float]]:
    body = json.dumps({"model": model, "input": ["hello", "world"]}).encode()
    return [row["embedding"] for row in json.loads(ask(f"{url}/v1/embeddings", body))["data"]]


def test_a_model_is_served_from_a_store(pinned, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")
    alias = ("--served-model-name", f"tiny={pinned}", "--cache-dir", cache)
    with served("--model-id", pinned, *alias) as (url, _):
        first = vectors(url, "tiny")
    assert [len(vector) for vector in first] == [8, 8]
    # later starts of a pinned model ask nobody
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with served("--model-id", pinned, *alias) as (url, _):
        for again, vector in zip(vectors(url, "tiny"), first, strict=True):
            assert again == pytest.approx(vector, abs=1e-5)  # another batch, perhaps


def test_a_store_that_cannot_be_reached_is_named_without_the_secret(pinned, tmp_path):
    gone = f"http://127.0.0.1:{free_port()}"
    done = run("info", URL, "--cache-dir", str(tmp_path / "cache"), AWS_ENDPOINT_URL=gone)
    assert done.returncode == EXIT_TEMPORARY
    assert f"cannot read {URL}/manifest.json" in done.stderr
    assert SECRET not in done.stderr


COPY = """
import s3fs, sys
s3fs.S3FileSystem().get("models/out/", sys.argv[1] + "/", recursive=True)
"""


def keys(store: str) -> list[str]:
    """The names of the objects of the job's result."""
    return re.findall("<Key>out/([^<]*)</Key>", ask(f"{store}/models?list-type=2").decode())


def test_a_job_that_is_killed_goes_on_from_a_store_into_a_store(store, tmp_path):
    numbers = [range(700), range(700, 1500)]
    (tmp_path / "in").mkdir()
    for index, some in enumerate(numbers):
        lines = [json.dumps({"id": f"d{k}", "text": f"text {k}", "n": k}) for k in some]
        (tmp_path / "in" / f"{index}.jsonl").write_text("\n".join([*lines, ""]))
        content = (tmp_path / "in" / f"{index}.jsonl").read_bytes()
        ask(f"{store}/models/in/{index}.jsonl", content, method="PUT")
    program = [sys.executable, str(Path(__file__).parent / "fake_computation.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    slow = [*program, "s3://models/out", "s3://models/in/", "400", "0.3"]
    with subprocess.Popen(slow, env=environment) as process:
        until(lambda: process.poll() is not None or "part-00000.parquet" in keys(store))
        process.kill()
    assert "part-00003.parquet" not in keys(store)
    for folders in (("s3://models/out", "s3://models/in/"), (tmp_path / "out", tmp_path / "in")):
        subprocess.run([*program, *map(str, folders), "400", "0"], env=environment, check=True)
    subprocess.run([sys.executable, "-c", COPY, str(tmp_path / "copy")], check=True)
    names = [f"part-{number:05d}.parquet" for number in range(4)]
    assert sorted(keys(store)) == ["_job.json", "_manifest.json", *names]
    for name in names:
        copied, wanted = (pq.read_table(tmp_path / one / name) for one in ("copy", "out"))
        assert copied == wanted
    manifest = json.loads((tmp_path / "copy" / "_manifest.json").read_text())
    assert manifest["rows"] == 1500
