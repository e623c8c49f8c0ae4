"""What a request needs of an engine, wherever the engine runs."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxembed.engine.ticket import Ticket
from jaxembed.inputs import Priority
from jaxembed.work import Work


@runtime_checkable
class EngineClient(Protocol):
    """An engine in this process, or the near end of one elsewhere."""

    def submit(
        self,
        work: Work,
        wake: Callable[[], object] | None = None,
        priority: Priority | None = None,
    ) -> Ticket:
        """Queue the work of one request, as `Engine.submit` does."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Drop what is still queued of a request, because its client has gone."""
        ...
