"""Timings are kept by all that they depend on, and a damaged file is no reason not to start."""

import json

import pytest

from jaxembed.engine.autotune.cost_file import CostFile
from jaxembed.engine.bucket import Bucket

SHORT, LONG = Bucket(1, 16), Bucket(1, 64)
TIMINGS = {SHORT: [1.25, 1.5], LONG: [4.0]}
IDENTITY = {"content_hash": "a", "dtype": "float32", "versions": {"jax": "1"}}


def file_in(folder, kernel: str = "xla", **changes) -> CostFile:
    return CostFile(folder, IDENTITY | changes, lambda bucket: kernel)


def test_what_was_saved_is_loaded(tmp_path):
    file_in(tmp_path).save(TIMINGS)
    assert file_in(tmp_path).load() == TIMINGS
    (path,) = (tmp_path / "costs").iterdir()
    assert json.loads(path.read_text())["identity"] == IDENTITY


def test_another_model_or_version_or_kernel_has_other_costs(tmp_path):
    file_in(tmp_path).save(TIMINGS)
    assert file_in(tmp_path, content_hash="b").load() == {}
    assert file_in(tmp_path, versions={"jax": "2"}).load() == {}
    assert file_in(tmp_path, kernel="native").load() == {}
    mixed = CostFile(tmp_path, IDENTITY, lambda b: "xla" if b == SHORT else "triton")
    assert mixed.load() == {SHORT: TIMINGS[SHORT]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"timings": 5}',
        '{"timings": {"1x16": [1.0]}}',
        '{"timings": {"1x16 xla": []}}',
        '{"timings": {"1x16 xla": [0]}}',
        '{"timings": {"1x16 xla": ["fast"]}}',
        '{"timings": {"1x16 xla": [NaN]}}',
        '{"timings": {"1x16 xla": 3}}',
    ],
)
def test_a_damaged_file_is_ignored_and_told_of(tmp_path, caplog, text):
    file_in(tmp_path).save(TIMINGS)
    (path,) = (tmp_path / "costs").iterdir()
    path.write_text(text)
    assert file_in(tmp_path).load() == {}
    assert f"{path} is ignored" in caplog.text


def test_where_nothing_can_be_written_the_log_says_so(tmp_path, caplog):
    (tmp_path / "costs").write_text("in the way")
    file_in(tmp_path).save(TIMINGS)
    assert "cannot save the timings" in caplog.text
