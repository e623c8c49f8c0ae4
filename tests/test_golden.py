"""Conversion and towers against what torch computed: tests/golden/*.npz, made by `make golden`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from fakes import future_of
from safetensors.numpy import save_file
from sparse_matrix import as_dense

from converters import CONVERTERS, convert, outline, steps, weights
from converters.family import family_of_type
from converters.heads import POOLING_FLAGS
from jaxembed import Embedder, Entity
from jaxembed.data.spec import ModelSpec
from jaxembed.data.work import Encoding
from jaxembed.engine.batch import pack, place
from jaxembed.models import ARCHITECTURES
from jaxembed.models.heads import POOLINGS
from jaxembed.models.tokens import PackedTokens

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))


def arrays_of(file: Path) -> set[str]:
    with np.load(file, allow_pickle=False) as arrays:
        return set(arrays.files)


OF_TOKENS = [file for file in FILES if "token_logits" in arrays_of(file)]
SCORERS = [file for file in FILES if "scores/0" in arrays_of(file) and file not in OF_TOKENS]
EMBEDDERS = [file for file in FILES if "vectors/0" in arrays_of(file)]
OF_OUTPUTS = [file for file in FILES if arrays_of(file) & {"dense/0", "sparse/0", "multi_vector/0"}]
TOWERS = [file for file in FILES if "hidden" in arrays_of(file)]

# One of each kind of output, and decoders beside BERT: `make numerics` runs the others.
QUICK = {
    "bert_concatenated",
    "bert_cross_encoder",
    "bert_token_classifier",
    "qwen3_odd_lasttoken",
    "qwen3_reranker",
    "static_xlm_roberta",
    "xlm_roberta_m3",
}


def of_each(files: list[Path]) -> pytest.MarkDecorator:
    """The golden is each of these files, one after the other."""
    params = [
        pytest.param(file, id=file.stem, marks=[] if file.stem in QUICK else [pytest.mark.numerics])
        for file in files
    ]
    return pytest.mark.parametrize("golden", params, indirect=True)


TOLERANCE = 1e-5  # float32 sums in another order; 6e-7 was the most


@dataclass(frozen=True)
class Golden:
    """The arrays of a file, and the checkpoint that its source was converted to."""

    arrays: dict[str, np.ndarray]
    path: Path
    spec: ModelSpec

    @property
    def encodings(self) -> list[Encoding]:
        at = np.cumsum(self.arrays["lengths"])[:-1]
        ids, types = (np.split(self.arrays[name], at) for name in ("ids", "types"))
        return [Encoding(*pair) for pair in zip(ids, types, strict=True)]

    @property
    def calls(self) -> Iterator[tuple[int, dict[str, Any]]]:
        asked = json.loads(self.arrays["calls"].item())
        assert asked
        return enumerate(asked)


def read(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def write_source(arrays: dict[str, np.ndarray], folder: Path) -> Path:
    """The Hugging Face directory that the golden was made from. A torch file of tensors is one of
    safetensors there: torch is not needed."""
    files: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        kind, _, inside = key.partition("/")
        if kind == "source":
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            (folder / inside).write_text(array.item())
        elif kind == "tensors":
            path, _, name = inside.partition(":")
            files.setdefault(path, {})[name] = array
    for path, tensors in files.items():
        save_file(tensors, folder / path)
    return folder


@pytest.fixture(name="golden", scope="module")
def _golden(request, tmp_path_factory) -> Golden:
    folder = tmp_path_factory.mktemp(request.param.stem)
    arrays = read(request.param)
    source = write_source(arrays, folder / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "torch_file", weights.safetensors_of)
        spec = convert(source, folder / "checkpoint", progress=lambda steps: steps)
    return Golden(arrays, folder / "checkpoint", spec)


@pytest.fixture(name="golden_embedder", scope="module")
def _golden_embedder(golden, load_model, tmp_path_factory) -> Iterator[Embedder]:
    if golden.spec.is_static:
        embedder = Embedder(str(golden.path), cache_dir=tmp_path_factory.mktemp("cache"))
    else:
        embedder = load_model(golden.path, 2, max(64, golden.spec.max_input_tokens))
    with embedder:
        yield embedder


def assert_agrees(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@partial(jax.jit, static_argnums=2)
def every_pooling(hidden: jax.Array, planes: np.ndarray, slots: int) -> jax.Array:
    """All poolings of sentence-transformers side by side, `[rows, slots, poolings * width]`."""
    tokens = PackedTokens.unstack(planes, slots)
    return jnp.concatenate([POOLINGS[name](hidden, tokens) for name in POOLING_FLAGS.values()], -1)


@of_each(TOWERS)
def test_hidden_states_poolings_and_logits_agree_with_torch_when_rows_are_packed(
    golden, golden_embedder
):
    """Of the encodings, several to a row, in the one program of `golden_embedder`."""
    spec = golden.spec
    (bucket,) = golden_embedder.model.main.plan.grid.buckets
    (worker,) = golden_embedder.model.main.engine.workers
    found: dict[int, tuple[np.ndarray, ...]] = {}
    outputs = frozenset({spec.primary})
    waiting = future_of(golden.encodings, outputs, widths=spec.widths).sequences
    places = {entry: i for entry in waiting for index in entry.futures.values() for i in index}
    while waiting:
        batch = place(bucket, waiting[:1], waiting[1:])
        planes = pack(batch)
        outputs = worker.runner.run(bucket, planes, (spec.primary, "tokens"))
        hidden, primary = outputs["tokens"], outputs[spec.primary]
        is_of_tokens = spec.primary == "token_logits"
        pooled = np.asarray(every_pooling(hidden, planes, bucket.slots))
        for entry, row, slot, start in zip(
            batch.sequences, batch.rows, batch.slots, batch.starts, strict=True
        ):
            of_entry = slice(start, start + entry.length)
            scores = primary[row, of_entry] if is_of_tokens else primary[row, slot]
            found[places[entry]] = hidden[row, of_entry], pooled[row, slot], scores
        waiting = [entry for entry in waiting if places[entry] not in found]
    hidden, pooled, primary = zip(*(found[i] for i in range(len(found))), strict=True)
    assert_agrees(np.concatenate(hidden), golden.arrays["hidden"])
    # every pooling of sentence-transformers, whichever the model has, and nothing after it
    assert_agrees(np.stack(pooled), golden.arrays["pooled"])
    if "logits" in golden.arrays:
        assert_agrees(np.stack(primary), golden.arrays["logits"])
    if "token_logits" in golden.arrays:
        assert_agrees(np.concatenate(primary), golden.arrays["token_logits"])


@of_each(OF_TOKENS)
def test_entities_are_those_of_the_pipeline_of_transformers(golden, golden_embedder):
    for number, call in golden.calls:
        wanted = json.loads(golden.arrays[f"entities/{number}"].item())
        found = golden_embedder.token_classify(call["texts"], call["strategy"])
        scores = np.array([one.score for entities in found for one in entities])
        assert_agrees(scores, golden.arrays[f"scores/{number}"])
        for entities, in_text in zip(found, wanted, strict=True):
            for one, fields in zip(entities, in_text, strict=True):
                label = fields.pop("entity", None) or fields.pop("entity_group")
                assert one == Entity(label, one.score, **fields)


def answer(embedder: Embedder, call: dict[str, Any]) -> np.ndarray:
    """What a call gives: vectors, or the scores of inputs by label."""
    options = call["options"]
    if call["method"] == "rerank":
        ranked = embedder.rerank(call["query"], call["documents"], **options)
        assert [one.score for one in ranked] == sorted((r.score for r in ranked), reverse=True)
        scores = [[one.score] for one in sorted(ranked, key=lambda one: one.index)]
    elif call["method"] == "classify":
        inputs = [one if isinstance(one, str) else tuple(one) for one in call["inputs"]]
        by_label = [{o.label: o.score for o in one} for one in embedder.classify(inputs, **options)]
        scores = [[found[label] for label in embedder.spec.labels] for found in by_label]
    else:
        return getattr(embedder, call["method"])(call["texts"], **options)
    return np.array(scores, np.float32)


@of_each(EMBEDDERS + SCORERS)
def test_vectors_and_scores_of_texts_agree_with_sentence_transformers(golden, golden_embedder):
    kind = "scores" if "scores/0" in golden.arrays else "vectors"
    for number, call in golden.calls:
        assert_agrees(answer(golden_embedder, call), golden.arrays[f"{kind}/{number}"])


@of_each(OF_OUTPUTS)
def test_other_outputs_agree_with_their_references(golden, golden_embedder):
    """Sentence-transformers, and the formulas of the models' own code."""
    for number, call in golden.calls:
        found = golden_embedder.encode_outputs(call["texts"], call["outputs"], **call["options"])
        for name, values in found.items():
            wanted = golden.arrays[f"{name}/{number}"]
            if name == "multi_vector":
                counts = golden.arrays[f"counts/{number}"]
                np.testing.assert_array_equal(np.diff(values.offsets), counts)
                values = values.values
            assert_agrees(as_dense(values) if name == "sparse" else values, wanted)


CONVERTED = FILES[0].parent / "converted.json"


def conversion_of(arrays: dict[str, np.ndarray], folder: Path, **config: Any) -> dict[str, Any]:
    """What a golden's source converts to, with `config` changed in its config.json: the fields of
    the spec, and a number that changes with every name, dtype and value of the parameters."""
    source = write_source(arrays, folder)
    path = source / "config.json"
    if config:
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    spec, parameters, _ = steps.contents(outline(source, name="golden"), iter)
    total = 0.0
    for name, array in parameters:
        draw = np.random.default_rng(crc32(f"{name} {array.dtype}".encode()))
        total += float(draw.standard_normal(array.size) @ array.astype(np.float64).ravel())
    of_save = {"source", "revision", "content_hash", "format_version", "written_by"}
    fields = json.loads(msgspec.json.encode(spec))
    return {key: value for key, value in fields.items() if key not in of_save} | {"values": total}


def wanted_of(name: str) -> dict[str, Any]:
    """What a golden converts to; some of its values are sums, which CPUs round differently."""
    wanted = json.loads(CONVERTED.read_text())[name]
    return wanted | {"values": pytest.approx(wanted["values"], rel=1e-5, abs=1e-4)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_golden_converts_to_what_agreed_with_torch(file, tmp_path, monkeypatch):
    """After a change that `make numerics` agrees with: `python tests/test_golden.py` from the
    repository's root writes what is wanted anew."""
    monkeypatch.setattr(weights, "torch_file", weights.safetensors_of)
    assert conversion_of(read(file), tmp_path) == wanted_of(file.stem)


def test_every_architecture_and_converter_has_a_golden():
    sources = (read(file).get("source/config.json") for file in FILES)
    configs = [json.loads(source.item()) for source in sources if source is not None]
    converters = {CONVERTERS[config["model_type"]] for config in configs}
    # jina-embeddings-v4 has a model of its own in test_jina_v4
    assert converters | {"converters.families.jina_v4"} == set(CONVERTERS.values())
    backbones = {family_of_type(kind).architecture for kind in CONVERTERS}
    # test_dual has CLIP's in numpy; those of pages are made of it, and of Qwen3's or ModernBERT's
    assert backbones | {"clip", "pages", "modernbert_pages"} == set(ARCHITECTURES)


def test_every_pooling_has_a_model_of_its_own():
    heads = (one["heads"].get("dense", {}) for one in json.loads(CONVERTED.read_text()).values())
    seen = {tuple(head.get("pooling", ())) for head in heads}
    assert {(name,) for name in POOLING_FLAGS.values()} < seen  # and at least one that concatenates


def test_goldens_stay_small():
    assert {file.stem for file in FILES} > QUICK
    assert max(file.stat().st_size for file in FILES) < 150_000


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    weights.torch_file = weights.safetensors_of
    found = {}
    for one in FILES:
        with TemporaryDirectory() as temporary:
            found[one.stem] = conversion_of(read(one), Path(temporary))
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    CONVERTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
