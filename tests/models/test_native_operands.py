"""The operands of the native kernels: their order is the library's, and a call that is not as its
table says is an error."""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from representatives import each

from jaxembed.models import native

pytestmark = pytest.mark.usefixtures("native_kernels")


@dataclass(frozen=True)
class Made:
    """A call of the library, without the functions that make right ones."""

    name: str
    operands: dict[str, np.ndarray]
    shape: tuple[int, ...]
    dtype: str
    attributes: dict[str, Any]
    kernels: str = "bfloat16"  # their dtype

    def run(self) -> jax.Array:
        result = jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))
        call = jax.ffi.ffi_call(native.library.target(self.name, self.kernels), result)
        return call(*self.operands.values(), **self.attributes)

    def with_operand(self, name: str, value: np.ndarray) -> "Made":
        return replace(self, operands={**self.operands, name: value})

    def and_more(self, operands: dict[str, np.ndarray], mode: int) -> "Made":
        """With further operands, which bits of the mode tell of."""
        attributes = self.attributes | {"mode": self.attributes["mode"] | mode}
        return replace(self, operands=self.operands | operands, attributes=attributes)

    def in_float32(self) -> "Made":
        """The same call of the kernels for float32."""
        operands = {}
        for name, value in self.operands.items():
            if value.dtype == jnp.bfloat16:
                value = np.ones(native.unpacked_shape(value.shape), np.float32)
                value = native.packed(value) if value.shape != self.operands[name].shape else value
            operands[name] = value
        return replace(self, operands=operands, dtype="float32", kernels="float32")

    def with_attributes(self, **attributes: Any) -> "Made":
        return replace(self, attributes={**self.attributes, **attributes})


def rounded(*shape: int) -> np.ndarray:
    return np.ones(shape, jnp.bfloat16)


def single(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def weight(k: int, n: int) -> np.ndarray:
    return native.packed(rounded(k, n))


SIGHT = {"mode": np.int64(0), "causal": np.int64(0), "reach": np.int64(-1), "cap": np.float32(0)}
GELU, GATED_SILU = (np.int64(native.EPILOGUES.index(end)) for end in ("gelu", "gated_silu"))


def linear(x: np.ndarray, n: int, dtype: str, mode: np.int64, **more: np.ndarray) -> Made:
    of_halves = n * (2 if mode == GATED_SILU else 1)
    operands = {"x": x, "kernel": weight(x.shape[2], of_halves), "bias": single(of_halves)} | more
    attributes = {"eps": np.float32(1e-6), "mode": mode}
    return Made("linear", operands, (*x.shape[:2], n), dtype, attributes)


def calls_of(rows: int, length: int, dtype: str = "bfloat16") -> dict[str, Made]:
    """A right call of each kind, attention over rows of so many tokens."""
    segments, hidden = np.ones((rows, length), np.int32), single(rows, length, 64)
    x, query = single(rows, length - 11, 64), rounded(rows, length, 4, 32)
    key = rounded(rows, length, 2, 32)
    attention = {"query": query, "key": key, "value": key, "segments": segments}
    joint = {"joint": rounded(rows, length, 3, 2, 32), "segments": segments}
    layer = {"hidden": hidden, "kernel": weight(64, 192), "bias": single(192), "segments": segments}
    out = {"out_kernel": weight(64, 64)}
    out |= {f"out_{part}": single(64) for part in ("bias", "scale", "shift")}
    down = {"down_kernel": weight(96, 64)}
    down |= {f"down_{part}": single(64) for part in ("bias", "scale", "shift")}
    mixed = {"mixed": rounded(rows, length, 64), "hidden": hidden} | out
    up, gated = ({"up_kernel": weight(64, n), "up_bias": single(n)} for n in (96, 192))
    ends = {"eps": np.float32(1e-6), "mode": GELU}
    heads = SIGHT | {"heads": np.int64(2)}
    norm = {"residual": single(*x.shape[:2], 96), "scale": single(96), "shift": single(96)}
    calls = {
        "linear": linear(x, 96, "float32", GELU),
        "linear with a gate": linear(x, 96, "bfloat16", GATED_SILU),
        "linear with a norm": linear(x, 96, "float32", np.int64(1), **norm),
        "attention": Made("attention", attention, query.shape, "bfloat16", SIGHT),
        "joint_attention": Made("joint_attention", joint, key.shape, "bfloat16", SIGHT),
        "self_attention": Made("self_attention", layer, hidden.shape, "bfloat16", heads),
        "mlp": Made("mlp", mixed | up | down, hidden.shape, "float32", ends),
        "mlp with a gate": Made(
            "mlp", mixed | gated | down, hidden.shape, "float32", ends | {"mode": GATED_SILU}
        ),
    }
    angles = {name: single(rows, length, 16) for name in ("cos", "sin")}
    places = {"distance_bias": single(2, 2 * length - 1)} | angles
    of_heads = {"distance_bias": single(4, 2 * length - 1)}
    calls["attention with a bias"] = calls["attention"].and_more(of_heads, native.BIASED)
    calls["joint_attention rotated"] = calls["joint_attention"].and_more(angles, native.ROTATED)
    for name in ("joint_attention", "self_attention"):
        both = native.BIASED | native.ROTATED
        calls[f"{name} with a bias and rotated"] = calls[name].and_more(places, both)
    for name, products in {
        "linear": [("", 64, 96)],
        "linear with a gate": [("", 64, 192)],
        "linear with a norm": [("", 64, 96)],
        "self_attention": [("", 64, 192)],
        "mlp": [("out_", 64, 64), ("up_", 64, 96), ("down_", 96, 64)],
        "mlp with a gate": [("up_", 64, 192)],
    }.items():
        calls[f"{name} and adapters"] = adapted(calls[name], products)
    for name in ("linear and adapters", "linear with a norm", "linear with a gate", "mlp"):
        padding = {"segments": np.ones(calls[name].shape[:2], np.int32)}
        calls[f"{name} and segments"] = calls[name].and_more(padding, native.PADDED)
    if dtype == "float32":
        return {name: made.in_float32() for name, made in calls.items()}
    return calls


def adapted(made: Made, products: list[tuple[str, int, int]]) -> Made:
    """A call with adapters of products, given by the name in front of their operands and shape."""
    operands, mode = {"numbers": np.ones(made.shape[:2], np.int32)}, native.ADAPTED
    for of, k, n in products:
        operands[f"{of}adapter_down"] = weight(k, 32)
        operands[f"{of}adapter_up"] = weight(32, n)
        operands[f"{of}adapter_owners"] = np.ones(32, np.int32)
        mode |= native.ADAPTS.get(of.removesuffix("_"), 0)
    return made.and_more(operands, mode)


CALLS = calls_of(3, 16)


@pytest.fixture(name="made", params=each(CALLS, "linear", "attention"))
def _made(request) -> Made:
    return CALLS[request.param]


def assert_refused(made: Made, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message) as caught:
        jax.block_until_ready(made.run())
    assert "INVALID_ARGUMENT" in str(caught.value)
    assert f"jaxembed_{made.name}: " in str(caught.value)


def test_every_call_of_the_library_is_here():
    assert {made.name for made in CALLS.values()} == set(native.CALLS)


def test_the_library_tells_the_order_of_operands(made):
    mode = int(made.attributes.get("mode", 0))
    assert native.operand_names(made.name, made.kernels, mode) == tuple(made.operands)


def test_operands_come_in_any_order_by_name(made):
    backwards = {name: jnp.asarray(made.operands[name]) for name in reversed(made.operands)}
    got = native._call(
        made.name, made.kernels, made.shape, made.dtype, backwards, **made.attributes
    )
    np.testing.assert_array_equal(np.asarray(got), np.asarray(made.run()))


def test_a_missing_or_unknown_operand_raises_in_python(made):
    arrays = {name: jnp.asarray(value) for name, value in made.operands.items()}
    names = ", ".join(arrays)
    missing = {name: arrays[name] for name in list(arrays)[1:]}
    for operands in (missing, {**arrays, "other": jnp.zeros(1)}):
        wanted = re.escape(f"native {made.name} takes {names}, not {', '.join(operands)}")
        with pytest.raises(TypeError, match=wanted):
            native._call(
                made.name, made.kernels, made.shape, made.dtype, operands, **made.attributes
            )


def test_operands_of_another_number_dtype_rank_or_size_are_refused(made):
    count = len(made.operands)
    few = replace(made, operands=dict(list(made.operands.items())[:-1]))
    assert_refused(few, rf"{count - 1} operands and 1 results came, wanted 1 result and {count} ")
    assert_refused(made.with_operand("other", single(1)), f"{count + 1} operands .* came")
    for name, value in made.operands.items():
        other = made.with_operand(name, value.astype(np.float16))
        assert_refused(other, rf"operand {name}: f16\[.*\] came, wanted (f32|bf16|s32)")
        assert_refused(made.with_operand(name, value.ravel()[0]), f"operand {name}: .* came")
        for axis in range(value.ndim):
            longer = np.ones([n + (i == axis) for i, n in enumerate(value.shape)], value.dtype)
            for slip in (value[None], longer):
                assert_refused(made.with_operand(name, slip), " came, wanted ")
    assert_refused(replace(made, dtype="float16"), r"result \w+: f16\[.* came, wanted (f32|bf16)")
    for axis in range(len(made.shape)):
        shape = tuple(n + (i == axis) for i, n in enumerate(made.shape))
        assert_refused(replace(made, shape=shape), r"result \w+: .* came, wanted ")


def test_attributes_that_are_missing_or_unknown_or_of_another_type_are_refused(made):
    for name in made.attributes:
        rest = {key: value for key, value in made.attributes.items() if key != name}
        assert_refused(replace(made, attributes=rest), f"attribute {name}: nothing came, wanted")
        for other in (np.int32(7), np.float64(7), "seven"):
            slip = made.with_attributes(**{name: other})
            assert_refused(slip, f"attribute {name}: another type came, wanted")
    assert_refused(made.with_attributes(other=np.int64(0)), "attributes came, wanted")


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("linear", "mode", np.int64(native.ADAPTS["out"])),
        ("mlp", "mode", np.int64(native.EPILOGUES.index("norm"))),
        ("attention", "mode", np.int64(native.ROTATED)),
        ("self_attention", "mode", np.int64(4)),
        ("joint_attention", "mode", np.int64(native.ADAPTED)),
        ("attention", "cap", np.float32(-1)),
        ("linear with a norm", "eps", np.float32(np.nan)),
        ("attention", "causal", np.int64(2)),
        ("joint_attention", "reach", np.int64(-2)),
        ("self_attention", "heads", np.int64(0)),
        ("mlp", "eps", np.float32(np.inf)),
    ],
)
def test_an_attribute_out_of_range_is_refused(call, name, value):
    message = rf"attribute {name}: \S+ came, wanted \w+ .*of at least"
    assert_refused(CALLS[call].with_attributes(**{name: value}), message)


def test_heads_must_divide_what_they_share():
    attention = CALLS["attention"].with_operand("key", rounded(3, 16, 3, 32))
    attention = attention.with_operand("value", rounded(3, 16, 3, 32))
    assert_refused(attention, "groups = 3 and heads = 4 came, wanted heads to be a multiple of 1 ")
    for heads in (3, 4, 2**62):
        slip = CALLS["self_attention"].with_attributes(heads=np.int64(heads))
        assert_refused(slip, f"heads = {heads} and dim = 64 came, wanted dim to be .* of 32")


def test_what_tells_of_places_fits_the_rows():
    call = CALLS["self_attention with a bias and rotated"]
    short = call.with_operand("distance_bias", single(2, 30))
    message = r"length = 16 and distances = 30 came, wanted distances to be 2 \* length - 1"
    assert_refused(short, message)
    wide = replace(call, operands=call.operands | {of: single(3, 16, 32) for of in ["cos", "sin"]})
    assert_refused(wide, r"half = 32 and dim = 64 came, wanted dim to be 4 \* half")
    plain = replace(call, attributes=call.attributes | {"mode": np.int64(native.BIASED)})
    assert_refused(plain, "7 operands .* came, wanted 1 result and 5 operands: .* distance_bias")
    whole = CALLS["mlp with a gate"].with_attributes(mode=np.int64(native.EPILOGUES.index("gelu")))
    assert_refused(whole, "down_kernel: .* came, wanted")

    odd = CALLS["linear"].with_operand("x", single(3, 5, 48))
    wanted = r"x: f32\[3, 5, 48\] came, wanted f32 or bf16 \[\.\.\., in \(a multiple of 32\)\]"
    assert_refused(odd, wanted)


def test_a_reach_beyond_the_row_is_the_whole_row():
    whole = CALLS["attention"].run()
    for reach in (16, 2**31, 2**63 - 1):
        got = CALLS["attention"].with_attributes(reach=np.int64(reach)).run()
        np.testing.assert_array_equal(np.asarray(got), np.asarray(whole))
