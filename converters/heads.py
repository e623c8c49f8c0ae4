"""Reads the sentence-transformers files of a model: modules, pooling, prompts and limits.

Both old and new spellings are read. A setting that is not supported raises an error that names it.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from converters.fields import (
    FIELDS_BY_FILE,
    MODULE_FIELDS,
    FieldType,
    check_fields,
    lookup,
    refuse_unknown,
)
from converters.router import CONFIG_FILES, ROUTERS, Listed, Router, plain_type, read_router
from converters.weights import Rule, transpose
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import (
    Activation,
    DenseLayer,
    Head,
    Listwise,
    Module,
    NormalizeLayer,
    PairTemplate,
    Pooled,
    Pooling,
    ScoreFunction,
    TanhLayer,
)
from jaxembed.errors import CheckpointError, UnsupportedModel

logger = logging.getLogger(__name__)

# sentence-transformers has moved these classes; a model names them as they were when it was saved.
MODULES = {
    "sentence_transformers.models.Transformer": "transformer",
    "sentence_transformers.base.modules.transformer.Transformer": "transformer",
    "sentence_transformers.models.Pooling": "pooling",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": "pooling",
    "sentence_transformers.models.Dense": "dense",
    "sentence_transformers.base.modules.dense.Dense": "dense",
    "sentence_transformers.models.Normalize": "normalize",
    "sentence_transformers.base.modules.normalize.Normalize": "normalize",
    "sentence_transformers.sentence_transformer.modules.normalize.Normalize": "normalize",
    "sentence_transformers.cross_encoder.modules.logit_score.LogitScore": "logit_score",
    "pylate.models.Dense": "dense",
    "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask": (
        "multi_vector_mask"
    ),
    "sentence_transformers.models.StaticEmbedding": "static",
    "sentence_transformers.models.StaticEmbedding.StaticEmbedding": "static",
    "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding": "static",
    "sentence_transformers.sparse_encoder.models.MLMTransformer": "masked_lm",
    "sentence_transformers.sparse_encoder.modules.mlm_transformer.MLMTransformer": "masked_lm",
    "sentence_transformers.sparse_encoder.models.IDF": "static_terms",
    "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding": "static_terms",
    "sentence_transformers.sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding": (
        "static_terms"
    ),
    "sentence_transformers.sparse_encoder.models.SpladePooling": "splade",
    "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling": "splade",
}
# Patterns of the supported chains of modules: first those of embedders and sparse encoders, then
# those of cross-encoders and multi-vector models, which a route of a Router cannot have.
EMBEDDERS = re.compile(
    "transformer, pooling(, (dense|normalize))*(, tanh)?|static(, (dense|normalize))*"
    "|masked_lm, splade|static_terms"
)
OTHERS = re.compile(
    "transformer(, logit_score)?"
    "|transformer(, normalize)*, (dense|multi_vector_mask)(, (dense|multi_vector_mask|normalize))*"
)
# Module classes of a model's own code, by this class and the code of the backbone that config.json
# names: the kinds of modules that do the same, each with the settings that the code fixes.
OWN_MODULES: dict[tuple[str, str], dict[str, dict[str, Any] | None]] = {
    (
        "custom_st.Transformer",
        "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA",
    ): {"transformer": None},
    ("st_quantize.FlexibleQuantizer", "modeling.PPLXQwen3Model"): {"tanh": {}},
}
# Models of a class of transformers that only code in README.md makes embedders: the class, words
# that every such README.md has, and by a name for the code, part of the models' names and words.
CODED_CLASS = "Qwen2VLForConditionalGeneration"
PAGE = "What is shown in this image?"
README_CODES = {
    "readme.DSE": ("dse-qwen2", "max_pixels = 2560*28*28"),
    "readme.MCDSE": ("mcdse", "max_pixels = 960 * 28 * 28"),
    "readme.VDR": ("vdr-2b", "vdr-2b"),
}
# The pooling in a model's own code, which also normalises, if modules.json does not list modules of
# sentence-transformers.
OWN_POOLINGS: dict[str, Pooling] = {
    **dict.fromkeys(README_CODES, "lasttoken"),
    "modeling_gme_qwen2vl.GmeQwen2VL": "lasttoken",
    "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model": "mean",
    "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model": "lasttoken",
}
# Flags of pooling modes, in the order in which sentence-transformers concatenates their vectors.
POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_NAMES: dict[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "lasttoken",
}

DENSE_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",  # sentence-transformers builds it without options
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}

TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

# Arguments for torch or the loader that do not change the results.
HARMLESS_ARGS = {
    "add_pooling_layer",
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "local_files_only",
    "low_cpu_mem_usage",
    "revision",
    "token",
    "torch_dtype",
    "trust_remote_code",
    "use_memory_efficient_attention",
    "use_safetensors",
    "unpad_inputs",
}

FILL_MASK = "fill-mask"  # the task of a transformer whose logits SpladePooling gets
TRANSFORMER_TASKS = (
    "feature-extraction",
    "sequence-classification",
    "text-generation",
    "any-to-any",
    FILL_MASK,
)
WITH_GENERATION = {"chat_template": {"add_generation_prompt": True}}

MODEL_CONFIG = "config_sentence_transformers.json"

MEAN: tuple[Pooling, ...] = ("mean",)

HUGE = 1_000_000  # transformers writes 1e30 for "no limit"

Projection = tuple[DenseLayer, str]  # a linear layer, and its tensors' name without ".weight"


@dataclass(frozen=True)
class ModuleEntry:
    """One entry of modules.json."""

    kind: str  # a value of MODULES, or a kind in OWN_MODULES
    path: str  # its folder within the source
    settings: Mapping[str, Any] | None = None  # what the model's own code has for its config.json

    def config(self, source: Path) -> dict[str, Any]:
        """Read its settings; empty if there are none. Raises CheckpointError if config.json is
        damaged or a field has a wrong type."""
        if self.settings is not None:
            return dict(self.settings)
        return module_config(source / self.path)


@dataclass(frozen=True)
class Layout:
    """The parts of a model besides its backbone, and how its inputs are prepared."""

    backbone: str  # folder of the transformer within the source; "" is the source itself
    heads: dict[OutputName, Head]  # as in ModelSpec
    rules: tuple[Rule, ...] = ()  # rules for the parameters of the heads
    folders: tuple[str, ...] = ()  # folders of modules with weights, within the source
    files: tuple[str, ...] = ()  # torch files of heads; their tensors are `<file>/<name>`
    ignored: tuple[str, ...] = ()  # patterns of further tensors that are not used
    labels: tuple[str, ...] = ()
    score_function: ScoreFunction = "softmax"
    template: PairTemplate | None = None
    listwise: Listwise | None = None
    include_prompt: bool = True
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    lowercase: bool = False


def read_layout(
    source: Path,
    hidden_size: int,
    dense_path: str | None = None,
    route: str = "",
    projection: Projection | None = None,
    *,
    in_chat: bool = False,
) -> Layout:
    """Read the layout of an embedder from modules.json and the files that it names. Without
    modules.json the pooling is the mean, as in sentence-transformers.

    `dense_path` replaces the path of the only Dense module. `route` is one of the Router's, or "".
    `projection` is a linear layer of the backbone itself, which every token goes through before the
    pooling. `in_chat` says that texts are put into the chat template. Raises UnsupportedModel for a
    model that is no embedder or has settings that are not supported, and CheckpointError for wrong
    files.
    """
    width = hidden_size if projection is None else projection[0].out_features
    modules, include_prompt = modules_of(source, route), True
    pooling: Sequence[Pooling] = MEAN
    if modules is None:
        logger.warning(
            "%s has no modules.json: its vectors are pooled by the mean and not normalised", source
        )
        modules = [ModuleEntry("transformer", ""), ModuleEntry("pooling", "")]
    elif "pooling" not in kinds_of(source, route):
        raise UnsupportedModel(
            f"{source}: modules.json has no Pooling, so it is not an embedder, and the class in "
            "config.json does not score"
        )
    else:
        folder = source / modules[1].path  # of Pooling, which Dense and Normalize may follow
        config = modules[1].config(source)
        if not config:
            raise CheckpointError(f"{folder} has no config.json: wanted a pooling mode")
        widths = {"word_embedding_dimension", "embedding_dimension"}
        known = {*widths, *POOLING_FLAGS, "pooling_mode", "include_prompt"}
        if unknown := set(config) - known:
            raise UnsupportedModel(
                f"{folder}: pooling with {', '.join(sorted(unknown))} is not supported"
            )
        for key in widths & set(config):
            if config[key] != width:
                raise CheckpointError(f"{folder}: {key} is {config[key]}, the model's {width}")
        if "pooling_mode" in config:
            setting = config["pooling_mode"]
            modes: list[str] = [setting] if isinstance(setting, str) else list(setting or ())
            if not modes or not set(modes) <= POOLING_NAMES.keys():
                raise UnsupportedModel(
                    f"{folder}: pooling {setting!r} is not supported; known: "
                    f"{', '.join(POOLING_NAMES)}"
                )
            pooling = [POOLING_NAMES[mode] for mode in modes]
        else:  # if no flag is true, sentence-transformers takes the mean
            pooling = [POOLING_FLAGS[flag] for flag in POOLING_FLAGS if config.get(flag)] or MEAN
        include_prompt = bool(config.get("include_prompt", True))
    if not in_chat:
        refuse_chat_template(source / modules[0].path)
    layout = pooled_layout(source, modules[0], tuple(pooling), modules[2:], width, dense_path)
    if projection is not None:
        layout = _with_projection(layout, *projection)
    lowercase = bool(transformer_config(source / modules[0].path).get("do_lower_case"))
    return replace(layout, include_prompt=include_prompt, lowercase=lowercase)


def pooled_layout(
    source: Path,
    backbone: ModuleEntry,
    pooling: tuple[Pooling, ...],
    later: list[ModuleEntry],
    hidden_size: int,
    dense_path: str | None,
) -> Layout:
    """Return the layout of an embedder with the modules `later` after its pooling. `dense_path`, if
    not None, replaces the path of the only Dense module."""
    later = _with_dense_path(source, later, dense_path)
    layers = tuple(layer_of(source, module) for module in later)
    check_widths(layers, hidden_size * len(pooling))
    prompts, default_prompt_name = read_prompts(source)
    dense = [(n, entry.path) for n, entry in enumerate(later) if isinstance(layers[n], DenseLayer)]
    rules = [dense_rules("dense", n, layers[n], f"{folder}/linear") for n, folder in dense]
    return Layout(
        backbone=backbone.path,
        heads={"dense": Pooled(pooling, layers)},
        rules=tuple(chain.from_iterable(rules)),
        folders=tuple(folder for _, folder in dense),
        prompts=prompts,
        default_prompt_name=default_prompt_name,
    )


def _with_projection(layout: Layout, layer: DenseLayer, tensor: str) -> Layout:
    """Return the layout of an embedder whose backbone ends with a linear layer. The layer follows
    the pooling here, because the mean of its outputs is its output for the mean. Raises
    UnsupportedModel for other poolings and for a Dense module behind it."""
    head = layout.heads["dense"]
    assert isinstance(head, Pooled)
    if head.pooling != MEAN or layer.bias or layout.folders:
        raise UnsupportedModel(
            f"the backbone ends with the linear layer {tensor}, which is supported without bias, "
            f"with mean pooling and without a Dense module; the pooling is "
            f"{' and '.join(head.pooling)}"
        )
    head = Pooled(MEAN, (layer, *head.modules))
    return replace(
        layout, heads={"dense": head}, rules=tuple(dense_rules("dense", 0, layer, tensor))
    )


def parameter_of(head: OutputName, number: int, name: str) -> str:
    """Return the name in a checkpoint of a parameter of module `number` of a head."""
    return f"heads.{head}.modules.{number}.{name}"


def dense_rules(head: OutputName, number: int, layer: Module, tensor: str) -> list[Rule]:
    """Return the rules for the linear layer that is module `number` of a head. `tensor` is the name
    of its tensors without ".weight" and ".bias"."""
    kernel = Rule(f"{tensor}.weight", parameter_of(head, number, "kernel"), transpose)
    bias = Rule(f"{tensor}.bias", parameter_of(head, number, "bias"))
    return [kernel, bias] if isinstance(layer, DenseLayer) and layer.bias else [kernel]


def kinds_of(source: Path, route: str = "") -> list[str]:
    """Return the kinds of the modules of a model or a route, which are values of MODULES; empty
    without modules."""
    return [module.kind for module in modules_of(source, route) or ()]


def tower_folder(source: Path, route: str = "") -> str:
    """Return the folder of the transformer within the source; "" is the source itself."""
    modules = modules_of(source, route)
    return modules[0].path if modules else ""


def module_folders(source: Path, dense_path: str | None = None) -> list[str]:
    """Return the folders, within `source`, of modules with weights. Reads only JSON files."""
    folders: list[str] = []
    for route in routes_of(source):
        modules = modules_of(source, route)
        if modules is None:
            folders.append("")
            continue
        later = _with_dense_path(source, modules[1:], dense_path)
        folders += [modules[0].path, *(entry.path for entry in later if entry.kind == "dense")]
    return list(dict.fromkeys(folders))


def token_limit(
    backbone: Path, positions: int | None, otherwise: int | None = None, *, late: bool = False
) -> int:
    """Return the maximum number of tokens of an input: the first of max_seq_length,
    model_max_length, `positions` and `otherwise` that is set, but at most `positions`, the size of
    the table of positions.

    `late` is for multi-vector models. Raises CheckpointError for a limit below 1, or no limit.
    """
    limits = {
        "max_seq_length": transformer_config(backbone, late=late).get("max_seq_length"),
        "model_max_length": read_optional_json(backbone / "tokenizer_config.json").get(
            "model_max_length"
        ),
        "max_position_embeddings": positions,
    }
    for name, limit in limits.items():
        if not isinstance(limit, int | float) or isinstance(limit, bool) or limit >= HUGE:
            continue
        if limit < 1:
            raise CheckpointError(f"{name} is {limit} in {backbone}, wanted at least 1")
        if positions is not None and limit > positions:
            logger.warning(
                "%s is %d, and the model has %d positions; inputs are truncated to these",
                name,
                limit,
                positions,
            )
            return positions
        return int(limit)
    if otherwise is not None:
        return otherwise
    raise CheckpointError(
        f"{backbone} does not limit the tokens of an input; set max_seq_length in its config"
    )


def transformer_config(backbone: Path, *, late: bool = False) -> dict[str, Any]:
    """Read sentence_bert_config.json under any of its names; empty if there is none.

    Raises UnsupportedModel for a setting that is not supported. `late` allows the settings of
    multi-vector models: lengths and query expansion.
    """
    paths = (backbone / name for name in TRANSFORMER_CONFIGS)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return {}
    config = read_optional_json(path)
    task = config.get("transformer_task") or TRANSFORMER_TASKS[0]
    refuse_unknown(f"{path}: transformer_task", task, TRANSFORMER_TASKS)
    lengths = () if late else ("query_length", "document_length", "query_expansion")
    refused = [name for name in lengths if config.get(name)]
    if config.get("processing_kwargs") not in (None, {}, WITH_GENERATION):
        refused.append("processing_kwargs")
    for name in ("model", "tokenizer", "config"):
        for key in (f"{name}_args", f"{name}_kwargs", "processor_kwargs"):
            refused += [f"{key}.{arg}" for arg in config.get(key) or {} if arg not in HARMLESS_ARGS]
    if refused:
        raise UnsupportedModel(f"{path}: not supported: {', '.join(sorted(set(refused)))}")
    return config


def adds_generation_prompt(backbone: Path) -> bool:
    """Return whether the chat template of pairs ends with the beginning of an answer."""
    return transformer_config(backbone).get("processing_kwargs") == WITH_GENERATION


def modalities(backbone: Path, *, late: bool = False) -> set[str]:
    """Return the kinds of input that the model takes, such as "text"; empty if the model was saved
    by sentence-transformers before 6.0. "message" stands for texts in the chat template."""
    return set(transformer_config(backbone, late=late).get("modality_config") or ())


def refuse_chat_template(backbone: Path, *, late: bool = False) -> None:
    """Raise UnsupportedModel if an embedder puts its texts into a chat template."""
    if "message" in modalities(backbone, late=late):
        raise UnsupportedModel(
            f"{backbone}: texts are put into a chat template (modality_config has message), which "
            "is not supported for embedding; known: text"
        )


def read_optional_json(path: Path, types: Mapping[str, FieldType] | None = None) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is no file. `types` are types of fields in
    addition to those in FIELDS_BY_FILE. Raises CheckpointError if the file is damaged, or a field
    does not have its type."""
    if not path.is_file():
        return {}
    content = _json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: wanted a JSON object")
    check_fields(str(path), content, {**FIELDS_BY_FILE.get(path.name, {}), **(types or {})})
    return content


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CheckpointError(f"{path} is damaged: {error}") from error


def router_of(source: Path) -> Router | None:
    """Return the Router that modules.json begins with, or None if it begins with another module.
    Raises CheckpointError if the Router has no config, and the errors of `read_router`."""
    listed = listed_modules(source)  # pairs of type and folder
    if not listed or listed[0][0] not in ROUTERS:
        return None
    folder = listed[0][1]
    for name in CONFIG_FILES:
        if config := read_optional_json(source / folder / name):
            return read_router(str(source / folder / name), config, folder, listed[1:])
    raise CheckpointError(f"{source / folder} has no {CONFIG_FILES[0]}: wanted the routes")


def routes_of(source: Path) -> list[str]:
    """Return the names of the routes; [""] for a model without a Router."""
    router = router_of(source)
    return [""] if router is None else list(router.routes)


def modules_of(source: Path, route: str = "") -> list[ModuleEntry] | None:
    """Return the modules of a model, or of one route, in order; None if neither modules.json nor
    OWN_POOLINGS has any. Raises UnsupportedModel for an unknown kind, and for a chain that is not
    supported."""
    path, listed = source / "modules.json", listed_modules(source)
    if not listed or listed[0][0] not in MODULES:
        pooling = OWN_POOLINGS.get(_own_code(source).rpartition("--")[2])
        if pooling is not None:
            settings = {"transformer": None, "pooling": {"pooling_mode": pooling}, "normalize": {}}
            return [ModuleEntry(kind, "", config) for kind, config in settings.items()]
    router = router_of(source) if route else None
    if router is not None:
        listed = router.routes[route]
    if listed is None:
        return None
    modules = [module for kind, folder in listed for module in _modules(path, kind, folder)]
    kinds = ", ".join(module.kind for module in modules)
    if not EMBEDDERS.fullmatch(kinds) and (route or not OTHERS.fullmatch(kinds)):
        raise UnsupportedModel(
            f"{path}: modules {kinds or '(none)'}{f' of route {route!r}' if route else ''} are not "
            "supported; wanted transformer, pooling, then any of dense and normalize; static, then "
            "any of those; of a sparse encoder masked_lm, splade, or static_terms; of a "
            "cross-encoder transformer, then perhaps logit_score; of a multi-vector model "
            "transformer, then any of dense, multi_vector_mask and normalize"
        )
    return modules


def listed_modules(source: Path) -> Listed | None:
    """Return the type and the folder of each entry of modules.json; None without the file. Raises
    CheckpointError if it is damaged, or a folder lies outside the model."""
    path = source / "modules.json"
    if not path.is_file():
        return None
    try:
        listed = [(plain_type(entry["type"]), entry.get("path", "")) for entry in _json(path)]
        for _, folder in listed:
            _check_within(path, folder)
        return listed
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: wanted a list of type and path") from error


def _modules(path: Path, type_name: str, folder: str) -> list[ModuleEntry]:
    """Return the entries for a type and a folder in modules.json, whose path is `path`: one, or of
    a model's own class perhaps several. Raises UnsupportedModel for an unknown type, and
    CheckpointError for a folder outside the model."""
    if type_name not in MODULES:
        if own := OWN_MODULES.get((type_name, _own_code(path.parent))):
            return [ModuleEntry(kind, folder, settings) for kind, settings in own.items()]
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in MODULES}))
        raise UnsupportedModel(f"{path}: module {type_name!r} is not supported; known: {known}")
    _check_within(path, folder)
    name, folder = MODULES[type_name], "" if folder == "." else folder
    if name == "transformer":
        config = transformer_config(path.parent / folder, late=True)
        name = "masked_lm" if config.get("transformer_task") == FILL_MASK else name
    return [ModuleEntry(name, folder)]


def model_config(folder: Path, types: Mapping[str, FieldType] | None = None) -> dict[str, Any]:
    """Return the content of config.json; empty without the file. If only code in README.md makes
    the model an embedder, auto_map names this code, by its key in README_CODES. `types` and errors
    are those of `read_optional_json`. Raises UnsupportedModel if README.md and the folder's name
    tell different codes."""
    hf = read_optional_json(folder / "config.json", types)
    if hf.get("architectures") != [CODED_CLASS] or hf.get("auto_map"):
        return hf
    text = readme_of(folder)
    named = {code for code, (name, _) in README_CODES.items() if name in folder.name.lower()}
    read = {code for code, (_, words) in README_CODES.items() if PAGE in text and words in text}
    codes = named & read or named | read
    if len(codes) > 1:
        names = ", ".join(README_CODES[code][0] for code in sorted(codes))
        raise UnsupportedModel(
            f"{folder}: README.md and the folder's name are those of {names}, whose templates "
            "differ; leave one of them"
        )
    return hf | {"auto_map": {"AutoModel": codes.pop()}} if codes else hf


def readme_of(folder: Path) -> str:
    """Return the content of README.md; empty without the file."""
    readme = folder / "README.md"
    return readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""


def _own_code(source: Path) -> str:
    """Return the class of the model's own code in the folder `source`; "" if it has none."""
    codes = model_config(source).get("auto_map")
    return str(codes.get("AutoModel", "")) if isinstance(codes, dict) else ""


def _check_within(path: Path, folder: str) -> None:
    """Raise CheckpointError if a folder in the file `path` lies outside the model."""
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise CheckpointError(f"{path}: path {folder!r} leads outside the model")


def _with_dense_path(
    source: Path, modules: list[ModuleEntry], dense_path: str | None
) -> list[ModuleEntry]:
    """Return the modules. If `dense_path` is not None, it replaces the path of the only Dense
    module. Raises CheckpointError if it is given and the model has no or several Dense modules."""
    if dense_path is None:
        return modules
    dense = [module for module in modules if module.kind == "dense"]
    if len(dense) != 1:
        raise CheckpointError(
            f"dense path {dense_path!r} takes the place of the only Dense module, and {source} "
            f"has {len(dense)}; leave it out"
        )
    path = source / "modules.json"
    _check_within(path, dense_path)
    replacement = ModuleEntry("dense", "" if dense_path == "." else dense_path)
    return [replacement if module.kind == "dense" else module for module in modules]


def layer_of(source: Path, module: ModuleEntry, applied_to: str = "sentence_embedding") -> Module:
    """Read a module that follows the pooling. `applied_to` is the kind of vectors that the module
    must take and return: "sentence_embedding" or "token_embeddings". Raises UnsupportedModel and
    CheckpointError."""
    folder, config = source / module.path, module.config(source)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, applied_to):
            raise UnsupportedModel(
                f"{folder}: {key}={config[key]!r} is not supported; known: {applied_to}"
            )
    if module.kind == "normalize":
        return NormalizeLayer()
    if module.kind == "tanh":
        return TanhLayer()
    missing = [k for k in ("in_features", "out_features") if not isinstance(config.get(k), int)]
    if missing:
        raise CheckpointError(f"{folder / 'config.json'} lacks {', '.join(missing)}")
    # the default of sentence-transformers is Tanh
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    layer = DenseLayer(
        in_features=config["in_features"],
        out_features=config["out_features"],
        bias=bool(config.get("bias", True)),
        activation=lookup(f"{folder}: activation", name, DENSE_ACTIVATIONS),
        residual=bool(config.get("use_residual")),
    )
    if layer.residual and applied_to == "sentence_embedding":
        raise UnsupportedModel(f"{folder}: use_residual is not supported")
    return layer


def module_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a module; empty if there is none. Raises CheckpointError if the file
    is damaged or a field has a wrong type."""
    return read_optional_json(folder / "config.json", MODULE_FIELDS)


def check_widths(layers: tuple[Module, ...], width: int) -> None:
    """Raise CheckpointError if a Dense module takes vectors of another width than it gets. `width`
    is the width of the vectors before the first layer."""
    for layer in layers:
        if isinstance(layer, DenseLayer):
            if layer.in_features != width:
                raise CheckpointError(
                    f"a Dense module takes {layer.in_features} features and gets {width}"
                )
            width = layer.out_features


def read_prompts(
    source: Path, wanted: str = "SentenceTransformer"
) -> tuple[dict[str, str], str | None]:
    """Read config_sentence_transformers.json: the prompts by name, and the default prompt's name.

    If the file names a class of sentence-transformers, it must be `wanted`. Raises
    UnsupportedModel for another class, and CheckpointError for an unknown default prompt.
    """
    path = source / MODEL_CONFIG
    config = read_optional_json(path)
    kind = config.get("model_type") or wanted
    if kind != wanted:
        raise UnsupportedModel(f"{path}: a {kind} is not supported; known: {wanted}")
    if config.get("truncate_dim") is not None:
        raise UnsupportedModel(
            f"{path}: truncate_dim={config['truncate_dim']} is not supported; remove it and ask "
            "for `dimensions` in the request"
        )
    prompts = {str(name): text or "" for name, text in (config.get("prompts") or {}).items()}
    for route in filter(None, routes_of(source)):  # the name of a prompt selects the route
        prompts.setdefault(route, "")
    default = config.get("default_prompt_name")
    if default in ("query", "document"):  # prompts that sentence-transformers gives all models
        prompts.setdefault(default, "")
    if default is not None and default not in prompts:
        known = ", ".join(prompts) or "none"
        raise CheckpointError(
            f"{path}: default prompt {default!r} is not among the prompts: {known}"
        )
    return prompts, default
