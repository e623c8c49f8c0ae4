"""What a device with its own memory gives the host: a CPU is one here."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import open_tiny, tiny_spec
from fakes import future_of
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parameters import random_parameters
from jaxembed.data.inputs import Text
from jaxembed.data.work import Encoding
from jaxembed.engine import replica as replicas
from jaxembed.engine.batch import Batch, pack, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica, output_variants
from jaxembed.engine.transfer import UsedSlots, part_sizes
from jaxembed.models import program
from jaxembed.models.attention import Attend, ByKernel, by_xla
from jaxembed.models.kernels import gather
from jaxembed.models.tokens import PackedTokens
from jaxembed.runtime.options import EncodeOptions

BUCKET = Bucket(4, 16)


def planes_with(bucket: Bucket, used: np.ndarray) -> np.ndarray:
    """A batch of which only the bounds say something: `used` is bool `[rows, slots]`."""
    planes = np.zeros((PackedTokens.PLANES, bucket.rows, bucket.length), np.int32)
    planes[-1, :, bucket.slots : 2 * bucket.slots] = used
    return planes


@given(st.data())
def test_every_used_slot_comes_back_and_others_are_zero(data):
    shards = data.draw(st.integers(1, 3))
    bucket = Bucket(shards * data.draw(st.integers(1, 9)), data.draw(st.integers(2, 40)))
    size = bucket.rows * bucket.slots
    used = np.zeros(size, bool)
    used[data.draw(st.lists(st.integers(0, size - 1)))] = True
    used = used.reshape(bucket.rows, bucket.slots)
    dense = np.random.default_rng(0).standard_normal((size, 3), np.float32)

    found = UsedSlots.of(bucket, planes_with(bucket, used), shards)
    sizes = part_sizes(bucket.rows // shards, bucket.slots)
    assert sum(sizes) == size // shards
    order = found.order.reshape(shards, -1)
    placed = np.stack([dense.reshape(shards, -1, 3)[k, order[k]] for k in range(shards)])
    parts = np.split(placed, np.cumsum(sizes)[:-1], axis=1)
    fetched = found.fetch([part.reshape(-1, 3) for part in parts])

    wanted = np.where(used[..., None], dense.reshape(*used.shape, 3), 0)
    np.testing.assert_array_equal(fetched, wanted)
    copied = sum(sizes[k] for k in found.parts)
    most = max(used.reshape(shards, -1).sum(axis=1))
    assert most <= copied < most + max(sizes[-1], 1) or most == copied == 0


def batch_of(bucket: Bucket, lengths: list[int]) -> Batch:
    draw = np.random.default_rng(1)
    encodings = [Encoding(draw.integers(1, 20, n).astype(np.int32)) for n in lengths]
    return place(bucket, future_of(encodings).sequences)


@pytest.mark.parametrize("mean", [5, 20, 100, 400])
@pytest.mark.parametrize("bucket", [Bucket(1024, 16), Bucket(128, 128), Bucket(32, 512)], ids=str)
def test_full_batches_copy_at_most_a_third_more_than_they_use(bucket, mean):
    """Of texts as long as those of real traffic, lognormal around a mean."""
    draw = np.random.default_rng(2)
    lengths = np.clip(draw.lognormal(np.log(mean), 0.6, bucket.tokens), 3, bucket.length)
    count = 2 * bucket.tokens // min(mean, bucket.length)
    batch = batch_of(bucket, lengths.astype(int)[:count].tolist())
    used = UsedSlots.of(bucket, pack(batch), 1)
    sizes = part_sizes(bucket.rows, bucket.slots)
    assert sum(sizes[k] for k in used.parts) <= 1.3 * len(batch.sequences)
    assert len(sizes) <= 16


@pytest.fixture(name="remote")
def _remote(monkeypatch) -> None:
    monkeypatch.setattr(replicas, "is_remote", lambda platform: True)


def replica_on(devices: int, attend: Attend = by_xla) -> Replica:
    spec = tiny_spec()
    replica = Replica(
        program(spec),
        random_parameters(spec),
        jax.local_devices()[:devices],
        "float32",
        attention=lambda bucket: attend,
    )
    replica.compile(BUCKET)
    return replica


def gathers_by_kernel() -> ByKernel:
    """XLA's attention, with the kernel of GPUs that gathers outputs, interpreted."""

    def attend(*operands, slots, **optional):
        return by_xla(*operands, **optional)

    return ByKernel(attend, BUCKET.slots, gather=partial(gather.gather, interpret=True))


@pytest.mark.parametrize("attend", [by_xla, gathers_by_kernel()], ids=["xla", "kernel"])
@pytest.mark.parametrize("devices", [1, 2])
def test_outputs_are_those_in_the_memory_of_the_host(monkeypatch, devices, attend):
    planes = pack(batch_of(BUCKET, [3, 9, 2, 4, 16, 5, 2, 2]))
    near = replica_on(devices)
    monkeypatch.setattr(replicas, "is_remote", lambda platform: True)
    far = replica_on(devices, attend)
    for outputs in (("dense",), ("tokens",), ("dense", "tokens")):
        wanted, found = (one.run(BUCKET, planes, outputs) for one in (near, far))
        assert set(found) == set(outputs)
        for name in outputs:
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-6)


@pytest.mark.usefixtures("remote")
def test_a_program_computes_outputs_per_token_only_if_they_are_asked_for():
    replica = replica_on(1)
    slots, tokens = BUCKET.rows * BUCKET.slots, BUCKET.tokens
    usage = replica.compiled(BUCKET).memory_analysis()
    assert slots * 32 * 4 <= usage.output_size_in_bytes < (slots + 20) * 32 * 4  # and pointers
    assert set(replica.launch(BUCKET, pack(batch_of(BUCKET, [3])))) == {"dense"}
    found = replica.run(BUCKET, pack(batch_of(BUCKET, [3])), ("tokens",))["tokens"]
    assert found.shape == (BUCKET.rows, BUCKET.length, 32)
    assert tokens * 32 * 4 == found.nbytes
    replica.free()
    assert replica.temporary_bytes(BUCKET) == 0


@pytest.mark.usefixtures("remote")
def test_an_embedder_answers_with_vectors_of_texts_and_of_tokens(
    embedder, tiny_checkpoint, tmp_path
):
    texts = ["the cat", "a dog sat on the mat", "blue sky"] * 9
    far = open_tiny(tiny_checkpoint, tmp_path, (4, 16), max_input_tokens=16)
    try:
        np.testing.assert_allclose(far.encode(texts), embedder.encode(texts), atol=1e-5)
        options = EncodeOptions(outputs=frozenset({"dense", "tokens"}))
        wanted, found = (
            one.model.run(one.model.tasks.embed([Text(text) for text in texts], options)).tokens
            for one in (embedder, far)
        )
    finally:
        far.close()
    np.testing.assert_array_equal(found.offsets, wanted.offsets)
    np.testing.assert_allclose(found.values, wanted.values, atol=1e-5)


@pytest.mark.usefixtures("remote")
def test_a_model_that_is_served_for_an_output_per_token_has_one_program():
    model = program(tiny_spec())
    assert output_variants(model, "tpu") == [("dense",), ("dense", "tokens")]
    assert output_variants(replace(model, primary="tokens"), "tpu") == [("dense", "tokens")]
