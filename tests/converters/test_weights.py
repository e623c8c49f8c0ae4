"""Rules and transforms from tensors to parameters, and when a tensor is read and freed."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from converters import weights
from converters.families import t5
from converters.weights import Rule, Tensor, difference_of_rows, one_plus
from jaxembed.errors import CheckpointError, ConversionError

DRAW = np.random.default_rng(0)
Q, K, V = (DRAW.standard_normal((rows, 8), np.float32) for rows in (16, 4, 4))
TABLE = DRAW.standard_normal((50, 8), np.float32)


def tensors_of(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {
        name: Tensor(name, str(array.dtype), array.shape, lambda array=array: array)
        for name, array in arrays.items()
    }


def planned(rules, shapes, ignored=(), **arrays):
    return weights.plan_steps("model", rules, ignored, tensors_of(**arrays), shapes)


@pytest.mark.parametrize(
    ("arrays", "got"),
    [
        ({"q": Q, "k": K[:3]}, "q (16, 8), k (3, 8)"),  # too few rows
        ({"q": Q[:, :7], "k": K}, "q (16, 7), k (4, 8)"),
        ({"q": Q.T, "k": K}, "q (8, 16), k (4, 8)"),
        ({"q": Q[:, 0], "k": K}, "q (16,), k (4, 8)"),
    ],
)
def test_parts_that_do_not_make_the_whole_are_named_with_their_shapes(arrays, got):
    rule = Rule(("q", "k"), "kernel", weights.concatenate_transposed)
    with pytest.raises(ConversionError) as caught:
        planned([rule], {"kernel": (8, 20)}, **arrays)
    assert caught.value.problems == [f"{got}: wanted shape (20, 8) together"]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_the_difference_of_two_rows_is_a_kernel_in_float32(dtype):
    table = TABLE.astype(dtype)
    rule = Rule("head", "kernel", difference_of_rows(41, 7))
    (step,) = planned([rule], {"kernel": (8, 1)}, head=table)
    kernel = step.read()
    assert (kernel.dtype, step.dtype, step.size) == (np.float32, "float32", 8)
    exact = table[41].astype(np.float64) - table[7].astype(np.float64)
    np.testing.assert_allclose(kernel[:, 0], exact, rtol=1e-6)


@pytest.mark.parametrize(("ids", "table"), [((50, 7), TABLE), ((7, 50), TABLE), ((1, 2), TABLE.T)])
def test_rows_that_a_head_does_not_have_are_refused(ids, table):
    rule = Rule("head", "kernel", difference_of_rows(*ids))
    with pytest.raises(ConversionError) as caught:
        planned([rule], {"kernel": (8, 1)}, head=table)
    wanted = f"head: wanted at least {max(ids) + 1} rows of 8, got shape {table.shape}"
    assert caught.value.problems == [wanted]


def _torch_of(state: dict[str, np.ndarray]):
    """A module `torch` whose `load` gives these; what it gave can be looked at."""

    def tensor(array):
        return SimpleNamespace(
            dtype=f"torch.{array.dtype}",
            shape=array.shape,
            contiguous=lambda: SimpleNamespace(dtype="torch.float32", numpy=lambda: array),
        )

    loaded = {name: tensor(array) for name, array in state.items()}
    load = lambda *_, **__: loaded  # noqa: E731
    version = "2.6.0+cpu"
    return SimpleNamespace(load=load, bfloat16="torch.bfloat16", __version__=version), loaded


def test_a_torch_that_a_pickle_can_run_code_with_is_refused(tmp_path, monkeypatch):
    torch, _ = _torch_of({"w": Q})
    load = torch.load
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    torch.load = lambda *_, **__: pytest.fail("the pickle was loaded")
    for installed in ("2.5.1+cu124", "1.13.1", "unknown"):
        torch.__version__ = installed
        with pytest.raises(CheckpointError, match="CVE-2025-32434") as error:
            weights.find(tmp_path)
        for said in (f"torch {installed} ", "torch 2.6 or newer", "model.safetensors"):
            assert said in str(error.value)
        assert "\n" not in str(error.value)
    torch.load = load
    for installed in ("2.6.0", "2.10.0a0+git1", "3.0"):
        torch.__version__ = installed
        assert set(weights.find(tmp_path)) == {"w"}


def test_float8_of_a_torch_file_is_read_bit_by_bit(tmp_path, monkeypatch):
    torch, loaded = _torch_of({"w": Q})
    values = Q.astype(ml_dtypes.float8_e4m3fn)
    torch.uint8 = np.uint8
    loaded["w"].dtype = "torch.float8_e4m3fn"
    views = {np.uint8: SimpleNamespace(numpy=lambda: values.view(np.uint8))}
    loaded["w"].contiguous = lambda: SimpleNamespace(dtype=loaded["w"].dtype, view=views.get)
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    tensor = weights.find(tmp_path)["w"]
    assert tensor.dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(tensor.read(), values)


def test_a_torch_file_is_freed_as_it_is_read_also_by_two_readers(tmp_path, monkeypatch):
    torch, loaded = _torch_of({"table": TABLE, "w": Q, "unused": K})
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    rules = [
        Rule("table", "embedding", weights.identity),
        Rule("table", "kernel", difference_of_rows(1, 0)),
        Rule("w", "w.kernel", weights.transpose),
    ]
    shapes = {"embedding": (50, 8), "kernel": (8, 1), "w.kernel": (8, 16)}
    steps = weights.plan_steps("model", rules, ["unused"], weights.find(tmp_path), shapes)
    assert set(loaded) == {"table", "w"}  # what has no use is freed at once
    held = []
    for step in steps:
        assert step.read().shape == step.shape
        held.append((step.target, set(loaded)))
    assert held == [("kernel", {"table", "w"}), ("w.kernel", {"table"}), ("embedding", set())]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_scale_of_queries_loses_no_bit(dtype):
    """Of a power of two it leaves the dtype; another makes a float32 weight."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(dtype)
    for width, made_dtype in ((64, None), (128, "float32")):
        transform = t5.with_scaled_queries(width**0.5)
        assert transform.dtype == made_dtype
        made = transform.apply(query, key, value)
        assert made.dtype == np.dtype(made_dtype or dtype)
        wanted = query.T.astype(np.float32) * np.float32(width**0.5)
        np.testing.assert_array_equal(made[:, :8].astype(np.float32), wanted)
        np.testing.assert_array_equal(made[:, 8:], np.concatenate([key, value]).T)


def test_one_plus_a_weight_keeps_what_bfloat16_would_lose():
    weight = np.array([2**-9, -0.5], ml_dtypes.bfloat16)
    scale = one_plus.apply(weight)
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(scale, np.array([1 + 2**-9, 0.5], np.float32))
    assert one_plus.dtype == "float32"
