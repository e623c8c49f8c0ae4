"""Counts the parts of an image's file before a decoder reads it: some decoders take long for each
part, however small the image is."""

from jaxembed.errors import InvalidImage

MOST_FILE_PARTS = 10_000  # segments of a JPEG before its first scan, or chunks of a PNG
MOST_SCANS = 100  # of a JPEG; a progressive one has about ten, and each goes over all pixels
JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
SCAN = 0xDA  # the marker with which a scan begins
ALONE = (0x01, *range(0xD0, 0xD9))  # markers without a length


def check_parts(data: bytes) -> None:
    """Raise InvalidImage for a file of more parts than real ones have. Others are not looked at."""
    if data.startswith(JPEG):
        _check_jpeg(data)
    elif data.startswith(PNG):
        _check_png(data)


def _check_jpeg(data: bytes) -> None:
    """Count segments up to the first scan, and what may begin a scan in the whole file: within the
    data of a scan nothing looks like it."""
    scans = data.count(bytes((0xFF, SCAN)))
    if scans > MOST_SCANS:
        raise InvalidImage(f"the image has {scans} scans, of at most {MOST_SCANS}; save it anew")
    at, parts = len(JPEG), 0
    while at + 4 <= len(data):
        if data[at] != 0xFF or data[at + 1] == 0xFF:
            at += 1  # what Pillow passes over, too
        elif data[at + 1] == SCAN:
            return
        elif data[at + 1] in ALONE:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
        parts += 1
        _check_count(parts)


def _check_png(data: bytes) -> None:
    at, parts = len(PNG), 0
    while at + 8 <= len(data):
        at += 12 + int.from_bytes(data[at : at + 4])  # with its length, name and checksum
        parts += 1
        _check_count(parts)


def _check_count(parts: int) -> None:
    if parts > MOST_FILE_PARTS:
        raise InvalidImage(f"the image has over {MOST_FILE_PARTS} parts; save it anew")
