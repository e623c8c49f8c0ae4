"""EmbeddingGemma-300m at its published size, with random weights, against sentence-transformers."""

import gc
from typing import Any

import pytest
from golden import make
from golden.families import WORDS, sized

from parity.reference import assert_within, drawn, relative, run, smallest_cosine

VOCABULARY = 262144


def published(layers: int) -> dict[str, Any]:
    heads = {"num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
    window = {"sliding_window": 512, "sliding_window_pattern": 6}
    sizes = sized(768, layers, 3, 1152, 2048, vocab_size=VOCABULARY, **heads, **window)
    return sizes | {"use_bidirectional_attention": True}


LATER = (
    make.Dense(3072, "Identity", bias=False),
    make.Dense(768, "Identity", bias=False),
    make.NORMALIZE,
)
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
LIMIT = 1024  # of 2048, for time
LENGTHS = [1, 2, 257, 258, 600, LIMIT]  # the window reaches 256 tokens to each side
TEXTS = [*make.TEXTS[:3], " ".join(WORDS * 20)]


@pytest.mark.parametrize("layers", [7, pytest.param(24, marks=pytest.mark.slow)])
def test_hidden_states_and_vectors_agree_beyond_the_window(layers, tmp_path, make_embedder, note):
    served = {"prompts": PROMPTS, "family": "gemma3", "max_seq_length": LIMIT}
    make.save(make.Case("mean", LATER, published(layers), **served), tmp_path)
    model = make.load(tmp_path)
    vectors = {
        name: getattr(model, name)(TEXTS, batch_size=1, show_progress_bar=False)
        for name in ("encode_query", "encode_document")
    }
    sequences = drawn(VOCABULARY, LENGTHS)
    hidden = [make.hidden_states(model[0].auto_model.eval(), one.ids) for one in sequences]
    del model
    gc.collect()
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    got = run(embedder, sequences, "tokens")["tokens"]
    apart = max(relative(ours, theirs) for ours, theirs in zip(got, hidden, strict=True))
    far = max(
        1 - smallest_cosine(getattr(embedder, name)(TEXTS), wanted)
        for name, wanted in vectors.items()
    )
    embedder.close()
    note(f"cosines from 1 - {far:.1e}")
    assert_within(apart, note, tolerance=1e-4)  # 8.4e-6 of 24 layers
    assert far < 1e-10
