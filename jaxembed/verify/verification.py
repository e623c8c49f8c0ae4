"""A model and its reference, one after the other, and what came of it. Prints nothing."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed import hub
from jaxembed.config import EngineConfig
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError
from jaxembed.inputs import Pair, Text
from jaxembed.processors.text import Rules
from jaxembed.spec import ModelSpec
from jaxembed.summary import summary
from jaxembed.verify.agreement import Agreement, agreement, different_tokens
from jaxembed.verify.reference import Computed, ReferenceRun, check_installed, run_apart
from jaxembed.verify.texts import InputGroup, input_groups

logger = logging.getLogger(__name__)

# Of an input, where nobody says: a text of 8,192 tokens takes minutes on a CPU in float32.
MOST_INPUT_TOKENS = 2048

RunReference = Callable[..., ReferenceRun]


@dataclass(frozen=True)
class Verification:
    """What was compared, and how it agrees."""

    name: str
    spec: ModelSpec
    limit: int  # tokens of an input
    device: str
    groups: list[InputGroup]
    got: list[Computed]  # in float32
    reference: ReferenceRun
    agreements: list[Agreement]  # float32, and the served dtype where that is another
    seconds: float

    @cached_property
    def different(self) -> list[tuple[int, int]]:
        """Group and input of each that is tokenized otherwise than by the reference."""
        return different_tokens(self.got, self.reference.results)

    @property
    def agrees(self) -> bool:
        return not self.different and all(one.within_bounds for one in self.agreements)


def verify_model(
    model: str | None,
    texts: Sequence[str],
    *,
    source: dict[str, Any],
    config: EngineConfig,
    run_reference: RunReference = run_apart,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compare a model with sentence-transformers, on texts of ours and these.

    `source` are the arguments of `hub.resolve`. Never are two models in memory at once. Raises
    ConfigError or CheckpointError where nothing can be compared.
    """
    started = time.monotonic()
    check_installed()
    spec = hub.describe_model(model, **source)
    fetched = {name: source[name] for name in ("revision", "offline", "token")}
    folder = hub.fetch_source(model, **fetched).folder
    check_template(spec, folder)
    limit, config = _limited(spec, config)
    groups = input_groups(spec, limit, texts)
    at_most = config.max_input_tokens
    reference = run_reference(folder, spec.task, spec.template is not None, at_most, groups)
    logger.info("sentence-transformers is done after %.0f s", time.monotonic() - started)

    def load(config: EngineConfig) -> Embedder:
        return Embedder(model, **source, config=config, on_progress=on_progress)

    got, facts = _run(load, config, groups)
    results = {facts["dtype"]: got}
    if facts["dtype"] != "float32":
        kernels = "xla" if config.kernels == "xla" else "auto"  # others are for narrow dtypes
        results["float32"], _ = _run(
            load, replace(config, dtype="float32", kernels=kernels), groups
        )
    agreements = [
        agreement(dtype, spec.task, results[dtype], reference.results)
        for dtype in sorted(results, key=lambda dtype: dtype != "float32")
    ]
    return Verification(
        name=model or hub.DEFAULT_MODEL,
        spec=facts["spec"],
        limit=limit,
        device=facts["device"],
        groups=groups,
        got=results["float32"],
        reference=reference,
        agreements=agreements,
        seconds=time.monotonic() - started,
    )


def check_template(spec: ModelSpec, folder: Path) -> None:
    """Raises ConfigError for a language model that the reference would ask in words of its own."""
    if spec.template is not None and not (folder / "modules.json").is_file():
        raise ConfigError(
            f"{folder} has no modules.json: sentence-transformers does not know the template that "
            "this reranker is asked with; take a revision that has its files"
        )


def _limited(spec: ModelSpec, config: EngineConfig) -> tuple[int, EngineConfig]:
    """How many tokens an input has at most, and the config with that where it is not the model's
    own limit. Raises ConfigError for more than that: the reference would cut earlier."""
    own = summary(spec)["limits"]["served_by_default"]
    given = config.max_input_tokens
    if given is not None and given > spec.max_input_tokens:
        raise ConfigError(
            f"--max-input-length {given} is more than the {spec.max_input_tokens} tokens at which "
            "the checkpoint says to cut, and the reference does"
        )
    limit = given or min(own, MOST_INPUT_TOKENS)
    return limit, config if limit == own else replace(config, max_input_tokens=limit)


def _run(
    load: Callable[[EngineConfig], Embedder], config: EngineConfig, groups: Sequence[InputGroup]
) -> tuple[list[Computed], dict[str, Any]]:
    """The results of the groups, and what was found out about the model; it is gone after that."""
    started = time.monotonic()
    embedder = load(config)
    try:
        results = [_compute(embedder, group) for group in groups]
        facts = {name: getattr(embedder, name) for name in ("dtype", "device", "spec")}
    finally:
        embedder.close()
    del embedder
    gc.collect()
    logger.info("jaxembed in %s is done after %.0f s", facts["dtype"], time.monotonic() - started)
    return results, facts


def _compute(embedder: Embedder, group: InputGroup) -> Computed:
    processor = embedder.processor
    rules = Rules(processor.prompt(None, group.prompt_name), truncate=True, side="right")
    inputs = [Text(one) if isinstance(one, str) else Pair(*one) for one in group.inputs]
    ids = [one.ids.tolist() for one in processor.encode(inputs, rules).work.encodings]
    if embedder.spec.task == "embed":
        texts = [one for one in group.inputs if isinstance(one, str)]
        return Computed(embedder.encode(texts, prompt_name=group.prompt_name), ids)
    labelled = embedder.classify(group.inputs, raw_scores=True)
    scores = [{one.label: one.score for one in labels} for labels in labelled]
    rows = [[row[label] for label in embedder.spec.labels] for row in scores]
    return Computed(np.array(rows, np.float32), ids)
