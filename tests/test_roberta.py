"""RoBERTa, XLM-R and CamemBERT: BERT whose positions are counted from the pad token's id.

Its numbers are compared with torch's by the goldens.
"""

from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import sources

from converters import convert, outline, roberta
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import position_limit
from jaxembed.models.bert import positions_after_pad
from jaxembed.models.tokens import PackedTokens
from jaxembed.spec import ModelSpec


def converted(folder: Path, **options) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """An XLM-R embedder; `options` as for write_bert, the fields of its config among them."""
    options = sources.ROBERTA_CONFIG | options
    config = {key: value for key, value in options.items() if key in sources.ROBERTA_CONFIG}
    options.setdefault("tensors", sources.bert_tensors(config=config))
    source = sources.write_sentence_bert(folder / "source", **options)
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


def of_transformers(ids: np.ndarray, pad: int) -> np.ndarray:
    """create_position_ids_from_input_ids of one sequence."""
    real = (ids != pad).astype(int)
    return np.cumsum(real) * real + pad


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_positions_are_those_of_transformers_wherever_a_segment_lies(pad):
    draw = np.random.default_rng(pad)
    lengths = [[3, 9, 1, 7], [20], [1, 1, 2, 12], []]
    ids, positions, segments, wanted = np.zeros((4, len(lengths), 24), np.int32)
    for row, sequences in enumerate(lengths):
        at = 0
        for number, length in enumerate(sequences):
            here = row, slice(at, at + length)
            ids[here] = draw.integers(0, 7, length)  # one in seven is the pad
            positions[here], segments[here] = np.arange(length), number + 1
            wanted[here] = of_transformers(ids[here], pad)
            at += length + number % 2
    planes = (jnp.array(plane) for plane in (ids, positions, segments, segments, segments))
    got = np.array(positions_after_pad(PackedTokens(*planes), pad))
    np.testing.assert_array_equal(got[segments > 0], wanted[segments > 0])


def test_each_class_of_the_family_is_read(tmp_path):
    names = {"Roberta": "roberta", "XLMRoberta": "xlm-roberta", "Camembert": "camembert"}
    for kind, head in product(names, ("Model", "ForMaskedLM")):
        named = {"model_type": names[kind], "architectures": [kind + head]}
        fields = sources.ROBERTA_CONFIG | named
        spec = outline(sources.write_sentence_bert(tmp_path, **fields)).spec
        assert (spec.architecture, spec.config["pad_id"]) == ("bert", 1), named
        assert position_limit(spec) == sources.POSITIONS - 2, named


def test_prefixes_and_what_was_only_trained_with_are_dropped(tmp_path):
    tensors = sources.bert_tensors(config=sources.ROBERTA_CONFIG)
    tensors |= {"pooler.dense.weight": np.ones((8, 8), np.float32)}
    tensors = {f"roberta.{name}": array for name, array in tensors.items()}
    tensors |= {"lm_head.dense.weight": np.ones((8, 8), np.float32)}
    tensors |= {"lm_head.layer_norm.bias": np.ones(8, np.float32)}
    _, params = converted(tmp_path, tensors=tensors)
    word = tensors["roberta.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(params["tower.embeddings.word.embedding"], word)


def test_the_limit_leaves_out_the_positions_before_the_first(tmp_path):
    source = sources.write_bert(tmp_path, **sources.ROBERTA_CONFIG)
    assert outline(source).spec.max_input_tokens == sources.POSITIONS - 2


def test_the_pad_is_1_where_the_config_says_nothing():
    config = {key: value for key, value in sources.ROBERTA_CONFIG.items() if key != "pad_token_id"}
    assert roberta.config(config)["pad_id"] == 1
    assert roberta.config(config | {"pad_token_id": 5})["pad_id"] == 5


@pytest.mark.parametrize("pad", [None, -1, sources.POSITIONS - 1])
def test_a_pad_that_positions_cannot_be_counted_from_is_refused(pad):
    with pytest.raises(CheckpointError, match="pad_token_id is"):
        roberta.config(sources.ROBERTA_CONFIG | {"pad_token_id": pad})


def test_what_bert_does_not_run_roberta_does_not():
    with pytest.raises(UnsupportedModel, match="is_decoder=True"):
        roberta.config(sources.ROBERTA_CONFIG | {"is_decoder": True})
