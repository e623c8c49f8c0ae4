"""A short storm on a real server, and that its oracle sees what must not be."""

import asyncio
import os
import sys

import pytest
from chaos.corpus import Ask
from chaos.ledger import Fault, Ledger
from chaos.storm import Life, Storm, Wave, Weather
from chaos.wire import Message, Reply
from conftest import save_tiny

from jaxembed.data.spec import DenseLayer

SEED = int(os.environ.get("CHAOS_SEED", "1"))  # of a storm to repeat
ACTIONS = 15  # of each client in a wave

LIVES = (
    Life((Wave(ACTIONS, armed=False), Wave(ACTIONS, armed=True, end="SIGTERM"))),
    Life((Wave(ACTIONS, armed=True), Wave(ACTIONS, armed=False, end="SIGKILL")), disk="full"),
    Life((Wave(ACTIONS, armed=True), Wave(ACTIONS, armed=True)), disk="no costs"),
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="faults of the disk, and /proc, are Linux's")
def test_in_a_storm_each_request_has_its_one_outcome_and_after_it_nothing_is_held(tmp_path):
    reranker = save_tiny(
        tmp_path / "reranker",
        pooling=("cls",),
        modules=(DenseLayer(32, 32), DenseLayer(32, 1, activation="identity")),
        labels=("LABEL_0",),
        score_function="sigmoid",
    )
    flags = ("--dtype", "float32", "--devices", "1", "--max-batch-tokens", "128")
    cache = tmp_path / "cache"
    cache.mkdir()
    embedder = save_tiny(tmp_path / "embedder")
    repository = tmp_path / "repository"
    save_tiny(repository / "first")
    save_tiny(repository / "second", pooling=("cls",))
    weather = Weather(SEED, str(embedder), cache, str(reranker), flags=flags, repository=repository)
    storm = Storm(weather)

    async def blow() -> None:
        for life in LIVES:
            await storm.live(life)

    asyncio.run(blow())
    sums = storm.sums()
    repeat = f"repeat it with CHAOS_SEED={SEED}"
    assert not sums["violations"], "\n".join([repeat, *sums["violations"], *storm.wrong_logs])
    assert sums["by_outcome"]["right"] > sums["requests"] / 3, repeat
    assert sums["faults"], repeat
    assert sums["key_changes"] > 10, repeat


GOOD = Ask("embed", Message("/embed", b"{}"), right=lambda reply: reply.body == b"right")
BAD = Ask("bad", Message("/embed", b"{}"), refused=422, err="validation")


def judged(ask: Ask, status: int, body: bytes = b"", faults=()):
    """The outcome of an answer, or the violation that it is."""
    ledger = Ledger()
    entry = ledger.sent(ask)
    ledger.answered(entry, Reply(status, {}, body))
    now = entry.sent_at
    ledger.faults += [Fault(kind, now + after_s, now + after_s) for kind, after_s in faults]
    ledger.close()
    (outcome,) = ledger.outcomes
    return outcome, bool(ledger.violations)


@pytest.mark.parametrize(
    "answer",
    [
        {"ask": GOOD, "status": 200, "body": b"another's"},
        {"ask": BAD, "status": 200, "body": b"right"},
        {"ask": GOOD, "status": 422},
        {"ask": GOOD, "status": 429},  # without Retry-After
        {"ask": GOOD, "status": 500, "faults": [("internal", 0.0)]},
        {"ask": GOOD, "status": 424},  # and no fault
        {"ask": GOOD, "status": 424, "faults": [("internal", -100.0)]},  # long before
        {"ask": GOOD, "status": 424, "faults": [("tokenizer_error", 0.0)]},  # of another kind
        {"ask": GOOD, "status": 503, "body": b"shutting down"},  # and no signal
    ],
)
def test_what_is_not_allowed_is_a_violation(answer):
    assert judged(**answer) == ("VIOLATION", True)


def test_a_request_without_an_outcome_or_with_two_is_a_violation():
    ledger = Ledger()
    ledger.sent(GOOD)
    ledger.close()
    assert "no outcome" in ledger.violations[0]
    entry = ledger.sent(GOOD)
    ledger.vanished(entry)
    ledger.lost(entry, "and again")
    assert "a second outcome" in ledger.violations[1]
