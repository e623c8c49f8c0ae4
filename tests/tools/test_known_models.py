"""The table of published models: its facts have sources, converters take its types, and
`jaxembed models` finds what it is asked for."""

from collections import Counter

import msgspec
from click.testing import CliRunner

from converters import CONVERTERS
from converters.families import qwen3, qwen3_vl
from converters.vision import colpali, colqwen, dual, pages
from jaxembed.cli import cli
from jaxembed.data.outputs import OUTPUTS
from jaxembed.errors import ConfigError
from jaxembed.tools.known_models import TABLE, Fact, KnownModel, known_models

TABLE_OF_MODELS = known_models()
FACTS = Fact.__args__


def names(*words: str) -> set[str]:
    return {model.name for model in TABLE_OF_MODELS.search(words)}


def test_each_model_has_a_converter_and_one_known_source_for_each_fact():
    types = {*CONVERTERS, *dual.CLASSES, *pages.CLASSES, *colqwen.VISION_DEFAULTS, "static"}
    for model in TABLE_OF_MODELS.models:
        assert model.type in types, model.name
        assert set(model.outputs) <= set(OUTPUTS), model.name
        assert set(model.sources) <= set(TABLE_OF_MODELS.sources), model.name
        stated = Counter(fact for facts in model.sources.values() for fact in facts)
        assert stated == Counter(fact for fact in FACTS if getattr(model, fact)), model.name


def test_each_model_and_each_language_is_there_once():
    raw = msgspec.json.decode(TABLE.read_bytes())
    assert len({one["name"] for one in raw["models"]}) == len(raw["models"])
    used = {code for model in TABLE_OF_MODELS.models for code in model.languages}
    assert used == set(raw["languages"])


def test_prompts_are_those_that_converters_apply():
    own = {
        "colpali": {"query": colpali.QUERY_PREFIX},
        "colqwen2": {"query": colqwen.QUERY_PREFIX},
        "qwen3": {"instruction": qwen3.FAMILY.reranker.template.instruction},
        "qwen3_vl": {"instruction": qwen3_vl.FAMILY.reranker.template.instruction},
    }
    checked = set()
    for model in TABLE_OF_MODELS.models:
        has_logits = model.kind == "reranker" and model.outputs == ("logits",)
        if (model.kind == "pages" or has_logits) and model.type in own:
            assert model.prompts == own[model.type], model.name
            checked.add(model.type)
    assert checked == set(own)


def test_a_search_takes_names_languages_their_codes_and_kinds():
    assert names("bge-m3") == {"BAAI/bge-m3"}  # and not models whose names contain it
    assert "dragonkue/BGE-m3-ko" in names("bge-m3", "korean") == names("KO", "bge-m3")
    assert {"BAAI/bge-m3", "naver/splade-v3"} <= names("sparse")
    published = {"vidore/colpali-v1.3-hf", "vidore/colqwen2-v1.0-hf"}
    published |= {f"nomic-ai/nomic-embed-multimodal-{size}" for size in ("3b", "7b")}
    assert names("pages") == published | {"ModernVBERT/colmodernvbert-merged"}
    assert {one.kind for one in TABLE_OF_MODELS.search(["reranker", "german"])} == {"reranker"}
    assert not names("em")  # the code of no language, though many names contain it
    assert len(names()) == len(TABLE_OF_MODELS.models)


def test_the_command_prints_a_table_one_model_with_its_sources_or_json():
    run = CliRunner().invoke
    table = run(cli, ["models", "static", "english"]).output.splitlines()
    assert table[1] == "static:"
    assert [line.split()[0] for line in table[2:]] == [
        model.name for model in TABLE_OF_MODELS.search(["static", "english"])
    ]
    alone = run(cli, ["models", "all-minilm-l6-v2"]).output
    assert "dimensions  384  [config]" in alone
    assert TABLE_OF_MODELS.sources["config"] in alone
    as_json = run(cli, ["models", "all-minilm-l6-v2", "--json"]).output
    found = msgspec.json.decode(as_json, type=list[KnownModel])
    assert found == TABLE_OF_MODELS.search(["all-minilm-l6-v2"])
    nothing = run(cli, ["models", "no such model"])
    assert isinstance(nothing.exception, ConfigError)
    assert "'no such model'" in str(nothing.exception)
