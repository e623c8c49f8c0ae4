"""The programs of the tutorial run on the texts that it makes, and find what is nearest."""

import json
import re
import subprocess
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
from commands import run
from test_server_openai import ask

import jaxembed
from jaxembed import EngineConfig

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()
SHELL, PYTHON = (
    re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for language in ("sh", "python")
)


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch, tiny_checkpoint, grid_file):
    """A folder with the texts of the page and their vectors, made by the commands of the page."""
    (texts,) = (block for block in SHELL if block.startswith("mkdir my-texts"))
    subprocess.run(["bash", "-e"], input=texts.encode(), cwd=tmp_path, check=True)
    (command,) = (block.split() for block in SHELL if "jaxembed embed" in block)
    assert command[1:] == ["embed", "my-texts", "-o", "my-vectors.npy"]
    paths = (str(tmp_path / command[2]), "-o", str(tmp_path / command[4]))
    tiny = ("-m", str(tiny_checkpoint), "--buckets", str(grid_file), "--dtype", "float32")
    done = run("embed", *paths, *tiny, "--cache-dir", str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_search_prints_the_texts_that_are_nearest_with_their_scores(
    folder, embedder, monkeypatch, capsys
):
    def urlopen(request):
        path = request.full_url.removeprefix("http://127.0.0.1:8080")
        _, body = ask(json.loads(request.data), path=path, embedder=embedder.model, status=200)
        return BytesIO(json.dumps(body).encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setattr("sys.argv", ["search.py", "a", "red", "train"])
    exec(PYTHON[0], {})
    found = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    query = embedder.encode_query("a red train", normalize=True)
    lines = "".join(path.read_text() for path in sorted((folder / "my-texts").iterdir()))
    texts = re.findall(r'(?:{"text": ")?(.+?)(?:"})?\n', lines)
    scores = dict(zip(texts, embedder.encode(texts) @ query, strict=True))
    assert len(texts) == 6
    assert sorted(scores.values())[-3] == pytest.approx(float(found[-1][0]), abs=0.006)
    for score, text in found:
        assert float(score) == pytest.approx(scores[text], abs=0.006)  # of two digits


def test_the_program_without_a_server_prints_one_of_its_texts(
    tiny_checkpoint, grid_file, tmp_path, monkeypatch, capsys
):
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    tiny = partial(jaxembed.Embedder, str(tiny_checkpoint), cache_dir=tmp_path, config=config)
    monkeypatch.setattr(jaxembed, "Embedder", tiny)
    exec(PYTHON[1], {})
    assert f'"{capsys.readouterr().out.strip()}"' in PYTHON[1]
