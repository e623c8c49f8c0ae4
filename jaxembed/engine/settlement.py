"""Writes the answers of a batch into the tickets that asked for them."""

from collections.abc import Iterable

import numpy as np

from jaxembed.engine.recovery import Answers
from jaxembed.engine.ticket import Entry, Ticket
from jaxembed.errors import NotFinite


def settle_answers(answers: Answers, started_at: float, seconds: float) -> None:
    """Write the answers, or their error, into the tickets, in one step for each ticket.

    `started_at` is the time.monotonic() at which the batch started, and `seconds` its duration.
    """
    by_ticket: dict[Ticket, tuple[list[int], list[int]]] = {}
    for k, entry in enumerate(answers.entries):
        for ticket, index in entry.claims.items():
            if ticket not in by_ticket:
                by_ticket[ticket] = ([], [])
            chosen, places = by_ticket[ticket]
            chosen += [k] * len(index)
            places += index
    for ticket, (chosen, places) in by_ticket.items():
        at = np.array(places)
        ticket.queue_s[at] = started_at - ticket.queued_at
        ticket.inference_s[at] = seconds
        if answers.error is not None:
            ticket.fail(places, _with_input(answers.error, places))
            continue
        ticket.answer(at, answers.values_of(chosen, ticket.work.outputs))


def fail_entries(entries: Iterable[Entry], error: Exception) -> None:
    """Fail the entries in every ticket that asked for them."""
    for entry in entries:
        for ticket, index in entry.claims.items():
            ticket.fail(index, error)


def _with_input(error: Exception, places: list[int]) -> Exception:
    """Name the input that caused the error, if the error is that of one input."""
    return NotFinite(f"input {min(places)}: {error}") if isinstance(error, NotFinite) else error
