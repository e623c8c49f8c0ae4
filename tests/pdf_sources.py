"""Small PDF files, written by hand."""

import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]  # of a whole page, from 0 to 255

# Hashes of a password that is not the empty one, which readers try first.
ENCRYPTED = b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>" % (b"41" * 32, b"42" * 32)


def pdf(
    pages: Sequence[Colour],
    width: float = 36,
    height: float = 72,
    *,
    encrypted: bool = False,
    first: bytes | None = None,
    forms: Sequence[bytes] = (),
) -> bytes:
    """A PDF file whose pages have one colour each; their sides are in points. `first` is drawn on
    the first page, which may call the first of the `forms` by `/F Do`, and a form the next."""
    kids = b" ".join(b"%d 0 R" % (3 + 2 * k) for k in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(pages), kids),
    ]
    resources = b"/Resources << /XObject << /F %d 0 R >> >>"
    form = 3 + 2 * len(pages)  # the number of the first
    for number, colour in enumerate(pages):
        shares = " ".join(f"{value / 255:.4f}" for value in colour)
        content = f"{shares} rg 0 0 {width} {height} re f".encode()
        if first is not None and not number:
            content += b"\n" + first
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %s %s] /Contents %d 0 R %s >>"
            % (
                str(width).encode(),
                str(height).encode(),
                4 + 2 * number,
                resources % form if forms else b"",
            )
        )
        objects.append(_stream(content))
    for number, content in enumerate(forms, 1):
        called = form + min(number, len(forms) - 1)  # the last calls itself, if it calls any
        kind = b"/Type /XObject /Subtype /Form /BBox [0 0 36 72] "
        objects.append(_stream(content, kind + resources % called))
    trailer = b"/Root 1 0 R /Size %d" % (len(objects) + 1)
    if encrypted:
        trailer += b" /ID [<00> <00>] /Encrypt " + ENCRYPTED
    data, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    ending = b"trailer\n<< %s >>\nstartxref\n%d\n%%%%EOF\n" % (trailer, len(data))
    return data + head + table + ending


def endless(pages: Sequence[Colour]) -> bytes:
    """A file whose first page has a form that contains itself twice."""
    return pdf(pages, first=b"/F Do", forms=[b"/F Do /F Do"])


def doubled(pages: Sequence[Colour]) -> bytes:
    """A file whose first page has 20 nested forms, each of which contains the next twice: a million
    rectangles, for which PDFium takes 1.3 GB."""
    return pdf(pages, first=b"/F Do", forms=[b"/F Do /F Do"] * 19 + [b"0 0 9 9 re f"])


def crowded(pages: Sequence[Colour]) -> bytes:
    """A file whose first page has two million lines."""
    return pdf(pages, first=b"0 0 m 36 72 l S\n" * 2_000_000)


def _stream(content: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(content) if len(content) > 1000 else content
    if packed is not content:
        entries += b" /Filter /FlateDecode"
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(packed), entries, packed)
