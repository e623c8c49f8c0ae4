"""Parameters on a device and a compiled program for each bucket."""

import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOWERS, WIDER_TOWERS, tiny_spec
from fakes import future_of
from representatives import each

from benchmarks.parameters import random_parameters
from jaxembed.data.spec import DenseLayer
from jaxembed.data.work import Encoding
from jaxembed.engine.batch import pack, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.compiles import SAFE_FUSION, compile_events, compiler_options
from jaxembed.engine.placement import place_parameters
from jaxembed.engine.replica import Replica
from jaxembed.models import ARCHITECTURES, native, program
from jaxembed.models.attention import by_native, by_xla

BUCKET = Bucket(2, 16)


def replica_of(parameters=None, **options) -> Replica:
    spec = tiny_spec()
    options = {"devices": jax.local_devices()[:1], "dtype": "float32"} | options
    replica = Replica(program(spec), parameters or random_parameters(spec), **options)
    replica.compile(BUCKET)
    return replica


@pytest.fixture(name="replica", scope="module")
def _replica() -> Replica:
    return replica_of()


def batch_of(*ids: list[int], bucket=BUCKET):
    sequences = future_of([Encoding(np.array(one, np.int32)) for one in ids]).sequences
    return place(bucket, sequences)


def test_nothing_compiles_after_warm_up(embedder):
    """The counter is shown to move first, so that a dead counter can't pass."""
    events = compile_events()
    before = events.durations
    jax.jit(lambda x: x * 3.25)(np.float32(1)).block_until_ready()
    assert events.durations == before + 1

    counts, kept = (events.compiles, events.durations), 0
    draw = np.random.default_rng(0)
    for n in (1, 2, 3, 7, 30, 300):
        texts = [" ".join(["cat"] * int(k)) for k in draw.integers(1, 80, size=n)]
        kept += len(embedder.encode(texts))
        kept += len(embedder.encode(texts, dimensions=7, normalize=False))
    kept += len(embedder.encode_query("how is the sky"))
    assert kept == 2 * 343 + 32
    assert (events.compiles, events.durations) == counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_in_the_dtype_and_vectors_biases_and_modules_in_float32(dtype):
    modules = (DenseLayer(32, 4), DenseLayer(4, 1, activation="identity"))
    spec = tiny_spec(modules=modules, **TOWERS["mpnet"])
    model, device = program(spec), jax.local_devices()[0]
    replica = Replica(model, random_parameters(spec), [device], dtype)
    for name, leaf in zip(model.shapes, replica._parameters, strict=True):
        narrow = leaf.ndim > 1 and not name.startswith("heads.") and name != "tower.distance.bias"
        assert leaf.dtype == (jnp.dtype(dtype) if narrow else jnp.float32), name
        assert leaf.devices() == {device}


def test_parameters_are_placed_one_by_one_on_every_group_of_devices():
    """The host's copy of one is gone when the next but one is made."""
    devices = jax.local_devices()[:4]
    groups = [devices[:1], devices[1:2], devices[2:]]
    alive = []

    def stream():
        for i in range(5):
            array = np.full((3, 5), i, np.float16)
            assert sum(one() is not None for one in alive) <= 2
            alive.append(weakref.ref(array))
            yield f"tower.p{i}.kernel", array
            del array

    placed = place_parameters(program(tiny_spec()), stream(), groups, "bfloat16")
    for copies, group in zip(placed, groups, strict=True):
        assert list(copies) == [f"tower.p{i}.kernel" for i in range(5)]
        for i, leaf in enumerate(copies.values()):
            assert leaf.devices() == set(group)
            assert leaf.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(leaf, np.float32), i)


@pytest.mark.parametrize("name", each(ARCHITECTURES, "bert"))
def test_a_narrow_table_of_embeddings_is_not_widened(name):
    """A copy of the table in float32 would be twice the table."""
    rows, backbone = 100_000, TOWERS[name]
    spec = tiny_spec(**backbone | {"config": backbone["config"] | {"vocab_size": rows}})
    replica = Replica(program(spec), random_parameters(spec), jax.local_devices()[:1], "bfloat16")
    replica.compile(BUCKET)
    assert replica.temporary_bytes(BUCKET) < rows * 32 * 2 / 4


def test_the_float32_twin_takes_what_leaves_float16():
    """An activation of 1e5 is infinite in float16, and finite in the twin with its parameters."""
    parameters = random_parameters(tiny_spec())
    parameters["tower.layers.0.mlp.up.bias"] += 1e5
    half = Replica(
        program(tiny_spec()), parameters, jax.local_devices()[:1], "float16", float32_bucket=BUCKET
    )
    assert half.float32_bucket is None  # not compiled yet
    half.compile(BUCKET)
    assert half.float32_bucket == BUCKET
    planes = pack(batch_of([2, 7, 8, 9, 3]))
    assert not np.isfinite(half.run(BUCKET, planes, ("dense",))["dense"][0, 0]).all()
    wide = half.run(half.float32_bucket, planes, ("dense",), in_float32=True)["dense"]
    exact = replica_of({name: _as_float16(leaf) for name, leaf in parameters.items()})
    wanted = exact.run(BUCKET, planes, ("dense",))["dense"]
    assert np.isfinite(wide).all()
    np.testing.assert_allclose(wide, wanted, rtol=1e-4, atol=1e-5)


def _as_float16(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(np.float16).astype(np.float32) if leaf.ndim > 1 else leaf


def replica_with(spec, dtype="float32", native=False, devices=1, parameters=None) -> Replica:
    """On so many devices, with the native kernels or XLA; random parameters unless given."""
    return Replica(
        program(spec),
        parameters or random_parameters(spec),
        jax.local_devices()[:devices],
        dtype,
        attention=lambda bucket: by_native if native else by_xla,
        native_layout=native,
    )


def vectors_of(replica: Replica, bucket: Bucket) -> np.ndarray:
    """Of two texts in one row."""
    replica.compile(bucket)
    batch = batch_of([2, 7, 8, 9, 3], [2, 11, 12, 3], bucket=bucket)
    return replica.run(bucket, pack(batch, replica.planes), ("dense",))["dense"][0, :2]


def assert_close(vectors: np.ndarray, wanted: np.ndarray) -> None:
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(wanted, axis=1)
    assert ((vectors * wanted).sum(axis=1) / lengths).min() > 0.9995  # as above, in bfloat16


PACKED = (  # of each set of native calls one
    "bert", "mpnet", "nomic_bert", "jina_bert", "clip, gelu", "modernbert", "deberta", "qwen3",
    "gemma2", "t5, gated",
)  # fmt: skip


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", each(PACKED, "bert"))
def test_packed_parameters_give_what_unpacked_ones_do(name):
    spec = tiny_spec(**WIDER_TOWERS[name])
    packed, unpacked = (replica_with(spec, "bfloat16", native) for native in (True, False))
    assert (packed.alignment, unpacked.alignment) == (16, 1)
    wanted = vectors_of(unpacked, Bucket(2, 32))
    # In rows that are no multiple of 16, nor are the four patches of each token, attention is the
    # kernels' too, in padded rows, but with a bias by distance it is XLA's.
    like_bert = spec.architecture in ("bert", "deberta")
    joins = like_bert and not spec.config.get("residual_norm")  # all that follows attention
    products = {"linear"} | ({"mlp"} if joins else set())
    attention = spec.architecture != "deberta"  # whose attention is always XLA's
    is_padded = attention and name not in ("mpnet", "jina_bert", "t5, gated")
    for bucket, attends in ((Bucket(2, 32), attention), (Bucket(2, 22), is_padded)):
        assert_close(vectors_of(packed, bucket), wanted)
        calls = set(re.findall(r"jaxembed_(\w+)_bfloat16", packed.compiled(bucket).as_text()))
        assert any("attention" in call for call in calls) == attends
        assert attends or calls == products
    assert "jaxembed_" not in unpacked.compiled(Bucket(2, 32)).as_text()


@pytest.mark.usefixtures("native_kernels")
def test_packed_replicas_run_on_several_devices_and_at_once():
    spec, bucket = tiny_spec(**WIDER_TOWERS["bert"]), Bucket(4, 32)
    replicas = [replica_with(spec, "bfloat16", native=True, devices=n) for n in (1, 2)]
    wanted = [vectors_of(replica, bucket) for replica in replicas]
    np.testing.assert_allclose(wanted[1], wanted[0], atol=1e-6)
    planes = pack(batch_of([2, 7, 8, 9, 3], [2, 11, 12, 3], bucket=bucket))
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(replica.run, bucket, planes, ("dense",)) for replica in replicas * 20]
        for run, vectors in zip(runs, wanted * 20, strict=True):
            np.testing.assert_array_equal(run.result()["dense"][0, :2], vectors)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(("tower", "alignment"), [("bert", native.TILE), ("pages", 1)])
def test_texts_are_aligned_to_tiles_and_images_are_not(tower, alignment):
    assert replica_with(tiny_spec(**TOWERS[tower]), native=True).alignment == alignment


def test_only_the_outputs_asked_for_are_fetched_and_empty_slots_are_zero(replica):
    assert replica.float32_bucket is None  # there is no twin
    planes = pack(batch_of([2, 7, 3]))
    assert set(replica.run(BUCKET, planes, ("dense",))) == {"dense"}
    both = replica.run(BUCKET, planes, ("dense", "tokens"))
    assert both["dense"].shape == (2, 4, 32)
    assert both["tokens"].shape == (2, 16, 32)
    assert {output.dtype for output in both.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(  # mean pooling of the hidden states it returns
        both["dense"][0, 0], both["tokens"][0, :3].mean(axis=0), rtol=1e-5, atol=1e-6
    )
    assert np.abs(both["dense"][0, 0]).max() > 0
    np.testing.assert_array_equal(both["dense"][0, 1:], 0)
    np.testing.assert_array_equal(both["dense"][1], 0)


def test_programs_are_compiled_with_the_safe_fusion_setting(monkeypatch):
    assert compiler_options("gpu") == compiler_options("tpu") == {}
    seen, wanted = [], [compiler_options("cpu")]  # asked before, for it compiles as well
    assert wanted[0] in (SAFE_FUSION, {})  # {} where this XLA has no such option
    usual = jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **options):
        seen.append(compiler_options)
        return usual(self, compiler_options=compiler_options, **options)

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile)
        replica_of()
    assert seen == wanted
    unknown, wrong = {"xla_cpu_no_such_option": "1"}, dict.fromkeys(SAFE_FUSION, "NO_SUCH_FUSION")
    monkeypatch.setattr("jaxembed.engine.compiles.SAFE_FUSION", unknown)
    assert compiler_options.__wrapped__("cpu") == {}
    monkeypatch.setattr("jaxembed.engine.compiles.SAFE_FUSION", wrong)
    with pytest.raises(jax.errors.JaxRuntimeError):  # it is not passed over in silence
        compiler_options.__wrapped__("cpu")
