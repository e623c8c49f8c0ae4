"""Decodes JSON into Structs in slices, so that other tasks of the event loop can run in between.

msgspec decodes a body in one call, which holds the interpreter lock, builds all values before their
number can be checked, and often starts the cyclic garbage collector: 32 MiB of `[],` took 3 s and
900 MB. So a body of more than AT_ONCE bytes is decoded in two steps. A skim checks that the body is
JSON and finds its fields, but leaves lists and objects as raw JSON. Then each list is divided into
slices of whole items, and each slice is decoded by itself.
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
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import asdict, fields

from jaxembed.server.errors import BadField, BadJson

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

AT_ONCE = 64 * 1024  # bytes that are decoded in one call, in 2 ms at worst
WINDOW = 32 * 1024  # bytes; a slice is at most twice as long, unless it is one item
SHOWN_DIGITS = 40  # maximum characters of a value in a message
LONG_IDS = 256  # a longer sequence of token ids becomes an `array` of 4 bytes for each id

# Called with the path of a list, such as `inputs`, and the number of its items that were found so
# far. Raises InvalidInput if the list has too many items. A list of token ids is one input, so it
# is not checked.
CheckCount = Callable[[str, int], None]

_Kind = TypeVar("_Kind")

_COMMA, _QUOTE = b',"'
_STRUCTURAL = bytes(byte in b'"[]{},' for byte in range(256))
_STEPS = np.array([(byte in b"[{") - (byte in b"]}") for byte in range(256)], np.int8)
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The errors of `_shown_at` if there is no value at the path.
_UNREADABLE = (*_UNDECODABLE, IndexError)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of the path of a value: a key or an index
# Group 1 is the first byte of a value. The pattern matches any text.
_OPENER = re.compile(rb"[ \t\r\n]*+(.?)", re.DOTALL)


async def decode(
    data: bytes | bytearray | msgspec.Raw,
    kind: type[_Kind],
    check: CheckCount,
    at_once: int = AT_ONCE,
) -> _Kind:
    """Decode JSON as `kind`, a Struct.

    A body of more than `at_once` bytes is decoded in slices. For such a body, `check` is called for
    each list as it grows, and a list of token ids may become an `array`. Raises BadJson, BadField
    with a path such as `$.dimensions`, and the InvalidInput that `check` or the Struct raises.
    """
    if len(data) > at_once:
        return await _decode_part(memoryview(data), kind, "$", check)
    try:
        return msgspec.json.decode(data, type=kind)
    except _UNDECODABLE as error:
        raise _refusal(error, data, "$", 0, kind) from error


def mixed_items_error(field: str, i: int, wanted: str, got: str) -> BadField:
    """Return the error for a list whose item `i` is of another kind than the items before it.
    `wanted` describes the items before, and `got` is msgspec's name for the kind of item `i`."""
    return BadField(f"Expected {wanted}, got `{got}` - at `$.{field}[{i}]`", field=f"{field}[{i}]")


@dataclass(frozen=True)
class _Forms:
    """The lists and objects that a type accepts. Scalars are not noted."""

    struct: type[msgspec.Struct] | None = None  # the Struct, if the type accepts one
    item: Any = None  # the type of the items, if the type accepts a list
    free: bool = False  # whether the type accepts JSON of any shape


@cache
def _forms(kind: Any) -> _Forms:
    """Return the lists and objects that the type `kind` accepts."""
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
    """Return the member types of a union, or `kind` alone if it is no union. Annotations are left
    out, except the one that makes an integer a TokenId."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(leaf for member in get_args(kind) for leaf in _members(member))
    if get_origin(kind) is Annotated and kind != TokenId:
        return _members(get_args(kind)[0])
    return (kind,)


@cache
def _skim(kind: type[msgspec.Struct]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """Return a Struct like `kind` whose lists and objects stay raw JSON, and a dict of the fields
    that stay raw, with their types in `kind`. An optional field that the body lacks is UNSET."""
    raw_types = {field.name: field.type for field in fields(kind) if _forms(field.type) != _Forms()}
    skimmed = []
    for field in fields(kind):
        skim_type = msgspec.Raw if field.name in raw_types else field.type
        unset = (Union[skim_type, msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007, not for Literal
        skimmed.append((field.name, skim_type) if field.required else (field.name, *unset))
    forbids = kind.__struct_config__.forbid_unknown_fields
    skim = msgspec.defstruct(kind.__name__, skimmed, kw_only=True, forbid_unknown_fields=forbids)
    return skim, raw_types


async def _decode_part(part: memoryview, kind: Any, place: str, check: CheckCount) -> Any:
    """Decode one value of a large body as the type `kind`. A list is decoded slice by slice, and an
    object field by field. `place` is the path of the value in the body, such as `$.inputs`. Raises
    the errors of `decode`."""
    await asyncio.sleep(0)
    accepted = _forms(kind)
    opener = cast(re.Match[bytes], _OPENER.match(part))
    match opener[1]:
        case b"[" if accepted.item is not None:
            return await _decode_list(part[opener.start(1) :], accepted.item, place, check)
        case b"{" if accepted.struct is not None:
            skim, raw = _skim(accepted.struct)
            values = asdict(_decode_slice(part, skim, place, named=accepted.struct))
            values = {name: v for name, v in values.items() if v is not msgspec.UNSET}
            for name, value in values.items():
                if name in raw:
                    path = f"{place}.{name}"
                    values[name] = await _decode_part(memoryview(value), raw[name], path, check)
            try:
                return accepted.struct(**values)
            except ValueError as error:  # from the Struct's own checks; worded as by msgspec
                raise BadField(f"{error} - at `{place}`", field=_field(place)) from error
        # JSON of any shape is not divided
        case b"[" | b"{" if accepted.free and len(part) > AT_ONCE:
            raise BadField(
                f"Expected at most {AT_ONCE} bytes of JSON, got {len(part)} - at `{place}`",
                field=_field(place),
            )
    return _decode_slice(part, kind, place)


async def _decode_list(
    part: memoryview, item: Any, place: str, check: CheckCount
) -> list[Any] | array:
    """Decode a list in slices. `item` is the type of the items, and `place` the path of the list in
    the body. If the first item is a token id, all items must be token ids, and the result is an
    `array`. Raises the errors of `decode`."""
    opener = cast(re.Match[bytes], _OPENER.match(part, 1))  # from 1 on: after the list's bracket
    if opener[1] == b"]":
        return []
    are_ids = TokenId in _members(item) and opener[1] in b"-0123456789"
    items: list[Any] | array = array("I") if are_ids else []
    for piece, count in _slices(part):
        await asyncio.sleep(0)
        if not count:  # no item ends in this window
            continue
        first = len(items)
        if isinstance(items, array):
            items.fromlist(_decode_token_ids(piece, item, place, first))
            continue
        check(_field(place), first + count)
        if count == 1 and len(piece) > WINDOW:  # one long item: decode it part by part
            items.append(await _decode_part(piece, item, f"{place}[{first}]", check))
            continue
        values = _decode_slice(b"".join((b"[", piece, b"]")), list[item], place, first=first)
        if _forms(item).item == TokenId:  # the items may be lists of token ids
            for i, ids in enumerate(values):
                if isinstance(ids, list) and len(ids) > LONG_IDS:
                    values[i] = array("I", ids)
        items += values
    return items


def _slices(part: memoryview) -> Iterator[tuple[memoryview, int]]:
    """Yield slices of whole items of a JSON list, each with its number of items.

    `part` is the list with its brackets, which must be valid JSON. It is read in windows of WINDOW
    bytes. An item longer than WINDOW is a slice by itself. For a window in which no item ends, an
    empty slice is yielded, so that the caller can let other tasks run.
    """
    window_start = 0
    slice_start = 1  # after the list's bracket
    depth, quoted = 0, False
    while window_start < len(part):
        window = bytes(part[window_start : window_start + WINDOW])
        # Blank escaped quotes. A backslash at the end of the window is left to the next window.
        window = window.replace(b"\\\\", b"  ").replace(b'\\"', b"  ").removesuffix(b"\\")
        ends, depth, quoted = _item_ends(window, depth, quoted)
        ends += window_start  # now offsets in `part`
        window_start += len(window)
        if len(ends) and ends[0] - slice_start > WINDOW:
            yield part[slice_start : ends[0]], 1
            slice_start, ends = ends[0] + 1, ends[1:]
        if len(ends):
            yield part[slice_start : ends[-1]], len(ends)
            slice_start = ends[-1] + 1
        else:
            yield part[:0], 0


def _item_ends(window: bytes, depth: int, quoted: bool) -> tuple[np.ndarray, int, bool]:
    """Find where the items of a list end in a window: at a comma or the list's closing bracket.

    `depth` is the number of brackets that are open where the window begins, and `quoted` says
    whether a string is open there. The window must have no escaped quotes. Returns the offsets in
    the window at which items end, and `depth` and `quoted` at the end of the window.
    """
    offsets = np.flatnonzero(np.frombuffer(window.translate(_STRUCTURAL), bool))
    if not len(offsets):
        return offsets, depth, quoted
    chars = np.frombuffer(window, np.uint8)[offsets]
    is_in_string = np.logical_xor.accumulate(chars == _QUOTE) ^ quoted
    depths = np.cumsum(_STEPS.take(chars) * ~is_in_string, dtype=np.int32) + np.int32(depth)
    is_end = ~is_in_string & (((chars == _COMMA) & (depths == 1)) | (depths == 0))
    return offsets[is_end], int(depths[-1]), bool(is_in_string[-1])


def _decode_token_ids(piece: memoryview, item: Any, place: str, first: int) -> list[int]:
    """Decode a slice of a list of token ids: if the first item of a list is a token id, all must
    be.

    `piece` is the slice without brackets, `item` the type of the list's items, `place` the path of
    the list in the body, and `first` the index of the slice's first item in the list. Raises
    BadField.
    """
    data = b"".join((b"[", piece, b"]"))
    try:
        with _collector_paused():
            return msgspec.json.decode(data, type=list[TokenId])
    except msgspec.ValidationError as error:
        other = re.search(r"got `(str|array|object)` - at `\$\[(\d+)\]`$", str(error))
        forms = _forms(item)
        is_accepted = {
            "str": str in _members(item),
            "array": forms.item is not None,
            "object": forms.struct is not None,
        }
        if other and is_accepted[other[1]]:
            i, wanted = first + int(other[2]), "a token id like the items before it"
            raise mixed_items_error(_field(place), i, wanted, other[1]) from error
    # raises an error that names all accepted types
    return _decode_slice(data, list[item], place, first=first)


def _decode_slice(
    data: bytes | bytearray | memoryview | msgspec.Raw,
    kind: Any,
    place: str,
    *,
    first: int = 0,
    named: type | None = None,
) -> Any:
    """Decode `data`, a value or a slice of a list, as `kind`.

    The other arguments are for messages. `place` is the path of the value or of the whole list in
    the body, and `first` is the index of the slice's first item in the list. `named` is the Struct
    that `kind` stands for, if it is another one. If a value is not allowed, the message lists those
    that are. Raises BadJson and BadField.
    """
    try:
        with _collector_paused():
            return msgspec.json.decode(data, type=kind)
    except _UNDECODABLE as error:
        raise _refusal(error, data, place, first, named or kind) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would scan the growing values again and again, for
    half of the decoding time or more."""
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
    place: str,
    first: int,
    kind: Any,
) -> BadJson | BadField:
    """Convert an error of msgspec, raised while it decoded `data`, to an error for clients.

    The message has the path from the top of the body, and quotes a number that is out of range.
    `kind` is the type of `data`; `_decode_slice` describes the other arguments.
    """
    message, path = str(error), ""
    if isinstance(error, UnicodeDecodeError):
        return BadJson("the body is not valid UTF-8")
    if isinstance(error, RecursionError):
        return BadJson("the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        if not memoryview(data).nbytes:
            message = "the body is empty"
        elif "truncated" in message:
            message = "the body is incomplete, or has a lone surrogate"
        elif "hex escape" in message:
            message = f"an escape sequence is incomplete, or is a lone surrogate: {message}"
        return BadJson(message)
    if suffix := re.search(r" - at `\$([^`]*)`$", message):
        message, path = message[: suffix.start()], suffix[1]
    if message.startswith(("Expected `int` <=", "Expected `int` >=")):
        with suppress(*_UNREADABLE):
            message += f", got {_shown_at(path, data)}"
    # msgspec's errors for a value that is not listed, for one of another type, and for a field
    allowed = ""
    if message.startswith(("Invalid enum value", "Expected")):
        if values := [name for hint in _types_at(kind, path) for name in _literals(hint)]:
            allowed = f"; wanted one of {', '.join(map(repr, values))}"
    elif message.startswith("Object contains unknown field"):
        structs = [_forms(hint).struct for hint in _types_at(kind, path)]
        names = [f"`{field.name}`" for struct in structs if struct for field in fields(struct)]
        allowed = f"; its fields are {', '.join(names)}"
    if first:  # msgspec counts from the start of the slice
        path = re.sub(r"^\[(\d+)\]", lambda index: f"[{first + int(index[1])}]", path)
    place += path
    if place == "$":
        return BadField(message)
    field = _field(place)
    return BadField(f"{message} - at `{place}`{allowed}", field=field)


def _shown_at(path: str, data: bytes | bytearray | memoryview | msgspec.Raw) -> str:
    """Return the JSON of the value at a path in `data`, such as `.inputs[3][0]`, shortened for a
    message.

    Only the lists and objects on the path are decoded. Raises one of _UNREADABLE if there is no
    value at the path: `data` is not valid JSON, or has the same key twice.
    """
    for key, index in _STEP.findall(path):
        if key:
            holder = msgspec.defstruct("One", [(key, msgspec.Raw)])
            data = getattr(msgspec.json.decode(data, type=holder), key)
        else:
            data = msgspec.json.decode(data, type=list[msgspec.Raw])[int(index)]
    shown = bytes(data).decode()
    return shown if len(shown) <= SHOWN_DIGITS else f"{shown[:SHOWN_DIGITS]}..."


def _field(place: str) -> str:
    return place.removeprefix("$").removeprefix(".")


def _types_at(kind: Any, path: str) -> list[Any]:
    """Return the types that a value at a path in a value of the type `kind` may have."""
    hints = [kind]
    for key, _ in _STEP.findall(path):
        members = [member for hint in hints for member in _members(hint)]
        if key:
            structs = [one for one in members if _forms(one).struct]
            hints = [get_type_hints(one).get(key) for one in structs]
        else:
            hints = [item for one in members if get_origin(one) is list for item in get_args(one)]
    return hints


def _literals(hint: Any) -> list[str]:
    """Return all strings that are literal values of a type or of the types that it is made of."""
    if isinstance(hint, str):
        return [hint]
    return [name for part in get_args(hint) for name in _literals(part)]
