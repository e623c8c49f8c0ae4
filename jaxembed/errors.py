"""Defines every exception that jaxembed raises on purpose. `server/errors.py` has the HTTP status
of each.

JaxembedError
  * ConfigError             a flag or setting that cannot be honoured
      - Unanswered          a URL where nothing answers
  * CheckpointError         a model directory, hub id or checkpoint that cannot be used
      - HubUnreachable      a hub that gives no answer
      - StoreUnreachable    an object store that gives no answer
      - UnsupportedModel    an architecture, module or activation that is not supported
      - ConversionError     tensors that are missing, unused or of the wrong shape, all listed
  * InvalidInput            a request with a value that is not allowed
      - EmptyInput          an empty text, query or list of token ids
          - NoInputs        a request without inputs
      - InputTooLong        an input over the token limit, while truncation is off
      - TooManySpans        an input with more spans to pool than a row of a batch can hold
      - InvalidImage        a file that is no image, or an image that cannot be decoded
      - WrongParts          an input of texts and images that the model does not take
      - InvalidChunk        a chunk that is not a range of its text, or has no tokens
      - BareTokenIds        token ids that lack the tokenizer's special tokens
      - UnknownPrompt       a prompt name that the checkpoint lacks
      - UnknownPurpose      a purpose of texts that is not one of the known ones
      - UnknownRoute        a route that the model lacks, or no route though one is needed
      - BatchTooLarge       more inputs than one request may have
      - RequestTooLarge     more tokens or bytes than one request may have
      - UnknownModel        a model that is not served here
      - MediaUrlError       a URL whose file may not be fetched, or does not arrive
  * WrongTask               a task that the model cannot do
  * TokenizerError          a text that the tokenizer refused
  * Forbidden               a model or a route that an API key may not use
  * Overloaded              the queue is full; try again after `retry_after_s`
      - QuotaExceeded       an API key has used its quota; try again after `retry_after_s`
      - ShuttingDown        the server drains and admits nothing more
  * BackendError            a device that failed while it ran a request
      - NotFinite           NaN or infinity in a result, even when its sequence is run alone
      - DeviceStuck         a model whose devices all hang
      - ModelUnavailable    a model that is not in memory, and could not be loaded in time
      - NoRoom              a model for which there is not enough memory
  * Cancelled               a result that nobody waits for any more
"""

from collections.abc import Sequence
from typing import Self

# The exceptions that end a thread or the process. Any other BaseException that an extension raises,
# such as a Rust panic, is handled like an Exception.
INTERRUPTS = (GeneratorExit, KeyboardInterrupt, SystemExit)


def counted(count: int, noun: str) -> str:
    """Return a number and a noun for a message: "1 text", "2 texts"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class JaxembedError(Exception):
    """The base of all exceptions of this package."""


class ConfigError(JaxembedError):
    """A flag or setting cannot be honoured. The message says what was wanted, what was given and
    what to do."""


class Unanswered(ConfigError):
    """Nothing answers at a URL, or what answers does not speak HTTP."""


class CheckpointError(JaxembedError):
    """A model directory, hub id or checkpoint cannot be used."""


class HubUnreachable(CheckpointError):
    """A model is not downloaded yet, and the hub cannot be reached or fails."""


class StoreUnreachable(CheckpointError):
    """An object store does not answer, or answers with an internal error."""


class UnsupportedModel(CheckpointError):
    """A model needs a feature that is not supported. The message names the feature and those that
    are supported."""


class ConversionError(CheckpointError):
    """A model cannot be converted. `problems` lists every reason."""

    def __init__(self, model: str, problems: list[str]):
        self.problems = problems
        lines = "\n  ".join(problems)
        count = counted(len(problems), "problem")
        super().__init__(f"cannot convert {model}: {count}\n  {lines}")


class InvalidInput(JaxembedError):
    """A request has a value that is not allowed.

    `field` names the field of the request that has the value; None means the field of the inputs.
    `index` is the index of the refused input if there are several, and `part` that of the refused
    part of an input of several parts.
    """

    part: int | None = None

    def __init__(self, message: str, field: str | None = None, index: int | None = None):
        super().__init__(message)
        self.field = field
        self.index = index

    def at(self, index: int | None, field: str | None = None, part: int | None = None) -> Self:
        """Return a copy of this error for the input number `index`, and for `field` and `part` if
        they are given. Callers use it when they know better where in the request the value is."""
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__, index=index, field=field or self.field)
        if part is not None:
            error.part = part
        return error


class EmptyInput(InvalidInput):
    """A text, a query or a list of token ids is empty."""

    def __init__(self, field: str | None = None, index: int | None = None):
        super().__init__(f"the {field or 'input'} is empty", field, index)


class NoInputs(EmptyInput):
    """A request has no inputs. `field` names the field that should hold the inputs."""


class InputTooLong(InvalidInput):
    """An input has more tokens than the limit, and truncation is off.

    `got` is the input's number of tokens, and `limit` the maximum. If `exact` is False, the input
    was not read to its end and has at least `got` tokens.
    """

    def __init__(self, limit: int, got: int, index: int | None = None, *, exact: bool = True):
        count = got if exact else f"at least {got}"
        super().__init__(
            f"the input has {count} tokens, the limit is {limit}; truncate=True cuts it",
            field=None,
            index=index,
        )
        self.limit = limit
        self.got = got
        self.exact = exact


class TooManySpans(InvalidInput):
    """An input has `got` spans of tokens to pool into vectors, and the maximum is `limit`."""

    def __init__(self, limit: int, got: int, index: int | None = None):
        super().__init__(
            f"the input has {got} spans, the limit is {limit}; send fewer", None, index
        )
        self.limit = limit
        self.got = got


class InvalidImage(InvalidInput):
    """A file is not an image that can be decoded. The message says what was given and wanted."""


class WrongParts(InvalidInput):
    """The model does not take an input of these texts and images: it takes one of them, or their
    images or texts have too many tokens."""


class InvalidChunk(InvalidInput):
    """A chunk of an input is not a range of the text, or has no tokens. `chunk` is the index of the
    chunk. `reason` is the message after "chunk 0 "."""

    def __init__(self, chunk: int, reason: str):
        super().__init__(f"chunk {chunk} {reason}")
        self.chunk = chunk
        self.reason = reason


class BareTokenIds(InvalidInput):
    """Token ids lack the special tokens of the model's tokenizer, so another tokenizer may have
    made them.

    `before` and `after` are the special tokens that the model's tokenizer puts around every text.
    """

    def __init__(self, before: Sequence[int], after: Sequence[int]):
        around = f"{list(before)} before and {list(after)} after"
        super().__init__(
            f"the token ids lack the special tokens of this model's tokenizer: {around}"
        )
        self.before = tuple(before)
        self.after = tuple(after)


class UnknownPrompt(InvalidInput):
    """The checkpoint has no prompt `name`. `available` are the names of its prompts."""

    def __init__(self, name: str, available: Sequence[str]):
        known = ", ".join(available) or "no prompts"
        super().__init__(f"the checkpoint has no prompt {name!r}; it has {known}", "prompt_name")
        self.name = name
        self.available = tuple(available)


class UnknownPurpose(InvalidInput):
    """A request gives a purpose of its texts, such as "query", that is not in `known`."""

    def __init__(self, purpose: str, known: Sequence[str], field: str | None = None):
        super().__init__(f"unknown purpose {purpose!r}; wanted one of {', '.join(known)}", field)
        self.purpose = purpose
        self.known = tuple(known)


class UnknownRoute(InvalidInput):
    """A request asks for the route `asked`, which is not among `available`, the routes of the
    model. If `asked` is None, the request names no route and the model has no default route."""

    def __init__(self, asked: str | None, available: Sequence[str], field: str = "prompt_name"):
        names = ", ".join(filter(None, available)) or "no routes"
        missing = "names no route" if asked is None else f"asks for {asked!r}, which is not a route"
        super().__init__(f"the request {missing} of this model; it has {names}", field)
        self.asked = asked
        self.available = tuple(available)


class BatchTooLarge(InvalidInput):
    """A request has more inputs than allowed."""


class RequestTooLarge(InvalidInput):
    """A request has more tokens or bytes than can ever be admitted."""


class UnknownModel(InvalidInput):
    """The server does not have this model. The message names the models that it has."""


class MediaUrlError(InvalidInput):
    """The server may not fetch the URL of a file, such as an image, or the file does not arrive.

    `source` is the URL or its host. `rule` says what was refused or what failed. It quotes nothing
    of the answer, because clients could read hosts through the server that they cannot reach.
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
    """An API key may not use a model or a route. The message has the name of the key."""


class Overloaded(JaxembedError):
    """The queue is full, and the request was discarded. Try again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """An API key has used up its requests or tokens for this minute, or too many of its inputs are
    waiting."""


class ShuttingDown(Overloaded):
    """The server is shutting down: it finishes admitted requests and refuses new ones."""


class BackendError(JaxembedError):
    """A device failed while it ran a request. Internal details are in the log, not in the
    message."""


class NotFinite(BackendError):
    """A result holds NaN or infinity even when its sequence is run alone."""


class DeviceStuck(BackendError):
    """Every device of the model hangs: it does not return from what it runs. No request can run
    until one device returns."""

    def __init__(self) -> None:
        super().__init__(
            "the device does not return from a call; nothing runs until it does, or until the "
            "process is restarted"
        )


class ModelUnavailable(BackendError):
    """A model is not in memory, and loading failed or takes longer than a request may wait."""


class NoRoom(BackendError):
    """A model needs more memory than the models that cannot be evicted leave free."""


class Cancelled(JaxembedError):
    """A request was dropped, because nobody waits for its result any more."""
