"""EmbeddingGemma-300m at its published size, with random weights, against sentence-transformers."""

import gc
from typing import Any

import numpy as np
import pytest
from golden import make
from golden.families import WORDS

from jaxembed.data.work import Encoding, work_from_encodings
from parity.reference import relative, smallest_cosine

# but for the number of layers
PUBLISHED: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 768,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 1152,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "use_bidirectional_attention": True,
}
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
    case = make.Case(
        "mean",
        LATER,
        PUBLISHED | {"num_hidden_layers": layers},
        prompts=PROMPTS,
        family="gemma3",
        max_seq_length=LIMIT,
    )
    make.save(case, tmp_path)
    model = make.load(tmp_path)
    calls: dict[str, Any] = {
        "encode_query": TEXTS,
        "encode_document": TEXTS,
    }
    vectors = {
        name: getattr(model, name)(texts, batch_size=1, show_progress_bar=False)
        for name, texts in calls.items()
    }
    draw = np.random.default_rng(0)
    sequences = [
        draw.integers(0, PUBLISHED["vocab_size"], length, dtype=np.int32) for length in LENGTHS
    ]
    hidden = [make.hidden_states(model[0].auto_model.eval(), ids) for ids in sequences]
    del model
    gc.collect()
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    encodings = [Encoding(ids, None) for ids in sequences]
    got = embedder.model.main.engine.submit(
        work_from_encodings(encodings, frozenset({"tokens"}))
    ).result()["tokens"]
    apart = max(relative(ours, theirs) for ours, theirs in zip(got, hidden, strict=True))
    far = max(
        1 - smallest_cosine(getattr(embedder, name)(texts), vectors[name])
        for name, texts in calls.items()
    )
    embedder.close()
    note(f"hidden states within {apart:.1e}, cosines from 1 - {far:.1e}")
    assert apart < 1e-4  # float32, sums in another order; 8.4e-6 of 24 layers
    assert far < 1e-10
