"""What a request, and a loaded model, need of an engine, wherever the engine runs."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxembed.data.inputs import Priority
from jaxembed.data.work import Work
from jaxembed.engine.state import EngineState
from jaxembed.engine.ticket import Ticket
from jaxembed.observability.tracing import TicketTrace


@runtime_checkable
class EngineClient(Protocol):
    """An engine in this process, or the near end of one elsewhere, as requests see it."""

    def submit(
        self,
        work: Work,
        wake: Callable[[], object] | None = None,
        priority: Priority | None = None,
        trace: TicketTrace | None = None,
    ) -> Ticket:
        """Queue the work of one request, as `Engine.submit` does."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Drop what is still queued of a request, because its client has gone."""
        ...


@runtime_checkable
class ServedEngine(Protocol):
    """An engine as a loaded model sees it, beside what its requests do. Engine has the words for
    each of its members."""

    @property
    def ready(self) -> bool:
        """Whether any request can be served now."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether it answers requests."""
        ...

    @property
    def stuck(self) -> bool:
        """Whether only a restart helps."""
        ...

    @property
    def tokens_per_s(self) -> float:
        """The recent throughput in tokens per second of computing; 0 before there was any."""
        ...

    @property
    def temporary_bytes(self) -> int:
        """The most memory that its runs take besides what it keeps."""
        ...

    def start(self) -> None:
        """Start its threads."""
        ...

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until it can serve any request. Raises TimeoutError, or why it never will."""
        ...

    def snapshot(self) -> EngineState:
        """Its state at this moment."""
        ...

    def close(self, timeout_s: float = 20.0) -> None:
        """Serve what is queued, and end the threads. What is left after the time limit fails."""
        ...

    def free(self) -> None:
        """Free the memory of the model, after `close`."""
        ...
