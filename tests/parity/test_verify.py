"""`jaxembed verify` with the real sentence-transformers: the real model, and random ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from golden import make
from golden.families import FAMILIES

from jaxembed import EngineConfig
from jaxembed.checkpoints.source import ModelSource
from jaxembed.tools.verify.verification import Verification, verify_model
from parity.test_towers import SIZES

THREE, UNNAMED = make.Head(("no", "perhaps", "yes")), make.Head(cross_encoder=False)
CASES = {
    "prompts": replace(make.CASES["xlm_roberta_mean"], default_prompt_name="query"),
    "last token": make.CASES["qwen3_lasttoken"],
    "reranker": make.Case(family="bert", head=make.Head()),
    "reranker saved by transformers": make.Case(family="xlm_roberta", head=UNNAMED),
    "reranker with a template": make.CASES["qwen3_reranker"],
    "classifier": make.Case(family="roberta", head=THREE),
}

Verify = Callable[..., Verification]


@pytest.fixture(name="verify", scope="module")
def _verify(tmp_path_factory) -> Verify:
    cache = tmp_path_factory.mktemp("cache")

    def verify(model: str | None, limit: int, **options) -> Verification:
        grid: Path = tmp_path_factory.mktemp("grid") / "buckets.json"
        grid.write_text(f'{{"buckets": [[2, {limit}]]}}')
        settings = {"devices": 1, "buckets": grid, "max_batch_tokens": 2 * limit}
        return verify_model(
            ModelSource(model, offline=True, cache_dir=cache),
            ["one text more"],
            config=EngineConfig(**settings | options),
        )

    return verify


def test_the_default_model_agrees_in_float32_and_bfloat16(verify, note):
    found = verify(None, 256, dtype="bfloat16")
    exact, served = (one.distances.max() for one in found.agreements)
    note(f"cosines from 1 - {exact:.1e}, bfloat16 1 - {served:.1e}")
    assert found.agrees


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_models_as_they_are_saved_agree(case, tmp_path, verify, note):
    if case.head is not None and case.head.chat_template is None:
        # room for a query of several words in a tokenizer of letters
        sizes = SIZES[case.family, "tiny"]
        case = replace(case, config=sizes, max_seq_length=FAMILIES[case.family].positions(sizes))
    make.save(case, tmp_path)
    found = verify(str(tmp_path), 64, dtype="float32")
    note(f"{found.spec.task} within {found.agreements[0].distances.max():.1e}")
    assert found.agrees
