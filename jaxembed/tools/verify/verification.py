"""Runs a model and its reference one after the other, and compares the results."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxembed.checkpoints import hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import EngineConfig
from jaxembed.data.inputs import Pair, Text
from jaxembed.data.spec import DType, ModelSpec, Routes, Task
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError
from jaxembed.preprocessing.text import TokenizationOptions
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.summary import summary
from jaxembed.tools.verify.reference import Computed, ReferenceRun, check_installed, run_apart
from jaxembed.tools.verify.texts import InputGroup, input_groups

logger = logging.getLogger(__name__)

# The default limit of an input. An input of 8,192 tokens takes minutes on a CPU in float32.
MAX_INPUT_TOKENS = 2048

RunReference = Callable[..., ReferenceRun]

# Bounds of the cosine distance. The float32 bound is from tests/parity/test_minilm.py and
# test_qwen3.py. The bfloat16 bound is ten times what tests/parity/test_minilm.py and
# tests/engine/test_replica.py allow a model of two to six layers, because the rounding errors of
# the layers add up. The errors of float16 are 8 times smaller, and so the distances 64 times.
COSINE_BOUNDS: dict[DType, float] = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-4}

# Bounds of two relative errors: of logits, divided by the largest logit, and of vector lengths. The
# float32 bound is from tests/parity/test_qwen3.py. The other two follow from COSINE_BOUNDS: two
# vectors of length 1 with the cosine distance d differ by a vector of length sqrt(2 d).
RELATIVE_BOUNDS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}

NEIGHBOURS = 10  # how many nearest texts of each text are compared
MAX_RANKED = 1000  # texts whose ranking is compared: memory grows with the square of this number
TIE = 1e-6  # similarities and logits that differ by less than this count as equal


@dataclass(frozen=True)
class Agreement:
    """How the results in one dtype agree with the reference, over all groups."""

    dtype: DType
    task: Task
    # float64 [inputs]: the cosine distance of embeddings, or the relative difference of logits
    distances: np.ndarray
    # float64 [inputs]: the relative difference of the vectors' lengths; empty for logits
    lengths: np.ndarray
    # How far the rankings agree, from 0 to 1: the share of nearest texts that are the same (embed),
    # of document pairs in the same order (rerank), or of inputs with the same best label (classify)
    rank: float

    @cached_property
    def worst(self) -> int:
        """The index of the input with the largest distance; NaN counts as the largest."""
        return int(np.argmax(np.where(np.isnan(self.distances), np.inf, self.distances)))

    @property
    def bound(self) -> float:
        """The largest allowed distance in this dtype."""
        return (COSINE_BOUNDS if self.task == "embed" else RELATIVE_BOUNDS)[self.dtype]

    @property
    def within_bounds(self) -> bool:
        """Whether all distances and length differences are within bounds. NaN is out of bounds."""
        lengths_agree = (self.lengths <= RELATIVE_BOUNDS[self.dtype]).all()
        return bool((self.distances <= self.bound).all() and lengths_agree)


def agreement(
    dtype: DType, task: Task, got: Sequence[Computed], expected: Sequence[Computed]
) -> Agreement:
    """Compare the results of each group with the reference's results for the same inputs."""
    pairs = [(a.outputs, b.outputs) for a, b in zip(got, expected, strict=True)]
    if task == "embed":
        distances = np.concatenate([cosine_distances(*pair) for pair in pairs])
        lengths = np.concatenate([length_differences(*pair) for pair in pairs])
        rank = shared_neighbours(*pairs[0])  # the first group has all texts
    else:
        # Differences are divided by the group's largest logit, because each logit is a sum of terms
        # of about that size. If the largest logit is below 1, they are not divided.
        differences = [
            np.abs(ours - theirs).max(axis=1).astype(np.float64) / max(np.abs(theirs).max(), 1)
            for ours, theirs in pairs
        ]
        distances, lengths = np.concatenate(differences), np.zeros(0)
        rank = min((same_order if task == "rerank" else same_best)(*pair) for pair in pairs)
    return Agreement(dtype, task, distances, lengths, rank)


def locate(index: int, groups: Sequence[InputGroup]) -> tuple[int, int]:
    """Convert an index among all inputs to the index of a group and the index in this group.

    Raises IndexError for an index after the last input.
    """
    for group_index, group in enumerate(groups):
        if index < len(group.inputs):
            return group_index, index
        index -= len(group.inputs)
    raise IndexError(index)


def cosine_distances(
    got: Float[np.ndarray, "rows dim"], expected: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """Return the cosine distance of each row, from 0 to 2. Two zero vectors have distance 0.

    The distances are computed in float64, so that distances down to 1e-12 are accurate.
    """
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    products = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (got * expected).sum(axis=1) / np.where(products == 0, 1, products)
    both_zero = ~got.any(axis=1) & ~expected.any(axis=1)
    return np.where(both_zero, 0.0, np.maximum(1 - cosines, 0.0))


def length_differences(
    got: Float[np.ndarray, "rows dim"], expected: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """Return the difference of the two Euclidean lengths of a row, divided by the expected one."""
    lengths = np.linalg.norm(expected.astype(np.float64), axis=1)
    return np.abs(np.linalg.norm(got.astype(np.float64), axis=1) - lengths) / (lengths + 1e-30)


def shared_neighbours(
    got: Float[np.ndarray, "rows dim"], expected: Float[np.ndarray, "rows dim"]
) -> float:
    """Return the share (0 to 1) of a text's neighbours that the reference also finds.

    The neighbours of a text are its NEIGHBOURS nearest texts. A neighbour also counts if the
    reference finds it at most TIE less similar than the reference's last neighbour. The result is
    that of the text with the smallest share.
    """
    count = min(NEIGHBOURS, len(got) - 1)
    if count < 1:
        return 1.0
    ours, theirs = (_similarities(vectors[:MAX_RANKED]) for vectors in (got, expected))
    nearest = np.argsort(-ours, axis=1, kind="stable")[:, :count]
    # the similarity of the reference's last neighbour
    lowest = -np.sort(-theirs, axis=1)[:, count - 1 : count]
    return float((np.take_along_axis(theirs, nearest, axis=1) >= lowest - TIE).mean(axis=1).min())


def same_order(
    got: Float[np.ndarray, "rows labels"], expected: Float[np.ndarray, "rows labels"]
) -> float:
    """Return the share of pairs of documents that are in the same order as in the reference.

    Pairs whose logits differ by at most TIE in the reference are left out.
    """
    ours, theirs = (
        np.subtract.outer(logits[:MAX_RANKED, 0], logits[:MAX_RANKED, 0])
        for logits in (got, expected)
    )
    ordered = np.abs(theirs) > TIE
    return float((ours * theirs > 0)[ordered].mean()) if ordered.any() else 1.0


def same_best(
    got: Float[np.ndarray, "rows labels"], expected: Float[np.ndarray, "rows labels"]
) -> float:
    """Return the share of inputs that have the same best label as in the reference."""
    return float((got.argmax(axis=1) == expected.argmax(axis=1)).mean())


def _similarities(vectors: np.ndarray) -> np.ndarray:
    """Return the matrix of cosine similarities. The diagonal is -2, so that no text is one of its
    own neighbours."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = vectors / np.where(lengths == 0, 1, lengths)
    cosines = scaled @ scaled.T
    np.fill_diagonal(cosines, -2)
    return cosines


@dataclass(frozen=True)
class Verification:
    """The results of a model and of the reference, and their agreement."""

    name: str
    spec: ModelSpec
    limit: int  # maximum tokens of an input
    device: str
    groups: list[InputGroup]
    got: list[Computed]  # results of the model in float32, by group
    reference: ReferenceRun
    agreements: list[Agreement]  # in float32, and in the served dtype if it differs
    seconds: float

    @cached_property
    def different(self) -> list[tuple[int, int]]:
        """The inputs whose token ids differ from the reference, each as the index of its group and
        the index of the input in this group."""
        return [
            (group, index)
            for group, (ours, theirs) in enumerate(
                zip(self.got, self.reference.results, strict=True)
            )
            for index, ids in enumerate(ours.ids)
            if ids != theirs.ids[index]
        ]

    @property
    def agrees(self) -> bool:
        """Whether all token ids are equal and all results are within the bounds."""
        return not self.different and all(agreement.within_bounds for agreement in self.agreements)


def verify_model(
    source: ModelSource,
    texts: Sequence[str],
    *,
    config: EngineConfig,
    run_reference: RunReference = run_apart,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compare a model with sentence-transformers, on built-in texts and on `texts`.

    `on_progress` is called while buckets compile, with the number done and the total. Only one
    model is in memory at a time. Raises ConfigError or CheckpointError if the comparison is not
    possible.
    """
    started = time.monotonic()
    check_installed()
    spec = comparable_spec(hub.describe_model(source))
    folder = hub.fetch_source(source).path
    check_rules(spec, folder)
    limit, config = _limited(spec, config)
    groups = input_groups(spec, limit, texts)
    max_tokens = config.max_input_tokens
    reference = run_reference(folder, spec.task, spec.template is not None, max_tokens, groups)
    logger.info("sentence-transformers finished after %.0f s", time.monotonic() - started)

    def load(config: EngineConfig) -> Embedder:
        return Embedder.of(LoadedModel(source, config=config, on_progress=on_progress))

    got, facts = _run(load, config, groups)
    results = {facts["dtype"]: got}
    if facts["dtype"] != "float32":
        # a kernel of an accelerator may not compute float32
        kernels = "xla" if config.kernels == "xla" else "auto"
        results["float32"], _ = _run(
            load, replace(config, dtype="float32", kernels=kernels), groups
        )
    agreements = [
        agreement(dtype, spec.task, results[dtype], reference.results)
        for dtype in sorted(results, key=lambda dtype: dtype != "float32")  # float32 first
    ]
    return Verification(
        name=source.name,
        spec=facts["spec"],
        limit=limit,
        device=facts["device"],
        groups=groups,
        got=results["float32"],
        reference=reference,
        agreements=agreements,
        seconds=time.monotonic() - started,
    )


def comparable_spec(routes: Routes) -> ModelSpec:
    """Return the spec of the only route of a model that can be compared.

    Raises ConfigError for a model that has several routes, or gives neither vectors of whole texts
    nor scores.
    """
    spec = routes.main
    if len(routes.specs) > 1:
        raise ConfigError(
            f"{spec.source} has the routes {', '.join(routes.specs)}; only models of one "
            "route can be compared"
        )
    if spec.listwise is not None:
        raise ConfigError(
            f"{spec.source} reads the documents of a query together, which sentence-transformers "
            "does not"
        )
    if spec.primary == "sparse":
        raise ConfigError(
            f"{spec.source} is a sparse encoder; only vectors and logits can be compared"
        )
    if "dense" not in spec.heads:
        raise ConfigError(
            f"{spec.source} computes {', '.join(spec.heads)}; only vectors of whole texts and "
            "scores can be compared"
        )
    return spec


def check_rules(spec: ModelSpec, folder: Path) -> None:
    """Raise ConfigError if the reference would use another template, or other rules for static
    embeddings, because `folder` lacks the files of sentence-transformers."""
    if (folder / "modules.json").is_file():
        return
    if spec.template is not None:
        raise ConfigError(
            f"{folder} has no modules.json, so that sentence-transformers does not know the "
            "template of this reranker; take a revision that has the files of "
            "sentence-transformers"
        )
    if spec.is_static:
        raise ConfigError(
            f"{folder} has no modules.json, so it is served by the rules of model2vec, which "
            "sentence-transformers does not know"
        )


def _limited(spec: ModelSpec, config: EngineConfig) -> tuple[int, EngineConfig]:
    """Choose the input limit in tokens. Return it, and the config to load the model with.

    Raises ConfigError for a limit of the config that the reference would not use.
    """
    default = summary(spec)["limits"]["served_by_default"]
    flag = config.max_input_tokens
    if flag is not None and flag > spec.max_input_tokens:
        raise ConfigError(
            f"--max-input-length {flag} is more than the {spec.max_input_tokens} tokens at which "
            "the checkpoint and the reference truncate"
        )
    limit = flag or min(default, MAX_INPUT_TOKENS)
    if spec.is_static and flag is not None:
        raise ConfigError(
            f"--max-input-length {flag}: the reference truncates texts of static embeddings only "
            "as the checkpoint says; leave it out"
        )
    is_as_served = spec.is_static or limit == default
    return limit, config if is_as_served else replace(config, max_input_tokens=limit)


def _run(
    load: Callable[[EngineConfig], Embedder], config: EngineConfig, groups: Sequence[InputGroup]
) -> tuple[list[Computed], dict[str, Any]]:
    """Load a model, compute the groups, and free the model.

    Returns the results of each group, and a dict with the model's `dtype`, `device` and `spec`.
    """
    started = time.monotonic()
    embedder, results = load(config), []
    try:
        for group in groups:
            processor = embedder.model.main.text_processor
            tokenization = TokenizationOptions(
                processor.prompt(None, group.prompt_name), truncate=True, side="right"
            )
            inputs = [Text(i) if isinstance(i, str) else Pair(*i) for i in group.inputs]
            ids = [e.ids.tolist() for e in processor.encode(inputs, tokenization).work.encodings]
            if embedder.spec.task == "embed":
                texts = [text for text in group.inputs if isinstance(text, str)]
                outputs = embedder.encode(texts, prompt_name=group.prompt_name)
            else:
                labelled = embedder.classify(group.inputs, raw_scores=True)
                scores = [{label.label: label.score for label in labels} for labels in labelled]
                rows = [[row[label] for label in embedder.spec.labels] for row in scores]
                outputs = np.array(rows, np.float32)
            results.append(Computed(outputs, ids))
        facts = {name: getattr(embedder, name) for name in ("dtype", "device", "spec")}
    finally:
        embedder.close()
    del embedder  # frees the memory for the next model
    gc.collect()
    logger.info("jaxembed in %s finished after %.0f s", facts["dtype"], time.monotonic() - started)
    return results, facts
