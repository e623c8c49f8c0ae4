"""Findings out of facts, what bounds the throughput, pages; and where facts come from."""

import json
import os
from collections.abc import Callable
from contextlib import contextmanager

import msgspec
import pytest
from click.testing import CliRunner
from fake_embedder import FakeEmbedder
from live_server import answering
from test_cores import _system  # noqa: F401, a fixture
from test_server_app import fetch_json

from jaxembed.cli import cli
from jaxembed.config import ServerConfig
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.engine import BucketUse
from jaxembed.errors import ConfigError, Unanswered
from jaxembed.platform import cores
from jaxembed.runtime.diagnostics import machine
from jaxembed.runtime.diagnostics.examine import (
    WINDOW_S,
    History,
    ModelTotals,
    Sample,
    Window,
    examine,
)
from jaxembed.runtime.diagnostics.facts import (
    AdmissionFacts,
    BucketFacts,
    DeviceFacts,
    Examination,
    Facts,
    KernelFacts,
    LimitFacts,
    LocalExamination,
    MachineFacts,
    ProgramFacts,
    QueueFacts,
    StageFacts,
    WindowFacts,
)
from jaxembed.runtime.diagnostics.findings import bound_by, findings_of, needed_tokens
from jaxembed.server.registry.models import Models
from jaxembed.tools.doctor.page import answers_of_state, answers_of_work, model_page
from jaxembed.tools.doctor.probe import PROBES, ask

STAGE_NAMES = ("decode", "tokenization", "queue", "inference", "encode")


def idle() -> Facts:
    """Of a healthy server without work: the default model on four cores."""
    buckets = [(1, 16), (16, 16), (1, 256), (16, 256)]
    return Facts(
        model="test/model",
        task="embed",
        device=DeviceFacts(
            name="cpu", platform="cpu", count=1, dtype="bfloat16", dtype_asked=False,
            dtype_reason="the device multiplies bfloat16 natively", multiplies_bfloat16=True,
        ),
        kernels=KernelFacts("auto", {"16": "native", "256": "native"}, {}),
        machine=MachineFacts(4, 4, None, 2**33, None, "madvise"),
        programs=ProgramFacts(True, True, 4, 4, True, 1.0, 0.05, 0, 4),
        buckets=[BucketFacts(r, n, True, r * n / 25, "kept") for r, n in buckets],
        lanes={"interactive": QueueFacts(0, 0, 0.0), "bulk": QueueFacts(0, 0, 0.0)},
        admission=AdmissionFacts(
            inputs=LimitFacts(8192, 0, 0),
            tokens=LimitFacts(262_144, 0, 0),
            bytes=LimitFacts(2**30, 0, 0),
            tokens_asked=False, max_batch_tokens=4096, batch_tokens_asked=False,
            batch_target_ms=150.0, least_batch_tokens=16, buckets_asked=False,
            max_input_tokens=256, model_input_tokens=256, tokenization_workers=4,
        ),
        window=WindowFacts(
            seconds=60.0, requests=0, inputs=0, refused=0, truncated=0, failed_batches=0,
            split_batches=0, not_finite=0, stages={n: StageFacts(0, 0.0) for n in STAGE_NAMES},
            device_share=0.0, device_share_of_all=0.0, loop_share=0.001, loop_delay_ms=0.2,
            cpu_cores=0.01, other_cores=0.05, throttled_share=0.0,
        ),
    )  # fmt: skip


def asked() -> Facts:
    """Of a healthy server that single queries of nine tokens come to."""
    facts = idle()
    facts.buckets[0] = BucketFacts(1, 16, True, 2.5, "timed", 600, 5400, 1500.0, 600)
    means = (0.1, 0.2, 0.1, 2.9, 0.1)
    stages = {n: StageFacts(600, ms) for n, ms in zip(STAGE_NAMES, means, strict=True)}
    change(facts.window, requests=600, inputs=600, stages=stages, loop_share=0.01)
    change(facts.window, device_share=0.025, device_share_of_all=0.025)
    return facts


def flooded() -> Facts:
    """Of a healthy server with as much bulk work as it can do, none of it refused."""
    facts = asked()
    facts.buckets[3] = BucketFacts(16, 256, True, 150.0, "timed", 380, 1_510_000, 57_000.0, 900)
    facts.lanes["bulk"] = QueueFacts(6000, 180_000, 4.5)
    facts.lanes["interactive"] = QueueFacts(1, 9, 0.1)
    change(facts.window, device_share=0.97, device_share_of_all=0.97, loop_share=0.2)
    change(facts.window, cpu_cores=3.9, inputs=50_000, truncated=20)
    change(facts.admission, inputs=LimitFacts(8192, 6001, 0))
    facts.programs.drift = 1.4
    return facts


HEALTHY = {"idle": idle, "asked": asked, "flooded": flooded}


def change(struct: msgspec.Struct, **fields) -> None:
    for name, value in fields.items():
        assert hasattr(struct, name)
        setattr(struct, name, value)


def changed(healthy: Callable[[], Facts], part: str, **fields) -> Facts:
    facts = healthy()
    change(getattr(facts, part), **fields)
    return facts


def with_buckets(*buckets: BucketFacts, asked: bool = True) -> Facts:
    facts = changed(idle, "admission", buckets_asked=asked)
    facts.buckets = list(buckets)
    return facts


def small_batches(**window) -> Facts:
    facts = changed(flooded, "admission", max_batch_tokens=64, batch_tokens_asked=True)
    facts.buckets = [BucketFacts(1, 64, True, 1.5, "timed", 4000, 250_000, 6000.0)]
    change(facts.window, **window)
    return facts


def refusing(name: str, limit: int, held: int) -> Facts:
    facts = changed(flooded, "window", refused=300)
    setattr(facts.admission, name, LimitFacts(limit, held, 300))
    return facts


def with_float16(**window) -> Facts:
    facts = changed(asked, "device", platform="gpu", dtype="float16")
    change(facts.window, **window)
    return facts


def stages_of(**means) -> dict[str, StageFacts]:
    return {name: StageFacts(100, means.get(name, 0.1)) for name in STAGE_NAMES}


def changed_workers(workers: int) -> Facts:
    stages = stages_of(tokenization=80.0, queue=5.0, inference=20.0)
    facts = changed(asked, "window", stages=stages)
    facts.admission.tokenization_workers = workers
    return facts


def waiting(oldest_s: float) -> Facts:
    facts = flooded()
    facts.lanes["interactive"] = QueueFacts(40, 400, oldest_s)
    return facts


XLA = {"16": "xla", "256": "xla"}
NO_COMPILER = {"native": "there is no C compiler: install gcc or clang"}
FLOAT32 = {"dtype": "float32", "dtype_reason": "--dtype float32 is set", "dtype_asked": True}


def changed_kernels(**device) -> Facts:
    facts = changed(idle, "kernels", used=XLA)
    change(facts.device, **device)
    return facts


SICK = {  # by the cause that is found: what helps, and the facts
    "a device does not return from a call": [
        ("end the process", changed(flooded, "device", stuck=1, longest_call_s=75.0))
    ],
    "batches fail on the device": [
        ("log", changed(asked, "window", failed_batches=3)),
        ("log", changed(asked, "device", failing=1)),
    ],
    "batches do not fit in the device's memory": [
        ("--max-batch-tokens", changed(flooded, "window", split_batches=2))
    ],
    "results are not finite and are computed again": [
        ("--dtype bfloat16", with_float16(not_finite=40)),
        ("jaxembed verify", changed(asked, "window", not_finite=40)),
    ],
    "not every device takes batches": [("wait", changed(idle, "device", not_joined=1))],
    "not every bucket is compiled": [
        ("--cache-dir", changed(idle, "programs", compiled=2, ready=False))
    ],
    "the CPU quota stops the process": [
        ("CPU limit", changed(flooded, "window", throttled_share=0.4))
    ],
    "something else uses the machine": [
        ("nice", changed(idle, "window", other_cores=2.0)),
        ("nice", changed(idle, "programs", lost_share=0.6)),
    ],
    "the process may use only one core": [("taskset", changed(asked, "machine", cores=1))],
    "the native kernels are not used": [
        ("leave out --kernels xla", changed(idle, "kernels", asked="xla", used=XLA)),
        ("install gcc or clang", changed(idle, "kernels", used=XLA, not_used=NO_COMPILER)),
    ],
    "bfloat16 would be faster": [("leave out --dtype float32", changed(idle, "device", **FLOAT32))],
    "freed memory is not kept for the next batch": [
        ("GLIBC_TUNABLES", changed(idle, "machine", not_kept="GLIBC_TUNABLES sets glibc.malloc"))
    ],
    "huge pages are off": [
        ("transparent_hugepage/enabled", changed(idle, "machine", huge_pages="never"))
    ],
    "the buckets do not fit the traffic": [
        (
            "leave out --buckets, or run `jaxembed tune",
            with_buckets(BucketFacts(1, 256, True, 9.0, "timed", 600, 5400, 5400.0)),
        ),
        (
            "run `jaxembed tune",
            with_buckets(  # the short rows hold none of the texts, of 250 tokens
                BucketFacts(64, 16, True, 40.0, "timed"),
                BucketFacts(16, 256, True, 150.0, "timed", 100, 75_000, 15_000.0),
                asked=False,
            ),
        ),
    ],
    "batches may hold few tokens": [("leave out --max-batch-tokens", small_batches())],
    "the queue holds too few tokens": [
        ("leave out --max-queue-tokens", refusing("tokens", 8000, 7900))
    ],
    "more work arrives than the server can do": [
        ("add servers", refusing("tokens", 262_144, 262_000)),
        ("--max-concurrent-requests", refusing("inputs", 8192, 8192)),
    ],
    "requests hold all the memory that they may use": [
        ("--max-queue-bytes", refusing("bytes", 2**20, 2**20))
    ],
    "interactive requests wait": [("x-priority", waiting(9.0))],
    "tokenizing takes longer than the model": [
        ("leave out --tokenization-workers 1", changed_workers(1))
    ],
    "the event loop is busy": [("base64", changed(asked, "window", loop_share=0.9))],
    "texts are truncated": [('"truncate": false', changed(asked, "window", truncated=200))],
}
EACH_SICK = [(cause, *case) for cause, cases in SICK.items() for case in cases]


@pytest.mark.parametrize("name", HEALTHY)
def test_on_a_healthy_server_nothing_is_found(name):
    assert findings_of(HEALTHY[name]()) == []


@pytest.mark.parametrize(("cause", "remedy", "sick"), EACH_SICK)
def test_a_sick_server_has_its_one_cause_and_what_helps(cause, remedy, sick):
    (finding,) = findings_of(sick)
    assert finding.cause == cause
    assert remedy in finding.remedy
    assert finding.evidence


WELL = {
    "float32 where the device is not faster in bfloat16": changed(
        idle, "device", **FLOAT32, multiplies_bfloat16=False
    ),
    "float32 that nobody asked for": changed(idle, "device", dtype="float32", dtype_asked=False),
    "float16 on a GPU": changed(idle, "device", platform="gpu", dtype="float16", dtype_asked=True),
    "XLA where the CPU has no bfloat16": changed_kernels(multiplies_bfloat16=False),
    "XLA in float32": changed_kernels(dtype="float32"),
    "XLA on a GPU": changed_kernels(platform="gpu"),
    "one core of one": changed(idle, "machine", cores=1, machine_cores=1),
    "a few cores of many": changed(idle, "machine", cores=4, machine_cores=64),
    "no huge pages known": changed(idle, "machine", huge_pages=None),
    "a neighbour that takes little": changed(idle, "window", other_cores=1.1),
    "neighbours of whom nothing is known": changed(idle, "window", other_cores=None),
    "long texts, which move the drift": changed(flooded, "programs", drift=3.0),
    "few batches, large bucket": with_buckets(BucketFacts(1, 256, True, 9.0, "timed", 9, 81, 81.0)),
    "two-token queries in the smallest bucket": with_buckets(
        BucketFacts(1, 16, True, 2.5, "timed", 600, 1200, 1500.0)
    ),
    "texts a little over half a row": with_buckets(
        BucketFacts(1, 256, True, 9.0, "timed", 600, 600 * 130, 5400.0)
    ),
    "a large bucket that costs no more than the small one": with_buckets(
        BucketFacts(1, 16, True, 2.5, "timed"),
        BucketFacts(4, 64, True, 2.4, "timed", 600, 5400, 1440.0),
    ),
    "small batches without work": small_batches(device_share_of_all=0.1),
    "one text whose result is not finite": with_float16(not_finite=1),
    "a few texts that are cut": changed(asked, "window", truncated=9),
    "slow tokenizing, and a slower model": changed(
        asked, "window", stages=stages_of(tokenization=80.0, inference=90.0)
    ),
    "quick tokenizing, quicker model": changed(asked, "window", stages=stages_of(tokenization=3.0)),
    "interactive work that waits for a batch": waiting(1.2),
}


@pytest.mark.parametrize("name", WELL)
def test_what_does_no_harm_is_no_finding(name):
    assert findings_of(WELL[name]) == []


def test_the_worst_comes_first():
    facts = changed(asked, "window", truncated=200, other_cores=3.0, failed_batches=1)
    assert [finding.cause for finding in findings_of(facts)] == [
        "batches fail on the device",
        "something else uses the machine",
        "texts are truncated",
    ]


@pytest.mark.parametrize(
    ("useful", "needed"), [(2, 16), (9, 16), (17, 32), (130, 256), (256, 256), (4000, 256)]
)
def test_a_batch_needs_the_next_power_of_two(useful, needed):
    bucket = BucketFacts(1, 256, True, runs=10, useful_tokens=10 * useful)
    assert needed_tokens(bucket, 16) == needed


BOUND = [
    ("idle", idle()),
    ("clients", asked()),
    ("device", flooded()),
    ("compiling", changed(idle, "programs", compiled=2, ready=False)),
    ("host", changed(asked, "window", loop_share=0.8)),
    ("admission", changed(asked, "window", refused=30)),
    ("device", changed(flooded, "window", refused=30)),
    ("tokenizing", changed(asked, "window", stages=stages_of(tokenization=1800.0))),
]


@pytest.mark.parametrize(("bound", "facts"), BOUND)
def test_what_bounds_the_throughput(bound, facts):
    assert bound_by(facts) == bound


def examined(facts: Facts) -> Examination:
    return Examination(bound_by(facts), findings_of(facts), facts)


@pytest.mark.parametrize(
    "facts",
    [make() for make in HEALTHY.values()]
    + [changed(idle, "device", estimated=True)]  # about right, so that it is no finding
    + [facts for _, _, facts in EACH_SICK],
)
def test_a_page_answers_ten_questions_and_shows_every_finding(facts):
    examination = examined(facts)
    text = model_page("http://here", examination)
    words = " ".join(text.split())
    questions = [*answers_of_state(facts), *answers_of_work(examination)]
    assert len(questions) == 10
    for number, question in enumerate(questions, start=1):
        assert f"{number:2}. {question}\n    " in text
    for finding in examination.findings:
        found = f"{finding.cause} evidence: {finding.evidence} remedy: {finding.remedy}"
        assert found in words
    assert ("Nothing is wrong with this server." in text) == (not examination.findings)
    estimated = "its speed is estimated, because other programs used it when it was measured"
    assert (estimated in words) == facts.device.estimated
    assert max(map(len, text.splitlines())) <= 100


def moment(at: float, inputs: float = 0.0, runs: int = 0, **machine) -> Sample:
    ran = {Bucket(1, 16): BucketUse(runs, 9 * runs, 0.5 * runs)} if runs else {}
    return Sample(at, machine, {"a": ModelTotals({"inputs": inputs}, ran)}, delay_s=at / 1000)


def test_a_window_has_what_was_counted_between_its_ends():
    window = Window(
        [moment(10.0, 5.0, 1, cpu=1.0), moment(15.0, 6.0, 2), moment(20.0, 25.0, 11, cpu=3.5)]
    )
    assert window.seconds == 10
    assert (window.count("a", "inputs"), window.total("a", "inputs")) == (20, 25)
    assert window.ran("a") == {Bucket(1, 16): BucketUse(10, 90, 5.0)}
    assert window.device_s == {"a": 5.0}
    assert (window.machine("cpu"), window.machine("busy")) == (2.5, None)
    assert window.delay_s == 0.02
    late = Window([moment(0.0), moment(1.0, runs=3)])  # its bucket had not run before
    assert late.ran("a")[Bucket(1, 16)].runs == 3


def test_a_history_forgets_what_is_older_than_its_window(monkeypatch):
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(machine.time, "monotonic", lambda: float(next(clock)))
    some = History()
    for _ in range(6):
        some.note({"a": FakeEmbedder()})
    assert some.window({"a": FakeEmbedder()}).seconds == WINDOW_S // 25 * 25 + 25


def test_without_a_history_a_window_is_empty():
    window = History().window({"a": FakeEmbedder()})
    assert (window.seconds, window.count("a", "inputs")) == (0, 0)


STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 100 50 30 4000 7 1 2 3 0 0
cpu1 1000 500 300 4000 70 10 20 30 0 0
intr 1 2 3
"""


@pytest.mark.skipif(os.name == "nt", reason="no /proc on Windows")
@pytest.mark.parametrize(("own_niceness", "ticks"), [(0, 1360), (10, 1860)])
def test_programs_of_lower_priority_keep_no_core_busy(system, monkeypatch, own_niceness, ticks):
    system("proc/stat", STAT)
    monkeypatch.setattr(cores, "usable_cores", lambda: {1})
    monkeypatch.setattr(machine.os, "getpriority", lambda which, who: own_niceness)
    busy_s = machine.machine_counts()["busy"]
    assert busy_s == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


def test_the_quota_is_that_of_the_control_group(system):
    assert machine.machine_facts().quota_cores is None
    assert "throttled" not in machine.machine_counts()
    system("proc/self/cgroup", "0::/kubepods/pod7\n")
    system("cgroup/kubepods/pod7/cpu.max", "150000 100000\n")
    system("cgroup/kubepods/pod7/cpu.stat", "usage_usec 9\nthrottled_usec 2500000\n")
    assert machine.machine_facts().quota_cores == 1.5
    assert machine.machine_counts()["throttled"] == 2.5


@pytest.mark.parametrize(
    ("status", "enabled", "huge_pages"),
    [
        ("THP_enabled:\t1\n", "always [madvise] never\n", "madvise"),
        ("", "always madvise [never]\n", "never"),
        ("THP_enabled:\t0\n", "[always] madvise never\n", "off for this process"),
        ("", "", None),
    ],
)
def test_huge_pages_of_system_and_self(system, monkeypatch, tmp_path, status, enabled, huge_pages):
    system("proc/self/status", status)
    system("enabled", enabled)
    monkeypatch.setattr(machine, "HUGE_PAGES", tmp_path / "enabled")
    assert machine.machine_facts().huge_pages == huge_pages


def test_a_model_that_is_served_is_examined(embedder, monkeypatch):
    models = {"tiny": embedder.model}
    some = History()
    some.note(models)
    monkeypatch.setitem(embedder.model.admission.capacity.refused, "tokens", 3)
    embedder.encode(["the cat sat"])
    examination = examine(models, some.window(models))["tiny"]
    facts = examination.facts
    assert (facts.window.inputs, facts.task) == (1, "embed")
    assert (facts.device.dtype, facts.device.dtype_asked) == ("float32", True)
    assert facts.admission.buckets_asked
    assert (facts.admission.tokens.refused, facts.admission.max_batch_tokens) == (3, 128)
    assert (facts.programs.compiled, facts.programs.buckets) == (3, 3)
    (ran,) = [bucket for bucket in facts.buckets if bucket.runs]
    assert (ran.runs, ran.useful_tokens, ran.cost_from) == (1, 5, "timed")
    assert ran.fill == 5 / ran.tokens
    assert ran.padding_tokens == ran.tokens - 5
    assert facts.window.stages["inference"].count == 1


def verbose(models: Models, query: str, config: ServerConfig | None = None, **headers):
    response, body = fetch_json(f"/info{query}", models=models, config=config, headers=headers)
    return response.status_code, body


@pytest.mark.parametrize("query", ["?verbose", "?verbose=1", "?verbose=&model=tiny"])
def test_info_tells_it_to_whom_asks_for_more(embedder, query):
    models = Models([embedder.model], {embedder.name: ("tiny",)})
    status, body = verbose(models, query)
    assert status == 200
    doctor = body["jaxembed"].pop("doctor")
    examination = msgspec.convert(doctor["tiny"], Examination)
    assert examination.facts.model == "tiny"
    assert {*body} == {*verbose(models, "")[1]}
    assert "doctor" not in verbose(models, "")[1]["jaxembed"]


def test_info_tells_it_behind_the_key_alone(embedder):
    config = ServerConfig(api_keys=("secret",))
    models = Models([embedder.model])
    assert verbose(models, "?verbose", config)[0] == 401
    assert verbose(models, "?verbose", config, Authorization="Bearer secret")[0] == 200


@contextmanager
def serving(*pages: tuple[int, bytes]):
    """A server that answers requests of /info with the first page, others with the last one."""
    seen: list[tuple[str, str | None]] = []

    def reply(request, _: bytes) -> tuple[int, bytes]:
        seen.append((request.path, request.headers.get("authorization")))
        return pages[0 if request.command == "GET" else -1]

    with answering(reply) as url:
        yield url, seen


def told(*facts: Facts) -> tuple[int, bytes]:
    doctor = {one.model: examined(one) for one in facts}
    return 200, msgspec.json.encode({"jaxembed": {"doctor": doctor}})


def doctor(*arguments: str):
    return CliRunner(env={"API_KEY": ""}).invoke(cli, ["doctor", *arguments])


@pytest.mark.parametrize(("facts", "status"), [(asked(), 0), (EACH_SICK[-1][2], 1)])
def test_the_status_says_whether_something_was_found(facts, status):
    with serving(told(facts)) as (url, seen):
        done = doctor(url, "--api-key", "secret")
    assert done.exit_code == status, done.output
    assert done.output.startswith(f"{url} serves test/model\n")
    assert seen == [("/info?verbose", "Bearer secret")]


def test_of_several_models_each_has_its_page_and_json_is_what_the_server_said():
    other = flooded()
    other.model = "other"
    with serving(told(asked(), other)) as (url, _):
        done, as_json = doctor(url), doctor(url, "--json")
    assert "serves test/model" in done.output
    assert "serves other" in done.output
    said = json.loads(as_json.output)["models"]["test/model"]
    assert msgspec.convert(said, Examination) == examined(asked())


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"[[0.0]]", f"Probe: {PROBES} single queries were answered, p50 "),
        (429, b"{}", f"Probe: 0 single queries were answered; {PROBES} failed: cannot read"),
    ],
)
def test_a_probe_times_lone_queries(status, body, words):
    with serving(told(asked()), (status, body)) as (url, seen):
        done = doctor(url, "--probe")
    said = " ".join(done.output.split())
    assert words in said
    assert ("HTTP 429" in said) == (status == 429)
    assert [path for path, _ in seen].count("/embed") == PROBES


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((401, b"{}"), "HTTP 401 Unauthorized; expected the URL of a running jaxembed server"),
        ((200, b"{}"), "does not answer as this version of `jaxembed doctor` expects"),
        ((200, b"<html>"), "does not answer as this version of `jaxembed doctor` expects"),
        ((200, b'{"jaxembed": {"doctor": {"a": {}}}}'), "does not answer as this version"),
    ],
)
def test_what_is_no_server_of_ours_cannot_be_asked(page, message):
    with serving(page) as (url, _), pytest.raises(ConfigError) as raised:
        ask(url, None)
    assert message in str(raised.value)
    assert not isinstance(raised.value, Unanswered)


def test_a_server_that_does_not_answer_is_an_error_and_nothing_else_is_examined(monkeypatch):
    monkeypatch.setattr("jaxembed.cli.doctor._examine_here", lambda *_: pytest.fail("examined"))
    done = doctor("http://127.0.0.1:1")
    assert isinstance(done.exception, Unanswered)
    told = str(done.exception)
    assert told.startswith("cannot read http://127.0.0.1:1/")
    assert "; expected the URL of a running jaxembed server" in told


def test_a_model_or_a_server_is_examined_and_not_both():
    done = doctor("http://127.0.0.1:1", "--model", "a")
    assert done.exit_code == 2
    assert "give URL or --model" in done.output


def test_without_a_server_it_says_what_this_machine_has(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxembed.cli.doctor.configure_jax", lambda *_: None)
    flags = ["--model", str(tiny_checkpoint), "--cache-dir", str(tmp_path / "cache")]
    done = doctor(*flags, "--dtype", "float32", "--kernels", "xla", "--json")
    said = msgspec.json.decode(done.stdout, type=LocalExamination)
    assert done.exit_code == int(bool(said.findings))
    assert said.facts.device.dtype_reason == "--dtype float32 is set"
    assert set(said.facts.kernels.used.values()) == {"xla"}
    done = doctor(*flags, "--dtype", "float32", "--kernels", "xla")
    assert f"Here, {tiny_checkpoint} would have:" in done.stdout
