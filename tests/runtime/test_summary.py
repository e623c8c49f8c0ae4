"""What `jaxembed info` says of a model."""

import json

import jax
import pytest
from conftest import TOWERS, tiny_spec
from representatives import each

from benchmarks.parameters import random_parameters
from jaxembed.config import EngineConfig
from jaxembed.data.spec import DenseLayer, PairTemplate
from jaxembed.engine.autotune.calibrate import Calibration
from jaxembed.engine.build import make_plan
from jaxembed.engine.replica import Replica
from jaxembed.models import program
from jaxembed.runtime.summary import summary


@pytest.mark.parametrize("backbone", each(TOWERS, "bert", "deberta"))
def test_the_bytes_are_those_that_a_replica_places(backbone):
    spec = tiny_spec(**TOWERS[backbone], modules=(DenseLayer(32, 7), DenseLayer(7, 3)))
    made, parameters, facts = program(spec), random_parameters(spec), summary(spec)
    for dtype in ("float32", "bfloat16", "float16"):
        placed = Replica(made, parameters, jax.local_devices()[:1], dtype)._parameters
        assert facts["parameter_bytes"][dtype] == sum(leaf.nbytes for leaf in placed)
        assert facts["parameters"] == sum(leaf.size for leaf in placed)


def test_an_embedder_is_told_by_its_outputs_and_prompts():
    facts = summary(tiny_spec(default_prompt_name="query"))
    assert facts["task"] == "embed"
    assert facts["outputs"] == {"dense": 32, "tokens": 32}
    assert facts["normalized"] is True
    assert facts["prompts"] == {"query": "what is ", "passage": "the "}
    assert facts["default_prompt_name"] == "query"
    assert facts["pooling"] == ["mean"]
    assert facts["modules"] == [{"type": "normalize"}]
    assert "labels" not in facts


def test_a_reranker_is_told_by_its_label_and_template():
    template = PairTemplate("a", "{instruction} {query}", "{document}", "z", "find it")
    facts = summary(
        tiny_spec(
            pooling=("lasttoken",),
            modules=(DenseLayer(32, 1, bias=False, activation="identity"),),
            labels=("yes",),
            score_function="sigmoid",
            template=template,
        )
    )
    assert (facts["task"], facts["outputs"], facts["labels"]) == ("rerank", {"logits": 1}, ["yes"])
    assert facts["score_function"] == "sigmoid"
    assert facts["template"]["instruction"] == "find it"
    assert "prompts" not in facts


def test_the_limit_is_what_a_server_takes_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(Calibration, "batch_tokens", lambda *arguments: 512)
    for positions, limit in (64, 64), (64, 512), (100_000, 32_768):
        config = tiny_spec().config | {"max_positions": positions}
        spec = tiny_spec(config=config, max_input_tokens=limit)
        made = make_plan(spec, program(spec), EngineConfig(dtype="float32", devices=1), tmp_path)
        assert summary(spec)["limits"] == {
            "max_input_tokens": limit,
            "positions": positions,
            "served_by_default": made.max_input_tokens,
        }


def test_everything_said_is_json():
    for backbone in ("bert", "pages, qwen", "mistral"):  # with rules of images, and nested settings
        facts = summary(tiny_spec(**TOWERS[backbone]))
        assert json.loads(json.dumps(facts)) == facts
