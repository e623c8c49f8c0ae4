"""Simulated devices: replicas that pull from one queue, and one program over eight of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product

import jax
import numpy as np
import pytest
from conftest import WIDER_TOWERS, WORDS, open_tiny, tiny_spec
from fakes import until

from benchmarks.parameters import random_parameters
from jaxembed import Embedder
from jaxembed.engine import replica as replicas
from jaxembed.engine.autotune.timing import full_planes
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Replica
from jaxembed.errors import BackendError, ConfigError
from jaxembed.models import program
from jaxembed.models.attention import by_native, by_xla

COLLECTIVES = ("all-reduce", "all-gather", "collective-permute", "all-to-all", "reduce-scatter")
TEXTS = ["the cat", "a dog sat", "how is the blue sky", "where", "what is tiny red"] * 20
# more batches (of at most 32 texts) than seven devices take at once, so that the eighth gets one
THREES = [" ".join(words) for words in islice(product(WORDS, repeat=3), 500)]
BUCKET = Bucket(8, 16)


@pytest.fixture(name="open_embedder")
def _open_embedder(tiny_checkpoint, tmp_path, closed):
    """An Embedder with one bucket of 8 rows over some devices, which all have joined; closed at
    the end."""

    def open_embedder(devices: int, parallel="replicas") -> Embedder:
        fields = {"devices": devices, "parallel": parallel, "max_input_tokens": 16}
        embedder = closed.enter_context(open_tiny(tiny_checkpoint, tmp_path, (8, 16), **fields))
        assert embedder.model.main.engine.warmup.joined.wait(60)
        return embedder

    return open_embedder


def test_replicas_give_one_devices_vectors_and_all_work(open_embedder, embedder, monkeypatch):
    three = open_embedder(3)
    together, ran, lock = threading.Barrier(3), set(), threading.Lock()
    usual = Replica.run

    def run(self, bucket, planes, outputs, **options):
        with lock:
            first = self.devices not in ran
            ran.add(self.devices)
        if first:
            together.wait(60)  # passes only when all three are inside at once
        return usual(self, bucket, planes, outputs, **options)

    monkeypatch.setattr(Replica, "run", run)
    vectors = three.encode(THREES)  # more batches than replicas
    monkeypatch.undo()
    assert ran == {(device,) for device in jax.local_devices()[:3]}
    np.testing.assert_allclose(vectors, embedder.encode(THREES), atol=1e-5)


def lost(usual):
    raise RuntimeError("INTERNAL: the device is lost")


def out_of_memory(usual):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def not_a_number(usual):
    return {name: output * np.nan for name, output in usual().items()}


@pytest.mark.parametrize("fault", [lost, out_of_memory, not_a_number])
def test_with_one_faulty_device_of_eight_every_text_has_its_vector(
    open_embedder, embedder, monkeypatch, fault, caplog
):
    eight = open_embedder(8)
    faulty, failed, usual = jax.local_devices()[5], threading.Event(), Replica.run

    def run(self, *arguments, **options):
        if self.devices != (faulty,):
            assert failed.wait(60)
            return usual(self, *arguments, **options)
        failed.set()
        return fault(lambda: usual(self, *arguments, **options))

    monkeypatch.setattr(Replica, "run", run)
    np.testing.assert_allclose(eight.encode(THREES), embedder.encode(THREES), atol=1e-5)
    assert "run on another device" in caplog.text
    state = eight.model.main.engine.snapshot()
    assert state.failures[5] > 0
    assert sum(state.failures) == state.failures[5]
    assert eight.model.ready


def test_with_one_hung_device_of_eight_only_its_batch_is_lost(open_embedder, embedder, monkeypatch):
    eight = open_embedder(8)
    engine = eight.model.main.engine
    scheduler = engine.workers[5].scheduler
    returns, entered, usual = threading.Event(), threading.Event(), Replica.run

    def run(self, *arguments, **options):
        if self.devices == (jax.local_devices()[5],):
            entered.set()
            assert returns.wait(60)
        else:
            assert entered.wait(60)
        return usual(self, *arguments, **options)

    def age_and_ask() -> bool:
        """The calls on the hung device get an hour older."""
        for call in engine._watchdog.calls:
            if call.waiter in scheduler._holding:
                engine._watchdog._check(call, 3600.0)
        return lost.done()

    monkeypatch.setattr(Replica, "run", run)
    with ThreadPoolExecutor(1) as pool:
        try:
            lost = pool.submit(eight.encode, THREES)
            assert entered.wait(60)
            until(age_and_ask)
            with pytest.raises(BackendError, match="did not return in time"):
                lost.result(60)
            np.testing.assert_allclose(eight.encode(THREES), embedder.encode(THREES), atol=1e-5)
            assert engine.snapshot().stuck == 1
            assert eight.model.ready
        finally:
            returns.set()


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("native", [False, True])
def test_a_program_is_lowered_once_and_compiled_for_all_replicas(monkeypatch, native):
    spec, bucket = tiny_spec(**WIDER_TOWERS["bert"]), Bucket(2, 32)
    lowered, usual = [], replicas.lower

    def lower(*arguments):
        lowered.append(arguments[4])
        return usual(*arguments)

    monkeypatch.setattr(replicas, "lower", lower)
    parameters, dtype = random_parameters(spec), "bfloat16" if native else "float32"
    groups = [[device] for device in jax.local_devices()]
    every = [
        Replica(
            program(spec),
            parameters,
            devices,
            dtype,
            attention=lambda bucket: by_native if native else by_xla,
            native_layout=native,
        )
        for devices in groups
    ]
    programs = every[0].lower(bucket, for_any=True)
    for finish in [replica.start(programs) for replica in every]:
        finish()
    assert lowered == [bucket]
    planes = full_planes(bucket, 8)
    found = [replica.run(bucket, planes, ("dense",))["dense"] for replica in every]
    assert ("jaxembed_" in every[-1].compiled(bucket).as_text()) == native
    for vectors in found:
        np.testing.assert_array_equal(vectors, found[0])


def test_one_program_over_eight_devices_gives_one_devices_vectors(open_embedder, embedder):
    sharded = open_embedder(8, "sharded")
    np.testing.assert_allclose(sharded.encode(TEXTS), embedder.encode(TEXTS), atol=1e-5)
    np.testing.assert_allclose(sharded.encode("a cat"), embedder.encode("a cat"), atol=1e-5)
    assert sharded.model.describe()["devices"] == 8


def test_a_sharded_program_has_no_collectives_and_a_row_on_every_device():
    spec = tiny_spec()
    replica = Replica(program(spec), random_parameters(spec), jax.local_devices(), "float32")
    replica.compile(BUCKET)
    text = replica.compiled(BUCKET).as_text()
    with pytest.raises(ConfigError, match="bucket 6x16 cannot be divided into 8 equal parts"):
        replica.compile(Bucket(6, 16))
    assert "HloModule" in text
    assert not [name for name in COLLECTIVES if name in text]
    planes = np.ones((5, 8, 16), np.int32)
    shards = replica.launch(BUCKET, planes)["dense"].addressable_shards
    assert {shard.device for shard in shards} == set(jax.local_devices())
    assert {shard.data.shape[0] for shard in shards} == {1}
