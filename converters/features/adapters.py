"""Converts low-rank adapters by the rules of their base model: adapters that PEFT and
sentence-transformers save, and built-in adapters, which are among the base model's own tensors. An
adapter is converted beside its base, or merged into the weights of the base."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from converters.family import BuiltIn, TensorRules
from converters.fields import ADAPTER_FIELDS, refuse_unknown
from converters.heads import modules_of, read_layout, read_optional_json, tower_folder
from converters.outline import AdapterSource, LowRankFactors, Outline
from converters.weights import (
    NUMPY_DTYPES,
    Rule,
    Shape,
    Step,
    Tensor,
    Transform,
    canonical,
    check_dtype,
    check_shape,
    choose,
    expand,
    identity,
    safetensors_of,
    transpose,
)
from jaxembed.data.spec import Adapter
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel, counted
from jaxembed.models import parameter_shapes
from jaxembed.models.adapters import column_owners

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
# Endings that PEFT appends to the name of a layer for its two factors. In rules the weight of the
# layer has the ending ".weight".
DOWN = (".lora_A.weight", ".lora_embedding_A")
UP = (".lora_B.weight", ".lora_embedding_B")

# Matches names that contain the name of the adapter, as in the memory of PEFT but not in its files:
# `lora_A.default.weight`.
_IN_MEMORY = re.compile(r"\.lora_(embedding_)?[AB]\.(?!weight$|bias$)")

BACKBONE = "tower."  # the names of its parameters begin so
PARAMETRIZED = ".parametrizations.weight.0."  # in the name of each tensor of a built-in adapter
ORIGINAL = ".parametrizations.weight.original"  # ends the name of a weight that such adapters have

# Fields of adapter_config.json that are read here, and those that do not change the results.
# Any other field must be unset, because it is not supported.
READ = {"peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"}
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_LARGEST = 65504.0  # the largest float16
# values of init_lora_weights that leave the weights of the base model unchanged
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")


def with_adapters(
    model: Outline, folders: Mapping[str, Path], in_one: Collection[str] = ()
) -> Outline:
    """Return the outline with its built-in adapters and with those in `folders`, which has the
    folder of each adapter by name. `in_one` are the names of those that are in the same file. Reads
    no values of tensors. Raises UnsupportedModel, ConversionError and CheckpointError."""
    spec, own, rules = model.spec, model.built_in, model.tensors.rules
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(spec).items()}
    sources = tuple(
        _read_adapter(name, at, model.tensors, in_one=in_one if name in in_one else ())
        for name, at in folders.items()
    )
    for name, at in folders.items():
        heads = spec.heads if modules_of(at) is None else read_layout(at, spec.hidden_size).heads
        if heads != spec.heads:
            raise UnsupportedModel(
                f"adapter {name}: the pooling or modules in its modules.json differ from those of "
                f"the model, which an adapter must share: {heads} instead of {dict(spec.heads)}"
            )
    adapters = [_layer_ranks(source, model.tensors, shapes) for source in sources]
    prompts = spec.prompts
    if own is not None:  # a built-in adapter has the same rank for every weight
        ranks = {
            _layer(rule): own.rank * len(rule.sources)
            for rule in expand(rules, shapes)
            if _is_adaptable(rule) and rule.target.startswith(BACKBONE)
        }
        adapters = [*(Adapter(name, ranks) for name in own.names), *adapters]
        prompts = {**own.prompts, **prompts}
    if twice := [name for name, n in Counter(one.name for one in adapters).items() if n > 1]:
        raise CheckpointError(f"the model has an adapter {twice[0]} already; give it another name")
    spec = msgspec.structs.replace(spec, adapters=tuple(adapters), prompts=prompts)
    return replace(model, adapters=sources, spec=spec)


def without_built_in(
    model: str, own: BuiltIn, ignored: Sequence[str], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[AdapterSource]]:
    """Separate the tensors of the built-in adapters `own` from the other `tensors`. Return the
    other tensors by name, and the adapters.

    `ignored` are patterns of names of unused weights. Raises ConversionError, which names `model`,
    if a weight lacks one of the two stacks of factors, or a stack has a wrong shape.
    """
    endings = (f"{PARAMETRIZED}lora_A", f"{PARAMETRIZED}lora_B")
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(endings)}
    stems = dict.fromkeys(name.split(PARAMETRIZED)[0] for name in tensors if name not in rest)
    by_adapter: list[dict[str, LowRankFactors]] = [{} for _ in own.names]
    problems = []
    for stem in (stem for stem in stems if not _is_ignored(f"{stem}.weight", ignored)):
        stacks = [tensors[stem + ending] for ending in endings if stem + ending in tensors]
        is_table = "embeddings" in stem
        # the axis of the rank in the two stacks `[adapters, ...]`; for tables they are transposed
        axes = (2, 1) if is_table else (1, 2)
        fits = len(stacks) == 2 and all(
            len(stack.shape) == 3
            and (stack.shape[0], stack.shape[axis]) == (len(own.names), own.rank)
            for stack, axis in zip(stacks, axes, strict=True)
        )
        if not fits:
            problems.append(
                f"{stem}: expected two stacks of factors of rank {own.rank}, for "
                f"{counted(len(own.names), 'adapter')}"
            )
            continue
        for number, factors in enumerate(by_adapter):
            down, up = (_matrix(stack, number, transposed=is_table) for stack in stacks)
            factors[f"{stem}.weight"] = LowRankFactors(down, up, own.scale)
    if problems:
        raise ConversionError(model, problems)
    return rest, [
        AdapterSource(name, factors, {})
        for name, factors in zip(own.names, by_adapter, strict=True)
    ]


def _matrix(tensor: Tensor, number: int, *, transposed: bool) -> Tensor:
    """Return matrix `number` of a stack of matrices as a Tensor, perhaps transposed."""
    shape, convert = tensor.shape[1:], np.transpose if transposed else np.asarray
    return Tensor(
        f"{tensor.name}[{number}]",
        tensor.dtype,
        shape[::-1] if transposed else shape,
        lambda: convert(tensor.read()[number]),
    )


def with_built_in(
    model: str, own: BuiltIn, name: str, ignored: Sequence[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the `tensors` of a model with its built-in adapter `name` merged into them, as by
    `merged_into`, and without the others. `ignored` are patterns of names of unused weights. Raises
    ConversionError, which names `model` and lists every weight whose factors are missing or do not
    fit."""
    rest, sources = without_built_in(model, own, ignored, tensors)
    factors = sources[own.names.index(name)].factors
    merged, problems = _with_factors(
        name, rest, factors, {key for key in factors if "embeddings" in key}
    )
    problems += [
        f"adapter {name}: {tensor.name} has no factors"
        for key, tensor in rest.items()
        if tensor.name.endswith(ORIGINAL) and key not in factors and not _is_ignored(key, ignored)
    ]
    if problems:
        raise ConversionError(model, problems)
    return _in_dtypes(merged, rest)


def merged_into(
    tensors: Mapping[str, Tensor],
    name: str,
    folder: Path,
    base: TensorRules,
    ignored: Sequence[str],
) -> dict[str, Tensor]:
    """Return the `tensors` of a base model with the adapter in `folder`, called `name`, merged into
    them: its factors are added to weights in float32, and whole tensors that PEFT saved with it
    replace those of the base. Values are computed when a tensor is read, and have its dtype.

    `base` has the rules of the model, and `ignored` are patterns of names of tensors that it does
    not use. Raises UnsupportedModel and CheckpointError for an adapter that cannot be read, and
    ConversionError, which lists every tensor of the adapter that does not fit the model.
    """
    source = _read_adapter(name, folder, base, merging=True)
    parts = [(key, copy) for key, copy in source.copies.items()]
    parts += [(key, pair.down) for key, pair in source.factors.items()]
    problems = [
        f"adapter {name}: unused: {tensor.name}"
        for key, tensor in parts
        if key not in tensors and not _is_ignored(key, ignored)
    ]
    merged = dict(tensors)
    for key, copy in source.copies.items():
        if key in tensors:
            problems += check_shape([copy], tensors[key].shape)
            problems += check_dtype([copy], NUMPY_DTYPES)
            merged[key] = replace(tensors[key], read=copy.read)
    tables = {key for key, pair in source.factors.items() if pair.down.name.endswith(DOWN[1])}
    merged, misfits = _with_factors(name, merged, source.factors, tables)
    if problems := problems + misfits:
        raise ConversionError(str(folder), problems)
    if not any(key in tensors for key, _ in parts):
        raise CheckpointError(f"adapter {name} changes no weight of its base model")
    return _in_dtypes(merged, tensors)


def _with_factors(
    name: str,
    tensors: Mapping[str, Tensor],
    factors: Mapping[str, LowRankFactors],
    tables: Collection[str],
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the `tensors` with the factors of the adapter `name` added to those that are there,
    whose values are float32 then, and the problems. `tables` are the names of tables, whose rows
    are the inputs."""
    merged, problems = dict(tensors), []
    for key, pair in factors.items():
        if key not in merged:
            continue
        weight = merged[key]
        is_table = key in tables
        if len(weight.shape) != 2:
            problems.append(f"adapter {name}: {weight.name} cannot take an adapter")
            continue
        outputs, inputs = weight.shape[::-1] if is_table else weight.shape
        problems += check_shape([pair.down], (pair.rank, inputs))
        problems += check_shape([pair.up], (outputs, pair.rank))
        problems += check_dtype([weight, pair.down, pair.up], NUMPY_DTYPES)
        merged[key] = replace(weight, read=partial(_sum, weight, pair, is_table))
    return merged, problems


def _sum(weight: Tensor, pair: LowRankFactors, is_table: bool) -> np.ndarray:
    """Return weight + scale * up . down in float32; for a table, whose rows are the inputs, the
    product is transposed."""
    down, up = (factor.read().astype(np.float32) for factor in (pair.down, pair.up))
    product = np.float32(pair.scale) * (up @ down)
    product = product.T if is_table else product
    product += weight.read()
    return product


def _in_dtypes(merged: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors; those that differ from `before`, whose values may have another dtype when
    they are read, get them in their own."""
    return {
        key: tensor if tensor.read is before[key].read else _in_dtype(tensor)
        for key, tensor in merged.items()
    }


def _in_dtype(tensor: Tensor) -> Tensor:
    return replace(tensor, read=lambda: tensor.read().astype(NUMPY_DTYPES[tensor.dtype]))


def _read_adapter(
    name: str,
    folder: Path,
    base: TensorRules,
    *,
    merging: bool = False,
    in_one: Collection[str] = (),
) -> AdapterSource:
    """Read an adapter's config, and the names and shapes of its tensors. `base` has the rules of
    the model. With `merging`, the adapter may have tensors of modules_to_save. `in_one` are the
    names of the adapters in its file if the names of tensors contain them.

    Raises UnsupportedModel for settings that are not supported, ConversionError for tensors that do
    not form two factors for each weight, and CheckpointError if files are missing or damaged.
    """
    folder = adapter_folder(folder)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"adapter {name}: {folder} has no {CONFIG}, as PEFT saves it")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"adapter {name}: {folder} has no {WEIGHTS}; save it as safetensors")
    config = read_config(name, folder, merging=merging)
    stems: dict[str, dict[str, Tensor]] = {}  # by weight: its factors, by "down" or "up"
    copies: dict[str, Tensor] = {}
    for original, tensor in _of_adapter(name, in_one, safetensors_of(folder / WEIGHTS)).items():
        weight, part = _split(original)
        if part == "copy":
            copies[weight] = tensor
        else:
            stems.setdefault(weight, {})[part] = tensor
    problems = [
        f"adapter {name}: {tensor.name} has "
        + (
            "a name that PEFT gives it in memory; save the adapter with save_pretrained"
            if _IN_MEMORY.search(tensor.name)
            else "no partner, or is not part of a low-rank adapter"
        )
        for parts in stems.values()
        for tensor in parts.values()
        if not _is_low_rank(parts)
    ]
    if problems:
        raise ConversionError(str(folder), problems)
    scales = {stem: _scale(config, stem, parts["down"].shape[0]) for stem, parts in stems.items()}
    factors = {
        stem: LowRankFactors(
            _bounded(name, parts["down"]), _bounded(name, parts["up"], scales[stem]), scales[stem]
        )
        for stem, parts in stems.items()
    }
    # the file has the names of the base model's class, which may differ from the names in rules
    renamed_as_rules = partial(canonical, str(folder), prefixes=base.prefixes, renames=base.renames)
    renamed = renamed_as_rules({stem: pair.down for stem, pair in factors.items()})
    by_tensor = {pair.down.name: pair for pair in factors.values()}
    return AdapterSource(
        name, {key: by_tensor[down.name] for key, down in renamed.items()}, renamed_as_rules(copies)
    )


def _of_adapter(
    name: str, in_one: Collection[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a file, by the names that they would have if the adapter called `name`
    were alone in it, and without those of the others in `in_one`."""
    names = "|".join(map(re.escape, in_one))
    ending = re.compile(rf"(\.lora_[AB])\.({names})(?=\.weight$)")
    matches = {key: ending.search(key) for key in tensors}
    return {
        ending.sub(r"\1", key): tensors[key]
        for key, match in matches.items()
        if match is None or match[2] == name
    }


def _layer_ranks(source: AdapterSource, base: TensorRules, shapes: Mapping[str, Shape]) -> Adapter:
    """Return the adapter with its rank in each layer: the sum of the ranks for the layer's weights.

    `base` has the rules of the whole model, and `shapes` the shapes of its parameters. Raises
    ConversionError, which lists every weight that has no layer or whose layer takes no adapter, and
    CheckpointError if the adapter changes no layer.
    """
    ranks: dict[str, int] = {}
    known: set[str] = set()
    problems = []
    for rule in expand(base.rules, shapes):
        changed = [name for name in rule.sources if name in source.factors]
        known.update(changed)
        if changed and not _is_adaptable(rule):
            problems += [
                f"adapter {source.name}: {name} cannot take an adapter" for name in changed
            ]
        elif changed:
            ranks[_layer(rule)] = sum(source.factors[name].rank for name in changed)
    problems += [
        f"adapter {source.name}: unused: {source.factors[name].down.name}"
        for name in source.factors
        if name not in known and not _is_ignored(name, base.ignored)
    ]
    if problems:
        raise ConversionError(source.name, problems)
    if not ranks:
        raise CheckpointError(f"adapter {source.name} changes no layer of this model")
    return Adapter(source.name, ranks)


def plan_adapters(
    model: str,
    rules: Sequence[Rule],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    sources: Sequence[AdapterSource],
    ranks: Sequence[Adapter],
) -> list[Step]:
    """Plan the steps that make the parameters of all adapters.

    `sources` are the adapters as read, and `ranks` the same adapters in the spec, in this order.
    `tensors` are those of the base model. Their values are read only if an adapter was saved with
    copies of them, which must be equal. Raises ConversionError, which lists every factor or copy
    that does not fit its weight.
    """
    problems: list[str] = []
    for source in sources:  # weights of the base model that were saved with an adapter
        for name, copy in source.copies.items():
            base, prefix = tensors.get(name), f"adapter {source.name}:"
            if base is None:
                problems.append(f"{prefix} unused: {copy.name}")
            elif copy.shape != base.shape or not np.array_equal(copy.read(), base.read()):
                problems.append(f"{prefix} {copy.name} differs from the model's own {base.name}")
    chosen_rules = choose(expand(rules, shapes), tensors)
    layers = {_layer(rule): rule.sources for rule in chosen_rules if _is_adaptable(rule)}
    for source, adapter in zip(sources, ranks, strict=True):
        for layer, names in layers.items():
            rank = sum(source.factors[name].rank for name in names if name in source.factors)
            if rank != (wanted := adapter.ranks.get(layer, 0)):
                problems.append(
                    f"adapter {source.name}: wanted rank {wanted} for {layer}, got {rank}"
                )
    steps: list[Step] = []
    for rule in chosen_rules:
        if any(name in source.factors for source in sources for name in rule.sources):
            # the factors of all adapters for this parameter, each with its weight's position
            parts = [
                (position, source.factors[name])
                for source in sources
                for position, name in enumerate(rule.sources)
                if name in source.factors
            ]
            weight_shapes = [tensors[name].shape for name in rule.sources]
            if rule.transform is identity:  # an embedding table: its rows are the inputs
                weight_shapes = [shape[::-1] for shape in weight_shapes]
            for position, pair in parts:
                outputs, inputs = weight_shapes[position]
                for tensor, wanted in (
                    (pair.down, (pair.rank, inputs)),
                    (pair.up, (outputs, pair.rank)),
                ):
                    problems += check_shape([tensor], wanted)
                    problems += check_dtype([tensor], NUMPY_DTYPES)
            steps += _steps(rule, parts, [shape[0] for shape in weight_shapes])
    if problems:
        raise ConversionError(model, problems)
    return steps


def _steps(
    rule: Rule, parts: Sequence[tuple[int, LowRankFactors]], outputs: list[int]
) -> Iterator[Step]:
    """Yield the two steps that make a layer's adapter parameters, down and up.

    The columns of `down` belong to the pairs of factors in `parts`, in this order. With each pair
    comes the position of its weight in `rule.sources`. `outputs` has the number of outputs of each
    of these sources."""
    layer, kind = rule.target.rsplit(".", 1)
    width = len(column_owners([pair.rank for _, pair in parts]))  # the sum of all ranks, padded
    # the up factor of a table is transposed to `[rank, out]`, although the table is not
    transform = transpose if rule.transform is identity else rule.transform

    def down(*downs: np.ndarray) -> np.ndarray:
        """Return all down factors side by side, padded with zeros, as float32 `[in, width]`."""
        columns = np.concatenate([factor.astype(np.float32).T for factor in downs], axis=1)
        return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))

    def up(*ups: np.ndarray) -> np.ndarray:
        """Return all up factors below each other, scaled and padded with zeros, as float32
        `[width, out]`. The outputs of a factor are in the columns that the outputs of its weight
        have in the layer's kernel; the other columns of these rows are zero."""
        rows = []
        for (position, pair), factor in zip(parts, ups, strict=True):
            blocks = [np.zeros((size, factor.shape[1]), np.float32) for size in outputs]
            blocks[position] = factor.astype(np.float32) * np.float32(pair.scale)
            rows.append(transform.apply(*blocks))
        joined = np.concatenate(rows)
        return np.pad(joined, ((0, width - len(joined)), (0, 0)))

    inputs = parts[0][1].down.shape[1]
    for part, apply, shape in (
        (f"down.{kind}", down, (inputs, width)),
        ("up.kernel", up, (width, sum(outputs))),
    ):
        sources = tuple(pair.down if apply is down else pair.up for _, pair in parts)
        # the shapes are not checked here, because plan_adapters has checked them
        made = Transform(apply, lambda sources, shape: [], dtype="float32")
        yield Step(sources, f"{layer}.adapter.{part}", shape, made, last_of=sources)


def adapter_folder(source: Path) -> Path:
    """Return the folder of PEFT's files within that of an adapter, which sentence-transformers may
    have saved."""
    return source / tower_folder(source) if modules_of(source) else source


def read_config(name: str, folder: Path, *, merging: bool = False) -> dict[str, Any]:
    """Read the config of an adapter in the folder of PEFT's files; `merging` is as in
    `_read_adapter`. Raises UnsupportedModel for a setting that is not supported, and
    CheckpointError for a damaged file or a wrong value."""
    try:
        config = read_optional_json(folder / CONFIG, ADAPTER_FIELDS)
    except CheckpointError as error:
        raise CheckpointError(f"adapter {name}: {error}") from error
    refuse_unknown(f"adapter {name}: peft_type", config.get("peft_type"), ("LORA",))
    refuse_unknown(f"adapter {name}: bias", config.get("bias", "none"), ("none",))
    init = config.get("init_lora_weights", True)
    if init not in INITIAL:
        raise UnsupportedModel(
            f"adapter {name}: init_lora_weights {init!r} changes the weights of the base model; "
            "save the adapter with path_initial_model_for_weight_conversion"
        )
    known = READ | HARMLESS | ({"modules_to_save"} if merging else set())
    # an unknown field that is null, false, 0 or empty has no effect
    for field, value in config.items():
        if field not in known and value:
            raise UnsupportedModel(f"adapter {name}: {field} of {value!r} is not supported")
    for pattern in config.get("alpha_pattern") or {}:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"adapter {name}: alpha_pattern {pattern!r} is not a regular expression: {error}"
            ) from error
    return config


def _scale(config: Mapping[str, Any], stem: str, rank: int) -> float:
    """Return the scale of an adapter for the weight `stem`, by which the product of its two factors
    is multiplied: alpha / rank, or with use_rslora alpha / sqrt(rank), as in PEFT."""
    layer, patterns = stem.removesuffix(".weight"), config.get("alpha_pattern") or {}
    alphas = (patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", layer))
    alpha = next(alphas, config.get("lora_alpha", 8))  # 8: PEFT's default
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _bounded(adapter: str, tensor: Tensor, scale: float = 1.0) -> Tensor:
    """Return the tensor with a check: reading it raises CheckpointError if a value times `scale`
    exceeds _LARGEST, which every dtype of a model can hold. Every batch computes the products of
    all adapters, so a value that overflows could spoil sequences that use another adapter."""

    def read() -> np.ndarray:
        array = tensor.read()
        largest = np.abs(array.astype(np.float64)).max(initial=0.0) * abs(scale)
        if not largest <= _LARGEST:  # also refuses NaN
            raise CheckpointError(
                f"adapter {adapter}: {tensor.name} has values up to {largest:g}, with its scale of "
                f"{scale:g}; wanted at most {_LARGEST:g}"
            )
        return array

    return replace(tensor, read=read)


def _split(original: str) -> tuple[str, str]:
    """Return the name of the weight that a tensor belongs to, and the role of the tensor: "down" or
    "up" (a factor), "copy" (takes the place of this tensor of the base model), or "unknown"."""
    name = original.removeprefix(PEFT_PREFIX)
    if _IN_MEMORY.search(name) or name == original:
        return original, "unknown"
    for endings, part in ((DOWN, "down"), (UP, "up")):
        for ending in endings:
            if name.endswith(ending):
                return f"{name.removesuffix(ending)}.weight", part
    is_whole = name.endswith((".weight", ".bias")) and ".lora_" not in name
    return (name.replace(".base_layer.", "."), "copy") if is_whole else (original, "unknown")


def _is_low_rank(parts: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors of a weight, by role, are two factors that fit each other."""
    if parts.keys() != {"down", "up"}:
        return False
    down, up = parts["down"].shape, parts["up"].shape
    return len(down) == len(up) == 2 and down[0] == up[1] > 0


def _layer(rule: Rule) -> str:
    """Return the name of the layer that has the rule's parameter."""
    return rule.target.rpartition(".")[0]


def _is_adaptable(rule: Rule) -> bool:
    """Whether the rule makes a weight, of the backbone or of the head of tokens' vectors, that can
    have an adapter: either each output of a source is one column of the weight, or it is an
    embedding table without a transform."""
    layer, _, kind = rule.target.rpartition(".")
    by_column = kind == "kernel" and rule.transform.by_column
    is_table = kind == "embedding" and rule.transform is identity
    return layer.startswith((BACKBONE, "heads.multi_vector.")) and (by_column or is_table)


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
