"""Decodes JSON into Structs without holding the event loop for long. Knows no route and no fields.

msgspec decodes in one call, which holds the interpreter lock, builds all it reads before it checks
how much that is, and wakes the cyclic collector often: 32 MiB of `[],` took 3 s and 900 MB. A
body of more than AT_ONCE bytes is therefore read in two steps. A skim checks that it is JSON and
finds its fields, whose lists and objects it leaves as they came. Then each list is cut into slices
of whole items, each slice is decoded by itself, and the loop has a turn between slices.
"""

import asyncio
import gc
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import asdict, fields

from jaxembed.server.errors import BadField, BadJson

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

AT_ONCE = 64 * 1024  # a body of this size takes 2 ms at worst
WINDOW = 32 * 1024  # a slice is at most twice as long, unless it is one item
SHOWN_DIGITS = 40  # of a number in a message
LONG_IDS = 256  # token ids in an item of a list: more become an array, of 4 bytes each

# Raises InvalidInput if a list has too many items: its place, such as `inputs`, and how many it has
# at least. A list of token ids is one input, and not counted.
CheckCount = Callable[[str, int], None]

_Kind = TypeVar("_Kind")

_COMMA, _QUOTE = b',"'
_STRUCTURAL = bytes(byte in b'"[]{},' for byte in range(256))
_STEPS = np.array([(byte in b"[{") - (byte in b"]}") for byte in range(256)], np.int8)
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Raised where a path leads nowhere: the body is not JSON after all, or another value is there.
_UNREADABLE = (*_UNDECODABLE, IndexError)
_OPENER = re.compile(rb"[ \t\r\n]*+(.?)", re.DOTALL)


async def decode(
    data: bytes | bytearray | msgspec.Raw,
    kind: type[_Kind],
    check: CheckCount,
    at_once: int = AT_ONCE,
) -> _Kind:
    """JSON as `kind`, a Struct; a bad field answers with its path, such as `$.dimensions`.

    Of a body of more than `at_once` bytes a list of token ids comes as an `array`.
    """
    if len(data) > at_once:
        return await _decode_part(memoryview(data), kind, "$", check)
    try:
        return msgspec.json.decode(data, type=kind)
    except _UNDECODABLE as error:
        raise _refusal(error, data, named=kind) from error


def mixed(field: str, i: int, wanted: str, got: str) -> BadField:
    """An item of another kind than those before it; `got` is msgspec's word for its kind."""
    return BadField(f"Expected {wanted}, got `{got}` - at `$.{field}[{i}]`", field=f"{field}[{i}]")


@dataclass(frozen=True)
class _Forms:
    """What a type takes besides scalars."""

    struct: type[msgspec.Struct] | None = None
    item: Any = None  # the type of the items, if it takes a list
    free: bool = False  # it takes JSON of no certain shape


@cache
def _forms(kind: Any) -> _Forms:
    struct = item = None
    free = False
    for member in _members(kind):
        origin = get_origin(member) or member
        if origin is list:
            (item,) = get_args(member) or (Any,)
        elif origin is dict or origin is Any:
            free = True
        elif isinstance(origin, type) and issubclass(origin, msgspec.Struct):
            struct = origin
    return _Forms(struct, item, free)


@cache
def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(one for member in get_args(kind) for one in _members(member))
    if get_origin(kind) is Annotated and kind != TokenId:
        return _members(get_args(kind)[0])
    return (kind,)


@cache
def _skim(kind: type[msgspec.Struct]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """`kind` with its lists and objects left as JSON, and the types of the fields left so."""
    left = {field.name: field.type for field in fields(kind) if _forms(field.type) != _Forms()}
    skimmed = []
    for field in fields(kind):
        form = msgspec.Raw if field.name in left else field.type
        unset = (Union[form, msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007, not for Literal
        skimmed.append((field.name, form) if field.required else (field.name, *unset))
    forbids = kind.__struct_config__.forbid_unknown_fields
    skim = msgspec.defstruct(kind.__name__, skimmed, kw_only=True, forbid_unknown_fields=forbids)
    return skim, left


async def _decode_part(part: memoryview, kind: Any, place: str, check: CheckCount) -> Any:
    """One value of a large body; `place` is its path."""
    await asyncio.sleep(0)
    forms = _forms(kind)
    opener = _OPENER.match(part)
    assert opener is not None
    match opener[1]:
        case b"[" if forms.item is not None:
            return await _decode_list(part[opener.start(1) :], forms.item, place, check)
        case b"{" if forms.struct is not None:
            skim, left = _skim(forms.struct)
            values = asdict(_decode_slice(part, skim, place, named=forms.struct))
            values = {name: one for name, one in values.items() if one is not msgspec.UNSET}
            for name, value in values.items():
                if name in left:
                    inside = f"{place}.{name}"
                    values[name] = await _decode_part(memoryview(value), left[name], inside, check)
            try:
                return forms.struct(**values)
            except ValueError as error:  # of the Struct's own checks, as msgspec reports it
                raise BadField(f"{error} - at `{place}`", field=_field(place)) from error
        case b"[" | b"{" if forms.free and len(part) > AT_ONCE:
            raise BadField(
                f"Expected at most {AT_ONCE} bytes of JSON, got {len(part)} - at `{place}`",
                field=_field(place),
            )
    return _decode_slice(part, kind, place)


async def _decode_list(
    part: memoryview, item: Any, place: str, check: CheckCount
) -> list[Any] | array:
    opener = _OPENER.match(part, 1)
    assert opener is not None
    if opener[1] == b"]":
        return []
    are_ids = TokenId in _members(item) and opener[1] in b"-0123456789"
    items: list[Any] | array = array("I") if are_ids else []
    for piece, count in _slices(part):
        await asyncio.sleep(0)
        if not count:
            continue
        first = len(items)
        if isinstance(items, array):
            items.fromlist(_decode_token_ids(piece, item, place, first))
            continue
        check(_field(place), first + count)
        if count == 1 and len(piece) > WINDOW:
            items.append(await _decode_part(piece, item, f"{place}[{first}]", check))
            continue
        more = _decode_slice(b"".join((b"[", piece, b"]")), list[item], place, first=first)
        if _forms(item).item == TokenId:
            for i, one in enumerate(more):
                if isinstance(one, list) and len(one) > LONG_IDS:
                    more[i] = array("I", one)
        items += more
    return items


def _slices(part: memoryview) -> Iterator[tuple[memoryview, int]]:
    """Slices of whole items of a list, which is known to be JSON, and how many items each has.

    An item longer than WINDOW is a slice by itself. For a window in which no item ends there is an
    empty slice, so that whoever iterates may pause.
    """
    start = 0  # of the window
    begin = 1  # of the slice
    depth, quoted = 0, False
    while start < len(part):
        window = bytes(part[start : start + WINDOW])
        window = window.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        window = window.removesuffix(b"\\")  # with what it escapes in the next one
        ends, depth, quoted = _item_ends(window, depth, quoted)
        ends += start
        start += len(window)
        if len(ends) and ends[0] - begin > WINDOW:
            yield part[begin : ends[0]], 1
            begin, ends = ends[0] + 1, ends[1:]
        if len(ends):
            yield part[begin : ends[-1]], len(ends)
            begin = ends[-1] + 1
        else:
            yield part[:0], 0


def _item_ends(window: bytes, depth: int, quoted: bool) -> tuple[np.ndarray, int, bool]:
    """Where the items of a list end, each at a comma or at the list's own bracket.

    `depth` is how many brackets are open, `quoted` whether a string is, before the window and, in
    what comes back, after it. No quote in the window is escaped.
    """
    places = np.flatnonzero(np.frombuffer(window.translate(_STRUCTURAL), bool))
    if not len(places):
        return places, depth, quoted
    marks = np.frombuffer(window, np.uint8)[places]
    inside = np.logical_xor.accumulate(marks == _QUOTE) ^ quoted
    depths = np.cumsum(_STEPS.take(marks) * ~inside, dtype=np.int32) + np.int32(depth)
    ends = ~inside & (((marks == _COMMA) & (depths == 1)) | (depths == 0))
    return places[ends], int(depths[-1]), bool(inside[-1])


def _decode_token_ids(piece: memoryview, item: Any, place: str, first: int) -> list[int]:
    """Some items of a list that began with a token id."""
    data = b"".join((b"[", piece, b"]"))
    try:
        with _collector_paused():
            return msgspec.json.decode(data, type=list[TokenId])
    except msgspec.ValidationError as error:
        other = re.search(r"got `(str|array|object)` - at `\$\[(\d+)\]`$", str(error))
        forms = _forms(item)
        is_taken = {
            "str": str in _members(item),
            "array": forms.item is not None,
            "object": forms.struct is not None,
        }
        if other and is_taken[other[1]]:
            i, wanted = first + int(other[2]), "a token id, as the items before it"
            raise mixed(_field(place), i, wanted, other[1]) from error
    return _decode_slice(data, list[item], place, first=first)  # raises, naming all that it takes


def _decode_slice(
    data: bytes | bytearray | memoryview,
    kind: Any,
    place: str,
    *,
    first: int = 0,
    named: type | None = None,
) -> Any:
    """The value at `place`, or the items of the list at `place` from the index `first` on.

    Errors list the names that a field takes, if `named` is the Struct with the field.
    """
    try:
        with _collector_paused():
            return msgspec.json.decode(data, type=kind)
    except _UNDECODABLE as error:
        raise _refusal(error, data, place, first=first, named=named) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """The cyclic collector walks what is being built again and again: half of the time or more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refusal(
    error: Exception,
    data: bytes | bytearray | memoryview | msgspec.Raw,
    place: str = "$",
    *,
    first: int = 0,
    named: type | None = None,
) -> BadJson | BadField:
    """The error about `data` in words for a client, with the path from the top of the body, and the
    number that came where it is too small or too large. Arguments are as in `_decode_slice`."""
    words, path = str(error), ""
    if isinstance(error, UnicodeDecodeError):
        return BadJson("the body is not valid UTF-8")
    if isinstance(error, RecursionError):
        return BadJson("the body nests too deeply")
    if not isinstance(error, msgspec.ValidationError):
        if not memoryview(data).nbytes:
            words = "the body is empty"
        elif "truncated" in words:
            words = "the body ends too early, or holds a lone surrogate"
        elif "hex escape" in words:
            words = f"an escape is cut short, or holds a lone surrogate: {words}"
        return BadJson(words)
    if found := re.search(r" - at `\$([^`]*)`$", words):
        words, path = words[: found.start()], found[1]
    if words.startswith(("Expected `int` <=", "Expected `int` >=")):
        with suppress(*_UNREADABLE):
            words += f", got {_shown_at(path, data)}"
    if first:
        path = re.sub(r"^\[(\d+)\]", lambda index: f"[{first + int(index[1])}]", path)
    place += path
    if place == "$":
        return BadField(words)
    field = _field(place)
    # msgspec says that a name is not among those that a field takes, or that it is no text
    is_of_name = words.startswith(("Invalid enum value", "Expected"))
    hints = get_type_hints(named) if named and is_of_name else {}
    names = _literals(hints.get(field.partition("[")[0]))
    allowed = f"; wanted one of {', '.join(map(repr, names))}" if names else ""
    return BadField(f"{words} - at `{place}`{allowed}", field=field)


def _shown_at(path: str, data: bytes | bytearray | memoryview | msgspec.Raw) -> str:
    """The JSON of the value at a path such as `.inputs[3][0]`, cut if it is long. Only what leads
    there is decoded.

    Raises one of _UNREADABLE if what follows the value is not JSON, or if another value has the
    same path.
    """
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if key:
            one = msgspec.defstruct("One", [(key, msgspec.Raw)])
            data = getattr(msgspec.json.decode(data, type=one), key)
        else:
            data = msgspec.json.decode(data, type=list[msgspec.Raw])[int(index)]
    shown = bytes(data).decode()
    return shown if len(shown) <= SHOWN_DIGITS else f"{shown[:SHOWN_DIGITS]}..."


def _field(place: str) -> str:
    return place.removeprefix("$").removeprefix(".")


def _literals(hint: Any) -> list[str]:
    """The texts among the literal values of a type and of its parts."""
    if isinstance(hint, str):
        return [hint]
    return [name for part in get_args(hint) for name in _literals(part)]
