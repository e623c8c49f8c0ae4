"""Frames between processes: what they carry arrives unchanged, and bad ones end the connection."""

import asyncio
import contextlib
import random
import socket
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from jaxembed import errors
from jaxembed.data.work import Encoding, Ragged, SparseRows, Work, work_from_encodings
from jaxembed.engine.admission import Cost
from jaxembed.observability.metrics import Telemetry
from jaxembed.server.errors import Unauthorized
from jaxembed.server.front import forward, frames
from jaxembed.server.front.client import EngineClient
from jaxembed.server.front.forward import ForwardedBody, Forwarder
from jaxembed.server.front.frames import LENGTH, Failure, ProtocolError
from jaxembed.server.front.link import Link

IDS = np.arange(5, dtype=np.int32)
WORKS = {
    "one text": work_from_encodings([Encoding(IDS)]),
    "types": work_from_encodings([Encoding(IDS, IDS % 2), Encoding(IDS[:3])]),
    "spans": work_from_encodings([Encoding(IDS, spans=((0, 2), (1, 5))), Encoding(IDS[:2])]),
    "augmented": work_from_encodings([Encoding(IDS, augmentation_tokens=2), Encoding(IDS)]),
    "pixels": work_from_encodings([Encoding(IDS, pixels=np.ones((5, 3), np.int32))]),
}


def submit(work: Work, **changes: Any) -> frames.Submit:
    fields: dict[str, Any] = {
        "call": 1,
        "request": 2,
        "model": 3,
        "route": "",
        "priority": None,
        "trace": None,
    }
    fields |= {"cost": Cost(1, 5), **frames.fields_of(work), **changes}
    return frames.Submit(**fields)


def sent(frame: Any, kind: Any = frames.FromFront) -> Any:
    """The frame as the other process gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=kind)


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_work_arrives_unchanged(work):
    got = frames.work_of(sent(submit(work)), 10, 3)
    assert got.planes.keys() == work.planes.keys()
    for name, plane in work.planes.items():
        np.testing.assert_array_equal(got.planes[name], plane)
    for name in ("lengths", "bounds", "slots", "augmentation_tokens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(work, name))
    assert (got.outputs, got.adapter) == (work.outputs, work.adapter)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": b""},
        {"lengths": b"abc"},
        {"lengths": ints(-1, 6)},
        {"lengths": ints(6)},
        {"lengths": ints(2**31 - 1, 2**31 - 1)},
        {"planes": {}},
        {"planes": {"ids": ints(*range(4))}},
        {"planes": {"ids": ints(0, 1, 2, 3, 10)}},
        {"planes": {"ids": ints(0, 1, 2, 3, -1)}},
        {"planes": {"ids": ints(*range(5)), "types": ints(1)}},
        {"planes": {"ids": ints(*range(5)), "else": ints(*range(5))}},
        {"planes": {"ids": ints(*range(5)), "pixels": ints(*range(14))}},
        {"slots": ints(1, 1)},
        {"slots": ints(0), "bounds": b""},
        {"slots": ints(1), "bounds": ints(0)},
        {"slots": ints(1), "bounds": ints(0, 6)},
        {"slots": ints(1), "bounds": ints(3, 3)},
        {"slots": ints(1), "bounds": ints(-1, 3)},
        {"augmentation_tokens": ints(6)},
        {"augmentation_tokens": ints(-1)},
        {"augmentation_tokens": ints(1, 1)},
    ],
    ids=str,
)
def test_work_whose_fields_do_not_fit_is_refused(changes):
    with pytest.raises(ProtocolError):
        frames.work_of(submit(WORKS["one text"], **changes), 10, 3)


def test_results_arrive_unchanged():
    work = WORKS["spans"]
    rows = [np.array(row, np.int32) for row in ([1, 4], [], [2])]
    weights = [np.array(row, np.float32) for row in ([0.5, 2.0], [], [1.5])]
    result: Any = {
        "dense": np.arange(6, dtype=np.float32).reshape(3, 2),
        "sparse": SparseRows(9, rows, weights),
        "tokens": Ragged(np.ones((7, 3), np.float32), np.array([0, 5, 7])),
    }
    answer = frames.Answered(1, [], [], 0, frames.encoded_result(result), None, [])
    values = sent(answer, frames.FromEngine).values
    got = frames.decoded_result(values, work, {"dense": 2, "sparse": 9, "tokens": 3})
    np.testing.assert_array_equal(got["dense"], result["dense"])
    np.testing.assert_array_equal(got["tokens"].values, result["tokens"].values)
    np.testing.assert_array_equal(got["tokens"].offsets, result["tokens"].offsets)
    assert got["sparse"].width == 9
    for column in ("indices", "values"):
        pairs = zip(getattr(got["sparse"], column), getattr(result["sparse"], column), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInput("no", "input", 3),
        errors.InputTooLong(8, 9, 1),
        errors.EmptyInput("query", 2),
        errors.Overloaded("full", 7),
        errors.QuotaExceeded("used up", 3),
        errors.ShuttingDown("stops", 5),
        errors.UnknownModel("unknown", field="model"),
        errors.ModelUnavailable("not here"),
        errors.Forbidden("no"),
        errors.NotFinite("input 1: NaN"),
        Unauthorized("who?"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_unchanged(error):
    got = sent(frames.Refused(1, Failure.of(error)), frames.FromEngine).failure.error
    assert type(got) is type(error)
    assert str(got) == str(error)
    assert vars(got) == vars(error)


def test_the_text_of_an_unexpected_error_stays_in_its_process():
    error = Failure.of(ValueError("secret")).error
    assert type(error) is errors.BackendError
    assert "secret" not in str(error)
    assert type(Failure("system", "ls", {}).error) is errors.BackendError


class Pair:
    """A link, and the socket at its other end."""

    def __init__(self):
        self.taken: list[Any] = []
        self.ended = asyncio.Event()

    async def open(self, max_bytes: int = 1000) -> None:
        ours, theirs = socket.socketpair()
        self.link = Link(frames.FromFront, max_bytes, self.taken.append, self.ended.set)
        await asyncio.get_running_loop().create_connection(lambda: self.link, sock=ours)
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)


@pytest.fixture(name="pair")
async def _pair():
    pair = Pair()
    await pair.open()
    yield pair
    pair.link.close()
    pair.writer.close()


def framed(frame: Any) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return LENGTH.pack(len(data)) + data


async def test_frames_arrive_in_order_however_their_bytes_are_cut(pair):
    wanted = [frames.Cancel(k) if k % 3 else frames.Hello("x" * (k * 7 % 400)) for k in range(300)]
    data, draw = b"".join(map(framed, wanted)), random.Random(0)
    while data:
        cut = draw.choice([1, 2, 3, 5, 300, 5000])
        pair.writer.write(data[:cut])
        await pair.writer.drain()
        if draw.random() < 0.3:
            await asyncio.sleep(0)
        data = data[cut:]
    while len(pair.taken) < len(wanted):
        await asyncio.sleep(0)
    assert pair.taken == wanted


@pytest.mark.parametrize(
    "data",
    [
        LENGTH.pack(1001) + bytes(8),
        LENGTH.pack(2**32 - 1),
        LENGTH.pack(0),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        framed([99, 1]),
        framed(["Cancel", 1]),
        framed([9]),
        framed([9, "1"]),
        framed([8, 1, 2]),
        framed({"call": 1}),
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=range(11),
)
async def test_a_bad_frame_ends_the_connection(pair, data):
    pair.writer.write(framed(frames.Cancel(5)) + data + framed(frames.Cancel(6)))
    await pair.ended.wait()
    assert pair.taken == [frames.Cancel(5)]
    pair.link.send(frames.Alive())  # goes nowhere


async def test_a_frame_that_is_cut_off_is_not_taken(pair):
    pair.writer.write(framed(frames.Hello("whole")) + framed(frames.Hello("cut off"))[:-1])
    pair.writer.close()
    await pair.ended.wait()
    assert pair.taken == [frames.Hello("whole")]


async def test_random_bytes_never_do_more_than_end_the_connection():
    draw = random.Random(1)
    whole = [framed(submit(work)) for work in WORKS.values()] + [framed(frames.Cancel(1))]
    for _ in range(300):
        pair = Pair()
        await pair.open()
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        pair.writer.write(bytes(data))
        pair.writer.close()
        await pair.ended.wait()
        for frame in pair.taken:
            if isinstance(frame, frames.Submit):
                with contextlib.suppress(ProtocolError):
                    frames.work_of(frame, 10, 3)


async def test_what_is_sent_in_one_turn_leaves_in_order(pair):
    for k in range(50):
        pair.link.send(frames.Granted(k, 0))
    data = await pair.reader.readexactly(50 * len(framed(frames.Granted(1, 0))))
    assert data == b"".join(framed(frames.Granted(k, 0)) for k in range(50))


async def test_a_process_that_does_not_read_is_cut_off(pair, monkeypatch):
    monkeypatch.setattr("jaxembed.server.front.link.MAX_UNSENT", 10_000)
    while not pair.ended.is_set():
        pair.link.send(frames.Part(1, bytes(100_000), True))
        await asyncio.sleep(0)


async def test_a_large_answer_is_not_taken_for_a_process_that_does_not_read(pair, monkeypatch):
    monkeypatch.setattr("jaxembed.server.front.link.MAX_UNSENT", 10_000)
    big = Pair()
    await big.open(max_bytes=1_000_000)
    big.link.send(frames.Part(1, bytes(900_000), False))
    got = await big.reader.readexactly(900_000)
    assert len(got) == 900_000
    assert big.link.is_open
    big.link.close()
    big.writer.close()


async def test_the_rest_of_a_forwarded_body_is_taken_after_the_answer():
    pieces: list[Any] = [{"type": "http.request", "body": b"a", "more_body": True}] * 10
    pieces.append({"type": "http.disconnect"})
    told: list[Any] = []

    async def receive() -> Any:
        return pieces.pop(0)

    body = ForwardedBody(SimpleNamespace(send=told.append), 1, receive)
    task = asyncio.create_task(asyncio.sleep(60))
    feeding = asyncio.create_task(body.feed(task))
    body.wanted.release()
    while not told:
        await asyncio.sleep(0)
    body.drop_rest()
    await feeding
    assert told == [frames.Piece(1, b"a", True), frames.Gone(1)]
    assert not pieces
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_that_leaves_one_request_keeps_its_connection(monkeypatch):
    aborted: list[bool] = []
    monkeypatch.setattr(forward, "abort_connection", lambda: aborted.append(True))
    client = EngineClient()
    client.link = cast(Any, SimpleNamespace(is_open=True, send=lambda frame: None))
    forwarder, left = Forwarder(client), asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        left.set()

    scope = {"method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
    scope |= {"http_version": "2", "scheme": "http", "client": None}
    answering = asyncio.create_task(forwarder(scope, receive, send))
    await asyncio.sleep(0)
    for frame in (frames.Wanted(1), frames.Head(1, 200, [])):
        forwarder.take(frame)
    await answering
    assert not aborted


def test_the_growth_of_metrics_adds_up_in_another_process():
    ours, theirs = Telemetry(64), Telemetry(64)
    for step in range(3):
        ours.request_count.labels("single").inc(step)
        ours.request_failure.labels("dropped").inc()
        ours.request_duration.observe(0.01 * step)
        ours.inputs["embed"].observe_many(0.001, [0.1, 0.2], [0.3, 0.4])
        ours.input_length.observe_many([3, 70, 5])
        ours.stage.labels("decode").observe(0.5)
        theirs.grow(sent(frames.Metrics(0, {"1": ours.growth()})).growth["1"])
        assert ours.growth() == {}

    def shown(telemetry: Telemetry) -> list[str]:
        lines = telemetry.exposition().decode().splitlines()
        return [line for line in lines if "_created" not in line]

    assert shown(theirs) == shown(ours)


@pytest.mark.parametrize("growth", [{"x": 1.0}, {"0": "a"}, {"0": [1]}], ids=str)
def test_growth_of_other_metrics_is_refused(growth):
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Telemetry().grow(growth)
