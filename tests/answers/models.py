"""Tiny models with random weights, one for each thing that requests may ask for."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # as for pytest

from conftest import NORMALIZED, TOWERS, WORDS, save_tiny
from dual_sources import write_dual
from page_sources import write_pages
from sources import HIDDEN, write_router, write_static
from sources import WORDS as PIECES

from jaxembed.data.spec import (
    Adapter,
    DenseLayer,
    Expansion,
    LateInteraction,
    NormalizeLayer,
    PairTemplate,
    PerToken,
    Pooled,
    Vocabulary,
)

LIMIT = 16  # tokens of an input; longer ones would have several programs, which round otherwise
LONGER = 160  # of models that are alone in their servers, which are given one program
ID = {word: 5 + number for number, word in enumerate(WORDS)}
VECTORS = PerToken((DenseLayer(32, 8, activation="identity"), NormalizeLayer()))
WEIGHTS = PerToken((DenseLayer(32, 1, activation="relu"),), skipped_ids=(0, 2, 3))
QUERIES = LateInteraction(12, 10, ID["what"], ID["the"], Expansion(4, 12))
TASKS = {"retrieval.query": "what is ", "retrieval.passage": "the ", "text-matching": ""}
RANKS = {"tower.layers.0.attention.qkv": 4, "tower.layers.1.mlp.up": 2}
QUESTION = PairTemplate("", "{instruction} {query}", "{document}", "", "find")
TABLE = np.random.default_rng(0).standard_normal((len(PIECES), HIDDEN)).astype(np.float32)


def _logits(labels: int) -> dict:
    layer = DenseLayer(32, labels, activation="identity")
    return {"modules": (layer,), "labels": tuple(f"label {k}" for k in range(labels))}


def _tiny(**changes) -> Callable[[Path], object]:
    return lambda path: save_tiny(path, **{"max_input_tokens": LIMIT} | changes)


_THREE = {
    "heads": {
        "dense": Pooled(("mean",), NORMALIZED),
        "token_weights": WEIGHTS,
        "multi_vector": VECTORS,
    }
}
_LONG = {
    "config": TOWERS["bert"]["config"] | {"max_positions": LONGER},
    "max_input_tokens": LONGER,
}

MODELS: dict[str, Callable[[Path], object]] = {
    "plain": _tiny(),
    "default": _tiny(default_prompt_name="query", pooling=("cls",), modules=()),
    "tasks": _tiny(prompts=TASKS, adapters=tuple(Adapter(one, RANKS) for one in (*TASKS, "sql"))),
    "three": _tiny(**_THREE),
    "colbert": _tiny(
        heads={"multi_vector": VECTORS},
        interaction=QUERIES,
        prompts={"query": "", "document": ""},
        token_types=False,
        max_input_tokens=12,
    ),
    "splade": _tiny(
        heads={"sparse": Vocabulary(31 + len(WORDS), 32, (DenseLayer(32, 32, activation="gelu"),))}
    ),
    "router": write_router,
    "undecided": lambda path: write_router(path, default_route=None, allow_empty_key=False),
    "static": lambda path: write_static(path, {"embedding.weight": TABLE}),
    "clip": write_dual,
    "pages": write_pages,
    "reranker": _tiny(pooling=("cls",), score_function="sigmoid", **_logits(1)),
    "asked": _tiny(
        **TOWERS["qwen3"],
        pooling=("lasttoken",),
        score_function="sigmoid",
        template=QUESTION,
        **_logits(1),
    ),
    "classifier": _tiny(**_logits(3)),
    "several": _tiny(score_function="sigmoid", **_logits(2)),
    "long-reranker": _tiny(score_function="sigmoid", **_LONG, **_logits(1)),
    "long-three": _tiny(**_LONG, **_THREE),
}
