"""Conversion of rerankers and classifiers: their heads, labels, and how logits become scores."""

from pathlib import Path
from typing import Any

import pytest
import sources
from sources import converted
from test_families import damaged, unsupported

from converters import outline
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

WIDTH = sources.HIDDEN
HEADS = {
    "BertForSequenceClassification": ("pooler.dense", "classifier"),
    "XLMRobertaForSequenceClassification": ("classifier.dense", "classifier.out_proj"),
}
BERT, ROBERTA = HEADS
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"


def write_scorer(folder: Path, kind: str = BERT, labels: int = 1, **config: Any) -> Path:
    """As transformers saves it: no files of sentence-transformers."""
    base = sources.BERT_CONFIG if kind == BERT else sources.ROBERTA_CONFIG
    prefix = "bert." if kind == BERT else "roberta."
    first, second = HEADS[kind]
    head = sources.head_tensors({first: (WIDTH, WIDTH), second: (WIDTH, labels)})
    tensors = sources.bert_tensors(config=base) | head
    names = {name: name if "classifier" in name else prefix + name for name in tensors}
    named = {"id2label": {str(n): f"LABEL_{n}" for n in range(labels)}, "architectures": [kind]}
    config = base | named | config
    return sources.write_bert(folder, tensors=tensors, rename=names.__getitem__, **config)


def test_several_labels_are_in_the_order_of_their_ids(tmp_path):
    id2label = {"2": "no", "0": "yes", "1": "perhaps"}
    spec = outline(write_scorer(tmp_path / "source", labels=3, id2label=id2label)).spec
    assert (spec.task, spec.labels, spec.dim) == ("classify", ("yes", "perhaps", "no"), 3)
    assert spec.score_function == "softmax"


SIGMOID, OLD = "torch.nn.modules.activation.Sigmoid", "sbert_ce_default_activation_function"


@pytest.mark.parametrize(
    ("labels", "fields", "function"),
    [
        (1, {"problem_type": "regression"}, "sigmoid"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (3, {"sentence_transformers": {"activation_fn": SIGMOID}}, "sigmoid"),
        (3, {OLD: SIGMOID}, "sigmoid"),
        # which gives logits: scored by its labels
        (1, {OLD: "torch.nn.modules.linear.Identity"}, "sigmoid"),
        (3, {OLD: "torch.nn.modules.linear.Identity"}, "softmax"),
    ],
)
def test_labels_are_scored_as_the_config_says(tmp_path, labels, fields, function):
    assert outline(write_scorer(tmp_path, labels=labels, **fields)).spec.score_function == function


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"activation_fn": "torch.nn.modules.activation.ReLU"}, "activation_fn .*ReLU"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "a"}, "default prompt 'a'"),
    ],
)
def test_what_a_cross_encoder_wants_and_we_do_not_run_is_refused(tmp_path, saved, message):
    source = write_scorer(tmp_path / "source", labels=2)
    path = source / "config_sentence_transformers.json"
    sources.write_json(path, {"model_type": "CrossEncoder"} | saved)
    with pytest.raises(UnsupportedModel, match=message):
        converted(source)


MINE = "modeling_x.Mine"


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        unsupported("'regression' with 3 labels is not", labels=3, problem_type="regression"),
        unsupported(f"own code .*AutoModel: {MINE}", kind=ROBERTA, auto_map={"AutoModel": MINE}),
        unsupported(
            f"own code .*AutoModelForSequenceClassification: {MINE}",
            auto_map={"AutoModelForSequenceClassification": MINE},
        ),
        unsupported("nothing says whether .* embeds or scores", architectures=None),
        unsupported("nothing says whether .* embeds or", kind=ROBERTA, architectures=None),
        damaged("id2label", labels=2, id2label={"0": "a", "2": "b"}),
        damaged("id2label", labels=2, id2label={"a": "0"}),
        damaged("id2label", labels=2, id2label=["a", "b"]),
    ],
    ids=str,
)
def test_what_is_not_scored_is_refused_by_name(said, error, message, tmp_path):
    with pytest.raises(error, match=message):
        outline(write_scorer(tmp_path, **said))


BERT_TOKENS = "BertForTokenClassification"


def write_token_classifier(folder: Path, labels: int = 3, **config: Any) -> Path:
    """A BertForTokenClassification as transformers saves it, which has no pooler."""
    backbone = {f"bert.{name}": tensor for name, tensor in sources.bert_tensors().items()}
    tensors = backbone | sources.head_tensors({"classifier": (WIDTH, labels)})
    id2label = {str(n): f"LABEL_{n}" for n in range(labels)}
    config = {"id2label": id2label, "architectures": [BERT_TOKENS]} | config
    return sources.write_bert(folder, tensors=tensors, **config)


def test_a_token_classifier_has_a_layer_on_each_hidden_state(tmp_path):
    source = write_token_classifier(
        tmp_path / "source", id2label={"1": "O", "0": "B-X", "2": "I-X"}
    )
    spec, params = converted(source)
    assert (spec.task, spec.labels, spec.dim) == ("token_classify", ("B-X", "O", "I-X"), 3)
    assert spec.representations == ()
    head = {name for name in params if name.startswith("heads.")}
    assert head == {f"heads.token_logits.modules.0.{name}" for name in ("kernel", "bias")}


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        unsupported(
            "architecture 'MPNetForTokenClassification' is not supported",
            architectures=["MPNetForTokenClassification"],
        ),
        unsupported(
            "own code .*AutoModelForTokenClassification: modeling_x",
            auto_map={"AutoModelForTokenClassification": MINE},
        ),
        damaged("id2label", id2label={"0": "a", "2": "b"}),
    ],
    ids=str,
)
def test_token_classifiers_that_are_not_served_are_refused_by_name(said, error, message, tmp_path):
    with pytest.raises(error, match=message):
        outline(write_token_classifier(tmp_path, **said))


def test_a_dense_path_of_a_model_that_scores_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="dense path '2_Dense' takes the place of a Dense"):
        outline(write_scorer(tmp_path), dense_path="2_Dense")


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_is_not_there_is_listed(tmp_path, kind):
    source = write_scorer(tmp_path / "source", kind)
    sources.write_weights(source, sources.bert_tensors(config=sources.BERT_CONFIG))
    with pytest.raises(ConversionError, match=rf"missing: {HEADS[kind][1]}\.weight"):
        converted(source)


@pytest.mark.parametrize("kind", HEADS)
def test_a_classifier_that_modules_json_pools_is_an_embedder(tmp_path, kind):
    source = write_scorer(tmp_path / "source", kind, labels=2)
    sources.write_modules(source, (sources.TRANSFORMER, ""), (sources.POOLING, "1_Pooling"))
    sources.write_json(source / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    spec, params = converted(source)
    assert (spec.task, spec.head.pooling, spec.head.modules) == ("embed", ("mean",), ())
    assert not any(name.startswith("heads") for name in params)
