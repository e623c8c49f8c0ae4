"""Reads the labels of a cross-encoder or classifier, and how its logits become scores."""

from pathlib import Path
from typing import Any

import msgspec

from converters.family import Scorer
from converters.fields import chosen
from converters.heads import (
    MODEL_CONFIG,
    Layout,
    read_optional_json,
    tower_folder,
    transformer_config,
)
from jaxembed.data.spec import PairTemplate, ScoreFunction, scoring_heads
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.tokenizer import parse_tokenizer

SCORE_FUNCTIONS: dict[str, ScoreFunction | None] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": None,  # logits, where the library is asked: by the labels
}


def labels_of(hf: dict[str, Any]) -> tuple[str, ...]:
    """id2label in the order of the ids, which are strings; LABEL_0 and so on where it is absent."""
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
    """The layout of a model that scores: a reranker has one label, a classifier several."""
    folder, (logits, rules) = tower_folder(source), scorer
    tower, padding = source / folder, hf.get("pad_token_id")
    path = tower / "tokenizer.json"
    if "lasttoken" in logits.pooling and template is None:
        # transformers scores the last token that is not padding, jaxembed the last token
        is_read = padding is not None and path.is_file()
        if is_read and parse_tokenizer(path.read_bytes(), path).encode("a").ids[-1:] == [padding]:
            raise UnsupportedModel(
                f"{tower}: the tokenizer ends texts with pad_token_id {padding}, so that the token "
                "before it is scored; this is not supported"
            )
    path = source / MODEL_CONFIG
    config = read_optional_json(path)
    name = config.get("default_prompt_name")
    if prompt := name and (config.get("prompts") or {}).get(name):
        # sentence-transformers uses the default prompt of a cross-encoder as its instruction
        if template is None or not template.takes_instruction:
            raise UnsupportedModel(
                f"{path}: default prompt {name!r} is not supported: nothing stands before the "
                "texts of a pair but what a chat template puts there"
            )
        template = msgspec.structs.replace(template, instruction=prompt)
    # independent labels have the sigmoid, others the function that the checkpoint names, or softmax
    function, problem = "sigmoid", hf.get("problem_type")
    if len(labels) != 1 and problem != "multi_label_classification":
        if problem == "regression":
            raise UnsupportedModel(
                f"{source}: problem_type 'regression' with {len(labels)} labels is not supported: "
                "several values are no scores from 0 to 1; known: one label"
            )
        said = config.get("activation_fn")
        said = said or (hf.get("sentence_transformers") or {}).get("activation_fn")
        said = said or hf.get("sbert_ce_default_activation_function")
        known = None if said is None else chosen(f"{source}: activation_fn", said, SCORE_FUNCTIONS)
        function = known or "softmax"
    return Layout(
        tower=folder,
        heads=scoring_heads(logits),
        rules=rules,
        labels=labels,
        score_function=function,
        template=template,
        lowercase=bool(transformer_config(tower).get("do_lower_case")),
    )
