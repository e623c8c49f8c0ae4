"""Measures how far quantization turns the vectors of a model, before the model is served."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.spec import DType, ModelSpec, Quantize
from jaxembed.engine.autotune.cost_file import SavedFile
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.build import Plan
from jaxembed.engine.placement import Device, place_parameters, placed_bytes, room_for_models
from jaxembed.engine.replica import Replica
from jaxembed.errors import ConfigError
from jaxembed.models import Program, program
from jaxembed.preprocessing.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TEXTS = Path(__file__).with_name("quantization_texts.txt")
# The least mean and the least single cosine similarity to the vectors of the unquantized model.
LEAST: dict[Quantize, tuple[float, float]] = {
    "int8-weights": (0.9995, 0.998),
    "int8": (0.999, 0.996),
}

Parameters = Callable[[], Iterable[tuple[str, Any]]]  # pairs of name and array


@dataclass(frozen=True)
class Similarity:
    """The cosine similarity of vectors with quantization to those without, over the TEXTS."""

    mean: float
    worst: float


def measured_similarity(
    plan: Plan,
    quantized: Program,
    spec: ModelSpec,
    load: Parameters,
    tokenizer: Path,
    cache_dir: Path,
) -> Similarity:
    """Return the similarity that an earlier start saved in `cache_dir`, or else measure it.

    `load` returns the parameters of the model, and `tokenizer` is the file of its tokenizer. The
    models are placed for the measurement one after the other: the one without quantization on the
    same device, or on the CPU if it does not fit there. Vectors are those that the model is served
    for, and in classifiers and rerankers the mean of the last hidden states.
    """
    assert plan.cost_file is not None
    file = SavedFile(cache_dir, plan.cost_file.identity, what="similarity", suffix="-quantized")
    saved = file.load(lambda content: Similarity(**content))
    if saved is not None:
        return saved
    whole = program(spec)
    # float16 may overflow, and such texts are computed in float32
    dtype: DType = "float32" if plan.dtype == "float16" else plan.dtype
    device, room = plan.devices[0], room_for_models(plan.devices[0])
    needed = placed_bytes({name: leaf.shape for name, leaf in whole.shapes.items()}, dtype)
    if device.platform != "cpu" and room is not None and needed > room:
        device = _cpu(quantized.quantize)
    served: dict[str, Any] = {}
    if dtype == plan.dtype:
        layout, implementation = plan.kernels.native_layout, plan.kernels.implementation
        served = {"attention": implementation, "native_layout": layout}
    vectors = []
    for made, devices, options in ((whole, (device,), {}), (quantized, plan.groups[0], served)):
        is_packed = options.get("native_layout", False)
        (parameters,) = place_parameters(made, load(), [devices], dtype, is_packed)
        replica = Replica(made, parameters, devices, dtype, **options)
        try:
            vectors.append(_vectors(replica, plan, spec, tokenizer))
        finally:
            replica.free()
    cosines = (vectors[0] * vectors[1]).sum(axis=1)
    cosines[~np.any(vectors, axis=(0, 2))] = 1.0  # both empty, as sparse vectors may be
    similarity = Similarity(float(cosines.mean()), float(cosines.min()))
    file.save(asdict(similarity))
    return similarity


def check(similarity: Similarity, method: Quantize, anyway: bool, source: str) -> None:
    """Raise ConfigError if vectors are less similar than LEAST allows; with `anyway` log it."""
    least_mean, least_worst = LEAST[method]
    figures = (
        f"the cosine similarity to the vectors of {source} without it is {similarity.mean:.5f} in "
        f"the mean and {similarity.worst:.5f} at worst"
    )
    if similarity.mean >= least_mean and similarity.worst >= least_worst:
        logger.info("--quantize %s: %s", method, figures)
        return
    allowed = f"at least {least_mean} and {least_worst} are asked for"
    if anyway:
        logger.warning("--quantize %s: %s; %s", method, figures, allowed)
        return
    other = "use --quantize int8-weights, " if method == "int8" else ""
    raise ConfigError(
        f"--quantize {method}: {figures}; {allowed}: leave it out, {other}or set --quantize-anyway"
    )


def _vectors(replica: Replica, plan: Plan, spec: ModelSpec, tokenizer: Path) -> np.ndarray:
    """Return a vector of length 1, or 0, for each of the TEXTS, float64 `[texts, dim]`.

    A row of a batch holds one text, without prompts; long texts are truncated.
    """
    texts = TEXTS.read_text("utf-8").splitlines()
    ids = [np.array(encoding.ids, np.int32) for encoding in Tokenizer(tokenizer).encode(texts)]
    bucket = _bucket_for(max(map(len, ids)), plan)
    replica.compile(bucket)
    output: OutputName = spec.primary if spec.primary in REPRESENTATIONS else "tokens"
    vectors = []
    for first in range(0, len(ids), bucket.rows):
        planes = np.zeros((replica.planes, bucket.rows, bucket.length), np.int32)
        rows = [of_text[: bucket.length] for of_text in ids[first : first + bucket.rows]]
        for row, of_text in enumerate(rows):
            count = len(of_text)
            planes[0, row, :count], planes[1, row, :count] = of_text, np.arange(count)
            planes[2, row, :count], planes[4, row, bucket.slots] = 1, count
        computed = replica.run(bucket, planes, [output])[output]
        for row, of_text in enumerate(rows):
            vectors += _of_row(computed, output, row, bucket.slots, len(of_text))
    stacked = np.stack(vectors).astype(np.float64)
    norms = np.linalg.norm(stacked, axis=1, keepdims=True)
    return stacked / np.where(norms == 0, 1.0, norms)


def _of_row(
    computed: Any, output: OutputName, row: int, slots: int, tokens: int
) -> list[np.ndarray]:
    """Return the vectors of the text in a row: one, or one for each token of a multi-vector."""
    if output == "sparse":
        vector = np.zeros(computed.width, np.float32)
        vector[computed.indices[row * slots]] = computed.values[row * slots]
        return [vector]
    of_row = np.asarray(computed[row])
    if output == "dense":
        return [of_row[0]]
    return list(of_row[:tokens]) if output == "multi_vector" else [of_row[:tokens].mean(axis=0)]


def _cpu(method: Quantize | None) -> Device:
    """Return JAX's CPU device, for a model that fits on no other one. Raises ConfigError if
    JAX_PLATFORMS leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            f"--quantize {method} is measured on the CPU, because the model without it does not "
            "fit on the device: add cpu to JAX_PLATFORMS"
        ) from error


def _bucket_for(length: int, plan: Plan) -> Bucket:
    """Return the smallest bucket of the plan with rows of this length, or else of its longest."""
    length = min(length, plan.grid.max_length)
    return min(
        (bucket for bucket in plan.grid.buckets if bucket.length >= length),
        key=lambda bucket: (bucket.length, bucket.rows),
    )
