"""The clock and the counters of one request. Knows no route and no body."""

import asyncio
import time
from types import TracebackType

from quart import Response

from jaxembed.embedder import Embedder
from jaxembed.options import Embeddings, Scores
from jaxembed.server.body import RequestSize
from jaxembed.server.service import Service, compute_type


class Meter:
    """Counts a request when it is accepted and when it is answered, or when its client vanishes.

    Whatever else goes wrong is counted where it becomes an answer, in `errors.refuse`.
    """

    embedder: Embedder  # once accepted

    def __init__(self, service: Service):
        self.service = service
        self.started_at = time.perf_counter()

    def __enter__(self) -> "Meter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, asyncio.CancelledError):  # Quart cancels when the client is gone
            self.service.telemetry.request_failure.labels("dropped").inc()

    def accept(self, embedder: Embedder, size: RequestSize) -> None:
        """Count the request as accepted, for the model that will answer it."""
        self.embedder = embedder
        embedder.telemetry.request_count.labels(size.method).inc()

    def answered(self, size: RequestSize, answer: Embeddings | Scores) -> float:
        """Count the request as answered; the seconds since it came."""
        total_s = time.perf_counter() - self.started_at
        telemetry = self.embedder.telemetry
        telemetry.request_success.labels(size.method).inc()
        telemetry.request_duration.observe(total_s)
        telemetry.request_tokenization.observe(answer.tokenization_s)
        telemetry.request_queue.observe(answer.queue_s)
        telemetry.request_inference.observe(answer.inference_s)
        return total_s

    def stamp(self, response: Response, size: RequestSize, answer: Embeddings | Scores) -> Response:
        """Count the request as answered and tell the client where its time went."""
        total_ms = _ms(self.answered(size, answer))
        response.headers.extend(  # `update` would look for each name first: 2 us a header
            {
                "x-compute-type": compute_type(self.embedder),
                "x-compute-time": total_ms,
                "x-total-time": total_ms,
                "x-tokenization-time": _ms(answer.tokenization_s),
                "x-queue-time": _ms(answer.queue_s),
                "x-inference-time": _ms(answer.inference_s),
                "x-compute-characters": str(size.characters),
                "x-compute-tokens": str(int(answer.num_tokens.sum())),
            }
        )
        if answer.truncated:
            response.headers.add("x-truncated-inputs", str(answer.truncated))
        return response


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))
