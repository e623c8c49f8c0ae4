"""Images: every form of file to its colours, what is refused, and the patches of a tower."""

import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxembed.data.spec import ImageRules
from jaxembed.errors import InvalidImage
from jaxembed.preprocessing.images import decode
from jaxembed.preprocessing.images.decode import decode_image, image_facts, image_size, to_pillow
from jaxembed.preprocessing.images.prepare import image_positions, prepare_image, resized_size

pytest.importorskip("PIL")

from PIL import Image

HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP = ImageRules(patch=8, shortest=32, crop=(32, 32), **HALVES)
SQUARE = ImageRules(patch=8, size=(32, 24), **HALVES)
SHAPED = ImageRules(patch=16, resample="bilinear", most_patches=256, place_numbers=4, **HALVES)
FORMS = ["PNG", "BMP", "TIFF", "JPEG", "WEBP", "GIF"]
each_form = pytest.mark.parametrize("form", FORMS)
COLOURS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def saved(image, form="PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def plain(mode="RGB"):
    return Image.fromarray(COLOURS).convert(mode)


@each_form
def test_files_are_decoded_as_pillow_does(form):
    data = saved(plain(), form, **{"lossless": True} if form == "WEBP" else {})
    if form in ("PNG", "BMP", "TIFF"):
        np.testing.assert_array_equal(decode_image(data), COLOURS)
    wanted = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data), wanted)
    facts = image_facts(data)
    assert (facts.height, facts.width) == (6, 5)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB"])
def test_other_modes_become_red_green_and_blue(mode):
    form = "PNG" if mode in "1LP" else "TIFF"
    wanted = np.asarray(plain(mode).convert("RGB"))
    np.testing.assert_array_equal(decode_image(saved(plain(mode), form)), wanted)


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_a_colour_that_stands_for_transparency_is_white(mode):
    image = Image.new(mode, (2, 2), 0)
    image.putpixel((0, 0), 7 if mode != "RGB" else (7, 7, 7))
    data = saved(image, transparency=0 if mode != "RGB" else (0, 0, 0))
    got = np.asarray(decode_image(data))
    assert (got[1, 1] == 255).all()
    assert not (got[0, 0] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_tag_says(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = [COLOURS, COLOURS[:, ::-1], COLOURS[::-1, ::-1], COLOURS[::-1]]
    lying = [upright[k].transpose(1, 0, 2) for k in (0, 3, 2, 1)]
    got = np.asarray(decode_image(saved(plain(), exif=exif)))
    np.testing.assert_array_equal(got, [*upright, *lying][orientation - 1])


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_rounded_to_eight(form):
    wide = np.array([[0, 128, 129, 65535], [256, 257, 32768, 65406]], np.uint16)
    got = np.asarray(decode_image(saved(Image.fromarray(wide), form)))
    np.testing.assert_array_equal(got[:, :, 0], [[0, 0, 1, 255], [1, 1, 128, 254]])


def test_a_value_of_sixteen_bits_that_is_transparent_is_put_on_white():
    wide = np.array([[1000, 1001, 2000, 1000]], np.uint16)
    got = np.asarray(decode_image(saved(Image.fromarray(wide), "PNG", transparency=1000)))
    np.testing.assert_array_equal(got[:, :, 0], [[255, 4, 8, 255]])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_leaves_an_image_as_it_is(form):
    damaged, whole = (decode_image(saved(plain(), form, exif=exif)) for exif in (b"II*\0", b""))
    np.testing.assert_array_equal(np.asarray(damaged), np.asarray(whole))


def test_a_jpeg_with_further_images_in_its_file_is_a_jpeg():
    data = saved(plain(), "MPO", save_all=True, append_images=[plain()])
    assert Image.open(BytesIO(data)).format == "MPO"
    assert image_facts(data).format == "jpeg"
    assert image_size(data)[:2] == plain().size[::-1]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "TIFF", "PNG", "MPO"])
def test_of_several_frames_the_first_is_taken(form):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = saved(frames[0], form, save_all=True, append_images=frames[1:])
    assert list(decode_image(data).getpixel((0, 0))) == pytest.approx([255, 0, 0], abs=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        b"<svg xmlns='http://www.w3.org/2000/svg'><!ENTITY a SYSTEM 'file:///etc/passwd'></svg>",
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        b"<html><img></html>",
        b"SIMPLE  =                    T",  # FITS
        b"\xff\x4f\xff\x51" + bytes(60),  # JPEG 2000
        b"GIF89a" + bytes(7),
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_what_is_no_image_of_a_known_form_is_refused(data):
    for read in (decode_image, image_facts, image_size):
        with pytest.raises(InvalidImage, match="expected a JPEG, PNG"):
            read(data)


def test_values_of_32_bits_are_refused():
    for values in (np.zeros((2, 2), np.float32), np.zeros((2, 2), np.int32)):
        with pytest.raises(InvalidImage, match="32 bits"):
            decode_image(saved(Image.fromarray(values), "TIFF"))


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header names a size, with hardly any pixels after it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (10_000, 6_000), (50_000_001, 1)])
def test_too_many_pixels_are_refused_before_they_are_decoded(width, height, monkeypatch):
    monkeypatch.setattr(decode, "to_rgb_array", pytest.fail)
    with pytest.raises(InvalidImage, match=r"pixels.* the limit is 50000000"):
        decode_image(claiming(width, height))


def test_a_file_that_ends_early_is_refused():
    for form in FORMS:
        data = saved(Image.fromarray(np.tile(COLOURS, (20, 20, 1))), form)
        for share in (0.1, 0.5, 0.9):
            with pytest.raises(InvalidImage):
                decode_image(data[: int(len(data) * share)])


@each_form
def test_damaged_bytes_give_an_image_or_the_one_error(form):
    draw = random.Random(7)
    data = saved(Image.fromarray(np.tile(COLOURS, (4, 4, 1))), form)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            outcomes.add(decode_image(bytes(damaged)).mode)
        except InvalidImage:
            outcomes.add("refused")
    assert outcomes <= {"RGB", "refused"}
    assert outcomes


def test_the_shorter_side_is_what_the_rules_say():
    for height, width, wanted in (
        (64, 64, (32, 32)),
        (333, 501, (32, 48)),
        (501, 333, (48, 32)),
        (1, 7, (32, 224)),
    ):
        assert resized_size(height, width, CLIP) == wanted
        assert resized_size(height, width, SQUARE) == (32, 24)


def test_an_image_keeps_its_shape_within_the_number_of_patches():
    for height, width, rows, columns in (
        (333, 501, 13, 19),
        (1080, 1920, 12, 21),
        (5, 5, 16, 16),
        (1, 1, 7, 7),  # enlarged a hundred times, and no more
        (1, 50_000_000, 1, 246),
        (4096, 16, 256, 1),
    ):
        assert resized_size(height, width, SHAPED) == (16 * rows, 16 * columns)
        assert resized_size(width, height, SHAPED) == (16 * columns, 16 * rows)


def test_a_place_is_row_and_column_among_so_many_rows_and_columns():
    rules = msgspec.structs.replace(SHAPED, patch=2, most_patches=6, before=(1,), after=(2, 3))
    colours = np.zeros((4, 6, 3), np.uint8)
    wanted = [[row, column, 2, 3] for row in range(2) for column in range(3)]
    around = [0, 0, 0, 0]
    assert image_positions(4, 6, rules).tolist() == [around, *wanted, around, around]
    assert prepare_image(to_pillow(colours), rules).shape == (6, 12)


def test_an_image_that_would_be_resized_to_too_much_is_refused():
    with pytest.raises(InvalidImage, match="2000000 by 1 pixels, and would be resized to 64000000"):
        prepare_image(to_pillow(np.zeros((1, 2_000_000, 3), np.uint8)), CLIP)


def test_files_of_very_many_parts_are_refused_before_they_are_read():
    """Decoders take milliseconds for each scan, and copy all EXIF data for each segment of it."""
    image = Image.fromarray(np.zeros((16, 16, 3), np.uint8))
    jpeg, png = saved(image, "JPEG"), saved(image)
    segment = b"\xff\xe1\x00\x0aExif\x00\x00\x00\x00"
    with pytest.raises(InvalidImage, match="over 10000 parts"):
        image_facts(jpeg[:2] + segment * 10_001 + jpeg[2:])
    assert image_facts(jpeg[:2] + b"\xff\xfe\x00\x04ab" * 100 + jpeg[2:]).height == 16
    at = jpeg.index(b"\xff\xda")
    with pytest.raises(InvalidImage, match="over 100 scans"):
        image_facts(jpeg[:-2] + jpeg[at:-2] * 101 + jpeg[-2:])
    assert image_facts(jpeg + b"\xff\xda" * 101).height == 16  # of what follows it, as a video
    chunk = b"\x00\x00\x00\x00tEXt" + zlib.crc32(b"tEXt").to_bytes(4)
    with pytest.raises(InvalidImage, match="over 10000 parts"):
        image_facts(png[:33] + chunk * 10_001 + png[33:])
    assert image_facts(png[:33] + chunk * 10 + png[33:] + bytes(200_000)).height == 16


def test_an_image_over_the_longest_side_is_refused():
    with pytest.raises(InvalidImage, match="1 by 65536 pixels; the limit for a side is 65535"):
        image_facts(saved(Image.new("L", (1, 65_536))))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_put_on_white_in_bands(mode, monkeypatch):
    monkeypatch.setattr(decode, "BAND", 600)
    colours = np.random.default_rng(0).integers(0, 256, (700, 3, 4), dtype=np.uint8)
    colours[:2, :, 3] = [[0], [255]]
    image = Image.fromarray(colours, "RGBA").convert(mode)
    white = Image.new("RGBA", (3, 700), (255, 255, 255, 255))
    wanted = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    np.testing.assert_array_equal(decode_image(saved(image)), np.array(wanted))


def tiff(tags: dict[int, tuple[int, ...]], order: str = "<", is_big: bool = False) -> bytes:
    """A TIFF of 10 by 10 grey pixels, compressed, in one tile or strip, as these tags say in
    addition: a tag may have several entries, of a value each."""
    data = zlib.compress(bytes(10_000))
    places = {324: (0,), 325: (len(data),)} if 322 in tags else {273: (0,), 279: (len(data),)}
    own = {256: (10,), 257: (10,), 258: (8,), 259: (8,), 262: (1,), 277: (1,), **places}
    entries = [(tag, value) for tag, values in sorted((own | tags).items()) for value in values]
    head, entry, count = (16, "HHQQ", "Q") if is_big else (8, "HHII", "H")
    end = head + struct.calcsize(f"={count}") + len(entries) * struct.calcsize(f"={entry}") + 8
    file = b"II" if order == "<" else b"MM"
    start = ("HHHQ", 43, 8, 0, 16) if is_big else ("HI", 42, 8)
    file += struct.pack(f"{order}{start[0]}", *start[1:])
    file += struct.pack(f"{order}{count}", len(entries))
    for tag, value in entries:
        value = end if tag in (273, 324) else value
        file += struct.pack(f"{order}{entry}", tag, 16 if is_big else 4, 1, value)
    return file.ljust(end, b"\0") + data


@pytest.mark.parametrize(("order", "is_big"), [("<", False), (">", False), ("<", True)])
def test_tiles_far_larger_than_their_image_are_refused_before_memory_is_taken(order, is_big):
    assert decode_image(tiff({}, order, is_big)).size == (10, 10)
    assert decode_image(tiff({278: (10_000_000,)}, order, is_big)).size == (10, 10)
    assert decode_image(tiff({322: (16,), 323: (16,)}, order, is_big)).size == (10, 10)
    for sides in ({322: (20_000,), 323: (20_000,)}, {322: (20_000, 16), 323: (16, 20_000)}):
        tracemalloc.start()
        try:
            with pytest.raises(InvalidImage, match=r"has 100 pixels, and its tiles have 400000000"):
                image_facts(tiff(sides, order, is_big))
        finally:
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
            tracemalloc.stop()
    *_, held = image_size(tiff({322: (1024,), 323: (1024,)}, order, is_big))
    assert held >= 1024 * 1024


MEASURED = """
import sys
from pathlib import Path
import PIL.Image
PIL.Image.init()
from jaxembed import memory
from jaxembed.preprocessing.images.decode import decode_image, image_size

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

for name in sys.argv[1:]:
    data = Path(name).read_bytes()
    *_, held = image_size(data)
    memory.trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = status("VmRSS")
    decode_image(data)
    print(held, status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_decoding_takes_no_more_memory_than_is_counted(tmp_path):
    side = 1400
    image = plain().resize((side, side), Image.Resampling.BILINEAR)
    clear = image.copy()
    clear.putalpha(100)
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    progressive = {"progressive": True, "subsampling": 0}
    files = [
        saved(image, "JPEG", exif=turned),
        saved(image, "JPEG", **progressive),
        saved(clear, "PNG", compress_level=1),
        saved(clear.resize((side * 8, side // 8)), "PNG", compress_level=1),
        saved(wide, "PNG", compress_level=1),
        saved(clear, "WEBP", method=0, lossless=True, quality=0),
        saved(image, "GIF", transparency=3),
        saved(image, "BMP"),
        saved(clear, "TIFF", compression="tiff_lzw"),
    ]
    names = [str(tmp_path / str(number)) for number in range(len(files))]
    for name, data in zip(names, files, strict=True):
        Path(name).write_bytes(data)
    done = subprocess.run([sys.executable, "-c", MEASURED, *names], capture_output=True, text=True)
    assert done.stderr == ""
    measured = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(measured) == len(files)
    for held, taken in measured:
        assert taken > 4 * side**2 / 2
        assert taken < held + 3_000_000


def test_a_damaged_tiff_writes_nothing_to_standard_error(capfd):
    for data in (tiff({322: (48,), 323: (4096,)})[:-20], tiff({279: (4_000_000_000,)})):
        with pytest.raises(InvalidImage, match="damaged"):
            decode_image(data)
    assert capfd.readouterr().err == ""


def test_what_pillow_warns_of_is_neither_written_nor_remembered(capfd):
    decode._silence.cache_clear()  # each test has filters of its own
    for width in range(10):
        bomb = saved(Image.new("1", (1, 1)), "BMP")
        bomb = bomb[:18] + struct.pack("<ii", 95_000 + width, 1000) + bomb[26:]
        with pytest.raises(InvalidImage, match="the limit is 50000000"):
            decode_image(bomb)
    assert not getattr(Image, "__warningregistry__", {}).keys() - {"version"}
    assert capfd.readouterr().err == ""


def test_an_image_of_pillow_stays_as_it_was():
    turned = Image.Exif()
    turned[0x0112] = 6
    image = Image.open(BytesIO(saved(plain(), "PNG", exif=turned)))
    before = np.asarray(image).copy()
    assert decode.to_rgb_array(image).shape == (5, 6, 3)
    np.testing.assert_array_equal(np.asarray(image), before)
    assert image.getexif()[0x0112] == 6
