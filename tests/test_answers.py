"""Recordings of answers: what is masked in them, and that a difference is found."""

import json
import sys

import pytest
from answers import record
from answers.masks import LENGTH, masked_body, masked_header

ID = "0123456789abcdef0123456789abcdef"
PLACES = {"/srv/tmp": "<folder>"}


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("x-ratelimit-reset-tokens", "6m0s", "<duration>"),
        ("retry-after", "27", "<seconds>"),
        ("retry-after", "5", "5"),
        ("x-request-id", ID, "<request id>"),
        ("x-request-id", "mine-1", "mine-1"),
        ("content-length", "3", LENGTH),
        ("content-length", "4", "4"),
    ],
)
def test_times_and_ids_of_headers_are_masked(name, value, kept):
    assert masked_header(name, value, PLACES, 3) == kept


@pytest.mark.parametrize(
    ("target", "body", "kept"),
    [
        ("/a", f'{{"id":"rerank-{ID}","a":0.5}}', '{"id":"rerank-<request id>","a":0.5}'),
        ("/a", '{"created":0,"unix":1795652573.25}', '{"created":0,"unix":<seconds>}'),
        ("/a", "/srv/tmp/a; try again in 7 s", "<folder>/a; try again in <seconds>"),
        ("/metrics", '# TYPE a gauge\na{x="1",y="2"} 3.0\nb 4\n', "# TYPE a gauge\na x y\nb"),
    ],
)
def test_times_ids_and_measurements_of_bodies_are_masked(target, body, kept):
    assert masked_body(target, body, PLACES) == kept


def test_a_difference_is_reported(tmp_path, monkeypatch, capsys):
    lines = [{"id": str(k), "status": 200, "answer": f"text {k}"} for k in range(3)]
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["record", "--compare", str(before), str(before)])
    assert record.main() == 0
    lines[1]["answer"] = "text, changed"
    after.write_text("\n".join(map(json.dumps, lines[:2])))
    monkeypatch.setattr(sys, "argv", ["record", "--compare", str(before), str(after)])
    assert record.main() == 1
    shown = capsys.readouterr().out
    assert "text, changed" in shown
    assert f"2: only in {before}" in shown
    assert "2 differences" in shown


@pytest.mark.slow
def test_front_ends_answer_as_one_process(tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    record.record(one, (), ("keyed", "repository"))
    record.record(several, ("--front-ends", "2"), ("keyed", "repository"))
    assert len(one.read_text().splitlines()) > 200
    assert list(record.differences(one, several)) == []
