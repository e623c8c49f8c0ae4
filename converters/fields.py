"""The types and bounds of fields of config.json and similar files, functions that check them, and
readers of the fields that several families have.

Each family itself checks whether values fit each other and its backbone supports them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxembed.data.spec import Activation
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.platform.files import shown

GLOBAL_LAYER, LOCAL_LAYER = "full_attention", "sliding_attention"  # values in layer_types

HF_ACTIVATIONS: dict[str, Activation] = {  # transformers' name of an activation -> jaxembed's name
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

_MAX_SIZE = 2**24  # maximum of widths, heads, tokens and rows of tables
_MAX_LAYERS = 1000
_MAX_FACTOR = 1_000_000  # maximum factor of position scaling: float32 has seven digits
_LARGEST = 1e30  # of any number: float32 ends at 3.4e38, and factors are multiplied


@dataclass(frozen=True)
class FieldType:
    """What a field may hold. If `null` is true, this includes null, which each family handles."""

    wanted: str  # description for messages
    type: Any  # type for msgspec
    # if the field holds an object: the types of some of its fields
    fields: Mapping[str, "FieldType"] = field(default_factory=dict)
    null: bool = True


def _whole(low: int, high: int) -> FieldType:
    return FieldType(f"a whole number from {low} to {high}", Annotated[int, Meta(ge=low, le=high)])


def _not_null(kind: FieldType) -> FieldType:
    return replace(kind, null=False)


_FINITE = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
_OVER_0 = Annotated[float, Meta(gt=0, le=_LARGEST)]

_SIZE, _COUNT, _COUNT_OR_NONE = _whole(1, _MAX_SIZE), _whole(0, _MAX_SIZE), _whole(-1, _MAX_SIZE)
_LAYERS = _whole(1, _MAX_LAYERS)
_NUMBER = FieldType("a finite number", _FINITE)
_POSITIVE = FieldType("a number over 0", _OVER_0)
_NOT_NEGATIVE = FieldType("a number of at least 0", Annotated[float, Meta(ge=0, le=_LARGEST)])
_FACTOR = FieldType(
    f"a number over 0, at most {_MAX_FACTOR}", Annotated[float, Meta(gt=0, le=_MAX_FACTOR)]
)
_BASE = FieldType("a number over 1", Annotated[float, Meta(gt=1, le=_LARGEST)])
_EPSILON = _not_null(FieldType("a number from 0 to 1", Annotated[float, Meta(ge=0, le=1)]))
_SWITCH = FieldType("true or false", bool)
_NAME = FieldType("a string", str)
_NAMES = FieldType("a list of strings", list[str])
_ONE_OR_MORE_NAMES = FieldType("a string or a list of strings", str | list[str])
_FACTORS = FieldType("a list of numbers over 0", list[_OVER_0])
_OBJECT = FieldType("a JSON object", dict[str, Any])


_CONTENT = Annotated[str, Meta(min_length=1)]


class AddedTokenFields(msgspec.Struct):
    """A special token with its flags, as tokenizer_config.json has it."""

    content: _CONTENT
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    special: bool = False


_TOKEN = FieldType("a token, or an object with its content", _CONTENT | AddedTokenFields)
_TOKENS = FieldType("a list of tokens", list[_CONTENT | AddedTokenFields])
_TOKENS_BY_ID = FieldType(
    "an object of tokens by id",
    dict[Annotated[str, Meta(pattern=r"^\d{1,8}$")], AddedTokenFields],
)

_ROPE_FIELDS = {
    "attention_factor": _POSITIVE,
    "beta_fast": _NOT_NEGATIVE,
    "beta_slow": _NOT_NEGATIVE,
    "factor": _FACTOR,
    "high_freq_factor": _POSITIVE,
    "llama_4_scaling_beta": _NOT_NEGATIVE,
    "long_factor": _FACTORS,
    "low_freq_factor": _POSITIVE,
    "max_position_embeddings": _SIZE,
    "mrope_section": FieldType("a list of numbers of pairs of dimensions", list[_SIZE.type]),
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "original_max_position_embeddings": _SIZE,
    "partial_rotary_factor": _POSITIVE,
    "rope_theta": _BASE,
    "rope_type": _NAME,
    "short_factor": _FACTORS,
    "truncate": _SWITCH,
    "type": _NAME,
}
_ROPE = FieldType(_OBJECT.wanted, _OBJECT.type, _ROPE_FIELDS)
_ROPE_BY_LAYERS = FieldType(
    _OBJECT.wanted,
    _OBJECT.type,
    _ROPE_FIELDS | {"full_attention": _ROPE, "sliding_attention": _ROPE},
)

_TWO_SIZES = FieldType("two whole numbers over 0", tuple[_SIZE.type, _SIZE.type])
# Fields of quantization_config, for all methods, and of the weights of its config_groups.
_QUANTIZATION_FIELDS = {
    "bits": _SIZE,
    "checkpoint_format": _NAME,
    "config_groups": FieldType("an object of JSON objects by name", dict[str, dict[str, Any]]),
    "desc_act": _SWITCH,
    "dynamic": _OBJECT,
    "format": _NAME,
    "group_size": _COUNT_OR_NONE,
    "quant_method": _NAME,
    "sparsity_config": _OBJECT,
    "weight_block_size": _TWO_SIZES,
}
QUANTIZED_WEIGHT_FIELDS = {
    "block_structure": _TWO_SIZES,
    "group_size": _COUNT_OR_NONE,
    "strategy": _NAME,
    "symmetric": _SWITCH,
}

# Fields of config.json, for all families, because a key has the same meaning in each family.
CONFIG_FIELDS = {
    "activation": _NAME,
    "activation_function": _NAME,
    "add_cross_attention": _SWITCH,
    "architectures": _NAMES,
    "attention_bias": _SWITCH,
    "attn_logit_softcapping": _POSITIVE,
    "auto_map": _OBJECT,
    "classifier_activation": _NAME,
    "classifier_bias": _SWITCH,
    "classifier_pooling": _NAME,
    "conv_act": _NAME,
    "conv_groups": _SIZE,
    "conv_kernel_size": _COUNT_OR_NONE,
    "cutoff_layer": _SIZE,
    "d_ff": _SIZE,
    "d_kv": _SIZE,
    "d_model": _SIZE,
    "decoder_bias": _SWITCH,
    "deepstack_visual_indexes": FieldType("a list of numbers of layers", list[_COUNT.type]),
    "depth": _LAYERS,
    "dim": _SIZE,
    "dtype": _NAME,
    "embed_dim": _SIZE,
    "embedding_dim": _SIZE,
    "embedding_size": _SIZE,
    "eos_token_id": _COUNT,
    "feed_forward_proj": _NAME,
    "final_logit_softcapping": _POSITIVE,
    "fullatt_block_indexes": FieldType("a list of numbers of layers", list[_COUNT.type]),
    "global_attn_every_n_layers": _not_null(_SIZE),
    "global_rope_theta": _BASE,
    "head_dim": _SIZE,
    "head_multi": _SWITCH,
    "head_type": _NAME,
    "hidden_act": _NAME,
    "hidden_activation": _NAME,
    "hidden_dim": _SIZE,
    "hidden_size": _SIZE,
    "id2label": FieldType("an object of names by id", dict[str, str | int] | None),
    "image_size": _SIZE,
    "image_token_id": _COUNT,
    "image_token_index": _COUNT,
    "in_channels": _SIZE,
    "inner_group_num": _whole(1, 32),
    "intermediate_size": _SIZE,
    "is_causal": _SWITCH,
    "is_decoder": _SWITCH,
    "layer_norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "layer_sep": _not_null(_SIZE),
    "layer_types": _NAMES,
    "layer_wise": _SWITCH,
    "local_attention": _not_null(_COUNT),
    "local_rope_theta": _BASE,
    "lora_adaptations": _NAMES,
    "lora_alpha": _NUMBER,
    "lora_rank": _SIZE,
    "max_image_tokens": _not_null(_SIZE),
    "max_position_embeddings": _SIZE,
    "max_relative_positions": _not_null(_COUNT_OR_NONE),
    "max_trained_positions": _SIZE,
    "max_window_layers": _not_null(_COUNT),
    "min_image_tokens": _not_null(_SIZE),
    "mlp_bias": _SWITCH,
    "mlp_fc1_bias": _SWITCH,
    "mlp_fc2_bias": _SWITCH,
    "mlp_ratio": _POSITIVE,
    "model_type": _NAME,
    "multi_vector_projector_dim": _SIZE,
    "n_embd": _SIZE,
    "n_head": _SIZE,
    "n_heads": _SIZE,
    "n_inner": _SIZE,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "n_positions": _SIZE,
    "moe_every_n_layers": _COUNT,
    "moe_top_k": _COUNT,
    "norm_bias": _SWITCH,
    "norm_eps": _EPSILON,
    "norm_rel_ebd": _not_null(_ONE_OR_MORE_NAMES),
    "normalize": _SWITCH,
    "num_attention_heads": _SIZE,
    "num_channels": _SIZE,
    "num_experts": _whole(0, _MAX_LAYERS),
    "num_heads": _SIZE,
    "num_hidden_groups": _LAYERS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _SIZE,
    "num_labels": _whole(0, 2**20),
    "num_layers": _LAYERS,
    "num_patches": _SIZE,
    "num_position_embeddings": _SIZE,
    "original_max_position_embeddings": _SIZE,
    "out_hidden_size": _SIZE,
    "pad_token_id": _COUNT_OR_NONE,
    "pad_vocab_size_multiple": _SIZE,
    "partial_rotary_factor": _POSITIVE,
    "patch_size": _SIZE,
    "pooler_hidden_act": _NAME,
    "pooling": _NAME,
    "pos_att_type": FieldType(_ONE_OR_MORE_NAMES.wanted, _ONE_OR_MORE_NAMES.type | None),
    "position_biased_input": _SWITCH,
    "position_buckets": _not_null(_COUNT_OR_NONE),
    "position_embedding_type": _NAME,
    "problem_type": _NAME,
    "projection_dim": _SIZE,
    "projection_size": _SIZE,
    "qkv_proj_bias": _SWITCH,
    "quantization_config": FieldType(_OBJECT.wanted, _OBJECT.type, _QUANTIZATION_FIELDS),
    "query_pre_attn_scalar": _not_null(_POSITIVE),
    "relative_attention": _SWITCH,
    "relative_attention_max_distance": _not_null(_SIZE),
    "relative_attention_num_buckets": _not_null(_SIZE),
    "rms_norm_eps": _EPSILON,
    "rope_local_base_freq": _BASE,
    "rope_parameters": _ROPE_BY_LAYERS,
    "rope_scaling": _ROPE_BY_LAYERS,
    "rope_theta": _BASE,
    "rotary_emb_base": _BASE,
    "rotary_scaling_factor": _FACTOR,
    "sbert_ce_default_activation_function": _NAME,
    "scale_depth": _not_null(_POSITIVE),
    "scale_emb": _not_null(_POSITIVE),
    "sentence_transformers": FieldType(_OBJECT.wanted, _OBJECT.type, {"activation_fn": _NAME}),
    "share_att_key": _SWITCH,
    "single_vector_pool_strategy": _NAME,
    "sliding_window": _COUNT,
    "sliding_window_pattern": _SIZE,
    "_sliding_window_pattern": _SIZE,
    "spatial_merge_size": _SIZE,
    "start_layer": _not_null(_COUNT),
    "task_instructions": FieldType("an object of strings by name", dict[str, str | None]),
    "task_names": _NAMES,
    "temperature": _NOT_NEGATIVE,
    "temporal_patch_size": _SIZE,
    "text_config": _OBJECT,
    "text_config_dict": _OBJECT,
    "tie_word_embeddings": _SWITCH,
    "tokenizer_class": _NAME,
    "torch_dtype": _NAME,
    "type_vocab_size": _not_null(_COUNT),
    "use_bidirectional_attention": _SWITCH,
    "use_sliding_window": _SWITCH,
    "vision_config": _OBJECT,
    "vision_config_dict": _OBJECT,
    "vision_end_token_id": _COUNT,
    "vision_start_token_id": _COUNT,
    "vision_use_head": _SWITCH,
    "vlm_config": _OBJECT,
    "vocab_size": _SIZE,
    "window_size": _SIZE,
}

# Fields of the config.json of a module of sentence-transformers.
MODULE_FIELDS = {
    "activation_function": _NAME,
    "bias": _not_null(_SWITCH),
    "chunk_size": _COUNT_OR_NONE,
    "embedding_dimension": _SIZE,
    "frozen": _SWITCH,
    "in_features": _SIZE,
    "include_prompt": _not_null(_SWITCH),
    "out_features": _SIZE,
    "path": _NAME,
    "pooling_mode": _ONE_OR_MORE_NAMES,
    "pooling_mode_cls_token": _SWITCH,
    "pooling_mode_lasttoken": _SWITCH,
    "pooling_mode_max_tokens": _SWITCH,
    "pooling_mode_mean_sqrt_len_tokens": _SWITCH,
    "pooling_mode_mean_tokens": _SWITCH,
    "pooling_mode_weightedmean_tokens": _SWITCH,
    "pooling_strategy": _NAME,
    "use_residual": _SWITCH,
    "word_embedding_dimension": _SIZE,
}

# Fields of multi-vector models: those of config_sentence_transformers.json as PyLate writes it, and
# those of the transformer's config as sentence-transformers writes it.
EXPANSION_FIELDS = {
    "attend": _SWITCH,
    "length": _SIZE,
    "strategy": _NAME,
    "token": _NAME,
}
LATE_FIELDS = {
    "attend_to_expansion_tokens": _SWITCH,
    "do_lower_case": _SWITCH,
    "do_query_expansion": _SWITCH,
    "document_length": _SIZE,
    "document_prefix": _NAME,
    "query_expansion": FieldType(_OBJECT.wanted, _OBJECT.type, EXPANSION_FIELDS),
    "query_length": _SIZE,
    "query_prefix": _NAME,
    "similarity_fn_name": _NAME,
    "skiplist_words": _NAMES,
}
MASK_FIELDS = {
    "keep_only_token_ids": FieldType("a list of ids", list[int]),
    "skiplist_tasks": _ONE_OR_MORE_NAMES,
    "skiplist_words": _NAMES,
}
# Fields of artifact.metadata, as Stanford's colbert writes it.
ARTIFACT_FIELDS = {
    "attend_to_mask_tokens": _SWITCH,
    "dim": _SIZE,
    "doc_maxlen": _SIZE,
    "doc_token_id": _NAME,
    "interaction": _NAME,
    "mask_punctuation": _SWITCH,
    "query_maxlen": _SIZE,
    "query_token_id": _NAME,
    "similarity": _NAME,
}

# Fields of other files, by name of the file.
FIELDS_BY_FILE = {
    "config_sentence_transformers.json": {
        "activation_fn": _NAME,
        "default_prompt_name": _NAME,
        "max_active_dims": _SIZE,
        "model_type": _NAME,
        "prompts": FieldType("an object of strings by name", dict[str, str | None]),
    },
    "processor_config.json": {
        "query_prefix": _not_null(_NAME),
        "visual_prompt_prefix": _not_null(_NAME),
    },
    "tokenizer_config.json": {"model_input_names": _NAMES, "tokenizer_class": _NAME},
}

# Fields of tokenizer_config.json and special_tokens_map.json, and the content of added_tokens.json.
TOKENIZER_FIELDS = {
    "add_bos_token": _SWITCH,
    "add_eos_token": _SWITCH,
    "add_prefix_space": _SWITCH,
    "added_tokens": FieldType("an object of ids by token", dict[_CONTENT, _COUNT.type]),
    "added_tokens_decoder": _TOKENS_BY_ID,
    "additional_special_tokens": _TOKENS,
    "bos_token": _TOKEN,
    "cls_token": _TOKEN,
    "do_lower_case": _SWITCH,
    "eos_token": _TOKEN,
    "extra_ids": _COUNT,
    "extra_special_tokens": FieldType(
        "tokens in a list or by name",
        list[_CONTENT | AddedTokenFields] | dict[str, _CONTENT | AddedTokenFields],
    ),
    "keep_accents": _SWITCH,
    "legacy": _SWITCH,
    "mask_token": _TOKEN,
    "pad_token": _TOKEN,
    "sep_token": _TOKEN,
    "sp_model_kwargs": _OBJECT,
    "split_by_punct": _SWITCH,
    "unk_token": _TOKEN,
}

# Fields of adapter_config.json.
ADAPTER_FIELDS = {
    "alpha_pattern": FieldType("an object of numbers by pattern", dict[str, _FINITE]),
    "bias": _NAME,
    "lora_alpha": _not_null(_NUMBER),
    "peft_type": _NAME,
    "use_rslora": _SWITCH,
}


# Fields of an image processor, as preprocessor_config.json has it.
_SMALL = Annotated[float, Meta(gt=-1e6, lt=1e6)]
_PER_COLOUR = FieldType("three numbers below a million", tuple[_SMALL, _SMALL, _SMALL])
PROCESSOR_FIELDS = {
    "image_mean": _PER_COLOUR,
    "image_std": _PER_COLOUR,
    "rescale_factor": FieldType("a number below a million", _SMALL),
}


# Fields of open_clip_config.json.
_TOWER_SIZES = {
    **dict.fromkeys(("width", "heads", "head_width", "patch_size", "image_size"), _SIZE),
    **dict.fromkeys(("context_length", "vocab_size"), _SIZE),
    "layers": _LAYERS,
    "mlp_ratio": _FACTOR,
    "eos_id": _COUNT,
    "pool_type": _NAME,
    "hf_tokenizer_name": _NAME,
    "tokenizer_kwargs": _OBJECT,
}
_TOWER = FieldType(_OBJECT.wanted, _OBJECT.type, _TOWER_SIZES)
_COLOURS = FieldType(
    "a number or three", _SMALL | Annotated[list[_SMALL], Meta(min_length=3, max_length=3)]
)
OPEN_CLIP_FIELDS = {
    "model_cfg": FieldType(
        _OBJECT.wanted,
        _OBJECT.type,
        {"embed_dim": _SIZE, "quick_gelu": _SWITCH, "vision_cfg": _TOWER, "text_cfg": _TOWER},
    ),
    "preprocess_cfg": FieldType(
        _OBJECT.wanted,
        _OBJECT.type,
        {"mean": _COLOURS, "std": _COLOURS, "interpolation": _NAME, "resize_mode": _NAME},
    ),
}

# Fields of the two halves in the config.json of jina-clip.
JINA_CLIP_FIELDS = {
    "text_config": {
        "embed_dim": _SIZE,
        "hf_model_config_kwargs": FieldType(_OBJECT.wanted, _OBJECT.type, CONFIG_FIELDS),
        "hf_model_name_or_path": _NAME,
        "default_lora_task": _NAME,
    },
    "vision_config": {
        **_TOWER_SIZES,
        "embed_dim": _SIZE,
        "pt_hw_seq_len": _SIZE,
        "intp_freq": _SWITCH,
    },
}


def check_fields(
    where: str, values: Mapping[str, Any], types: Mapping[str, FieldType], prefix: str = ""
) -> None:
    """Raise CheckpointError for the first of the `values` with a wrong type or out of bounds.

    `types` are by field; other fields are ignored. The message names the file `where`. `prefix` is
    the name of the field that contains `values`, with a dot.
    """
    for key, kind in types.items():
        value = values.get(key)
        if key not in values or (value is None and kind.null):
            continue
        try:
            msgspec.convert(value, kind.type)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"{where}: {prefix}{key} is {shown(value)}, wanted {kind.wanted}"
            ) from error
        if value is not None and kind.fields:
            check_fields(where, value, kind.fields, f"{prefix}{key}.")


def require(hf: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise CheckpointError unless all keys have integers. The message names those without."""
    missing = [key for key in keys if not isinstance(hf.get(key), int)]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")


def given(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {key: value for key, value in hf.items() if value is not None}


def check_multiple(hf: Mapping[str, Any], key: str, divisor: str) -> None:
    """Raise CheckpointError unless the field `key` is a multiple of the field `divisor`."""
    if hf[key] % hf[divisor]:
        raise CheckpointError(f"{key} {hf[key]} is not a multiple of {divisor} {hf[divisor]}")


def refuse_unknown(what: str, value: Any, known: Collection[Any]) -> None:
    """Raise UnsupportedModel unless the value is one of `known`. The message lists these, and calls
    the value `what`."""
    if value not in known:
        names = ", ".join(map(str, known))
        raise UnsupportedModel(f"{what} {value!r} is not supported; known: {names}")


def lookup(what: str, name: Any, table: Mapping[Any, Any]) -> Any:
    """Return the value of `name` in a table. Raises UnsupportedModel if it is not there, with a
    message that lists the known names and calls the name `what`."""
    refuse_unknown(what, name, table)
    return table[name]


def activation_of(hf: dict[str, Any], key: str, default: str = "gelu") -> Activation:
    """Return the activation that the field `key` names. Raises UnsupportedModel for another one."""
    return lookup(key, hf.get(key, default), HF_ACTIVATIONS)


def either(hf: dict[str, Any], first: str, second: str, default: Any = None) -> Any:
    """Return the value of a field that has two names, or `default` if neither is there.

    Raises CheckpointError if both are there and differ.
    """
    values = [hf[key] for key in (first, second) if hf.get(key) is not None]
    if values[1:] and values[0] != values[1]:
        raise CheckpointError(
            f"config.json: {first} is {values[0]!r} and {second} {values[1]!r}, which must agree"
        )
    return values[0] if values else default


def layers_of_kind(hf: dict[str, Any], kind: str) -> list[int] | None:
    """Return the numbers of the layers whose entry in layer_types is `kind`; None without
    layer_types, which transformers 4 does not write.

    Raises UnsupportedModel for an unknown kind, and CheckpointError unless each layer has an entry.
    """
    kinds, layers = hf.get("layer_types"), hf["num_hidden_layers"]
    if kinds is None:
        return None
    if unknown := sorted({*map(str, kinds)} - {GLOBAL_LAYER, LOCAL_LAYER}):
        raise UnsupportedModel(
            f"layer_types {', '.join(unknown)} are not supported; known: {GLOBAL_LAYER}, "
            f"{LOCAL_LAYER}"
        )
    if len(kinds) != layers:
        raise CheckpointError(f"{len(kinds)} layer_types for num_hidden_layers {layers}")
    return [number for number, listed in enumerate(kinds) if listed == kind]


def even_head_width(hidden: int, heads: int) -> int:
    """Return the width of an attention head. It must be even, because rotary embedding rotates
    pairs of elements. Raises CheckpointError if `hidden` does not split into such heads."""
    width, rest = divmod(hidden, heads)
    if rest or width % 2:
        raise CheckpointError(
            f"hidden_size {hidden} does not split into num_attention_heads {heads} of even width"
        )
    return width


def refuse_unless(hf: dict[str, Any], supported: Mapping[str, Sequence[Any]]) -> None:
    """Raise UnsupportedModel for the first field whose value is not among the supported ones.

    A missing field is supported.
    """
    for key, values in supported.items():
        if key in hf and hf[key] not in values:
            known = ", ".join(str(value) for value in values if value is not None)
            raise UnsupportedModel(f"{key} {hf[key]!r} is not supported; known: {known or 'none'}")
