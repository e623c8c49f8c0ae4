"""Programs that measure servers run, on a tiny model and a short load."""

import json

import pytest

from benchmarks import bench_host, bench_http, soak


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(name="flags")
def _flags(grid_file, tmp_path) -> list[str]:
    """Of a server that has few buckets and a cache of its own."""
    flags = ["--buckets", str(grid_file), "--max-batch-tokens", "128", "--devices", "1"]
    return [*flags, "--cache-dir", str(tmp_path), "--max-queue-tokens", "1000000"]


@pytest.mark.slow
def test_bench_http_runs(tiny_checkpoint, flags, tmp_path, capsys):
    arguments = ["--texts", "300", "--seconds", "0.2", "--bulk-per-s", "50"]
    arguments += ["--data", str(tmp_path), "--only", "1 connection,under bulk"]
    bench_http.main([str(tiny_checkpoint), *arguments, "--", *flags])
    rows = last_line(capsys)["results"]
    assert [(row["scenario"], row["load"]) for row in rows] == [
        *[("1 connection", "query")] * 2,  # floats, then base64
        *[("under bulk", "query"), ("under bulk", "bulk")] * 2,
    ]
    assert all(row["requests"] > 0 for row in rows)


@pytest.mark.slow
def test_bench_host_and_soak_run(tiny_checkpoint, flags, capsys):
    arguments = [str(tiny_checkpoint), "--data", "none"]
    bench_host.main([*arguments, "--texts", "256", "--seconds", "0.3", "--", *flags])
    rows = last_line(capsys)["results"]
    assert len(rows) == 10
    assert all(row["requests"] > 0 and row["server_us"] > 0 for row in rows)
    soak.main([*arguments, "--texts", "64", "--requests", "50", "--", "--null-model", *flags])
    found = last_line(capsys)["results"]
    assert [row["requests"] for row in found] == [50 * k // 20 for k in range(21)]
    assert all(row["resident_mib"] > 10 for row in found)
