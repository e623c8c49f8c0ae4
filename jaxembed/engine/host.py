"""Runs static models on the host, without a device, compilation, buckets or a queue.

`HostEngine.compute` computes in the calling thread. So the thread that tokenizes a request can also
compute the request, and a short text needs only one thread.
"""

import logging
import threading
import time
from typing import get_args

import numpy as np

from jaxembed.data.inputs import Priority
from jaxembed.data.work import Ragged, SparseRows, Work, WorkResult
from jaxembed.engine.engine import INTERNAL, RATE_BATCHES, Engine, EngineState, QueueState
from jaxembed.errors import BackendError, NotFinite
from jaxembed.models.static import StaticModel
from jaxembed.observability.metrics import Telemetry

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed"


class HostEngine:
    """The engine of a static model, with `compute` in place of the method `submit` of Engine.

    The other methods are those of Engine. Several threads may call `compute` at the same time.
    """

    # no device can fail or hang
    healthy = True
    stuck = False
    temporary_bytes = 0  # no device memory is used

    def __init__(self, model: StaticModel, telemetry: Telemetry, *, name: str = "model"):
        """Make an engine for a loaded model. `name` is the name of the model in the log."""
        self.name = name
        self._model = model
        self._telemetry = telemetry
        self._started = self._closing = False
        self._ran_tokens = self._ran_s = 0.0  # decaying sums over the recent calls of `compute`
        self._failures = 0  # number of consecutive calls of `compute` that failed
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether the engine is started and not closed."""
        return self._started and not self._closing

    @property
    def tokens_per_s(self) -> float:
        """The recent throughput in tokens per second of a computing thread; 0 before any call."""
        return self._ran_tokens / max(self._ran_s, 1e-6)

    def start(self) -> None:
        """Make the engine ready."""
        self._started = True

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return at once, because there is nothing to compile. Raises BackendError if the engine is
        closed."""
        if self._closing:
            raise BackendError(CLOSED)

    def compute(self, work: Work) -> WorkResult:
        """Compute the outputs of the work in the calling thread, and return them by name.

        Raises NotFinite if an output holds NaN or infinity, and BackendError if the computation
        fails or the engine is closed.
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
                # np.isfinite(x).all() takes twice as long
                if any(np.count_nonzero(np.isfinite(x)) < x.size for x in arrays):
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
        """Return the current state. The fields of buckets and of waiting work are empty or 0."""
        return EngineState(
            waiting_inputs=0,
            waiting_tokens=0,
            queues={queue: QueueState(0, 0, 0.0) for queue in get_args(Priority)},
            failures=(self._failures,),
            stuck=0,
            joined=1,
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
        """Refuse all further work."""
        self._closing = True

    def free(self) -> None:
        """Do nothing: the memory of the model is freed with this object."""


ServedEngine = Engine | HostEngine
"""The engine of a loaded model: with a queue and devices, or on the host without a queue."""
