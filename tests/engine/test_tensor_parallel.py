"""Simulated devices that hold a model together: the vectors of one device, and two sums a layer."""

import re
import threading

import jax
import numpy as np
import pytest
from conftest import TOWERS, open_tiny, tiny_spec

from benchmarks.parameters import random_parameters
from jaxembed.config import EngineConfig
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.build import make_plan
from jaxembed.engine.placement import placed_bytes
from jaxembed.engine.replica import Replica
from jaxembed.errors import ConfigError
from jaxembed.models import program
from jaxembed.models.parallel import Cut

BUCKET = Bucket(2, 16)
SHAPE = BUCKET.rows, BUCKET.length
WHOLE = ["jina_bert_code"]  # has a norm over all heads


def replica_of(spec, degree: int, devices: int | None = None) -> Replica:
    chosen = jax.local_devices()[: devices or degree]
    replica = Replica(program(spec, degree), random_parameters(spec), chosen, "float32")
    replica.compile(BUCKET)
    return replica


def planes_of(spec, planes: int) -> np.ndarray:
    """Two rows of two texts each; those of the second row hold an image, if the model takes any."""
    batch = np.random.default_rng(0).integers(0, 4, (planes, *SHAPE), np.int32)
    batch[0] = np.random.default_rng(1).integers(1, 40, SHAPE)
    if spec.image is not None:
        batch[0, 1] = spec.config.get("image_token_id", 2)
    batch[1:5] = 0
    batch[1, :, :8] = batch[1, :, 8:] = np.arange(8)
    batch[2, :, :8], batch[2, :, 8:] = 1, 2
    bounds = batch[4]
    bounds[:, :2], bounds[:, BUCKET.slots : BUCKET.slots + 2] = (0, 8), (8, 16)
    return batch


@pytest.mark.parametrize("name", [name for name in TOWERS if name not in WHOLE])
def test_devices_that_hold_a_model_together_give_the_vectors_of_one(name):
    spec = tiny_spec(**TOWERS[name])
    one, two = replica_of(spec, 1), replica_of(spec, 2)
    batch = planes_of(spec, one.planes)
    expected, found = (r.run(BUCKET, batch, ("dense", "tokens")) for r in (one, two))
    for output in expected:
        assert np.isfinite(expected[output]).all()
        np.testing.assert_allclose(found[output], expected[output], atol=2e-5, rtol=1e-5)


def test_devices_share_key_heads_and_rows():
    spec = tiny_spec(**TOWERS["qwen3"])  # 4 query heads and 2 key heads
    one, many = replica_of(spec, 1), replica_of(spec, 4, devices=8)
    batch = planes_of(spec, one.planes)
    expected, found = (r.run(BUCKET, batch, ("dense",))["dense"] for r in (one, many))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    made = program(spec, 4)
    assert made.share_of("tower.layers.0.attention.qkv.kernel") == (32, (1 + 1 + 1) * 8)
    assert made.placed_shape("tower.layers.0.attention.qkv.kernel") == (32, 4 * 24)
    np.testing.assert_array_equal(
        Cut(0, ((4, 1), (2, 2))).places(4), [0, 4, 5, 1, 4, 5, 2, 6, 7, 3, 6, 7]
    )


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_layer_has_two_sums_over_devices_and_no_other_exchange(name):
    spec = tiny_spec(**TOWERS[name])
    text = replica_of(spec, 2).compiled(BUCKET).as_text()
    exchanges = re.findall(r"= \S+ (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", text)
    assert exchanges == ["all-reduce"] * 2 * spec.config["num_layers"]


def test_groups_of_devices_serve_side_by_side(tiny_checkpoint, embedder, tmp_path):
    texts = [f"the cat {word}" for word in ("sat", "a dog", "how", "where", "what is")] * 40
    for parallel in ("replicas", "sharded"):
        settings = {"devices": 4, "tensor_parallel": 2, "parallel": parallel, "dtype": "float32"}
        groups = open_tiny(tiny_checkpoint, tmp_path, (8, 16), max_input_tokens=16, **settings)
        try:
            np.testing.assert_allclose(groups.encode(texts), embedder.encode(texts), atol=1e-5)
            described = groups.model.describe()
            assert (described["devices"], described["tensor_parallel"]) == (4, 2)
        finally:
            groups.close()


def test_a_device_holds_its_share_of_the_weights():
    spec = tiny_spec(**TOWERS["qwen3"])
    replica = replica_of(spec, 2)
    made = program(spec, 2)
    held = sum(
        shard.data.nbytes
        for leaf in replica._parameters
        for shard in leaf.addressable_shards
        if shard.device == replica.devices[1]
    )
    assert held == placed_bytes({name: made.share_of(name) for name in made.shapes}, "float32")
    whole = placed_bytes({name: leaf.shape for name, leaf in made.shapes.items()}, "float32")
    assert held < 0.7 * whole


@pytest.mark.parametrize(
    ("tower", "degree", "message"),
    [
        ("bert", 3, "--tensor-parallel 3: the 4 attention heads of this model cannot be divided"),
        ("qwen3", 3, "--tensor-parallel 3: the 4 query heads of this model cannot be divided"),
        ("jina_bert_code", 2, "--tensor-parallel 2: a norm over all heads cannot be divided"),
    ],
)
def test_what_cannot_be_divided_is_refused(tower, degree, message):
    with pytest.raises(ConfigError, match=message):
        program(tiny_spec(**TOWERS[tower]), degree)


def test_groups_take_all_devices(tmp_path):
    spec = tiny_spec()
    for devices, degree, message in (
        (3, 2, "3 devices cannot be divided into groups of 2; set --devices to a multiple"),
        (1, 2, "1 device cannot be divided into groups of 2$"),
    ):
        config = EngineConfig(tensor_parallel=degree, devices=devices)
        with pytest.raises(ConfigError, match=message):
            make_plan(spec, program(spec, degree), config, tmp_path)


def test_a_group_that_hangs_as_a_program_starts_holds_no_other_group():
    spec = tiny_spec()
    hung, well = (
        Replica(
            program(spec, 2), random_parameters(spec), jax.local_devices()[k : k + 2], "float32"
        )
        for k in (0, 2)
    )
    well.compile(BUCKET)
    starts, returns = threading.Event(), threading.Event()

    def start(*arguments):
        starts.set()
        assert returns.wait(60)

    (key,) = well._programs
    hung._programs[key] = start
    batch = planes_of(spec, well.planes)
    thread = threading.Thread(target=hung.launch, args=(BUCKET, batch))
    thread.start()
    assert starts.wait(60)
    assert well.run(BUCKET, batch, ("dense",))["dense"].any()
    returns.set()
    thread.join(60)
