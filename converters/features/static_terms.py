"""Converts the static query encoders of sparse models: one weight for each term that a text has.

They are sentence-transformers' SparseStaticEmbedding. Its weights are a tensor, or a JSON object by
token, in which a token that is not there weighs nothing.
"""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from converters import heads, weights
from converters.features.static import outline_of_table
from converters.features.terms import sparse_layout
from converters.outline import Options, Outline
from converters.tokenizers import tokenizer
from converters.weights import Rule, Tensor, Transform
from jaxembed.data.spec import NO_LIMIT, Vocabulary
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models.static import TABLE

WEIGHT = "weight"  # the tensor: one value a term
KNOWN = {"frozen", "path"}  # of config.json; the first is about training

column = Transform(
    lambda values: values[:, None],
    lambda sources, shape: [
        f"{one.name}: wanted shape {shape[:1]}, got {one.shape}"
        for one in sources
        if one.shape != shape[:1]
    ],
)


def holds_static_terms(source: Path, route: str = "") -> bool:
    """Whether a directory, or a route of the Router in it, is a static query encoder."""
    modules = heads.modules_of(source, route)
    return modules is not None and modules[0].kind == "static_terms"


def static_outline(source: Path, options: Options, route: str) -> Outline:
    """Describe a static query encoder. Reads the shape of its weights, because no config has it.
    Raises CheckpointError."""
    options.refuse_dense_path(source)
    inside = heads.tower_folder(source, route)
    folder = source / inside
    tensor = _find(folder).get(WEIGHT)
    if tensor is None or len(tensor.shape) != 1:
        got = "no such tensor" if tensor is None else f"shape {tensor.shape}"
        raise ConversionError(options.name, [f"{WEIGHT}: wanted one value a term, got {got}"])
    (terms,) = tensor.shape
    text = tokenizer.read_tokenizer(folder, lowercase=False, vocab_size=terms)
    layout = sparse_layout(source, inside, Vocabulary(terms, features=1))
    limit = heads.token_limit(folder, None, otherwise=NO_LIMIT)
    rule = Rule(WEIGHT, TABLE, column)
    config = {"vocab_size": terms, "hidden_size": 1}
    return outline_of_table(source, options, layout, rule, config, text, limit, _find)


def _find(folder: Path) -> dict[str, Tensor]:
    """The tensors of a static query encoder: those of its weights, or one made of its JSON file.
    Raises CheckpointError, and UnsupportedModel for settings that are not known."""
    config = heads.module_config(folder)
    if unknown := sorted(set(config) - KNOWN):
        raise UnsupportedModel(
            f"{folder}: SparseStaticEmbedding with {', '.join(unknown)} is not supported"
        )
    if not config.get("path"):
        return weights.find(folder)
    values = _weights_by_token(folder, Path(config["path"]).name)
    return {WEIGHT: Tensor(WEIGHT, "float32", values.shape, partial(np.copy, values))}


def _weights_by_token(folder: Path, name: str) -> np.ndarray:
    """The weights of a JSON object by token, in the order of the tokens' ids, float32. The file is
    beside the module's config or in the folder around it."""
    path = folder / name
    if not path.is_file():
        path = folder.parent / name
    given = heads.read_optional_json(path)
    if not given:
        raise CheckpointError(f"{folder}: its weights, {name}, are not there or empty")
    text = tokenizer.read_tokenizer(folder, lowercase=False, vocab_size=heads.HUGE)
    ids = Tokenizer.from_str(text.decode()).get_vocab(with_added_tokens=True)
    values = np.zeros(len(ids), np.float32)
    for token, weight in given.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise CheckpointError(
                f"{path}: the weight of {token!r} is {json.dumps(weight)[:50]}, wanted a finite "
                "number"
            )
        if not 0 <= ids.get(token, -1) < len(values):
            raise CheckpointError(f"{path}: {token!r} is no token of the tokenizer in {folder}")
        values[ids[token]] = weight
    return values
