"""The threads in which inputs are made ready: what is small waits for nothing large."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxembed.errors import BackendError

_thread = threading.local()  # `is_for_small` says what the current thread is for


class _LargeError(Exception):
    """A job with a large input is in a thread for small ones."""


def is_for_small() -> bool:
    """Whether the current thread is one for small inputs."""
    return getattr(_thread, "is_for_small", False)


def go_on_among_large() -> None:
    """Begin the current job anew in a thread for large inputs, unless it is in one already, or in
    none of JobThreads."""
    if is_for_small():
        raise _LargeError


class JobThreads(Executor):
    """Threads for small inputs, and as many for large ones. A job begins among the small ones,
    where its inputs are looked at, and goes on among the large ones if it has one of these."""

    def __init__(self, workers: int, name: str):
        self.workers = workers
        begin = partial(setattr, _thread, "is_for_small", True)
        self._small = ThreadPoolExecutor(workers, name, begin)
        self._large = ThreadPoolExecutor(workers, f"{name}-large")

    def submit(self, call: Callable, /, *arguments: Any, **named: Any) -> Future:
        """Run a job in a thread. Raises RuntimeError after `shutdown`."""
        answer: Future = Future()
        self._small.submit(self._run, [answer, partial(call, *arguments, **named)])
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further jobs. With `wait` all are done when it returns; without, those that are
        not among the large ones yet and belong there fail. `cancel_futures` is not served: whoever
        was given an answer may cancel it."""
        self._small.shutdown(wait)
        self._large.shutdown(wait)

    def _run(self, task: list[Any]) -> None:
        """Run the job of a task, unless its answer was cancelled."""
        # The task holds them no longer: an answer keeps its error, and that keeps the frames it
        # went through and the thread's below them, in which the task is.
        answer, job = task
        task.clear()
        try:
            _settle(answer, None if answer.cancelled() else job())
        except _LargeError:
            try:
                self._large.submit(self._run, [answer, job])
            except RuntimeError:  # they were shut down
                _settle(answer, error=BackendError("this Embedder is closed"))
        except BaseException as error:
            _settle(answer, error=error)
        finally:
            del answer, job  # the frames that an error keeps must not lead back to the answer


def _settle(answer: Future, result: Any = None, *, error: BaseException | None = None) -> None:
    """Answer with a result or an error, unless the answer was cancelled."""
    if not answer.set_running_or_notify_cancel():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
