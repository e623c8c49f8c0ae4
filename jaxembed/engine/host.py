"""Runs static models on the host: no device, no compilation, no buckets and no queue.

The thread that calls `compute` computes, so that the threads which tokenize a request compute it
too, and a short text is answered without any other thread.
"""

import logging
import threading
import time
from typing import get_args

import numpy as np

from jaxembed.data.inputs import Priority
from jaxembed.data.work import Ragged, SparseRows, Work, WorkResult
from jaxembed.engine.engine import INTERNAL, RATE_BATCHES, Engine, EngineState, LaneState
from jaxembed.errors import BackendError, NotFinite
from jaxembed.models.static import StaticModel
from jaxembed.observability.metrics import Telemetry

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed"


class HostEngine:
    """Computes sequences with a static model. See Engine for its other methods.

    `compute` may be called from any thread, and from several at once.
    """

    # There is no device that could fail or hang.
    healthy = True
    stuck = False
    temporary_bytes = 0  # of device memory

    def __init__(self, model: StaticModel, telemetry: Telemetry, *, name: str = "model"):
        """`name` is the model's, for the log."""
        self.name = name
        self._model = model
        self._telemetry = telemetry
        self._started = self._closing = False
        self._ran_tokens = self._ran_s = 0.0  # decaying sums over the recent calls
        self._failures = 0  # consecutive calls that failed
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether it was started and not closed: there is nothing to compile."""
        return self._started and not self._closing

    @property
    def tokens_per_s(self) -> float:
        """The recent throughput in tokens per second of computing; 0 before the first call."""
        return self._ran_tokens / max(self._ran_s, 1e-6)

    def start(self) -> None:
        """Be ready: there are no threads."""
        self._started = True

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return at once. Raises BackendError if the engine is closed."""
        if self._closing:
            raise BackendError(CLOSED)

    def compute(self, work: Work) -> WorkResult:
        """The outputs of the work, computed in the calling thread.

        Raises NotFinite if one holds NaN or infinity, and BackendError if they could not be
        computed or the engine is closed.
        """
        self.wait_ready()
        started_at = time.monotonic()
        try:
            values = self._model.compute(work)
            for value in values.values():
                if isinstance(value, SparseRows):
                    arrays = value.values
                else:
                    arrays = (value.values,) if isinstance(value, Ragged) else (value,)
                # all() of an array takes twice as long
                if any(np.count_nonzero(np.isfinite(one)) < one.size for one in arrays):
                    raise NotFinite("the result is not finite: verify the checkpoint")
        except Exception as error:
            logger.exception("%s: %d sequences could not be computed", self.name, len(work))
            self._failures += 1
            self._telemetry.failed_batches.inc()
            raise (error if isinstance(error, NotFinite) else BackendError(INTERNAL)) from error
        seconds = time.monotonic() - started_at
        self._failures = 0
        with self._lock:
            decay = 1 - 1 / RATE_BATCHES
            self._ran_tokens = decay * self._ran_tokens + work.tokens
            self._ran_s = decay * self._ran_s + seconds
        self._telemetry.batch_size.observe(len(work))
        self._telemetry.batch_tokens.observe(work.tokens)
        return values

    def snapshot(self) -> EngineState:
        """The state of the engine at this moment. It has no buckets, and nothing waits."""
        return EngineState(
            waiting_inputs=0,
            waiting_tokens=0,
            lanes={lane: LaneState(0, 0, 0.0) for lane in get_args(Priority)},
            failures=(self._failures,),
            stuck=0,
            costs={},
            cost_sources={},
            drift=1.0,
            lost_share=0.0,
            timed=True,
            compiled=(),
            covered=True,
            ran={},
            longest_call_s=0.0,
            closing=self._closing,
            threads=0,
        )

    def close(self, timeout_s: float = 20.0) -> None:
        """Compute nothing more."""
        self._closing = True

    def free(self) -> None:
        """Nothing: the model is freed with the engine."""


ServedEngine = Engine | HostEngine
"""What a loaded model may have: an engine with a queue, to which requests are submitted, or one
that computes in the thread which asks."""
