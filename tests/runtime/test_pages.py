"""Models that read pages: what their files say, their vectors, and pages ranked by a query."""

import numpy as np
import pytest
from dual_sources import picture
from page_sources import CONFIG, IMAGE_ID, PAGE, words, write_pages
from sources import change_json, write_json

from converters import convert, outline_routes
from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints.checkpoint import load_routes
from jaxembed.data.inputs import Image, Tokens
from jaxembed.errors import CheckpointError, ConfigError, InvalidInput, UnsupportedModel
from jaxembed.runtime.options import EncodeOptions

pytest.importorskip("PIL")

QUERIES = ["w1 w2 w3", "w5"]
PICTURES = [picture(1), picture(2, 50, 20), picture(3, 8, 90)]


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory):
    return write_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(name="embedder", scope="module")
def _embedder(source, load_model):
    return load_model(source, 2, 64)


def vectors(embedder, ids) -> np.ndarray:
    options = EncodeOptions(outputs=frozenset({"multi_vector"}))
    return embedder.model.run(embedder.model.tasks.embed([Tokens(ids)], options)).multi_vector[0]


def test_a_query_has_its_prompt_and_fillers(embedder):
    given = embedder.compute(["w1 w2"], ["tokens"])["tokens"][0]
    asked = words().encode("<bos>Question: w1 w2" + "<pad>" * 10 + "\n").ids
    assert len(given) == len(asked)
    np.testing.assert_array_equal(embedder.encode_multi(["w1 w2"])[0], vectors(embedder, asked))


def test_pages_are_ranked_by_the_best_product_of_each_vector_of_the_query(embedder):
    query = embedder.encode_multi([QUERIES[0]], role="query")[0]
    pages = [embedder.encode_multi([Image(one)])[0] for one in PICTURES]
    wanted = np.array([(query @ page.T).max(axis=1).sum() for page in pages])
    ranked = embedder.rerank(QUERIES[0], images=PICTURES, raw_scores=True)
    assert [one.index for one in ranked] == np.argsort(-wanted).tolist()
    np.testing.assert_allclose([one.score for one in ranked], np.sort(wanted)[::-1], rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.rerank("w1", ["a text"]), "takes images as documents"),
        (lambda model: model.encode_multi(["a"], role="document"), "takes images as documents"),
        (lambda model: model.encode_multi(["w1 <image>"]), "'<image>', the token that stands for"),
        (lambda model: vectors(model, [2, IMAGE_ID]), "'<image>', the token that stands for"),
        (lambda model: model.rerank("w1", images=PICTURES, max_chunks=2), "_doc` is for texts"),
    ],
)
def test_what_pages_are_not_asked_for_is_refused(embedder, call, message):
    with pytest.raises(InvalidInput, match=message):
        call(embedder)


def test_a_limit_below_a_page_is_refused(source, tmp_path):
    config = EngineConfig(dtype="float32", devices=1, max_input_tokens=PAGE - 1)
    with pytest.raises(ConfigError, match=f"the {PAGE} tokens of an image"):
        Embedder(str(source), cache_dir=tmp_path, config=config)


def test_the_checkpoint_holds_one_set_of_parameters(source, tmp_path):
    convert(source, tmp_path / "out")
    routes = load_routes(tmp_path / "out")
    assert list(routes.specs) == [""]
    spec = routes.main
    assert (spec.image.token_id, len(spec.image.after)) == (IMAGE_ID, 6)
    assert spec.prompts == {"query": "Question: "}
    assert spec.max_input_tokens == PAGE


def test_the_words_around_inputs_are_read(source, tmp_path):
    changed = write_pages(tmp_path / "changed")
    texts = {"query_prefix": "the ", "visual_prompt_prefix": "w1 w2"}
    write_json(changed / "processor_config.json", texts)
    spec = outline_routes(changed)[0][""].spec
    assert spec.prompts == {"query": "the "}
    assert spec.image.after == tuple(words().encode("<bos>w1 w2\n").ids)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["ColPaliModel"]}, "architecture 'ColPaliModel'"),
        ({"vlm_config": {"text_config": {"model_type": "gemma2"}}}, "model_type 'gemma2'"),
        (
            {"vlm_config": CONFIG["vlm_config"] | {"vision_config": {"model_type": "clip"}}},
            "model_type 'clip'",
        ),
        (
            {"vlm_config": CONFIG["vlm_config"] | {"text_config": {"hidden_size": 32}}},
            "lacks vocab_size",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, config, message):
    changed = write_pages(tmp_path / "model")
    change_json(changed / "config.json", **config)
    with pytest.raises((UnsupportedModel, CheckpointError), match=message):
        outline_routes(changed)


def test_adapters_are_refused(source, tmp_path):
    with pytest.raises(UnsupportedModel, match="--adapter"):
        outline_routes(source, adapters={"one": tmp_path})
