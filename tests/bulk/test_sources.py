"""Rows of files of every kind."""

import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from jaxembed.bulk import sources
from jaxembed.bulk.sources import Place, column_types, input_files, read_rows, read_texts
from jaxembed.errors import ConfigError, InvalidInput

TEXTS = ["the cat", 'says "hello",\nand goes', "caf\u00e9 \u2028 sky", "x" * 200_000]


def rows_of(texts: list[str]) -> list[dict]:
    return [{"id": index, "text": text} for index, text in enumerate(texts)]


def write(path: Path, texts: list[str]) -> str:
    """A file of these texts, of the kind that its name says."""
    content = None
    name = path.name.lower().removesuffix(".gz")
    table = pa.Table.from_pylist(rows_of(texts))
    if name.endswith(".txt"):
        content = "".join(text.replace("\n", " ") + "\n" for text in texts)
    elif name.endswith(("jsonl", "ndjson")):
        content = "".join(json.dumps(row) + "\n" for row in rows_of(texts))
    elif name.endswith((".csv", ".tsv")):
        sign = "," if name.endswith(".csv") else "\t"
        quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
        lines = [f"{index}{sign}{text}" for index, text in enumerate(quoted)]
        content = "\ufeff" + "\r\n".join([f"id{sign}text", *lines, "", ""])
    elif name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=max(2, len(texts) // 4))
    else:
        new = pa.ipc.new_stream if "stream" in name else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=max(3, len(texts) // 4))
    if content is not None:
        data = content.encode()
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


KINDS = ["a.txt", "a.jsonl", "A.NDJSON", "a.csv", "a.tsv", "a.parquet", "a.arrow", "stream.arrow"]
KINDS += ["a.feather", "a.txt.gz", "a.jsonl.gz", "a.csv.gz"]


@pytest.mark.parametrize("name", KINDS)
def test_texts_of_every_kind_of_file_are_read_as_they_are(tmp_path, name):
    path = write(tmp_path / name, TEXTS)
    wanted = [text.replace("\n", " ") for text in TEXTS] if ".txt" in name else TEXTS
    assert list(read_texts([path])) == wanted


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_read_from_any_place_on(tmp_path, name):
    count = 1100  # two blocks
    path = write(tmp_path / name, [f"text {k}" for k in range(count)])
    for skip in (0, 1, 1023, 1024, 1025, 1099, 1100):
        found = list(read_rows(input_files([path, path]), ["text"], Place(0, skip)))
        texts = [str(text) for _, block in found for text in block.columns["text"]]
        assert texts == [f"text {k % count}" for k in range(skip, 2 * count)], skip
        places = [place for place, _ in found]
        assert places[0] == (Place(0, skip) if skip < count else Place(1, 0))
        assert all(0 <= block.share <= 1 for _, block in found)
        assert places == sorted(places)


def test_a_small_group_of_rows_after_the_one_in_which_reading_starts_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of(list("abcdefg"))), path, row_group_size=3)
    for skip in range(7):
        found = list(read_rows(input_files([str(path)]), ["text"], Place(0, skip)))
        texts = [str(text) for _, block in found for text in block.columns["text"]]
        assert "".join(texts) == "abcdefg"[skip:], skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.arrow"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path, name):
    path = write(tmp_path / name, TEXTS)
    if name == "a.jsonl":  # each row has its own
        with pytest.raises(InvalidInput, match=r"a\.jsonl line 1 has no value for `body`"):
            list(read_texts([path], "body"))
    else:
        with pytest.raises(ConfigError, match=r"has no column `body`\. It has: id, text"):
            list(read_texts([path], "body"))


@pytest.mark.parametrize("name", [one for one in KINDS if one not in ("a.txt", "a.csv", "a.tsv")])
def test_a_broken_file_is_told_in_one_line(tmp_path, name):
    path = Path(write(tmp_path / name, [f"text {k}" for k in range(1100)]))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"nothing of the kind\xff\n"):
        path.write_bytes(content)
        with pytest.raises((ConfigError, InvalidInput)) as told:
            list(read_texts([str(path)]))
        assert str(path) in str(told.value)
        assert "\n" not in str(told.value)


def test_rows_of_csv_with_too_few_fields_or_no_utf8_are_bad_and_empty_lines_none(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,a\n\n2\n3,caf\xe9\n4,b\n")
    ((_, block),) = read_rows(input_files([str(path)]), ["text"])
    assert block.count == 4
    assert block.bad == {1: "has 1 field, and the header has 2", 2: "is not UTF-8"}


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_a_line_over_the_limit_is_a_bad_row_and_the_others_are_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "LINE_BYTES", 100)
    lines = ["a", "b" * 101, "c" * 350, "d" * 99, "e" * 101]
    if "jsonl" in name:
        lines = [f'"{line[:-2]}"' if len(line) > 2 else f'"{line}"' for line in lines]
    for end in ("\n", ""):
        data = ("\n".join(lines) + end).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        ((_, block),) = read_rows(input_files([str(path)]), ["text"])
        assert block.count == 5
        too_long = "has over 100 bytes, which is the limit; split it"
        assert block.bad == dict.fromkeys((1, 2, 4), too_long)
        kept = [line.strip('"') for line in (lines[0], lines[3])]
        assert [text for text in block.columns["text"] if text] == kept


def test_a_row_of_csv_over_the_limit_ends_the_job_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LINE_BYTES", 100)
    path = tmp_path / "a.csv"
    for long in ("x" * 101, '"' + "x\n" * 60, '"' + '","'.join(["x\n" * 10] * 20) + '"'):
        path.write_text(f"text\na\n{long}\nb\n")
        with pytest.raises(ConfigError, match=r"a\.csv: row 3 has over 100 bytes"):
            list(read_rows(input_files([str(path)]), ["text"]))


def test_long_lines_of_json_are_read_without_what_nobody_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "AT_ONCE", 50)
    lists = "[" + ",".join(["[]"] * 100) + "]"
    rows = [
        f'{{"id": 123456789012345678901234567890, "text": "{"x" * 60}", "other": {lists}}}',
        f'{{"text": {lists}}}',
        f'"{"y" * 60}"',
        lists,
        f'{{"text": "a", "other": {lists}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    ((_, block),) = read_rows(input_files([str(path)]), ["text", "id"])
    assert block.columns["text"] == ["x" * 60, None, "y" * 60, None, None]
    assert block.columns["id"][0] == 123456789012345678901234567890
    assert block.bad == {
        1: "has `text` of 301 bytes of JSON; only a string may be that long",
        3: "is a long line, and not a valid JSON object",
        4: "is a long line, and not a valid JSON object",
    }


def test_lines_of_a_file_that_reads_lines_of_any_length_only_are_bounded(monkeypatch):
    """As the files of object stores do."""
    fsspec = pytest.importorskip("fsspec.spec")
    content = b"a\n" + b"b" * 500 + b"\nc\n"

    class Stored(fsspec.AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return content[start:end]

    monkeypatch.setattr(sources, "LINE_BYTES", 100)
    stored = Stored(None, "a.txt", size=len(content), cache_type="none")
    (block,) = sources._read_txt(stored, "a.txt", ["text"], 0, 10)
    assert (block.columns["text"], list(block.bad)) == (["a", None, "c"], [1])


def test_names_stand_for_files_in_order(tmp_path):
    inside = tmp_path / "in" / "deep"
    inside.mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.jsonl", "_manifest.json", ".d.txt", "e.pdf"):
        (tmp_path / "in" / name).write_text("x\n")
    folder = str(tmp_path / "in")

    def names(*given: str) -> list[str]:
        return [one.name.removeprefix(f"{folder}/") for one in input_files(given)]

    assert names(folder) == ["a.txt", "b.txt", "deep/c.jsonl"]
    assert names(f"{folder}/*.txt") == ["a.txt", "b.txt"]
    assert names(f"{folder}/**/*.jsonl") == ["deep/c.jsonl"]
    assert names(f"{folder}/b.txt", folder) == ["b.txt", "a.txt", "b.txt", "deep/c.jsonl"]
    odd = tmp_path / "in" / "x[1].txt"
    odd.write_text("x\n")
    assert names(str(odd)) == ["x[1].txt"]
    for given, words in (
        (f"{folder}/e.pdf", r"e\.pdf: expected a file that ends in \.txt, \.jsonl, .*, or - "),
        (f"{folder}/*.csv", "there are no input files"),
        (f"{folder}/none.csv", "cannot read .*No such file"),
        (f"{folder}/none/", "none/: there is no such folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            names(given)


def test_what_cannot_be_read_as_a_file_is_refused_and_not_passed_over(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match=r"pipe\.txt is not a regular file"):
        input_files([str(tmp_path / "pipe.txt")])
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.txt", ["a"])
    (folder / "b.txt").symlink_to(tmp_path / "gone.txt")
    for name in (str(folder), f"{folder}/*.txt"):
        with pytest.raises(ConfigError, match=r"cannot read .*b\.txt: No such file"):
            input_files([name])


def test_types_are_those_of_the_file_or_of_the_first_rows(tmp_path):
    parquet = write(tmp_path / "a.parquet", TEXTS)
    csv = write(tmp_path / "a.csv", TEXTS)
    lines = tmp_path / "b.jsonl"
    rows = [{"a": 1, "b": None, "c": [1], "d": 1}, {"a": 2.5, "b": None, "c": [2, 3], "d": "x"}]
    rows.append({"d": "y"})
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def types(path: str, *columns: str) -> dict[str, str]:
        found = column_types(input_files([path]), columns)
        return {name: str(kind) for name, kind in found.items()}

    assert types(parquet, "id", "text") == {"id": "int64", "text": "string"}
    assert types(csv, "id") == {"id": "string"}
    # of b nothing else is known, and of d most are
    wanted = {"a": "double", "b": "string", "c": "list<item: int64>", "d": "string"}
    assert types(str(lines), *"abcd") == wanted


def test_parquet_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxembed\[parquet\]'"):
        list(read_texts([path]))
    (tmp_path / "a.txt").write_text("x\n")
    assert list(read_texts([str(tmp_path / "a.txt")])) == ["x"]
