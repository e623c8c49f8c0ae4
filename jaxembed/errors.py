"""Defines every exception that is raised on purpose. `server/errors.py` maps them to HTTP statuses.

JaxembedError
  * ConfigError             a flag or setting that cannot be honoured
      - Unanswered          a URL where nothing answers
  * CheckpointError         a model directory, hub id or checkpoint that cannot be used
      - HubUnreachable      a hub that gives no answer
      - StoreUnreachable    an object store that gives no answer
      - UnsupportedModel    an architecture, module or activation we have no code for
      - ConversionError     tensors missing, unused or wrongly shaped, all listed at once
  * InvalidInput            the request is wrong
      - EmptyInput          a text, a query or a list of token ids with nothing in it
          - NoInputs        a request with nothing to do
      - InputTooLong        more tokens than the limit, and truncation is off
      - TooManySpans        more spans of one input than a row of a batch has slots
      - InvalidImage        a file that is no image, or one that is not decoded
      - InvalidChunk        a chunk of a text that is no range of it, or has no tokens
      - BareTokenIds        token ids that lack the tokenizer's special tokens
      - UnknownPrompt       a prompt name that the checkpoint lacks
      - UnknownPurpose      a purpose of texts that is not one of the known ones
      - UnknownRoute        no route of the model is meant, or none that it has
      - BatchTooLarge       more inputs than one request may carry
      - RequestTooLarge     more tokens or bytes than one request may bring
      - UnknownModel        a model that is not served here
      - MediaUrlError       a URL of a file that may not or cannot be fetched
  * WrongTask               a task this kind of model cannot do
  * TokenizerError          the tokenizer refused the text
  * Forbidden               a model or a route that an API key may not use
  * Overloaded              the queue is full; try again after `retry_after_s`
      - QuotaExceeded       a key has used what it may; try again after `retry_after_s`
      - ShuttingDown        the server drains and admits nothing more
  * BackendError            the device failed on this request
      - NotFinite           a result holds NaN or infinity even when run alone
      - DeviceStuck         no device of the model returns from the call it is in
      - ModelUnavailable    a model that is not in memory and could not be loaded, or not yet
      - NoRoom              a model for which there is no memory
  * Cancelled               nobody waits for the result any more
"""

from collections.abc import Sequence
from typing import Self

# What ends a thread or the process. Any other BaseException that a call into an extension raises,
# such as a panic of Rust, is an error like an Exception.
INTERRUPTS = (GeneratorExit, KeyboardInterrupt, SystemExit)


class JaxembedError(Exception):
    """The base of all exceptions of this package."""


class ConfigError(JaxembedError):
    """A setting cannot be honoured. The message says what was wanted, what came and what to do."""


class Unanswered(ConfigError):
    """Nothing answers at a URL, or it does not speak HTTP."""


class CheckpointError(JaxembedError):
    """A model directory, hub id or checkpoint cannot be used."""


class HubUnreachable(CheckpointError):
    """The hub cannot be asked for a model that is not downloaded yet, or it failed."""


class StoreUnreachable(CheckpointError):
    """An object store could not be asked, or its answer was an error of its own."""


class UnsupportedModel(CheckpointError):
    """A model needs something that is not supported. The message names it and what is supported."""


class ConversionError(CheckpointError):
    """A model cannot be converted. `problems` lists every reason."""

    def __init__(self, model: str, problems: list[str]):
        self.problems = problems
        lines = "\n  ".join(problems)
        super().__init__(f"cannot convert {model}: {len(problems)} problem(s)\n  {lines}")


class InvalidInput(JaxembedError):
    """A request is wrong.

    `field` names the wrong field of the request; None means the inputs. `index` is the index of the
    wrong input if there are several.
    """

    def __init__(self, message: str, field: str | None = None, index: int | None = None):
        super().__init__(message)
        self.field = field
        self.index = index

    def at(self, index: int | None, field: str | None = None) -> Self:
        """The same error with this index, and if one is given with this field."""
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__, index=index, field=field or self.field)
        return error


class EmptyInput(InvalidInput):
    """A text, a query or a list of token ids is empty."""

    def __init__(self, field: str | None = None, index: int | None = None):
        super().__init__(f"the {field or 'input'} is empty", field, index)


class NoInputs(EmptyInput):
    """A request has no inputs. `field` names the field that should hold them."""


class InputTooLong(InvalidInput):
    """An input has more tokens than the limit, and truncation is off.

    `got` is its number of tokens and `limit` the largest allowed one. If `exact` is False, the
    input was not read to its end and has at least `got` tokens.
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


class InvalidImage(InvalidInput):
    """A file is not an image that is decoded. The message says what came and what was wanted."""


class InvalidChunk(InvalidInput):
    """The chunk number `chunk` of an input is wrong. `reason` says why: it follows its name."""

    def __init__(self, chunk: int, reason: str):
        super().__init__(f"chunk {chunk} {reason}")
        self.chunk = chunk
        self.reason = reason


class BareTokenIds(InvalidInput):
    """Token ids lack the special tokens of the model's tokenizer, and may be of another tokenizer.

    `before` and `after` are the ids that the tokenizer puts around every text.
    """

    def __init__(self, before: Sequence[int], after: Sequence[int]):
        around = f"{list(before)} before and {list(after)} after"
        super().__init__(
            f"the token ids lack the special tokens of this model's tokenizer: {around}"
        )
        self.before = tuple(before)
        self.after = tuple(after)


class UnknownPrompt(InvalidInput):
    """The checkpoint has no prompt `name`. `available` are the names that it has."""

    def __init__(self, name: str, available: Sequence[str]):
        known = ", ".join(available) or "it has none"
        super().__init__(f"the checkpoint has no prompt {name!r}: {known}", "prompt_name")
        self.name = name
        self.available = tuple(available)


class UnknownPurpose(InvalidInput):
    """A purpose of texts is not one of the `known` ones."""

    def __init__(self, purpose: str, known: Sequence[str], field: str | None = None):
        super().__init__(f"unknown purpose {purpose!r}; wanted one of {', '.join(known)}", field)
        self.purpose = purpose
        self.known = tuple(known)


class UnknownRoute(InvalidInput):
    """The model has several routes, `available`, and none of them is `asked` for; None if the
    request names none and the model has no default one."""

    def __init__(self, asked: str | None, available: Sequence[str], field: str = "prompt_name"):
        names = ", ".join(filter(None, available)) or "no routes"
        missing = "names no route" if asked is None else f"asks for {asked!r}, which is no route"
        super().__init__(f"the request {missing} of this model; it has {names}", field)
        self.asked = asked
        self.available = tuple(available)


class BatchTooLarge(InvalidInput):
    """A request has more inputs than allowed."""


class RequestTooLarge(InvalidInput):
    """A request has more tokens or bytes than can ever be admitted."""


class UnknownModel(InvalidInput):
    """The server does not have this model. The message names those that it has."""


class MediaUrlError(InvalidInput):
    """A URL of a file, such as a picture, may not be fetched, or its file does not arrive.

    `source` says which: the URL or its host. `rule` says what was refused or failed, and nothing
    of what answered there: clients must not learn through the server what they cannot reach.
    """

    def __init__(self, source: str, rule: str, index: int | None = None):
        super().__init__(f"{source} cannot be fetched: {rule}", None, index)
        self.source = source
        self.rule = rule


class WrongTask(JaxembedError):
    """The model cannot do this task, such as reranking with an embedding model."""


class TokenizerError(JaxembedError):
    """The tokenizer refused the text."""


class Forbidden(JaxembedError):
    """An API key may not use this model or this route. The message names the key, by its name."""


class Overloaded(JaxembedError):
    """The queue is full. Nothing of the request was kept; try again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """A key has used its requests or tokens of this minute, or too many of its inputs wait."""


class ShuttingDown(Overloaded):
    """The server finishes what it has admitted and admits nothing more."""


class BackendError(JaxembedError):
    """The device failed on this request. The message has no internal details; the log has them."""


class NotFinite(BackendError):
    """A result holds NaN or infinity even when its sequence is run alone."""


class DeviceStuck(BackendError):
    """All devices of the model hang in a call, so nothing can run until one returns."""

    def __init__(self) -> None:
        super().__init__(
            "the device does not return from a call; nothing runs until it does, or the process is "
            "started again"
        )


class ModelUnavailable(BackendError):
    """A model is not in memory, and could not be loaded, or not in the time that requests wait."""


class NoRoom(BackendError):
    """A model takes more memory than models may, beside those that must stay."""


class Cancelled(JaxembedError):
    """Nobody waits for the result any more."""
