"""What a model promises those who send it requests: in the engine's process, and in a front end."""

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from jaxembed import __version__
from jaxembed.config import ServerConfig
from jaxembed.data.inputs import Text
from jaxembed.engine.admission import Cost
from jaxembed.engine.quota import Account
from jaxembed.errors import InputTooLong, NoInputs, Overloaded, RequestTooLarge, ShuttingDown
from jaxembed.runtime.options import EncodeOptions
from jaxembed.server.app import create_app
from jaxembed.server.front import frames
from jaxembed.server.front.backend import Backend, facts_of
from jaxembed.server.front.client import EngineClient, LentCapacity
from jaxembed.server.front.link import Link
from jaxembed.server.front.served import RemoteModels
from jaxembed.server.registry.models import Models

LONG = "cat dog mat " * 200  # more tokens than the model takes


@pytest.fixture(name="model", params=["engine", "front end"])
async def _model(request, embedder):
    """The model in this process, and as a front end has it."""
    loaded = embedder.model
    if request.param == "engine":
        yield loaded
        return
    app = create_app(Models([loaded]), ServerConfig())
    ours, theirs = socket.socketpair()
    backend = Backend(app, None, lambda: None, lambda: None)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: backend.link, sock=ours)
    client = EngineClient()
    client.link = Link(frames.FromEngine, 2**30, client.finish, client.end)
    await loop.create_connection(lambda: client.link, sock=theirs)
    client.send(frames.Hello(__version__))
    instance = app.service.models.startup_models[0].instance
    backend.models[1] = instance
    instance.holds += 1
    models = RemoteModels(client, LentCapacity(client, loaded.admission.capacity.max_bytes))
    await models.add(facts_of(1, loaded))
    remote = models._by_number[1].loaded
    yield remote
    remote.close()
    client.link.close()
    while backend.models:
        await asyncio.sleep(0)


async def answer(model: Any, *texts: str, **options: Any) -> Any:
    request = model.tasks.embed([Text(text) for text in texts], EncodeOptions(**options))
    with model.admission.capacity.request() as reservation:
        return await model.answer(request, reservation)


def is_idle(embedder: Any) -> bool:
    capacity = embedder.model.admission.capacity
    return (capacity.inputs, capacity.tokens, capacity.small_inputs) == (0, 0, 0)


async def until_idle(embedder: Any) -> None:
    while not is_idle(embedder):
        await asyncio.sleep(0)


@pytest.mark.parametrize("texts", [["cat"], ["cat", "the dog sat", "cat"], ["a red sky"] * 300])
async def test_answers_are_the_vectors_of_the_library(model, embedder, texts):
    got = await answer(model, *texts)
    np.testing.assert_allclose(got.dense, embedder.encode(texts), atol=1e-6)
    assert len(got.num_tokens) == len(texts)
    await until_idle(embedder)


async def test_outputs_per_token_arrive(model, embedder):
    got = await answer(model, "cat", "the dog sat", outputs=frozenset({"dense", "tokens"}))
    wanted = await answer(embedder.model, "cat", "the dog sat", outputs=frozenset({"tokens"}))
    for rows, same in zip(got.values["tokens"], wanted.values["tokens"], strict=True):
        np.testing.assert_allclose(rows, same, atol=1e-6)


@pytest.mark.parametrize("inputs", [1, 2])
async def test_a_full_server_refuses(model, embedder, held, monkeypatch, inputs):
    capacity = embedder.model.admission.capacity
    monkeypatch.setattr(capacity, "max_inputs", inputs)
    first = asyncio.create_task(answer(model, *["cat", "dog"][:inputs]))
    while capacity.inputs < inputs:
        await asyncio.sleep(0)
    message = f"{inputs} inputs and about .* limits are {inputs} "
    with pytest.raises(Overloaded, match=message) as got:
        await answer(model, "cat", "dog", "mat")
    assert got.value.retry_after_s >= 1
    held.set()
    await first
    await until_idle(embedder)


async def test_a_request_that_could_never_be_admitted_is_refused(model, monkeypatch, embedder):
    monkeypatch.setattr(embedder.model.admission.capacity, "max_tokens", 2)
    with pytest.raises(RequestTooLarge, match="--max-queue-tokens"):
        await answer(model, *["cat dog mat sat on"] * 30)
    await until_idle(embedder)


async def test_bad_inputs_are_refused_with_their_index(model, embedder):
    with pytest.raises(InputTooLong) as got:
        await answer(model, "cat", LONG, truncate=False)
    assert got.value.index == 1
    with pytest.raises(NoInputs):
        await answer(model)
    await until_idle(embedder)


async def test_a_cancelled_request_frees_its_room_at_once(model, embedder, held):
    capacity = embedder.model.admission.capacity
    task = asyncio.create_task(answer(model, "cat", "dog"))
    while not capacity.inputs:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(embedder)
    held.set()


async def test_memory_that_is_lent_to_a_cancelled_request_is_not_lost(model, embedder):
    capacity = model.admission.capacity
    for _ in range(20):
        with capacity.request() as reservation:
            task = asyncio.create_task(reservation.make_room(10**6))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if model is not embedder.model:
        while capacity.free < 10**6:  # the answers arrive late
            await asyncio.sleep(0)
        capacity.give_all_back()
    while embedder.model.admission.capacity.bytes:
        await asyncio.sleep(0)


async def test_memory_that_was_made_room_for_is_there(model, embedder):
    capacity = model.admission.capacity

    async def hold(count: int) -> None:
        with capacity.request() as reservation:
            for _ in range(5):
                await reservation.make_room(count)
                reservation.charge(count)
                await asyncio.sleep(0)
            assert reservation.bytes == 5 * count

    async def give_back() -> None:
        while True:
            capacity.give_all_back()
            await asyncio.sleep(0)

    if model is embedder.model:
        await asyncio.gather(*(hold(1000 * k) for k in range(100)))
    else:
        giving = asyncio.create_task(give_back())
        await asyncio.gather(*(hold(1000 * k) for k in range(100)))
        giving.cancel()
        capacity.give_all_back()
    assert capacity.bytes == 0
    while embedder.model.admission.capacity.bytes:
        await asyncio.sleep(0)


async def test_a_draining_model_refuses(model, embedder):
    embedder.model.admission.draining = True
    try:
        for texts in (["cat"], ["cat", "dog"]):
            with pytest.raises(ShuttingDown) as got:
                await answer(model, *texts)
            assert got.value.retry_after_s == 5
    finally:
        embedder.model.admission.draining = False


async def test_the_account_of_a_request_counts_what_was_answered(model):
    request = model.tasks.embed([Text("cat"), Text("the dog sat")], EncodeOptions())
    with model.admission.capacity.request() as reservation:
        reservation.account = Account()
        got = await model.answer(request, reservation)
        assert reservation.account.inputs == 2
        assert reservation.account.tokens == got.num_tokens.sum()


async def test_what_is_reserved_and_not_used_is_given_back(model, embedder):
    with model.admission.capacity.request() as reservation:
        with await model.admit(Cost(3, 30, 300), reservation):
            while embedder.model.admission.capacity.inputs != 3:
                await asyncio.sleep(0)
        await until_idle(embedder)


async def test_tokenizing_is_admitted_too(model, embedder):
    with model.admission.capacity.request() as reservation:
        pieces = await model.tokenize_async(
            ["cat dog"], add_special_tokens=True, prompt_name=None, reservation=reservation
        )
        ids = [[piece.id for piece in pieces[0]]]
        texts = await model.decode_async(ids, skip_special_tokens=True, reservation=reservation)
    assert texts == ["cat dog"]
    await until_idle(embedder)
