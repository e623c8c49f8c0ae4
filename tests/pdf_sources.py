"""Small PDF files, written by hand."""

from collections.abc import Sequence

Colour = tuple[int, int, int]  # of a whole page, from 0 to 255

# Hashes of a password that is not the empty one, which readers try first.
ENCRYPTED = b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>" % (b"41" * 32, b"42" * 32)


def pdf(
    pages: Sequence[Colour], width: int = 36, height: int = 72, *, encrypted: bool = False
) -> bytes:
    """A PDF file whose pages have one colour each; their sides are in points."""
    kids = b" ".join(b"%d 0 R" % (3 + 2 * k) for k in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(pages), kids),
    ]
    for number, colour in enumerate(pages):
        shares = " ".join(f"{value / 255:.4f}" for value in colour)
        content = f"{shares} rg 0 0 {width} {height} re f".encode()
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %d %d] /Contents %d 0 R >>"
            % (width, height, 4 + 2 * number)
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
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
