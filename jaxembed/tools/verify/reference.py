"""Runs sentence-transformers in float32 on the CPU, as the reference of a comparison."""

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from jaxembed.data.spec import Task
from jaxembed.errors import ConfigError
from jaxembed.tools.verify.texts import InputGroup

PACKAGE = "sentence_transformers"
REQUIREMENT = "sentence-transformers>=6.2"  # as in tests/parity/requirements.txt
OLDEST = (6, 2)

# Truncate the second text of a pair over the limit, as jaxembed does.
CUT_SECOND = {"text": {"truncation": "only_second"}}


@dataclass(frozen=True)
class Computed:
    """The results of one group of inputs."""

    outputs: np.ndarray  # float32 [inputs, width]: embeddings or logits
    ids: list[list[int]]  # token ids of each input


@dataclass(frozen=True)
class ReferenceRun:
    """The results of the reference for each group."""

    version: str  # the version of sentence-transformers
    results: list[Computed]


def check_installed() -> None:
    """Raise ConfigError unless sentence-transformers is installed, without importing it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"sentence-transformers is not installed; pip install '{REQUIREMENT}' (it brings torch)"
        )


def run_apart(
    folder: Path, task: Task, template: bool, limit: int | None, groups: Sequence[InputGroup]
) -> ReferenceRun:
    """Call `run_reference` in another process, whose memory is freed when this function returns.

    The arguments are those of `run_reference`. Raises ConfigError if the process fails for any
    reason.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(run_reference, folder, task, template, limit, groups).result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "the process of sentence-transformers ended early, perhaps because memory ran out"
            ) from error
        except ConfigError:
            raise
        except Exception as error:  # any error of the library means that nothing can be compared
            raise ConfigError(
                f"sentence-transformers cannot run {folder}: {type(error).__name__}: {error}"
            ) from error


def run_reference(
    folder: Path, task: Task, template: bool, limit: int | None, groups: Sequence[InputGroup]
) -> ReferenceRun:
    """Compute the results of the groups, one input at a time, so that nothing is padded.

    `folder` holds the checkpoint. Inputs are truncated to the limit of the model, or to `limit`
    tokens if that is less. `template`: whether the model is prompted with a template. Raises
    ConfigError if the installed version is too old.
    """
    # an optional package that only this function needs
    import sentence_transformers  # pyright: ignore[reportMissingImports]

    version = sentence_transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ConfigError(
            f"sentence-transformers {version} is too old; pip install '{REQUIREMENT}'"
        )
    model_class = (
        sentence_transformers.SentenceTransformer
        if task == "embed"
        else sentence_transformers.CrossEncoder
    )
    model = model_class(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"}
    )
    model.eval().float().requires_grad_(False)
    if limit is not None:
        model.max_seq_length = min(limit, model.max_seq_length or limit)
    pair_options = {} if template else {"processing_kwargs": CUT_SECOND}
    results = []
    for group in groups:
        name = group.prompt_name or model.default_prompt_name
        prompt = model.prompts[name] if name else None
        rows, ids = [], []
        for item in group.inputs:
            options = {} if isinstance(item, str) else pair_options
            features = model.preprocess([item], prompt=prompt, **options)
            ids.append([int(token) for token in features["input_ids"].reshape(-1)])
            if task == "embed":  # use the method that users call
                found = model.encode([item], prompt_name=group.prompt_name, show_progress_bar=False)
            else:  # not `predict`, which takes no single texts and may apply an activation
                found = model(features)["scores"]
            rows.append(np.asarray(found[0], np.float32).reshape(-1))
        results.append(Computed(np.stack(rows), ids))
    return ReferenceRun(version, results)
