"""Sparse outputs: the head over the vocabulary, and its way to the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_matrix import as_dense
from test_pooling import packed

from jaxembed.data.spec import Vocabulary
from jaxembed.data.work import SparseRows, to_sparse_rows
from jaxembed.engine import transfer
from jaxembed.engine.transfer import fetch_rows, gather_nonzero
from jaxembed.models.heads import BLOCK_TOKENS, VocabularyHead, padded_terms

TERMS, FEATURES = 37, 8


def mostly_zero(rows: int, width: int, share: float = 0.1, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((rows, width), np.float32)
    return np.where(draw.random((rows, width)) < share, values, np.float32(0))


def test_sparse_rows_hold_the_matrix_exactly():
    with_empty_rows = mostly_zero(5, 9)
    with_empty_rows[[0, 2, 4]] = 0
    for matrix in (
        with_empty_rows,
        *(mostly_zero(rows, 11, share) for rows in (0, 1, 7) for share in (0.0, 0.1, 1.0)),
    ):
        np.testing.assert_array_equal(as_dense(to_sparse_rows(matrix)), matrix)


def test_csr_has_the_rows_one_after_the_other():
    matrix = mostly_zero(6, 9, 0.3)
    values, indices, offsets = to_sparse_rows(matrix).csr
    assert offsets.tolist() == [0, *np.cumsum((matrix != 0).sum(axis=1)).tolist()]
    np.testing.assert_array_equal(matrix[matrix != 0], values)
    np.testing.assert_array_equal(np.nonzero(matrix)[1], indices)
    assert [len(part) for part in SparseRows(3, [], []).csr] == [0, 0, 1]


@pytest.mark.parametrize(("shards", "room"), [(1, 8), (3, 1), (3, 1000)])
def test_a_device_gives_all_that_is_not_zero(monkeypatch, shards, room):
    """`room` of 1 is less than there is: then everything is copied."""
    monkeypatch.setattr(transfer, "VALUES_A_TOKEN", room)
    dense = mostly_zero(6 * 4, 50, 0.05).reshape(6, 4, 50)
    parts = [jax.jit(lambda x: gather_nonzero(x, 3))(part) for part in np.split(dense, shards)]
    whole = transfer.Gathered(*(jnp.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    np.testing.assert_array_equal(as_dense(fetch_rows(whole)), dense.reshape(24, 50))


def by_formula(head: Vocabulary, hidden: np.ndarray, table: np.ndarray, bias: np.ndarray):
    """The weights of one sequence, from the formulas, in float64."""
    weights = np.log1p(np.maximum(hidden.astype(np.float64) @ table + bias, 0))
    if head.activation == "log1p_relu":
        weights = np.log1p(weights)
    return weights.max(axis=0) if head.over_tokens == "max" else weights.sum(axis=0)


@pytest.mark.parametrize(("over_tokens", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_the_head_gives_the_weights_of_the_formula(over_tokens, activation):
    """Also where a slot spans two blocks of tokens, and padding holds NaN."""
    length = BLOCK_TOKENS - 20
    head = Vocabulary(TERMS, FEATURES, over_tokens=over_tokens, activation=activation)
    layer = VocabularyHead(head)
    draw = np.random.default_rng(1)
    table = draw.standard_normal((FEATURES, padded_terms(TERMS)), np.float32) * 0.3
    bias = draw.standard_normal(padded_terms(TERMS), np.float32) - 1
    table[:, TERMS:] = bias[TERMS:] = 0
    layer.terms.kernel[...], layer.bias[...] = jnp.asarray(table), jnp.asarray(bias)
    rows = [[3, 200, 1], [length], [], [5, 6]]
    tokens = packed([(lengths, [0] * len(lengths)) for lengths in rows], length, 4)
    hidden = draw.standard_normal((4, length, FEATURES), np.float32)
    hidden[np.asarray(tokens.segments) == 0] = np.nan
    got = np.asarray(jax.jit(layer.__call__)(hidden, tokens))
    assert got.shape == (4, 4, TERMS)
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths, dtype=int)
        for slot in range(4):
            if slot >= len(lengths):
                assert not got[row, slot].any()
                continue
            own = hidden[row, ends[slot] - lengths[slot] : ends[slot]]
            wanted = by_formula(head, own, table[:, :TERMS], bias[:TERMS])
            np.testing.assert_allclose(got[row, slot], wanted, rtol=1e-5, atol=1e-6)


def test_logits_of_all_tokens_are_never_in_memory():
    head = VocabularyHead(Vocabulary(1000, FEATURES))
    tokens = packed([([64], [0])] * 64, 64, 4)
    hidden = jnp.zeros((64, 64, FEATURES))
    memory = jax.jit(head.__call__).lower(hidden, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * 4 * padded_terms(1000) * (BLOCK_TOKENS + 64 * 4)
