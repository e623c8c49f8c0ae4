"""What sentence-transformers computes, in float32 on the CPU. Only this module imports it."""

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed.errors import ConfigError
from jaxembed.spec import Task
from jaxembed.verify.texts import InputGroup

PACKAGE = "sentence_transformers"
REQUIREMENT = "sentence-transformers>=6.2"  # as in tests/parity/requirements.txt
OLDEST = (6, 2)

# Of a pair over the limit the second text is cut, which is one of transformers' ways and ours.
CUT_SECOND = {"text": {"truncation": "only_second"}}


@dataclass(frozen=True)
class Computed:
    """What came of one group: float32 `[inputs, width]`, vectors or logits, and the token ids."""

    outputs: np.ndarray
    ids: list[list[int]]


@dataclass(frozen=True)
class ReferenceRun:
    """What the reference computed, a result a group."""

    version: str
    results: list[Computed]


def check_installed() -> None:
    """Raises ConfigError where sentence-transformers is not installed; imports nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"sentence-transformers is not installed; pip install '{REQUIREMENT}' (it brings torch)"
        )


def run_apart(
    folder: Path, task: Task, template: bool, limit: int | None, groups: Sequence[InputGroup]
) -> ReferenceRun:
    """`run_reference` in a process of its own: its memory is free again when this returns.

    Raises ConfigError for whatever ends it.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(run_reference, folder, task, template, limit, groups).result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "the process of sentence-transformers ended early, perhaps for want of memory"
            ) from error
        except ConfigError:
            raise
        except Exception as error:  # another library's: whatever it is, nothing can be compared
            raise ConfigError(
                f"sentence-transformers cannot run {folder}: {type(error).__name__}: {error}"
            ) from error


def run_reference(
    folder: Path, task: Task, template: bool, limit: int | None, groups: Sequence[InputGroup]
) -> ReferenceRun:
    """The results of the groups, one input at a time, so that nothing is padded.

    Inputs are cut at the model's own limit, or at `limit` where that is less. `template` says
    whether a language model is asked with one. Raises ConfigError for too old a version.
    """
    # an optional package, and only here
    import sentence_transformers  # pyright: ignore[reportMissingImports]

    version = sentence_transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ConfigError(f"sentence-transformers is {version}; pip install '{REQUIREMENT}'")
    kind = (
        sentence_transformers.SentenceTransformer
        if task == "embed"
        else sentence_transformers.CrossEncoder
    )
    model = kind(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"}
    )
    model.eval().requires_grad_(False)
    if limit is not None:
        model.max_seq_length = min(limit, model.max_seq_length or limit)
    of_pairs = {} if template else {"processing_kwargs": CUT_SECOND}
    compute = _vector if task == "embed" else _logits
    return ReferenceRun(version, [_results(model, group, of_pairs, compute) for group in groups])


def _results(model: Any, group: InputGroup, of_pairs: dict[str, Any], compute: Any) -> Computed:
    name = group.prompt_name or model.default_prompt_name
    prompt = model.prompts[name] if name else None
    rows, ids = [], []
    for one in group.inputs:
        options = {} if isinstance(one, str) else of_pairs
        features = model.preprocess([one], prompt=prompt, **options)
        ids.append([int(token) for token in features["input_ids"][0]])
        rows.append(compute(model, group, one, features))
    return Computed(np.stack(rows), ids)


def _vector(model: Any, group: InputGroup, one: str, features: Any) -> np.ndarray:
    """As users get it, whatever `encode` does besides running the modules."""
    vectors = model.encode([one], prompt_name=group.prompt_name, show_progress_bar=False)
    return np.asarray(vectors[0], np.float32)


def _logits(model: Any, group: InputGroup, one: str | tuple[str, str], features: Any) -> np.ndarray:
    """`predict` takes no single texts, and its activation is not always the one that we apply."""
    return np.asarray(model(features)["scores"][0], np.float32).reshape(-1)
