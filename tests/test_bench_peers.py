"""The load generator, comparisons with peers, pictures: tiny runs, and their arithmetic."""

import asyncio
import contextlib
import itertools
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import (
    bench_before,
    bench_http,
    bench_libraries,
    bench_peers,
    load,
    plots,
    report,
    subject,
    workloads,
)
from benchmarks.load import Closed, Open, Sample, Target

STATUS = b"HTTP/1.1 200 OK\r\n"


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


async def _served(answer, ask):
    """What `ask(target)` gives, of a server that gives `answer(body)` to every request."""

    async def client(reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.split("content-length: ")[1].split("\r\n")[0])
                writer.write(await answer(await reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await ask(Target(f"http://127.0.0.1:{port}/v1/embeddings", "m"))
    finally:
        server.close()


async def _short(body: bytes) -> bytes:
    return STATUS + b"Content-Length: 2\r\n\r\n{}"


# -- the load generator


@pytest.mark.parametrize(
    "answer",
    [
        STATUS + b"Content-Length: 5\r\n\r\nabcde",
        STATUS + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n",
    ],
)
def test_a_connection_reads_answers_one_after_the_other(answer):
    async def whole(body):
        return answer

    async def ask(target):
        async with load.Connections(target) as connections:
            connection = await connections.open()
            return [await connection.ask(target.request(["x"])) for _ in range(3)]

    assert asyncio.run(_served(whole, ask)) == [b"abcde"] * 3


def test_a_refused_request_ends_the_run_and_says_why():
    async def refuse(body):
        return b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy"

    async def ask(target):
        requests = itertools.repeat(target.request(["x"]))
        return await load.run(target, [(Closed("query", 1, 1), requests)], 0.05)

    with pytest.raises(OSError, match=r"429 too many: busy"):
        asyncio.run(_served(refuse, ask))


def test_a_closed_loop_keeps_as_many_requests_waiting_as_it_has_connections():
    waiting, most, all_wait = 0, 0, asyncio.Event()

    async def slow(body):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == 3:
            all_wait.set()
        await asyncio.wait_for(all_wait.wait(), 60)
        waiting -= 1
        return await _short(body)

    async def ask(target):
        requests = itertools.repeat(target.request(["x", "y"]))
        return await load.run(target, [(Closed("bulk", 2, 3), requests)], 0.1)

    (sample,) = asyncio.run(_served(slow, ask))
    assert most == 3
    assert sample.elapsed_s >= 0.1


def test_an_open_loop_counts_what_a_stalled_server_makes_others_wait():
    """The first answer takes 0.2 s and holds up the rest: a closed loop would have seen it once."""
    lock = asyncio.Lock()
    stalls = iter([0.2])

    async def stalling(body):
        async with lock:
            await asyncio.sleep(next(stalls, 0))
        return await _short(body)

    async def ask(target):
        requests = itertools.repeat(target.request(["x"]))
        return await load.run(target, [(Open("query", 1, 200.0), requests)], 0.1)

    (sample,) = asyncio.run(_served(stalling, ask))
    assert len(sample.latencies_s) == len(load.arrivals(200.0, 0.1))
    assert np.median(sample.latencies_s) > 0.1


def test_arrivals_are_seeded_and_as_many_as_asked_for():
    times = load.arrivals(100.0, 100.0, seed=3)
    assert np.array_equal(times, load.arrivals(100.0, 100.0, seed=3))
    assert not np.array_equal(times[:5], load.arrivals(100.0, 100.0, seed=4)[:5])
    assert len(times) == pytest.approx(10_000, rel=0.05)  # 5 standard deviations
    assert times[-1] < 100.0
    assert np.all(np.diff(times) > 0)


def test_rates_count_texts_and_percentiles_are_of_requests():
    row = Sample(Closed("bulk", 32, 4), [0.0, 0.1, 0.3], [0.1, 0.2, 0.3], 2.0).row()
    assert row["texts_per_s"] == 48.0
    assert row["p50_ms"] == pytest.approx(200.0)
    assert row["worst_ms"] == pytest.approx(300.0)


# -- texts


def test_no_single_query_is_in_bulk_and_none_comes_twice_in_a_row(tmp_path):
    (tmp_path / "msmarco").mkdir()
    (tmp_path / "scifact").mkdir()
    args = Namespace(texts=64, data=tmp_path, seed=0)
    texts = bench_http.Texts(args)
    assert not set(texts.single) & set(texts.bulk)
    requests = list(itertools.islice(texts.requests(Target("http://h/", "m"), 1, "float"), 32))
    assert len(set(requests)) == 32


@pytest.mark.skipif(not workloads.DATA.is_dir(), reason="no evaluation data beside the repository")
def test_mixed_texts_are_of_every_kind():
    texts = workloads.texts("mixed", 2000, data=workloads.DATA)
    assert len(set(texts)) == 2000
    for part in workloads.PARTS:
        real = workloads.real_texts(part, workloads.DATA)
        assert real is not None
        assert 0.15 < np.mean([text in set(real[0]) for text in texts[:200]]) < 0.40, part


def test_flops_of_windows_and_of_causal_attention():
    config = {"num_layers": 3, "global_layers": [0], "local_reach": 2}
    seen = sum(min(q + 2, 9) - max(q - 2, 0) + 1 for q in range(10))
    assert subject._pairs(config, np.array([10.0])) == 100 + 2 * seen
    assert subject._pairs({"num_layers": 2, "causal": True}, np.array([10.0])) == 2 * 55


# -- comparisons


def _round(number: int, server: str, bulk: float, lone: float, p99: float) -> list[dict]:
    about = {"round": number, "server": server, "p50_ms": lone, "p99_ms": p99, "p95_ms": p99}
    about |= {"texts_per_s": bulk, "worst_ms": p99, "client_cpu": 0.1, "requests": 1}
    shown = [("lone", "query"), ("bulk", "bulk"), ("under bulk", "query"), ("under bulk", "bulk")]
    return [about | {"scenario": scenario, "load": kind} for scenario, kind in shown]


def test_ratios_are_taken_within_a_round():
    rows = []
    for number, slow in enumerate((1.0, 10.0, 1.0)):  # the machine is slow in the second
        rows += _round(number, "jaxembed", 600 / slow, 2 * slow, 10 * slow)
        rows += _round(number, "infinity", 100 / slow, 10 * slow, 500 * slow)
    ratios = {row["figure"]: row for row in bench_peers.ratios_of(rows, "jaxembed", "infinity")}
    assert ratios["bulk texts/s"]["median"] == pytest.approx(6)
    assert ratios["lone query p50"]["median"] == pytest.approx(5)
    assert ratios["query p99 under bulk"]["least"] == pytest.approx(50)
    lone = [row for row in bench_peers.summary(rows) if row["scenario"] == "lone"]
    assert [(row["server"], row["p50_ms"]) for row in lone] == [("jaxembed", 2), ("infinity", 10)]


def test_an_older_commit_is_compared_with_itself_too(tmp_path, monkeypatch, capsys):
    started = []

    @contextlib.contextmanager
    def server(model, flags, checkout, until):
        started.append(checkout)
        yield SimpleNamespace(idle_share=lambda: 0.0)

    def measure(running, args):
        rows = [_round(n, name, 100.0, 2.0, 10.0) for n in range(3) for name in running]
        return [row for some in rows for row in some], {}

    monkeypatch.setattr(bench_before.servers, "jaxembed", server)
    monkeypatch.setattr(bench_before.bench_peers, "measure", measure)
    bench_before.main([str(tmp_path)])
    assert started == [report.ROOT, tmp_path, tmp_path]
    ratios = last_line(capsys)["ratios"]
    assert {row["server"] for row in ratios} == {"now", "before, again"}
    assert all(row["median"] == 1.0 for row in ratios)


ECHO = """
import base64, json, sys
import numpy as np
job = json.loads(sys.stdin.readline())
print(json.dumps({"python": "3"}), flush=True)
for line in sys.stdin:
    if line.strip():
        answer = 1.0 / int(line.split()[0])
    else:
        vectors = np.array([[3, 4]] * len(job["texts"]), "<f4")
        answer = base64.b64encode(vectors.tobytes()).decode()
    print(json.dumps(answer), flush=True)
"""


def test_a_library_is_run_with_the_batch_size_that_was_fastest(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(ECHO)
    monkeypatch.setattr(bench_libraries, "WORKER", tmp_path / "worker.py")
    one = bench_libraries.Contestant("x", Path(sys.executable), "onnxruntime", tmp_path, "int8")
    with bench_libraries.working(one, ["a", "b"]) as worker:
        assert worker.batch == max(bench_libraries.BATCHES)
        seconds = bench_libraries.measure([worker], 3)
        vectors = worker.vectors(2)
    assert seconds == {"x": [1 / worker.batch] * 3}
    assert vectors == pytest.approx(np.array([[0.6, 0.8]] * 2))
    times = seconds | {bench_libraries.OURS: [0.5 / worker.batch] * 3}
    row = bench_libraries.row_of(worker, times, {"x": vectors}, 100)
    assert row["times"] == 2
    assert row["tokens_per_s"] == 100 * worker.batch


# -- each program, tiny


@pytest.mark.slow
def test_bench_http_runs(tiny_checkpoint, grid_file, tmp_path, capsys):
    flags = ["--buckets", str(grid_file), "--max-batch-tokens", "128", "--devices", "1"]
    flags += ["--cache-dir", str(tmp_path), "--max-queue-tokens", "1000000"]
    arguments = ["--texts", "300", "--seconds", "0.2", "--bulk-per-s", "50"]
    arguments += ["--data", str(tmp_path), "--only", "1 connection,under bulk"]
    bench_http.main([str(tiny_checkpoint), *arguments, "--", *flags])
    rows = last_line(capsys)["results"]
    assert [(row["scenario"], row["load"], row["encoding"]) for row in rows] == [
        (scenario, kind, encoding)
        for scenario, kinds in (("1 connection", ["query"]), ("under bulk", ["query", "bulk"]))
        for encoding in ("float", "base64")
        for kind in kinds
    ]
    assert all(row["requests"] > 0 for row in rows)


MADE = {
    "device": "Some CPU",
    "cores": 2,
    "commit": "0123456789ab",
    "date": "2026-11-21",
    "versions": {"jax": "1", "jaxembed": "2"},
}


def test_a_picture_for_each_result_that_is_there(tmp_path):
    results = {
        "bench_libraries": {
            "model": "m",
            "texts": 512,
            "results": [{"library": "jaxembed", "tokens_per_s": 9e3}],
        },
        "bench_peers": {
            "model": "m",
            "bulk": 256,
            "summary": bench_peers.summary(
                [*_round(0, "jaxembed", 600, 2, 10), *_round(0, "infinity", 100, 10, 500)]
            ),
        },
        "bench_model": {
            "model": "m",
            "dtype": "float32",
            "buckets": [{"bucket": "1x16", "share": 0.5, "tflop_per_s": 0.1}],
        },
    }
    for name, result in results.items():
        assert not plots.draw(tmp_path / "absent")
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"made": MADE}))
    pictures = plots.draw(tmp_path)
    assert [path.name for path in pictures] == ["libraries.png", "http.png", "buckets.png"]
    assert all(5_000 < path.stat().st_size < 80_000 for path in pictures)
