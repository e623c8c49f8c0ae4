"""The tasks of a model: how inputs are tokenized and how answers are made. Runs nothing."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np

from jaxembed.config import TextConfig
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import EmptyInput, InvalidInput, WrongTask
from jaxembed.inputs import Input, Pair, Priority, Text
from jaxembed.options import Embeddings, EncodeOptions, ScoreOptions, Scores
from jaxembed.outputs import OutputName
from jaxembed.postprocess import shape_vectors
from jaxembed.processors.text import Rules, TextProcessor, Tokenized
from jaxembed.spec import ModelSpec, Task
from jaxembed.work import WorkResult

DOES: dict[Task, tuple[Task, ...]] = {  # the tasks that a model of each task can do
    "embed": ("embed",),
    "classify": ("classify",),
    "rerank": ("rerank", "classify"),
}
KIND: dict[Task, str] = {
    "embed": "an embedding model",
    "classify": "a classifier",
    "rerank": "a reranker",
}
LOGITS: frozenset[OutputName] = frozenset({"logits"})

Answer = TypeVar("Answer")
Tokenize = Callable[[Sequence], Tokenized]


@dataclass(frozen=True)
class Run:
    """The results of the tokenizer and the engine for one request."""

    ticket: Ticket
    tokenized: Tokenized
    tokenization_s: float  # all of the inputs

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The fields that Embeddings and Scores have in common."""
        return {
            "num_tokens": self.tokenized.work.lengths.astype(np.int64),
            "truncated": self.tokenized.truncated,
            "tokenization_s": self.tokenization_s,
            "queue_s": _mean(self.ticket.queue_s),
            "inference_s": _mean(self.ticket.inference_s),
        }


@dataclass(frozen=True)
class Request(Generic[Answer]):
    """The steps of one request, in order.

    `begin` is called once; it returns the function that tokenizes some of the `items`, in several
    threads at once. The engine computes the `outputs`, and `answer` makes the answer of them.
    """

    items: Sequence
    begin: Callable[[], Tokenize]
    outputs: frozenset[OutputName]
    answer: Callable[[Run], Answer]
    priority: Priority | None = None


class Tasks:
    """The tasks of one model.

    All raise WrongTask if the model cannot do it, and InvalidInput for options it does not have.
    """

    def __init__(self, name: str, spec: ModelSpec, processor: TextProcessor, text: TextConfig):
        self._name = name
        self._spec = spec
        self._processor = processor
        self._text = text

    def embed(self, inputs: Sequence[Input], options: EncodeOptions) -> Request[Embeddings]:
        """The request for a vector of each input, and for the other outputs of the options."""
        check_task(self._name, self._spec, "embed")
        check_dimensions(self._spec, options.dimensions)
        prompt = self._processor.prompt(options.prompt, options.prompt_name)
        rules = Rules(
            prompt, self._truncate(options), options.truncation_side, bare_ids=options.bare_ids
        )
        answer = partial(self._embeddings, options=options)
        return Request(inputs, self._encoding(rules), options.outputs, answer, options.priority)

    def score(self, inputs: Sequence[Text | Pair], options: ScoreOptions) -> Request[Scores]:
        """The request for the logits of each text or pair."""
        check_task(self._name, self._spec, "classify")
        begin = self._encoding(self._rules(options))
        return Request(inputs, begin, LOGITS, self._scores, options.priority)

    def rerank(
        self, query: str, documents: Sequence[str], options: ScoreOptions
    ) -> Request[Scores]:
        """The request for the logit of each document with the query, which is tokenized once.

        Equal documents get equal logits and keep their order: the engine computes them once.
        Documents may be empty, as in TEI. Raises EmptyInput for an empty query.
        """
        check_task(self._name, self._spec, "rerank")
        check_query(query)
        begin = partial(self._processor.beside, query, self._rules(options))
        return Request(documents, begin, LOGITS, self._scores, options.priority)

    def compute(
        self, inputs: Sequence[Input], outputs: Collection[str], options: EncodeOptions
    ) -> Request[WorkResult]:
        """The request for any outputs of the model, as its heads give them. Raises InvalidInput for
        outputs that it does not have."""
        offered = self._spec.widths
        unknown = [name for name in outputs if name not in offered]
        if unknown or not outputs:
            raise InvalidInput(
                f"`outputs` must be some of {', '.join(offered)}. "
                f"Given: {', '.join(unknown) or 'none'}",
                field="outputs",
            )
        prompt = self._prompt(options)
        rules = Rules(prompt, self._truncate(options), options.truncation_side)
        chosen: frozenset[OutputName] = frozenset(name for name in offered if name in outputs)
        begin = self._encoding(rules)
        return Request(inputs, begin, chosen, lambda run: run.ticket.values, options.priority)

    def _prompt(self, options: EncodeOptions) -> str:
        """The prompt of the options. Raises InvalidInput for one to a model that takes none."""
        if self._spec.task == "embed":
            return self._processor.prompt(options.prompt, options.prompt_name)
        for field in ("prompt", "prompt_name"):
            if getattr(options, field) is not None:
                raise InvalidInput(
                    f"{KIND[self._spec.task]} takes no `{field}`; leave it out", field=field
                )
        return ""

    def _encoding(self, rules: Rules) -> Callable[[], Tokenize]:
        return lambda: partial(self._processor.encode, rules=rules)

    def _rules(self, options: ScoreOptions) -> Rules:
        most = options.max_document_tokens
        if most is not None and most < 1:
            raise InvalidInput(
                f"`max_document_tokens` must be 1 or more. Given: {most}",
                field="max_document_tokens",
            )
        if options.instruction is not None and self._spec.template is None:
            raise InvalidInput(
                "this model takes no `instruction`; leave it out", field="instruction"
            )
        side = options.truncation_side
        return Rules("", self._truncate(options), side, options.instruction, most)

    def _truncate(self, options: EncodeOptions | ScoreOptions) -> bool:
        return self._text.truncate if options.truncate is None else options.truncate

    def _embeddings(self, run: Run, options: EncodeOptions) -> Embeddings:
        values = dict(run.ticket.values)
        if "dense" in values:
            said = self._spec.heads["dense"].normalize
            normalize = said if options.normalize is None else options.normalize
            values["dense"] = shape_vectors(
                values["dense"], dimensions=options.dimensions, normalize=normalize
            )
        return Embeddings(values, **run.figures)

    def _scores(self, run: Run) -> Scores:
        spec = self._spec
        logits = run.ticket.values["logits"]
        return Scores(logits, spec.labels, spec.score_function, **run.figures)


def check_task(name: str, spec: ModelSpec, task: Task) -> None:
    """Raises WrongTask if a model cannot do the task."""
    if task not in DOES[spec.task]:
        raise WrongTask(
            f"{name} is {KIND[spec.task]}: it cannot {task}, only {' and '.join(DOES[spec.task])}"
        )


def check_dimensions(spec: ModelSpec, dimensions: int | None) -> None:
    """Raises InvalidInput for more dimensions than a model has, or fewer than one."""
    if dimensions is not None and not 0 < dimensions <= spec.dim:
        raise InvalidInput(
            f"`dimensions` must be from 1 to {spec.dim}, the size of this model's "
            f"embeddings. Given: {dimensions}",
            field="dimensions",
        )


def check_query(query: str) -> None:
    """Raises EmptyInput for an empty query."""
    if not query:
        raise EmptyInput("query")


def _mean(seconds: np.ndarray) -> float:
    return sum(seconds.tolist()) / len(seconds) if len(seconds) else 0.0
