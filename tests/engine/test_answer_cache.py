"""Answers that are kept: which are found again, and how many."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fakes import WAIT_S, SumRunner, encoding, future_of, sums
from test_routes import save_routed

from jaxembed import Embedder, EngineConfig
from jaxembed.config import ServerConfig
from jaxembed.data.work import SparseRows
from jaxembed.engine.answer_cache import ANSWER_OVERHEAD_BYTES, ROW_OVERHEAD_BYTES, AnswerCache
from jaxembed.engine.future import WorkFuture
from jaxembed.engine.recovery import Answers
from jaxembed.errors import BackendError, NotFinite
from jaxembed.observability.metrics import Telemetry
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models

BIG = 2**20
ONE = ANSWER_OVERHEAD_BYTES + 4 + 4  # bytes of a token's sum: the values, and the tokens in its key


def interactive(*ids: int, **options) -> WorkFuture:
    future = future_of([encoding(one) for one in ids], **options)
    future.interactive = True
    return future


def sums_of(future: WorkFuture) -> Answers:
    """What a SumRunner would answer to these single tokens."""
    values = [[float(sequence.ids[0])] for sequence in future.sequences]
    return Answers(future.sequences, {"dense": np.array(values, np.float32)})


def kept(cache: AnswerCache, *ids: int) -> list[int]:
    """Which of these single tokens the cache has."""
    future = future_of([encoding(one) for one in ids])
    found = cache.take(future)
    return [] if found is None else [int(sequence.ids[0]) for sequence in found.sequences]


def counts(telemetry: Telemetry) -> tuple[float, float, float]:
    lines = telemetry.exposition().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = ("jaxembed_cache_hits", "jaxembed_cache_misses", "jaxembed_cache_bytes")
    return tuple(float(values[name]) for name in names)


def test_the_answer_to_a_question_is_computed_once(start, runner):
    engine = start(runner, cache_bytes=BIG)
    first = engine.ask([encoding(5, 6), encoding(7)])
    assert sums(first) == [11, 7]
    runs = len(runner.ran)
    again = engine.ask([encoding(7), encoding(5, 6), encoding(7)])
    assert sums(again) == [7, 11, 7]
    assert len(runner.ran) == runs
    assert (first.cached_inputs, again.cached_inputs) == (0, 3)
    assert again.queue_s.tolist() == again.inference_s.tolist() == [0, 0, 0]
    assert counts(engine.telemetry)[:2] == (3, 2)


def test_a_waiter_is_woken_once_by_answers_that_are_all_kept(start, runner):
    engine = start(runner, cache_bytes=BIG)
    assert sums(engine.ask([encoding(5)])) == [5]
    woken: list[int] = []
    assert sums(engine.ask([encoding(5), encoding(5)], wake=lambda: woken.append(1))) == [5, 5]
    assert woken == [1]


def test_only_what_is_missing_is_queued(start, runner):
    engine = start(runner, cache_bytes=BIG)
    assert sums(engine.ask([encoding(5, 6)])) == [11]
    runner.gate.clear()
    engine.ask([encoding(9)])
    assert runner.entered.acquire(timeout=WAIT_S)
    assert runner.entered.acquire(timeout=WAIT_S)
    future = engine.ask([encoding(5, 6), encoding(8, 8, 8), encoding(8, 8, 8)])
    assert engine.waiting == (2, 6)
    runner.gate.set()
    assert sums(future) == [11, 24, 24]
    assert engine.waiting == (0, 0)


def test_bulk_work_finds_and_keeps_nothing(start, runner):
    engine = start(runner, cache_bytes=BIG)
    assert sums(engine.ask([encoding(5)], priority="interactive")) == [5]
    for _ in range(2):
        future = engine.ask([encoding(5), encoding(6)], priority="bulk")
        assert sums(future) == [5, 6]
        assert future.cached_inputs == 1
    assert sums(engine.ask([encoding(6)], priority="interactive")) == [6]
    assert engine.ask([encoding(6)], priority="bulk").cached_inputs == 1


def test_a_failed_answer_is_not_kept(start, runner):
    engine = start(runner, cache_bytes=BIG)
    for _ in range(2):
        future = engine.ask([encoding(SumRunner.BAD)])
        with pytest.raises(NotFinite):
            future.result(WAIT_S)
        assert future.cached_inputs == 0


def test_a_closed_engine_answers_nothing_and_frees_what_it_kept(start, runner):
    engine = start(runner, cache_bytes=BIG)
    assert sums(engine.ask([encoding(5)])) == [5]
    assert counts(engine.telemetry)[2] == ONE
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        engine.ask([encoding(5)])
    engine.free()
    assert counts(engine.telemetry)[2] == 0


def test_what_was_used_last_stays_and_what_is_larger_than_the_cache_is_not_kept():
    cache = AnswerCache(2 * ONE, telemetry := Telemetry())
    cache.keep(sums_of(interactive(5, 6)))
    assert kept(cache, 5) == [5]
    cache.keep(sums_of(interactive(7)))
    assert kept(cache, 5, 6, 7) == [5, 7]
    assert counts(telemetry)[2] == 2 * ONE
    cache = AnswerCache(ONE - 1, Telemetry())
    cache.keep(sums_of(interactive(5)))
    assert kept(cache, 5) == []


def test_an_answer_is_counted_once_and_is_no_view_of_a_batch():
    cache = AnswerCache(BIG, telemetry := Telemetry())
    answers = sums_of(interactive(6))
    for _ in range(3):
        cache.keep(answers)
    assert counts(telemetry)[2] == ONE
    answers.values["dense"][:] = 0
    found = cache.take(future_of([encoding(6)]))
    assert found.values["dense"].tolist() == [[6]]


def test_outputs_are_kept_one_by_one():
    cache = AnswerCache(BIG, Telemetry())
    both = frozenset({"dense", "logits"})
    widths = {"dense": 1, "logits": 1}
    cache.keep(sums_of(interactive(5)))
    assert cache.take(future_of([encoding(5)], both, widths=widths)) is None
    asked = interactive(5, outputs=both, widths=widths)
    values = {"dense": np.full((1, 1), 5, np.float32), "logits": np.full((1, 1), 9, np.float32)}
    cache.keep(Answers(asked.sequences, values))
    found = cache.take(future_of([encoding(5)], both, widths=widths))
    assert found.values["logits"].tolist() == [[9]]


def test_outputs_by_token_are_not_kept():
    cache = AnswerCache(BIG, telemetry := Telemetry())
    names = frozenset({"dense", "tokens"})
    future = interactive(5, outputs=names)
    row = np.full((1, 1), 5, np.float32)
    cache.keep(Answers(future.sequences, {"dense": row, "tokens": [row]}))
    assert cache.take(future_of([encoding(5)], names)) is None
    assert counts(telemetry)[:2] == (0, 0)  # it was not looked for
    assert kept(cache, 5) == [5]


def test_sparse_answers_are_kept_whole():
    cache = AnswerCache(BIG, telemetry := Telemetry())
    names, widths = frozenset({"sparse"}), {"sparse": 9}
    future = interactive(5, outputs=names, widths=widths)
    indices, values = np.array([2, 7], np.int32), np.array([0.5, 1.5], np.float32)
    cache.keep(Answers(future.sequences, {"sparse": SparseRows(9, [indices], [values])}))
    assert counts(telemetry)[2] == ANSWER_OVERHEAD_BYTES + 4 + ROW_OVERHEAD_BYTES + 16
    values[:] = 0
    found = cache.take(future_of([encoding(5)], names, widths=widths))
    rows = found.values["sparse"]
    assert (rows.indices[0].tolist(), rows.values[0].tolist()) == ([2, 7], [0.5, 1.5])


def test_an_answer_over_http_is_the_same_from_the_cache(tmp_path, tiny_checkpoint):
    (tmp_path / "grid.json").write_text('{"buckets": [[1, 64]]}')  # in others the last bits differ
    grid, path = tmp_path / "grid.json", str(tiny_checkpoint)
    config = EngineConfig(dtype="float32", buckets=grid, max_batch_tokens=64, devices=1)
    with Embedder(path, cache_dir=tmp_path / "cache", config=config) as plain:
        wanted, without = plain.encode(["red dog"], normalize=False), plain.model.resident_bytes
    cached = replace(config, cache_bytes=BIG)

    async def go():
        with Embedder(path, cache_dir=tmp_path / "cache", config=cached) as embedder:
            assert embedder.model.resident_bytes == without + BIG
            client = create_app(Models([embedder.model]), ServerConfig()).test_client()
            headers: list[str | None] = []
            for body in ({}, {"normalize": False}, {"dimensions": 8}, {"truncate": False}):
                response = await client.post("/embed", json={"inputs": "red dog", **body})
                assert response.status_code == 200
                headers.append(response.headers.get("x-cache-hits"))
                if body == {"normalize": False}:
                    vectors = await response.get_json()
            info = await (await client.get("/info")).get_json()
            assert info["jaxembed"]["cache_bytes"] == BIG
            return headers, vectors

    headers, vectors = asyncio.run(go())
    assert headers == [None, "1", "1", "1"]
    np.testing.assert_array_equal(np.array(vectors, np.float32), wanted)


def test_the_towers_of_a_router_divide_the_cache(tmp_path, grid_file):
    path = save_routed(tmp_path / "routed", "document")
    config = EngineConfig(buckets=grid_file, max_batch_tokens=128, devices=1, cache_bytes=BIG)
    with Embedder(str(path), cache_dir=tmp_path / "cache", config=config) as embedder:
        sizes = [vars(one.engine)["_cache"]._max_bytes for one in embedder.model.routes.values()]
    assert sizes == [BIG // 2, BIG // 2]
