"""The ranges of a model's vectors: measured, kept beside the checkpoint, and needed for int8."""

import json

import numpy as np
import pytest
from conftest import tiny_spec
from fake_embedder import NoPrompts
from test_routes import save_routed

from jaxembed import Embedder
from jaxembed.bulk.vectors import measure_ranges
from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints import ranges as ranges_module
from jaxembed.checkpoints.ranges import StoredRanges, VectorKind, load_ranges, save_ranges
from jaxembed.config import TextConfig
from jaxembed.data.spec import Adapter, Routes
from jaxembed.errors import CheckpointError, ConfigError, InvalidInput
from jaxembed.quantise import quantise
from jaxembed.runtime.options import EncodeOptions
from jaxembed.runtime.tasks import Tasks

TEXTS = ["the cat sat", "a dog runs", "blue sky", "where is the train", "red mat"]
KIND = VectorKind("", ("mean",), None, 2)
KEPT = StoredRanges(KIND, "hash", 100, [-0.5, -0.25], [0.1, 0.75])


def kept(route="", content_hash="hash", dimensions=2, low=-0.5) -> StoredRanges:
    kind = VectorKind(route, ("mean",), None, dimensions)
    return StoredRanges(kind, content_hash, 100, [low] * dimensions, [0.5] * dimensions)


def tasks_with(spec, *ranges: StoredRanges) -> Tasks:
    """The tasks of a model with these ranges, which runs nothing."""
    return Tasks("tiny", Routes({"": spec}), NoPrompts(), TextConfig(), {r.kind: r for r in ranges})


@pytest.fixture(name="measured")
def _measured(embedder) -> list[StoredRanges]:
    found = measure_ranges(embedder, iter(TEXTS), [32, 8, 8], prompt_name=None, adapter=None)
    assert len(found) == 2  # the full width, too, is measured once
    return found


@pytest.fixture(name="calibrated")
def _calibrated(embedder, measured, monkeypatch) -> Embedder:
    """The shared embedder with these ranges."""
    ranges = {one.kind: one for one in measured}
    routes = Routes({"": embedder.spec})
    tasks = Tasks(embedder.name, routes, embedder.model.main.processor, embedder.model.text, ranges)
    monkeypatch.setattr(embedder.model, "tasks", tasks)
    return embedder


# The file.


def test_ranges_are_read_as_they_were_saved(tmp_path):
    assert load_ranges(tmp_path) == {}
    path = save_ranges(tmp_path, [KEPT])
    assert path == tmp_path / ranges_module.RANGES
    assert load_ranges(tmp_path) == {KIND: KEPT}
    np.testing.assert_array_equal(KEPT.values, np.array([[-0.5, -0.25], [0.1, 0.75]], np.float32))
    assert list(tmp_path.iterdir()) == [path]


def test_new_ranges_replace_those_of_their_kind_and_of_earlier_content_of_their_route(tmp_path):
    save_ranges(tmp_path, [kept(), kept(dimensions=1), kept("query", "other")])
    save_ranges(tmp_path, [kept(low=-0.25)])
    found = list(load_ranges(tmp_path).values())
    assert found == [kept(low=-0.25), kept(dimensions=1), kept("query", "other")]
    save_ranges(tmp_path, [kept(content_hash="new")])
    found = list(load_ranges(tmp_path).values())
    assert found == [kept("query", "other"), kept(content_hash="new")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": [-0.5]}, "1 lowest value and 2 highest values for 2 dimensions"),
        ({"low": [-0.5, 0.8]}, "a lowest value is larger than the highest"),
        ({"high": [0.5, 3.0]}, "1.01"),
        ({"high": [0.5, None]}, "Expected `float`"),
        ({"kind": 7}, "Expected `object`"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, message):
    path = save_ranges(tmp_path, [KEPT])
    content = json.loads(path.read_bytes())
    content["ranges"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as refused:
        load_ranges(tmp_path)
    assert f"{path} is damaged" in str(refused.value)
    assert "remove it and run `jaxembed calibrate` again" in str(refused.value)
    for broken in (b"", b"[]", b'{"ranges": [{}', b"\xff"):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_ranges(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=r"where the directory of the model is writable"):
        ranges_module.check_writable(missing)
    with pytest.raises(ConfigError, match=r"cannot write .*ranges\.json: No such file"):
        save_ranges(missing, [KEPT])


def test_a_checkpoint_with_ranges_is_not_damaged(tmp_path):
    path = save_routed(tmp_path / "out", "document")
    files = checkpoint.verify(path)
    save_ranges(path, [KEPT])
    assert checkpoint.verify(path) == files


# Measuring.


@pytest.mark.parametrize("dimensions", [None, 8])
def test_ranges_are_of_vectors_cut_and_normalised(embedder, measured, dimensions):
    (one,) = (one for one in measured if one.kind.dimensions == (dimensions or 32))
    vectors = embedder.encode(TEXTS, dimensions=dimensions, normalize=True)
    np.testing.assert_allclose(one.values, [vectors.min(axis=0), vectors.max(axis=0)], atol=1e-6)
    assert one.texts == len(TEXTS)
    assert one.content_hash == embedder.spec.content_hash
    assert one.kind == VectorKind("", ("mean",), None, dimensions or 32)


def test_fewer_than_two_texts_have_no_ranges(embedder):
    for texts in ([], ["the cat"]):
        with pytest.raises(ConfigError, match=f"at least 2 texts, better 100; got {len(texts)}"):
            measure_ranges(embedder, iter(texts))


def test_texts_that_are_alike_have_no_ranges(embedder):
    with pytest.raises(ConfigError, match="ranges need texts that differ"):
        measure_ranges(embedder, iter(["the cat"] * 100))


def test_impossible_dimensions_are_refused_before_any_text_is_read(embedder):
    with pytest.raises(InvalidInput, match="from 1 to 32"):
        measure_ranges(embedder, iter(lambda: pytest.fail("read"), None), [33])


# The library.


def assert_encodes(encoded, plain, dtype, ranges=None):
    # Two runs may pack texts differently, and a value that differs by 1e-7 may be on another step.
    assert (quantise(plain - 1e-6, dtype, ranges) <= encoded).all()
    assert (encoded <= quantise(plain + 1e-6, dtype, ranges)).all()


@pytest.mark.parametrize(
    ("dtype", "dimensions"), [("float", 8), ("float16", None), ("binary", 5), ("ubinary", 8)]
)
def test_vectors_are_cut_normalised_and_then_encoded(embedder, dtype, dimensions):
    plain = embedder.encode(TEXTS, dimensions=dimensions)
    encoded = embedder.encode(TEXTS, dimensions=dimensions, output_dtype=dtype)
    assert_encodes(encoded, plain, dtype)
    alone = embedder.encode_query(TEXTS[0], prompt="", dimensions=dimensions, output_dtype=dtype)
    assert (alone.shape, alone.dtype) == (encoded[0].shape, encoded.dtype)
    assert embedder.encode([], dimensions=dimensions, output_dtype=dtype).dtype == encoded.dtype


@pytest.mark.parametrize(("dtype", "dimensions"), [("int8", None), ("uint8", 8)])
def test_bytes_are_by_the_ranges_of_such_vectors(calibrated, measured, dtype, dimensions):
    (one,) = (one for one in measured if one.kind.dimensions == (dimensions or 32))
    plain = calibrated.encode(TEXTS, dimensions=dimensions)
    encoded = calibrated.encode(TEXTS, dimensions=dimensions, output_dtype=dtype)
    assert_encodes(encoded, plain, dtype, one.values)
    assert len(np.unique(encoded)) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 5}, "there are none: run `jaxembed calibrate .* TEXTS --dimensions 5`"),
        ({"normalize": False}, r"is only for normalised vectors \(set `normalize`\); other"),
    ],
)
def test_vectors_without_ranges_are_refused(calibrated, options, message):
    for dtype in ("int8", "uint8"):
        with pytest.raises(InvalidInput, match=f"`output_dtype` of {dtype}.*{message}") as refused:
            calibrated.encode("cat", output_dtype=dtype, **options)
        assert refused.value.field == "output_dtype"


def test_vectors_of_tokens_have_no_ranges():
    options = EncodeOptions(outputs=frozenset({"tokens"}), normalize=True, output_dtype="int8")
    with pytest.raises(InvalidInput, match="of whole inputs; other vectors support float,"):
        tasks_with(tiny_spec()).embed([], options)


def test_a_model_that_does_not_normalise_is_asked_to():
    spec = tiny_spec(modules=())
    tasks = tasks_with(spec, kept(content_hash="", dimensions=32))
    with pytest.raises(InvalidInput, match="set `normalize`"):
        tasks.embed([], EncodeOptions(output_dtype="int8"))
    request = tasks.embed([], EncodeOptions(output_dtype="int8", normalize=True))
    assert request.ranges is not None


def test_ranges_of_another_checkpoint_or_pooling_are_refused():
    ranges = kept(content_hash="old", dimensions=32)
    options = EncodeOptions(output_dtype="uint8")
    assert tasks_with(tiny_spec(content_hash="old"), ranges).embed([], options).ranges is not None
    with pytest.raises(InvalidInput, match="those stored are of another checkpoint: run `jaxembed"):
        tasks_with(tiny_spec(content_hash="new"), ranges).embed([], options)
    with pytest.raises(InvalidInput, match="there are none"):
        tasks_with(tiny_spec(("cls",), content_hash="old"), ranges).embed([], options)


def test_ranges_are_of_one_adapter_and_of_one_route():
    adapters = (Adapter("law", {"tower.layers.0.attention.qkv": 4}),)
    specs = {"query": tiny_spec(adapters=adapters), "document": tiny_spec(adapters=adapters)}
    kind = VectorKind("query", ("mean",), "law", 32)
    ranges = {kind: StoredRanges(kind, "", 100, [-0.5] * 32, [0.5] * 32)}
    tasks = Tasks("tiny", Routes(specs, "document"), NoPrompts(), TextConfig(), ranges)
    options = EncodeOptions(output_dtype="int8", route="query", adapter="law")
    assert tasks.embed([], options).ranges is not None
    for other in ({"route": "query"}, {"route": "document"}):
        with pytest.raises(InvalidInput, match=f"TEXTS --prompt-name {other['route']}`"):
            tasks.embed([], EncodeOptions(output_dtype="int8", **other))
    options = EncodeOptions(output_dtype="int8", route="document", adapter="law")
    with pytest.raises(InvalidInput, match="--adapter-name law"):
        tasks.embed([], options)


def test_outputs_as_they_are_have_no_dtype(embedder):
    with pytest.raises(TypeError, match=r"compute\(\) has no option `output_dtype`"):
        embedder.compute("cat", ["dense"], output_dtype="binary")
