"""Reads models that score (cross-encoders, classifiers of texts and of tokens, and language models
that rerank): labels, templates, and how scores are made."""

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from converters import heads
from converters.family import Family, Reranker, Scorer
from converters.features.chat import chat_template, render
from converters.fields import lookup
from converters.heads import MODEL_CONFIG, Layout, read_optional_json
from converters.tokenizers.tokenizer import special_token
from jaxembed.data.spec import (
    DenseLayer,
    PairTemplate,
    PerToken,
    Pooled,
    ScoreFunction,
    scoring_heads,
)
from jaxembed.errors import CheckpointError, UnsupportedModel, counted
from jaxembed.preprocessing.tokenizer import parse_tokenizer

logger = logging.getLogger(__name__)

LABEL = "yes"
RELEVANCE = "relevance"  # the label of a reranker that compares vectors
PROJECTED = 512  # the width of these vectors

# The messages with which sentence-transformers renders the chat template of a pair: "system" is for
# an instruction that differs from the template's own.
ROLES = {"system": "{instruction}", "query": "{query}", "document": "{document}"}

SCORE_FUNCTIONS: dict[str, ScoreFunction | None] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    # sentence-transformers gives raw logits for this one; here the labels choose the function
    "torch.nn.modules.linear.Identity": None,
}


def labels_of(hf: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels of id2label in the order of their ids; LABEL_0 and so on without it. Raises
    CheckpointError unless the ids are 0, 1, ..."""
    named = hf.get("id2label")
    if not named:
        return tuple(f"LABEL_{n}" for n in range(hf.get("num_labels") or 2))  # 2: transformers'
    try:
        by_id = {int(number): str(label) for number, label in named.items()}
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"config.json: id2label {named!r} maps no ids to labels") from error
    if sorted(by_id) != list(range(len(by_id))):
        raise CheckpointError(f"config.json: the ids of id2label are not 0 to {len(by_id) - 1}")
    return tuple(by_id[n] for n in range(len(by_id)))


def scores_layout(
    source: Path,
    hf: dict[str, Any],
    scorer: Scorer,
    labels: tuple[str, ...],
    template: PairTemplate | None = None,
) -> Layout:
    """Return the layout of a model that scores: a reranker has one label, a classifier several.
    Raises UnsupportedModel for settings that are not supported."""
    folder, (logits, rules) = heads.tower_folder(source), scorer
    backbone, padding = source / folder, hf.get("pad_token_id")
    path = backbone / "tokenizer.json"
    if "lasttoken" in logits.pooling and template is None:
        # transformers scores the last token that is not padding, jaxembed the last token
        is_read = padding is not None and path.is_file()
        if is_read and parse_tokenizer(path.read_bytes(), path).encode("a").ids[-1:] == [padding]:
            raise UnsupportedModel(
                f"{backbone}: the tokenizer ends texts with pad_token_id {padding}, so that the "
                "token before it is scored; this is not supported"
            )
    path = source / MODEL_CONFIG
    config = read_optional_json(path)
    name = config.get("default_prompt_name")
    if prompt := name and (config.get("prompts") or {}).get(name):
        # sentence-transformers uses the default prompt of a cross-encoder as its instruction
        if template is None or not template.takes_instruction:
            raise UnsupportedModel(
                f"{path}: default prompt {name!r} is not supported: only a chat template can put "
                "text before a pair"
            )
        template = msgspec.structs.replace(template, instruction=prompt)
    # independent labels have the sigmoid; other labels have the checkpoint's function or softmax
    function, problem = "sigmoid", hf.get("problem_type")
    if len(labels) != 1 and problem != "multi_label_classification":
        if problem == "regression":
            raise UnsupportedModel(
                f"{source}: problem_type 'regression' with {counted(len(labels), 'label')} is "
                "not supported, because several values are not scores from 0 to 1; known: one label"
            )
        said = (
            config.get("activation_fn")
            or (hf.get("sentence_transformers") or {}).get("activation_fn")
            or hf.get("sbert_ce_default_activation_function")
        )
        known = None if said is None else lookup(f"{source}: activation_fn", said, SCORE_FUNCTIONS)
        function = known or "softmax"
    return Layout(
        backbone=folder,
        heads=scoring_heads(logits),
        rules=rules,
        labels=labels,
        score_function=function,
        template=template,
        lowercase=bool(heads.transformer_config(backbone).get("do_lower_case")),
    )


def token_layout(
    source: Path, family: Family, hf: dict[str, Any], width: int, labels: tuple[str, ...]
) -> Layout:
    """Return the layout of a token classifier, whose last layer `classifier` computes the logits of
    a token. `width` is the width of hidden states. Raises UnsupportedModel for settings that are
    not supported."""
    modules, rules = family.token_modules(hf)
    out = DenseLayer(in_features=width, out_features=len(labels), activation="identity")
    return Layout(
        backbone=heads.tower_folder(source),
        heads={"token_logits": PerToken((*modules, out))},
        rules=(*rules, *heads.dense_rules("token_logits", len(modules), out, "classifier")),
        labels=labels,
    )


def reranker_layout(
    source: Path, name: str, family: Family, hf: dict[str, Any], config: dict[str, Any]
) -> Layout:
    """Return the layout of a language model that reranks by answering yes or no: with a LogitScore
    module of sentence-transformers, or one of the published rerankers of its family.

    `name` is that of the model, and `config` that of the backbone. Raises UnsupportedModel for
    another model, and CheckpointError if the ids of the answers are wrong or missing.
    """
    backbone = source / heads.tower_folder(source)
    template = template_of(source, name, family)
    entries = heads.modules_of(source) or ()
    module = next((source / entry.path for entry in entries if entry.kind == "logit_score"), None)
    if module is not None:
        if family.reranker is not None and not family.reranker.answers:
            raise UnsupportedModel(
                f"{module} scores by the logits of tokens, and {hf['model_type']} models by a head"
            )
        settings = read_optional_json(module / "config.json")
        answers: Any = settings.get("true_token_id"), settings.get("false_token_id")
        if answers[1] is None:  # the score is the logit of the first alone
            answers = answers[:1]
        terms = config["vocab_size"]
        if not all(isinstance(token, int) and 0 <= token < terms for token in answers):
            raise CheckpointError(
                f"{module}: true_token_id and false_token_id are "
                f"{' and '.join(map(repr, answers))}, wanted ids below {terms}"
            )
        if template is None and "message" in heads.modalities(backbone):
            raise UnsupportedModel(
                f"{backbone}: the chat template does not take a query and a document; wanted the "
                'roles "query" and "document"'
            )
    elif (published := _published(source, name, family)) is not None:
        path = backbone / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"no tokenizer.json in {backbone}, which a language model needs")
        vocabulary = parse_tokenizer(path.read_bytes(), path)
        answers = [vocabulary.token_to_id(answer) for answer in published.answers]
        if None in answers:
            missing = published.answers[answers.index(None)]
            raise CheckpointError(f"{path} has no token {missing!r}")
    else:
        raise UnsupportedModel(
            f"{name} is a language model, and nothing says that it embeds or reranks: an embedder "
            "has a Pooling in modules.json, a reranker has a LogitScore there, and Qwen3-Reranker, "
            "Qwen3-VL-Reranker, mxbai-rerank and bge-reranker-v2-gemma are recognised by their "
            "names"
        )
    assert family.score_head is not None
    scorer = family.score_head(hf, config, *answers)
    return scores_layout(source, hf, scorer, (LABEL,), template)


def listwise_layout(source: Path, family: Family, hf: dict[str, Any], width: int) -> Layout:
    """Return the layout of a reranker that reads the documents of a query together, and compares
    what its projector makes of their last hidden states. `width` is that of the backbone. Raises
    CheckpointError if a token of the prompt is missing."""
    prompt = next(family.listwise[name] for name in hf["architectures"] if name in family.listwise)
    added = read_optional_json(source / "tokenizer.json").get("added_tokens") or ()
    for token in (prompt.document_token, prompt.query_token):
        if token not in [one["content"] for one in added]:
            raise CheckpointError(f"{source / 'tokenizer.json'} has no added token {token!r}")
    layers = (
        DenseLayer(width, width // 2, bias=False, activation="relu"),
        DenseLayer(width // 2, PROJECTED, bias=False, activation="identity"),
    )
    rules = [
        heads.dense_rules("dense", number, layer, f"projector.{2 * number}")  # 1 is the activation
        for number, layer in enumerate(layers)
    ]
    return Layout(
        backbone="",
        heads={"dense": Pooled(("lasttoken",), layers)},
        rules=tuple(chain.from_iterable(rules)),
        labels=(RELEVANCE,),
        score_function="cosine",
        listwise=prompt,
    )


def template_of(source: Path, name: str, family: Family) -> PairTemplate | None:
    """Return the template of pairs: the chat template of the model; without one, that of the
    published rerankers of its family if the model is one of them; else None.

    A name like "reranker" does not make a model one of them, because with the template of another
    model scores are near random. Raises UnsupportedModel if the model has a chat template for pairs
    that cannot be split, and is none of the published rerankers.
    """
    backbone = source / heads.tower_folder(source)
    takes_plain_text = heads.modalities(backbone) == {"text"}
    published = _published(source, name, family)
    try:
        template = None if takes_plain_text else pair_template(backbone)
    except UnsupportedModel:
        if published is None:
            raise
        template = None
    if template is not None:
        logger.info("%s: pairs are put into its chat template", name)
        return template
    if published is None:
        return None
    logger.info("%s: pairs are put into the template of %s", name, published.name)
    template, bos = published.template, special_token(backbone, "bos_token")
    if "{bos}" not in template.prefix:
        return template
    if bos is None:
        raise CheckpointError(f"{backbone / 'tokenizer_config.json'} has no bos_token")
    return msgspec.structs.replace(template, prefix=template.prefix.replace("{bos}", bos))


def _published(source: Path, name: str, family: Family) -> Reranker | None:
    """Return the published rerankers of the family if the model is one of them, by its name or its
    README.md; else None. If the family has no other models, it is one."""
    published = family.reranker
    if published is None or not published.answers:
        return published
    named = any(published.name in one.lower() for one in (Path(name).name, source.name))
    return published if named or published.quote in heads.readme_of(source) else None


def pair_template(backbone: Path) -> PairTemplate | None:
    """Read the chat template of a model's directory as a PairTemplate.

    Returns None if there is no template, or if it does not take a query and a document. Raises
    UnsupportedModel if it takes both but cannot be split into the fields of a PairTemplate.
    """
    source = chat_template(backbone)
    if source is None:
        return None
    generation = heads.adds_generation_prompt(backbone)
    # the template with the instruction of a request, and with its own instruction
    full, plain = (
        render(source, {role: ROLES[role] for role in roles}, generation=generation)
        for roles in (tuple(ROLES), ("query", "document"))
    )
    if "{query}" not in plain or "{document}" not in plain:
        return None
    # other tokens cannot span an added token, so the text after {document} must begin with one
    added = read_optional_json(backbone / "tokenizer.json").get("added_tokens") or ()
    specials = tuple(token["content"] for token in added)
    template = _cut(full, plain, specials)
    if template is None:
        raise UnsupportedModel(
            f"{backbone}: the chat template is not supported; wanted lines with the instruction "
            "and the query, then the document after a space, then a special token"
        )
    return template


def _cut(full: str, plain: str, specials: tuple[str, ...]) -> PairTemplate | None:
    """Split a rendered template into the parts of a PairTemplate; None if it is not possible.

    `full` has the three placeholders of ROLES. `plain` has the template's own instruction in the
    place of {instruction}.
    """
    if any(full.count(placeholder) != 1 for placeholder in ROLES.values()):
        return None
    # before and after {instruction}; the line of {instruction} begins the part `first`
    before, after = full.split("{instruction}")
    before_document, suffix = full.split("{document}")
    prefix, newline, line_start = before.rpartition("\n")
    first = (
        line_start + "{instruction}" + before_document.removeprefix(before + "{instruction}")
    ).removesuffix(" ")
    # the parts are tokenized separately, so tokens must end where one part ends
    is_clean = (
        before_document.startswith(before)
        and before_document.endswith(" ")
        and first == first.rstrip()
        and line_start == line_start.lstrip()
        and first.count("{") == 2
        and suffix.startswith(specials)
        and plain.startswith(before)
        and plain.endswith(after)
    )
    if not is_clean:
        return None
    return PairTemplate(
        prefix=prefix + newline,
        first=first,
        second=" {document}",
        suffix=suffix,
        instruction=plain.removeprefix(before).removesuffix(after),
    )
