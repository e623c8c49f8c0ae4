"""T5 far beyond the distance from which biases stay the same, against transformers in float64."""

import transformers
from golden import make
from golden.families import FAMILIES

from parity.reference import assert_within, drawn, hidden_apart

LIMIT = 4096
LENGTHS = [1, 127, 128, 129, 700, LIMIT]  # 128 is the published distance


def test_long_texts_agree(make_embedder, tmp_path, note):
    changes = {"max_position_embeddings": LIMIT, "relative_attention_max_distance": 128}
    make.save_tower(FAMILIES["t5"], tmp_path, **changes)
    backbone = transformers.T5EncoderModel.from_pretrained(tmp_path).double().eval()
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    apart = hidden_apart(embedder, backbone, drawn(backbone.config.vocab_size, LENGTHS))
    # float32: 4.3e-6 with AVX512, 1.4e-5 with AVX2, whose sums have fewer parts; transformers' own
    # is 2e-5 from its float64 at 8,192 tokens
    assert_within(apart, note, tolerance=3e-5)
