"""Jobs: rows in, folders of Parquet out, whatever happens on the way."""

import contextlib
import hashlib
import json
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import FORKS
from conftest import save_tiny
from fake_computation import DigestRows, table, vectors_of
from fakes import until
from test_embedder import save_scorer

from jaxembed import Embedder, Entity
from jaxembed.bulk import job as jobs
from jaxembed.bulk.ahead import CALLS_AHEAD
from jaxembed.bulk.computations import ClassifyRows, EmbedRows, EntityRows, ScoreRows, as_arrow
from jaxembed.bulk.row_source import TextRows
from jaxembed.bulk.run import JobProgress, Rows, run_job
from jaxembed.cli.options import EXIT_TEMPORARY, exit_status
from jaxembed.config import EngineConfig
from jaxembed.data.spec import DenseLayer, PerToken
from jaxembed.data.work import Ragged, SparseRows
from jaxembed.errors import ConfigError, InvalidInput, JaxembedError, WrongTask
from jaxembed.runtime.tasks import check_task

KILLS = 8
PAIRS = TextRows(("query", "text"))


@pytest.fixture(name="rows_file")
def _rows_file(tmp_path) -> Path:
    return write_rows(tmp_path / "in.jsonl", 1000)


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    numbers = range(first, first + count)
    rows = [{"id": f"d{k}", "text": f"text {k % 700}", "n": k} for k in numbers]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(inputs: Path | Sequence[str], out: Path | str, computation: Any = None, **options: Any):
    names = [str(inputs)] if isinstance(inputs, Path) else inputs
    reuse = options.pop("reuse", None)
    rows = Rows(names, **{"id_column": "id", "keep": ("n",), "part_rows": 300} | options)
    return run_job(computation or DigestRows(), rows, str(out), reuse=reuse)


def hash_of_rows(out: Path) -> str:
    """The same for the same rows in the same parts, however they are divided into row groups."""
    state = hashlib.sha256()
    for path in sorted(out.glob("part-*")):
        found = pq.read_table(path)
        state.update(repr((path.name, found.num_rows, str(found.schema))).encode())
        for column in found.columns:
            state.update(repr(column.to_pylist()).encode())
    return state.hexdigest()


def part_rows(out: Path) -> list[int]:
    return [pq.read_metadata(part).num_rows for part in sorted(out.glob("part*"))]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_written_in_parts_with_their_ids_and_what_is_kept(tmp_path, kind):
    source = write_rows(tmp_path / f"in.{kind}", 1000)
    summary = run(source, tmp_path / "out")
    assert (summary.rows, summary.parts, summary.computed, summary.skipped) == (1000, 4, 1000, 0)
    parts = [f"part-0000{k}.parquet" for k in range(4)]
    assert names(tmp_path / "out") == ["_job.json", "_manifest.json", *parts]
    found = table(tmp_path / "out")
    assert found.column_names == ["row", "id", "n", "text_digest", "dense"]
    assert found["row"].to_pylist() == found["n"].to_pylist() == list(range(1000))
    assert found["id"].to_pylist() == [f"d{k}" for k in range(1000)]
    texts = [(f"text {k % 700}",) for k in range(1000)]
    np.testing.assert_array_equal(np.stack(found["dense"].to_numpy()), vectors_of(texts))
    assert part_rows(tmp_path / "out") == [300, 300, 300, 100]


def test_many_files_of_all_kinds_are_one_input_in_their_order(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_rows(folder / "a.jsonl", 10)
    write_rows(folder / "b.parquet", 310, 10)
    (folder / "c.ndjson").write_text("")
    write_rows(folder / "d.jsonl", 3, 320)
    (folder / "_notes.jsonl").write_text("no row")
    (folder / "README").write_text("no rows")
    run(folder, tmp_path / "out")
    assert table(tmp_path / "out")["n"].to_pylist() == list(range(323))
    run([str(folder / "*.jsonl"), str(folder / "b.parquet")], tmp_path / "other")
    order = [*range(10), *range(320, 323), *range(10, 320)]
    assert table(tmp_path / "other")["n"].to_pylist() == order


@pytest.mark.parametrize("count", [0, 1, 299, 300, 301])
def test_any_number_of_rows_fills_parts_to_their_ends(tmp_path, count):
    summary = run(write_rows(tmp_path / "in.parquet", count), tmp_path / "out") if count else None
    if summary is None:
        (tmp_path / "in.csv").write_text("id,n,text\n")
        summary = run(tmp_path / "in.csv", tmp_path / "out")
    assert (summary.rows, summary.parts) == (count, -(-count // 300))
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["rows"] == count


@pytest.mark.parametrize(
    ("kind", "stop"), [("jsonl", 0), ("parquet", 1), ("jsonl", 5), ("parquet", 6), ("jsonl", 15)]
)
def test_a_job_that_was_stopped_goes_on_and_computes_no_part_twice(tmp_path, kind, stop):
    source = write_rows(tmp_path / f"in.{kind}", 1000)
    run(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", DigestRows(stops_at=stop))
    finished = len(list((tmp_path / "out").glob("part-*")))
    assert not list((tmp_path / "out").glob(".part*"))
    summary = run(source, tmp_path / "out")
    assert summary.parts_from_before == finished
    assert summary.computed == 1000 - 300 * finished
    assert hash_of_rows(tmp_path / "out") == hash_of_rows(tmp_path / "whole")
    assert names(tmp_path / "out") == names(tmp_path / "whole")
    again = DigestRows()
    assert run(source, tmp_path / "out", again).rows == 1000
    assert again.rows == 0


def test_a_part_that_was_removed_is_made_anew_and_one_that_is_none_is_named(tmp_path, rows_file):
    out = tmp_path / "out"
    run(rows_file, out)
    before = hash_of_rows(out)
    part = out / "part-00001.parquet"
    part.unlink()
    (out / ".part-00001.parquet.partial-0123").write_bytes(b"half")  # of a killed process
    assert run(rows_file, out).computed == 300
    assert hash_of_rows(out) == before
    assert not list(out.glob(".part*"))
    no_part = BytesIO()
    pq.write_table(pa.table({"row": [1]}), no_part)
    for damage in (b"", b"PAR1 no part", no_part.getvalue()):
        part.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"part-00001\.parquet is not a part .*remove"):
            run(rows_file, out)


class Telling(DigestRows):
    """Tells of each call."""

    told: Any = None

    def compute(self, rows):
        self.told.send(None)
        return super().compute(rows)


def job_that_tells(told: Any, source: Path, out: Path) -> None:
    computation = Telling()
    computation.told = told
    run(source, out, computation, part_rows=500)


def test_a_job_that_is_killed_again_and_again_gives_what_an_undisturbed_one_gives(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", 2500)
    run(source, tmp_path / "whole", part_rows=500)
    out, chance = tmp_path / "out", random.Random(7)
    kills, done = 0, False
    while not done or kills < KILLS:
        if done:  # it was quicker than the kills: once more from the start
            for path in out.iterdir():
                path.unlink()
        calls, told = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=job_that_tells, args=(told, source, out))
        process.start()
        told.close()
        with contextlib.suppress(EOFError):  # it ended
            for _ in range(chance.randrange(20)):
                calls.recv()
            process.kill()
        process.join()
        done = process.exitcode == 0
        assert done or process.exitcode == -signal.SIGKILL
        kills += not done
    assert hash_of_rows(out) == hash_of_rows(tmp_path / "whole")
    assert names(out) == names(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"part_rows": 200}, "--part-rows (part_rows): 300 before, now 200"),
        ({"keep": ()}, '--keep or --id-column (columns.n): "int64" before, missing now'),
        ({"id_column": None}, '--id-column (id_column): "id" before, now null'),
        ({"computation": DigestRows(version=2)}, "computation.version: 1 before, now 2"),
    ],
)
def test_a_job_with_other_options_is_refused_with_what_differs(tmp_path, rows_file, change, words):
    run(rows_file, tmp_path / "out")
    with pytest.raises(ConfigError) as refused:
        run(rows_file, tmp_path / "out", **change)
    assert "a job with other inputs or options was started there" in str(refused.value)
    assert words in str(refused.value)


def test_a_changed_input_is_refused_with_the_difference(tmp_path, rows_file):
    run(rows_file, tmp_path / "out")
    write_rows(rows_file, 1001)
    with pytest.raises(ConfigError, match=r"INPUTS .*in\.jsonl\.size\): \d+ before, now \d+"):
        run(rows_file, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"INPUTS .*more\.jsonl\): missing before"):
        run([str(rows_file), str(write_rows(tmp_path / "more.jsonl", 2))], tmp_path / "out")


def test_an_input_that_changes_under_the_job_is_told(tmp_path, rows_file):
    class Changing(DigestRows):
        def compute(self, rows):
            write_rows(rows_file, 1000)
            return super().compute(rows)

    with pytest.raises(ConfigError, match="the input changed while it was read"):
        run(rows_file, tmp_path / "out", Changing())
    assert "_manifest.json" not in names(tmp_path / "out")


def test_an_interrupted_job_without_a_part_is_not_taken_over(tmp_path, rows_file):
    with pytest.raises(KeyboardInterrupt):
        run(rows_file, tmp_path / "out", DigestRows(stops_at=0))
    begun = (tmp_path / "out" / "_job.json").read_bytes()
    with pytest.raises(ConfigError, match=r"--part-rows .*: 300 before, now 200") as refused:
        run(rows_file, tmp_path / "out", part_rows=200)
    assert "remove _job.json to start again" in str(refused.value)
    assert (tmp_path / "out" / "_job.json").read_bytes() == begun
    assert run(rows_file, tmp_path / "out").rows == 1000


def test_a_command_that_fails_at_its_first_rows_may_be_corrected(tmp_path, rows_file):
    with pytest.raises(InvalidInput, match="has no value for `body`"):
        run(rows_file, tmp_path / "out", DigestRows(TextRows(("body",))))
    assert names(tmp_path / "out") == []
    assert run(rows_file, tmp_path / "out").rows == 1000


def test_inputs_and_folders_that_cannot_be_are_refused_and_stay_as_they_are(tmp_path, rows_file):
    for out in (".", "in.jsonl", "out", "deep/out"):
        with pytest.raises(ConfigError, match="is inside the input"):
            run(tmp_path, tmp_path / out)
        assert names(tmp_path) == [rows_file.name]
    with pytest.raises(ConfigError, match="is inside the input"):
        run(["s3://bucket/in/"], "s3://bucket/in/out")
    with pytest.raises(JaxembedError, match=r"cannot|installed|no such"):
        run(["s3://bucket/in"], "s3://bucket/input")
    (tmp_path / "twice.csv").write_text("text,id,text\na,b,c\n")
    with pytest.raises(ConfigError, match="has several columns `text`"):
        run(tmp_path / "twice.csv", tmp_path / "other", keep=())
    with pytest.raises(ConfigError, match="a job cannot read standard input"):
        run(["-"], tmp_path / "other")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has files but no _job\.json.*thesis\.txt"):
        run(rows_file, tmp_path / "out")
    assert names(tmp_path / "out") == ["thesis.txt"]


OTHERS = [(1, 2.5), (1, 10**23), (1.5, 10**23 + 1), (1, True), (1, "1"), (True, 1), ([1], [2.5])]


@pytest.mark.parametrize(("first", "other"), [*OTHERS, ({"x": 1}, {"x": 1, "y": 2})])
def test_a_value_that_its_column_cannot_hold_is_bad_and_never_changed(tmp_path, first, other):
    rows = [{"id": "a", "text": "x", "n": first}] * 1100 + [{"id": "b", "text": "x", "n": other}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InvalidInput, match=r"line 1101 has .* as `n`, and the column has the type"):
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", on_error="skip")
    assert table(tmp_path / "out")["n"].to_pylist() == [first] * 1100


def test_columns_of_any_type_are_kept(tmp_path):
    columns = {
        "text": pa.array(["a", "b"]).dictionary_encode(),
        "id": pa.array(["x", "y"]),
        "view": pa.array(["p", "q"], pa.string_view()),
        "n": pa.array([[1], None]),
        "day": pa.array([1, 2], pa.date32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out", keep=("view", "n", "day"))
    found = table(tmp_path / "out")
    for name in ("view", "n", "day"):
        assert found[name].to_pylist() == columns[name].to_pylist()


def test_two_processes_do_not_write_one_folder(tmp_path, rows_file):
    inside, leave = threading.Event(), threading.Event()

    class Waiting(DigestRows):
        def compute(self, rows):
            inside.set()
            assert leave.wait(60)
            return super().compute(rows)

    first = threading.Thread(target=run, args=(rows_file, tmp_path / "out", Waiting()))
    first.start()
    assert inside.wait(60)
    with pytest.raises(ConfigError, match="another process is writing to this folder"):
        run(rows_file, tmp_path / "out")
    leave.set()
    first.join()
    assert run(rows_file, tmp_path / "out").parts_from_before == 4


BAD = [
    ('{"id": "a", "text": ""}', "is empty: there is nothing to embed"),
    ('{"id": "a", "text": null}', "has no value for `text`"),
    ('{"id": "a", "text": 7}', "has `text` of type int"),
    ('{"text": "x"}', "has no `id`"),
    ('{"id": "a", "text": "x", "n": "many"}', "has 'many' as `n`, and the column has the type i"),
    ('{"id": 7, "text": "x"}', "has 7 as `id`, and the column has the type string"),
    ("[1]", "is neither a string nor an object"),
    ('{"id": "a", ', "is not JSON"),
    ('{"id": "a", "text": "too long"}', "has 9 tokens, the limit is 8; --auto-truncate true"),
]


@pytest.mark.parametrize(("line", "words"), BAD[::4])
def test_a_bad_row_stops_the_job_by_its_line(tmp_path, rows_file, line, words):
    lines = rows_file.read_text().splitlines()
    text = "\n".join([*lines[:950], *[line] * 60, ""])
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n" + text)
    with pytest.raises(InvalidInput) as refused:
        run(tmp_path / "bad.jsonl", tmp_path / "out")
    assert "bad.jsonl line 1951" in str(refused.value)
    assert words in str(refused.value)
    assert "--on-error skip" in str(refused.value)
    finished = len(list((tmp_path / "out").glob("part-*")))
    summary = run(tmp_path / "bad.jsonl", tmp_path / "out", on_error="skip")  # it goes on
    assert summary.parts_from_before == finished
    assert (summary.rows, summary.skipped) == (1950, 60)


def test_bad_rows_are_left_out_and_reported(tmp_path, rows_file):
    lines = rows_file.read_text().splitlines()
    for index, (line, _) in enumerate(BAD):
        lines.insert(100 * index, line)
    rows_file.write_text("\n".join(lines) + "\n")
    summary = run(rows_file, tmp_path / "out", on_error="skip")
    assert (summary.rows, summary.skipped, summary.parts) == (1000, len(BAD), 4)
    found = table(tmp_path / "out")
    assert found["n"].to_pylist() == list(range(1000))
    bad = [100 * index for index in range(len(BAD))]
    assert found["row"].to_pylist() == [k for k in range(1000 + len(BAD)) if k not in bad]
    report = (tmp_path / "out" / "_skipped.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in report]
    assert [one["row"] for one in told] == bad
    for one, (_, words) in zip(told, BAD, strict=True):
        assert one["where"] == f"{rows_file} line {one['row'] + 1}"
        assert words in one["reason"]
    assert part_rows(tmp_path / "out") == [297, 297, 297, 109]  # of as many rows of the input


def test_columns_that_are_not_there_or_differ_are_refused_before_anything(tmp_path):
    first = write_rows(tmp_path / "a.parquet", 10)
    pq.write_table(pa.table({"id": ["x"], "text": ["y"], "n": ["3"]}), tmp_path / "b.parquet")
    both = [str(first), str(tmp_path / "b.parquet")]
    with pytest.raises(ConfigError, match=r"b\.parquet: column `n` is string, and int64 in .*a\.p"):
        run(both, tmp_path / "out")
    assert run(both, tmp_path / "other", keep=()).rows == 11
    with pytest.raises(ConfigError, match=r"a\.parquet has no column `m`\. It has: id, text, n"):
        run(first, tmp_path / "out", keep=("m",))
    with pytest.raises(ConfigError, match="column `n` is int64; wanted a column of strings"):
        run(first, tmp_path / "out", DigestRows(TextRows(("n",))))
    pq.write_table(pa.table({"row": [1], "text": ["y"]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="`row` cannot be kept"):
        run(tmp_path / "c.parquet", tmp_path / "out", id_column=None, keep=("row",))
    assert not list((tmp_path / "out").glob("*"))


def test_results_of_equal_texts_are_reused_and_only_new_ones_computed(tmp_path, rows_file):
    run(rows_file, tmp_path / "first")
    texts = {k: f"text {k}" if k % 10 else f"new {k}" for k in range(600, 1, -1)}
    lines = [json.dumps({"id": k, "text": text, "n": k}) + "\n" for k, text in texts.items()]
    (tmp_path / "new.jsonl").write_text("".join(lines))
    computation = DigestRows()
    second = tmp_path / "second"
    summary = run(tmp_path / "new.jsonl", second, computation, reuse=str(tmp_path / "first"))
    assert computation.rows == summary.computed == 60
    assert summary.reused == 539
    run(tmp_path / "new.jsonl", tmp_path / "plain")
    assert hash_of_rows(second) == hash_of_rows(tmp_path / "plain")


def test_results_of_another_computation_or_of_no_job_are_not_reused(tmp_path, rows_file):
    run(rows_file, tmp_path / "first")
    with pytest.raises(ConfigError, match="come from another model or other options"):
        run(rows_file, tmp_path / "out", DigestRows(version=2), reuse=str(tmp_path / "first"))
    with pytest.raises(ConfigError, match=r"_job\.json"):
        run(rows_file, tmp_path / "out2", reuse=str(tmp_path))
    with pytest.raises(ConfigError, match=r"the folder .*none does not exist"):
        run(rows_file, tmp_path / "out2", reuse=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="is also the folder of --reuse"):
        run(rows_file, tmp_path / "first", reuse=f"{tmp_path / 'first'}/")


def test_a_full_disk_is_told_and_the_job_goes_on_later(tmp_path, rows_file, monkeypatch):
    writes = []

    def full(self):
        writes.append(self)
        if len(writes) == 3:
            raise OSError(28, "No space left on device")
        return flush(self)

    flush = jobs.PartWriter._flush
    monkeypatch.setattr(jobs.PartWriter, "_flush", full)
    with pytest.raises(ConfigError, match="left on device; finished parts are kept") as told:
        run(rows_file, tmp_path / "out")
    assert exit_status(told.value) == EXIT_TEMPORARY
    assert names(tmp_path / "out") == ["_job.json", "part-00000.parquet", "part-00001.parquet"]
    assert run(rows_file, tmp_path / "out").computed == 400


def test_few_rows_wait_in_memory(tmp_path, monkeypatch):
    """However slow writing is, reading does not run ahead of it."""
    source = write_rows(tmp_path / "in.parquet", 2000)
    computation, most = DigestRows(rows_per_call=50), []
    write = jobs.PartWriter.write

    def counted(self, rows, skipped):
        until(lambda: computation.calls >= CALLS_AHEAD)
        most.append(computation.rows - written[0])
        written[0] += rows.num_rows
        write(self, rows, skipped)

    written = [0]
    monkeypatch.setattr(jobs.PartWriter, "write", counted)
    run(source, tmp_path / "out", computation)
    assert max(most) <= 5 * 50


def test_progress_counts_rows_up_to_the_whole_input(tmp_path, rows_file):
    told: list[JobProgress] = []
    rows = Rows([str(rows_file)], part_rows=300)
    run_job(DigestRows(), rows, str(tmp_path / "out"), on_progress=told.append)
    assert [one.rows for one in told] == sorted(one.rows for one in told)
    assert told[-1] == (1000, pytest.approx(1))
    assert all(0 < one.share <= 1 for one in told)


def test_row_groups_are_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "ROW_GROUP_BYTES", 4000)
    source = write_rows(tmp_path / "in.parquet", 300)
    run(source, tmp_path / "out")
    meta = pq.read_metadata(tmp_path / "out" / "part-00000.parquet")
    assert meta.num_row_groups > 2
    assert sum(meta.row_group(k).num_rows for k in range(meta.num_row_groups)) == 300


@pytest.fixture(name="pairs_file", scope="module")
def _pairs_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "in.csv"
    lines = [f"{k},where is the cat,the cat number {k} sat" for k in range(40)]
    path.write_text("\n".join(["id,query,text", *lines, ""]))
    return path


def test_vectors_are_those_of_the_library(embedder, tmp_path, pairs_file):
    options = {"prompt_name": "query", "dimensions": 20}
    for dtype, kind in (("float", pa.float32()), ("float16", pa.float16()), ("binary", pa.int8())):
        chosen = options | {"output_dtype": dtype}
        computation = EmbedRows(embedder, TextRows(), ("dense",), chosen)
        run_job(computation, Rows([str(pairs_file)]), str(tmp_path / dtype))
        found = table(tmp_path / dtype)
        wanted = embedder.encode([f"the cat number {k} sat" for k in range(40)], **chosen)
        assert found.schema.field("dense").type == pa.list_(kind, wanted.shape[1])
        flat = found["dense"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        np.testing.assert_allclose(flat.reshape(wanted.shape), wanted, atol=1e-3)


def test_other_dimensions_or_prompts_are_another_job(embedder, tmp_path, pairs_file):
    rows = Rows([str(pairs_file)])
    run_job(EmbedRows(embedder, TextRows(), ("dense",), {}), rows, str(tmp_path / "out"))
    for name, value in (("dimensions", 8), ("prompt_name", "query"), ("output_dtype", "float16")):
        other = EmbedRows(embedder, TextRows(), ("dense",), {name: value})
        flag = name.replace("_", "-")
        with pytest.raises(ConfigError, match=rf"--{flag} \(computation\.options\.{name}\)"):
            run_job(other, rows, str(tmp_path / "out"))


def test_scores_and_labels_are_those_of_the_library(tmp_path, pairs_file, grid_file):
    texts = [f"the cat number {k} sat" for k in range(40)]
    query = "where is the cat"
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    for labels in (("LABEL_0",), ("bad", "fair", "good")):
        path = tmp_path / str(len(labels))
        save_scorer(path, labels=labels)
        with Embedder(str(path), cache_dir=tmp_path / "cache", config=config) as scorer:
            labelled = scorer.classify([(query, text) for text in texts])
            job = ClassifyRows(scorer, PAIRS, False)
            rows = Rows([str(pairs_file)], id_column="id")
            run_job(job, rows, str(path / "labels"))
            with pytest.raises(ConfigError, match=r"--raw-scores .*: false before, now true"):
                run_job(replace(job, raw_scores=True), rows, str(path / "labels"))
            if len(labels) == 1:
                ranked = {one.index: one.score for one in scorer.rerank(query, texts)}
                job = ScoreRows(scorer, PAIRS, False)
                run_job(job, Rows([str(pairs_file)]), str(path / "scores"))
                found = table(path / "scores")["score"].to_pylist()
                np.testing.assert_allclose(found, [ranked[k] for k in range(40)], atol=1e-5)
            else:
                with pytest.raises(WrongTask, match="it cannot rerank"):
                    ScoreRows(scorer, PAIRS, False).compute([(query, texts[0])])
        found = table(path / "labels")
        assert found["id"].to_pylist() == [str(k) for k in range(40)]
        for some, wanted in zip(found["labels"].to_pylist(), labelled, strict=True):
            assert [one["label"] for one in some] == [one.label for one in wanted]
            scores = [one.score for one in wanted]
            np.testing.assert_allclose([one["score"] for one in some], scores, atol=1e-5)


def test_entities_are_those_of_the_library(tmp_path, pairs_file, load_model):
    labels = ("O", "B-PER", "I-PER", "LOC")
    head = PerToken((DenseLayer(32, len(labels), activation="identity"),))
    path = save_tiny(tmp_path / "tagger", heads={"token_logits": head}, labels=labels)
    tagger = load_model(path, 4, 64)
    texts = [f"the cat number {k} sat" for k in range(40)]
    for strategy in ("none", "simple"):
        job = EntityRows(tagger, TextRows(), strategy)
        run_job(job, Rows([str(pairs_file)]), str(tmp_path / strategy))
        found = table(tmp_path / strategy)["entities"].to_pylist()
        for some, wanted in zip(found, tagger.token_classify(texts, strategy), strict=True):
            assert [Entity(**one | {"score": 0.0}) for one in some] == [
                replace(one, score=0.0) for one in wanted
            ]
            scores = [one.score for one in wanted]
            np.testing.assert_allclose([one["score"] for one in some], scores, atol=1e-6)
    with pytest.raises(ConfigError, match=r"--aggregation-strategy .*: .*simple.* before"):
        run_job(replace(job, strategy="none"), Rows([str(pairs_file)]), str(tmp_path / "simple"))


def test_an_embedder_scores_rows_by_its_vectors(embedder, tmp_path, pairs_file):
    check_task(embedder.name, embedder.spec, "rerank")  # as the command does before it loads
    job = ScoreRows(embedder, PAIRS, False)
    run_job(job, Rows([str(pairs_file)]), str(tmp_path / "out"))
    documents = embedder.encode_document([f"the cat number {k} sat" for k in range(40)])
    wanted = documents.astype(float) @ embedder.encode_query("where is the cat")
    found = table(tmp_path / "out")["score"].to_pylist()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_all_outputs_have_columns_of_their_kinds():
    dense = as_arrow(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert dense.type == pa.list_(pa.float32(), 2)
    assert dense.to_pylist() == [[0, 1], [2, 3], [4, 5]]
    indices = [np.array(one, np.int32) for one in ([1, 7], [], [2])]
    rows = SparseRows(9, indices, [np.array(one, np.float32) for one in ([0.5, 2], [], [1])])
    assert as_arrow(rows).to_pylist() == [
        {"indices": [1, 7], "values": [0.5, 2.0]},
        {"indices": [], "values": []},
        {"indices": [2], "values": [1.0]},
    ]
    ragged = Ragged(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 2, 2, 3]))
    assert as_arrow(ragged).to_pylist() == [[[0, 1], [2, 3]], [], [[4, 5]]]
