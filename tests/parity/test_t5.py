"""T5 far beyond the distance from which biases stay the same, against transformers in float64."""

import numpy as np
import transformers
from golden import make
from golden.families import FAMILIES

from jaxembed.data.work import Encoding, work_from_encodings
from parity.reference import relative

LIMIT = 4096
LENGTHS = [1, 127, 128, 129, 700, LIMIT]  # 128 is the published distance


def test_long_texts_agree(make_embedder, tmp_path, note):
    changes = {"max_position_embeddings": LIMIT, "relative_attention_max_distance": 128}
    make.save_tower(FAMILIES["t5"], tmp_path, **changes)
    backbone = transformers.T5EncoderModel.from_pretrained(tmp_path).double().eval()
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    draw = np.random.default_rng(0)
    words = backbone.config.vocab_size
    encodings = [Encoding(draw.integers(4, words, n, dtype=np.int32), None) for n in LENGTHS]
    work = work_from_encodings(encodings, frozenset({"tokens"}))
    got = embedder.model.main.engine.submit(work).result()["tokens"]
    pairs = zip(got, encodings, strict=True)
    apart = max(relative(x, make.hidden_states(backbone, one.ids)) for x, one in pairs)
    note(f"hidden states within {apart:.1e}")
    # float32: 4.3e-6 with AVX512, 1.4e-5 with AVX2, whose sums have fewer parts; transformers' own
    # is 2e-5 from its float64 at 8,192 tokens
    assert apart < 3e-5
