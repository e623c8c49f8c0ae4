"""Records the outcome of every request, and judges whether it was allowed."""

import time
from collections import Counter
from dataclasses import dataclass

from .corpus import Ask
from .wire import Reply

SLACK_S = 2.0  # time by which an effect may outlast its fault until it is answered
SICK_S = 15.0  # time for which probes may fail after a fault: a sick worker is tried once a second
ENDING = ("shutting down", "shut down", "the engine's process has ended")
DEVICE = ("no_memory", "internal", "memory_error", "nan", "hang")
MAX_SHOWN = 20  # violations that are kept
SHOWN_BYTES = 300  # bytes of an answer in a violation


@dataclass
class Fault:
    """An injected fault. Times are of `time.monotonic`, which all processes share."""

    kind: str
    begin: float
    end: float


@dataclass
class QueuedSequence:
    """A request that was sent."""

    ask: Ask
    sent_at: float
    life: int  # number of the server process


class Ledger:
    """The outcomes of all requests, and the violations.

    Each request must have exactly one outcome: right, refused as expected, overloaded (429), failed
    by a fault that was injected at that time, or lost with a client or server that was ended.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.violations: list[str] = []
        self.life = 0
        self.signalled_at: float | None = None  # when this server process was told to end
        self.counted: Counter[str] = Counter()  # outcomes of this life, as its metrics count them
        self._open: dict[int, QueuedSequence] = {}
        # outcomes that are allowed if one of these faults happened from begin to end
        self._excuses: list[tuple[QueuedSequence, str, tuple[str, ...], float, float]] = []

    def begin_life(self) -> None:
        self.life += 1
        self.signalled_at = None
        self.counted.clear()

    def sent(self, ask: Ask) -> QueuedSequence:
        self.kinds[ask.kind] += 1
        entry = QueuedSequence(ask, time.monotonic(), self.life)
        self._open[id(entry)] = entry
        return entry

    def answered(self, entry: QueuedSequence, reply: Reply) -> None:
        self._settle(entry)
        ask, text = entry.ask, reply.body.decode(errors="replace")
        status, err = reply.status, None
        if status == 200:
            self._judge_right(entry, reply)
        elif status == ask.refused:
            self.outcomes["refused"] += 1
            err = ask.err
        elif ask.kind.startswith("probe") and status == 503:
            self._excuse(entry, DEVICE, "red probe", SICK_S)
        elif status == 429 and "retry-after" in reply.headers:
            self.outcomes["overloaded"] += 1
            err = "overloaded"
        elif status in (400, 422) and "tokenizer error" in text:
            self._excuse(entry, ("tokenizer_error",), "tokenizer fault")
            err = "tokenization"
        elif status == 503 and any(words in text for words in ENDING):
            self._lost_to_signal(entry, "drained", text)
            err = "overloaded"
        elif status in (424, 503) or (status == 400 and "the device does not return" in text):
            self._excuse(entry, DEVICE, "device fault")
            err = "inference"
        else:
            self.violate(entry, f"status {status}: {text[:SHOWN_BYTES]}")
        if err is not None and ask.counted:
            self.counted[err] += 1

    def lost(self, entry: QueuedSequence, why: object) -> None:
        """Note that the connection ended before the answer, and not by the client."""
        self._settle(entry)
        self.counted["lost"] += 1
        self._lost_to_signal(entry, "lost with the server", str(why))

    def vanished(self, entry: QueuedSequence) -> None:
        self._settle(entry)
        self.outcomes["lost with the client"] += 1
        self.counted["lost"] += 1

    def violate(self, entry: QueuedSequence | None, what: str) -> None:
        self.outcomes["VIOLATION"] += 1
        if len(self.violations) < MAX_SHOWN:
            of = "" if entry is None else f"{entry.ask.kind} (life {entry.life}): "
            body = b"" if entry is None else (entry.ask.message.body or b"")[:SHOWN_BYTES]
            self.violations.append(f"{of}{what} {body.decode(errors='replace')}".strip())

    def close(self) -> None:
        """Judge the outcomes that need an excuse, now that all faults are known.

        A request without an outcome is a violation.
        """
        for entry in self._open.values():
            self.violate(entry, "no outcome")
        self._open.clear()
        for entry, what, kinds, begin, end in self._excuses:
            faults = (fault for fault in self.faults if fault.kind in kinds)
            if any(fault.begin <= end and fault.end >= begin for fault in faults):
                self.outcomes[what] += 1
            else:
                self.violate(entry, f"{what}, but none was injected then")
        self._excuses.clear()

    def _judge_right(self, entry: QueuedSequence, reply: Reply) -> None:
        self.counted["success"] += entry.ask.stamped
        try:
            is_right = entry.ask.right(reply)
        except Exception as error:
            self.violate(entry, f"an answer that cannot be read: {error!r}")
            return
        if is_right:
            self.outcomes["right"] += 1
        else:
            self.violate(entry, f"a wrong answer: {reply.body[:SHOWN_BYTES]!r}")

    def _excuse(
        self, entry: QueuedSequence, kinds: tuple[str, ...], what: str, slack_s=SLACK_S
    ) -> None:
        """Note an outcome that needs a fault of one of these kinds; `close` judges it."""
        if self.signalled_at is not None and what == "red probe":
            self.outcomes["drained"] += 1
            return
        begin = entry.sent_at - slack_s
        self._excuses.append((entry, what, kinds, begin, time.monotonic()))

    def _lost_to_signal(self, entry: QueuedSequence, outcome: str, why: str) -> None:
        """Note an outcome that is allowed only after the server was told to end."""
        if self.signalled_at is None:
            self.violate(entry, f"{outcome}, but nobody ended the server: {why[:SHOWN_BYTES]}")
        else:
            self.outcomes[outcome] += 1

    def _settle(self, entry: QueuedSequence) -> None:
        """Note that a request has its outcome; a second one is a violation."""
        if id(entry) not in self._open:
            self.violate(entry, "a second outcome")
        self._open.pop(id(entry), None)
