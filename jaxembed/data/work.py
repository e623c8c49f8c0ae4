"""One request to the engine, and its answer, in columns: plain arrays that can be hashed, cached
or sent to another process. Imports no JAX."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, SupportsIndex

import msgspec
import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName

Span = tuple[int, int]  # the first token, and the one after the last

PLANES = ("ids", "types", "pixels")  # of int32; a plane that a request lacks is all zero


@dataclass(frozen=True)
class Encoding:
    """One tokenized input.

    `ids` and `types` are int32 `[length]`; without `types` all are zero. Each of the `spans` is
    pooled by itself, counted from the start of the sequence; they may overlap. Without `spans` all
    tokens are pooled together. The last `fillers` tokens fill up a query; see `Expansion`. Of an
    image `pixels` has the place and the patch of each token, int32 `[length, words]`: the numbers
    of the place, then four bytes a word.
    """

    ids: np.ndarray
    types: np.ndarray | None = None
    spans: tuple[Span, ...] | None = None
    fillers: int = 0
    pixels: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.ids)


class Work(msgspec.Struct, frozen=True, eq=False):
    """The sequences of one request, back to back, and what is wanted of them.

    A slot is what is pooled together: the `bounds` of a slot are its first token and the one after
    its last, counted from the start of its sequence.
    """

    planes: dict[str, np.ndarray]  # int32 [tokens] by the names in PLANES; pixels [tokens, words]
    lengths: np.ndarray  # int32 [sequences]
    bounds: np.ndarray  # int32 [all slots, 2]
    slots: np.ndarray  # int32 [sequences]: how many of the bounds each has, one or more
    outputs: frozenset[OutputName] = frozenset({"dense"})
    adapter: int = 0  # the number of the adapter that all sequences take; 0: none
    fillers: np.ndarray | None = (
        None  # int32 [sequences]: as in Encoding; None: no sequence has any
    )

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences together."""
        return len(self.planes["ids"])

    @property
    def own_tokens(self) -> np.ndarray:
        """The number of tokens of each sequence without fillers: int `[sequences]`."""
        return self.lengths if self.fillers is None else self.lengths - self.fillers

    @property
    def has_spans(self) -> bool:
        """Whether some sequence has several slots."""
        return len(self.bounds) > len(self.lengths)

    @property
    def encodings(self) -> list[Encoding]:
        """The sequences one by one, as views of the columns."""
        if not len(self):  # np.split makes one part of nothing
            return []
        ends = np.cumsum(self.lengths)[:-1]
        ids = np.split(self.planes["ids"], ends)
        types = np.split(self.planes["types"], ends) if "types" in self.planes else repeat(None)
        bounds = np.split(self.bounds, np.cumsum(self.slots)[:-1])
        spans = (tuple((int(start), int(end)) for start, end in part) for part in bounds)
        fillers = repeat(0) if self.fillers is None else self.fillers.tolist()
        has_pixels = "pixels" in self.planes
        pixels = np.split(self.planes["pixels"], ends) if has_pixels else repeat(None)
        return [Encoding(*one) for one in zip(ids, types, spans, fillers, pixels, strict=False)]


def work_of(
    encodings: Sequence[Encoding], outputs: frozenset[OutputName] = frozenset({"dense"})
) -> Work:
    """The columns of some tokenized inputs."""
    lengths = np.array([one.length for one in encodings], np.int32)
    planes = {"ids": _joined([one.ids for one in encodings])}
    if any(one.types is not None for one in encodings):
        types = [np.zeros(e.length, np.int32) if e.types is None else e.types for e in encodings]
        planes["types"] = _joined(types)
    pixels = [one.pixels for one in encodings if one.pixels is not None]
    if pixels:  # then all have some: a model takes images or texts
        planes["pixels"] = _joined(pixels)
    fillers = None
    if any(one.fillers for one in encodings):
        fillers = np.array([one.fillers for one in encodings], np.int32)
    if all(one.spans is None for one in encodings):
        return whole_work(planes, lengths, outputs, fillers)
    spans = [((0, one.length),) if one.spans is None else one.spans for one in encodings]
    bounds = np.array([span for one in spans for span in one], np.int32).reshape(-1, 2)
    slots = np.array([len(one) for one in spans], np.int32)
    return Work(planes, lengths, bounds, slots, outputs, fillers=fillers)


def whole_work(
    planes: dict[str, np.ndarray],
    lengths: np.ndarray,
    outputs: frozenset[OutputName] = frozenset({"dense"}),
    fillers: np.ndarray | None = None,
) -> Work:
    """The work of sequences that are each pooled as a whole."""
    bounds = np.zeros((len(lengths), 2), np.int32)
    bounds[:, 1] = lengths
    slots = np.empty(len(lengths), np.int32)
    slots.fill(1)  # np.ones takes longer
    return Work(planes, lengths, bounds, slots, outputs, fillers=fillers)


def join_work(parts: Sequence[Work], outputs: frozenset[OutputName], adapter: int = 0) -> Work:
    """The sequences of all parts, in order, as one request for these outputs with this adapter."""
    if len(parts) == 1:
        (part,) = parts
        if part.outputs == outputs and part.adapter == adapter:
            return part
        columns = part.planes, part.lengths, part.bounds, part.slots
        return Work(*columns, outputs, adapter, part.fillers)
    fillers = None
    if any(part.fillers is not None for part in parts):
        fillers = _joined([part.lengths - part.own_tokens for part in parts])
    names = {"ids", *(name for part in parts for name in part.planes)}
    planes = {
        name: _joined(
            [
                part.planes[name] if name in part.planes else np.zeros(part.tokens, np.int32)
                for part in parts
            ]
        )
        for name in PLANES
        if name in names
    }
    return Work(
        planes,
        _joined([part.lengths for part in parts]),
        np.concatenate([part.bounds for part in parts] or [np.zeros((0, 2), np.int32)]),
        _joined([part.slots for part in parts]),
        outputs,
        adapter,
        fillers,
    )


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays of different lengths: array k is `values[offsets[k] : offsets[k + 1]]`."""

    values: np.ndarray  # float32 [rows of all, width]
    offsets: np.ndarray  # int64 [arrays + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """One of the arrays, as a view. Raises IndexError."""
        at = index.__index__()
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self.values[self.offsets[at] : self.offsets[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def where(self, kept: np.ndarray) -> "Ragged":
        """The arrays with only the rows where `kept`, bool `[rows of all]`, is true."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return Ragged(self.values[kept], before[self.offsets])

    def ordered(self, order: np.ndarray) -> "Ragged":
        """The arrays with these numbers, in this order."""
        arrays = [self[k] for k in order.tolist()]
        ends = np.cumsum([len(one) for one in arrays], dtype=np.int64)
        return Ragged(np.concatenate([self.values[:0], *arrays]), np.concatenate([[0], ends]))


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of a matrix that is mostly zero: row k has `values[k]`, float32, in the columns
    `indices[k]`, int32 in ascending order, and zeros in all others of its `width`."""

    width: int
    indices: list[np.ndarray]
    values: list[np.ndarray]

    @staticmethod
    def of_places(places: np.ndarray, values: np.ndarray, rows: int, width: int) -> "SparseRows":
        """The rows of a flattened matrix with these values at these places, which ascend."""
        ends = np.searchsorted(places, np.arange(1, rows) * width) if rows else np.zeros(0, int)
        indices = np.split((places % width).astype(np.int32), ends)
        return SparseRows(width, indices[:rows], np.split(values, ends)[:rows])

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def csr(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All values, their columns, and the offsets of the rows among them: float32, int32 and
        int64, the three arrays of a compressed matrix, as scipy.sparse.csr_array takes them."""
        offsets = np.cumsum([0, *map(len, self.indices)], dtype=np.int64)
        indices = np.concatenate([np.zeros(0, np.int32), *self.indices])
        return np.concatenate([np.zeros(0, np.float32), *self.values]), indices, offsets

    def to_scipy(self) -> Any:
        """The rows as a scipy.sparse.csr_array. Raises ImportError without scipy."""
        from scipy.sparse import csr_array  # imported here, because nothing else needs it

        return csr_array(self.csr, shape=(len(self), self.width))

    def __getitem__(self, chosen: Iterable[SupportsIndex]) -> "SparseRows":
        """The rows with these numbers, in this order, as views."""
        chosen = list(chosen)
        indices, values = self.indices, self.values
        return SparseRows(self.width, [indices[k] for k in chosen], [values[k] for k in chosen])

    def __setitem__(self, places: Iterable[SupportsIndex], rows: "SparseRows") -> None:
        """Write copies of some rows at these places."""
        for place, indices, values in zip(places, rows.indices, rows.values, strict=True):
            self.indices[place] = indices.copy()
            self.values[place] = values.copy()


def sparse_rows(dense: np.ndarray) -> SparseRows:
    """The rows of a matrix, float32 `[rows, width]`: their values that are not zero."""
    flat = dense.reshape(-1)
    places = np.flatnonzero(flat != 0)  # of floats themselves it takes four times as long
    return SparseRows.of_places(places, flat[places], *dense.shape)


WorkResult = dict[OutputName, Any]
"""The answer to one request: for each output float32 `[all slots, width]`, in the order of the
bounds, or SparseRows of as many rows, or a Ragged with an array `[length, width]` for each
sequence."""


def chosen_rows(result: WorkResult, chosen: np.ndarray) -> WorkResult:
    """The outputs of the inputs with these numbers, int `[chosen]`, in this order; of a result with
    one slot for each input."""
    return {
        name: value.ordered(chosen) if isinstance(value, Ragged) else value[chosen]
        for name, value in result.items()
    }


def empty_result(work: Work, widths: Mapping[OutputName, int]) -> WorkResult:
    """A result for the work, to be filled; `widths` are those of the model's outputs."""
    result: WorkResult = {}
    for name in work.outputs:
        if OUTPUTS[name].sparse:
            empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
            result[name] = SparseRows(widths[name], *([one] * len(work.bounds) for one in empty))
        elif OUTPUTS[name].per == "slot":
            result[name] = np.empty((len(work.bounds), widths[name]), np.float32)
        else:
            offsets = np.concatenate([[0], np.cumsum(work.lengths, dtype=np.int64)])
            result[name] = Ragged(np.empty((work.tokens, widths[name]), np.float32), offsets)
    return result


def join_results(parts: Sequence[WorkResult]) -> WorkResult:
    """The results of all parts of a request, in order."""
    joined: WorkResult = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, SparseRows):
            indices = [one for value in values for one in value.indices]
            rows = [one for value in values for one in value.values]
            joined[name] = SparseRows(first.width, indices, rows)
        elif isinstance(first, Ragged):
            counts = np.concatenate([[0], *(np.diff(value.offsets) for value in values)])
            rows = np.concatenate([value.values for value in values])
            joined[name] = Ragged(rows, np.cumsum(counts))
        else:
            joined[name] = np.concatenate(values)
    return joined


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
