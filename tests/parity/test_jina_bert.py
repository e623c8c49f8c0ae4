"""JinaBERT v2 at published widths to 8,192 tokens, against its formulas in torch, in float32."""

import gc

import numpy as np
import pytest
from golden import make
from golden.families import FAMILIES, class_of, sized

from parity.reference import assert_within, drawn, relative, run

LIMIT = 8192
SHORT = [1, 2, 3, 63, 64, 65, 129, 511, 512, 513]
VOCABULARY = 30528
EMBEDDER = (512, 4, 8, 2048)  # jina-embeddings-v2-small-en
RERANKER = (384, 6, 12, 1536)  # jina-reranker-v1-turbo-en


@pytest.mark.parametrize("limit", [1152, pytest.param(LIMIT, marks=pytest.mark.slow)])
def test_hidden_states_and_vectors_agree_to_the_limit(limit, tmp_path, make_embedder, note):
    family, inputs = FAMILIES["jina_bert"], drawn(VOCABULARY, [*SHORT, limit], kinds=2)
    make.save_tower(family, tmp_path, **sized(*EMBEDDER, limit, vocab_size=VOCABULARY))
    backbone = class_of(family.backbone).from_pretrained(tmp_path).eval()
    wanted = [make.hidden_states(backbone, one.ids, one.types) for one in inputs]
    del backbone
    gc.collect()
    make.publish(family, tmp_path)
    embedder = make_embedder(tmp_path, [(1, limit)])
    got = run(embedder, inputs, "tokens", "dense")
    apart = max(relative(*pair) for pair in zip(got["tokens"], wanted, strict=True))
    far = relative(got["dense"], np.stack([one.mean(axis=0) for one in wanted]))
    embedder.close()
    assert_within(apart, note)
    assert_within(far, note, "vectors")


def test_logits_of_the_rerankers_width_agree(tmp_path, make_embedder, note):
    head, inputs = make.Head(cross_encoder=False), drawn(VOCABULARY, SHORT, kinds=2)
    limit = 1152  # of 8,192, for time
    config = sized(*RERANKER, limit, vocab_size=VOCABULARY)
    case = make.Case(family="jina_bert", config=config, head=head, max_seq_length=limit)
    make.save(case, tmp_path)
    scorer = make.load_scorer(tmp_path).model.eval()
    wanted = np.stack([make.logits(scorer, one.ids, one.types) for one in inputs])
    make.publish(FAMILIES[case.family], tmp_path)
    embedder = make_embedder(tmp_path, [(1, limit)])
    got = run(embedder, inputs, "logits")["logits"]
    embedder.close()
    assert_within(float(np.abs(got - wanted).max() / np.abs(wanted).max()), note, "logits")
