"""Converts Jina's XLM-RoBERTa with flash attention: jina-embeddings-v3 with its adapters for tasks,
and jina-reranker-v2."""

from typing import Any

from converters.families import bert, roberta
from converters.families.rope import rope_fields
from converters.family import BuiltIn, Family
from converters.fields import refuse_unknown
from converters.weights import Rule, transpose
from jaxembed.errors import CheckpointError

# The models' own code, which the backbone replaces.
_REPOS = (
    "",
    "jinaai/jina-reranker-v2-base-multilingual--",
    "jinaai/xlm-roberta-flash-implementation--",
)
_MODELS = (
    *(f"{repo}modeling_xlm_roberta.XLMRobertaModel" for repo in _REPOS),
    *(f"{repo}modeling_lora.XLMRobertaLoRA" for repo in _REPOS),
)
_CLASSIFIER = "modeling_xlm_roberta.XLMRobertaForSequenceClassification"

LAYER = "encoder.layers.{i}"
TARGET = "tower.layers.{i}"

THETA = 20000.0  # default base of the rotary angles


def is_flash(hf: dict[str, Any]) -> bool:
    """Return whether a config of XLM-RoBERTa is of this family, which names tensors differently."""
    codes = hf.get("auto_map") or {}
    own = any(str(code).endswith("XLMRobertaFlashConfig") for code in codes.values())
    return own or hf.get("position_embedding_type") == "rotary"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. Raises UnsupportedModel, CheckpointError."""
    is_native = hf.get("model_type") == "jina_embeddings_v3"
    positions = "rotary" if is_native else hf.get("position_embedding_type") or "absolute"
    refuse_unknown("position_embedding_type", positions, ("rotary", "absolute"))
    # bert.config and roberta.config refuse rotary positions
    plain = hf | {"position_embedding_type": "absolute"}
    if positions == "absolute":
        return roberta.config(plain)
    fields = bert.config(plain)
    head_width = fields["hidden_size"] // fields["num_heads"]
    return fields | rope_fields(hf, head_width, hf.get("rotary_emb_base") or THETA)


def built_in(hf: dict[str, Any]) -> BuiltIn | None:
    """Return the adapters that the model's own tensors hold; None if there are none. Raises
    CheckpointError if config.json has no lora_rank or no lora_alpha."""
    names = hf.get("lora_adaptations")
    if not names:
        return None
    rank, alpha = hf.get("lora_rank"), hf.get("lora_alpha")
    if rank is None or alpha is None:
        raise CheckpointError(
            f"config.json: lora_adaptations without a lora_rank over 0 and a lora_alpha; they are "
            f"{rank!r} and {alpha!r}"
        )
    instructions = hf.get("task_instructions") or {}
    prompts = {name: instructions.get(name) or "" for name in names}
    return BuiltIn(tuple(names), rank, alpha / rank, prompts)


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=(
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaLoRA",
        "JinaEmbeddingsV3Model",
        "JinaEmbeddingsV3ForMaskedLM",
    ),
    classifiers=(
        "XLMRobertaForSequenceClassification",
        "JinaEmbeddingsV3ForSequenceClassification",
    ),
    own_code={
        "AutoModel": _MODELS,
        "AutoModelForSequenceClassification": (
            *_MODELS,
            *(f"{repo}{_CLASSIFIER}" for repo in _REPOS),
        ),
    },
    prefixes=("roberta.",),
    renames={"parametrizations.weight.original": "weight"},  # the name of a weight with adapters
    rules=(
        Rule("embeddings.word_embeddings.weight", "tower.embeddings.word.embedding"),
        Rule("embeddings.position_embeddings.weight", "tower.embeddings.position.embedding"),
        Rule("embeddings.token_type_embeddings.weight", "tower.embeddings.type.embedding"),
        Rule("emb_ln.weight", "tower.embeddings.norm.scale"),
        Rule("emb_ln.bias", "tower.embeddings.norm.bias"),
        Rule(f"{LAYER}.mixer.Wqkv.weight", f"{TARGET}.attention.qkv.kernel", transpose),
        Rule(f"{LAYER}.mixer.Wqkv.bias", f"{TARGET}.attention.qkv.bias"),
        Rule(f"{LAYER}.mixer.out_proj.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{LAYER}.mixer.out_proj.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.norm1.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{LAYER}.norm1.bias", f"{TARGET}.attention_norm.bias"),
        Rule(f"{LAYER}.mlp.fc1.weight", f"{TARGET}.mlp.up.kernel", transpose),
        Rule(f"{LAYER}.mlp.fc1.bias", f"{TARGET}.mlp.up.bias"),
        Rule(f"{LAYER}.mlp.fc2.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.mlp.fc2.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.norm2.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.norm2.bias", f"{TARGET}.mlp_norm.bias"),
    ),
    ignored=roberta.FAMILY.ignored,
    config=config,
    built_in=built_in,
    is_variant=is_flash,
    classifier=roberta.FAMILY.classifier,
)
