"""Every pooling of the registry against a numpy one-liner."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
from representatives import each

from jaxembed.data.spec import Pooling
from jaxembed.models.heads import POOLINGS, slot_members
from jaxembed.models.tokens import PackedTokens

DIM, SLOTS = 6, 5

each_pooling = pytest.mark.parametrize("name", each(POOLINGS, "mean", "lasttoken"))

REFERENCES = {  # of the pooled tokens' hidden states x and their indices in the sequence, from 0
    "cls": lambda x, index: x[0],
    "max": lambda x, index: x.max(axis=0),
    "mean": lambda x, index: x.mean(axis=0),
    "mean_sqrt_len": lambda x, index: x.sum(axis=0) / np.sqrt(len(x)),
    "weightedmean": lambda x, index: (x * (index + 1)[:, None]).sum(axis=0) / (index + 1).sum(),
    "lasttoken": lambda x, index: x[-1],
}

ROWS = [  # lengths of the sequences in each row, and how many of their first tokens are a prompt
    ([12], [0]),
    ([3, 4, 5], [0, 0, 0]),
    ([1, 1, 1, 1, 8], [0, 0, 0, 0, 0]),
    ([5, 6], [2, 5]),
    ([2], [1]),
]


def packed(rows=ROWS, length=12, slots=SLOTS) -> PackedTokens:
    planes = np.zeros((PackedTokens.PLANES, len(rows), length), np.int32)
    for row, (lengths, prompts) in enumerate(rows):
        start = 0
        for slot, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            planes[1, row, start : start + n] = np.arange(n)
            planes[2, row, start : start + n] = slot + 1
            planes[4, row, [slot, slots + slot]] = start + prompt, start + n
            start += n
    return PackedTokens.unstack(jnp.asarray(planes), slots)


def hidden_states(tokens: PackedTokens) -> np.ndarray:
    shape = (*tokens.ids.shape, DIM)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_every_pooling_of_the_spec_is_there_and_tested():
    assert set(POOLINGS) == set(get_args(Pooling)) == set(REFERENCES)


def assert_pooled_by_definition(name, tokens: PackedTokens) -> None:
    hidden, rows = hidden_states(tokens), len(tokens.ids)
    pooled = np.asarray(POOLINGS[name](jnp.asarray(hidden), tokens))
    assert pooled.shape == (rows, SLOTS, DIM)
    bounds, positions = np.asarray(tokens.bounds), np.asarray(tokens.positions)
    for row in range(rows):
        for slot in range(SLOTS):
            at = np.arange(*bounds[row, slot])
            if len(at):
                x = hidden[row, at].astype(np.float64)
                wanted = REFERENCES[name](x, positions[row, at])
            else:
                wanted = np.zeros(DIM)
            # float32 sums of at most 12 terms
            np.testing.assert_allclose(pooled[row, slot], wanted, rtol=1e-5, atol=1e-6)


@each_pooling
def test_a_pooling_is_what_its_definition_says(name):
    assert_pooled_by_definition(name, packed())


@each_pooling
def test_nothing_but_its_own_tokens_reaches_a_pooled_vector(name):
    """Neither NaN in padding, nor huge neighbours, nor the prompt."""
    tokens = packed()
    hidden = hidden_states(tokens)
    own, segments = np.asarray(slot_members(tokens)), np.asarray(tokens.segments)
    assert (segments[3] > 0).sum() - own[3].any(axis=0).sum() == 7  # of prompts
    clean = np.asarray(POOLINGS[name](jnp.asarray(hidden), tokens))
    for slot in range(SLOTS):
        poisoned = np.where(own[:, slot, :, None], hidden, np.float32(1e30))
        poisoned[segments == 0] = np.nan
        got = np.asarray(POOLINGS[name](jnp.asarray(poisoned), tokens))
        np.testing.assert_allclose(got[:, slot], clean[:, slot], rtol=1e-6)


@each_pooling
def test_spans_that_overlap_are_pooled_one_by_one(name):
    planes = np.zeros((PackedTokens.PLANES, 1, 12), np.int32)
    planes[1, 0, :10], planes[2, 0, :10] = np.arange(10), 1
    spans = [(0, 10), (2, 6), (4, 9), (4, 5)]
    planes[4, 0, :4], planes[4, 0, SLOTS : SLOTS + 4] = np.array(spans).T
    assert_pooled_by_definition(name, PackedTokens.unstack(jnp.asarray(planes), SLOTS))
