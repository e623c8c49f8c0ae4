"""DeBERTa v2 and v3: BERT with attention to contents and relative positions.

Its numbers are compared with torch's by the goldens and by parity.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import sources

from converters import convert, deberta
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import disentangled, position_limit
from jaxembed.models.deberta import Convolution, DebertaConfig
from jaxembed.models.disentangled import Distances, attend_disentangled
from jaxembed.spec import DenseLayer, ModelSpec

# As published, by transformers 4; mxbai-rerank's sizes made small.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DebertaV2ForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": sources.HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": sources.INTERMEDIATE,
    "layer_norm_eps": 1e-07,
    "max_position_embeddings": sources.POSITIONS,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 2,
    "num_hidden_layers": sources.LAYERS,
    "pad_token_id": 0,
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": sources.HIDDEN,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 8,
    "relative_attention": True,
    "share_att_key": True,
    "torch_dtype": "float32",
    "type_vocab_size": 0,
    "vocab_size": len(sources.WORDS),
}
RESAVED = {key: value for key, value in PUBLISHED.items() if key != "torch_dtype"} | {
    "dtype": "float32",
    "legacy": True,
    "pos_att_type": ["p2c", "c2p"],
    "tie_word_embeddings": True,
}

CONFIG: dict[str, Any] = {
    "vocab_size": len(sources.WORDS),
    "hidden_size": sources.HIDDEN,
    "num_layers": sources.LAYERS,
    "num_heads": 2,
    "intermediate_size": sources.INTERMEDIATE,
    "max_positions": sources.POSITIONS,
    "type_vocab_size": 0,
    "norm_eps": 1e-7,
    "activation": "gelu",
    "embedding_size": sources.HIDDEN,
    "absolute_positions": False,
    "buckets": 8,
    "max_distance": sources.POSITIONS,
    "content_to_position": True,
    "position_to_content": True,
}
HEAD = {"pooler.dense": (sources.HIDDEN, sources.HIDDEN), "classifier": (sources.HIDDEN, 1)}


def tensors(**changes: Any) -> sources.Tensors:
    """Those of a tower of PUBLISHED with `changes`, as published: with a table of positions."""
    hf = PUBLISHED | changes
    rng = np.random.default_rng(5)
    named = sources.bert_tensors() | {
        "encoder.rel_embeddings.weight": rng.standard_normal((16, sources.HIDDEN), np.float32)
    }
    if hf["norm_rel_ebd"] == "layer_norm":
        named |= {"encoder.LayerNorm.weight": np.full(8, 2, np.float32)}
        named |= {"encoder.LayerNorm.bias": np.full(8, 3, np.float32)}
    if not hf["share_att_key"]:
        for i in range(sources.LAYERS):
            layer = f"encoder.layer.{i}.attention.self"
            shapes = {f"{layer}.pos_{part}_proj": (8, 8) for part in ("key", "query")}
            named |= sources.head_tensors(shapes, seed=i)
    named.pop("embeddings.token_type_embeddings.weight")
    for part in ("query", "key", "value"):
        named = {name.replace(f".{part}.", f".{part}_proj."): x for name, x in named.items()}
    return {f"deberta.{name}": array for name, array in named.items()}


def converted(
    folder: Path, weights: sources.Tensors, **config: Any
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    source = folder / "source"
    sources.write_json(source / "config.json", PUBLISHED | config)
    sources.wordpiece().save(str(source / "tokenizer.json"))
    sources.write_weights(source, weights)
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


@pytest.mark.parametrize("hf", [PUBLISHED, RESAVED], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert deberta.config(hf) == CONFIG


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    least = ("relative_attention", "pos_att_type", *deberta.bert.REQUIRED)
    wanted = CONFIG | {"absolute_positions": True, "buckets": 0}
    assert deberta.config({key: PUBLISHED[key] for key in least}) == wanted


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"hidden_act": "mish"}, UnsupportedModel, "hidden_act 'mish'"),
        ({"relative_attention": False}, UnsupportedModel, "relative_attention=False"),
        ({"pos_att_type": "p2p|c2p"}, UnsupportedModel, "pos_att_type 'p2p|c2p'"),
        ({"pos_att_type": None}, UnsupportedModel, "pos_att_type None"),
        ({"norm_rel_ebd": "batch_norm"}, UnsupportedModel, "norm_rel_ebd 'batch_norm'"),
        ({"conv_kernel_size": 4}, UnsupportedModel, "conv_kernel_size 4"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, UnsupportedModel, "conv_groups 2"),
        ({"conv_kernel_size": 3, "conv_act": "mish"}, UnsupportedModel, "conv_act 'mish'"),
        ({"attention_head_size": 8}, UnsupportedModel, "attention_head_size 8"),
        ({"pooler_hidden_size": 16}, UnsupportedModel, "pooler_hidden_size 16"),
        ({"num_attention_heads": 3}, CheckpointError, "hidden_size 8 is not a multiple"),
        ({"position_buckets": 46}, CheckpointError, "position_buckets is 46"),
        ({"position_buckets": 1}, CheckpointError, "position_buckets is 1"),
        ({"max_relative_positions": "all"}, CheckpointError, 'max_relative_positions is "all"'),
        ({"type_vocab_size": -1}, CheckpointError, "type_vocab_size is -1"),
        ({"embedding_size": 0}, CheckpointError, "embedding_size is 0"),
        ({"hidden_size": None}, CheckpointError, "lacks hidden_size"),
        (
            {"architectures": ["DebertaV2ForQuestionAnswering"]},
            UnsupportedModel,
            "DebertaV2ForQuestionAnswering",
        ),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def test_an_unknown_activation_of_the_pooler_is_refused():
    with pytest.raises(UnsupportedModel, match="pooler_hidden_act 'mish'"):
        deberta.classifier(PUBLISHED | {"pooler_hidden_act": "mish"}, 1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("norm", ["layer_norm", "none"])
def test_relative_keys_and_queries_are_projections_of_one_table(shared, norm, tmp_path):
    changes = {"share_att_key": shared, "norm_rel_ebd": norm}
    weights = tensors(**changes)
    spec, params = converted(tmp_path, weights, **changes)
    table = weights["deberta.encoder.rel_embeddings.weight"].astype(np.float64)
    if norm == "layer_norm":
        centred = table - table.mean(1, keepdims=True)
        table = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-7) * 2 + 3
    for part in ("key", "query"):
        name = f"{part}_proj" if shared else f"pos_{part}_proj"
        linear = f"deberta.encoder.layer.1.attention.self.{name}"
        wanted = table @ weights[f"{linear}.weight"].T + weights[f"{linear}.bias"]
        got = params[f"tower.layers.1.attention.relative_{part}"]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert (spec.architecture, spec.task, position_limit(spec)) == ("deberta", "embed", 24)


def test_relative_tables_are_float32_where_the_weights_are_not(tmp_path):
    halves = {name: array.astype(np.float16) for name, array in tensors().items()}
    spec, params = converted(tmp_path, halves)
    assert params["tower.layers.0.attention.relative_key"].dtype == np.float32
    assert spec.dtype == "float16"


def test_a_wrongly_shaped_table_is_named(tmp_path):
    weights = tensors() | {"deberta.encoder.rel_embeddings.weight": np.zeros((14, 8), np.float32)}
    with pytest.raises(ConversionError, match=r"rel_embeddings.weight: wanted shape \(16, 8\)"):
        converted(tmp_path, weights)


def test_what_was_only_trained_with_is_dropped(tmp_path):
    heads = {"lm_predictions.lm_head.dense": (8, 8), "mask_predictions.dense": (8, 8), **HEAD}
    heads |= {"cls.predictions.transform.dense": (8, 8)}
    weights = tensors() | sources.head_tensors(heads)
    weights |= {"deberta.embeddings.position_ids": np.arange(sources.POSITIONS)[None]}
    spec, _ = converted(tmp_path, weights)
    assert spec.task == "embed"


def test_a_reranker_is_two_layers_on_the_first_token(tmp_path):
    spec, params = converted(
        tmp_path,
        tensors() | sources.head_tensors(HEAD),
        architectures=["DebertaV2ForSequenceClassification"],
        id2label={"0": "LABEL_0"},
    )
    assert (spec.task, spec.head.pooling) == ("rerank", ("cls",))
    assert spec.head.modules == (
        DenseLayer(in_features=8, out_features=8, activation="gelu"),
        DenseLayer(in_features=8, out_features=1, activation="identity"),
    )
    kernel = sources.head_tensors(HEAD)["pooler.dense.weight"].T
    np.testing.assert_array_equal(params["heads.logits.modules.0.kernel"], kernel)


def test_a_convolution_is_one_product_with_the_tokens_side_by_side(tmp_path):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((8, 8, 5), np.float32)
    conv = {
        "deberta.encoder.conv.conv.weight": weight,
        "deberta.encoder.conv.conv.bias": np.zeros(8, np.float32),
        "deberta.encoder.conv.LayerNorm.weight": np.ones(8, np.float32),
        "deberta.encoder.conv.LayerNorm.bias": np.zeros(8, np.float32),
    }
    _, params = converted(tmp_path, tensors() | conv, conv_kernel_size=5)
    kernel = params["tower.convolution.linear.kernel"]
    for token in range(5):
        np.testing.assert_array_equal(kernel[8 * token : 8 * token + 8], weight[:, :, token].T)
    narrow = {"deberta.encoder.conv.conv.weight": np.zeros((8, 8, 3), np.float32)}
    with pytest.raises(ConversionError, match=r"wanted shape \(8, 8, 5\), got \(8, 8, 3\)"):
        converted(tmp_path / "broken", tensors() | conv | narrow, conv_kernel_size=5)


def test_a_convolution_sees_nothing_beyond_its_segment():
    fields: dict[str, Any] = CONFIG | {"conv_width": 3}
    layer = Convolution(DebertaConfig(**fields))
    layer.linear.kernel[...] = jnp.tile(jnp.eye(8), (3, 1))  # the sum of the three tokens
    layer.activation = lambda x: x
    setattr(layer, "norm", lambda x: x)  # noqa: B010
    embedded = jnp.broadcast_to(jnp.array([1.0, 2, 4, 8, jnp.nan])[None, :, None], (1, 5, 8))
    segments = jnp.array([[1, 1, 2, 2, 0]])
    got = layer(embedded, jnp.zeros((1, 5, 8)), segments)[0, :4, 0]
    np.testing.assert_array_equal(got, [3, 3, 12, 12])


# of 256 buckets up to a distance of 512, which is what is published
@pytest.mark.parametrize(
    ("distance", "place"),
    [(0, 0), (5, 5), (128, 128), (130, 130), (200, 169), (300, 207), (511, 255), (512, 255)],
)
def test_places_of_published_models(distance, place):
    got = Distances(256, 512, 511).places(np.array([distance, -distance, 9999, -9999]))
    # the negative side has one place more, for what lies beyond
    beyond = 0 if distance == 512 else 256 - place
    np.testing.assert_array_equal(got, [256 + place, beyond, 511, 0])


def test_without_buckets_each_distance_has_a_place_up_to_the_last():
    got = Distances(0, 4, 9).places(np.arange(-6, 7))
    np.testing.assert_array_equal(got, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7])


def by_definition(query, key, value, relative_key, relative_query, segments, distances):
    """The formula of the paper, with a gather of each score, in float64."""
    length, width = query.shape[1], query.shape[3]
    place = np.arange(length)
    places = distances.places(place[:, None] - place[None])
    terms, scores = 1, np.einsum("bshk,bthk->bhst", query, key)
    if relative_key is not None:
        terms, scores = (
            terms + 1,
            scores + np.einsum("bshk,sthk->bhst", query, relative_key[places]),
        )
    if relative_query is not None:
        terms, scores = (
            terms + 1,
            scores + np.einsum("bthk,sthk->bhst", key, relative_query[places]),
        )
    seen = (segments[:, :, None] == segments[:, None])[:, None]
    scores = np.where(seen, scores / np.sqrt(width * terms), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhst,bthk->bshk", weights, value)


# tiles of 8: one, several that all see all, windows, and rows that are not whole tiles
@pytest.mark.parametrize(("length", "longest"), [(7, 7), (8, 8), (24, 24), (61, 61), (61, 9)])
@pytest.mark.parametrize("terms", ["both", "keys", "queries", "none"])
def test_scores_are_those_of_the_definition_in_every_tiling(length, longest, terms, monkeypatch):
    monkeypatch.setattr(disentangled, "SCORES_TILE", 8)
    draw = np.random.default_rng(length)
    query, key, value = draw.standard_normal((3, 2, length, 3, 4))
    by_key, by_query = draw.standard_normal((2, 16, 3, 4))
    tables = (
        by_key if terms in ("both", "keys") else None,
        by_query if terms in ("both", "queries") else None,
    )
    segments = np.arange(length)[None] // np.array([[longest], [max(longest - 2, 1)]]) + 1
    distances = Distances(8, 20, longest - 1)
    wanted = by_definition(query, key, value, *tables, segments, distances)
    query, key, value = (jnp.asarray(x, jnp.float32) for x in (query, key, value))
    of_key, of_query = (None if x is None else jnp.asarray(x, jnp.float32) for x in tables)
    got = attend_disentangled(query, key, value, of_key, of_query, jnp.asarray(segments), distances)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
