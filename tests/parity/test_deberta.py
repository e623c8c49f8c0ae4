"""DeBERTa beyond what test_towers has: buckets, long sequences, rows longer than any sequence."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from golden import make
from golden.families import FAMILIES, sized
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from converters.families import deberta
from jaxembed.models.deberta import DistanceBuckets
from parity.reference import assert_within, drawn, hidden_apart

WIDE = sized(128, 2, 2, 256, position_buckets=256)
# of the config, the row, and the sequences in it
LONG = {
    "distances beyond the last bucket": (
        WIDE | {"max_position_embeddings": 1500, "max_relative_positions": 512},
        1536,
        [1500, 1300, 700, 513, 512, 511, 2],
    ),
    "a row longer than any sequence": (
        WIDE | {"max_position_embeddings": 300},
        2048,
        [300, 299, 257, 256, 255, 129, 128, 127, 64, 1, 300, 300, 17],
    ),
    "a row that is not whole tiles": (
        FAMILIES["deberta"].odd | {"max_position_embeddings": 300, "max_relative_positions": 100},
        333,
        [300, 131, 130, 2],
    ),
}


@pytest.mark.parametrize("buckets", [2, 3, 8, 10, 31, 32, 64, 100, 128, 200, 256, 320, 512])
@pytest.mark.parametrize("furthest", [300, 510, 511, 512, 514, 768, 1024, 1680, 2048, 4096, 8192])
def test_places_are_those_of_transformers(buckets, furthest):
    largest = 2 * furthest
    every = np.arange(-largest, largest + 1)
    wanted = make_log_bucket_position(torch.from_numpy(every), buckets, furthest).to(torch.long)
    wanted = torch.clamp(wanted + buckets, 0, 2 * buckets - 1).numpy()
    np.testing.assert_array_equal(DistanceBuckets(buckets, furthest, largest).places(every), wanted)


@pytest.mark.parametrize(("changes", "length", "lengths"), LONG.values(), ids=LONG)
def test_hidden_states_agree_in_long_rows(changes, length, lengths, tmp_path, make_embedder, note):
    family = FAMILIES["deberta"]
    make.save_tower(family, tmp_path, **changes)
    backbone = transformers.DebertaV2Model.from_pretrained(tmp_path, dtype=torch.float32).eval()
    embedder = make_embedder(tmp_path, [(1, length)])
    kinds = backbone.config.type_vocab_size or 1
    encodings = drawn(backbone.config.vocab_size, lengths, kinds)
    assert_within(hidden_apart(embedder, backbone, encodings), note)


@pytest.mark.parametrize("head", ["deberta_cross_encoder", "deberta_classifier"])
def test_a_config_is_read_as_transformers_4_writes_it(head, tmp_path):
    """Terms in one string; torch_dtype; without what transformers 5 adds."""
    make.save(make.CASES[head], tmp_path)
    path = Path(tmp_path) / "config.json"
    new = json.loads(path.read_text())
    terms = new["pos_att_type"]
    assert isinstance(terms, list)
    old = new | {"pos_att_type": "|".join(terms), "torch_dtype": new["dtype"]}
    for key in ("dtype", "legacy", "pooler_hidden_size", "tie_word_embeddings"):
        old.pop(key, None)
    assert deberta.config(old) == deberta.config(new)
    assert transformers.DebertaV2Config(**old).pos_att_type == terms
