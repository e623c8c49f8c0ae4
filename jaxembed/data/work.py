"""A request to the engine and its result, as columns.

Columns are plain arrays, which can be hashed, cached or sent to another process. Any process may
import this module: it does not import JAX.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, SupportsIndex

import msgspec
import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName

Span = tuple[int, int]  # the index of the first token, and the index after the last token

PLANES = ("ids", "types", "pixels")  # int32 arrays; a missing plane stands for zeros


@dataclass(frozen=True)
class Encoding:
    """One tokenized input.

    `ids` and `types` are int32 `[length]`; `types` of None means zeros. Each of the `spans`,
    counted from the start of the sequence, is pooled separately. Spans may overlap. If `spans` is
    None, all tokens are pooled together. The last `augmentation_tokens` tokens are copies of one
    token that the model adds to a text (`Expansion`). For an image `pixels` is int32
    `[length, words]`: a row holds the numbers of a token's place in the image, and then the bytes
    of its patches, four in each word.
    """

    ids: np.ndarray
    types: np.ndarray | None = None
    spans: tuple[Span, ...] | None = None
    augmentation_tokens: int = 0
    pixels: np.ndarray | None = None

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.ids)


class Work(msgspec.Struct, frozen=True, eq=False):
    """The sequences of one request, concatenated, and the outputs to compute for them.

    A slot is a range of tokens that are pooled together. Its row of `bounds` holds the index of its
    first token and the index after its last token, counted from the start of its sequence. A
    sequence has one or more slots.
    """

    planes: dict[str, np.ndarray]  # int32 [tokens] by the names in PLANES; pixels [tokens, words]
    lengths: np.ndarray  # int32 [sequences]: the number of tokens of each sequence
    bounds: np.ndarray  # int32 [all slots, 2]
    slots: np.ndarray  # int32 [sequences]: the number of slots of each sequence
    outputs: frozenset[OutputName] = frozenset({"dense"})
    adapter: int = 0  # the number of the adapter that all sequences use; 0: no adapter
    # int32 [sequences]: how many tokens at the end of each are augmentation tokens; None: none are
    augmentation_tokens: np.ndarray | None = None

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences together."""
        return len(self.planes["ids"])

    @property
    def text_tokens(self) -> np.ndarray:
        """The number of tokens of each sequence, int `[sequences]`. Augmentation tokens do not
        count."""
        return (
            self.lengths
            if self.augmentation_tokens is None
            else self.lengths - self.augmentation_tokens
        )

    @property
    def has_spans(self) -> bool:
        """Whether at least one sequence has more than one slot."""
        return len(self.bounds) > len(self.lengths)

    @property
    def encodings(self) -> list[Encoding]:
        """The sequences one by one, as views of the columns."""
        if not len(self):  # np.split would return one empty part
            return []
        ends = np.cumsum(self.lengths)[:-1]
        ids = np.split(self.planes["ids"], ends)
        types = np.split(self.planes["types"], ends) if "types" in self.planes else repeat(None)
        bounds = np.split(self.bounds, np.cumsum(self.slots)[:-1])
        spans = (tuple((int(start), int(end)) for start, end in part) for part in bounds)
        augmentation_tokens = (
            repeat(0) if self.augmentation_tokens is None else self.augmentation_tokens.tolist()
        )
        has_pixels = "pixels" in self.planes
        pixels = np.split(self.planes["pixels"], ends) if has_pixels else repeat(None)
        return [
            Encoding(*fields)  # strict=False, because `repeat` has no end
            for fields in zip(ids, types, spans, augmentation_tokens, pixels, strict=False)
        ]


def work_from_encodings(
    encodings: Sequence[Encoding], outputs: frozenset[OutputName] = frozenset({"dense"})
) -> Work:
    """Return work that computes `outputs` for tokenized inputs, which become its sequences."""
    lengths = np.array([encoding.length for encoding in encodings], np.int32)
    planes = {"ids": _concatenated([encoding.ids for encoding in encodings])}
    if any(encoding.types is not None for encoding in encodings):
        planes["types"] = _concatenated(
            [
                np.zeros(encoding.length, np.int32) if encoding.types is None else encoding.types
                for encoding in encodings
            ]
        )
    pixels = [encoding.pixels for encoding in encodings if encoding.pixels is not None]
    if pixels:  # if one input has pixels, all have: a model takes either images or texts
        planes["pixels"] = _concatenated(pixels)
    augmentation_tokens = None
    if any(encoding.augmentation_tokens for encoding in encodings):
        augmentation_tokens = np.array(
            [encoding.augmentation_tokens for encoding in encodings], np.int32
        )
    if all(encoding.spans is None for encoding in encodings):
        return whole_work(planes, lengths, outputs, augmentation_tokens)
    spans_by_input = [
        ((0, encoding.length),) if encoding.spans is None else encoding.spans
        for encoding in encodings
    ]
    bounds = np.array([span for spans in spans_by_input for span in spans], np.int32).reshape(-1, 2)
    slots = np.array([len(spans) for spans in spans_by_input], np.int32)
    return Work(planes, lengths, bounds, slots, outputs, augmentation_tokens=augmentation_tokens)


def whole_work(
    planes: dict[str, np.ndarray],
    lengths: np.ndarray,
    outputs: frozenset[OutputName] = frozenset({"dense"}),
    augmentation_tokens: np.ndarray | None = None,
) -> Work:
    """Return work whose sequences are pooled whole: each has one slot, with all its tokens. The
    arguments are the fields of Work."""
    bounds = np.zeros((len(lengths), 2), np.int32)
    bounds[:, 1] = lengths
    slots = np.empty(len(lengths), np.int32)
    slots.fill(1)  # np.ones takes longer
    return Work(planes, lengths, bounds, slots, outputs, augmentation_tokens=augmentation_tokens)


def join_work(parts: Sequence[Work], outputs: frozenset[OutputName], adapter: int = 0) -> Work:
    """Return the sequences of all parts, in order, as one Work with the given `outputs` and
    `adapter`. The outputs and adapters of the parts are ignored."""
    if len(parts) == 1:
        return msgspec.structs.replace(parts[0], outputs=outputs, adapter=adapter)
    augmentation_tokens = None
    if any(part.augmentation_tokens is not None for part in parts):
        augmentation_tokens = _concatenated([part.lengths - part.text_tokens for part in parts])
    planes = {
        name: _concatenated(
            [
                part.planes[name] if name in part.planes else np.zeros(part.tokens, np.int32)
                for part in parts
            ]
        )
        for name in PLANES
        if name == "ids" or any(name in part.planes for part in parts)
    }
    return Work(
        planes,
        _concatenated([part.lengths for part in parts]),
        np.concatenate([part.bounds for part in parts] or [np.zeros((0, 2), np.int32)]),
        _concatenated([part.slots for part in parts]),
        outputs,
        adapter,
        augmentation_tokens,
    )


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays of different lengths: array k is `values[offsets[k] : offsets[k + 1]]`."""

    values: np.ndarray  # float32 [rows of all arrays, width]
    offsets: np.ndarray  # int64 [arrays + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """Return the array with this number, as a view. Raises IndexError if there is none; a
        negative number is not counted from the end."""
        number = index.__index__()
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def where(self, kept: np.ndarray) -> "Ragged":
        """Return the arrays without some of their rows. `kept`, bool `[rows of values]`, is true
        for the rows that stay."""
        kept_before = np.concatenate([[0], np.cumsum(kept)])
        return Ragged(self.values[kept], kept_before[self.offsets])

    def ordered(self, order: np.ndarray) -> "Ragged":
        """Return copies of the arrays whose numbers are listed in `order`, in the order of the
        list."""
        arrays = [self[k] for k in order.tolist()]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return Ragged(np.concatenate([self.values[:0], *arrays]), offsets)


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of a matrix that is mostly zero. Row k has the float32 `values[k]` in the columns
    `indices[k]`, int32 in ascending order, and zeros in the other columns of its `width`."""

    width: int
    indices: list[np.ndarray]
    values: list[np.ndarray]

    @staticmethod
    def from_flat(places: np.ndarray, values: np.ndarray, rows: int, width: int) -> "SparseRows":
        """Return the rows of a matrix of `rows` rows and `width` columns. In the flattened matrix
        `values` are at the indices `places`, which must ascend, and all other values are zero."""
        ends = np.searchsorted(places, np.arange(1, rows) * width) if rows else np.zeros(0, int)
        indices = np.split((places % width).astype(np.int32), ends)
        return SparseRows(width, indices[:rows], np.split(values, ends)[:rows])

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def csr(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays of a compressed sparse row (CSR) matrix, as scipy.sparse.csr_array takes them:
        the values (float32), their columns (int32) and the offset of each row (int64)."""
        offsets = np.cumsum([0, *map(len, self.indices)], dtype=np.int64)
        indices = np.concatenate([np.zeros(0, np.int32), *self.indices])
        return np.concatenate([np.zeros(0, np.float32), *self.values]), indices, offsets

    def to_scipy(self) -> Any:
        """Return the rows as a scipy.sparse.csr_array. Raises ImportError without scipy."""
        from scipy.sparse import csr_array  # imported here, because nothing else needs it

        return csr_array(self.csr, shape=(len(self), self.width))

    def __getitem__(self, chosen: slice | Iterable[SupportsIndex]) -> "SparseRows":
        """Return the rows of a slice, or those whose numbers are listed in `chosen`, in the order
        of the list, as views."""
        numbers = self._numbers(chosen)
        return SparseRows(
            self.width, [self.indices[k] for k in numbers], [self.values[k] for k in numbers]
        )

    def __setitem__(self, places: slice | Iterable[SupportsIndex], rows: "SparseRows") -> None:
        """Replace the rows of a slice, or those whose numbers are listed in `places`, by copies of
        `rows`."""
        numbers = self._numbers(places)
        for k, indices, values in zip(numbers, rows.indices, rows.values, strict=True):
            self.indices[k] = indices.copy()
            self.values[k] = values.copy()

    def _numbers(self, chosen: slice | Iterable[SupportsIndex]) -> list[SupportsIndex]:
        """Return the numbers of the rows that `chosen` selects."""
        return list(range(len(self))[chosen] if isinstance(chosen, slice) else chosen)


def to_sparse_rows(dense: np.ndarray) -> SparseRows:
    """Convert a matrix, float32 `[rows, width]`, to SparseRows with its nonzero values."""
    flat = dense.reshape(-1)
    places = np.flatnonzero(flat != 0)  # np.flatnonzero of floats takes four times as long
    return SparseRows.from_flat(places, flat[places], *dense.shape)


WorkResult = dict[OutputName, Any]
"""The result of one request, by output. An output per slot is float32 `[all slots, width]` or
SparseRows, with a row for each slot in the order of Work.bounds. An output per token is Ragged,
with an array `[length, width]` for each sequence."""


def select_inputs(result: WorkResult, chosen: np.ndarray) -> WorkResult:
    """Return the outputs of some inputs. `chosen`, int `[chosen inputs]`, lists their numbers in
    the order of the outputs to return. `result` must have one slot for each input."""
    return {
        name: value.ordered(chosen) if isinstance(value, Ragged) else value[chosen]
        for name, value in result.items()
    }


def empty_result(work: Work, widths: Mapping[OutputName, int]) -> WorkResult:
    """Return a result of the right shapes for the work, which the caller fills. Dense arrays have
    arbitrary values, and sparse rows are empty. `widths` holds the number of columns of each
    output."""
    result: WorkResult = {}
    for name in work.outputs:
        if OUTPUTS[name].sparse:
            result[name] = SparseRows(
                widths[name],
                indices=[np.zeros(0, np.int32)] * len(work.bounds),
                values=[np.zeros(0, np.float32)] * len(work.bounds),
            )
        elif OUTPUTS[name].per == "slot":
            result[name] = np.empty((len(work.bounds), widths[name]), np.float32)
        else:
            offsets = np.concatenate([[0], np.cumsum(work.lengths, dtype=np.int64)])
            result[name] = Ragged(np.empty((work.tokens, widths[name]), np.float32), offsets)
    return result


def join_results(parts: Sequence[WorkResult]) -> WorkResult:
    """Return the results of all parts of a request, in order."""
    joined: WorkResult = {}
    for name, first in parts[0].items():
        results = [part[name] for part in parts]
        if isinstance(first, SparseRows):
            joined[name] = SparseRows(
                first.width,
                indices=[columns for result in results for columns in result.indices],
                values=[weights for result in results for weights in result.values],
            )
        elif isinstance(first, Ragged):
            counts = np.concatenate([[0], *(np.diff(result.offsets) for result in results)])
            rows = np.concatenate([result.values for result in results])
            joined[name] = Ragged(rows, np.cumsum(counts))
        else:
            joined[name] = np.concatenate(results)
    return joined


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays. A single array is returned without a copy. Returns an empty int32 array
    if there are no arrays."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
