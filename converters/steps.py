"""Plans and runs the conversion of a model's tensors to parameters."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import msgspec

from converters import weights
from converters.features.adapters import merged_into, plan_adapters, without_built_in
from converters.outline import Outline
from converters.quantized import folded
from converters.weights import Step
from jaxembed.checkpoints.checkpoint import Contents
from jaxembed.data.spec import DType
from jaxembed.models import parameter_shapes

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0  # between two log lines of a conversion

# Gets all steps, and yields each one when it is to run.
ConversionProgress = Callable[[Sequence[Step]], Iterable[Step]]


def show_progress(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps, and show a progress bar on a terminal, or a log line every few seconds."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # imported here, because only a terminal needs it

        yield from tqdm(steps, desc="converting", unit="tensor", leave=False)
        return
    logged_at = time.monotonic()
    for done, step in enumerate(steps):
        if time.monotonic() - logged_at >= LOG_EVERY_S:
            logger.info("converted %d of %d tensors", done, len(steps))
            logged_at = time.monotonic()
        yield step


def contents(model: Outline, progress: ConversionProgress) -> Contents:
    """Return the contents of a checkpoint. Its parameters are an iterator that reads and converts
    each one when it is asked for. Raises ConversionError for tensors that do not fit,
    UnsupportedModel for weights quantized in an unknown way, and CheckpointError for files that
    cannot be read."""
    source, base, layout, spec = model.source, model.tensors, model.layout, model.spec
    main = source / layout.backbone
    backbone = folded(spec.source, main, base.find(main), spec.dtype)
    tensors = weights.canonical(spec.source, backbone, base.prefixes, base.renames)
    ignored = [*base.ignored, *layout.ignored]
    if model.merged is not None:
        tensors = merged_into(tensors, spec.source, model.merged, base, ignored)
    adapter_sources = list(model.adapters)
    if model.built_in is not None:
        tensors, built_in = without_built_in(spec.source, model.built_in, base.ignored, tensors)
        adapter_sources = [*built_in, *adapter_sources]
    for folder in layout.folders:
        tensors |= weights.within(folder, weights.find(source / folder))
    for name in layout.files:
        tensors |= weights.within(name, weights.torch_file(source / name))
    plain_spec = msgspec.structs.replace(spec, adapters=())
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(plain_spec).items()}
    steps = weights.plan_steps(spec.source, base.rules, ignored, tensors, shapes)
    steps += plan_adapters(spec.source, base.rules, tensors, shapes, adapter_sources, spec.adapters)
    steps.sort(key=lambda step: step.size)  # smallest first, as in plan_steps
    elements: Counter[str] = Counter()
    for step in steps:
        elements[step.dtype] += step.size
    # the dtype of most elements: a module may have a wider dtype than the backbone
    dtype = cast(DType, elements.most_common(1)[0][0])
    spec = msgspec.structs.replace(spec, dtype=dtype)
    params = ((step.target, step.read()) for step in progress(steps))
    return Contents(spec, params, model.tokenizer)
