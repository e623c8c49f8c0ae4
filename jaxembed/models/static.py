"""Static models, computed on the host without a device: means of table rows, or term weights.

The vector of a sequence does not depend on the other sequences of the batch, bit for bit, because
its rows are added in order, in blocks whose size depends only on the width of the table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxembed.data.spec import Activation, DenseLayer, ModelSpec, Module, Vocabulary
from jaxembed.data.work import Ragged, SparseRows, Work, WorkResult
from jaxembed.errors import CheckpointError
from jaxembed.memory import KIB

TABLE = "table"

# The size of a block of rows. The rows of a block are added in float32, and blocks in float64.
BLOCK_BYTES = 256 * KIB
MIN_LENGTH = 1e-12  # a Normalize module divides a vector by its length, or by this if it is larger


@dataclass(frozen=True)
class StaticConfig:
    """The config of a static model.

    Tokens with the `dropped_id` are left out after tokenization. With `characters_per_token` a text
    is truncated before tokenization, to the limit in tokens times this number of characters. Both
    fields come from model2vec.
    """

    vocab_size: int
    hidden_size: int
    dropped_id: int | None = None
    characters_per_token: int | None = None


def _gelu(x: np.ndarray) -> np.ndarray:
    halves = np.array([math.erf(value) for value in (x * math.sqrt(0.5)).ravel().tolist()])
    return x * (0.5 + 0.5 * halves.reshape(x.shape))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))  # exp would overflow


HOST_ACTIVATIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
}


Means = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""A function with the arguments of `numpy_means` that returns the same values, bit for bit."""


def numpy_means(table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, block: int) -> np.ndarray:
    """Return the mean of the table's rows for the ids of each slot; an empty slot gets zeros.

    `table` is float32 `[rows, width]`, and the result is float32 `[slots, width]`. For an id
    outside the table the nearest row is used. `bounds`, int `[slots, 2]`, holds for each slot the
    index in `ids` of its first id, and the index after its last id. Rows are added in order in
    float32; if a slot has more than `block` ids, the sums of blocks of `block` ids are added in
    float64.
    """
    means = np.zeros((len(bounds), table.shape[1]), np.float32)
    for number, (start, end) in enumerate(bounds.tolist()):
        if end > start:
            means[number] = _mean(table, ids[start:end], block)
    return means


def _mean(table: np.ndarray, ids: np.ndarray, block: int) -> np.ndarray:
    """Return the mean of the rows of one or more ids, with the same values as `numpy_means`."""
    if len(ids) <= block:
        return _row_sum(table, ids) / np.float32(len(ids))
    total = np.zeros(table.shape[1])
    for start in range(0, len(ids), block):
        total += _row_sum(table, ids[start : start + block])
    return total.astype(np.float32) / np.float32(len(ids))


def _row_sum(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the float32 sum of the rows of these ids, added in order."""
    rows = table.take(ids, axis=0, mode="clip")
    if rows.shape[1] == 1:  # `reduce` would add the rows of a single column in another order
        return np.add.accumulate(rows, axis=0)[-1] + np.float32(0)
    return np.add.reduce(rows, axis=0)  # the sum begins with +0, so negative zeros give +0


class StaticModel:
    """A table with a row for each token id. Threads may share it."""

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, np.ndarray]):
        """Raises CheckpointError if parameters are missing, unknown or of another shape than the
        model's. The message lists all of these parameters."""
        shapes = static_shapes(spec)
        actual_shapes = {name: parameter.shape for name, parameter in parameters.items()}
        problems = [
            f"{name}: expected shape {shapes.get(name)}, got {actual_shapes.get(name)}"
            for name in sorted(shapes.keys() | actual_shapes.keys())
            if shapes.get(name) != actual_shapes.get(name)
        ]
        if problems:
            raise CheckpointError("the parameters do not fit the model\n  " + "\n  ".join(problems))
        self.widths = spec.widths
        self._table = np.ascontiguousarray(parameters[TABLE], np.float32)

    def compute(self, work: Work) -> WorkResult:
        """Return the requested outputs of the work, float32 and not normalized. This class computes
        the output "tokens", the table's row for each token; subclasses compute others, too."""
        if "tokens" not in work.outputs:
            return {}
        offsets = np.concatenate([[0], np.cumsum(work.lengths, dtype=np.int64)])
        rows = self._table.take(work.planes["ids"], axis=0, mode="clip")
        return {"tokens": Ragged(rows, offsets)}


class StaticEmbeddings(StaticModel):
    """A static model of dense embeddings: the mean of the token vectors, through the modules."""

    def __init__(
        self, spec: ModelSpec, parameters: Mapping[str, np.ndarray], means: Means = numpy_means
    ):
        """`means` is used for several slots; for a single slot numpy is faster. Raises
        CheckpointError if the parameters do not fit the model."""
        super().__init__(spec, parameters)
        self._means = means
        # each module with its weight and bias, which a Normalize module does not have
        self._modules: list[tuple[Module, np.ndarray | None, np.ndarray | float]] = []
        for number, layer in enumerate(spec.dense.device_modules):
            kernel, bias = None, 0.0
            if isinstance(layer, DenseLayer):
                kernel = np.ascontiguousarray(parameters[_name(number, "kernel")], np.float32)
                bias = parameters[_name(number, "bias")].astype(np.float32) if layer.bias else 0.0
            self._modules.append((layer, kernel, bias))
        self._block = max(BLOCK_BYTES // self._table[:1].nbytes, 1)  # the rows of a block

    def compute(self, work: Work) -> WorkResult:
        """Compute "dense" and "tokens", if requested."""
        result = super().compute(work)
        if "dense" not in work.outputs:
            return result
        vectors = self._vectors(work.planes["ids"], _slots(work))
        for layer, kernel, bias in self._modules:
            if isinstance(layer, DenseLayer):
                # Multiply one vector at a time: the last bits of a product of several vectors may
                # depend on the number of vectors.
                products = [vector @ kernel for vector in vectors]
                linear = np.reshape(products, (len(vectors), layer.out_features)) + bias
                vectors = HOST_ACTIVATIONS[layer.activation](linear)
            else:
                squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
                vectors = vectors / np.maximum(np.sqrt(squares)[:, None], MIN_LENGTH)
            vectors = np.asarray(vectors, np.float32)
        result["dense"] = vectors
        return result

    def _vectors(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return the mean of the table's rows for each slot, with the values of `numpy_means`."""
        if len(slots) == 1:
            ((start, end),) = slots.tolist()
            if start < end:
                return _mean(self._table, ids[start:end], self._block)[None]
        return self._means(self._table, ids, slots, self._block)


class StaticSparseModel(StaticModel):
    """A static model of sparse embeddings: a table with one weight for each term. A term that
    occurs in a slot, once or more often, gets this weight; other terms get zero."""

    def compute(self, work: Work) -> WorkResult:
        """Compute "sparse" and "tokens", if requested."""
        result = super().compute(work)
        if "sparse" not in work.outputs:
            return result
        indices, values = [], []
        for start, end in _slots(work).tolist():
            terms = np.unique(work.planes["ids"][start:end])
            weights = self._table[terms, 0]
            indices.append(terms[weights != 0])  # ascending
            values.append(weights[weights != 0])
        result["sparse"] = SparseRows(len(self._table), indices, values)
        return result


def static_model(
    spec: ModelSpec, parameters: Mapping[str, np.ndarray], means: Means = numpy_means
) -> StaticModel:
    """Build a static model of sparse or dense embeddings, according to the spec's head. `means` is
    used for dense embeddings. Raises CheckpointError if the parameters do not have the names and
    shapes of `static_shapes`."""
    if isinstance(spec.head, Vocabulary):
        return StaticSparseModel(spec, parameters)
    return StaticEmbeddings(spec, parameters, means)


def static_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter that a static model's checkpoint must hold."""
    config = StaticConfig(**spec.config)
    shapes: dict[str, tuple[int, ...]] = {TABLE: (config.vocab_size, config.hidden_size)}
    if isinstance(spec.head, Vocabulary):
        return shapes
    for number, layer in enumerate(spec.dense.device_modules):
        if isinstance(layer, DenseLayer):
            shapes[_name(number, "kernel")] = (layer.in_features, layer.out_features)
            if layer.bias:
                shapes[_name(number, "bias")] = (layer.out_features,)
    return shapes


def _name(number: int, parameter: str) -> str:
    return f"heads.dense.modules.{number}.{parameter}"


def _slots(work: Work) -> np.ndarray:
    """Return the index of each slot's first token, and the index after its last token, int
    `[slots, 2]`. The indices count the tokens of all sequences together."""
    if len(work) == 1:
        return work.bounds
    starts = np.cumsum(work.lengths, dtype=np.int64) - work.lengths
    return work.bounds + np.repeat(starts, work.slots)[:, None]
