"""DeBERTa v2 and v3: BERT with attention to contents and relative positions.

Its numbers are compared with torch's by the goldens and by parity.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sources
from test_families import DEBERTA, FAMILIES

from converters import convert, deberta
from jaxembed import checkpoint
from jaxembed.errors import ConversionError, UnsupportedModel
from jaxembed.models import disentangled, position_limit
from jaxembed.models.deberta import Convolution, DebertaConfig
from jaxembed.models.disentangled import Distances, attend_disentangled
from jaxembed.spec import ModelSpec

HEAD = {"pooler.dense": (sources.HIDDEN, sources.HIDDEN), "classifier": (sources.HIDDEN, 1)}


def tensors(**changes: Any) -> sources.Tensors:
    """Those of a tower of DEBERTA with `changes`, as published: with a table of positions."""
    hf = DEBERTA | changes
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
    sources.write_json(source / "config.json", DEBERTA | config)
    sources.wordpiece().save(str(source / "tokenizer.json"))
    sources.write_weights(source, weights)
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


def test_an_unknown_activation_of_the_pooler_is_refused():
    with pytest.raises(UnsupportedModel, match="pooler_hidden_act 'mish'"):
        deberta.classifier(DEBERTA | {"pooler_hidden_act": "mish"}, 1)


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
    fields: dict[str, Any] = FAMILIES["deberta"].fields | {"conv_width": 3}
    layer = Convolution(DebertaConfig(**fields))
    layer.linear.kernel[...] = jnp.tile(jnp.eye(8), (3, 1))  # the sum of the three tokens
    layer.activation = lambda x: x
    setattr(layer, "norm", lambda x: x)  # noqa: B010
    embedded = jnp.broadcast_to(jnp.array([1.0, 2, 4, 8, jnp.nan])[None, :, None], (1, 5, 8))
    segments = jnp.array([[1, 1, 2, 2, 0]])
    got = jax.jit(lambda *given: layer(*given))(embedded, jnp.zeros((1, 5, 8)), segments)
    np.testing.assert_array_equal(got[0, :4, 0], [3, 3, 12, 12])


def test_places_of_published_models():
    """Of 256 buckets up to a distance of 512. The negative side has one place more, for what lies
    beyond."""
    distances = np.array([0, 5, 128, 130, 200, 300, 511, 512, 9999])
    places = np.array([0, 5, 128, 130, 169, 207, 255, 255, 255])
    published = Distances(256, 512, 511)
    np.testing.assert_array_equal(published.places(distances), 256 + places)
    wanted = np.where(distances < 512, 256 - places, 0)
    np.testing.assert_array_equal(published.places(-distances), wanted)


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
TILINGS = [(7, 7), (8, 8), (24, 24), (61, 61), (61, 9)]
TERMS = ["both", "keys", "queries", "none"]
QUICK = {("both", 61, 61), ("both", 61, 9), ("keys", 24, 24), ("queries", 61, 9), ("none", 7, 7)}


@pytest.mark.parametrize(
    ("terms", "length", "longest"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.numerics])
        for case in ((terms, *tiling) for terms in TERMS for tiling in TILINGS)
    ],
)
def test_scores_are_those_of_the_definition_in_every_tiling(terms, length, longest, monkeypatch):
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
    given = (query, key, value, *tables)
    given = [None if x is None else x.astype(np.float32) for x in given]
    got = jax.jit(lambda *x: attend_disentangled(*x, distances))(*given, segments)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
