"""Reads multi-vector models (ColBERT), which compare texts token by token, as Stanford's code,
PyLate and sentence-transformers save them: markers, lengths, query expansion, skipped tokens."""

import logging
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from converters import heads
from converters.fields import (
    ARTIFACT_FIELDS,
    CONFIG_FIELDS,
    EXPANSION_FIELDS,
    LATE_FIELDS,
    MASK_FIELDS,
    TOKENIZER_FIELDS,
    check_fields,
    given,
    refuse_unknown,
)
from converters.heads import MODEL_CONFIG, Layout
from converters.weights import Rule, transpose
from jaxembed.data.spec import (
    DenseLayer,
    Expansion,
    LateInteraction,
    ModelSpec,
    Module,
    NormalizeLayer,
    PerToken,
)
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import position_limit

logger = logging.getLogger(__name__)

STANFORD = "HF_ColBERT"  # among the architectures in config.json
STANFORD_FILE = "artifact.metadata"
STANFORD_PROJECTION = "linear.weight"
PYLATE, SENTENCE_TRANSFORMERS = "ColBERT", "MultiVectorEncoder"  # values of model_type
PYLATE_KEYS = ("query_prefix", "document_prefix", "do_query_expansion", "skiplist_words")

# Defaults of the formats: of ColBERTConfig in Stanford's colbert 0.2, and of
# pylate.models.ColBERT.
QUERY_LENGTH = 32
STANFORD_DOCUMENT_LENGTH, PYLATE_DOCUMENT_LENGTH = 220, 180
STANFORD_WIDTH = 128
STANFORD_MARKERS = ("[unused0]", "[unused1]")
PYLATE_MARKERS = {"query": "[Q] ", "document": "[D] "}
PUNCTUATION = tuple(string.punctuation)

SIMILARITIES = (None, "cosine", "dot", "maxsim", "meanmaxsim")  # all of them are served by MaxSim
SHORTEST_TEXT = 4  # tokens: one of text, a marker, and a special token on either side
MASK_TOKENS = ("[MASK]", "<mask>")  # tried if the files of the tokenizer name no mask token


@dataclass(frozen=True)
class TokenizationSettings:
    """How a checkpoint tokenizes texts, with tokens as text: `with_interaction` finds their ids.

    A length of None is the limit of the model. `prompts` are put before a text. `prefixes` has the
    marker of each role; if it is None, a prompt may begin with a marker.
    """

    prompts: Mapping[str, str]
    prefixes: Mapping[str, str] | None
    query_length: int | None
    document_length: int | None
    fills_to: int | None = None  # tokens that queries are filled up to; None: no filling
    filler: str | None = None  # the augmentation token; None: the mask token
    attended: bool = False  # whether tokens attend to augmentation tokens
    skipped: tuple[str, ...] = ()  # tokens of documents without a vector
    default_prompt_name: str | None = None


def is_multi_vector(source: Path) -> bool:
    """Whether a model compares texts token by token, according to its config files."""
    config = heads.read_optional_json(source / MODEL_CONFIG)
    kind = config.get("model_type")
    if kind in (PYLATE, SENTENCE_TRANSFORMERS):
        return True
    listed = heads.listed_modules(source)
    # without model_type PyLate's own keys decide; any other model_type is another kind of model
    if kind is not None or (listed is not None and any(key in config for key in PYLATE_KEYS)):
        return kind is None
    hf = heads.read_optional_json(source / "config.json", CONFIG_FIELDS)
    # Stanford's format, unless modules.json pools the vectors
    is_stanford = STANFORD in (hf.get("architectures") or ())
    return is_stanford and (listed is None or "pooling" not in heads.kinds_of(source))


def read_late_layout(source: Path, hidden_size: int) -> tuple[Layout, TokenizationSettings]:
    """Read the layout of a multi-vector model, and how texts are tokenized: from modules.json, or
    without it from the file of Stanford's code.

    Raises UnsupportedModel, which names what is not supported, and CheckpointError.
    """
    if heads.listed_modules(source) is None:
        return _stanford(source, hidden_size)
    modules = heads.modules_of(source)
    assert modules
    kinds = [module.kind for module in modules]
    if not {*kinds[1:]} <= {"dense", "multi_vector_mask", "normalize"}:
        raise UnsupportedModel(
            f"{source}: modules {', '.join(kinds)} of a multi-vector model are not supported; "
            "wanted transformer, then any of dense, multi_vector_mask and normalize"
        )
    path = source / MODEL_CONFIG
    settings = heads.read_optional_json(path, LATE_FIELDS)
    _refuse_similarity(path, settings.get("similarity_fn_name"))
    if settings.get("truncate_dim") is not None:
        raise UnsupportedModel(
            f"{path}: truncate_dim={settings['truncate_dim']} is not supported; remove it and ask "
            "for `dimensions` in the request"
        )
    is_native = settings.get("model_type") == SENTENCE_TRANSFORMERS
    backbone = source / modules[0].path
    transformer = heads.transformer_config(backbone, late=True)
    check_fields(str(backbone), transformer, LATE_FIELDS)
    heads.refuse_chat_template(backbone, late=True)
    tokenization = _tokenization(source, settings, transformer if is_native else None)
    layers: list[Module] = []
    folders: list[str] = []
    rules: list[Rule] = []
    for module in modules[1:]:
        folder = source / module.path
        if module.kind == "multi_vector_mask":
            mask = heads.read_optional_json(folder / "config.json", MASK_FIELDS)
            if mask.get("keep_only_token_ids"):
                raise UnsupportedModel(f"{folder}: keep_only_token_ids is not supported")
            skipped, tasks = mask.get("skiplist_words") or (), mask.get("skiplist_tasks")
            if skipped and tasks not in (None, "document", ["document"]):
                raise UnsupportedModel(
                    f"{folder}: skiplist_tasks {tasks!r} is not supported; known: ['document']"
                )
            tokenization = replace(tokenization, skipped=tuple(skipped))
            continue
        layer = heads.layer_of(source, module, "token_embeddings")
        if isinstance(layer, DenseLayer):
            tensor = f"{module.path}/linear"
            rules += heads.dense_rules("multi_vector", len(layers), layer, tensor)
            if layer.projects_residual:
                target = heads.parameter_of("multi_vector", len(layers), "residual.kernel")
                rules.append(Rule(f"{module.path}/residual.weight", target, transpose))
            folders.append(module.path)
        layers.append(layer)
    if not is_native:
        layers.append(NormalizeLayer())  # PyLate normalizes without a module
    heads.check_widths(tuple(layers), hidden_size)
    layout = Layout(
        backbone=modules[0].path,
        heads={"multi_vector": PerToken(tuple(layers))},
        rules=tuple(rules),
        folders=tuple(folders),
        ignored=(STANFORD_PROJECTION,),  # repositories that have both formats also have this one
        lowercase=bool(transformer.get("do_lower_case")),
    )
    return layout, tokenization


def with_interaction(
    spec: ModelSpec, words: TokenizationSettings, tokenizer: bytes, folder: Path
) -> ModelSpec:
    """Return the spec with the ids of the tokens that `words` has as text (markers, augmentation
    token, skipped tokens), and with limits of tokens. `tokenizer` is the content of tokenizer.json,
    and `folder` has the tokenizer's files. Raises CheckpointError and UnsupportedModel."""
    vocabulary = Tokenizer.from_str(tokenizer.decode())
    prompts = dict(words.prompts)
    markers: dict[str, int | None] = {}
    for role in ("query", "document"):
        prompt = prompts.get(role, "")
        if words.prefixes is None:
            markers[role], prompts[role] = _leading_marker(prompt, vocabulary)
        else:
            markers[role], rest = _marker(words.prefixes[role], vocabulary)
            prompts[role] = rest + prompt
    positions = position_limit(spec)
    query_length, document_length = (
        _length(folder, length, positions) for length in (words.query_length, words.document_length)
    )
    expansion, length = None, words.fills_to  # the length of a query with augmentation tokens
    if length is not None:
        if positions is not None and length > positions:
            raise CheckpointError(
                f"{folder}: queries are filled up to {length} tokens, and there are {positions} "
                "positions"
            )
        reach = spec.config.get("local_reach")  # tokens that a local layer sees on either side
        if not words.attended and reach is not None and length > reach:
            raise UnsupportedModel(
                f"{folder}: queries are filled up to {length} tokens that no token attends to, and "
                f"some layers see only {reach} tokens on either side: a filler might see none"
            )
        token = words.filler or _filler(folder, vocabulary)
        token_id = vocabulary.token_to_id(token)
        if token_id is None:
            raise CheckpointError(
                f"{folder}: queries are filled up with {token!r}, which is not a token of the model"
            )
        expansion = Expansion(token_id, length, words.attended)
    interaction = LateInteraction(
        query_length, document_length, markers["query"], markers["document"], expansion
    )
    head = spec.heads["multi_vector"]
    assert isinstance(head, PerToken)
    ids = [vocabulary.token_to_id(word) for word in words.skipped]
    head = msgspec.structs.replace(head, skipped_ids=tuple(id for id in ids if id is not None))
    return msgspec.structs.replace(
        spec,
        heads={"multi_vector": head},
        interaction=interaction,
        token_types=False,
        prompts=prompts,
        default_prompt_name=words.default_prompt_name or "document",
        max_input_tokens=max(query_length, document_length),
    )


def _stanford(source: Path, hidden_size: int) -> tuple[Layout, TokenizationSettings]:
    """Read the layout, and how texts are tokenized, of a model that Stanford's code saved."""
    path = source / STANFORD_FILE
    config = given(heads.read_optional_json(path, ARTIFACT_FIELDS))
    _refuse_similarity(path, config.get("similarity"))
    refuse_unknown(f"{path}: interaction", config.get("interaction", "colbert"), ("colbert",))
    width = config.get("dim", STANFORD_WIDTH)
    layer = DenseLayer(hidden_size, width, bias=False, activation="identity")
    target = heads.parameter_of("multi_vector", number=0, name="kernel")
    layout = Layout(
        backbone="",
        heads={"multi_vector": PerToken((layer, NormalizeLayer()))},
        rules=(Rule(STANFORD_PROJECTION, target, transpose),),
    )
    query_length = config.get("query_maxlen", QUERY_LENGTH)
    tokenization = TokenizationSettings(
        prompts={},
        prefixes={
            "query": config.get("query_token_id", STANFORD_MARKERS[0]),
            "document": config.get("doc_token_id", STANFORD_MARKERS[1]),
        },
        query_length=query_length,
        document_length=config.get("doc_maxlen", STANFORD_DOCUMENT_LENGTH),
        fills_to=query_length,
        attended=bool(config.get("attend_to_mask_tokens")),
        skipped=PUNCTUATION if config.get("mask_punctuation", True) else (),
    )
    return layout, tokenization


def _tokenization(
    source: Path, settings: dict[str, Any], transformer: dict[str, Any] | None
) -> TokenizationSettings:
    """Return how texts are tokenized. `settings` are those of config_sentence_transformers.json.
    `transformer` is the transformer's config, which sentence-transformers reads as well; None for
    PyLate. Raises CheckpointError and UnsupportedModel."""
    settings = given(settings)
    prompts = {str(name): text or "" for name, text in (settings.get("prompts") or {}).items()}
    default = settings.get("default_prompt_name")
    if default is not None and default not in {"query", "document", *prompts}:
        raise CheckpointError(
            f"{source / MODEL_CONFIG}: default prompt {default!r} is not among the prompts: "
            f"{', '.join(prompts) or 'none'}"
        )
    if transformer is not None:
        tokenization = TokenizationSettings(
            prompts=prompts,
            prefixes=None,
            query_length=transformer.get("query_length"),
            document_length=transformer.get("document_length"),
            default_prompt_name=default,
        )
        expansion = transformer.get("query_expansion")
        if expansion is None:
            return tokenization
        unknown = sorted(set(expansion) - set(EXPANSION_FIELDS))
        strategy, fills_to = expansion.get("strategy"), expansion.get("length")
        if unknown or strategy not in ("fixed", "min"):
            what = f"query_expansion.{unknown[0]}" if unknown else f"strategy {strategy!r}"
            raise UnsupportedModel(f"{source}: {what} is not supported; known: fixed, min")
        if fills_to is None:
            raise CheckpointError(
                f"{source}: query_expansion lacks length, wanted a number of tokens"
            )
        length = tokenization.query_length
        if length is not None and length < fills_to:
            raise CheckpointError(
                f"{source}: query_length {length} is less than the {fills_to} tokens that "
                "query_expansion fills queries up to"
            )
        return replace(  # "fixed" also truncates queries to its length
            tokenization,
            query_length=fills_to if strategy == "fixed" else length,
            fills_to=fills_to,
            filler=expansion.get("token"),
            attended=bool(expansion.get("attend")),
        )
    prefixes = {
        role: settings.get(f"{role}_prefix", marker) for role, marker in PYLATE_MARKERS.items()
    }
    for role, prefix in prefixes.items():
        prompts[role] = prompts.get(role, "").removeprefix(prefix)
    query_length = settings.get("query_length", QUERY_LENGTH)
    skipped = settings.get("skiplist_words")
    return TokenizationSettings(
        prompts=prompts,
        prefixes=prefixes,
        query_length=query_length,
        document_length=settings.get("document_length", PYLATE_DOCUMENT_LENGTH),
        fills_to=query_length if settings.get("do_query_expansion", True) else None,
        attended=bool(settings.get("attend_to_expansion_tokens")),
        skipped=PUNCTUATION if skipped is None else tuple(skipped),
        default_prompt_name=default,
    )


def _marker(prefix: str, vocabulary: Tokenizer) -> tuple[int | None, str]:
    """Return the id of the token that a prefix is or begins with, and the rest of the prefix.
    Without such a token return None and the prefix, which sentence-transformers takes for text."""
    if not prefix.strip():
        return None, ""
    for token in (prefix, prefix.split(None, 1)[0]):
        token_id = vocabulary.token_to_id(token)
        if token_id is not None:
            return token_id, prefix.removeprefix(token).lstrip()
    return None, prefix


def _leading_marker(prompt: str, vocabulary: Tokenizer) -> tuple[int | None, str]:
    """Return the id of the added token that a prompt begins with, and the rest of the prompt.
    Without such a token return None and the whole prompt. The token ids are those of
    sentence-transformers, which tokenizes the whole prompt."""
    added = [token.content for token in vocabulary.get_added_tokens_decoder().values()]
    leading = max((token for token in added if prompt.startswith(token)), key=len, default=None)
    if leading is None:
        return None, prompt
    return vocabulary.token_to_id(leading), prompt.removeprefix(leading)


def _length(folder: Path, length: int | None, positions: int | None) -> int:
    """Return the maximum number of tokens of queries or documents. It is `length`, or the limit of
    the model if `length` is None, but at most `positions`. Raises CheckpointError for a length
    below SHORTEST_TEXT."""
    if length is None:
        length = heads.token_limit(folder, positions, late=True)
    if length < SHORTEST_TEXT:
        raise CheckpointError(
            f"{folder}: the length of queries or documents is {length}, wanted at least "
            f"{SHORTEST_TEXT}"
        )
    if positions is not None and length > positions:
        logger.warning(
            "%s: the length of queries or documents is %d, and the model has %d positions; inputs "
            "are truncated to these",
            folder,
            length,
            positions,
        )
        return positions
    return length


def _filler(folder: Path, vocabulary: Tokenizer) -> str:
    """Return the augmentation token, which queries are filled up with: the mask token, else the end
    token, as in PyLate. Raises CheckpointError if there is neither."""
    for name in ("mask_token", "eos_token"):
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            stated = heads.read_optional_json(folder / file, TOKENIZER_FIELDS)
            if (token := stated.get(name)) is not None:
                return str(token["content"] if isinstance(token, dict) else token)
        if name == "mask_token":
            for token in MASK_TOKENS:  # these are tried before the end token
                if vocabulary.token_to_id(token) is not None:
                    return token
    raise CheckpointError(
        f"{folder}: queries are filled up with the mask token, and tokenizer_config.json names none"
    )


def _refuse_similarity(path: Path, name: str | None) -> None:
    """Raise UnsupportedModel for a similarity other than MaxSim."""
    if (None if name is None else name.lower()) not in SIMILARITIES:
        known = ", ".join(filter(None, SIMILARITIES))
        raise UnsupportedModel(f"{path}: similarity {name!r} is not supported; known: {known}")
