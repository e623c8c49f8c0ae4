"""What a model can be asked for, and how the inputs of each task are tokenized. Runs nothing."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxembed.config import TextConfig
from jaxembed.errors import EmptyInput, InvalidInput, WrongTask
from jaxembed.options import EncodeOptions, ScoreOptions
from jaxembed.processors.text import Rules, TextProcessor, Tokenized
from jaxembed.spec import ModelSpec, Task

Tokenize = Callable[[Sequence], Tokenized]

DOES: dict[Task, tuple[Task, ...]] = {  # what a model of a task can be asked for
    "embed": ("embed",),
    "classify": ("classify",),
    "rerank": ("rerank", "classify"),
}
KIND: dict[Task, str] = {
    "embed": "an embedding model",
    "classify": "a classifier",
    "rerank": "a reranker",
}


class Tasks:
    """The tasks of one model: each gives what tokenizes chunks of a request's inputs.

    All raise WrongTask if the model cannot do it, and InvalidInput for options it does not have.
    """

    def __init__(self, name: str, spec: ModelSpec, processor: TextProcessor, text: TextConfig):
        self._name = name
        self._spec = spec
        self._processor = processor
        self._text = text

    def embed(self, options: EncodeOptions) -> Tokenize:
        """Of Text, Pair and Tokens."""
        check_task(self._name, self._spec, "embed")
        check_dimensions(self._spec, options.dimensions)
        prompt = self._processor.prompt(options.prompt, options.prompt_name)
        rules = Rules(prompt, self._truncate(options), options.truncation_side)
        return partial(self._processor.encode, rules=rules)

    def score(self, options: ScoreOptions) -> Tokenize:
        """Of Text and Pair."""
        check_task(self._name, self._spec, "classify")
        return partial(self._processor.encode, rules=self._rules(options))

    def rerank(self, query: str, options: ScoreOptions) -> Tokenize:
        """Of the documents, which may be empty as in TEI; the query, tokenized once, may not.

        Raises EmptyInput.
        """
        check_task(self._name, self._spec, "rerank")
        if not query:
            raise EmptyInput("Input validation error: `query` cannot be empty", field="query")
        return self._processor.beside(query, self._rules(options))

    def _rules(self, options: ScoreOptions) -> Rules:
        most = options.max_document_tokens
        if most is not None and most < 1:
            raise InvalidInput(
                f"`max_document_tokens` must be 1 or more. Given: {most}",
                field="max_document_tokens",
            )
        if options.instruction is not None and self._spec.template is None:
            raise InvalidInput(
                f"{self._name} takes no `instruction`; leave it out", field="instruction"
            )
        side = options.truncation_side
        return Rules("", self._truncate(options), side, options.instruction, most)

    def _truncate(self, options: EncodeOptions | ScoreOptions) -> bool:
        return self._text.truncate if options.truncate is None else options.truncate


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
