"""Converts static models: embeddings of sentence-transformers and model2vec, and query encoders.

Nearly every repository of model2vec has a modules.json with a StaticEmbedding. These models follow
the rules of sentence-transformers: every token counts, texts are truncated only if tokenizer.json
says so, and modules.json says whether vectors are normalized. Models without modules.json follow
the rules of model2vec: the unknown token is dropped, and texts are truncated by characters and
tokens.

Query encoders are the SparseStaticEmbedding of sentence-transformers, for sparse models: one weight
for each term of a text. The weights are a tensor, or a JSON object by token, in which a missing
token has the weight 0.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from converters import heads, weights
from converters.family import TensorRules
from converters.features.terms import sparse_layout
from converters.fields import CONFIG_FIELDS
from converters.heads import Layout
from converters.outline import Options, Outline, spec_of
from converters.tokenizers import tokenizer
from converters.weights import (
    NUMPY_DTYPES,
    Rule,
    Shape,
    Tensor,
    Transform,
    check_dtype,
    check_shape,
    identity,
)
from jaxembed.data.spec import NO_LIMIT, STATIC, NormalizeLayer, Pooled, Vocabulary
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel, counted
from jaxembed.models.static import TABLE

MODEL2VEC = "model2vec"  # model_type in config.json
MODEL2VEC_LIMIT = 512  # tokens, where config.json says nothing
SENTENCE_TRANSFORMERS_TABLE = "embedding.weight"
VALUES = (*NUMPY_DTYPES, "float64", "int8")  # dtypes of embeddings and weights
INTEGERS = ("int32", "int64")  # dtypes of a mapping
MODEL2VEC_TENSORS = ("embeddings", "mapping", "weights")  # the first is always there

WEIGHT = "weight"  # the tensor of a query encoder: one value a term
KNOWN = {"frozen", "path"}  # in config.json of a query encoder; "frozen" is about training

column = Transform(
    lambda values: values[:, None], lambda sources, shape: check_shape(sources, shape[:1])
)


def holds_static(source: Path, route: str = "") -> bool:
    """Whether a directory, or a route of the Router in it, holds a static model of any kind."""
    if kinds := heads.kinds_of(source, route):
        return kinds[0] in ("static", "static_terms")
    return heads.read_optional_json(source / "config.json").get("model_type") == MODEL2VEC


def static_outline(source: Path, options: Options, route: str) -> Outline:
    """Describe a static model, or a static route of a Router; `route` is "" without a Router. Reads
    the names and shapes of the tensors, because no config has them. Raises CheckpointError,
    UnsupportedModel and ConversionError."""
    modules = heads.modules_of(source, route)
    if modules is not None and modules[0].kind == "static_terms":
        return _terms_outline(source, options, modules[0].path)
    folder = source / (modules[0].path if modules else "")
    rule, vocab_size, width = _table(options.name, weights.find(folder))
    text = tokenizer.read_tokenizer(folder, lowercase=False, vocab_size=vocab_size)
    config: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": width}
    if modules is not None:
        layout = heads.pooled_layout(
            source, modules[0], heads.MEAN, modules[1:], width, options.dense_path
        )
        # sentence-transformers keeps the truncation that tokenizer.json sets
        truncation = json.loads(text).get("truncation") or {}
        if truncation.get("direction", "Right") != "Right":
            raise UnsupportedModel(
                f"{folder / 'tokenizer.json'}: truncation from the left is not supported; known: "
                "Right"
            )
        limit = int(truncation.get("max_length", NO_LIMIT))
    else:
        # the rules of model2vec, with the settings of config.json
        hf = heads.read_optional_json(source / "config.json", CONFIG_FIELDS)
        if hf.get("head_config"):
            raise UnsupportedModel(
                f"{source}: a classifier on static embeddings (head_config) is not supported"
            )
        options.refuse_dense_path(source)
        cap = hf.get("max_length", MODEL2VEC_LIMIT)
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 1):
            raise CheckpointError(
                f"max_length is {cap!r} in {source / 'config.json'}, wanted 1 or more"
            )
        parsed = Tokenizer.from_str(text.decode())
        model = json.loads(parsed.to_str())["model"]
        if model["type"] == "Unigram":
            unknown = model.get("unk_id")
        else:
            token = model.get("unk_token")
            unknown = None if token is None else parsed.token_to_id(token)
        lengths = [len(token) for token in parsed.get_vocab()]
        config["dropped_id"] = unknown
        config["characters_per_token"] = None if cap is None else int(np.median(lengths))
        later = (NormalizeLayer(),) if hf.get("normalize") else ()
        layout = Layout(backbone="", heads={"dense": Pooled(heads.MEAN, later)})
        limit = NO_LIMIT if cap is None else cap
    return _outline_of_table(source, options, layout, rule, config, text, limit)


def _terms_outline(source: Path, options: Options, inside: str) -> Outline:
    """Describe a static query encoder, which is in the folder `inside` of `source`."""
    options.refuse_dense_path(source)
    folder = source / inside
    tensor = _find_terms(folder).get(WEIGHT)
    if tensor is None or len(tensor.shape) != 1:
        got = "no such tensor" if tensor is None else f"shape {tensor.shape}"
        raise ConversionError(options.name, [f"{WEIGHT}: wanted one value a term, got {got}"])
    (terms,) = tensor.shape
    text = tokenizer.read_tokenizer(folder, lowercase=False, vocab_size=terms)
    layout = sparse_layout(source, inside, Vocabulary(terms, features=1))
    limit = heads.token_limit(folder, positions=None, otherwise=NO_LIMIT)
    rule = Rule(WEIGHT, TABLE, column)
    config = {"vocab_size": terms, "hidden_size": 1}
    return _outline_of_table(source, options, layout, rule, config, text, limit, _find_terms)


def _outline_of_table(
    source: Path,
    options: Options,
    layout: Layout,
    rule: Rule,
    config: dict[str, Any],
    text: bytes,
    limit: int,
    find: Callable[[Path], dict[str, Tensor]] = weights.find,
) -> Outline:
    """Return the outline of a static model. `rule` makes its table from the tensors that `find`
    returns, `text` is the content of its tokenizer.json, and `limit` is in tokens."""
    spec = spec_of(
        options,
        layout,
        config,
        hf={},
        architecture=STATIC,
        token_types=False,
        max_input_tokens=limit,
    )
    # Static models take no special tokens around a text. ByteLevel stays: it adds none, and
    # trims offsets.
    content = json.loads(text)
    if (content.get("post_processor") or {}).get("type") != "ByteLevel":
        content["post_processor"] = None
        text = json.dumps(content, ensure_ascii=False).encode()
    rules = TensorRules(rules=(rule, *layout.rules), find=find)
    return Outline(source, rules, layout, spec, text)


def _table(model: str, tensors: Mapping[str, Tensor]) -> tuple[Rule, int, int]:
    """Return the rule for the table of token vectors, the number of tokens, and the width of the
    table. Raises ConversionError if the table is missing or does not have two axes."""
    if SENTENCE_TRANSFORMERS_TABLE in tensors:
        names: tuple[str, ...] = (SENTENCE_TRANSFORMERS_TABLE,)
    elif MODEL2VEC_TENSORS[0] in tensors:
        names = tuple(name for name in MODEL2VEC_TENSORS if name in tensors)
    else:
        raise ConversionError(
            model,
            [f"missing: {SENTENCE_TRANSFORMERS_TABLE} or {MODEL2VEC_TENSORS[0]} of a static model"],
        )
    table = tensors[names[0]]
    if len(table.shape) != 2:
        raise ConversionError(model, [f"{table.name}: wanted two axes, got shape {table.shape}"])
    rows = tensors["mapping" if "mapping" in names else names[0]].shape[0]
    is_stored_whole = len(names) == 1 and table.dtype in NUMPY_DTYPES
    return Rule(names, TABLE, identity if is_stored_whole else _folded(names)), rows, table.shape[1]


def _folded(names: tuple[str, ...]) -> Transform:
    """Return a transform from model2vec's tensors `names` to a table with one float32 row for each
    token: `embeddings[mapping] * weights`, as sentence-transformers folds them."""

    def apply(*arrays: np.ndarray) -> np.ndarray:
        by_name = dict(zip(names, arrays, strict=True))
        table = by_name[names[0]].astype(np.float32)
        if "mapping" in by_name:
            mapping = by_name["mapping"]
            if mapping.min(initial=0) < 0 or mapping.max(initial=0) >= len(table):
                raise CheckpointError(
                    f"mapping has row {mapping.max()}, embeddings only {counted(len(table), 'row')}"
                )
            table = table[mapping]
        if "weights" in by_name:
            table = (table * by_name["weights"][:, None]).astype(np.float32)
        return table

    def misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
        # mapping and weights have one value for each token
        problems = check_shape(sources[1:], shape[:1])
        for name, source in zip(names, sources, strict=True):
            problems += check_dtype([source], INTEGERS if name == "mapping" else VALUES)
        return problems

    return Transform(apply, misfits, dtype="float32", takes=(*VALUES, *INTEGERS))


def _find_terms(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a static query encoder, from its weights file or from the JSON file
    that its config names. Raises CheckpointError, and UnsupportedModel for unknown settings."""
    config = heads.module_config(folder)
    if unknown := sorted(set(config) - KNOWN):
        raise UnsupportedModel(
            f"{folder}: SparseStaticEmbedding with {', '.join(unknown)} is not supported"
        )
    if not config.get("path"):
        return weights.find(folder)
    # a JSON object by token, beside the module's config or in the folder around it
    name = Path(config["path"]).name
    path = folder / name
    if not path.is_file():
        path = folder.parent / name
    weight_of = heads.read_optional_json(path)
    if not weight_of:
        raise CheckpointError(f"{folder}: the file of its weights, {name}, is missing or empty")
    text = tokenizer.read_tokenizer(folder, lowercase=False, vocab_size=heads.HUGE)  # no limit
    ids = Tokenizer.from_str(text.decode()).get_vocab(with_added_tokens=True)
    values = np.zeros(len(ids), np.float32)  # in the order of the tokens' ids
    for token, weight in weight_of.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise CheckpointError(
                f"{path}: the weight of {token!r} is {json.dumps(weight)[:50]}, wanted a finite "
                "number"
            )
        if not 0 <= ids.get(token, -1) < len(values):
            raise CheckpointError(f"{path}: {token!r} is not a token of the tokenizer in {folder}")
        values[ids[token]] = weight
    return {WEIGHT: Tensor(WEIGHT, "float32", values.shape, partial(np.copy, values))}
