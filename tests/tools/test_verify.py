"""`jaxembed verify` against a stand-in for sentence-transformers: what agrees, what does not."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sources
from click.testing import CliRunner
from conftest import save_tiny, tiny_spec
from test_golden import read, write_source

from jaxembed import EngineConfig
from jaxembed.checkpoints.source import ModelSource
from jaxembed.cli import cli
from jaxembed.data.spec import PairTemplate
from jaxembed.errors import CheckpointError, ConfigError
from jaxembed.tools.verify import texts, verification
from jaxembed.tools.verify.reference import run_reference
from jaxembed.tools.verify.report import HEADER, markdown_row, report_lines
from jaxembed.tools.verify.texts import TEXTS
from jaxembed.tools.verify.verification import (
    COSINE_BOUNDS,
    Agreement,
    Verification,
    cosine_distances,
    same_best,
    same_order,
    shared_neighbours,
    verify_model,
)

FAKE = Path(__file__).parents[1] / "fake_reference"
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True, scope="module")
def _fake_reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAKE)
        yield
    sys.modules.pop("sentence_transformers", None)


@pytest.fixture(name="grid", scope="module")
def _grid(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("grid") / "buckets.json"
    path.write_text('{"buckets": [[4, 64]]}')
    return path


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory) -> Path:
    return sources.write_sentence_bert(tmp_path_factory.mktemp("embedder") / "source")


@pytest.fixture(name="reranker", scope="module")
def _reranker(tmp_path_factory) -> Path:
    return golden_source("bert_cross_encoder", tmp_path_factory.mktemp("reranker"))


def golden_source(name: str, folder: Path) -> Path:
    return write_source(read(GOLDEN / f"{name}.npz"), folder / name)


@pytest.fixture(name="verify_with_all", scope="module")
def _verify_with_all(grid):
    def verify(source: Path, more: Sequence[str] = (), **options) -> Verification:
        settings = {"dtype": "float32", "devices": 1, "buckets": grid, "max_batch_tokens": 256}
        return verify_model(
            ModelSource(str(source), offline=True, cache_dir=grid.parent / "cache"),
            more,
            config=EngineConfig(**settings | options),
            run_reference=run_reference,  # in this process, whose programs are compiled once
        )

    return verify


@pytest.fixture(name="verify")
def _verify(verify_with_all, monkeypatch):
    """Verifies a model with some of the texts, which takes less time."""
    some = [one for k, one in enumerate(TEXTS) if k % 6 == 0 or "vaccines" in one or "SEL" in one]
    monkeypatch.setattr(texts, "TEXTS", some)
    return verify_with_all


@pytest.fixture(name="agreed", scope="module")
def _agreed(verify_with_all, source) -> Verification:
    return verify_with_all(source, ["a text of the user's"], dtype="bfloat16")


def text_of(found: Verification) -> str:
    return "\n".join(report_lines(found))


def test_an_embedder_agrees_in_both_dtypes_and_its_row_fits_the_header(agreed):
    found = agreed
    assert found.agrees
    assert [one.dtype for one in found.agreements] == ["float32", "bfloat16"]
    exact, served = (one.distances.max() for one in found.agreements)
    assert exact < 1e-9 < served  # the reference is float32
    assert "a text of the user's" in found.groups[0].inputs
    assert max(len(ids) for ids in found.got[0].ids) == found.limit == 16
    assert "source agrees" in text_of(found)
    header, row = HEADER.splitlines()[0], markdown_row(found)
    names, cells = ([cell.strip() for cell in line.split("|")] for line in (header, row))
    filled = dict(zip(names, cells, strict=True))
    assert filled["model"] == "source"  # not where it lies on the user's machine
    assert filled["of"] == f"content {found.spec.content_hash[:12]}"
    assert filled["compared with"] == "sentence-transformers 6.2.0"
    assert filled["served"].startswith("bfloat16 ")


@pytest.mark.parametrize(
    ("setting", "value", "words", "in_tokens"),
    [
        ("FAKE_NOISE", "vaccines", "'how do vaccines work'", False),
        # their cosines are one: a missing Normalize would not be seen
        ("FAKE_SCALE", "2", "lengths", False),
        ("FAKE_EXTRA_TOKEN", "SELECT", "tokens: DIFFERENT for 1 of ", True),
        ("FAKE_EXTRA_TOKEN", "SELECT", "'SELECT name, count(*) FROM users", True),
        ("FAKE_LIMIT", "12", "reference:  12 tokens", True),
    ],
)
def test_what_differs_is_named(verify, source, monkeypatch, setting, value, words, in_tokens):
    monkeypatch.setenv(setting, value)
    found = verify(source)
    assert not found.agrees
    assert "DISAGREES" in text_of(found)
    assert words in text_of(found)
    assert bool(found.different) == in_tokens
    if setting == "FAKE_SCALE":
        assert found.agreements[0].distances.max() < COSINE_BOUNDS["float32"]


def test_a_shorter_limit_is_that_of_both_and_a_longer_one_is_refused(verify, source):
    found = verify(source, max_input_tokens=12)
    assert found.agrees
    assert max(len(ids) for ids in found.reference.results[0].ids) == 12
    with pytest.raises(ConfigError, match=r"--max-input-length 20 is more than the 16 tokens"):
        verify(source, max_input_tokens=20)


def test_every_prompt_of_the_checkpoint_is_compared(verify, tmp_path):
    source = golden_source("xlm_roberta_mean", tmp_path)
    found = verify(source)
    assert found.agrees
    assert [group.prompt_name for group in found.groups] == [None, "document", "query"]
    plain, document, query = ({tuple(ids) for ids in one.ids} for one in found.got)
    assert not plain & query
    assert not document & query
    assert "prompts: document, query" in text_of(found)


@pytest.mark.slow
def test_a_reranker_agrees_and_its_order_is_compared(verify, reranker, monkeypatch):
    found = verify(reranker, dtype="bfloat16")
    assert found.agrees
    assert found.spec.task == "rerank"
    assert found.agreements[0].rank == 1.0
    assert all(isinstance(one, tuple) for group in found.groups for one in group.inputs)
    monkeypatch.setenv("FAKE_NOISE", "vaccines")
    found = verify(reranker)
    assert not found.agrees
    assert ": 'how do vaccines work'" in text_of(found)


def test_a_classifier_agrees_on_texts_and_on_pairs(verify, tmp_path):
    found = verify(golden_source("bert_classifier", tmp_path))
    assert found.agrees
    assert {type(group.inputs[0]) for group in found.groups} == {str, tuple}
    assert found.got[0].outputs.shape == (len(found.groups[0].inputs), found.spec.dim)
    assert "same best label" in text_of(found)


def test_a_package_that_is_missing_is_told_with_the_command_for_it(verify, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'sentence-transformers>=6\.2'"):
        verify(source)


def test_too_old_a_reference_is_refused(verify, source, monkeypatch):
    monkeypatch.setattr("sentence_transformers.__version__", "5.1.2")
    with pytest.raises(
        ConfigError, match=r"5\.1\.2 is too old; pip install 'sentence-transformers>=6\.2'"
    ):
        verify(source)


def test_a_converted_checkpoint_is_refused_with_the_name_of_its_source(verify, tmp_path):
    with pytest.raises(CheckpointError, match="give the model that it was converted from, tiny"):
        verify(save_tiny(tmp_path / "checkpoint"))


def test_a_reranker_whose_template_the_reference_lacks_is_refused(tmp_path):
    spec = tiny_spec(labels=("yes",), template=PairTemplate("", "{query}", "{document}", "", ""))
    with pytest.raises(ConfigError, match=r"has no modules\.json"):
        verification.check_rules(spec, tmp_path)


def run_cli(*arguments: str):
    return CliRunner().invoke(cli, ["verify", *arguments])


@pytest.mark.slow
def test_the_command_runs_the_reference_apart_and_tells_by_its_status(source, grid, monkeypatch):
    flags = [str(source), "--dtype", "float32", "--devices", "1", "--buckets", str(grid)]
    flags += ["--max-batch-tokens", "256", "--cache-dir", str(grid.parent / "cache")]
    monkeypatch.setattr("jaxembed.cli.verify.configure_jax", lambda *_: None)
    result = run_cli(*flags)
    assert result.exit_code == 0, result.output
    assert "source agrees" in result.stdout
    assert result.stdout.splitlines()[-3:-1] == HEADER.splitlines()
    assert result.stdout.splitlines()[-1].startswith("| source | content ")
    monkeypatch.setenv("FAKE_NOISE", "vaccines")
    result = run_cli(*flags)
    assert result.exit_code == 1, result.output
    assert "source DISAGREES" in result.stdout


def test_a_reference_that_fails_is_an_error_and_no_disagreement(source, grid, monkeypatch):
    monkeypatch.setenv("FAKE_FAILURE", "out of luck")
    monkeypatch.setattr("jaxembed.cli.verify.configure_jax", lambda *_: None)
    result = run_cli(str(source), "--cache-dir", str(grid.parent / "cache"))
    assert isinstance(result.exception, ConfigError)
    assert "RuntimeError: out of luck" in str(result.exception)


@pytest.mark.parametrize("flags", [("--pooling", "cls"), ("--dense-path", "2_Dense")])
def test_flags_that_the_reference_cannot_follow_are_refused(flags):
    result = run_cli("anything", *flags)
    assert result.exit_code == 2
    assert f"{flags[0]} cannot be compared: sentence-transformers computes" in result.output


def test_distances_are_exact_where_they_are_small_and_zero_vectors_agree():
    wanted = np.array([[1, 0], [1, 1e-4], [0, 0], [1, 0]], np.float32)
    got = np.array([[1, 0], [1, 0], [0, 0], [0, 0]], np.float32)
    distances = cosine_distances(got, wanted)
    np.testing.assert_allclose(distances, [0, 5e-9, 0, 1], rtol=1e-3)


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_what_is_no_number_is_the_worst_and_not_within_bounds(task):
    distances = np.array([0.0, np.nan, 1e-9])
    found = Agreement("float32", task, distances, np.zeros(0), 1.0)
    assert found.worst == 1
    assert not found.within_bounds


def test_equal_neighbours_may_change_places():
    vectors = np.eye(14, dtype=np.float32)  # every text as near to every other
    assert shared_neighbours(vectors, vectors[::-1]) == 1.0
    assert shared_neighbours(vectors[:1], vectors[:1]) == 1.0
    first, second = np.random.default_rng(0).standard_normal((2, 40, 3)).astype(np.float32)
    assert shared_neighbours(first, second) < 0.9


def test_order_is_that_of_documents_whose_logits_differ():
    wanted = np.array([[3.0], [2.0], [2.0], [1.0]], np.float32)
    assert same_order(wanted, wanted) == 1.0
    assert same_order(np.array([[3], [2.1], [2], [1]], np.float32), wanted) == 1.0
    assert same_order(-wanted, wanted) == 0.0
    assert same_order(wanted * 0, wanted * 0) == 1.0
    assert same_best(np.array([[1.0, 2], [2, 1]]), np.array([[0.0, 1], [0, 1]])) == 0.5
