"""The static shapes that programs are compiled for. Knows no JAX and no queue."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed.errors import ConfigError
from jaxembed.json_file import read_user_json, shown

SHORTEST_ROW = 16  # a lone query of MiniLM takes 2.5 ms in it and 3.4 ms in a row of 32
LONGEST_DEFAULT_ROW = 8192
MOST_DEFAULT_BUCKETS = 20
TPU_TILE = 128  # lanes of a register: shorter rows leave them idle, and splash takes none
MOST_SLOTS = 128  # in a row: pooling costs slots * length, and short texts have shorter rows
SHORTEST_LENGTH = 2  # of a row: the bounds of its one slot take two places of a plane
TOKENS_PER_SLOT = 4  # of a row; two of them hold the bounds of its slot
NO_ROW = 2**31 - 1  # as a row length: no row has so many slots
GRID_FORM = '{"buckets": [[rows, length], ...]}, as `jaxembed tune` writes it'


def least_row(length: int, slots: int) -> int:
    """The length of the shortest row that has room for a sequence of `length` tokens with `slots`
    slots. Every longer row has room for it too, so `Bucket.fits` needs only this number."""
    if slots == 1:
        return length
    return max(length, TOKENS_PER_SLOT * slots) if slots <= MOST_SLOTS else NO_ROW


@dataclass(frozen=True, order=True)
class Bucket:
    """A batch of `rows` rows of `length` tokens, each with room for `slots` pooled outputs."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def slots(self) -> int:
        """Sequences or spans that a row holds. A quarter of its tokens is enough for real queries:
        at most 5 in a row of 32 and 16 in one of 128 were seen on MS MARCO's."""
        return min(max(self.length // TOKENS_PER_SLOT, 1), MOST_SLOTS)

    def fits(self, least_row: int | np.ndarray) -> bool | np.ndarray:
        """Whether a sequence with this `least_row` fits an empty row; for an array of several the
        answer is an array."""
        return least_row <= self.length

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


@dataclass(frozen=True)
class BucketGrid:
    """The buckets of one model, by length and then by rows."""

    buckets: tuple[Bucket, ...]

    @property
    def max_length(self) -> int:
        """Of a row, which may be longer than an input may be."""
        return max(bucket.length for bucket in self.buckets)

    @property
    def most_slots(self) -> int:
        """The most slots of a row: spans that one input may have."""
        return max(bucket.slots for bucket in self.buckets)

    @property
    def covering(self) -> tuple[Bucket, ...]:
        """What must be compiled to serve anything: each length at its fewest rows, shortest
        first, and the largest bucket, unless one of these has as many tokens. With them every
        request has a place."""
        fewest = {b.length: b for b in sorted(self.buckets, reverse=True)}
        first = sorted(fewest.values(), key=lambda b: b.length)
        largest = max(self.buckets, key=lambda b: (b.tokens, -b.length))
        rest = [] if any(b.tokens == largest.tokens for b in first) else [largest]
        return (*first, *rest)

    @property
    def by_use(self) -> tuple[Bucket, ...]:
        """Every bucket in the order to compile them: the covering ones, then the largest."""
        rest = sorted(set(self.buckets) - set(self.covering), key=lambda b: (-b.tokens, b.length))
        return self.covering + tuple(rest)


def default_grid(
    limit: int, max_batch_tokens: int, shards: int = 1, tile: int = 1, join: bool = False
) -> BucketGrid:
    """At most 20 buckets for sequences up to `limit` tokens.

    Lengths are powers of two from 16, the last one the limit itself; rows are powers of two (times
    `shards`) from one to what the token budget of a device holds. Rows longer than the budget come
    one at a time. While there are more than 20 buckets, rows between the fewest and the most are
    thinned out. With a `tile` all lengths are multiples of it.

    With `join` there is one row of the whole budget as well, where that is half as long again as
    the limit at least: the more inputs share a row, the less of it they leave. It is for programs
    in which a sequence costs the same however long its row is.
    """
    lengths = _lengths(min(limit, LONGEST_DEFAULT_ROW), tile)
    per_device = {length: _powers(max(max_batch_tokens // length, 1)) for length in lengths}
    unit = max(tile, SHORTEST_ROW)  # no length is finer, and no kernel's tile
    joined = min(max_batch_tokens, LONGEST_DEFAULT_ROW) // unit * unit
    if join and joined >= 1.5 * lengths[-1]:
        per_device[joined] = [1]
    while sum(map(len, per_device.values())) > MOST_DEFAULT_BUCKETS:
        widest = max(per_device, key=lambda length: (len(per_device[length]), length))
        rows = per_device[widest]
        if len(rows) <= 2:
            break
        per_device[widest] = [*rows[:-1:2], rows[-1]] if len(rows) > 3 else [rows[0], rows[-1]]
    return BucketGrid(
        tuple(Bucket(r * shards, length) for length, rows in per_device.items() for r in rows)
    )


@dataclass(frozen=True)
class GridFile:
    """What a file of --buckets says, not yet held against a model."""

    path: Path
    buckets: tuple[Bucket, ...]
    max_batch_tokens: int | None = None  # of one device; None: as without a file
    tuned: dict[str, Any] = field(default_factory=dict)  # by `jaxembed tune`: on what, and how

    def grid(self, limit: int, max_batch_tokens: int, shards: int = 1) -> BucketGrid:
        """The grid, if it serves inputs up to the limit.

        Raises ConfigError for a bucket over the token budget of a device, rows that don't divide
        over the devices, or a grid too short for the limit.
        """
        if problems := list(_problems(self.buckets, limit, max_batch_tokens, shards)):
            raise ConfigError(f"--buckets {self.path}: " + "; ".join(problems))
        return BucketGrid(self.buckets)


def read_grid(path: Path) -> GridFile:
    """A grid from a file: {"buckets": [[rows, length], ...]}, and what `jaxembed tune` adds.

    Raises ConfigError for a file that can't be read or says something else.
    """
    said = read_user_json(path, f"--buckets {path}", GRID_FORM)
    if problem := next(_malformed(said), None):
        raise ConfigError(f"--buckets {path}: {problem}; wanted {GRID_FORM}{_of_another(said)}")
    buckets = sorted({Bucket(rows, length) for rows, length in said["buckets"]})
    return GridFile(path, tuple(buckets), said.get("max_batch_tokens"), said.get("tuned", {}))


def _malformed(said: Any) -> Iterator[str]:
    if not isinstance(said, dict):
        yield f"it holds {shown(said)}"
    elif "buckets" not in said:
        yield 'there is no "buckets" in it'
    elif not isinstance(said["buckets"], list):
        yield f'"buckets" is {shown(said["buckets"])}, no list'
    else:
        for number, pair in enumerate(said["buckets"]):
            numbers = pair if isinstance(pair, list) else []
            if [type(n) for n in numbers] != [int, int]:
                yield f"buckets[{number}] is {shown(pair)}, not two whole numbers"
        budget, tuned = said.get("max_batch_tokens"), said.get("tuned", {})
        if budget is not None and (type(budget) is not int or budget < 1):
            yield (
                f'"max_batch_tokens" is {shown(budget)}, no whole number from 1 on; leave it to '
                "--max-batch-tokens"
            )
        if not isinstance(tuned, dict):
            yield f'"tuned" is {shown(tuned)}, no object'


def _of_another(said: Any) -> str:
    """What to add about a file that another version of `jaxembed tune` wrote."""
    tuned = said.get("tuned") if isinstance(said, dict) else None
    versions = tuned.get("versions") if isinstance(tuned, dict) else None
    writer = versions.get("jaxembed") if isinstance(versions, dict) else None
    here = metadata.version("jaxembed")
    if writer in (None, here):
        return ""
    return f"; jaxembed {shown(writer)} wrote it, this is {here}: run `jaxembed tune` again"


def _problems(buckets: Sequence[Bucket], limit: int, budget: int, shards: int) -> Iterable[str]:
    if not buckets:
        yield "no bucket in it"
        return
    for b in buckets:
        if b.rows < 1 or b.length < 1:
            yield f"bucket {b} has no tokens"
        elif b.length < SHORTEST_LENGTH:
            yield f"bucket {b} is too short: a row has {SHORTEST_LENGTH} tokens or more"
        elif b.rows % shards:
            yield f"{b.rows} rows of bucket {b} do not divide over {shards} devices"
        elif b.tokens > budget * shards:
            yield (
                f"bucket {b} holds {b.tokens} tokens, over max_batch_tokens={budget}"
                f"{f' on each of {shards} devices' if shards > 1 else ''}; raise --max-batch-tokens"
            )
    longest = max(b.length for b in buckets)
    if longest < limit:
        yield (
            f"its longest row holds {longest} tokens, the model's limit is {limit}; add a longer "
            f"bucket or set --max-input-length {longest}"
        )


def _lengths(limit: int, tile: int) -> list[int]:
    longest = -(-limit // tile) * tile
    shortest = max(SHORTEST_ROW, tile)
    return [2**k for k in range(4, 14) if shortest <= 2**k < longest] + [longest]


def _powers(most: int) -> list[int]:
    """1, 4, 16, ... and the largest power of two that fits."""
    largest = 2 ** (most.bit_length() - 1)
    return sorted({largest, *(4**k for k in range(8) if 4**k < largest)})
