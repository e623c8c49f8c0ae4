"""Hidden states of random models against transformers, tiny to full size, in float32."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import transformers
from golden import make
from golden.families import FAMILIES, WORDS, class_of, sized

from jaxembed import Embedder
from jaxembed.data.work import Encoding
from parity.reference import assert_within, drawn, hidden_apart, same_ids

GEMMA = {"head_dim": 256, "sliding_window": 128, "query_pre_attn_scalar": 256}
UNSCALED = {"rope_type": "default", "rope_theta": 1e6}
UNSCALED_4 = UNSCALED | {"rope_theta": 1e4}
UNMASKED = {"is_causal": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN |= {"original_max_position_embeddings": 32, "max_position_embeddings": 512}
YARN |= {"llama_4_scaling_beta": 0.1}


def base(words: int, layers: int = 12, positions: int = 512, **others: Any) -> dict[str, Any]:
    return sized(768, layers, 12, 3072, positions, vocab_size=words, **others)


def decoder(*sizes: int, keys: int, words: int = 32000, **others: Any) -> dict[str, Any]:
    return sized(*sizes, 512, num_key_value_heads=keys, vocab_size=words, **others)


KINDS = FAMILIES | {"camembert": replace(FAMILIES["xlm_roberta"], backbone="CamembertModel")}

# Of each family a tiny one with room for 64 tokens, an odd one, and what real ones look like:
# changes to the family's config. Large tables of embeddings are made for a few of them alone.
SIZES: dict[tuple[str, str], dict[str, Any]] = {
    **{
        (name, "tiny"): {"hidden_size": 32, "max_position_embeddings": 64 + family.spare_positions}
        for name, family in KINDS.items()
    },
    **{(name, "odd"): family.odd for name, family in FAMILIES.items()},
    ("bert", "384x6"): sized(384, 6, 12, 1536, 512, vocab_size=30522),
    ("bert", "768x12"): base(30522),
    ("electra", "256x12"): sized(256, 12, 4, 1024, 512, vocab_size=30522, embedding_size=128),
    ("albert", "768x6"): base(30000, layers=6, embedding_size=128),
    ("xlm_roberta", "768x12"): base(250002, positions=514),
    ("xlm_roberta", "1024x2"): sized(1024, 2, 16, 4096, 514, vocab_size=50265),
    ("roberta", "768x2"): base(50265, layers=2, positions=514),
    ("mpnet", "768x12"): base(30527, positions=514),
    ("nomic_bert", "768x12"): base(30528),
    ("nomic_moe", "768x2"): base(50265, layers=2),
    ("gte", "768x12"): base(250048),
    ("jina_bert", "512x4"): sized(512, 4, 8, 2048, 512, vocab_size=30528),
    ("jina_bert", "768x12"): base(30528),
    ("jina_bert_code", "768x12"): base(61056),
    ("jina_v3", "1024x2"): sized(1024, 2, 16, 4096, 512, vocab_size=50265),
    ("distilbert", "768x6"): base(30522, layers=6, hidden_dim=3072),
    ("deberta", "768x12"): base(128100, position_buckets=256),
    ("modernbert", "768x22"): sized(768, 22, 12, 1152, 512, vocab_size=50368, local_attention=128),
    ("qwen3", "1024x2"): decoder(
        *(1024, 2, 16, 3072), keys=8, words=151669, head_dim=128, rope_parameters=UNSCALED
    ),
    ("qwen2", "1536x2"): decoder(1536, 2, 12, 8960, keys=2, **UNMASKED, rope_parameters=UNSCALED),
    ("gemma", "2048x2"): decoder(
        *(2048, 2, 8, 16384), keys=1, head_dim=256, words=32000, rope_parameters=UNSCALED_4
    ),
    # but for the number of tokens and the window, as bge-multilingual-gemma2
    ("gemma2", "3584x2"): decoder(*(3584, 2, 16, 14336), keys=8, attn_logit_softcapping=50.0)
    | GEMMA,
    # with a window far shorter than the longest sequence, of which the published 512 is not
    ("gemma3", "768x7"): decoder(768, 7, 3, 1152, keys=1, sliding_window_pattern=6) | GEMMA,
    ("llama", "2048x2"): decoder(2048, 2, 32, 8192, keys=8, **UNMASKED, rope_parameters=LLAMA3),
    ("mistral", "4096x1"): decoder(
        *(4096, 1, 32, 14336), keys=8, head_dim=128, sliding_window=128, rope_parameters=UNSCALED_4
    ),
    ("ministral3", "3072x1"): decoder(
        *(3072, 1, 32, 9216), keys=8, head_dim=128, is_causal=False, rope_parameters=YARN
    ),
    ("eurobert", "768x12"): base(
        128256, num_key_value_heads=12, rope_parameters=UNSCALED | {"rope_theta": 250_000.0}
    ),
    # with distances from 128 on, which share a bucket
    ("t5", "768x12"): base(32128, d_kv=64, d_ff=3072, relative_attention_max_distance=128),
}
# Towers of which the first layers are a size too, the tower differing from it by its depth alone.
DEEP = ("mpnet", "nomic_bert", "gte", "jina_bert_code", "deberta", "eurobert", "t5")
for name in DEEP:
    SIZES[name, "768x2"] = SIZES[name, "768x12"] | {"num_hidden_layers": 2}

LENGTHS = [1, 2, 3, 5, 17, 33, 64, 100, 129, 255, 257, 511]


@dataclass(frozen=True)
class Towers:
    torch: Any
    tokenizer: Any
    embedder: Embedder

    @property
    def limit(self) -> int:
        return self.embedder.max_input_tokens

    def assert_agree(self, encodings: list[Encoding], note) -> None:
        """4.8e-6 was the most."""
        assert_within(hidden_apart(self.embedder, self.torch, encodings), note)


def ragged(config: Any, limit: int) -> list[Encoding]:
    """Random ids and types of every length up to 64, or of many up to a larger limit."""
    lengths = range(1, limit) if limit <= 64 else [n for n in LENGTHS if n < limit]
    kinds = getattr(config, "type_vocab_size", 1) or 1
    return drawn(config.vocab_size, [*lengths, limit], kinds)


# Each takes about a minute or more, and differs from a smaller one of its family by size alone.
SLOW = {
    ("bert", "768x12"),
    ("xlm_roberta", "768x12"),
    ("gemma2", "3584x2"),
    ("jina_bert", "768x12"),
    ("mistral", "4096x1"),
    ("ministral3", "3072x1"),
    ("modernbert", "768x22"),  # whose first four layers test_modernbert has
    *((name, "768x12") for name in DEEP),
}
PARAMS = [
    pytest.param(size, id="-".join(size), marks=[pytest.mark.slow] if size in SLOW else [])
    for size in SIZES
]


@pytest.fixture(name="backbones", scope="module", params=PARAMS)
def _towers(request, tmp_path_factory, make_embedder) -> Iterator[Towers]:
    name, _ = request.param
    family, changes = KINDS[name], SIZES[request.param]
    folder: Path = tmp_path_factory.mktemp(name)
    make.save_tower(family, folder, **changes)
    kind = class_of(family.backbone)
    backbone = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    make.publish(family, folder)
    length = min(family.positions(changes), 512)
    embedder = make_embedder(folder, [(2, length)])
    yield Towers(backbone, tokenizer, embedder)
    embedder.close()
    rmtree(folder)  # of all sizes together the files would be tens of gigabytes


def test_hidden_states_agree_at_every_length_packed_several_to_a_row(backbones, note):
    backbones.assert_agree(ragged(backbones.torch.config, backbones.limit), note)


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_over_the_limit_are_cut_as_transformers_cuts_them(backbones, side, note):
    special = " ".join(backbones.tokenizer.all_special_tokens)
    texts = [" ".join(WORDS * 60), "the dog sat", f"the {special} dog {special} sat"]
    backbones.tokenizer.truncation_side = side
    processor = backbones.embedder.model.main.processor
    encodings = same_ids(processor, backbones.tokenizer, texts, backbones.limit, note)
    assert encodings[0].length == backbones.limit
    backbones.assert_agree(encodings, note)


def test_every_family_is_compared_as_its_published_models_are():
    real = {name for name, size in SIZES if size not in ("tiny", "odd")}
    assert real == set(FAMILIES)
