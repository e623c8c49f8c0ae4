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

    def run(self) -> jax.Array:
        call = jax.ffi.ffi_call(
            f"jaxembed_{self.name}", jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))
        )
        return call(*self.operands.values(), **self.attributes)

    def with_operand(self, name: str, value: np.ndarray) -> "Made":
        return replace(self, operands={**self.operands, name: value})

    def with_attributes(self, **attributes: Any) -> "Made":
        return replace(self, attributes={**self.attributes, **attributes})


def rounded(*shape: int) -> np.ndarray:
    return np.ones(shape, jnp.bfloat16)


def single(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def weight(k: int, n: int) -> np.ndarray:
    return native.packed(rounded(k, n))


SEGMENTS = np.ones((3, 16), np.int32)
SIGHT = {
    "mode": np.int64(0),
    "causal": np.int64(0),
    "reach": np.int64(-1),
    "cap": np.float32(0),
}
GATED_SILU = np.int64(native.ENDS.index("gated_silu"))
PLACES = {"distance_bias": single(2, 31), "cos": single(3, 16, 16), "sin": single(3, 16, 16)}
PRODUCT = {"x": single(3, 5, 64), "kernel": weight(64, 96), "bias": single(96)}
CALLS = {
    "linear": Made(
        "linear", PRODUCT, (3, 5, 96), "float32", {"eps": np.float32(0), "mode": np.int64(2)}
    ),
    "linear with a gate": Made(
        "linear",
        {"x": single(3, 5, 64), "kernel": weight(64, 192), "bias": single(192)},
        (3, 5, 96),
        "bfloat16",
        {"eps": np.float32(0), "mode": GATED_SILU},
    ),
    "linear with a norm": Made(
        "linear",
        {**PRODUCT, "residual": single(3, 5, 96), "scale": single(96), "shift": single(96)},
        (3, 5, 96),
        "float32",
        {"eps": np.float32(1e-6), "mode": np.int64(1)},
    ),
    "attention": Made(
        "attention",
        {
            "query": rounded(3, 16, 4, 32),
            "key": rounded(3, 16, 2, 32),
            "value": rounded(3, 16, 2, 32),
            "segments": SEGMENTS,
        },
        (3, 16, 4, 32),
        "bfloat16",
        SIGHT,
    ),
    "joint_attention": Made(
        "joint_attention",
        {"joint": rounded(3, 16, 3, 2, 32), "segments": SEGMENTS},
        (3, 16, 2, 32),
        "bfloat16",
        SIGHT,
    ),
    "self_attention": Made(
        "self_attention",
        {
            "hidden": single(3, 16, 64),
            "kernel": weight(64, 192),
            "bias": single(192),
            "segments": SEGMENTS,
        },
        (3, 16, 64),
        "bfloat16",
        SIGHT | {"heads": np.int64(2)},
    ),
    "mlp": Made(
        "mlp",
        {
            "mixed": rounded(3, 16, 64),
            "hidden": single(3, 16, 64),
            "out_kernel": weight(64, 64),
            "out_bias": single(64),
            "out_scale": single(64),
            "out_shift": single(64),
            "up_kernel": weight(64, 96),
            "up_bias": single(96),
            "down_kernel": weight(96, 64),
            "down_bias": single(64),
            "down_scale": single(64),
            "down_shift": single(64),
        },
        (3, 16, 64),
        "float32",
        {"eps": np.float32(1e-6), "mode": np.int64(native.ENDS.index("gelu"))},
    ),
}
CALLS |= {
    "attention with a bias": replace(
        CALLS["attention"],
        operands=CALLS["attention"].operands | {"distance_bias": single(4, 31)},
        attributes=SIGHT | {"mode": np.int64(native.BIASED), "cap": np.float32(30)},
    ),
    **{
        f"{name} with a bias and rotated": replace(
            CALLS[name],
            operands=CALLS[name].operands | PLACES,
            attributes=CALLS[name].attributes | {"mode": np.int64(native.BIASED | native.ROTATED)},
        )
        for name in ("joint_attention", "self_attention")
    },
    "joint_attention rotated": replace(
        CALLS["joint_attention"],
        operands=CALLS["joint_attention"].operands
        | {name: PLACES[name] for name in ("cos", "sin")},
        attributes=SIGHT | {"mode": np.int64(native.ROTATED)},
    ),
    "mlp with a gate": replace(
        CALLS["mlp"],
        operands=CALLS["mlp"].operands | {"up_kernel": weight(64, 192), "up_bias": single(192)},
        attributes=CALLS["mlp"].attributes | {"mode": GATED_SILU},
    ),
}


def adapted(call: str, *products: tuple[str, int, int]) -> Made:
    """A call with adapters of products, given by the name in front of their operands and shape."""
    made = CALLS[call]
    leading = made.shape[:2]
    operands, mode = {"numbers": np.ones(leading, np.int32)}, native.ADAPTED
    for of, k, n in products:
        operands[f"{of}adapter_down"] = weight(k, 32)
        operands[f"{of}adapter_up"] = weight(32, n)
        operands[f"{of}adapter_owners"] = np.ones(32, np.int32)
        mode |= native.ADAPTS.get(of.removesuffix("_"), 0)
    return replace(
        made,
        operands=made.operands | operands,
        attributes=made.attributes | {"mode": made.attributes["mode"] | mode},
    )


CALLS |= {
    "linear with adapters": adapted("linear", ("", 64, 96)),
    "linear with a gate and adapters": adapted("linear with a gate", ("", 64, 192)),
    "linear with a norm and adapters": adapted("linear with a norm", ("", 64, 96)),
    "self_attention with adapters": adapted("self_attention", ("", 64, 192)),
    "mlp with adapters": adapted("mlp", ("out_", 64, 64), ("up_", 64, 96), ("down_", 96, 64)),
    "mlp with adapters of one product": adapted("mlp with a gate", ("up_", 64, 192)),
}


@pytest.fixture(name="made", params=each(CALLS, "linear", "attention"))
def _made(request) -> Made:
    return CALLS[request.param]


def assert_refused(made: Made, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message) as caught:
        jax.block_until_ready(made.run())
    assert "INVALID_ARGUMENT" in str(caught.value)
    assert f"jaxembed_{made.name}: " in str(caught.value)


def longer(value: np.ndarray, axis: int) -> np.ndarray:
    return np.ones([n + (i == axis) for i, n in enumerate(value.shape)], value.dtype)


def test_each_call_here_is_right(made):
    jax.block_until_ready(made.run())


def test_every_call_of_the_library_is_here():
    assert {made.name for made in CALLS.values()} == set(native.CALLS)


def test_the_library_tells_the_order_of_operands(made):
    mode = int(made.attributes.get("mode", 0))
    assert native.operand_names(made.name, mode) == tuple(made.operands)


def test_operands_come_in_any_order_by_name(made):
    backwards = {name: jnp.asarray(made.operands[name]) for name in reversed(made.operands)}
    got = native._call(made.name, made.shape, made.dtype, backwards, **made.attributes)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(made.run()))


def test_a_missing_or_unknown_operand_raises_in_python(made):
    arrays = {name: jnp.asarray(value) for name, value in made.operands.items()}
    names = ", ".join(arrays)
    missing = {name: arrays[name] for name in list(arrays)[1:]}
    for operands in (missing, {**arrays, "other": jnp.zeros(1)}):
        wanted = re.escape(f"native {made.name} takes {names}, not {', '.join(operands)}")
        with pytest.raises(TypeError, match=wanted):
            native._call(made.name, made.shape, made.dtype, operands, **made.attributes)


def test_operands_too_many_or_too_few_are_refused(made):
    count = len(made.operands)
    few = replace(made, operands=dict(list(made.operands.items())[:-1]))
    assert_refused(few, rf"{count - 1} operands and 1 results came, wanted 1 result and {count} ")
    assert_refused(made.with_operand("other", single(1)), f"{count + 1} operands .* came")


def test_another_dtype_is_refused(made):
    for name, value in made.operands.items():
        other = made.with_operand(name, value.astype(np.float16))
        assert_refused(other, rf"operand {name}: f16\[.*\] came, wanted (f32|bf16|s32)")
    assert_refused(replace(made, dtype="float16"), r"result \w+: f16\[.* came, wanted (f32|bf16)")


def test_another_rank_is_refused(made):
    for name, value in made.operands.items():
        assert_refused(made.with_operand(name, value[None]), " came, wanted ")
        assert_refused(made.with_operand(name, value.ravel()[0]), f"operand {name}: .* came")


def test_another_size_of_any_axis_is_refused(made):
    for name, value in made.operands.items():
        for axis in range(value.ndim):
            assert_refused(made.with_operand(name, longer(value, axis)), " came, wanted ")
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
        ("linear", "mode", np.int64(len(native.ENDS))),
        ("linear", "mode", np.int64(-1)),
        ("mlp", "mode", np.int64(native.ENDS.index("norm"))),
        ("mlp with a gate", "mode", np.int64(len(native.ENDS))),
        ("attention", "mode", np.int64(native.ROTATED)),
        ("self_attention", "mode", np.int64(4)),
        ("linear", "mode", np.int64(native.ADAPTED + len(native.ENDS))),
        ("joint_attention", "mode", np.int64(native.ADAPTED)),
        ("attention", "cap", np.float32(-1)),
        ("linear with a norm", "eps", np.float32(-1)),
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
        assert_refused(
            slip, f"heads = {heads} and dim = 64 came, wanted dim to be a multiple of 32"
        )


def test_what_tells_of_places_fits_the_rows():
    call = CALLS["self_attention with a bias and rotated"]
    short = call.with_operand("distance_bias", single(2, 30))
    message = r"length = 16 and distances = 30 came, wanted distances to be 2 \* length - 1"
    assert_refused(short, message)
    wide = replace(call, operands=call.operands | {name: single(3, 16, 32) for name in PLACES})
    wide = wide.with_operand("distance_bias", single(2, 31))
    assert_refused(wide, r"half = 32 and dim = 64 came, wanted dim to be 4 \* half")
    plain = replace(call, attributes=call.attributes | {"mode": np.int64(native.BIASED)})
    assert_refused(plain, "7 operands .* came, wanted 1 result and 5 operands: .* distance_bias")
    whole = CALLS["mlp with a gate"].with_attributes(mode=np.int64(native.ENDS.index("gelu")))
    assert_refused(whole, "down_kernel: .* came, wanted")


def test_the_message_says_what_came_and_what_was_wanted():
    short = CALLS["attention"].with_operand("key", rounded(3, 24, 2, 32))
    assert_refused(
        short,
        r"jaxembed_attention: operand key: bf16\[3, 24, 2, 32\] came, "
        r"wanted bf16 \[rows = 3, length = 16, groups, width = 32\]",
    )
    odd = CALLS["linear"].with_operand("x", single(3, 5, 48))
    wanted = r"x: f32\[3, 5, 48\] came, wanted f32 or bf16 \[\.\.\., in \(a multiple of 32\)\]"
    assert_refused(odd, wanted)


def test_a_reach_beyond_the_row_is_the_whole_row():
    whole = CALLS["attention"].run()
    for reach in (16, 2**31, 2**63 - 1):
        got = CALLS["attention"].with_attributes(reach=np.int64(reach)).run()
        np.testing.assert_array_equal(np.asarray(got), np.asarray(whole))
