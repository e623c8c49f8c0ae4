"""Conversion of models that begin with a Router: the routes of a checkpoint, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sources

from converters import convert, folders_read, outline_routes, weight_folders
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.data.spec import Routes
from jaxembed.errors import CheckpointError
from jaxembed.runtime.summary import summary_of_routes


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    return sources.write_router(tmp_path / "router")


def converted(source: Path) -> Routes:
    out = source.parent / f"{source.name}-out"
    convert(source, out)
    return checkpoint.load_routes(out)


def refused(source: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        outline_routes(source)
    return str(caught.value)


def change_router(source: Path, **fields: Any) -> None:
    sources.change_json(source / "router_config.json", **fields)


def test_each_route_becomes_a_checkpoint_of_its_own(source):
    routes = converted(source)
    facts = summary_of_routes(routes)
    assert facts["default_route"] == "query"
    assert [one["config"]["num_layers"] for one in facts["routes"].values()] == [1, 2]
    with pytest.raises(CheckpointError, match=r"routes/NAME with one of the names query, document"):
        checkpoint.load_spec(source.parent / "router-out")
    assert list(routes.specs) == ["query", "document"]
    assert routes.default == "query"  # the first, as nothing else is said
    assert [spec.config["num_layers"] for spec in routes.specs.values()] == [1, 2]
    for route, spec in routes.specs.items():
        folder = checkpoint.route_path(source.parent / "router-out", route)
        assert checkpoint.load_spec(folder) == spec
        assert checkpoint.load_params(folder, spec)
        assert checkpoint.tokenizer_path(folder).is_file()
        assert spec.heads["dense"].normalize  # by the module after the Router


def test_a_route_has_the_parameters_of_the_same_model_alone(source, tmp_path):
    routes = converted(source)
    for route, spec in routes.specs.items():
        alone = sources.write_alone(tmp_path / f"{route}-alone", source, route)
        assert convert(alone, tmp_path / f"{route}-out").content_hash == spec.content_hash


def test_the_files_of_all_routes_are_verified(source):
    out = source.parent / "router-out"
    converted(source)
    assert hub.verify_files(ModelSource(str(out), cache_dir=source.parent)) > 10
    (out / "routes" / "document" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"routes/document/tokenizer\.json: its SHA-256"):
        hub.verify_files(ModelSource(str(out), cache_dir=source.parent))


def test_nothing_is_left_of_a_conversion_that_fails(source):
    weights = source / "document_0_Transformer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError):
        converted(source)
    assert [path.name for path in source.parent.iterdir()] == ["router"]


def test_a_router_goes_through_the_cache(source, tmp_path):
    model = ModelSource(str(source), cache_dir=tmp_path / "cache")
    before = hub.describe_model(model)
    path = hub.resolve(model)
    assert hub.resolve(model) == path
    routes = hub.describe_model(model)
    assert routes == checkpoint.load_routes(path)
    assert before.specs.keys() == routes.specs.keys()
    assert hub.describe_model(ModelSource(str(path), cache_dir=tmp_path / "cache")) == routes


def test_static_embeddings_are_fetched_to_describe_them(tmp_path):
    source = sources.write_router(tmp_path / "router", static=True)
    assert folders_read(source) == ["query_0_StaticEmbedding"]
    assert weight_folders(source) == ["query_0_StaticEmbedding", "document_0_Transformer"]
    routes = converted(source)
    assert [spec.architecture for spec in routes.specs.values()] == ["static", "bert"]


@pytest.mark.parametrize(
    ("given", "default"),
    [
        ({"default_route": "document"}, "document"),
        ({"default_route": None, "allow_empty_key": True}, "query"),
        ({"default_route": None, "allow_empty_key": False}, None),
        ({"default_route": "document", "allow_empty_key": False}, "document"),
    ],
)
def test_the_default_route_is_that_of_sentence_transformers(tmp_path, given, default):
    routes, got = outline_routes(sources.write_router(tmp_path / "router", **given))
    assert got == default
    assert Routes({name: one.spec for name, one in routes.items()}, got).main is not None


@pytest.mark.parametrize("name", ["router_config.json", "config.json"])
def test_the_files_of_older_versions_are_read(source, name):
    first = f"{sources.TRANSFORMER}.Transformer", f"{sources.POOLING}.Pooling"
    second = sources.TRANSFORMER, sources.POOLING
    kinds = dict(zip((*FIRST, *SECOND), (*first, *second), strict=True))
    change_router(source, types=kinds, parameters={"allow_empty_key": True})
    asym = ("sentence_transformers.models.Asym", "0_Asym")
    sources.write_modules(source, asym, (sources.NORMALIZE, "1_Normalize"))
    (source / "0_Asym").mkdir()
    for folder in kinds:
        (source / folder).rename(source / "0_Asym" / folder)
    (source / "router_config.json").rename(source / "0_Asym" / name)
    routes, default = outline_routes(source)
    assert (list(routes), default) == (["query", "document"], "query")


def test_a_module_may_be_of_several_routes(source, tmp_path):
    config = json.loads((source / "router_config.json").read_text())
    config["structure"]["document"] = ["query_0_Transformer", "document_1_Pooling"]
    change_router(source, **config)
    assert weight_folders(source) == ["query_0_Transformer"]
    hashes = {spec.content_hash for spec in converted(source).specs.values()}
    assert len(hashes) == 1


def test_a_route_is_named_by_the_task_that_chooses_it(tmp_path):
    mappings = {"('question', 'text')": "query", "('document', None)": "document"}
    source = sources.write_router(tmp_path / "router", route_mappings=mappings)
    routes, default = outline_routes(source)
    assert (list(routes), default) == (["question", "document"], "question")


@pytest.mark.parametrize(
    ("mappings", "message"),
    [
        ({"(None, 'text')": "query"}, "chooses 'query' by (None, 'text')"),
        ({"('query', 'image')": "query"}, "chooses 'query' by ('query', 'image')"),
        ({"('query', ('image', 'text'))": "query"}, "known: a task of texts"),
        ({"query": "query"}, "has the key 'query', which is not a pair"),
        ({"('query', None)": "questions"}, "no route 'questions' among query, document"),
        ({"('a', None)": "query", "('b', None)": "query"}, "'a' and 'b' share a route"),
        ({"('document', None)": "query"}, "two routes have the same task: document, document"),
    ],
)
def test_other_ways_of_routing_are_refused(tmp_path, mappings, message):
    source = sources.write_router(tmp_path / "router", route_mappings=mappings)
    assert message in refused(source)


FIRST = ["query_0_Transformer", "query_1_Pooling"]
SECOND = ["document_0_Transformer", "document_1_Pooling"]
OUTSIDE = "../query_0_Transformer"


@pytest.mark.parametrize(
    ("types", "structure", "message"),
    [
        ({}, {"query": FIRST, "image": SECOND}, "the routes image are chosen by the modality"),
        ({}, {"query": FIRST, "text": SECOND}, "the routes text are chosen by the modality"),
        ({FIRST[0]: sources.ROUTER}, {}, "route 'query' has a Router of its own"),
        (
            {},
            {"query": FIRST, "document": SECOND[:1]},
            "normalize of route 'document' are not",
        ),
        ({OUTSIDE: sources.TRANSFORMER}, {"query": [OUTSIDE, FIRST[1]]}, "leads outside the model"),
    ],
)
def test_routes_that_are_not_run_are_refused(source, types, structure, message):
    config = json.loads((source / "router_config.json").read_text())
    change_router(source, types=config["types"] | types, structure=structure or config["structure"])
    assert message in refused(source)


def test_routes_of_different_widths_are_refused(source):
    shutil.rmtree(source / "document_0_Transformer")
    shutil.rmtree(source / "document_1_Pooling")
    sources.write_route(source, "document", 2, hidden_size=16)
    assert "differ in width: 8 of query, 16 of document" in refused(source)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"types": {}}, "is damaged"),
        ({"structure": None}, "is damaged"),
        ({"structure": {}}, "no route None among none"),
        ({"parameters": {"default_route": "other"}}, "no route 'other' among query, document"),
        ({"parameters": {"temperature": 2}}, "not supported: temperature"),
        ({"structure": {"../up": ["query_0_Transformer"]}}, "names of the routes '../up'"),
    ],
)
def test_a_router_that_cannot_be_read_is_refused(source, fields, message):
    change_router(source, **fields)
    assert message in refused(source)


def test_a_router_outside_the_model_is_not_read(source):
    outside = source.parent / "outside"
    outside.mkdir()
    (outside / "router_config.json").write_text("{")  # damaged: reading it has another message
    (source / "router_config.json").unlink()
    listed = json.loads((source / "modules.json").read_text())
    listed[0]["path"] = "../outside"
    sources.write_json(source / "modules.json", listed)
    assert "leads outside the model" in refused(source)


def test_a_dense_path_and_a_router_without_its_file_are_refused(source):
    with pytest.raises(CheckpointError, match="has the routes query, document; leave it out"):
        outline_routes(source, dense_path="2_Dense")
    (source / "router_config.json").unlink()
    assert "has no router_config.json" in refused(source)


def test_a_damaged_manifest_of_routes_is_refused(source):
    converted(source)
    out = source.parent / "router-out"
    manifest = json.loads((out / "manifest.json").read_text())
    for fields, message in (
        ({"routes": ["../../other"]}, "is damaged"),
        ({"routes": []}, "is damaged"),
        ({"routes": ["query"], "default_route": "other"}, "no route 'other'"),
        ({"routes": ["missing"], "default_route": None}, "is not a checkpoint"),
        ({"format_version": 99}, "format 99"),
    ):
        sources.write_json(out / "manifest.json", manifest | fields)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_routes(out)
