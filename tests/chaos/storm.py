"""Runs a storm: server processes (lives) with waves of clients, and checks after each wave."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal, get_args

import psutil
from prometheus_client.parser import text_string_to_metric_families

from .clients import Client
from .corpus import EMBEDDER, MAX_INPUTS, PAYLOAD_LIMIT, RERANKER, Ask, Corpus, administer, move
from .ledger import Fault, Ledger
from .locksmith import Locksmith, key_file
from .wire import HOST, Http1, Lost, Message, Reply

Disk = Literal["fine", "full", "no costs", "damaged"]
End = Literal["quiet", "SIGTERM", "SIGKILL"]

CHILD = Path(__file__).with_name("child.py")
START_S, STOP_S, QUIET_S = 300.0, 60.0, 30.0
OVERDUE_S = 2.0  # limit of the watchdog in a storm
MAX_ADMITTED = 80  # inputs, a limit that eight clients sometimes exceed
MAX_GROWTH = 0.35  # relative growth of memory allowed after a life's first wave, for new buckets
DRAIN_S = 5.0
ADMIN_KEY = "chaos"
MOVE_EVERY_S = 0.05
UNLOADS = 0.2  # share of the moves before which the model is taken out of memory
KEY_FILE = "keys.toml"  # in the cache directory
TOKENIZER_THREADS = 2  # of each model
NEW_THREADS = TOKENIZER_THREADS + 3  # threads that a model starts later; three time buckets
LOG_LINES = 400  # last lines of the log that are kept
GAUGES = (
    "te_queue_size",
    "jaxembed_queue_tokens",
    "jaxembed_lane_size",
    "jaxembed_admitted_inputs",
    "jaxembed_admitted_tokens",
    "jaxembed_held_bytes",
    "jaxembed_key_waiting_inputs",
    "jaxembed_stuck_seats",
)
REFUSALS = ("overloaded", "inference", "tokenization", "validation", "batch_size", "model_type")


@dataclass(frozen=True)
class Wave:
    """Clients that all act at the same time."""

    actions: int  # of each client
    armed: bool  # whether faults are injected
    end: End = "quiet"  # or the signal that ends the server in the middle of the wave


@dataclass(frozen=True)
class Life:
    """The waves of one server process, and the state of its disk."""

    waves: tuple[Wave, ...]
    disk: Disk = "fine"


@dataclass(frozen=True)
class Weather:
    """Everything that a storm depends on, except the timing of threads."""

    seed: int
    embedder: str
    cache_dir: Path
    reranker: str | None = None
    clients: int = 8
    fault_rate: float = 0.02  # share of the calls of runners and tokenizers that fail
    flags: tuple[str, ...] = ()  # of `jaxembed serve`
    repository: Path | None = None  # its first two models have a name that moves between them

    @property
    def moved(self) -> list[str]:
        return [] if self.repository is None else sorted(os.listdir(self.repository))[:2]


@dataclass
class Server:
    """The server process, its log, and the readers of its output."""

    process: asyncio.subprocess.Process
    ledger: Ledger
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    readers: list[asyncio.Task] = field(default_factory=list)

    @classmethod
    async def start(cls, weather: Weather, life: Life, number: int, port: int, ledger: Ledger):
        """Start the process of a life, and the tasks that read its faults and its log."""
        plan = {
            "seed": f"{weather.seed}/{number}",
            "armed": str(weather.cache_dir / "armed"),
            "rate": weather.fault_rate,
            "overdue_s": OVERDUE_S,
            "disk": life.disk,
        }
        models = {EMBEDDER: weather.embedder}
        models |= {RERANKER: weather.reranker} if weather.reranker else {}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), json.dumps(plan), "serve", *models.values(),
            *(f"--served-model-name={name}={model}" for name, model in models.items()),
            "--port", str(port), "--cache-dir", str(weather.cache_dir), "--offline",
            "--max-client-batch-size", str(MAX_INPUTS), "--payload-limit", str(PAYLOAD_LIMIT),
            "--max-concurrent-requests", str(MAX_ADMITTED), "--accept-bare-token-ids",
            "--tokenization-workers", str(TOKENIZER_THREADS), "--drain-timeout", str(DRAIN_S),
            *(("--model-repository", str(weather.repository), "--admin-key", ADMIN_KEY)
              if weather.repository else ()),
            "--api-key-file", str(weather.cache_dir / KEY_FILE),
            "--audit-log", str(weather.cache_dir / "audit.jsonl"),
            *weather.flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        server = cls(process, ledger)
        assert process.stdout is not None
        assert process.stderr is not None
        reads = (server._read_faults(process.stdout), server._read_log(process.stderr))
        server.readers = [asyncio.create_task(read) for read in reads]
        return server

    async def wait(self) -> int:
        """Wait until the process has ended and its output is read.

        Returns its exit status, or minus the signal that ended it. A process that does not end is
        killed, which is a violation.
        """
        try:
            async with asyncio.timeout(STOP_S):
                status = await self.process.wait()
        except TimeoutError:
            self.ledger.violate(None, f"the server did not end within {STOP_S} s")
            self.process.kill()
            status = await self.process.wait()
        await asyncio.gather(*self.readers)
        return status

    async def _read_faults(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            fault = json.loads(line)
            self.ledger.faults.append(Fault(fault["kind"], fault["from"], fault["until"]))

    async def _read_log(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self.log.append(line.decode(errors="replace").rstrip())


class Storm:
    """Runs lives one after the other; `sums()` returns the results."""

    def __init__(self, weather: Weather):
        self.weather = weather
        self.ledger = Ledger()
        self.corpus = Corpus(weather.seed, weather.reranker is not None, weather.moved)
        self.levels: list[dict[str, int]] = []  # memory, threads and files between waves
        self.wrong_logs: list[str] = []
        self._armed = weather.cache_dir / "armed"
        self._keys = weather.cache_dir / KEY_FILE
        self._key_changes = 0
        self._port = _free_port()
        self._lives = 0
        self._waves = 0
        self._learnt: dict[str, float] = {}  # counts of this life's metrics from before its waves
        self._started_at = time.monotonic()

    async def live(self, life: Life) -> None:
        self._lives += 1
        self.ledger.begin_life()
        self._spoil_disk(life.disk)
        self._armed.unlink(missing_ok=True)
        self._keys.write_text(key_file())
        server = await Server.start(self.weather, life, self._lives, self._port, self.ledger)
        try:
            await self._ready(server)
            await self._calm()
            before = await self._level(server, first=True)
            for wave in life.waves:
                await self._wave(server, wave)
                if wave.end != "quiet":
                    break
                await self._be_quiet(server, before)
            await self._end(server, life.waves[-1].end)
        finally:
            if server.process.returncode is None:
                server.process.kill()
                await server.wait()
            if self.ledger.violations and not self.wrong_logs:
                self.wrong_logs = list(server.log)

    def sums(self) -> dict:
        ledger = self.ledger
        return {
            "seed": self.weather.seed,
            "seconds": round(time.monotonic() - self._started_at, 1),
            "lives": self._lives,
            "waves": self._waves,
            "requests": sum(ledger.kinds.values()),
            "by_kind": dict(sorted(ledger.kinds.items())),
            "by_outcome": dict(sorted(ledger.outcomes.items())),
            "key_changes": self._key_changes,
            "faults": dict(sorted(Counter(fault.kind for fault in ledger.faults).items())),
            "levels": self.levels,
            "violations": ledger.violations,
        }

    async def _wave(self, server: Server, wave: Wave) -> None:
        """Run all clients of a wave; a signal that ends the server is sent in the middle."""
        self._waves += 1
        seed = f"{self.weather.seed}/{self._waves}"
        total = self.weather.clients * wave.actions
        end_at = Random(f"{seed}/signal").randint(total // 3, 2 * total // 3)
        acted = 0
        if wave.armed:
            self._armed.touch()

        async def run(number: int) -> None:
            nonlocal acted
            client = Client(f"{seed}/{number}", self._port, self.corpus, self.ledger)
            for _ in range(wave.actions):
                if self.ledger.signalled_at is not None:
                    break
                acted += 1
                if acted == end_at and wave.end != "quiet":
                    self.ledger.signalled_at = time.monotonic()
                    server.process.send_signal(getattr(signal, wave.end))
                await client.act()
            await client.close()

        over = asyncio.Event()
        moving = asyncio.create_task(self._move(over))
        hang_up = partial(server.process.send_signal, signal.SIGHUP)
        locksmith = Locksmith(self._keys, seed, hang_up)
        working = asyncio.create_task(locksmith.work(lambda: self.ledger.signalled_at is not None))
        await asyncio.gather(*(run(number) for number in range(self.weather.clients)))
        working.cancel()
        over.set()
        await moving
        self._key_changes += locksmith.changes
        self._keys.write_text(key_file())
        self._armed.unlink(missing_ok=True)
        if wave.end == "quiet":
            await asyncio.sleep(OVERDUE_S / 10)  # for the last lines of the pipe
            self.ledger.close()

    async def _move(self, over: asyncio.Event) -> None:
        """Move a name from model to model, and take some out of memory, until the wave is over or
        the server is told to end."""
        random = Random(f"{self.weather.seed}/{self._waves}/moves")
        while self.weather.moved and self.ledger.signalled_at is None and not over.is_set():
            name = random.choice(self.weather.moved)
            if random.random() < UNLOADS:  # the next request loads it again
                await self._ask_one(administer("POST", f"models/{name}/unload", ADMIN_KEY))
            await self._ask_one(move(name, ADMIN_KEY))
            await asyncio.sleep(MOVE_EVERY_S)

    async def _end(self, server: Server, end: End) -> None:
        """End the server unless a signal did, and check its exit status."""
        if self.ledger.signalled_at is None:
            self.ledger.signalled_at = time.monotonic()
            server.process.terminate()
        status = await server.wait()
        expected = -signal.SIGKILL if end == "SIGKILL" else 0
        if status != expected:
            self.ledger.violate(None, f"the server ended with {status} instead of {expected}")
        self.ledger.close()

    async def _ready(self, server: Server) -> None:
        """Wait until the server is ready. Raises RuntimeError if it is not in time."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and server.process.returncode is None:
            with contextlib.suppress(Lost):
                if (await self._ask(Message("/ready"))).status == 200:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError("the server does not become ready:\n" + "\n".join(server.log))

    async def _calm(self) -> None:
        """Without faults, learn the right answers, or check that a new process gives the same."""
        for name in self.weather.moved:
            await self._ask_one(move(name, ADMIN_KEY))
        self._learnt = {}
        if self._lives == 1:
            await self.corpus.learn(self._ask)
            self._learnt = await self._metrics()
        for ask in self.corpus.calm():
            await self._ask_one(ask)

    async def _ask_one(self, ask: Ask) -> None:
        entry = self.ledger.sent(ask)
        try:
            self.ledger.answered(entry, await self._ask(ask.message))
        except Lost as lost:
            self.ledger.lost(entry, lost)

    async def _ask(self, message: Message) -> Reply:
        wire = await Http1.open(self._port)
        try:
            return await wire.ask(message)
        finally:
            await wire.close()

    async def _metrics(self) -> dict[str, float]:
        """Read the metrics, summed over labels and models; failures are also summed by `err`.

        Of models that come and go only gauges count: their counters leave with them.
        """
        text = (await self._ask(Message("/metrics"))).body.decode()
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                passing = sample.labels.get("model") in self.weather.moved
                if passing and sample.name not in GAUGES:
                    continue
                sums[sample.name.removesuffix("_total")] += sample.value
                if "err" in sample.labels:
                    sums[sample.labels["err"]] += sample.value
        return sums

    async def _level(self, server: Server, first: bool = False) -> dict[str, int]:
        """Measure memory, threads and open files of the server, and keep them in `levels`."""
        process = psutil.Process(server.process.pid)
        level = {"life": self._lives, "rss_mib": process.memory_info().rss >> 20}
        level |= {"threads": process.num_threads(), "fds": process.num_fds()}
        self.levels.append({"first": int(first), **level})
        return level

    async def _be_quiet(self, server: Server, before: dict[str, int]) -> None:
        """Check after a wave that nothing is held, all is counted, and a request is answered."""
        models = (2 if self.weather.reranker else 1) + len(self.weather.moved)
        max_threads = before["threads"] + models * NEW_THREADS
        process = psutil.Process(server.process.pid)
        deadline = time.monotonic() + QUIET_S
        while True:
            await asyncio.sleep(0.1)  # until the connection of the last check is closed
            threads, files = process.num_threads(), process.num_fds()
            metrics = await self._metrics()
            asked = [await self._ask(Message(path)) for path in ("/ready", "/health", "/livez")]
            probes = [reply.status for reply in asked]
            held = {name: metrics[name] for name in GAUGES if metrics[name]}
            held |= {"threads": threads} if threads > max_threads else {}
            if files > before["fds"]:
                states = [one.status for one in process.net_connections()]
                held |= {"fds": files, "connections": states}
            held |= {"probes": probes} if probes != [200, 200, 200] else {}
            if not held:
                break
            if time.monotonic() > deadline:
                self.ledger.violate(None, f"still held after a wave: {held}, before it {before}")
                break
        self._check_counts(metrics)
        level = await self._level(server)
        first = next(one for one in self.levels if one["life"] == self._lives and not one["first"])
        if level["rss_mib"] > (1 + MAX_GROWTH) * first["rss_mib"]:
            self.ledger.violate(None, f"memory grows from wave to wave: {first}, now {level}")
        await self._ask_one(self.corpus.plain())

    def _check_counts(self, metrics: dict[str, float]) -> None:
        """Check that metrics count each answer once. Requests lost with a client may be counted."""
        counts, lost = self.ledger.counted, self.ledger.counted["lost"]
        pairs = {"success": "te_request_success", **{err: err for err in REFUSALS}}
        for ours, theirs in pairs.items():
            count, seen = metrics[theirs] - self._learnt.get(theirs, 0), counts[ours]
            if not seen <= count <= seen + lost:
                what = f"{ours}: {seen} seen, {lost} lost, the server counts {count}"
                self.ledger.violate(None, what)
        names = ("count", "success", "failure")
        accepted, answered, failed = (metrics[f"te_request_{name}"] for name in names)
        if not answered <= accepted <= answered + failed:
            what = f"{accepted} requests accepted, {answered} answered, {failed} failed"
            self.ledger.violate(None, what)

    def _spoil_disk(self, disk: Disk) -> None:
        """Damage the cache directory as this state of the disk says."""
        costs = self.weather.cache_dir / "costs"
        if costs.is_file():
            costs.unlink()
        if disk == "no costs":
            if costs.is_dir():
                costs.rename(costs.with_name(f"costs-{self._lives}"))
            costs.write_text("this is no directory")
        if disk == "damaged":
            files = [*costs.glob("*"), *self.weather.cache_dir.glob("programs/*/*")]
            for file in sorted(file for file in files if file.is_file())[::2]:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def draw_life(random: Random, actions: int) -> Life:
    """Draw a life of a long storm: waves, about a third of them without faults, and an end."""
    waves = [Wave(actions, random.random() < 0.7) for _ in range(random.randint(2, 9))]
    (end,) = random.choices(get_args(End), [1, 2, 2])
    waves.append(Wave(actions, random.random() < 0.7, end))
    (disk,) = random.choices(get_args(Disk), [3, 1, 1, 1])
    return Life(tuple(waves), disk)
