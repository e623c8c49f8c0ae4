"""Hidden states of random models against transformers, tiny to full size, in float32."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from golden import make
from golden.families import FAMILIES, WORDS, class_of

from jaxembed import Embedder
from jaxembed.data.inputs import Text
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.preprocessing.text import TokenizationOptions
from parity.reference import relative

BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
QWEN = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

KINDS = FAMILIES | {"camembert": replace(FAMILIES["xlm_roberta"], backbone="CamembertModel")}

# Of each family a tiny one with room for 64 tokens, an odd one, and what real ones look like:
# changes to the family's config. Large tables of embeddings are made for a few of them alone.
SIZES: dict[tuple[str, str], dict[str, Any]] = {
    **{
        (name, "tiny"): {
            "hidden_size": 32,
            "max_position_embeddings": 64 + family.spare_positions,
        }
        for name, family in KINDS.items()
    },
    **{(name, "odd"): family.odd for name, family in FAMILIES.items()},
    ("bert", "384x6"): {
        "vocab_size": 30522,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "max_position_embeddings": 512,
    },
    ("bert", "768x12"): BASE | {"vocab_size": 30522, "max_position_embeddings": 512},
    ("electra", "256x12"): {
        "vocab_size": 30522,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": 512,
    },
    ("albert", "768x6"): BASE
    | {
        "num_hidden_layers": 6,
        "vocab_size": 30000,
        "embedding_size": 128,
        "max_position_embeddings": 512,
    },
    ("xlm_roberta", "768x12"): BASE | {"vocab_size": 250002, "max_position_embeddings": 514},
    ("xlm_roberta", "1024x2"): LARGE | {"vocab_size": 50265, "max_position_embeddings": 514},
    ("roberta", "768x2"): BASE
    | {"num_hidden_layers": 2, "vocab_size": 50265, "max_position_embeddings": 514},
    ("mpnet", "768x12"): BASE | {"vocab_size": 30527, "max_position_embeddings": 514},
    ("nomic_bert", "768x12"): BASE | {"vocab_size": 30528, "max_position_embeddings": 512},
    ("gte", "768x12"): BASE | {"vocab_size": 250048, "max_position_embeddings": 512},
    ("jina_bert", "512x4"): {
        "vocab_size": 30528,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
    },
    ("jina_bert", "768x12"): BASE | {"vocab_size": 30528, "max_position_embeddings": 512},
    ("jina_bert_code", "768x12"): BASE | {"vocab_size": 61056, "max_position_embeddings": 512},
    ("jina_v3", "1024x2"): LARGE | {"vocab_size": 50265, "max_position_embeddings": 512},
    ("distilbert", "768x6"): {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "hidden_dim": 3072,
        "max_position_embeddings": 512,
    },
    ("deberta", "768x12"): BASE
    | {"vocab_size": 128100, "max_position_embeddings": 512, "position_buckets": 256},
    ("modernbert", "768x22"): BASE
    | {
        "num_hidden_layers": 22,
        "intermediate_size": 1152,
        "vocab_size": 50368,
        "max_position_embeddings": 512,
        "local_attention": 128,
    },
    ("qwen3", "1024x2"): QWEN
    | {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151669,
    },
    ("qwen2", "1536x2"): QWEN
    | {
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 32000,
        "is_causal": False,
    },
    # but for the number of tokens and the window, as bge-multilingual-gemma2
    ("gemma2", "3584x2"): {
        "vocab_size": 32000,
        "hidden_size": 3584,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "intermediate_size": 14336,
        "max_position_embeddings": 512,
        "sliding_window": 128,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
    },
    # with a window far shorter than the longest sequence, of which the published 512 is not
    ("gemma3", "768x7"): {
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_hidden_layers": 7,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 1152,
        "max_position_embeddings": 512,
        "sliding_window": 128,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    ("llama", "2048x2"): {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "is_causal": False,
    },
    ("mistral", "4096x1"): {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 512,
        "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    ("ministral3", "3072x1"): {
        "vocab_size": 32000,
        "hidden_size": 3072,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9216,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "is_causal": False,
    },
    ("eurobert", "768x12"): BASE
    | {
        "vocab_size": 128256,
        "num_key_value_heads": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
    },
    # with distances from 128 on, which share a bucket
    ("t5", "768x12"): {
        "vocab_size": 32128,
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "d_kv": 64,
        "d_ff": 3072,
        "max_position_embeddings": 512,
        "relative_attention_max_distance": 128,
    },
}
# Towers of which the first layers are a size too, the tower differing from it by its depth alone.
DEEP = {
    ("mpnet", "768x12"): 2,
    ("nomic_bert", "768x12"): 2,
    ("gte", "768x12"): 2,
    ("jina_bert_code", "768x12"): 2,
    ("deberta", "768x12"): 2,
    ("eurobert", "768x12"): 2,
    ("t5", "768x12"): 2,
}
for (name, size), layers in DEEP.items():
    depth = "num_layers" if name == "t5" else "num_hidden_layers"
    SIZES[name, f"768x{layers}"] = SIZES[name, size] | {depth: layers}

LENGTHS = [1, 2, 3, 5, 17, 33, 64, 100, 129, 255, 257, 511]
TOLERANCE = 1e-5  # float32, sums in another order; 4.8e-6 was the most


@dataclass(frozen=True)
class Towers:
    torch: Any
    tokenizer: Any
    embedder: Embedder

    @property
    def limit(self) -> int:
        return self.embedder.max_input_tokens

    def hidden(self, encodings: list[Encoding]) -> list[np.ndarray]:
        work = work_from_encodings(encodings, frozenset({"tokens"}))
        return list(self.embedder.model.main.engine.submit(work).result()["tokens"])

    def apart(self, encodings: list[Encoding]) -> float:
        """The largest relative distance of any token's hidden state from transformers'."""
        pairs = zip(self.hidden(encodings), encodings, strict=True)
        return max(
            relative(got, make.hidden_states(self.torch, one.ids, one.types)) for got, one in pairs
        )


def ragged(config: Any, limit: int) -> list[Encoding]:
    """Random ids and types of every length up to 64, or of many up to a larger limit."""
    draw = np.random.default_rng(0)
    lengths = range(1, limit) if limit <= 64 else [n for n in LENGTHS if n < limit]
    kinds = getattr(config, "type_vocab_size", 1) or 1
    return [
        Encoding(
            draw.integers(0, config.vocab_size, length, dtype=np.int32),
            draw.integers(0, kinds, length, dtype=np.int32),
        )
        for length in [*lengths, limit]
    ]


# Each takes about a minute or more, and differs from a smaller one of its family by size alone.
SLOW = {
    ("bert", "768x12"),
    ("xlm_roberta", "768x12"),
    ("gemma2", "3584x2"),
    ("jina_bert", "768x12"),
    ("mistral", "4096x1"),
    ("ministral3", "3072x1"),
    ("modernbert", "768x22"),  # whose first four layers test_modernbert has
    *DEEP,
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
    apart = backbones.apart(ragged(backbones.torch.config, backbones.limit))
    note(f"hidden states within {apart:.1e}")
    assert apart < TOLERANCE


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_over_the_limit_are_cut_as_transformers_cuts_them(backbones, side, note):
    special = " ".join(backbones.tokenizer.all_special_tokens)
    texts = [" ".join(WORDS * 60), "the dog sat", f"the {special} dog {special} sat"]
    tokenization = TokenizationOptions(prompt="", truncate=True, side=side)
    encodings = backbones.embedder.model.main.processor.encode(
        [Text(text) for text in texts], tokenization
    ).work.encodings
    backbones.tokenizer.truncation_side = side
    wanted = backbones.tokenizer(texts, truncation=True, max_length=backbones.limit)["input_ids"]
    assert [one.ids.tolist() for one in encodings] == wanted
    assert encodings[0].length == backbones.limit
    apart = backbones.apart(encodings)
    note(f"hidden states within {apart:.1e}")
    assert apart < TOLERANCE


def test_every_family_is_compared_as_its_published_models_are():
    real = {name for name, size in SIZES if size not in ("tiny", "odd")}
    assert real == set(FAMILIES)
