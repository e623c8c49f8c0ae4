"""Decodes files that requests carry as text: data URIs and base64.

The MIME type of a data URI is ignored: the type of a file is found from its bytes.
"""

import base64
import re

from jaxembed.errors import EmptyInput, InvalidImage

EXCERPT = 60  # maximum characters of a text that are quoted in a message
_FOREIGN = re.compile(r"[^A-Za-z0-9+/=]")  # a character outside base64


def read_data_uri(text: str, max_bytes: int) -> bytes:
    """Return the bytes of a data URI, `data:[type][;parameters];base64,...`.

    `data:` and `base64` may be in capitals, and the base64 may have line breaks.

    Raises InvalidImage if the text is not a data URI, is percent-encoded instead of base64, or
    holds more than `max_bytes`. Raises EmptyInput if the URI has no bytes.
    """
    head, comma, payload = text.partition(",")
    if not is_data_uri(text) or not comma:
        raise InvalidImage(f"{excerpt(text)} is not a data URI; expected data:[type];base64,...")
    if head.rpartition(";")[2].strip(" ").lower() != "base64":
        raise InvalidImage(
            f"{excerpt(text)} is a percent-encoded data URI; expected base64: "
            "data:[type];base64,..."
        )
    return read_base64(payload, max_bytes)


def is_data_uri(text: str) -> bool:
    """Return whether a text begins with `data:`. The rest may be malformed."""
    return text[:5].lower() == "data:"


def read_base64(text: str, max_bytes: int) -> bytes:
    """Return the bytes that a text holds in padded base64 of the standard alphabet.

    Line breaks are skipped. The size is computed from the length of the text, so that a file that
    is too large is refused before it is decoded.

    Raises InvalidImage if the text is not base64 or holds more than `max_bytes`, and EmptyInput if
    it is empty.
    """
    digits = text.replace("\n", "").replace("\r", "")
    if not digits:
        raise EmptyInput()
    padding = len(digits) - len(digits.rstrip("="))
    size = len(digits) * 3 // 4 - padding
    if size > max_bytes:
        raise InvalidImage(f"the base64 holds {size} bytes; the limit is {max_bytes}")
    try:
        return base64.b64decode(digits, validate=True)
    except ValueError as error:
        fault = "expected a multiple of 4 characters, with `=` only at the end"
        if (foreign := _FOREIGN.search(digits)) is not None:
            fault = (
                f"it has {foreign[0]!r} at character {foreign.start()}; expected A-Z, a-z, 0-9, + "
                "and /, with `=` only at the end"
            )
        raise InvalidImage(f"{excerpt(digits)} is not base64: {fault}") from error


def excerpt(text: str) -> str:
    """Quote a text for a message: the whole text, or its first EXCERPT characters and "..."."""
    return repr(text) if len(text) <= EXCERPT else f"{text[:EXCERPT]!r}..."
