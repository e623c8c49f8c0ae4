"""Benchmarks of the host: each runs, on a tiny model and a short load."""

import json
import time

import psutil
import pytest

from benchmarks import bench_host, soak
from benchmarks.load import Target
from benchmarks.servers import Server


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(name="flags")
def flags_fixture(grid_file, tmp_path):
    """Of a server that has few buckets and a cache of its own."""
    flags = ["--buckets", str(grid_file), "--max-batch-tokens", "128", "--devices", "1"]
    return [*flags, "--cache-dir", str(tmp_path), "--max-queue-tokens", "1000000"]


@pytest.mark.slow
def test_bench_host_says_what_a_request_and_a_text_cost(tiny_checkpoint, flags, capsys):
    arguments = [str(tiny_checkpoint), "--data", "none", "--texts", "256", "--seconds", "0.3"]
    bench_host.main([*arguments, "--", *flags])
    rows = last_line(capsys)["results"]
    assert [(row["load"], row["encoding"]) for row in rows] == [
        ("nothing", ""),
        ("1 connection", "float"),
        ("1 connection", "base64"),
        ("32 connections", "float"),
        ("32 connections", "base64"),
        ("bulk of 32", "float"),
        ("bulk of 32", "base64"),
        ("bulk of 256", "float"),
        ("bulk of 256", "base64"),
        ("bulk of 256, ids", "base64"),
    ]
    assert all(row["requests"] > 0 and row["server_us"] > 0 for row in rows)
    assert all(("lag_p99_ms" in row) == row["load"].startswith("bulk") for row in rows)


def test_what_was_measured_while_a_bucket_was_timed_is_measured_again():
    timings = iter([0, 1, 1, 1])
    server = Server(Target("", ""), psutil.Process(), lambda: {"timings": next(timings)})
    rows = iter([{"p50_ms": 25.0}, {"p50_ms": 2.8}])
    assert bench_host.undisturbed(server, lambda: next(rows), tries=2) == {"p50_ms": 2.8}
    never = Server(Target("", ""), psutil.Process(), lambda: {"timings": time.perf_counter()})
    with pytest.raises(RuntimeError, match="in each of 3 tries"):
        bench_host.undisturbed(never, dict, tries=3)


@pytest.mark.slow
def test_soak_says_what_is_resident_as_requests_go_by(tiny_checkpoint, flags, capsys):
    arguments = [str(tiny_checkpoint), "--data", "none", "--texts", "64", "--requests", "50"]
    soak.main([*arguments, "--", "--null-model", *flags])
    found = last_line(capsys)
    assert [row["requests"] for row in found["results"]] == [50 * k // 20 for k in range(21)]
    assert all(row["resident_mib"] > 10 for row in found["results"])


def test_the_slope_is_in_bytes_for_each_request():
    rows = [{"requests": n, "resident_mib": 100 + n / 1024} for n in (0, 10, 20)]
    assert soak.slope_of(rows) == pytest.approx(1024)
