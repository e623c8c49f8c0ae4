"""The frames between the engine's process and its front-end processes.

A frame is a length, four bytes little-endian, and so many bytes of MessagePack: an array of the
frame's number and its fields. Both processes run the same version of jaxembed, which the first
frame of a front end says. A frame that is too long, or whose fields have other types, ends the
connection.

A front end numbers its requests and its calls. `request` is an HTTP request, which may make several
calls; each call gets one answer with its `call` number.
"""

import struct
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from jaxembed import errors
from jaxembed.data.inputs import Priority
from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import ModelSpec, Routes, Task
from jaxembed.data.work import Ragged, SparseRows, Work, WorkResult, whole_work
from jaxembed.engine.admission import Cost
from jaxembed.engine.quota import RateState
from jaxembed.errors import BackendError, JaxembedError, counted
from jaxembed.server import errors as server_errors

LENGTH = struct.Struct("<I")

PLAIN = (str, int, float, list, tuple, type(None))  # attributes of errors that are sent

Headers = list[tuple[bytes, bytes]]


class ProtocolError(Exception):
    """A frame is not allowed. It ends the connection that it came from."""


class Frame(msgspec.Struct, array_like=True, gc=False):
    """The base of all frames."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error of this package: the name of its class, its message and its attributes."""

    kind: str
    message: str
    attributes: dict[str, Any]

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Describe an error. Any but one of this package becomes a BackendError."""
        if not isinstance(error, JaxembedError):
            return Failure("BackendError", "an internal error, see the server's log", {})
        plain = {name: value for name, value in vars(error).items() if isinstance(value, PLAIN)}
        return Failure(type(error).__name__, str(error), plain)

    @property
    def error(self) -> JaxembedError:
        """The error, to be raised."""
        kind = getattr(errors, self.kind, None) or getattr(server_errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, JaxembedError)):
            kind = BackendError
        error = cast(JaxembedError, kind.__new__(kind))
        error.args = (self.message,)
        error.__dict__.update(self.attributes)
        return error


# ---- from a front end to the engine


class Hello(Frame, tag=0):
    """The first frame: the version of jaxembed."""

    version: str


class Applied(Frame, tag=1):
    """The front end uses the table of this epoch."""

    epoch: int


class Returned(Frame, tag=2):
    """The front end no longer uses a model that left its table."""

    model: int


class Metrics(Frame, tag=3):
    """What the metrics of each model have grown by since the last such frame. It comes each second,
    and is the answer to a call `Collect` of the engine with the number `call`; 0: to none."""

    call: int
    growth: dict[str, Any]  # by the model's number; "" is the server itself


class Begin(Frame, tag=4):
    """Check the API key of a request, and count the request in the quota of the key."""

    call: int
    request: int
    key: bytes
    method: str
    path: str


class Refusal(Frame, tag=5):
    """Count a request that the front end refused because its key may not use a model."""

    request: int
    reason: str


class Reserve(Frame, tag=6):
    """Admit a part of a request."""

    call: int
    request: int
    model: int
    cost: Cost
    is_run: bool


class Release(Frame, tag=7):
    """Give back what `Reserve` admitted, because nothing is computed."""

    call: int
    request: int


class Submit(Frame, tag=8):
    """Compute the outputs of some work. The part of the request was admitted by the Reserve of the
    same number, or is admitted now. Arrays are the bytes of the fields of Work."""

    call: int
    request: int
    model: int
    route: str
    priority: Priority | None
    cost: Cost
    outputs: tuple[OutputName, ...]
    adapter: int
    lengths: bytes
    planes: dict[str, bytes]
    slots: bytes  # empty: each sequence has one slot with all its tokens
    bounds: bytes
    augmentation_tokens: bytes  # empty: none
    trace: str | None  # the context of the request's span, as `traceparent`


class Cancel(Frame, tag=9):
    """Nobody waits any more for the answer to a Submit."""

    call: int


class End(Frame, tag=10):
    """A request has been answered or abandoned, and holds nothing any more. `charges` has for each
    of its parts, by number, the tokens that the answer reports."""

    request: int
    charges: dict[int, int]


class Lend(Frame, tag=11):
    """Lend the front end bytes for bodies and answers: `most` of them, or else at least `least`.
    `wanted` are the bytes that the request which needs them would hold."""

    call: int
    least: int
    most: int
    wanted: int


class GiveBack(Frame, tag=12):
    """The front end gives lent bytes back."""

    count: int


class Load(Frame, tag=13):
    """Load the models that a request may mean; with `specs_only`, those whose spec is unknown."""

    call: int
    name: str | None
    task: Task | None
    permitted: list[str] | None
    outputs: list[OutputName]
    specs_only: bool


class Rates(Frame, tag=14):
    """Return the states of the limits per minute of a request's key."""

    call: int
    request: int


class Forward(Frame, tag=15):
    """Handle a request in the engine's process. The other fields are those of ASGI's scope."""

    call: int
    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    http_version: str
    scheme: str
    client: tuple[str, int] | None


class Piece(Frame, tag=16):
    """A piece of the body of a forwarded request."""

    call: int
    body: bytes
    more: bool


class Gone(Frame, tag=17):
    """The client of a forwarded request has disconnected."""

    call: int


class Sent(Frame, tag=18):
    """The client has taken a part of the response to a forwarded request."""

    call: int


class Drained(Frame, tag=19):
    """The front end has answered the requests that were admitted when it had to drain."""


FromFront = (
    Hello
    | Applied
    | Returned
    | Metrics
    | Begin
    | Refusal
    | Reserve
    | Release
    | Submit
    | Cancel
    | End
    | Lend
    | GiveBack
    | Load
    | Rates
    | Forward
    | Piece
    | Gone
    | Sent
    | Drained
)


# ---- from the engine to a front end


class Start(Frame, tag=32):
    """The first frame: the settings of the server. `config` has the fields of ServerConfig."""

    config: dict[str, Any]
    max_bytes: int  # the limit of --max-queue-bytes
    has_keys: bool  # whether there is a key file
    audit_log: str | None
    tracing: tuple[str, str, str] | None  # endpoint, name of the service, protocol
    json_output: bool


class RouteFacts(msgspec.Struct, array_like=True, frozen=True):
    """A route of a model: its route in the checkpoint, and what the front end needs of its plan."""

    stored_as: str
    takes_texts: bool
    max_input_tokens: int
    device_name: str
    dtype: str


class ModelFacts(Frame, tag=33):
    """A model in memory. `text` has the fields of TextConfig."""

    number: int
    name: str
    path: str
    specs: Routes
    text: dict[str, Any]
    routes: dict[str, RouteFacts]


class Known(msgspec.Struct, array_like=True, frozen=True):
    """A model that the server knows. `number` is that of its ModelFacts; None: not in memory."""

    id: str
    number: int | None
    spec: ModelSpec | None
    takes_images: bool
    described: Task | None
    is_startup: bool


class Table(Frame, tag=34):
    """All models that the server knows, and its names: the index in `models` by name."""

    epoch: int
    models: list[Known]
    names: dict[str, int]
    can_load: bool


class Alive(Frame, tag=35):
    """The engine's process runs. It comes each second."""


class Granted(Frame, tag=36):
    """The answer to a call that may be refused: for Lend, how many bytes are lent."""

    call: int
    count: int


class Refused(Frame, tag=37):
    """The error of a call."""

    call: int
    failure: Failure


class Answered(Frame, tag=38):
    """The answer to a Submit. Times are those of each sequence, in seconds. An output has the
    bytes of its array, or of the lengths, columns and values of its sparse rows. `runs` are the
    batches of a traced request: begin, end and the context of the batch's span."""

    call: int
    queue_s: list[float]
    inference_s: list[float]
    cached: int
    values: dict[str, list[bytearray]]
    queued_at: float | None
    runs: list[tuple[float, float, str]]


class Begun(Frame, tag=39):
    """The API key of a request, and the models that it may use; None: all."""

    call: int
    name: str
    models: list[str] | None
    has_quota: bool


class RateStates(Frame, tag=40):
    """The answer to Rates."""

    call: int
    states: list[RateState]


class Loaded(Frame, tag=41):
    """The answer to Load: the table of this epoch has the models."""

    call: int
    epoch: int


class Wanted(Frame, tag=42):
    """The handler of a forwarded request waits for the next piece of its body."""

    call: int


class Head(Frame, tag=43):
    """The head of the response to a forwarded request."""

    call: int
    status: int
    headers: Headers


class Part(Frame, tag=44):
    """A part of the response to a forwarded request."""

    call: int
    body: bytes
    more: bool


class Collect(Frame, tag=45):
    """Send the growth of the metrics now."""

    call: int


class Reopen(Frame, tag=46):
    """Open the audit log again."""


class Drain(Frame, tag=47):
    """Answer the requests that were admitted, within so many seconds, and refuse others."""

    timeout_s: float


class Close(Frame, tag=49):
    """Close the connections of clients, and exit."""


class Ended(Frame, tag=48):
    """The handler of a forwarded request has ended."""

    call: int


FromEngine = (
    Start
    | ModelFacts
    | Table
    | Alive
    | Granted
    | Refused
    | Answered
    | Begun
    | RateStates
    | Loaded
    | Wanted
    | Head
    | Part
    | Ended
    | Collect
    | Reopen
    | Drain
    | Close
)


# ---- work and results


def fields_of(work: Work) -> dict[str, Any]:
    """Return the fields of a Submit that hold some work."""
    whole = np.zeros((len(work), 2), np.int32)
    whole[:, 1] = work.lengths
    bounds = work.bounds.tobytes()
    is_whole = bounds == whole.tobytes()
    augmented = work.augmentation_tokens
    return {
        "outputs": tuple(work.outputs),
        "adapter": work.adapter,
        "lengths": work.lengths.tobytes(),
        "planes": {name: plane.tobytes() for name, plane in work.planes.items()},
        "slots": b"" if is_whole else work.slots.tobytes(),
        "bounds": b"" if is_whole else bounds,
        "augmentation_tokens": b"" if augmented is None else augmented.tobytes(),
    }


def _int32(data: bytes) -> np.ndarray:
    if len(data) % 4:
        raise ProtocolError(f"int32 cannot have {counted(len(data), 'byte')}")
    return np.frombuffer(data, np.int32)


def work_of(frame: Submit, vocabulary: int, words: int) -> Work:
    """Return the work of a Submit. `vocabulary` is the number of token ids, and `words` that of the
    words of a row of pixels. Raises ProtocolError for fields that do not fit each other."""
    lengths = _int32(frame.lengths)
    if not len(lengths) or lengths.min() < 0:
        raise ProtocolError("work needs sequences, whose lengths are 0 or more")
    tokens = int(lengths.sum(dtype=np.int64))
    planes = {name: _int32(data) for name, data in frame.planes.items()}
    if "pixels" in planes:
        if not words or len(planes["pixels"]) != tokens * words:
            raise ProtocolError("wrong number of pixels")
        planes["pixels"] = planes["pixels"].reshape(tokens, words)
    if "ids" not in planes or planes.keys() - {"ids", "types", "pixels"}:
        raise ProtocolError("unknown planes")
    if any(len(plane) != tokens for plane in planes.values()):
        raise ProtocolError("planes and lengths do not fit")
    ids = planes["ids"]
    if tokens and (ids.min() < 0 or ids.max() >= vocabulary):
        raise ProtocolError("token ids that the model does not have")
    augmented = _int32(frame.augmentation_tokens) if frame.augmentation_tokens else None
    if augmented is not None and (
        len(augmented) != len(lengths) or (augmented < 0).any() or (augmented > lengths).any()
    ):
        raise ProtocolError("augmentation tokens and lengths do not fit")
    outputs = frozenset(frame.outputs)
    whole = whole_work(planes, lengths, outputs, augmented)
    if not frame.slots:
        return msgspec.structs.replace(whole, adapter=frame.adapter) if frame.adapter else whole
    slots, bounds = _int32(frame.slots), _int32(frame.bounds)
    if (
        len(slots) != len(lengths)
        or slots.min() < 1
        or len(bounds) != 2 * slots.sum(dtype=np.int64)
    ):
        raise ProtocolError("slots and bounds do not fit")
    bounds = bounds.reshape(-1, 2)
    starts, ends = bounds.T
    if (starts < 0).any() or (ends <= starts).any() or (ends > np.repeat(lengths, slots)).any():
        raise ProtocolError("bounds lie outside of their sequences")
    return Work(planes, lengths, bounds, slots, outputs, frame.adapter, augmented)


def encoded_result(result: WorkResult) -> dict[str, list[bytearray]]:
    """Return the outputs of some work as the `values` of Answered."""
    values: dict[str, list[Any]] = {}
    for name, value in result.items():
        if isinstance(value, SparseRows):
            lengths = np.array([len(row) for row in value.indices], np.int32)
            columns = np.concatenate([np.zeros(0, np.int32), *value.indices])
            weights = np.concatenate([np.zeros(0, np.float32), *value.values])
            values[name] = [lengths.tobytes(), columns.tobytes(), weights.tobytes()]
        else:
            array = value.values if isinstance(value, Ragged) else value
            values[name] = [array.tobytes()]
    return values


def decoded_result(
    values: dict[str, list[bytearray]], work: Work, widths: dict[OutputName, int]
) -> WorkResult:
    """Return the outputs of some work from the `values` of Answered."""
    result: WorkResult = {}
    for name, parts in values.items():
        output = cast(OutputName, name)
        if OUTPUTS[output].sparse:
            lengths, columns, weights = (
                np.frombuffer(part, kind)
                for part, kind in zip(parts, (np.int32, np.int32, np.float32), strict=True)
            )
            ends: Sequence[int] = np.cumsum(lengths)[:-1].tolist()
            rows = np.split(columns, ends), np.split(weights, ends)
            result[output] = SparseRows(widths[output], *rows)
            continue
        array = np.frombuffer(parts[0], np.float32).reshape(-1, widths[output])
        if OUTPUTS[output].per == "slot":
            result[output] = array
        else:
            offsets = np.concatenate([[0], np.cumsum(work.lengths, dtype=np.int64)])
            result[output] = Ragged(array, offsets)
    return result
