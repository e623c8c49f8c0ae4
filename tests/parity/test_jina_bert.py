"""JinaBERT v2 at published widths to 8,192 tokens, against its formulas in torch, in float32."""

import gc
from typing import Any

import numpy as np
import pytest
from golden import make
from golden.families import FAMILIES, class_of

from jaxembed.outputs import OutputName
from jaxembed.work import Encoding, work_of
from parity.reference import relative

LIMIT = 8192
# The last one fills a row, and the others share one.
LENGTHS = [1, 2, 3, 63, 64, 65, 129, 511, 512, 513, 1500, 2049, LIMIT]

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "small-en": ("jina_bert", {"hidden_size": 512, "num_hidden_layers": 4}),
    "base-en": ("jina_bert", {"hidden_size": 768, "num_hidden_layers": 12}),
    "base-code": ("jina_bert_code", {"hidden_size": 768, "num_hidden_layers": 12}),
    "reranker-v1-turbo-en": ("jina_bert", {"hidden_size": 384, "num_hidden_layers": 6}),
}
SIZES = {
    name: (
        family,
        sizes
        | {
            "vocab_size": 30528,
            "num_attention_heads": 8 if name == "small-en" else 12,
            "intermediate_size": 4 * sizes["hidden_size"],
            "max_position_embeddings": LIMIT,
        },
    )
    for name, (family, sizes) in PUBLISHED.items()
}
OUTPUTS: frozenset[OutputName] = frozenset({"tokens", "dense"})
LOGITS: frozenset[OutputName] = frozenset({"logits"})


def encodings() -> list[Encoding]:
    draw = np.random.default_rng(0)
    return [
        Encoding(draw.integers(4, 30528, n, dtype=np.int32), draw.integers(0, 2, n, dtype=np.int32))
        for n in LENGTHS
    ]


@pytest.mark.parametrize(
    "name",
    [
        "small-en",
        pytest.param("base-en", marks=pytest.mark.slow),
        pytest.param("base-code", marks=pytest.mark.slow),
    ],
)
def test_hidden_states_and_vectors_agree_to_8192_tokens(name, tmp_path, make_embedder, note):
    family, sizes = SIZES[name]
    make.save_tower(FAMILIES[family], tmp_path, **sizes)
    tower = class_of(FAMILIES[family].tower).from_pretrained(tmp_path).eval()
    wanted = [make.hidden_states(tower, one.ids, one.types) for one in encodings()]
    del tower
    gc.collect()
    make.publish(FAMILIES[family], tmp_path)
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    got = embedder.engine.submit(work_of(encodings(), OUTPUTS)).result()
    apart = max(relative(*pair) for pair in zip(got["tokens"], wanted, strict=True))
    far = relative(got["dense"], np.stack([one.mean(axis=0) for one in wanted]))
    embedder.close()
    note(f"hidden states within {apart:.1e}, vectors {far:.1e}")
    assert apart < 1e-4  # float32, sums in another order
    assert far < 1e-5


def test_logits_agree_to_8192_tokens(tmp_path, make_embedder, note):
    family, sizes = SIZES["reranker-v1-turbo-en"]
    head = make.Head(cross_encoder=False)
    make.save(make.Case(family=family, config=sizes, head=head, max_seq_length=LIMIT), tmp_path)
    scorer = make.load_scorer(tmp_path).model.eval()
    wanted = np.stack([make.logits(scorer, one.ids, one.types) for one in encodings()])
    make.publish(FAMILIES[family], tmp_path)
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    got = embedder.engine.submit(work_of(encodings(), LOGITS)).result()["logits"]
    embedder.close()
    apart = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    note(f"logits within {apart:.1e}")
    assert apart < 1e-4  # float32, sums in another order
