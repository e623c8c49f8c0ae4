"""Reads the bytes of files that come as text: data URIs and base64. Does not look into the files.

The MIME type of a data URI is not used: only the bytes tell what a file is.
"""

import base64
import re

from jaxembed.errors import EmptyInput, InvalidImage

EXCERPT = 60  # characters of a text that a message quotes
_FOREIGN = re.compile(r"[^A-Za-z0-9+/=]")  # what base64 does not have


def read_data_uri(text: str, most_bytes: int) -> bytes:
    """The bytes that `data:[type][;parameters];base64,...` holds.

    `data:` and `base64` may be in capitals, and the base64 may have line breaks.

    Raises InvalidImage if it is no such URI, is percent-encoded instead of base64, or holds more
    than `most_bytes`, and EmptyInput if it holds nothing.
    """
    head, comma, payload = text.partition(",")
    if not is_data_uri(text) or not comma:
        raise InvalidImage(f"{excerpt(text)} is no data URI; wanted data:[type];base64,...")
    if head.rpartition(";")[2].strip(" ").lower() != "base64":
        raise InvalidImage(
            f"{excerpt(text)} is a percent-encoded data URI; wanted base64: data:[type];base64,..."
        )
    return read_base64(payload, most_bytes)


def is_data_uri(text: str) -> bool:
    """Whether a text begins as data URIs do, well-formed or not."""
    return text[:5].lower() == "data:"


def read_base64(text: str, most_bytes: int) -> bytes:
    """The bytes that a text holds in base64 of the standard alphabet, padded.

    Line breaks are skipped; anything else that is not base64 is refused. The size follows from the
    length of the text, so nothing is decoded that is too large.

    Raises InvalidImage if it is no base64 or holds more than `most_bytes`, and EmptyInput if it
    holds nothing.
    """
    digits = text.replace("\n", "").replace("\r", "")
    if not digits:
        raise EmptyInput()
    padding = len(digits) - len(digits.rstrip("="))
    size = len(digits) * 3 // 4 - padding
    if size > most_bytes:
        raise InvalidImage(f"the base64 holds {size} bytes; the limit is {most_bytes}")
    try:
        return base64.b64decode(digits, validate=True)
    except ValueError as error:
        fault = "wanted a multiple of 4 characters, with `=` at the end alone"
        if (foreign := _FOREIGN.search(digits)) is not None:
            fault = (
                f"it has {foreign[0]!r} at character {foreign.start()}; wanted A-Z, a-z, 0-9, + "
                "and /, with `=` at the end"
            )
        raise InvalidImage(f"{excerpt(digits)} is not base64: {fault}") from error


def excerpt(text: str) -> str:
    """A text in quotes for messages, without its rest if it is long."""
    return repr(text) if len(text) <= EXCERPT else f"{text[:EXCERPT]!r}..."
