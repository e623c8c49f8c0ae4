"""Jobs of images: files, pages of PDF files and columns in, folders of Parquet out."""

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sources
from click.testing import CliRunner
from dual_sources import picture, png
from fake_computation import DigestRows, table, vectors_of_digests
from pdf_sources import pdf
from test_families import golden
from test_golden import write_source

from jaxembed.bulk import image_rows, row_source
from jaxembed.bulk.computations import EmbedRows
from jaxembed.bulk.image_rows import ImageColumn, ImageFiles
from jaxembed.bulk.row_source import RowSource
from jaxembed.bulk.run import Rows, run_job
from jaxembed.bulk.sources import IMAGE_FILES, InputFile, input_files
from jaxembed.checkpoints import hub
from jaxembed.cli import cli, loading
from jaxembed.data.inputs import Parts
from jaxembed.errors import ConfigError, InvalidImage, InvalidInput, StoreUnreachable, WrongTask
from jaxembed.platform import object_store

pytest.importorskip("PIL")
pytest.importorskip("pypdfium2")

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 255, 0)
IMAGES = ImageFiles()


@dataclass
class DigestImages(DigestRows):
    """Four numbers from the digest of each image. What is no PNG and no page is refused."""

    source: RowSource = IMAGES
    rows_per_call: int = 4

    def compute(self, rows: Sequence[Any]) -> list[Any]:
        for index, (image,) in enumerate(rows):
            if isinstance(image, bytes) and not image.startswith(b"\x89PNG"):
                raise InvalidImage("it is no PNG", index=index)
        return self.counted(vectors_of([image for (image,) in rows]))


def vectors_of(images: Sequence[bytes | np.ndarray]) -> np.ndarray:
    return vectors_of_digests(map(image_digest, images))


@pytest.fixture(name="photos")
def _photos(tmp_path) -> Path:
    """Ten images, and a PDF file of three pages between them."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for k in range(10):
        (folder / f"{k}.png").write_bytes(png(picture(k)))
    (folder / "5.png").rename(folder / "deep" / "_5.JPG")  # the name says nothing of the content
    (folder / "4b.pdf").write_bytes(pdf([RED, BLUE, GREEN]))
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "README").write_text("no rows")
    return folder


def image_digest(image: bytes | np.ndarray) -> bytes:
    return IMAGES.digest((image,))


def run(inputs: Path, out: Path, computation: Any = None, **options: Any):
    reuse = options.pop("reuse", None)
    rows = Rows([str(inputs)], **{"id_column": "path", "keep": ("page",), "part_rows": 5} | options)
    return run_job(computation or DigestImages(), rows, str(out), reuse=reuse)


def skipped(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "_skipped.jsonl").read_text().splitlines()]


ORDER = ["0.png", "1.png", "2.png", "3.png", "4.png", *["4b.pdf"] * 3]
ORDER += ["6.png", "7.png", "8.png", "9.png", "deep/_5.JPG"]


def images_of(photos: Path) -> list[Any]:
    """The images and pages in their order."""
    images: list[Any] = [(photos / name).read_bytes() for name in ORDER]
    for row, colour in enumerate((RED, BLUE, GREEN), 5):
        images[row] = np.full((150, 75, 3), colour, np.uint8)
    return images


def test_each_image_and_each_page_is_a_row_with_its_path(tmp_path, photos):
    summary = run(photos, tmp_path / "out")
    assert (summary.rows, summary.parts, summary.computed) == (13, 3, 13)
    found = table(tmp_path / "out")
    assert found.column_names == ["row", "path", "page", "image_digest", "dense"]
    assert found["path"].to_pylist() == [str(photos / name) for name in ORDER]
    assert found["page"].to_pylist() == [*[None] * 5, 1, 2, 3, *[None] * 5]
    images = images_of(photos)
    np.testing.assert_array_equal(np.stack(found["dense"].to_numpy()), vectors_of(images))
    assert found["image_digest"].to_pylist() == [image_digest(image) for image in images]


@pytest.mark.parametrize("stop", [0, 2, 3])
def test_a_job_that_was_stopped_goes_on_also_within_a_file(tmp_path, photos, stop):
    run(photos, tmp_path / "whole", part_rows=3)
    with pytest.raises(KeyboardInterrupt):
        run(photos, tmp_path / "out", DigestImages(stops_at=stop), part_rows=3)
    finished = len(list((tmp_path / "out").glob("part-*")))
    summary = run(photos, tmp_path / "out", part_rows=3)
    assert (summary.parts_from_before, summary.computed) == (finished, 13 - 3 * finished)
    assert table(tmp_path / "out").equals(table(tmp_path / "whole"))
    limited = DigestImages(ImageFiles(pdf_timeout_s=60.0))
    assert run(photos, tmp_path / "out", limited, part_rows=3).parts_from_before == 5


def test_a_changed_image_or_resolution_is_refused_with_the_difference(tmp_path, photos):
    run(photos, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--pdf-dpi \(pdf_dpi\): 150 before, now 72"):
        run(photos, tmp_path / "out", DigestImages(ImageFiles(pdf_dpi=72)))
    (photos / "3.png").write_bytes(png(picture(99, 40, 40)))
    with pytest.raises(ConfigError, match=r"inputs\..*3\.png\.size\): \d+ before, now \d+"):
        run(photos, tmp_path / "out")


def test_equal_images_and_pages_are_reused_under_other_names(tmp_path, photos):
    run(photos, tmp_path / "first")
    (photos / "0.png").rename(photos / "z.png")
    (photos / "1.png").write_bytes(png(picture(100)))
    (photos / "4b.pdf").write_bytes(pdf([BLUE, RED, (1, 2, 3), GREEN]))
    computation = DigestImages()
    summary = run(photos, tmp_path / "out", computation, reuse=str(tmp_path / "first"))
    assert (summary.reused, summary.computed, computation.rows) == (12, 2, 2)
    run(photos, tmp_path / "plain")
    assert table(tmp_path / "out").equals(table(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("name", "data", "where", "words"),
    [
        ("4a.png", b"no image", "4a.png", "cannot be computed: it is no PNG"),
        ("4c.pdf", b"no file", "4c.pdf page 1", "cannot be read: a file of 7 bytes is not a PDF"),
        ("4c.pdf", pdf([RED], encrypted=True), "4c.pdf page 1", "cannot be read: the PDF file is"),
        ("4c.pdf", pdf([RED], 9000, 9000), "4c.pdf page 1", "has 351562500 pixels (18750 by"),
    ],
)
def test_a_bad_file_stops_the_job_or_is_left_out(tmp_path, photos, name, data, where, words):
    (photos / name).write_bytes(data)
    with pytest.raises(InvalidInput) as refused:
        run(photos, tmp_path / "out")
    assert f"{photos / where} " in str(refused.value)
    assert words in str(refused.value)
    assert "--on-error skip" in str(refused.value)
    summary = run(photos, tmp_path / "out", on_error="skip")  # it goes on
    assert (summary.rows, summary.skipped) == (13, 1)
    (told,) = skipped(tmp_path / "out")
    assert told["where"] == str(photos / where)
    assert words in told["reason"]
    paths = table(tmp_path / "out")["path"].to_pylist()
    assert paths == [str(photos / one) for one in ORDER]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem is Linux's")
def test_a_file_that_cannot_be_read_is_told_by_its_name(photos):
    with pytest.raises(ConfigError, match="cannot read /proc/self/mem: Input/output error"):
        list(ImageFiles()._pages(InputFile("/proc/self/mem", 0, ""), 0))
    with pytest.raises(ConfigError, match=r"cannot read .*deep: Is a directory"):
        image_rows._read_whole(str(photos / "deep"), {})
    with pytest.raises(ConfigError, match=r"README: expected a file that ends in \.jpg, \.jpeg, "):
        input_files([str(photos / "README")], IMAGE_FILES)


def test_an_image_file_that_is_too_large_is_left_out(tmp_path, photos, monkeypatch):
    size = (photos / "0.png").stat().st_size
    monkeypatch.setattr(image_rows, "MAX_FILE_BYTES", size)
    (photos / "1.png").write_bytes(b"x" * (size + 1))
    run(photos, tmp_path / "out", on_error="skip")
    assert f"has more than {size} bytes" in skipped(tmp_path / "out")[0]["reason"]


def test_few_bytes_of_images_are_computed_at_a_time(tmp_path, photos, monkeypatch):
    size = (photos / "0.png").stat().st_size
    monkeypatch.setattr(row_source, "IMAGE_BYTES_AT_A_TIME", size + 1)
    counts = []

    class Counts(DigestImages):
        def compute(self, rows: Sequence[Any]) -> list[Any]:
            counts.append(len(rows))
            return super().compute(rows)

    run(photos, tmp_path / "out", Counts(), part_rows=100)
    assert sum(counts) == 13
    assert max(counts) == 2  # the first takes fewer than so many bytes, and the second more


def test_pdf_files_without_the_package_are_refused_at_once(tmp_path, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxembed\[pdf\]'"):
        run(photos, tmp_path / "out")
    assert run(photos / "deep", tmp_path / "out", keep=()).rows == 1
    assert table(tmp_path / "out").column_names == ["row", "path", "image_digest", "dense"]
    assert "pdf_dpi" not in json.loads((tmp_path / "out" / "_job.json").read_text())


FILES = [png(picture(k)) for k in range(40)]


def write_column(path: Path, values: list, kind: Any = None) -> Path:
    """A file of rows with an `id` and these images as `photo`."""
    if path.suffix == ".parquet":
        columns = {"id": list(range(len(values))), "photo": pa.array(values, kind)}
        pq.write_table(pa.table(columns), path, row_group_size=15)
    elif path.suffix == ".csv":
        lines = [f"{number},{value}" for number, value in enumerate(values)]
        path.write_text("\n".join(["id,photo", *lines, ""]))
    else:
        rows = [{"id": number, "photo": value} for number, value in enumerate(values)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_column(path: Path, out: Path, column: str = "photo", **options: Any):
    options = {"id_column": "id", "keep": ()} | options
    return run(path, out, DigestImages(ImageColumn((column,))), **options)


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


PATHS = [f"files/{k}.png" for k in range(40)]
COLUMNS = [
    ("a.parquet", FILES, pa.binary()),
    ("a.parquet", [{"bytes": one, "path": "x.png"} for one in FILES], None),
    ("a.parquet", [{"bytes": None, "path": path} for path in PATHS], None),
    *((f"a.{kind}", PATHS, None) for kind in ("parquet", "jsonl", "csv")),
    ("a.jsonl", [uri(one) for one in FILES], None),
]


@pytest.mark.parametrize(("name", "values", "kind"), COLUMNS)
def test_images_of_every_kind_of_column_are_rows(tmp_path, name, values, kind):
    (tmp_path / "files").mkdir()
    for k, one in enumerate(FILES):
        (tmp_path / "files" / f"{k}.png").write_bytes(one)
    path = write_column(tmp_path / name, values, kind)
    assert run_column(path, tmp_path / "out", part_rows=18).rows == 40
    found = table(tmp_path / "out")
    assert found.column_names == ["row", "id", "image_digest", "dense"]
    assert [str(one) for one in found["id"].to_pylist()] == [str(k) for k in range(40)]
    np.testing.assert_array_equal(np.stack(found["dense"].to_numpy()), vectors_of(FILES))
    (tmp_path / "out" / "part-00001.parquet").unlink()
    assert run_column(path, tmp_path / "out", part_rows=18).computed == 18
    assert table(tmp_path / "out").equals(found)


BAD = [
    (None, "has no `photo` (--image-column names the column)"),
    (7, "has `photo` of type int; wanted bytes or a string"),
    ("", "has an empty `photo`: there is nothing to embed"),
    ("none.png", "has 'none.png', which is not a file: "),
    ("A" * 9000, f"has '{'A' * 60}'..., which is not a file: "),  # base64 that is no data URI
    ("https://example.org/x.png", "has 'https://example.org/x.png', a URL that cannot be fetched"),
    ("data:image/png,x", "cannot be read: 'data:image/png,x' is a percent-encoded data URI"),
    ("data:image/png;base64,bm8=", "cannot be computed: it is no PNG"),
]


def test_bad_values_are_left_out_and_reported(tmp_path):
    values = [uri(FILES[0]), *[value for value, _ in BAD], uri(FILES[1])]
    path = write_column(tmp_path / "a.jsonl", values)
    with pytest.raises(InvalidInput) as refused:
        run_column(path, tmp_path / "stopped")
    assert str(refused.value).startswith(f"{path} line 2 {BAD[0][1]}")
    summary = run_column(path, tmp_path / "out", on_error="skip")
    assert (summary.rows, summary.skipped) == (2, len(BAD))
    for told, (_, words) in zip(skipped(tmp_path / "out"), BAD, strict=True):
        assert told["reason"].startswith(words)


def test_a_column_that_is_not_there_or_of_another_kind_is_refused(tmp_path):
    path = write_column(tmp_path / "a.parquet", [1, 2, 3])
    with pytest.raises(ConfigError, match=r"`photo` is int64; wanted a column of images: binary,"):
        run_column(path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has no column `image`\. It has: id, photo"):
        run_column(path, tmp_path / "out", "image")


@pytest.fixture(name="store")
def _store(tmp_path, monkeypatch) -> Path:
    """The folder of what is at s3://."""
    files = pytest.importorskip("fsspec.implementations.local").LocalFileSystem()
    dirfs = pytest.importorskip("fsspec.implementations.dirfs")
    store = dirfs.DirFileSystem(str(tmp_path / "store"), files)
    monkeypatch.setattr(object_store, "store_of", lambda url: store)
    for folder in ("in", "files"):
        (tmp_path / "store" / "bucket" / folder).mkdir(parents=True)
    return tmp_path / "store" / "bucket"


def test_images_and_pages_below_a_url_are_rows_in_the_order_of_their_names(store):
    for name in ("b.png", "a.pdf", ".hidden.png", "README"):
        (store / "in" / name).write_bytes(b"")
    found = input_files(["s3://bucket/in"], IMAGE_FILES)
    assert [one.name for one in found] == ["s3://bucket/in/a.pdf", "s3://bucket/in/b.png"]


def test_paths_in_a_file_of_a_store_are_beside_it(tmp_path, store, monkeypatch):
    (store / "files" / "0.png").write_bytes(FILES[0])
    values = ["../files/0.png", "s3://bucket/files/0.png", "none.png", "/etc/hostname"]
    rows = [json.dumps({"photo": value}) for value in values]
    (store / "in" / "a.jsonl").write_text("\n".join(rows))
    rows = Rows(["s3://bucket/in/a.jsonl"], on_error="skip")
    computation = DigestImages(ImageColumn(("photo",)))
    assert run_job(computation, rows, str(tmp_path / "out")).rows == 2
    reasons = [told["reason"] for told in skipped(tmp_path / "out")]
    assert reasons[0].startswith("has 'none.png', which is missing or cannot be read")
    assert reasons[1] == "has '/etc/hostname', a local path, in a file of s3://"

    opened = object_store.store_of

    def unreachable(url: str) -> Any:
        if url.endswith(".png"):
            raise StoreUnreachable("no route to the store")
        return opened(url)

    monkeypatch.setattr(object_store, "store_of", unreachable)  # which is no fault of a row
    with pytest.raises(StoreUnreachable, match="no route"):
        run_job(computation, rows, str(tmp_path / "other"))


def test_vectors_are_those_of_the_library(clip, tmp_path, photos):
    run(photos, tmp_path / "out", EmbedRows(clip, ImageFiles(), ("dense",), {}))
    images = images_of(photos)
    found = np.stack(table(tmp_path / "out")["dense"].to_numpy())
    np.testing.assert_allclose(found, clip.encode(images=images), atol=1e-5)
    several = clip.encode_outputs(["w1"], ["dense"], images=images[:2])["dense"]
    np.testing.assert_allclose(several, clip.encode(["w1", *images[:2]]), atol=1e-5)


def test_files_that_no_decoder_reads_are_left_out_whichever_they_are(clip, tmp_path, photos):
    whole = (photos / "2.png").read_bytes()
    (photos / "1.png").write_bytes(b"<html>not found</html>")
    (photos / "2.png").write_bytes(whole[: len(whole) // 2])
    (photos / "7.png").write_bytes(b"")
    computation = EmbedRows(clip, ImageFiles(), ("dense",), {"output_dtype": "float16"})
    summary = run(photos, tmp_path / "out", computation, on_error="skip")
    assert (summary.rows, summary.skipped) == (10, 3)
    told = [(Path(one["where"]).name, one["reason"]) for one in skipped(tmp_path / "out")]
    assert {name for name, _ in told} == {"1.png", "2.png", "7.png"}
    assert "is not an image; expected a JPEG, PNG" in dict(told)["1.png"]
    assert "is a damaged image" in dict(told)["2.png"]
    assert table(tmp_path / "out").schema.field("dense").type == pa.list_(pa.float16(), 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["photos", "rows.csv"], "and files of rows, such as rows.csv; choose one kind"),
        (["photos/0.png", "--image-column", "b"], "0.png: image and PDF files have no columns"),
        (["photos/*.png", "--text-column", "b"], "leave --text-column out"),
        (["photos", "--image-column", "b"], "photos: there are no input files; expected names"),
        (["rows.csv", "--pdf-dpi", "72"], "--pdf-dpi is for PDF files"),
        (["rows.csv", "--pdf-timeout", "9"], "--pdf-timeout is for PDF files"),
        (["photos", "--id-column", "id"], "--id-column is for files of rows"),
        (["photos", "--keep", "id"], "--keep is for files of rows"),
        (["rows.csv", "--pdf-text"], "--pdf-text is for PDF files"),
        (["photos", "-o", "out.npy"], "vectors of images are written as Parquet files"),
        (["none.png"], "cannot read none.png: No such file"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_the_model(photos, monkeypatch, arguments, words):
    monkeypatch.chdir(photos.parent)
    Path("rows.csv").write_text("id,text\n1,a\n")
    result = CliRunner().invoke(cli, ["embed", "-o", "out", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["photos", "--prompt-name", "query"], ConfigError, "--prompt-name is for texts"),
        (["photos", "--default-prompt", "a"], ConfigError, "--default-prompt is for texts"),
        (["photos", "--pdf-text"], WrongTask, "takes a text or an image as an input"),
        (
            ["rows.csv", "--text-column", "text", "--image-column", "id"],
            WrongTask,
            "takes a text or an image as an input, and the rows have both",
        ),
    ],
    ids=["prompt", "default", "pages", "columns"],
)
def test_what_a_model_does_not_take_is_refused_before_it_is_loaded(
    clip, photos, monkeypatch, arguments, error, words
):
    monkeypatch.chdir(photos.parent)
    monkeypatch.setattr(loading, "configure_jax", lambda *arguments: None)
    monkeypatch.setattr(hub, "describe_model", lambda origin: clip.model.specs)
    Path("rows.csv").write_text("id,text\n1,a\n")
    result = CliRunner().invoke(cli, ["embed", "-o", "out", *arguments])
    assert isinstance(result.exception, error)
    assert words in str(result.exception)


@pytest.fixture(name="chat", scope="module")
def _chat(tmp_path_factory, load_model):
    folder = tmp_path_factory.mktemp("chat") / "model"
    write_source(golden("qwen3_vl_embedder"), folder)
    return load_model(folder, 2, 256)


def test_a_row_of_an_image_and_a_text_is_one_input(chat, tmp_path):
    path, pictures = tmp_path / "a.jsonl", [picture(k) for k in range(4)]
    texts: list[Any] = ["the cat", "the dog", None, ""]
    rows = [
        {"id": k, "photo": uri(png(one)), "text": text}
        for k, (one, text) in enumerate(zip(pictures, texts, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ImageColumn(("photo", "text"))
    computation = EmbedRows(chat, source, ("dense",), {"instruction": "Find it"})
    options = {"id_column": "id", "keep": (), "on_error": "skip"}
    summary = run(path, tmp_path / "out", computation, **options)
    assert (summary.rows, summary.skipped) == (2, 2)
    assert "has no value for `text`" in skipped(tmp_path / "out")[0]["reason"]
    found = np.stack(table(tmp_path / "out")["dense"].to_numpy())
    parts = [Parts((one, text)) for one, text in zip(pictures, texts[:2], strict=False)]
    wanted = chat.encode(parts, instruction="Find it")
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    described = computation.describe()["model"]
    assert described["prompts"] == chat.spec.prompts
    digests = {source.digest((png(pictures[0]), text)) for text in texts[:2]}
    assert len(digests | {IMAGES.digest((png(pictures[0]),))}) == 3


def test_a_page_may_have_its_text_beside_it(chat, tmp_path):
    text = b"BT /F1 6 Tf 2 20 Td (the cat) Tj 0 -8 Td (on a mat) Tj ET"
    (tmp_path / "a.pdf").write_bytes(pdf([RED, BLUE], first=text))
    source = ImageFiles(pdf_text=True)
    files = source.files([str(tmp_path / "a.pdf")])
    assert source.settings(files)["pdf_text"] is True
    inputs = [source.inputs(block)[0] for _, block in source.read(files, ())]
    assert [said for _, said in inputs] == ["the cat\non a mat", ""]
    run(tmp_path / "a.pdf", tmp_path / "out", EmbedRows(chat, source, ("dense",), {}))
    found = np.stack(table(tmp_path / "out")["dense"].to_numpy())
    wanted = chat.encode([Parts(inputs[0]), inputs[1][0]])
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_model_of_texts_is_refused_without_its_weights(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(loading, "configure_jax", lambda *arguments: None)
    source, cache = sources.write_sentence_bert(tmp_path / "source"), tmp_path / "cache"
    (source / "model.safetensors").unlink()
    flags = ["--model", str(source), "--cache-dir", str(cache), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, ["embed", str(photos), *flags])
    assert isinstance(result.exception, WrongTask)
    assert f"{source} takes only texts, and the inputs are images" in str(result.exception)
    assert not (cache / "models").exists()
    assert not (tmp_path / "out").exists()
