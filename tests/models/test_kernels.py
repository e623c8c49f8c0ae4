"""Attention kernels for accelerators, interpreted on CPU, against float64 numpy and XLA.

What interpretation cannot show is how fast they are, and that a chip's compiler takes them; the
lowering to each platform's own form is done here as well, with no such device.
"""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
from conftest import TOWERS, tiny_spec
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from representatives import each
from test_attention import SIGHTS, draw, last_hidden, ragged, reference
from test_invariance import HUGE, assert_same, placed, poisoned_parameters, run

from jaxembed.engine.bucket import TPU_TILE, Bucket, default_grid
from jaxembed.engine.replica import Replica
from jaxembed.engine.transfer import part_sizes
from jaxembed.models import kernels, program
from jaxembed.models.attention import EVERYTHING, AttentionMask, by_xla, using
from jaxembed.models.kernels import Call, Kernel, splash, triton
from jaxembed.models.qwen_vision import QwenVision, QwenVisionConfig
from jaxembed.models.tokens import PackedTokens
from jaxembed.preprocessing.images.prepare import mrope_positions

NAMES = ["splash", "triton", "flash"]
SLOTS = 8
SEGMENTS = ragged(256, [256], [100, 30, 70], [1, 1, 150, 50, 54], [3])
SEGMENTS[3, 100:140] = 2  # a gap before it


def flash_mha_varlen(query, key, value, cu_seqlens, max_seqlen, is_causal, window_size):
    """What dew_flash_attn 0.3.6 says it does: sequence i are tokens cu_seqlens[i] to [i + 1]."""
    tokens = query.shape[0]
    assert cu_seqlens.dtype == jnp.int32
    sizes = jnp.diff(cu_seqlens)
    partition = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (sizes.min() >= 0)
    fits = partition & (sizes.max() <= max_seqlen)
    sequence = jnp.searchsorted(cu_seqlens, jnp.arange(tokens), side="right")
    before, after = window_size
    assert after == (0 if is_causal else before)
    attention_mask = AttentionMask(causal=is_causal, reach=None if before < 0 else before)
    one_row = (x[None] for x in (query, key, value, sequence))
    mixed = by_xla(*one_row, attention_mask)[0].astype(query.dtype)
    return jnp.where(fits, mixed, jnp.nan)


@pytest.fixture(name="flash", scope="module")
def _flash():
    """The module `flash` on the package's contract in plain JAX."""
    package = ModuleType("dew_flash_attn")
    package.flash_mha_varlen = flash_mha_varlen
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "dew_flash_attn", package)
        yield import_module("jaxembed.models.kernels.flash")
        del sys.modules["jaxembed.models.kernels.flash"]


@pytest.fixture(name="kernel", params=NAMES)
def _kernel(request) -> Kernel:
    if request.param == "flash":
        return request.getfixturevalue("flash").KERNEL
    return interpreted({"splash": splash, "triton": triton}[request.param])


def interpreted(module) -> Kernel:
    found = {name: getattr(module.KERNEL, name) for name in ("attend", "attend_joint", "gather")}
    return replace(
        module.KERNEL,
        **{name: partial(call, interpret=True) for name, call in found.items() if call},
    )


def mixed_by(kernel: Kernel, operands, of_token, attention_mask, slots=SLOTS) -> np.ndarray:
    call = jax.jit(lambda q, k, v, s: kernel.attend(q, k, v, s, attention_mask, slots))
    return np.asarray(call(*operands, jnp.asarray(of_token)), np.float32)


def assert_attends(kernel, operands, of_token, attention_mask=EVERYTHING, rtol=1e-4, atol=1e-5):
    """As the reference; rtol: float32, sums of hundreds of terms."""
    mixed = mixed_by(kernel, map(jnp.asarray, operands), of_token, attention_mask)
    wanted, real = reference(*map(np.asarray, operands), of_token, attention_mask), of_token != 0
    np.testing.assert_allclose(mixed[real], wanted[real], rtol=rtol, atol=atol)


@pytest.mark.parametrize("attention_mask", each(SIGHTS, "causal window"))
def test_packed_segments_attend_to_themselves_beside_nan(kernel, attention_mask):
    padding = SEGMENTS[..., None, None] == 0
    operands = [np.where(padding, np.float32(np.nan), x) for x in draw(SEGMENTS, per_group=2)]
    assert_attends(kernel, operands, SEGMENTS, SIGHTS[attention_mask])


@pytest.mark.parametrize("module", [splash, triton], ids=lambda module: module.KERNEL.name)
@pytest.mark.parametrize(
    "attention_mask", each([EVERYTHING, AttentionMask(reach=40)], AttentionMask(reach=40)), ids=str
)
def test_no_query_sees_a_key_that_is_hidden(module, attention_mask):
    operands, key_segments = draw(SEGMENTS), last_hidden(SEGMENTS)
    attend = interpreted(module).attend
    call = jax.jit(lambda *of: attend(*of[:4], attention_mask, SLOTS, key_segments=of[4]))
    mixed = np.asarray(call(*map(jnp.asarray, (*operands, SEGMENTS, key_segments))))
    wanted = reference(*operands, SEGMENTS, attention_mask, key_segments=key_segments)
    real = wanted.any(axis=(2, 3))
    assert real.sum() > (SEGMENTS != 0).sum() / 2
    np.testing.assert_allclose(mixed[real], wanted[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [32, 96])
@pytest.mark.parametrize("hides_keys", [False, True])
def test_a_joint_array_gives_what_its_parts_give(monkeypatch, width, hides_keys):
    """Bit for bit, with heads and rows that are filled up, beside NaN in padding."""
    monkeypatch.setattr(test_attention, "WIDTH", width)
    of_token = ragged(200, [200], [90, 80])
    padding = of_token[..., None, None] == 0
    operands = [jnp.where(padding, jnp.float32(np.nan), x) for x in draw(of_token)]
    optional = {"key_segments": jnp.asarray(last_hidden(of_token))} if hides_keys else {}
    kernel, mask = interpreted(triton), AttentionMask(reach=70)
    apart = kernel.attend(*operands, jnp.asarray(of_token), mask, SLOTS, **optional)
    joint = jnp.stack(operands, axis=2)
    found = kernel.attend_joint(joint, jnp.asarray(of_token), mask, SLOTS, **optional)
    real = of_token != 0
    np.testing.assert_array_equal(np.asarray(found)[real], np.asarray(apart)[real])
    assert np.isfinite(np.asarray(found)[real]).all()


@pytest.mark.parametrize("attention_mask", SIGHTS.values(), ids=SIGHTS)
def test_a_block_of_queries_visits_no_block_of_keys_before_the_first_or_after_the_last_it_sees(
    attention_mask,
):
    query_block, key_block = 64, 32
    found = triton.key_blocks(jnp.asarray(SEGMENTS), attention_mask, query_block, key_block)
    at = np.arange(SEGMENTS.shape[1])
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS[:, :, None] != 0)
    if attention_mask.causal:
        seen &= at[:, None] >= at
    if attention_mask.reach is not None:
        seen &= abs(at[:, None] - at) <= attention_mask.reach
    for row, block in np.ndindex(found[0].shape):
        keys = np.flatnonzero(seen[row, block * query_block :][:query_block].any(axis=0))
        first, end = (int(bound[row, block]) for bound in found)
        if len(keys):
            assert (first, end) == (keys[0] // key_block, keys[-1] // key_block + 1)
        else:
            assert first >= end


@pytest.mark.numerics
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_heads_of_any_width_are_filled_up(kernel, width, monkeypatch):
    monkeypatch.setattr(test_attention, "WIDTH", width)
    of_token = ragged(128, [128], [50, 40])
    assert_attends(kernel, draw(of_token), of_token, AttentionMask(causal=True, reach=20))


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("length", "attention_mask"),
    [(512, AttentionMask(reach=64)), (512, AttentionMask(causal=True)), (514, EVERYTHING)],
    ids=str,
)
def test_longer_rows_of_several_blocks(kernel, length, attention_mask):
    """Every kernel has more than one block of queries and of keys, and a last one not full."""
    if kernel.name == "splash":
        length = 640
    of_token = ragged(length, [length], [130, 300, 20])
    assert_attends(kernel, draw(of_token), of_token, attention_mask)


@pytest.mark.numerics
def test_bfloat16_stays_near_the_same_operands_in_float64(kernel):
    """It has 8 bits: the scaled query, the weights and the result are rounded to them."""
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in draw(SEGMENTS)]
    assert_attends(kernel, narrow, SEGMENTS, rtol=1e-7, atol=0.03)


@pytest.mark.numerics
@pytest.mark.parametrize("backbone", ["bert", "modernbert", "qwen3"])
def test_a_text_has_one_vector_wherever_it_lies_and_the_one_of_xla(kernel, backbone):
    spec = tiny_spec(**TOWERS[backbone])
    parameters, devices = poisoned_parameters(spec), jax.local_devices()[:1]
    short, bucket = Bucket(1, 16), Bucket(2, 128)
    xla = Replica(program(spec), parameters, devices, "float32")
    ours = Replica(
        program(spec),
        parameters,
        devices,
        "float32",
        attention=lambda bucket: kernel.implementation(bucket.slots),
    )
    xla.compile(short)
    ours.compile(bucket)
    ids, others = [7, 8, 9, 10, 11, 12, 13, 14], ([HUGE, 6] * 20, 0, 1, 0, 0)
    wanted = run(xla, placed(short, [(ids, 2, 0, 0, 0)]))
    for row, slot, start in ((0, 0, 0), (0, 3, 120), (1, 1, 40), (1, 2, 61)):
        batch = placed(bucket, [(ids, 2, row, slot, start), others])
        for vector, one in zip(run(ours, batch), wanted, strict=True):
            assert np.isfinite(one).all()
            assert_same(vector, one)


@pytest.mark.numerics
def test_an_image_may_have_more_windows_than_its_row_has_slots(kernel):
    config = QwenVisionConfig(**TOWERS["pages, qwen"]["config"]["image"])
    graph, state = nnx.split(nnx.eval_shape(lambda: QwenVision(config)))
    rng, length = np.random.default_rng(0), 128
    leaves, structure = jax.tree.flatten(state)
    state = jax.tree.unflatten(
        structure, [jnp.asarray(rng.standard_normal(leaf.shape, np.float32)) for leaf in leaves]
    )
    segments = jnp.zeros((1, length), jnp.int32).at[0, 3:93].set(1)
    tokens = PackedTokens(
        ids=segments,
        positions=segments,
        segments=segments,
        types=segments,
        bounds=jnp.zeros((1, 1, 2), jnp.int32),
        pixels=jnp.asarray(rng.standard_normal((1, length, 4 * 48), np.float32)),
        places=jnp.asarray(mrope_positions(9, 10, 3, length - 93))[None],
    )

    def seen(attention) -> np.ndarray:
        with using(attention):
            found = jax.jit(lambda tokens: nnx.merge(graph, state)(tokens)[0])(tokens)
        return np.asarray(found)[0, 3:93]

    wanted = seen(by_xla)
    near = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(seen(kernel.implementation(1)), wanted, atol=near)


def lowered(kernel: Kernel, platform: str, length: int, attention_mask, dtype="bfloat16") -> str:
    """The program for a platform that this machine need not have."""
    heads = [jax.ShapeDtypeStruct((2, length, n, 64), dtype) for n in (4, 2, 2)]
    of_token = jax.ShapeDtypeStruct((2, length), jnp.int32)
    call = jax.jit(lambda q, k, v, s: kernel.attend(q, k, v, s, attention_mask, SLOTS))
    return call.trace(*heads, of_token).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("limit", [100, 128, 514, 8192])
def test_splash_takes_every_row_of_a_default_grid_for_tpu(limit):
    grid = default_grid(limit, 16_384, tile=TPU_TILE)
    assert grid.max_length >= limit
    for bucket in grid.buckets:
        for attention_mask in (EVERYTHING, AttentionMask(causal=True), AttentionMask(reach=64)):
            call = Call(12, 12, 64, "bfloat16", attention_mask)
            assert splash.refuses(call, bucket.length) is None
            blocks = splash.block_sizes(bucket.length, attention_mask)
            for size in (blocks.block_q, blocks.block_kv, blocks.block_kv_compute):
                assert size % TPU_TILE == 0
                assert bucket.length % size == 0


def test_each_kernel_says_which_calls_it_does_not_take(kernel):
    call, fits = Call(12, 12, 64, "bfloat16", EVERYTHING), 514 // 128 * 128
    assert kernel.refuses(call, fits) is None
    assert "no bias" in kernel.refuses(replace(call, has_bias=True), fits)
    assert "no soft cap" in kernel.refuses(
        replace(call, attention_mask=AttentionMask(cap=5.0)), fits
    )
    if kernel.name == "splash":
        assert "514 tokens are not a multiple of 128" in kernel.refuses(call, 514)
        assert "float16" in kernel.refuses(replace(call, dtype="float16"), fits)
        return
    assert (
        kernel.refuses(replace(call, attention_mask=AttentionMask(causal=True, reach=64)), 514)
        is None
    )
    assert "float32" in kernel.refuses(replace(call, dtype="float32"), fits)
    assert "heads of 512" in kernel.refuses(replace(call, width=512), fits)
    hides = kernel.refuses(replace(call, hides_keys=True), fits)
    assert hides == ("it supports no hidden keys" if kernel.name == "flash" else None)


@pytest.mark.parametrize(
    "attention_mask", [EVERYTHING, AttentionMask(causal=True), AttentionMask(reach=64)], ids=str
)
@pytest.mark.parametrize("length", each([128, 640, 8192], 640))
def test_splash_lowers_to_mosaic(length, attention_mask):
    assert "tpu_custom_call" in lowered(splash.KERNEL, "tpu", length, attention_mask)


def h100_mesh() -> AbstractMesh:
    """What Pallas of jax 0.11 asks for the properties of the GPU."""
    figures = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "platform": "gpu"}
    taken = signature(AbstractDevice).parameters  # jax 0.10.0 has no platform
    h100 = AbstractDevice(**{name: figures[name] for name in taken})
    return AbstractMesh((1,), ("data",), abstract_device=h100)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.11
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", each([128, 514], 514))
def test_our_kernel_lowers_to_triton(length, dtype):
    with use_abstract_mesh(h100_mesh()):
        text = lowered(triton.KERNEL, "cuda", length, AttentionMask(causal=True, reach=64), dtype)
    assert "__gpu$xla.gpu.triton" in text
    assert "attention_of_segments" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "width"), [((1,), 1), ((4, 2, 1, 1), 33), ((3, 5), 768), ((2, 1), 2500)], ids=str
)
def test_a_kernel_gathers_rows_into_parts(sizes, width, dtype):
    places = sum(sizes)
    flat = jnp.arange(places * width).reshape(places, width).astype(dtype)
    order = jnp.asarray(np.random.default_rng(0).integers(0, places, places, np.int32))
    parts = jax.jit(lambda *of: interpreted(triton).gather(*of, sizes))(flat, order)
    assert [part.shape for part in parts] == [(size, width) for size in sizes]
    np.testing.assert_array_equal(np.concatenate(parts), np.asarray(flat[order]))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.11
def test_the_kernel_that_gathers_lowers_to_triton():
    flat = jax.ShapeDtypeStruct((4096, 768), "float32")
    order = jax.ShapeDtypeStruct((4096,), jnp.int32)
    with use_abstract_mesh(h100_mesh()):
        call = jax.jit(lambda *of: triton.KERNEL.gather(*of, part_sizes(32, 128)))
        text = call.trace(flat, order).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "gather_parts" in text


def test_kernels_are_found_by_name_and_the_optional_one_where_its_package_is(monkeypatch):
    for platform, paths in kernels.KERNELS.items():
        for name, path in paths.items():
            if name != "flash":  # its package is optional
                assert kernels.kernel(path).name == name, platform
    monkeypatch.setitem(sys.modules, "dew_flash_attn", None)
    monkeypatch.delitem(sys.modules, "jaxembed.models.kernels.flash", raising=False)
    with pytest.raises(ImportError, match="dew_flash_attn"):
        kernels.kernel(kernels.KERNELS["gpu"]["flash"])


def test_replicas_of_one_program_may_attend_with_different_kernels():
    def nothing(query, key, value, segments, attention_mask):
        return jnp.zeros(query.shape)

    spec, bucket = tiny_spec(), Bucket(1, 16)
    model, parameters, devices = program(spec), poisoned_parameters(spec), jax.local_devices()[:1]
    found = []
    for attend_of in (lambda bucket: by_xla, lambda bucket: nothing, lambda bucket: by_xla):
        replica = Replica(model, parameters, devices, "float32", attention=attend_of)
        replica.compile(bucket)
        found.append(run(replica, placed(bucket, [([7, 8, 9], 0, 0, 0, 0)]))[0])
    assert np.abs(found[0] - found[1]).max() > 1e-3
    np.testing.assert_array_equal(found[0], found[2])
