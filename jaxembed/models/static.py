"""Static models, computed on the host: means of table rows, or weights of terms. Starts no device.

A sequence has the same vector alone and in any batch, bit for bit: its rows are added in order, in
blocks whose size depends on the width alone.
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

BLOCK_BYTES = 256 * KIB  # of rows that are added in float32; sums of such blocks are float64
LEAST_LENGTH = 1e-12  # of a vector that a Normalize before other modules divides by


@dataclass(frozen=True)
class StaticConfig:
    """The config of a static model.

    Tokens with the `dropped_id` are left out after tokenization. With `characters_per_token` a text
    is cut to so many characters for each token of the limit before it is tokenized. model2vec asks
    for both.
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
"""As `numpy_means`, bit for bit."""


def numpy_means(table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, block: int) -> np.ndarray:
    """The mean of the table's rows for the ids of each slot: float32 `[slots, width]`, zeros for an
    empty slot.

    `table` is float32 `[rows, width]`; an id below or above its rows counts as the nearest. The
    `bounds` of a slot are its first id and the one after its last. Rows are added in order, of more
    than `block` ids in float64 over blocks of so many.
    """
    means = np.zeros((len(bounds), table.shape[1]), np.float32)
    for number, (start, end) in enumerate(bounds.tolist()):
        if end > start:
            means[number] = _mean(table, ids[start:end], block)
    return means


def _mean(table: np.ndarray, ids: np.ndarray, block: int) -> np.ndarray:
    if len(ids) <= block:
        return _added(table, ids) / np.float32(len(ids))
    total = np.zeros(table.shape[1])
    for at in range(0, len(ids), block):
        total += _added(table, ids[at : at + block])
    return total.astype(np.float32) / np.float32(len(ids))


def _added(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    rows = table.take(ids, axis=0, mode="clip")
    if rows.shape[1] == 1:  # which `reduce` adds in another order
        return np.add.accumulate(rows, axis=0)[-1] + np.float32(0)
    return np.add.reduce(rows, axis=0)  # from zero on: the sum of negative zeros is positive


class StaticEmbeddings:
    """A table of token vectors, and the modules after their mean. Threads may share it."""

    def __init__(
        self, spec: ModelSpec, parameters: Mapping[str, np.ndarray], means: Means = numpy_means
    ):
        """`means` computes several vectors; a single one is faster with numpy. Raises
        CheckpointError if the parameters are not those of `static_shapes`."""
        _check(spec, parameters)
        self._means = means
        self.widths = spec.widths
        self._table = np.ascontiguousarray(parameters[TABLE], np.float32)
        self._modules = [
            (layer, _parameters_of(number, layer, parameters))
            for number, layer in enumerate(spec.dense.device_modules)
        ]
        self._block = max(BLOCK_BYTES // self._table[:1].nbytes, 1)  # tokens

    def compute(self, work: Work) -> WorkResult:
        """The outputs of some sequences, as the engine gives them: float32, not normalised."""
        result = _tokens(self._table, work)
        if "dense" in work.outputs:
            vectors = self._vectors(work.planes["ids"], _slots(work))
            for layer, parameters in self._modules:
                vectors = _apply(layer, parameters, vectors)
            result["dense"] = vectors
        return result

    def _vectors(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The mean of each slot, as `numpy_means` gives it."""
        if len(slots) == 1:
            ((start, end),) = slots.tolist()
            if start < end:
                return _mean(self._table, ids[start:end], self._block)[None]
        return self._means(self._table, ids, slots, self._block)


class StaticTerms:
    """A table of one weight for each term: a term that is among the tokens has its weight, however
    often. Threads may share it."""

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, np.ndarray]):
        """Raises CheckpointError if the parameters are not those of `static_shapes`."""
        _check(spec, parameters)
        self.widths = spec.widths
        self._table = np.ascontiguousarray(parameters[TABLE], np.float32)

    def compute(self, work: Work) -> WorkResult:
        """The outputs of some sequences, as the engine gives them."""
        result = _tokens(self._table, work)
        if "sparse" in work.outputs:
            rows = [
                self._row(work.planes["ids"][start:end]) for start, end in _slots(work).tolist()
            ]
            indices, values = [ids for ids, _ in rows], [weights for _, weights in rows]
            result["sparse"] = SparseRows(len(self._table), indices, values)
        return result

    def _row(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The terms among some tokens whose weight is not zero, ascending, and their weights."""
        terms = np.unique(ids)
        weights = self._table[terms, 0]
        return terms[weights != 0], weights[weights != 0]


StaticModel = StaticEmbeddings | StaticTerms


def static_model(
    spec: ModelSpec, parameters: Mapping[str, np.ndarray], means: Means = numpy_means
) -> StaticModel:
    """The static model of a checkpoint, as its head says; `means` is for embeddings. Raises
    CheckpointError if the parameters are not those of `static_shapes`."""
    if isinstance(spec.head, Vocabulary):
        return StaticTerms(spec, parameters)
    return StaticEmbeddings(spec, parameters, means)


def static_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter that the checkpoint of a static model must hold."""
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


def _tokens(table: np.ndarray, work: Work) -> WorkResult:
    """The rows of all tokens, if they are wanted."""
    if "tokens" not in work.outputs:
        return {}
    offsets = np.concatenate([[0], np.cumsum(work.lengths, dtype=np.int64)])
    return {"tokens": Ragged(table.take(work.planes["ids"], axis=0, mode="clip"), offsets)}


def _name(number: int, parameter: str) -> str:
    return f"heads.dense.modules.{number}.{parameter}"


def _check(spec: ModelSpec, parameters: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError, with every parameter that is missing, unknown or wrongly shaped."""
    shapes = static_shapes(spec)
    found = {name: parameter.shape for name, parameter in parameters.items()}
    if found == shapes:
        return
    problems = [
        f"{name}: wanted shape {shapes.get(name)}, got {found.get(name)}"
        for name in sorted(shapes.keys() | found.keys())
        if shapes.get(name) != found.get(name)
    ]
    raise CheckpointError("the parameters do not fit the model\n  " + "\n  ".join(problems))


def _parameters_of(
    number: int, layer: Module, parameters: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray | float]:
    """The kernel and the bias of a Dense module in float32; of others nothing."""
    if not isinstance(layer, DenseLayer):
        return np.zeros(0, np.float32), 0.0
    kernel = np.ascontiguousarray(parameters[_name(number, "kernel")], np.float32)
    bias = parameters[_name(number, "bias")].astype(np.float32) if layer.bias else 0.0
    return kernel, bias


def _apply(
    layer: Module, parameters: tuple[np.ndarray, np.ndarray | float], vectors: np.ndarray
) -> np.ndarray:
    """The vectors after a module, float32."""
    if isinstance(layer, DenseLayer):
        kernel, bias = parameters
        # one by one: a product of several rows may differ in the last bits with their number
        products = [vector @ kernel for vector in vectors]
        linear = np.reshape(products, (len(vectors), layer.out_features)) + bias
        return np.asarray(HOST_ACTIVATIONS[layer.activation](linear), np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))[:, None]
    return np.asarray(vectors / np.maximum(lengths, LEAST_LENGTH), np.float32)


def _slots(work: Work) -> np.ndarray:
    """The first token of each slot and the one after its last, counted over all sequences: int
    `[slots, 2]`."""
    if len(work) == 1:
        return work.bounds
    starts = np.cumsum(work.lengths, dtype=np.int64) - work.lengths
    return work.bounds + np.repeat(starts, work.slots)[:, None]
