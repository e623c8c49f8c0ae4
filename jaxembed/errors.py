"""Every exception raised on purpose. Knows no HTTP; `server/errors.py` maps them to statuses.

JaxembedError
  * ConfigError             a flag or setting that cannot be honoured
      - Unanswered          a URL where nothing answers
  * CheckpointError         a model directory, hub id or checkpoint that cannot be used
      - UnsupportedModel    an architecture, module or activation we have no code for
      - ConversionError     tensors missing, unused or wrongly shaped, all listed at once
  * InvalidInput            the request is at fault
      - EmptyInput          a text, a query or a list of token ids with nothing in it
          - NoInputs        a request with nothing to do
      - InputTooLong        more tokens than the limit, and truncation is off
      - TooManySpans        more spans of one input than a row of a batch has slots
      - BareTokenIds        token ids that lack the tokenizer's special tokens
      - UnknownPrompt       a prompt name that the checkpoint lacks
      - UnknownPurpose      a purpose of the texts that no prompt could be for
      - BatchTooLarge       more inputs than one request may carry
      - RequestTooLarge     more tokens or bytes than one request may bring
      - UnknownModel        a model that is not served here
  * WrongTask               a task this kind of model cannot do
  * TokenizerError          the tokenizer refused the text
  * Overloaded              the queue is full; try again after `retry_after_s`
      - ShuttingDown        the server drains and admits nothing more
  * BackendError            the device failed on this request
      - NotFinite           a result holds NaN or infinity even when run alone
      - DeviceStuck         no device of the model returns from the call it is in
  * Cancelled               whoever waited for the result has gone
"""

from collections.abc import Sequence


class JaxembedError(Exception):
    """Base of the tree above."""


class ConfigError(JaxembedError):
    """A setting that cannot be honoured: says what was wanted, what came and what to do."""


class Unanswered(ConfigError):
    """A URL where nothing answers, or not HTTP."""


class CheckpointError(JaxembedError):
    """A model directory, hub id or checkpoint that cannot be used."""


class UnsupportedModel(CheckpointError):
    """Names what is not supported, and what is."""


class ConversionError(CheckpointError):
    """A conversion that found problems; `problems` lists every one."""

    def __init__(self, model: str, problems: list[str]):
        self.problems = problems
        lines = "\n  ".join(problems)
        super().__init__(f"cannot convert {model}: {len(problems)} problem(s)\n  {lines}")


class InvalidInput(JaxembedError):
    """The request is at fault. `field` names the part of it that is, None the inputs themselves,
    and `index` says which of several inputs it is."""

    def __init__(self, message: str, field: str | None = None, index: int | None = None):
        super().__init__(message)
        self.field = field
        self.index = index


class EmptyInput(InvalidInput):
    """A text, a query or a list of token ids with nothing in it."""

    def __init__(self, field: str | None = None, index: int | None = None):
        super().__init__(f"the {field or 'input'} is empty", field, index)


class NoInputs(EmptyInput):
    """A request with nothing to do: `field` should hold inputs and holds none."""


class InputTooLong(InvalidInput):
    """An input of `got` tokens, where `limit` is the most, while truncation is off.

    Not `exact` means that it was not read to its end: it has at least `got` tokens.
    """

    def __init__(self, limit: int, got: int, index: int | None = None, *, exact: bool = True):
        count = got if exact else f"at least {got}"
        super().__init__(
            f"the input has {count} tokens, the limit is {limit}; truncate=True cuts it",
            None,
            index,
        )
        self.limit = limit
        self.got = got
        self.exact = exact


class TooManySpans(InvalidInput):
    """An input with `got` spans to pool, where `limit` is the most."""

    def __init__(self, limit: int, got: int, index: int | None = None):
        super().__init__(
            f"the input has {got} spans, the limit is {limit}; send fewer", None, index
        )
        self.limit = limit
        self.got = got


class BareTokenIds(InvalidInput):
    """Token ids without those that the model's tokenizer puts `before` and `after` every text: they
    may be another tokenizer's."""

    def __init__(self, before: Sequence[int], after: Sequence[int]):
        around = f"{list(before)} before and {list(after)} after"
        super().__init__(
            f"the token ids lack the special tokens of this model's tokenizer: {around}"
        )
        self.before = tuple(before)
        self.after = tuple(after)


class UnknownPrompt(InvalidInput):
    """The prompt `name` is not one of the `available` ones, which may be none."""

    def __init__(self, name: str, available: Sequence[str]):
        known = ", ".join(available) or "it has none"
        super().__init__(f"the checkpoint has no prompt {name!r}: {known}", "prompt_name")
        self.name = name
        self.available = tuple(available)


class UnknownPurpose(InvalidInput):
    """Texts for `purpose`, which is not one of the `known` ones."""

    def __init__(self, purpose: str, known: Sequence[str]):
        super().__init__(f"unknown purpose {purpose!r}; wanted one of {', '.join(known)}")
        self.purpose = purpose
        self.known = tuple(known)


class BatchTooLarge(InvalidInput):
    """More inputs than one request may carry."""


class RequestTooLarge(InvalidInput):
    """More tokens or bytes than one request may bring: it could never be admitted."""


class UnknownModel(InvalidInput):
    """A model this server does not have; the message names those it has."""


class WrongTask(JaxembedError):
    """A task this kind of model cannot do, such as reranking with an embedding model."""


class TokenizerError(JaxembedError):
    """The tokenizer refused the text."""


class Overloaded(JaxembedError):
    """The queue is full. Nothing of the request was kept; try again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(Overloaded):
    """The server finishes what it has admitted and admits nothing more."""


class BackendError(JaxembedError):
    """The device failed on this request. The message carries no internals; the log does."""


class NotFinite(BackendError):
    """A result holds NaN or infinity even when its sequence is run alone."""


class DeviceStuck(BackendError):
    """No device of the model returns from the call it is in: nothing can run until one does."""

    def __init__(self) -> None:
        super().__init__(
            "the device does not return from a call; nothing runs until it does, or the process is "
            "started again"
        )


class Cancelled(JaxembedError):
    """Whoever waited for the result has gone."""
