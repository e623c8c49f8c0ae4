"""Defines buckets, the static batch shapes that programs are compiled for, and grids of buckets.

A row of a batch holds several sequences. A sequence takes a slot of the row for each vector that is
pooled from the sequence: one slot, or one for each span of the sequence.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxembed.errors import ConfigError
from jaxembed.platform.files import read_user_json, shown

SHORTEST_ROW = 16  # tokens; a lone query of MiniLM takes 2.5 ms in it and 3.4 ms in a row of 32
LONGEST_DEFAULT_ROW = 8192
MAX_DEFAULT_BUCKETS = 20
# The number of lanes of a TPU register. Shorter rows leave lanes idle, and the splash attention
# kernel refuses them.
TPU_TILE = 128
# The largest number of slots in a row. More are not worth the cost of pooling, slots * length,
# because short texts are placed in shorter rows.
MAX_SLOTS = 128
# The bounds of each slot, a start and an end, take two of the places that a row has in a plane.
SHORTEST_LENGTH = 2  # tokens of the shortest row: it has one slot
TOKENS_PER_SLOT = 4  # a row has one slot for each of this many tokens
NO_ROW = 2**31 - 1  # the row length for a sequence that has more slots than any row
GRID_FORM = '{"buckets": [[rows, length], ...]}, as `jaxembed tune` writes it'


def min_row(length: int, slots: int) -> int:
    """Return the length of the shortest row that holds a sequence; NO_ROW if no row holds it.

    The sequence has `length` tokens and `slots` slots. Every longer row also holds the sequence.
    """
    if slots == 1:
        return length
    return max(length, TOKENS_PER_SLOT * slots) if slots <= MAX_SLOTS else NO_ROW


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a batch: `rows` rows of `length` tokens, each row with `slots` slots."""

    rows: int
    length: int
    # the number of tokens of all rows, padding included
    tokens: int = field(init=False, repr=False, compare=False)
    # The largest number of sequences or spans in a row, by default a quarter of its tokens. That is
    # enough for real queries: MS MARCO's need at most 5 slots in a row of 32 tokens, and 16 in one
    # of 128.
    slots: int = field(default=0, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.rows * self.length)
        if not self.slots:
            slots = min(max(self.length // TOKENS_PER_SLOT, 1), MAX_SLOTS)
            object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "_hash", hash((self.rows, self.length)))

    def __hash__(self) -> int:
        return self._hash  # every batch looks up the costs of all buckets

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


@dataclass(frozen=True)
class BucketGrid:
    """The buckets of one model."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def max_length(self) -> int:
        """The length of the longest row in tokens. The limit of an input may be less than this."""
        return max(bucket.length for bucket in self.buckets)

    @cached_property
    def max_slots(self) -> int:
        """The largest number of slots in a row. It limits the number of spans of an input."""
        return max(bucket.slots for bucket in self.buckets)

    @cached_property
    def covering(self) -> tuple[Bucket, ...]:
        """The buckets that must be compiled before every request can be served.

        They are the bucket with the fewest rows of each row length, from the shortest length on.
        The bucket with the most tokens follows, unless one of the others has as many tokens.
        """
        # the dict keeps the last bucket of each length, which has the fewest rows
        fewest = {b.length: b for b in sorted(self.buckets, reverse=True)}
        first = sorted(fewest.values(), key=lambda b: b.length)
        largest = max(self.buckets, key=lambda b: (b.tokens, -b.length))
        rest = [] if any(b.tokens == largest.tokens for b in first) else [largest]
        return (*first, *rest)

    @cached_property
    def by_use(self) -> tuple[Bucket, ...]:
        """All buckets in the order of compilation: the covering buckets, and then the others from
        the largest to the smallest."""
        rest = sorted(set(self.buckets) - set(self.covering), key=lambda b: (-b.tokens, b.length))
        return self.covering + tuple(rest)


def default_grid(
    limit: int, max_batch_tokens: int, shards: int = 1, tile: int = 1, join: bool = False
) -> BucketGrid:
    """Return a grid of at most 20 buckets for sequences of up to `limit` tokens.

    Row lengths are powers of two from 16 on, and last `limit` itself, at most 8192. All lengths are
    multiples of `tile`. On each of the `shards` devices, numbers of rows are powers of four, and
    the largest power of two that fits in `max_batch_tokens`, the token budget of a device. A row
    longer than the budget is alone in its bucket. While there are more than 20 buckets, numbers of
    rows between the smallest and the largest are left out.

    With `join`, the grid may have one more row length: the whole budget, at most 8192 tokens, if
    this is at least 1.5 times the longest other row. A long row holds many sequences with little
    padding. `join` is for programs in which a sequence costs the same in a row of any length.
    """
    # powers of two, and the limit rounded up to full tiles
    longest = -(-min(limit, LONGEST_DEFAULT_ROW) // tile) * tile
    unit = max(tile, SHORTEST_ROW)  # every length and every kernel's tile is a multiple of it
    lengths = [2**k for k in range(4, 14) if unit <= 2**k < longest] + [longest]
    # row length -> numbers of rows on a device
    per_device = {length: _powers(max(max_batch_tokens // length, 1)) for length in lengths}
    joined = min(max_batch_tokens, LONGEST_DEFAULT_ROW) // unit * unit
    if join and joined >= 1.5 * lengths[-1]:
        per_device[joined] = [1]
    while sum(map(len, per_device.values())) > MAX_DEFAULT_BUCKETS:
        # of the row length with the most buckets, every second number of rows is left out
        densest = max(per_device, key=lambda length: (len(per_device[length]), length))
        rows = per_device[densest]
        if len(rows) <= 2:
            break
        per_device[densest] = [*rows[:-1:2], rows[-1]] if len(rows) > 3 else [rows[0], rows[-1]]
    return BucketGrid(
        tuple(Bucket(r * shards, length) for length, rows in per_device.items() for r in rows)
    )


def one_length_grid(
    length: int, max_batch_tokens: int, shards: int = 1, tile: int = SHORTEST_ROW
) -> BucketGrid:
    """Return a grid for sequences that all have `length` tokens, such as images of one size.

    There are two row lengths: for one sequence, and for the number of sequences that leaves the
    least padding. Both are multiples of `tile`. A row has a slot for each of these sequences; a
    head takes time for every slot, used or not. On each of the `shards` devices, numbers of rows
    are powers of four, and the largest power of two that fits in `max_batch_tokens`, the token
    budget of a device.
    """

    def row(count: int) -> int:  # the row length for `count` sequences
        return -(-count * length // tile) * tile

    largest = min(max_batch_tokens // row(1), MAX_SLOTS)
    counts = [1, *(count for count in range(2, largest + 1) if row(count) <= max_batch_tokens)]
    best_count = max(counts, key=lambda count: (round(count * length / row(count), 2), -count))
    row_lengths = sorted({row(1), row(best_count)})
    per_device = {row_len: _powers(max(max_batch_tokens // row_len, 1)) for row_len in row_lengths}
    if len(row_lengths) > 1:  # rows for one sequence are only for small batches
        max_rows = max(best_count // 2, 1)
        per_device[row(1)] = [rows for rows in per_device[row(1)] if rows <= max_rows] or [1]
    return BucketGrid(
        tuple(
            Bucket(r * shards, row_len, slots=row_len // length)
            for row_len, rows in per_device.items()
            for r in rows
        )
    )


@dataclass(frozen=True)
class GridFile:
    """The content of a --buckets file, not yet checked against a model."""

    path: Path
    buckets: tuple[Bucket, ...]
    max_batch_tokens: int | None = None  # token budget of one device; None if the file has none
    # what `jaxembed tune` adds: the model and device that the grid is for, and timings
    tuned: dict[str, Any] = field(default_factory=dict)

    def grid(self, limit: int, max_batch_tokens: int, shards: int = 1) -> BucketGrid:
        """Return the grid of these buckets, for inputs of up to `limit` tokens.

        Raises ConfigError if there is no bucket, if a row has fewer than SHORTEST_LENGTH tokens, if
        a bucket exceeds the token budget of a device, if rows cannot be divided equally among
        `shards` devices, or if no row holds an input of `limit` tokens.
        """
        if problems := list(_problems(self.buckets, limit, max_batch_tokens, shards)):
            raise ConfigError(f"--buckets {self.path}: " + "; ".join(problems))
        return BucketGrid(self.buckets)


def read_grid(path: Path) -> GridFile:
    """Read a grid file: {"buckets": [[rows, length], ...]}, and what `jaxembed tune` adds.

    Raises ConfigError if the file cannot be read or has another form.
    """
    content = read_user_json(path, f"--buckets {path}", GRID_FORM)
    if problem := next(_malformed(content), None):
        tuned = content.get("tuned") if isinstance(content, dict) else None
        versions = tuned.get("versions") if isinstance(tuned, dict) else None
        writer = versions.get("jaxembed") if isinstance(versions, dict) else None
        hint, version = "", metadata.version("jaxembed")
        if writer not in (None, version):
            hint = (
                f"; the file was written by jaxembed {shown(writer)}, and this is {version}: run "
                "`jaxembed tune` again"
            )
        raise ConfigError(f"--buckets {path}: {problem}; expected {GRID_FORM}{hint}")
    buckets = tuple(sorted({Bucket(rows, length) for rows, length in content["buckets"]}))
    return GridFile(path, buckets, content.get("max_batch_tokens"), content.get("tuned", {}))


def _malformed(content: Any) -> Iterator[str]:
    """Yield a message for each error in the form of `content`, the parsed JSON of a grid file."""
    if not isinstance(content, dict):
        yield f"the file contains {shown(content)}"
    elif "buckets" not in content:
        yield 'the key "buckets" is missing'
    elif not isinstance(content["buckets"], list):
        yield f'"buckets" is {shown(content["buckets"])}, not a list'
    else:
        for number, pair in enumerate(content["buckets"]):
            numbers = pair if isinstance(pair, list) else []
            if [type(n) for n in numbers] != [int, int]:
                yield f"buckets[{number}] is {shown(pair)}, not two integers"
        budget, tuned = content.get("max_batch_tokens"), content.get("tuned", {})
        if budget is not None and (type(budget) is not int or budget < 1):
            yield (
                f'"max_batch_tokens" is {shown(budget)}, not an integer of 1 or more; remove it, '
                "or set --max-batch-tokens instead"
            )
        if not isinstance(tuned, dict):
            yield f'"tuned" is {shown(tuned)}, not an object'


def _problems(buckets: Sequence[Bucket], limit: int, budget: int, shards: int) -> Iterable[str]:
    """Yield the reasons why a model cannot use these buckets, as messages.

    `limit` is the largest number of tokens of an input, and `budget` that of a batch on a device.
    """
    if not buckets:
        yield "the file contains no buckets"
        return
    for b in buckets:
        if b.rows < 1 or b.length < 1:
            yield f"bucket {b} has no tokens"
        elif b.length < SHORTEST_LENGTH:
            yield f"bucket {b} is too short: a row must have {SHORTEST_LENGTH} tokens or more"
        elif b.rows % shards:
            yield (
                f"the rows of bucket {b} cannot be divided into {shards} equal parts, which "
                "different devices compute"
            )
        elif b.tokens > budget * shards:
            yield (
                f"bucket {b} has {b.tokens} tokens, more than max_batch_tokens={budget}"
                f"{f' on each of {shards} devices' if shards > 1 else ''}; raise --max-batch-tokens"
            )
    longest = max(b.length for b in buckets)
    if longest < limit:
        yield (
            f"the longest row has {longest} tokens, and the model's limit is {limit}; add a longer "
            f"bucket or set --max-input-length {longest}"
        )


def _powers(max_rows: int) -> list[int]:
    """Return numbers of rows up to `max_rows`: powers of four, and the largest power of two."""
    largest = 2 ** (max_rows.bit_length() - 1)
    return sorted({largest, *(4**k for k in range(8) if 4**k < largest)})
