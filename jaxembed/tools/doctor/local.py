"""Examines how this machine would serve a model. It plans the model without loading it."""

from pathlib import Path
from typing import Any

import jax

from jaxembed.config import EngineConfig
from jaxembed.data.spec import ModelSpec
from jaxembed.models import native
from jaxembed.runtime.diagnostics.examine import device_facts, kernel_facts
from jaxembed.runtime.diagnostics.facts import LocalExamination, LocalFacts
from jaxembed.runtime.diagnostics.findings import findings_without_traffic
from jaxembed.runtime.diagnostics.machine import machine_facts
from jaxembed.runtime.routes import plan_engine


def examine_here(
    name: str, spec: ModelSpec, config: EngineConfig, cache_dir: Path
) -> LocalExamination:
    """Choose device, dtype, kernels and buckets as a server would, and return them with findings.

    It starts the device and tries the kernels. Raises ConfigError if the settings do not fit, and
    CheckpointError for a damaged spec.
    """
    plan = plan_engine(spec, config, cache_dir).plan
    kept: Any = jax.config  # Any, because JAX makes the attributes at run time
    programs = Path(kept.jax_compilation_cache_dir or cache_dir / "programs").glob("*-cache")
    facts = LocalFacts(
        model=name,
        device=device_facts(plan, config),
        kernels=kernel_facts(plan, config),
        machine=machine_facts(),
        compiler=native.find_compiler(),
        cache_dir=str(cache_dir),
        kept_programs=len(list(programs)),
        max_input_tokens=plan.max_input_tokens,
        max_batch_tokens=plan.max_batch_tokens,
        buckets=[str(bucket) for bucket in plan.grid.buckets],
    )
    return LocalExamination(list(findings_without_traffic(facts)), facts)
