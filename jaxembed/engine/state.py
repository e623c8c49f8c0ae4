"""Defines what an engine reports of itself: its queue, its costs and the use of its buckets."""

from dataclasses import dataclass

from jaxembed.data.inputs import Priority
from jaxembed.engine.autotune.costs import CostSource
from jaxembed.engine.bucket import Bucket


@dataclass(frozen=True)
class BucketUse:
    """Totals over the batches of one bucket since the start of the engine."""

    runs: int = 0
    useful_tokens: int = 0
    device_s: float = 0.0

    def __sub__(self, other: "BucketUse") -> "BucketUse":
        return BucketUse(
            self.runs - other.runs,
            self.useful_tokens - other.useful_tokens,
            self.device_s - other.device_s,
        )


@dataclass(frozen=True)
class LaneState:
    """The queue of one lane. Duplicates count as often as they occur."""

    inputs: int
    tokens: int
    oldest_s: float  # seconds that the oldest waiting request has waited; 0 if none waits


@dataclass(frozen=True)
class EngineState:
    """The state of an engine at one moment."""

    waiting_inputs: int  # duplicates count as often as they occur
    waiting_tokens: int
    lanes: dict[Priority, LaneState]
    failures: tuple[int, ...]  # number of consecutive failed batches of each seat
    stuck: int  # number of seats that are stuck
    costs: dict[Bucket, float]  # milliseconds of a run of each usable bucket
    cost_sources: dict[Bucket, CostSource]
    drift: float  # factor of all costs, see BucketCosts
    lost_share: float  # of the timings' time, in which other programs had the cores
    timed: bool  # whether every bucket was timed often enough
    compiled: tuple[Bucket, ...]
    covered: bool  # whether every request has a compiled bucket
    ran: dict[Bucket, BucketUse]
    longest_call_s: float  # age of the oldest device call in progress; 0 if there is none
    closing: bool
    threads: int  # number of threads that are alive
