"""JinaBERT v2 at published widths to 8,192 tokens, against its formulas in torch, in float32."""

import gc

import numpy as np
import pytest
from golden import make
from golden.families import FAMILIES, class_of

from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_from_encodings
from parity.reference import relative

LIMIT = 8192
SHORT = [1, 2, 3, 63, 64, 65, 129, 511, 512, 513]
SIZES = {"vocab_size": 30528, "max_position_embeddings": LIMIT}
# jina-embeddings-v2-small-en
EMBEDDER = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
# jina-reranker-v1-turbo-en
RERANKER = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
OUTPUTS: frozenset[OutputName] = frozenset({"tokens", "dense"})
LOGITS: frozenset[OutputName] = frozenset({"logits"})


def encodings(lengths: list[int]) -> list[Encoding]:
    draw = np.random.default_rng(0)
    return [
        Encoding(draw.integers(4, 30528, n, dtype=np.int32), draw.integers(0, 2, n, dtype=np.int32))
        for n in lengths
    ]


@pytest.mark.parametrize("limit", [1152, pytest.param(LIMIT, marks=pytest.mark.slow)])
def test_hidden_states_and_vectors_agree_to_the_limit(limit, tmp_path, make_embedder, note):
    family, inputs = FAMILIES["jina_bert"], encodings([*SHORT, limit])
    make.save_tower(family, tmp_path, **SIZES | EMBEDDER | {"max_position_embeddings": limit})
    backbone = class_of(family.backbone).from_pretrained(tmp_path).eval()
    wanted = [make.hidden_states(backbone, one.ids, one.types) for one in inputs]
    del backbone
    gc.collect()
    make.publish(family, tmp_path)
    embedder = make_embedder(tmp_path, [(1, limit)])
    got = embedder.model.main.engine.submit(work_from_encodings(inputs, OUTPUTS)).result()
    apart = max(relative(*pair) for pair in zip(got["tokens"], wanted, strict=True))
    far = relative(got["dense"], np.stack([one.mean(axis=0) for one in wanted]))
    embedder.close()
    note(f"hidden states within {apart:.1e}, vectors {far:.1e}")
    assert apart < 1e-5  # float32, sums in another order
    assert far < 1e-5


def test_logits_of_the_rerankers_width_agree(tmp_path, make_embedder, note):
    head, inputs = make.Head(cross_encoder=False), encodings(SHORT)
    limit = 1152  # of 8,192, for time
    config = SIZES | RERANKER | {"max_position_embeddings": limit}
    case = make.Case(family="jina_bert", config=config, head=head, max_seq_length=limit)
    make.save(case, tmp_path)
    scorer = make.load_scorer(tmp_path).model.eval()
    wanted = np.stack([make.logits(scorer, one.ids, one.types) for one in inputs])
    make.publish(FAMILIES[case.family], tmp_path)
    embedder = make_embedder(tmp_path, [(1, limit)])
    got = embedder.model.main.engine.submit(work_from_encodings(inputs, LOGITS)).result()["logits"]
    embedder.close()
    apart = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    note(f"logits within {apart:.1e}")
    assert apart < 1e-5  # float32, sums in another order
