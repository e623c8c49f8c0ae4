"""Runs each request of a model on its route: for the library, or admitted for a server."""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from jaxembed.data.spec import IMAGE_ROUTE
from jaxembed.engine.admission import Admission, Held
from jaxembed.errors import NoInputs
from jaxembed.runtime.options import Embeddings, Scores
from jaxembed.runtime.requests import Answer, EncodeRequest, MixedRequest, Request
from jaxembed.runtime.routes import LoadedRoute

IMAGES_A_PART = 64  # of a call: the next ones are decoded while these are computed
PARTS_AT_ONCE = 2  # of a request in parts: one is decoded while another is computed


class Dispatcher:
    """Runs requests on the routes of one model. A request in parts has one route for each part."""

    def __init__(self, routes: Mapping[str, LoadedRoute], admission: Admission):
        self._routes, self._admission = routes, admission

    def run(self, request: Request[Answer]) -> Answer:
        """Run a request and block until it is answered. Nothing is refused for want of room.

        Raises the errors of InvalidInput and BackendError.
        """
        if isinstance(request, MixedRequest):
            return cast(Answer, self._run_parts(request))
        is_long = request.route == IMAGE_ROUTE and len(request.items) > IMAGES_A_PART
        if is_long and isinstance(request, EncodeRequest):
            return cast(Answer, self._run_parts(request.divided(IMAGES_A_PART)))
        return self._routes[request.route].runner.run(request)

    def _run_parts(self, request: MixedRequest) -> Embeddings:
        """Run the parts of a request, the next one while one is computed."""

        def run(number: int) -> Embeddings:
            with request.placed(number) as part:
                return self.run(part)

        threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="parts")
        try:
            return request.joined(list(threads.map(run, range(len(request.parts)))))
        finally:
            threads.shutdown(cancel_futures=True)

    async def run_async(self, request: Request[Answer]) -> Answer:
        """`run` without blocking the event loop. If the task is cancelled, what is still queued of
        the request is dropped."""
        if isinstance(request, MixedRequest):
            return cast(Answer, await self._answer_parts(request, self.run_async))
        return await self._routes[request.route].runner.run_async(request)

    async def answer(self, request: Request[Answer], held: Held | None = None) -> Answer:
        """`run_async` for a server: admit the request first, as a part of the one that `held`
        counts for.

        Raises also NoInputs, and Overloaded, RequestTooLarge or ShuttingDown before any work; the
        first two also after it, if the answer is larger than such answers are. If `held` has an
        account, it is charged for the tokens, and refuses what its key may not have.
        """
        if not request.items:
            raise NoInputs()
        if isinstance(request, MixedRequest):
            answer = await self._answer_parts(request, partial(self.answer, held=held))
            return cast(Answer, answer)
        route = self._routes[request.route]
        estimate = route.processor.estimate(request.inputs(), request.rules)
        with self._admission.admit(request.cost(route.spec, *estimate), held) as permit:
            answer = await route.runner.run_async(
                request, lambda *size: permit.correct(request.cost(route.spec, *size))
            )
            permit.held.charge(request.excess_bytes(answer))
            if isinstance(answer, Embeddings | Scores):
                permit.settle(int(answer.num_tokens.sum()))
            return answer

    async def _answer_parts(
        self, request: MixedRequest, answer: Callable[[EncodeRequest], Awaitable[Embeddings]]
    ) -> Embeddings:
        """The answer to a request in parts, which are answered in turn."""
        answers: list[Embeddings] = []
        for number in range(len(request.parts)):
            with request.placed(number) as part:
                answers.append(await answer(part))
        return request.joined(answers)
