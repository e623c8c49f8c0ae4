"""Counts the parts of an image's file before a decoder reads it: some decoders take long for each
part, however small the image is."""

import math
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from jaxembed.errors import InvalidImage

MOST_FILE_PARTS = 10_000  # segments of a JPEG, or chunks of a PNG
MOST_SCANS = 100  # of a JPEG; a progressive one has about ten, and each goes over all pixels
JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
SCAN, END = 0xDA, 0xD9  # the markers with which a scan begins and an image ends
ALONE = (0x01, 0xD8)  # markers without a length; those within a scan are none here
TILE_SIDES = (322, 323)  # the tags TileWidth and TileLength of a TIFF
TIFF_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}  # by their type
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


@dataclass(frozen=True)
class _TiffForm:
    """Where the entries of a TIFF's directory are, in bytes and as formats of struct."""

    first: int  # where the offset of the directory is
    offset: str
    count: str  # of the entries, before the first of them
    entry: int  # the size of one
    tag: str  # of an entry, and the type of its value
    value: int  # where in an entry its value is, or the offset of a value that is larger than one


TIFF_FORMS = {
    order + version.to_bytes(2, "little" if sign == "<" else "big"): _TiffForm(
        first, sign + offset, sign + count, entry, f"{sign}HH", value
    )
    for order, sign in ((b"II", "<"), (b"MM", ">"))
    for version, first, offset, count, entry, value in (
        (42, 4, "I", "H", 12, 8),
        (43, 8, "Q", "Q", 20, 12),  # BigTIFF
    )
}
"""By the bytes that a file begins with."""


def check_parts(data: bytes) -> None:
    """Raise InvalidImage for a file of more parts than real ones have. Others are not looked at."""
    for parts, _ in enumerate(_parts_of(data), start=1):
        if parts > MOST_FILE_PARTS:
            raise InvalidImage(f"the image has over {MOST_FILE_PARTS} parts; save it anew")


def tile_pixels(data: bytes) -> int:
    """The pixels of a tile of a TIFF; 0 for other files. A decoder takes memory for a whole tile,
    however small the image is; strips it cuts to the image.

    Of a tag that comes several times the largest value counts: libtiff reads the first, Pillow the
    last.
    """
    form = TIFF_FORMS.get(data[:4])
    if form is None:
        return 0
    sides = {tag: 0 for tag in TILE_SIDES}
    with suppress(struct.error):  # of a file that ends early, which the decoder refuses
        (start,) = struct.unpack_from(form.offset, data, form.first)
        (entries,) = struct.unpack_from(form.count, data, start)
        start += struct.calcsize(form.count)
        for at in range(start, start + entries * form.entry, form.entry):
            tag, kind = struct.unpack_from(form.tag, data, at)
            if tag in sides and kind in TIFF_INTEGERS:
                integer = form.tag[0] + TIFF_INTEGERS[kind]
                at += form.value
                if struct.calcsize(integer) > struct.calcsize(form.offset):
                    (at,) = struct.unpack_from(form.offset, data, at)
                sides[tag] = max(sides[tag], *struct.unpack_from(integer, data, at))
    return math.prod(sides.values())


def _parts_of(data: bytes) -> Iterator[int]:
    """Where each chunk of a PNG ends, or each segment of the first image of a JPEG, which further
    ones and videos may follow. Raises InvalidImage for more scans than real JPEGs have."""
    at, scans = len(PNG), 0
    if data.startswith(PNG):
        while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
            at += 12 + int.from_bytes(data[at : at + 4])  # with its length, name and checksum
            yield at
    if not data.startswith(JPEG):
        return
    at = len(JPEG)
    has_few = data.count(bytes((0xFF, SCAN))) <= MOST_SCANS  # then segments before them are enough
    while (found := _MARKER.search(data, at)) is not None:
        kind = found[0][1]
        if kind == END or (kind == SCAN and has_few):
            return
        scans += kind == SCAN
        if scans > MOST_SCANS:
            raise InvalidImage(f"the image has over {MOST_SCANS} scans; save it anew")
        at = found.end()
        if kind not in ALONE:
            at += int.from_bytes(data[at : at + 2])
        yield at
