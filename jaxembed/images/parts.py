"""Counts the parts of an image's file before a decoder reads it: some decoders take long for each
part, however small the image is."""

import re

from jaxembed.errors import InvalidImage

MOST_FILE_PARTS = 10_000  # segments of a JPEG, or chunks of a PNG
MOST_SCANS = 100  # of a JPEG; a progressive one has about ten, and each goes over all pixels
JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
SCAN, END = 0xDA, 0xD9  # the markers with which a scan begins and an image ends
ALONE = (0x01, 0xD8)  # markers without a length; those within a scan are none here
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def check_parts(data: bytes) -> None:
    """Raise InvalidImage for a file of more parts than real ones have. Others are not looked at."""
    if data.startswith(JPEG):
        _check_jpeg(data)
    elif data.startswith(PNG):
        _check_png(data)


def _check_jpeg(data: bytes) -> None:
    """Count the segments and the scans of the first image: further ones and videos may follow."""
    parts = scans = 0
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
        parts += 1
        _check_count(parts)


def _check_png(data: bytes) -> None:
    at, parts = len(PNG), 0
    while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
        at += 12 + int.from_bytes(data[at : at + 4])  # with its length, name and checksum
        parts += 1
        _check_count(parts)


def _check_count(parts: int) -> None:
    if parts > MOST_FILE_PARTS:
        raise InvalidImage(f"the image has over {MOST_FILE_PARTS} parts; save it anew")
