"""Converts static embeddings: those of sentence-transformers, and model2vec's.

Nearly every repository of model2vec has a modules.json too, which names a StaticEmbedding. Then the
rules of sentence-transformers hold: every token counts, nothing is cut unless tokenizer.json says
so, and modules.json says what is normalised. Without modules.json those of model2vec hold: the
unknown token is dropped, and texts are cut by characters and tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from converters import heads, weights
from converters.family import TensorRules
from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import Layout
from converters.outline import Options, Outline, spec_of
from converters.tokenizers import tokenizer
from converters.weights import NUMPY_DTYPES, Rule, Shape, Tensor, Transform
from jaxembed.data.spec import NO_LIMIT, STATIC, NormalizeLayer, Pooled
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models.static import TABLE

MODEL2VEC = "model2vec"  # model_type in config.json
MODEL2VEC_LIMIT = 512  # tokens, where config.json says nothing
OF_SENTENCE_TRANSFORMERS = "embedding.weight"
VALUES = (*NUMPY_DTYPES, "float64", "int8")  # dtypes of embeddings and weights
INTEGERS = ("int32", "int64")  # of a mapping
OF_MODEL2VEC = ("embeddings", "mapping", "weights")  # the first is always there


def holds_static(source: Path, route: str = "") -> bool:
    """Whether a directory, or a route of the Router in it, holds static embeddings of either
    kind."""
    modules = heads.modules_of(source, route)
    if modules is not None:
        return modules[0].kind == "static"
    return heads.read_optional_json(source / "config.json").get("model_type") == MODEL2VEC


def static_outline(source: Path, options: Options, route: str) -> Outline:
    """Describe static embeddings. Reads the names and shapes of their tensors, because no config
    has them. Raises CheckpointError."""
    modules = heads.modules_of(source, route)
    folder = source / (modules[0].path if modules else "")
    tensors = weights.find(folder)
    rule = _table_rule(options.name, tensors)
    vocab_size, width = _shape(options.name, tensors)
    text = tokenizer.read_tokenizer(folder, lowercase=False, vocab_size=vocab_size)
    config: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": width}
    if modules is not None:
        layout = heads.read_static_layout(source, modules, width, options.dense_path)
        limit = _limit_of_tokenizer(folder, text)
    else:
        layout, more, limit = _by_model2vec(source, text, options)
        config |= more
    return outline_of_table(source, options, layout, rule, config, text, limit)


def outline_of_table(
    source: Path,
    options: Options,
    layout: Layout,
    rule: Rule,
    config: dict[str, Any],
    text: bytes,
    limit: int,
    find: Callable[[Path], dict[str, Tensor]] = weights.find,
) -> Outline:
    """The outline of a model whose tower is a table, which `rule` makes of the tensors that `find`
    finds. `text` is its tokenizer, whose special tokens are left out."""
    spec = spec_of(
        options,
        layout,
        config,
        {},
        architecture=STATIC,
        token_types=False,
        max_input_tokens=limit,
    )
    rules = TensorRules(rules=(rule, *layout.rules), find=find)
    return Outline(source, rules, layout, spec, _without_special_tokens(text))


def _by_model2vec(
    source: Path, text: bytes, options: Options
) -> tuple[Layout, dict[str, Any], int]:
    """The layout, the fields of StaticConfig and the limit that config.json asks for."""
    hf = heads.read_optional_json(source / "config.json")
    check_fields(str(source / "config.json"), hf, CONFIG_FIELDS)
    if hf.get("head_config"):
        raise UnsupportedModel(
            f"{source}: a classifier on static embeddings (head_config) is not supported"
        )
    options.refuse_dense_path(source)
    limit = hf.get("max_length", MODEL2VEC_LIMIT)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise CheckpointError(
            f"max_length is {limit!r} in {source / 'config.json'}, wanted 1 or more"
        )
    parsed = Tokenizer.from_str(text.decode())
    lengths = [len(token) for token in parsed.get_vocab()]
    fields = {
        "dropped_id": _unknown_id(parsed),
        "characters_per_token": None if limit is None else int(np.median(lengths)),
    }
    later = (NormalizeLayer(),) if hf.get("normalize") else ()
    layout = Layout(tower="", heads={"dense": Pooled(heads.MEAN, later)})
    return layout, fields, NO_LIMIT if limit is None else limit


def _unknown_id(parsed: Tokenizer) -> int | None:
    """The id of the unknown token, as model2vec finds it; None if the tokenizer has none."""
    model = json.loads(parsed.to_str())["model"]
    if model["type"] == "Unigram":
        return model.get("unk_id")
    token = model.get("unk_token")
    return None if token is None else parsed.token_to_id(token)


def _limit_of_tokenizer(folder: Path, text: bytes) -> int:
    """The tokens to which tokenizer.json itself cuts, which sentence-transformers leaves on."""
    truncation = json.loads(text).get("truncation")
    if truncation is None:
        return NO_LIMIT
    if truncation.get("direction", "Right") != "Right":
        raise UnsupportedModel(
            f"{folder / 'tokenizer.json'}: truncation from the left is not supported; known: Right"
        )
    return int(truncation["max_length"])


def _without_special_tokens(text: bytes) -> bytes:
    """The tokenizer without the step that puts special tokens around a text: static models take
    none. ByteLevel stays, which adds nothing and trims offsets."""
    content = json.loads(text)
    if (content.get("post_processor") or {}).get("type") == "ByteLevel":
        return text
    content["post_processor"] = None
    return json.dumps(content, ensure_ascii=False).encode()


def _table_rule(model: str, tensors: Mapping[str, Tensor]) -> Rule:
    """The rule for the table. Raises ConversionError if its tensor is missing."""
    if OF_SENTENCE_TRANSFORMERS in tensors:
        names: tuple[str, ...] = (OF_SENTENCE_TRANSFORMERS,)
    else:
        names = tuple(name for name in OF_MODEL2VEC if name in tensors)
    if names[:1] not in ((OF_SENTENCE_TRANSFORMERS,), OF_MODEL2VEC[:1]):
        raise ConversionError(
            model, [f"missing: {OF_SENTENCE_TRANSFORMERS} or {OF_MODEL2VEC[0]} of a static model"]
        )
    source = tensors[names[0]]
    if len(names) == 1 and source.dtype in NUMPY_DTYPES:
        return Rule(names, TABLE)
    return Rule(names, TABLE, _folded(names))


def _shape(model: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """The number of tokens and the width of the table."""
    table = tensors.get(OF_SENTENCE_TRANSFORMERS) or tensors[OF_MODEL2VEC[0]]
    if len(table.shape) != 2:
        raise ConversionError(model, [f"{table.name}: wanted two axes, got shape {table.shape}"])
    mapping = tensors.get("mapping")
    rows = table.shape[0] if mapping is None or table.name != OF_MODEL2VEC[0] else mapping.shape[0]
    return rows, table.shape[1]


def _folded(names: tuple[str, ...]) -> Transform:
    """A transform from model2vec's tensors to one float32 row a token: `embeddings[mapping] *
    weights`, as sentence-transformers folds them."""

    def apply(*arrays: np.ndarray) -> np.ndarray:
        given = dict(zip(names, arrays, strict=True))
        table = given[names[0]].astype(np.float32)
        if "mapping" in given:
            mapping = given["mapping"]
            if mapping.min(initial=0) < 0 or mapping.max(initial=0) >= len(table):
                raise CheckpointError(
                    f"mapping has row {mapping.max()}, embeddings only {len(table)} rows"
                )
            table = table[mapping]
        if "weights" in given:
            table = (table * given["weights"][:, None]).astype(np.float32)
        return table

    def misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
        given = dict(zip(names, sources, strict=True))
        wanted: dict[str, Shape] = {"weights": shape[:1], "mapping": shape[:1]}
        problems = [
            f"{name}: wanted shape {wanted[name]}, got {given[name].shape}"
            for name in names[1:]
            if given[name].shape != wanted[name]
        ]
        for name, source in given.items():
            known = INTEGERS if name == "mapping" else VALUES
            if source.dtype not in known:
                problems.append(f"{name}: wanted one of {', '.join(known)}, got {source.dtype}")
        return problems

    return Transform(apply, misfits, dtype="float32", takes=(*VALUES, *INTEGERS))
