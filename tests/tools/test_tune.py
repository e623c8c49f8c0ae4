"""Tuning on a tiny model: the parts by themselves, then all of it."""

import dataclasses
import json
import socketserver
import threading
import time
from urllib.parse import quote, unquote

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import LIMIT, WORDS, save_tiny

from jaxembed import EngineConfig, TextConfig
from jaxembed.checkpoints.source import ModelSource
from jaxembed.cli import cli
from jaxembed.data.spec import DenseLayer
from jaxembed.data.work import work_from_encodings
from jaxembed.engine.autotune.kernels import Choice
from jaxembed.engine.batch import HOST_MS
from jaxembed.engine.bucket import Bucket, BucketGrid, default_grid, read_grid
from jaxembed.engine.build import make_plan
from jaxembed.errors import BackendError, ConfigError, WrongTask
from jaxembed.models import program
from jaxembed.models.attention import by_native
from jaxembed.observability.metrics import Telemetry, exposition
from jaxembed.tools.tune import lengths as lengths_module
from jaxembed.tools.tune import traffic as traffic_module
from jaxembed.tools.tune.cost import BucketCost, CostTable, MeasuredModel, load_measured, probes
from jaxembed.tools.tune.lengths import Lengths, of_file, of_server, of_texts
from jaxembed.tools.tune.report import draw, table
from jaxembed.tools.tune.traffic import (
    Comparison,
    Figures,
    GridTrial,
    RoundTimes,
    compare,
    predict_figures,
    traffic_of,
    trial_engine,
)
from jaxembed.tools.tune.tuning import Budget, GridResult, Search, Tuning, _Tuner, objective, tune


def mix(*lengths: int) -> Lengths:
    return Lengths(np.bincount(lengths), "some texts")


def test_a_small_draw_has_the_lengths_of_all():
    some = mix(*[5] * 90, *[50] * 10)
    for seed in range(5):
        assert sorted(some.draw(10, np.random.default_rng(seed))) == [5] * 9 + [50]


def test_lengths_over_the_limit_are_cut_to_it():
    assert mix(2, 5, 9, 9).cut(5).counts.tolist() == [0, 0, 1, 0, 0, 3]
    assert mix(2).cut(5).counts.tolist() == [0, 0, 1]


def test_texts_are_counted_in_chunks_and_sampled(monkeypatch):
    monkeypatch.setattr(lengths_module, "SAMPLE", 50)
    monkeypatch.setattr(lengths_module, "TEXTS_COUNTED_AT_ONCE", 8)
    texts = ["a" * (1 + k // 1000) for k in range(4000)]  # sorted: the first are no sample
    some = of_texts(iter(texts), lambda chunk: [len(text) for text in chunk], "texts")
    assert some.total == 50
    assert some.present.tolist() == [1, 2, 3, 4]
    assert of_texts(iter(texts[:9]), lambda chunk: [len(t) for t in chunk], "few").total == 9


@pytest.mark.parametrize("text", ["[3, 3, 10]", '{"10": 1, "3": 2, "4": 0}'])
def test_lengths_are_read_from_json(tmp_path, text):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    some = of_file(path)
    assert some.counts[[3, 10]].tolist() == [2, 1]
    assert some.total == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", " is empty"),
        ("nine", " is not valid JSON at line 1, column 1"),
        ("3", " holds 3"),
        ("[9, 1.5]", ": 1.5 is not a length"),
        *((f"[{one}]", f": {one} is not a length") for one in ('"9"', "true", "0")),
        ('{"-9": 1}', ': "-9" is not a length'),
        ('{"9": "2"}', ': "2" is not a number of inputs of 9 tokens'),
        ('{"9": -1}', ": -1 is not a number of inputs of 9 tokens"),
        (f'{{"9": {10**19}}}', f": {10**19} is not a number of inputs of 9 tokens"),
    ],
)
def test_another_shape_is_refused_with_what_came_and_what_was_wanted(tmp_path, text, problem):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        of_file(path)
    message = str(raised.value)
    assert message.startswith(f"{path}{problem}")
    assert "; expected a list of lengths such as [9" in message
    assert message.endswith("; texts go into a .txt or .jsonl file")
    path.write_text('{"9": 0}')
    with pytest.raises(ConfigError, match="has no inputs"):
        of_file(path)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        of_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"# TYPE a counter\na 1\n", "has no series jaxembed_input_tokens"),
        (b"<html>", "does not return metrics"),
        (b"\xff\xfe{", "does not return metrics"),
        # prometheus_client 0.21 reads it
        (b'a_bucket{le="1", ="e"} 1\n', "(does not return metrics|has no series jaxembed_)"),
    ],
)
def test_what_is_no_server_of_ours_is_refused(metrics_url, answer, message):
    with pytest.raises(ConfigError, match=f"/metrics {message}.*{OURS}"):
        of_server(metrics_url(answer))


class Broken(socketserver.StreamRequestHandler):
    """Answers what its path says, unquoted."""

    def handle(self):
        path = self.rfile.readline().split()[1].decode()
        while self.rfile.readline().strip():
            pass
        self.wfile.write(unquote(path.split("/")[1]).encode())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("HTTP/1.1 404 \r\nContent-Length: 0\r\n\r\n", "HTTP 404 Not Found"),
        ("HTTP/1.1 401 Nope\r\nContent-Length: 0\r\n\r\n", "HTTP 401 Unauthorized"),
        ("HTTP/1.1 599 \r\nContent-Length: 0\r\n\r\n", "HTTP 599"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n#", "the response is not HTTP"),
        ("220 mail\r\n", "the response is not HTTP"),
    ],
)
def test_an_answer_that_is_none_is_told_with_its_reason(answer, reason):
    with socketserver.TCPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/{quote(answer, safe='')}"
        with pytest.raises(ConfigError) as raised:
            of_server(url)
        thread.join()
    assert f"cannot read {url}/metrics: {reason}{OURS}" in str(raised.value)


@pytest.fixture(name="metrics_url")
def _metrics_url(tmp_path):
    """A URL whose /metrics is what `put` was given."""

    def put(text: bytes) -> str:
        (tmp_path / "metrics").write_bytes(text)
        return f"file://{tmp_path}"

    return put


def counted(*lengths: int) -> Telemetry:
    telemetry = Telemetry(LIMIT)
    telemetry.input_length.observe_many(lengths)
    return telemetry


def test_lengths_are_read_from_the_metrics_of_a_server(metrics_url):
    some = of_server(metrics_url(counted(*[12] * 8, *[64] * 8).exposition()))
    assert some.total == 16
    assert some.counts[9:17].tolist() == [1] * 8  # within a bucket nobody knows
    assert some.counts[57:65].tolist() == [1] * 8


def test_of_several_models_one_must_be_named(metrics_url):
    url = metrics_url(exposition({"a": counted(5), "b": counted(5, 5)}))
    assert of_server(url, "b").total == 2
    with pytest.raises(ConfigError, match="serves a, b; choose one with --served-model-name"):
        of_server(url)
    with pytest.raises(ConfigError, match="serves a, b, not c; choose one with --served-model"):
        of_server(url, "c")


OURS = "; expected the URL of a running jaxembed server, such as http://127.0.0.1:8080; one with "


def costs(ms_of, buckets) -> dict[Bucket, BucketCost]:
    return {bucket: BucketCost(ms_of(bucket), 1.0, bucket.tokens) for bucket in buckets}


def physical(bucket: Bucket) -> float:
    """Something for each batch, each token, and each pair of tokens of a row."""
    return 1.0 + 0.01 * bucket.tokens + 2e-5 * bucket.tokens * bucket.length


def test_costs_between_those_measured_are_read_off_lines():
    known = [Bucket(r, n) for n in (16, 64) for r in (1, 4, 64)]
    prices = CostTable(costs(physical, known))
    for bucket in (*known, Bucket(32, 16), Bucket(32, 32), Bucket(7, 48)):
        assert prices.ms(bucket) == pytest.approx(physical(bucket))
    # a token is no cheaper in a larger bucket than all that were measured
    assert prices.ms(Bucket(128, 64)) == pytest.approx(2 * prices.ms(Bucket(64, 64)))
    assert prices.ms(Bucket(1, 8)) == pytest.approx(physical(Bucket(1, 16)) / 2)
    assert prices.ms(Bucket(1, 128)) >= prices.ms(Bucket(1, 64))


@pytest.mark.parametrize("shards", [1, 4])
def test_probes_are_few_and_divide_over_the_devices(shards):
    chosen = probes([8, 64, 256], 4096, shards)
    assert len(chosen) == len(set(chosen)) <= 12
    assert all(bucket.rows % shards == 0 for bucket in chosen)
    assert {bucket.length for bucket in chosen} == {8, 64, 256}


def test_the_objective_is_of_all_loads_and_no_load_may_lose():
    before = Figures(1000.0, 0.9, 10.0, 2.0, 2.0, 2.0)
    faster = Figures(2000.0, 0.9, 10.0, 2.0, 2.0, 2.0)
    lone_loses = Figures(2000.0, 0.9, 10.0, 4.0, 4.0, 4.0)
    assert objective(before, before) == 0
    assert objective(faster, before) == pytest.approx(0.5 * np.log(0.5))
    assert objective(lone_loses, before) > 0
    assert objective(lone_loses, before, slack=100.0) < 0


def test_a_prediction_adds_up_the_batches_of_the_engine():
    traffic = traffic_of(mix(8), vocab_size=1000, full_tokens=800, seed=0)
    one_by_one = predict_figures(traffic, {Bucket(1, 8): 2.0, Bucket(10, 8): 5.0}, max_sequences=1)
    assert one_by_one.full_tokens_per_s == pytest.approx(8000 / (2 + HOST_MS))
    ten_at_a_time = predict_figures(traffic, {Bucket(1, 8): 2.0, Bucket(10, 8): 5.0})
    assert ten_at_a_time.full_tokens_per_s == pytest.approx(80_000 / (5 + HOST_MS))
    assert (ten_at_a_time.full_fill, ten_at_a_time.lone_p50_ms) == (1.0, 2.0 + HOST_MS)


def test_long_sequences_cost_their_pairs_in_any_bucket():
    traffic = traffic_of(mix(8), vocab_size=1000, full_tokens=800, seed=0)
    figures = predict_figures(traffic, {Bucket(10, 8): 5.0}, pair_ms=0.01)
    assert figures.lone_p50_ms == pytest.approx(5 + HOST_MS + 0.64)
    batches = len(traffic.full) / 10
    taken_ms = batches * (5 + HOST_MS) + len(traffic.full) * 0.64
    assert figures.full_tokens_per_s == pytest.approx(traffic.full_tokens / taken_ms * 1000)


def searched(lengths: Lengths, max_buckets: int = 8) -> set[Bucket]:
    lattice = [Bucket(r, n) for n in (8, 32, 64) for r in (1, 4, 16, 64) if r * n <= 1024]
    prices = CostTable(costs(physical, lattice))
    traffic = traffic_of(lengths, 1000, 2048, seed=0)
    before = predict_figures(traffic, {b: prices.ms(b) for b in (Bucket(1, 64), Bucket(16, 64))})
    search = Search(
        prices,
        traffic,
        before,
        [bucket for bucket in lattice if prices.ms(bucket) <= 40],
        Bucket(1, 64),
        lambda buckets: len(list(buckets)) <= max_buckets,
        time.monotonic() + 60,
    )
    return set(search.run())


def test_the_search_finds_short_rows_for_short_texts_and_none_for_long():
    short, long = searched(mix(*range(5, 9))), searched(mix(*range(50, 65)))
    assert Bucket(1, 8) in short
    assert max(bucket.tokens for bucket in short) >= 512  # and large ones for a full queue
    assert max(bucket.tokens for bucket in long) >= 512
    assert not [bucket for bucket in long if bucket.length == 8]
    assert Bucket(1, 64) in short & long  # whatever comes has a place


def test_the_search_keeps_to_the_compile_budget():
    assert searched(mix(8), max_buckets=1) == {Bucket(1, 64)}
    assert len(searched(mix(*range(1, 65)), max_buckets=3)) <= 3


RERANKER = {
    "labels": ("LABEL_0",),
    "score_function": "sigmoid",
    "pooling": ("cls",),
    "modules": (DenseLayer(32, 1, activation="identity"),),
}
WORK = Budget(seconds=2.0, max_buckets=4, rounds=1)


@pytest.fixture(name="few_texts")
def _few_texts(monkeypatch):
    """Little to do under each load."""
    for name, value in {"LONE": 4, "REQUESTS": 1, "MIN_TEXTS": 8}.items():
        monkeypatch.setattr(traffic_module, name, value)


@pytest.fixture(name="model", scope="module")
def _model(tiny_checkpoint, grid_file, tmp_path_factory):
    config = EngineConfig(dtype="float32", buckets=grid_file, max_batch_tokens=128)
    cache = tmp_path_factory.mktemp("cache")
    model = load_measured(
        ModelSource(str(tiny_checkpoint), cache_dir=cache), config=config, text=TextConfig()
    )
    yield model
    model.close()


@pytest.fixture(name="opened")
def _opened(model, few_texts) -> MeasuredModel:
    """Shared: what is changed of it is put back."""
    return model


def test_a_tuned_grid_holds_every_input_and_can_be_served(opened, tmp_path, monkeypatch):
    seen = []
    tuning = tune(opened, mix(*[7] * 20, 9, 500), WORK, lambda *step: seen.append(step))
    path = tmp_path / "found.json"
    tuning.write(path)
    given = read_grid(path)
    assert given.tuned["lengths"]["longest"] == LIMIT  # what is longer is cut
    assert given.tuned["dtype"] == "float32"
    assert len(given.buckets) <= max(4, len(tuning.before.grid.buckets))
    config = EngineConfig(dtype="float32", devices=1, buckets=path)
    made = make_plan(opened.spec, program(opened.spec), config, tmp_path)
    assert made.grid.max_length == LIMIT
    assert set(made.timings) == set(made.grid.buckets)  # so that a server times nothing
    assert tuning.after.grid.max_length == LIMIT
    assert {what for what, _, _ in seen} >= {"measuring buckets of the current grid", "searching"}
    draw(tuning, tmp_path / "found.svg")
    bars = (tmp_path / "found.svg").read_text().count("fill: #1f77b4")
    assert bars == 3  # of the inputs' lengths: 7, 9 and the limit
    shown = table(tuning)
    for part in ("tokens/s", "p95", "compile s", "temporary MB", "22 inputs of some texts"):
        assert part in shown
    monkeypatch.setattr(type(tuning), "is_better", False)  # then the grid in use is kept
    tuning.write(path)
    assert read_grid(path).buckets == tuning.before.grid.buckets
    assert isinstance(tuning.before.grid, BucketGrid)


@pytest.mark.parametrize(
    ("rates", "buckets", "better"),
    [
        ([1100, 1100, 1090], 4, True),
        ([1001, 999, 1000], 4, False),  # no better
        ([1000, 1001, 999], 1, False),  # fewer buckets, but not by enough
        ([999, 1001, 1000], 0, True),  # as fast, and much less to compile
        ([900, 900, 900], 0, False),
        ([1500, 800, 800], 4, False),  # one round is no proof
    ],
)
def test_a_grid_is_better_where_the_rounds_agree(opened, rates, buckets, better):
    def side(count):
        grid = BucketGrid(tuple(Bucket(1, n + 1) for n in range(count)))
        return GridResult(grid, {}, rated(1000), rated(1000))

    def rated(rate):
        return Figures(float(rate), 0.9, 10.0, 2.0, 2.0, 2.0)

    comparison = Comparison([rated(1000)] * 3, [rated(rate) for rate in rates])
    before, after = side(4), side(buckets)
    assert Tuning(opened, mix(9), before, after, comparison, 1.0).is_better is better


def test_each_grid_runs_on_its_own_buckets_of_the_one_engine(opened, monkeypatch):
    few, more = BucketGrid((Bucket(2, 64),)), BucketGrid((Bucket(1, 16), Bucket(2, 64)))
    vocabulary = int(opened.spec.config["vocab_size"])
    traffic = traffic_of(mix(8), vocabulary, full_tokens=100, seed=0)
    ran, run = set(), opened.workbench.run

    def noted(bucket, *arguments, **options):
        ran.add(bucket)
        return run(bucket, *arguments, **options)

    monkeypatch.setattr(opened.workbench, "run", noted)
    for bucket in more.buckets:
        opened.workbench.compile(bucket)
        cost = dataclasses.replace(opened.workbench.costs[bucket], ms=float(bucket.tokens))
        monkeypatch.setitem(opened.workbench.costs, bucket, cost)
    bench = opened.workbench
    with trial_engine(bench, (few, more), opened.spec.widths, "cpu") as engine:
        trials = {grid: GridTrial(bench, engine, grid) for grid in (few, more)}
        for grid in (few, more, few):
            ran.clear()
            turns = RoundTimes()
            trials[grid].run(traffic, turns)
            assert ran <= set(grid.buckets)
            assert (Bucket(1, 16) in ran) == (grid is more)  # for one short text it costs less
            assert turns.full_tokens <= turns.padded
    with pytest.raises(BackendError, match="closed"):
        engine.submit(work_from_encodings(traffic.lone[:1]))


def test_two_grids_take_turns_and_each_goes_first_as_often():
    order = []

    class Noted(GridTrial):
        def __init__(self, ms):
            self.ms = ms

        def run(self, traffic, turns):
            order.append(self.ms)
            turns.full_tokens, turns.padded = turns.full_tokens + 100, turns.padded + 125
            turns.full_ms += self.ms
            turns.requests.append(self.ms)
            turns.lone.append(self.ms / 10)

    traffic = traffic_of(mix(8), vocab_size=1000, full_tokens=800, seed=0)
    comparison = compare(Noted(20.0), Noted(10.0), traffic, rounds=3)
    firsts = order[2::2]  # the first two are warm-ups
    assert firsts.count(20.0) == firsts.count(10.0) == len(order[2:]) / 4
    assert comparison.by_round == pytest.approx(np.full((3, 3), 0.5))
    assert comparison.after[0].full_tokens_per_s == pytest.approx(10_000)
    assert comparison.after[0].full_fill == pytest.approx(0.8)


def joined(opened, shards=1, **choice) -> MeasuredModel:
    """The model with a grid that has a row longer than the limit."""
    grid = default_grid(LIMIT, 4 * LIMIT, join=True)
    plan = dataclasses.replace(opened.plan, kernels=Choice(**choice), grid=grid, shards=shards)
    return dataclasses.replace(opened, plan=plan)


def tuner_of(model: MeasuredModel, *lengths: int) -> _Tuner:
    return _Tuner(model, mix(*lengths), WORK, 0.0, lambda *step: None)


def test_a_row_may_hold_several_of_the_longest_inputs_where_it_costs_no_more_for_that(opened):
    plan = dataclasses.replace(opened.plan, kernels=Choice(native=by_native))
    tuner = tuner_of(dataclasses.replace(opened, plan=plan), 9, 30, 33)
    assert [n for n in tuner._lengths() if n % 16] in ([], [LIMIT])  # which the kernels take
    joining = joined(opened, native=by_native, joins=True)
    assert tuner_of(joining, 9)._lengths()[-2:] == [LIMIT, 4 * LIMIT]  # that are in use
    beyond = [n for n in tuner_of(joining, LIMIT)._lengths() if n > LIMIT]
    assert len(beyond) > 2
    assert max(beyond) == 4 * LIMIT
    assert tuner_of(joined(opened, native=by_native), LIMIT)._lengths()[-2:] == [LIMIT, 4 * LIMIT]
    shared = tuner_of(joined(opened, shards=2, native=by_native, joins=True), LIMIT)
    assert [n for n in shared._lengths() if n > 2 * LIMIT] == [4 * LIMIT]


def test_texts_are_counted_as_the_server_would(opened):
    text = " ".join(WORDS[:5])
    assert opened.count_tokens([text, " ".join(WORDS * 9)]) == [7, LIMIT]


def test_texts_do_not_say_how_long_pairs_are(tmp_path):
    path = save_tiny(tmp_path / "ranker", **RERANKER)
    config = EngineConfig(dtype="float32", max_batch_tokens=64)
    model = load_measured(
        ModelSource(str(path), cache_dir=tmp_path), config=config, text=TextConfig()
    )
    with pytest.raises(WrongTask, match="do not tell the lengths of pairs"):
        model.count_tokens(["the cat"])
    model.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("none.txt", "cannot read none.txt"),
        ("none.json", "cannot read none.json"),
        ("texts.doc", "expected a file that ends in .txt"),
        ("http://127.0.0.1:9", "cannot read http://127.0.0.1:9/metrics: Connection refused"),
        ("http://[::1", "cannot read http://[::1/metrics: it is not a URL"),
        ("http://", "/metrics: no host given"),
        ("lengths.json -o grid.txt", "--output grid.txt: expected a name that ends in .json"),
        ("lengths.json -o none/grid.json", "does not exist"),
        ("lengths.json --picture plot.gif", "plot.gif: expected a name that ends in .png"),
        ("lengths.json --picture none/plot.png", "--picture none/plot.png: the directory"),
        ("grid.json", 'grid.json: "buckets" is not a length in tokens'),
        ("lengths.json --buckets lengths.json", "--buckets lengths.json: the file contains [9]"),
        ("lengths.json --null-model", "--null-model does not use a device"),
    ],
)
def test_what_cannot_be_read_or_written_is_known_at_once(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxembed.cli.tune.configure_jax", lambda *_: None)
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    (tmp_path / "lengths.json").write_text("[9]")
    (tmp_path / "grid.json").write_text('{"buckets": [[1, 16]]}')
    result = CliRunner().invoke(cli, ["tune", *line.split()])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_the_command_writes_a_grid(tmp_path, monkeypatch, tiny_checkpoint, grid_file, few_texts):
    monkeypatch.setattr("jaxembed.cli.tune.configure_jax", lambda *_: None)
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    (tmp_path / "texts.txt").write_text("the cat sat\nthe dog runs\n")
    out = tmp_path / "grid.json"
    line = [
        "tune", str(tmp_path / "texts.txt"), "-o", str(out), "-m", str(tiny_checkpoint),
        "--dtype", "float32", "--buckets", str(grid_file), "--max-batch-tokens", "128",
        "--seconds", "1", "--max-buckets", "2", "--cache-dir", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(cli, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 inputs of" in result.stdout
    assert f"jaxembed serve --buckets {out}" in result.stdout
    assert json.loads(out.read_text())["tuned"]["lengths"]["inputs"] == 2
