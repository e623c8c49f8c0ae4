"""Files of texts in, files of vectors out."""

import io
import json
from collections.abc import Iterator

import numpy as np
import pytest

from jaxembed.bulk import vectors as vectors_module
from jaxembed.bulk.sources import read_texts
from jaxembed.bulk.vectors import embed_file
from jaxembed.errors import ConfigError, EmptyInput, InvalidInput

TEXTS = ["the cat sat", "a dog", "how is the sky", "where is the red train"]


class Stdin:
    def __init__(self, data: bytes):
        self.buffer = io.BytesIO(data)


@pytest.fixture(name="write")
def _write(tmp_path):
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def written(path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    return np.array([json.loads(line) for line in path.read_text().splitlines()], np.float32)


def test_a_text_file_has_a_text_in_each_line(write):
    path = write("in.txt", "the cat\n  a dog \r\ncaf\u00e9\u2028\u0085 sky\nno newline at the end")
    assert list(read_texts([path])) == [
        "the cat",
        "  a dog ",
        "caf\u00e9\u2028\u0085 sky",  # only \n ends a line
        "no newline at the end",
    ]


def test_a_jsonl_file_has_strings_or_objects(write):
    path = write("in.jsonl", '"a\\nb"\n{"text": "c", "id": 7}\n{"id": 8, "text": "d"}\n')
    assert list(read_texts([path])) == ["a\nb", "c", "d"]
    path = write("in.jsonl", '{"text": "no", "body": "yes"}\n')
    assert list(read_texts([path], column="body")) == ["yes"]


def test_standard_input_has_a_text_in_each_line(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("the cat\ncaf\u00e9\n".encode()))
    assert list(read_texts(["-"])) == ["the cat", "caf\u00e9"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.txt", "cat\n\ndog\n", "line 2 is empty"),
        ("in.jsonl", '"cat"\n""\n', "line 2 is empty"),
        ("in.jsonl", '"cat"\n"dog"\n{"text": \n', "line 3 is not JSON"),
        ("in.jsonl", "7\n", "line 1 is neither a string nor an object with a string `text`"),
        ("in.jsonl", '{"text": 7}\n', "line 1 has `text` of type int; wanted a string"),
        ("in.jsonl", '{"body": "cat"}\n', "line 1 has no value for `text`.*--text-column"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(write, name, content, message):
    with pytest.raises(InvalidInput, match=message) as raised:
        list(read_texts([write(name, content)]))
    assert name in str(raised.value)


def test_what_is_not_utf8_is_refused_with_its_line(write, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin(b"caf\xe9\n"))
    for path in ("-", write("in.txt", b"caf\xe9\n"), write("in.jsonl", b'"caf\xe9"\n')):
        with pytest.raises(InvalidInput, match=f"{path} line 1 is not UTF-8"):
            list(read_texts([path]))


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_rows_are_written_in_the_order_of_the_texts(embedder, tmp_path, monkeypatch, name, count):
    monkeypatch.setattr(vectors_module, "ROWS_A_CALL", 32)  # several chunks at work at once
    texts = [TEXTS[k % 4] for k in range(count)]
    out, steps = tmp_path / name, []
    assert embed_file(embedder, iter(texts), out, on_progress=steps.append) == count
    vectors = written(out).reshape(-1, 32)
    assert vectors.dtype == np.float32
    assert len(vectors) == count
    assert sum(steps) == count
    np.testing.assert_allclose(vectors, embedder.encode(texts), atol=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("dtype", ["float16", "binary", "ubinary"])
def test_files_hold_the_dtype_asked_for(embedder, tmp_path, dtype, count):
    texts = [TEXTS[k % 4] for k in range(count)]
    options = {"output_dtype": dtype, "dimensions": 20, "prompt_name": "query"}
    for name in ("out.npy", "out.jsonl"):
        embed_file(embedder, iter(texts), tmp_path / name, **options)
    vectors, wanted = np.load(tmp_path / "out.npy"), embedder.encode(texts, **options)
    assert (vectors.dtype, vectors.shape) == (wanted.dtype, wanted.shape)
    if dtype != "float16":  # in which batches may differ by a rounding
        np.testing.assert_array_equal(vectors, wanted)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = np.array([json.loads(line) for line in lines]).reshape(vectors.shape)
    np.testing.assert_allclose(rows, vectors, atol=1e-3)


def test_a_name_that_says_no_format_is_refused_and_leaves_nothing(embedder, tmp_path):
    with pytest.raises(ConfigError, match=r"out\.csv: expected a name .* \.npy or \.jsonl"):
        embed_file(embedder, iter(TEXTS), tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_what_was_there(embedder, tmp_path, monkeypatch, name, existing):
    monkeypatch.setattr(vectors_module, "ROWS_A_CALL", 2)
    out = tmp_path / name
    if existing:
        out.write_text("before")

    def failing() -> Iterator[str]:
        yield from TEXTS * 3
        raise InvalidInput("line 13 is empty")

    with pytest.raises(InvalidInput, match="line 13"):
        embed_file(embedder, failing(), out)
    with pytest.raises(EmptyInput):  # one that fails in a thread
        embed_file(embedder, iter([*TEXTS, "", *TEXTS]), out)
    assert [file.name for file in tmp_path.iterdir()] == ([name] if existing else [])
    assert not existing or out.read_text() == "before"
