"""Adds token heads to an embedder: the two of BGE-M3, the sparse one of gte-multilingual, and
jina-embeddings-v4's of vectors.

BGE-M3 keeps the weights of its two heads in two files, which no config names. As in FlagEmbedding,
they are read if both are there. If one is missing, the copy of the model is incomplete, which is an
error. Chen et al. 2024, arXiv:2402.03216.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from converters.family import Family
from converters.heads import Layout, parameter_of
from converters.tokenizers.tokenizer import special_token
from converters.weights import Rule, transpose
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import DenseLayer, NormalizeLayer, PerToken
from jaxembed.errors import UnsupportedModel

SPARSE_FILE, VECTORS_FILE = "sparse_linear.pt", "colbert_linear.pt"
FILES = (SPARSE_FILE, VECTORS_FILE)

# Tokens without a term weight: their keys in tokenizer_config.json, and XLM-R's tokens as defaults.
_NO_TERMS = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def with_token_heads(
    source: Path,
    layout: Layout,
    hf: dict[str, Any],
    width: int,
    family: Family,
    tokenizer: bytes,
) -> Layout:
    """Return the layout of an embedder with the token heads that its family and its files give it.

    `width` is the width of hidden states. `tokenizer` is the content of tokenizer.json. Raises
    UnsupportedModel if only one of BGE-M3's two files is there.
    """
    if "dense" not in layout.heads:
        return layout
    weight = DenseLayer(in_features=width, out_features=1, activation="relu")
    if set(hf.get("architectures") or ()) & set(family.sparse_classes):
        return _with_weights(layout, weight, "classifier.", source / layout.backbone, tokenizer)
    if (projection := family.token_vectors(hf)) is not None:
        layer, name = projection
        return _with_vectors(layout, layer, f"{name}.")
    missing = [name for name in FILES if not (source / name).is_file()]
    if len(missing) == len(FILES):
        return layout
    if missing:
        (found,) = {*FILES} - {*missing}
        raise UnsupportedModel(
            f"the model has {found} but not {missing[0]}, and BGE-M3 has both; add that file, or "
            f"remove {found} to get only dense vectors"
        )
    vectors = DenseLayer(in_features=width, out_features=width, activation="identity")
    layout = _with_weights(layout, weight, f"{SPARSE_FILE}/", source / layout.backbone, tokenizer)
    layout = _with_vectors(layout, vectors, f"{VECTORS_FILE}/", drops_first=True)  # not of <s>
    return replace(layout, files=FILES)


def _with_vectors(
    layout: Layout, layer: DenseLayer, tensors: str, *, drops_first: bool = False
) -> Layout:
    """Add a head of vectors of tokens, of all or of those after the first: the linear `layer`,
    whose tensors have the prefix `tensors`, and then their length becomes one."""
    head = PerToken((layer, NormalizeLayer()), drops_first=drops_first)
    return replace(
        layout,
        heads={**layout.heads, "multi_vector": head},
        rules=(*layout.rules, *_rules("multi_vector", tensors)),
    )


def _with_weights(
    layout: Layout, layer: DenseLayer, tensors: str, backbone: Path, tokenizer: bytes
) -> Layout:
    """Add a head of term weights: the linear `layer`, whose tensors have the prefix `tensors`. The
    special tokens in _NO_TERMS get no weight. `backbone` is the folder of the tokenizer's config,
    and `tokenizer` the content of tokenizer.json."""
    parsed = Tokenizer.from_str(tokenizer.decode())
    tokens = [special_token(backbone, name, default) for name, default in _NO_TERMS.items()]
    ids = {parsed.token_to_id(token) for token in tokens if token is not None}
    head = PerToken((layer,), skipped_ids=tuple(sorted(id for id in ids if id is not None)))
    return replace(
        layout,
        heads={**layout.heads, "token_weights": head},
        rules=(*layout.rules, *_rules("token_weights", tensors)),
    )


def _rules(head: OutputName, tensors: str) -> tuple[Rule, Rule]:
    """Return the rules for the linear layer of a head, whose tensors have the prefix `tensors`."""
    kernel = Rule(f"{tensors}weight", parameter_of(head, number=0, name="kernel"), transpose)
    return kernel, Rule(f"{tensors}bias", parameter_of(head, number=0, name="bias"))
