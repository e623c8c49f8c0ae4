"""The page in a Chromium, with a model for every panel: `make page`."""

import io
import json
import re
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import sources
from conftest import save_tiny
from dual_sources import dual_tensors, expected_image, picture, png
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from test_static import OF_MODEL2VEC  # noqa: E402
from test_static import WIDTH as STATIC_WIDTH  # noqa: E402

from examples.search_pictures import draw_pictures  # noqa: E402
from page.served_models import browsing, chromium, ready, serving  # noqa: E402

pytestmark = pytest.mark.skipif(
    chromium() is None,
    reason="there is no Chromium: install the package chromium, or set CHROMIUM",
)

PANELS = ("similarity", "search", "classify", "terms", "alignments", "tokens", "server")
TERMS = {"terms_query": "hello a", "terms_document": "hello world"}  # of a small vocabulary
DASH = "\N{EN DASH}"
WAIT_MS = 90_000  # of a machine that does other things too
BEGUN = "[role=tab]:visible, #error:not(:empty)"
ANSWERED = (
    "() => !document.querySelector('section:not([hidden]) .status')?.textContent.match('Waiting')"
)
MODELS = {"classify": "labels", "terms": "splade", "alignments": "late"}  # of the others, minilm
NARROW = {"width": 400, "height": 800}
STATES = {  # what axe looks at
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"viewport": NARROW},
    "still": {"reduced_motion": "reduce"},
}

Opened = Callable[..., "playwright.Page"]


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator["playwright.Browser"]:
    with browsing() as browser:
        yield browser


@pytest.fixture(name="url", scope="module")
def _url(tmp_path_factory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served")) as url:
        yield url


@pytest.fixture(name="opened")
def _opened(browser, url) -> Iterator[Opened]:
    """Open a panel. At the end the page must have asked nobody but its server, without errors of
    its own."""
    asked: list[str] = []
    complaints: list[str] = []
    contexts, origins = [], set()

    def opened(panel="", at=url, path="/playground", begun=BEGUN, clock=False, **options):
        permissions = ["clipboard-read", "clipboard-write"]
        context = browser.new_context(permissions=permissions, **options)
        context.on("request", lambda request: asked.append(request.url))
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        origins.add(f"{at}/")
        page = context.new_page()
        if clock:  # which the test moves on
            page.clock.install()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(f"{at}{path}{panel and '#' + panel}")
        page.wait_for_selector(begun)
        page.wait_for_function(ANSWERED)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [address for address in asked if not address.startswith(tuple(origins))] == []
    refused = "Failed to load resource: the server responded with a status of"
    assert [one for one in complaints if not one.startswith(refused)] == []


def panel_of(page):
    return page.locator("section:visible")


def sent(page, model: str | None = None, **values: str):
    """Fill in the panel that is shown, send it, and wait for its answer."""
    panel = panel_of(page)
    name = panel.get_attribute("id")
    for field, value in values.items():
        page.fill(f"#{field.replace('_', '-')}", value)
    if model is not None:
        page.select_option(f"#{name}-model", model)
    panel.locator("button[type=submit]").click()
    panel.locator(":scope .status, :scope > .error").filter(
        has_text=re.compile(r"^(?!Waiting).")
    ).wait_for()
    return panel


def status_of(panel) -> str:
    assert panel.locator(":scope > .error").text_content() == ""
    return panel.locator(".status").text_content()


def find_no_violation(page) -> None:
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()


def requests_of(page) -> list[str]:
    """The URLs that the page asks from now on."""
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    return seen


def overflows(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def table_of(panel, number: int = 0) -> list[list[str]]:
    rows = panel.locator("table").nth(number).locator("tbody tr")
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


# What it shows


def test_a_browser_comes_from_the_root_and_sees_the_panels_in_fixed_places(opened):
    page = opened(path="/")
    assert page.url.endswith("/playground")
    tabs = page.locator("[role=tab]:visible").all_inner_texts()
    titles = {"terms": "sparse terms", "alignments": "token matches"}
    assert [tab.lower() for tab in tabs] == [titles.get(panel, panel) for panel in PANELS]
    assert page.locator("#about").text_content() == "7 model names, 6 in memory"
    places = "[...document.querySelectorAll('[role=tab]')].map((one) => one.offsetLeft)"
    before = page.evaluate(places)
    page.click("#tab-server")
    assert page.evaluate(places) == before


def test_a_panel_that_no_model_fills_is_left_out(opened, tmp_path):
    embedder = save_tiny(tmp_path / "embedder")
    with ready(str(embedder), "--cache-dir", str(tmp_path / "cache")) as url:
        page = opened(at=url)
        tabs = page.locator("[role=tab]:visible").all_inner_texts()
        assert tabs == ["Similarity", "Search", "Tokens", "Server"]
        assert page.locator("#search-alone").get_attribute("hidden") is None
        page.context.close()


def test_the_sample_is_answered_when_it_is_first_seen(opened):
    assert status_of(panel_of(opened())).startswith("Most similar: 1 and 3 (0.")
    page = opened("search")
    sent_to = requests_of(page)
    page.click("#tab-tokens")
    assert sent_to == []
    page.click("#tab-similarity")
    page.wait_for_selector("text=Most similar: 1 and 3")
    page.click("#tab-tokens")
    page.click("#tab-similarity")
    assert [one.rpartition("/v1/")[2] for one in sent_to] == ["embeddings"]


def test_no_sample_is_sent_to_a_model_that_is_not_in_memory(opened, tmp_path):
    sources.write_static(tmp_path / "repository" / "later", OF_MODEL2VEC, normalize=True)
    arguments = ("--model-repository", str(tmp_path / "repository"))
    with ready(*arguments, "--cache-dir", str(tmp_path / "cache")) as url:
        page = opened(at=url)
        assert page.locator("#similarity-texts").is_visible()
        assert status_of(panel_of(page)) == ""
        assert page.locator("#about").text_content() == "later"
        assert panel_of(page).locator(".requests li").count() == 0
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colour_fills_the_cell(opened, scheme):
    """axe finds that its number can be read, where no image is behind it."""
    cells = panel_of(opened(color_scheme=scheme)).locator(".heat tbody td").all()
    styles = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).backgroundImage]"
    found = [cell.evaluate(styles) for cell in cells]
    assert len({colour for colour, _ in found}) > 5
    assert {image for _, image in found} == {"none"}


def test_the_most_similar_pair_is_outlined_and_the_slider_cuts_the_vectors(opened):
    page = opened("similarity")
    panel = sent(page, "minilm")
    assert re.match(r"Most similar: 1 and 3 \(0\.\d+\)", status_of(panel))
    rows = table_of(panel)
    assert [row[0][:2] for row in rows] == ["1.", "2.", "3.", "4.", "5."]
    assert [float(row[k + 1]) for k, row in enumerate(rows)] == pytest.approx([1] * 5, abs=1e-3)
    assert panel.locator("td.best").all_inner_texts() == [rows[0][3], rows[2][1]]
    assert panel.locator("thead th[scope=col]").count() == 5
    assert panel.locator("tbody th[scope=row]").count() == 5
    with page.expect_response("**/v1/embeddings") as answered:
        page.locator("#similarity-dimensions").fill("64")
    assert json.loads(answered.value.request.post_data)["dimensions"] == 64
    page.wait_for_function(
        "first => document.querySelector('.heat td').innerText !== first", arg=rows[0][2]
    )
    assert page.locator("#similarity-shown").text_content() == "64"


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("count", [6, 12, 40])
def test_a_table_of_many_texts_keeps_its_labels_readable(opened, width, count):
    page = opened("similarity", viewport={"width": width, "height": 800})
    text = "The invoice was paid on Monday, and the harbour was closed by a storm."
    lines = "\n".join(f"{number} {text}" for number in range(count))
    panel = sent(page, "minilm", similarity_texts=lines)
    labels = panel.locator("tbody th")
    for at in (0, count - 1):
        box = labels.nth(at).bounding_box()
        assert box["width"] >= 144
        assert box["height"] < 60  # two lines
    assert panel.locator("tbody .brief").first.get_attribute("title") == f"1. 0 {text}"
    assert page.evaluate("document.documentElement.scrollHeight") < 2500
    region = panel.locator(".scroll")
    is_wider = region.evaluate("e => e.scrollWidth > e.clientWidth")
    assert is_wider is (width == 400 or count == 40)
    assert panel.locator(".wider").is_visible() is is_wider
    assert not overflows(page)
    if is_wider:  # by keyboard, with the labels in their place
        region.focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("e => e.scrollLeft > 0", arg=region.element_handle())
        assert labels.first.bounding_box()["x"] == region.bounding_box()["x"]


@pytest.mark.parametrize(
    ("panel", "model", "field"),
    [
        ("similarity", "minilm", "similarity_texts"),
        ("search", "minilm", "search_documents"),
        ("classify", "labels", "classify_texts"),
    ],
)
def test_a_long_text_is_shown_in_a_few_lines_and_said_to_be_cut(opened, panel, model, field):
    page = opened(panel)
    long = "word " * 2000
    shown = sent(page, model, **{field: f"{long}\na short line"})
    assert status_of(shown)
    found = shown.locator("tbody .brief").filter(has_text="word").first
    assert found.bounding_box()["height"] < 80
    assert found.inner_text().endswith("…")
    assert found.get_attribute("title").endswith(long.strip())
    assert shown.get_by_text("1 text cut: longer than").is_visible()
    page.fill(f"#{field.replace('_', '-')}", "a\nb")
    sent(page, model)
    assert shown.get_by_text("1 text cut: longer than").count() == 0


def test_two_texts_have_no_scale_of_colours(opened):
    panel = sent(opened("similarity"), "minilm", similarity_texts="the cat\nred dog")
    scale = panel.locator(".scale").inner_text()
    assert re.fullmatch(r"Every pair has 0\.\d{3}, so the colours have no scale\.", scale)
    assert "best" in panel.locator("tbody td").nth(1).get_attribute("class")


@pytest.mark.parametrize("model", ["late", "splade"])
def test_models_without_dense_vectors_compare_texts_without_a_slider(opened, model):
    page = opened("similarity")
    assert page.locator("#similarity-dimensions").is_visible()  # of minilm's
    panel = sent(page, model, similarity_texts="hello world\nhello a\nunhappy\nhello world")
    assert page.locator("#similarity-dimensions").is_hidden()
    assert status_of(panel).startswith("Most similar: 1 and 4 (")
    assert panel.locator(".requests li").count() == 1  # of four that are alike


def test_a_reranker_is_a_choice_and_stands_beside_the_search_with_its_moves(opened):
    page = opened("search")
    choices = page.locator("#search-reranker option").all_inner_texts()
    assert choices == ["pairs", "late", "later (loaded on first use)", "none"]
    page.select_option("#search-reranker", "")
    assert sent(page, "minilm").locator("table").count() == 1
    page.select_option("#search-reranker", "late")
    panel = sent(page)
    before, after = table_of(panel), table_of(panel, 1)
    ranks = {row[2]: int(row[0]) for row in before}
    assert sorted(ranks) == sorted(row[3] for row in after)
    assert after[0][3].startswith("A harmless piece of a germ")
    for row in after:
        steps = ranks[row[3]] - int(row[0])
        words = f"{'up' if steps > 0 else 'down'} {abs(steps)}" if steps else "as before"
        assert words in " ".join(row[1].split("\n"))
    assert "▲ 2" in after[0][1]
    moved = sum(ranks[row[3]] != int(row[0]) for row in after)
    assert f"{moved} documents moved" in status_of(panel)
    paths = panel.locator(".requests code").all_inner_texts()
    assert paths == ["POST /v1/embeddings", "POST /v1/embeddings", "POST /v1/rerank"]
    items = panel.locator(".requests li").all_inner_texts()
    assert items[0].startswith("POST /v1/embeddings (documents) ")
    assert items[1].startswith("POST /v1/embeddings (query) ")


def test_a_classifier_gives_labels(opened):
    panel = sent(opened("classify"), "labels", classify_texts="the cat\nthe dog runs")
    rows = table_of(panel)
    assert [len(row) for row in rows] == [4, 3, 4, 3]  # a text has two labels
    assert float(rows[0][2]) + float(rows[1][1]) == pytest.approx(1, abs=2e-3)


def test_terms_show_what_query_and_document_share(opened):
    panel = sent(opened("terms"), "splade", **TERMS)
    score = float(re.search(r"Score ([\d.]+), of \d+ shared terms?: ", status_of(panel))[1])
    products = [float(row[3]) for row in table_of(panel) if row[3]]
    assert sum(products) == pytest.approx(score, abs=0.01)
    assert panel.locator("table").count() == 2


def test_alignments_name_the_best_token_of_the_document_for_each_of_the_query(opened):
    values = {"alignments_query": "red apple", "alignments_document": "the moon; a red apple"}
    panel = sent(opened("alignments"), "late", **values)
    found = {row[0]: row[1] for row in table_of(panel)}
    assert {"red", "apple", "[CLS]", "[SEP]", "[unused0]"} == set(found)
    assert found["red"].startswith("red (")
    assert found["apple"].startswith("apple (")
    rows = table_of(panel)
    total = float(re.match(r"MaxSim ([\d.]+)", status_of(panel))[1])
    assert sum(float(row[2]) for row in rows) == pytest.approx(total, abs=0.01)
    assert "apple" in panel.locator("ol mark").all_inner_texts()


def test_tokens_have_their_bytes_and_the_cut_is_marked(opened):
    page = opened("tokens")
    panel = sent(page, "minilm", tokens_text="café moon")
    items = [" ".join(item.split()) for item in panel.locator(".tokens li").all_inner_texts()]
    assert items[1:3] == ["café 0\u20135 · id 7668", "moon 6\u201310 · id 4231"]
    assert status_of(panel) == "4 tokens, none is cut. The limit is 256."
    panel = sent(page, "minilm", tokens_text="moon " * 300)
    page.wait_for_selector(".tokens .cut")
    assert status_of(panel).startswith("302 tokens, of which the last 46 of the text are cut")
    assert panel.locator(".tokens .lost").count() == 46
    assert "at byte 1270" in panel.locator(".tokens .cut").inner_text()


def test_a_model_that_is_not_in_memory_is_loaded_by_its_first_request(opened, url):
    page = opened("similarity")
    assert "later (loaded on first use)" in page.locator("#similarity-model").inner_text()
    panel = sent(page, "later", similarity_texts="hello world\nhello world\nunhappy")
    assert status_of(panel).startswith("Most similar: 1 and 2 (1.000)")
    assert page.locator("#similarity-model option[value=later]").inner_text() == "later"
    assert page.locator("#similarity-dimensions").get_attribute("max") == str(STATIC_WIDTH)


def test_the_server_is_watched_live(opened):
    page = opened("server")
    asker = opened("similarity")
    page.wait_for_selector(".figures")
    for _ in range(3):
        sent(asker, "minilm")
    figures = page.locator("h2:text-is('minilm') + dl")
    page.wait_for_function(
        "() => [...document.querySelectorAll('h2')].find((one) => one.textContent === 'minilm')"
        ".nextElementSibling.querySelector('dd').textContent > '0'"
    )
    titles = figures.locator("dt").all_inner_texts()
    assert titles[:2] == ["Tokens per second", "Requests per second"]
    waiting = {"Waiting inputs, interactive", "Waiting inputs, bulk"}
    assert waiting | {"Batch utilization"} <= set(titles)
    figures.locator("svg path[d^=M]").first.wait_for(state="attached")  # from the second rate on
    state = {row[0]: row[1] for row in table_of(panel_of(page))}
    assert state["minilm"] == "in memory"


def test_what_the_table_of_models_says_is_whole_in_a_narrow_window(opened):
    page = opened("server", viewport=NARROW)
    page.wait_for_selector(".models")
    region = panel_of(page).locator(".scroll")
    is_wider = region.evaluate("e => e.scrollWidth > e.clientWidth")
    assert panel_of(page).locator(".wider").is_visible() is is_wider
    for row in page.locator(".models tbody tr").all():
        assert row.locator("td").nth(1).bounding_box()["width"] >= 40  # a whole word
        assert row.bounding_box()["height"] < 160
    region.evaluate("e => { e.scrollLeft = 30; e.dataset.seen = '1'; }")
    for _ in range(2):  # more samples
        with page.expect_response("**/metrics"):
            pass
    assert region.get_attribute("data-seen") == "1"


@pytest.mark.parametrize(
    ("stop", "go_on"), [("#server-pause", "#server-pause"), ("#tab-tokens", "#tab-server")]
)
def test_nothing_is_asked_while_watching_pauses_or_another_panel_is_shown(opened, stop, go_on):
    page = opened("server", clock=True)
    page.wait_for_selector(".figures")
    page.click(stop)
    page.wait_for_load_state("networkidle")
    seen = requests_of(page)
    page.clock.run_for(5000)
    assert seen == []
    with page.expect_response("**/metrics"):
        page.click(go_on)


def test_an_answer_is_marked_as_old_once_its_texts_change(opened):
    page = opened("similarity")
    note = page.locator("#similarity .note")
    page.fill("#similarity-texts", "the cat\nred dog")
    panel = sent(page, "minilm")
    status = status_of(panel)
    page.fill("#similarity-texts", "the cat\nred dogs")
    assert note.text_content().startswith("This is the answer to the texts and choices before")
    assert panel.locator(".stale .status").text_content() == status
    find_no_violation(page)
    page.fill("#similarity-texts", "the cat\nred dog")
    assert note.text_content() == ""
    page.select_option("#similarity-purpose", "query")
    assert note.text_content()
    sent(page)
    assert note.text_content() == ""
    assert panel.locator(".stale").count() == 0


# Images


def file_of(name: str, content: bytes) -> dict:
    return {"name": name, "mimeType": f"image/{name.rpartition('.')[2]}", "buffer": content}


PICTURES = [picture(1), picture(2), picture(1)[::-1].copy()]
FILES = [file_of(f"picture-{n}.png", png(colours)) for n, colours in enumerate(PICTURES, 1)]
BROKEN = file_of("broken.png", b"no image")
SCAN = io.BytesIO()
Image.fromarray(PICTURES[0]).save(SCAN, "TIFF")
TIFF = file_of("scan.tiff", SCAN.getvalue())  # not shown here


def given(page, place: str, files: list) -> None:
    """Choose files at a place for images, and wait for them."""
    before = page.locator(f"#{place} li").count()
    page.set_input_files(f"#{place} input", files)
    page.wait_for_selector(f"#{place} li:nth-child({before + len(files)})")


def opened_with_images(opened, panel: str, files: list = FILES, **options):
    """A panel whose model takes images, with some and no texts."""
    page = opened(panel, **options)
    page.select_option(f"#{panel}-model", "clip")
    given(page, f"{panel}-images", files)
    if panel == "similarity":
        page.fill("#similarity-texts", "")
    else:
        page.fill("#search-query", "w1 w2")
    return page


def carrying(page, file: dict):
    """What the clipboard or a drag carries: the file, as the browser hands it to a page."""
    return page.evaluate_handle(
        """([name, type, data]) => {
            const carried = new DataTransfer();
            const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
            carried.items.add(new File([bytes], name, { type }));
            return carried;
        }""",
        [file["name"], file["mimeType"], b64encode(file["buffer"]).decode()],
    )


PASTE = """(element, clipboardData) => element.dispatchEvent(
    new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }))"""


@pytest.mark.parametrize("panel", ["similarity", "search"])
def test_images_have_a_place_where_the_model_takes_them(opened, panel):
    page = opened(panel)
    page.select_option(f"#{panel}-model", "minilm")
    assert page.locator(f"#{panel}-images").is_hidden()
    page.select_option(f"#{panel}-model", "clip")
    assert page.locator(f"#{panel}-images").is_visible()
    given(page, f"{panel}-images", FILES)
    page.select_option(f"#{panel}-model", "minilm")  # which is sent none of them
    with page.expect_response("**/v1/embeddings") as answered:
        sent(page, **{f"{panel}-{'texts' if panel == 'similarity' else 'documents'}": "a\nb"})
    assert json.loads(answered.value.request.post_data)["input"] == ["a", "b"]


def test_texts_and_images_are_compared(opened):
    page = opened_with_images(opened, "similarity", [*FILES, TIFF])
    panel = sent(page, similarity_texts="w1 w2")
    note = page.locator("#similarity .note")
    assert note.text_content() == ""
    assert status_of(panel) == "Most similar: 2 and 5 (1.000), “picture-1.png” and “scan.tiff”"
    rows = table_of(panel)
    assert [row[0].split("\n")[0] for row in rows[:2]] == ["1. w1 w2", "2. picture-1.png"]
    wanted = [expected_image("clip", dual_tensors("clip"), one) for one in PICTURES]
    got = [[float(value) for value in row[2:5]] for row in rows[1:4]]
    np.testing.assert_allclose(got, np.array(wanted) @ np.array(wanted).T, atol=2e-3)
    for of_images in ("thead", "tbody"):
        seen = panel.locator(f"{of_images} img").evaluate_all("all => all.map(e => e.naturalWidth)")
        assert seen == [PICTURES[0].shape[1]] * 3
        assert panel.locator(f"{of_images} span.thumbnail").count() == 1
    items = panel.locator(".requests li").all_inner_texts()
    assert items[0].startswith("POST /v1/embeddings ")
    assert items[1].startswith("POST /v1/embeddings (images) ")
    page.get_by_role("button", name="Remove picture-1.png").click()
    assert note.text_content()  # the answer is old


def test_images_are_cut_by_the_slider_and_read_without_a_prompt(opened):
    page = opened_with_images(opened, "similarity")
    page.select_option("#similarity-purpose", "query")
    page.fill("#similarity-dimensions", "8")
    with page.expect_response("**/v1/embeddings") as answered:
        assert status_of(sent(page))
    body = json.loads(answered.value.request.post_data)
    assert body["dimensions"] == 8
    assert "input_type" not in body
    images = [one["image"].removeprefix("data:image/png;base64,") for one in body["input"]]
    assert [b64decode(image) for image in images] == [one["buffer"] for one in FILES]


def test_a_text_finds_images(opened):
    page = opened_with_images(opened, "search")
    assert page.input_value("#search-documents") == ""  # what it began with made room
    page.select_option("#search-reranker", "late")
    panel = sent(page)
    rows = table_of(panel)
    assert sorted(row[2] for row in rows) == [one["name"] for one in FILES]
    scores = [float(row[1]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert panel.locator("tbody img").count() == 3
    assert status_of(panel) == (
        f"Best by embeddings: “{rows[0][2]}”. The reranker reads texts alone, so it was not asked"
    )
    assert panel.locator("table").count() == 1


def test_an_image_finds_images(opened):
    page = opened_with_images(opened, "search")
    given(page, "search-image", FILES[1:2])
    assert page.locator("#search-query").is_disabled()
    page.select_option("#search-reranker", "")
    panel = sent(page)
    assert status_of(panel) == "Best by embeddings: “picture-2.png”"
    assert table_of(panel)[0][1] == "1.000"
    page.get_by_role("button", name="Remove picture-2.png").first.click()
    assert page.evaluate("document.activeElement.textContent") == "Search with an image"
    assert page.locator("#search-query").is_enabled()


def test_images_are_dropped_and_pasted(opened):
    page = opened("search")
    page.select_option("#search-model", "clip")
    for number, field in enumerate(("#search-documents", "#search-images", "#search")):
        page.dispatch_event(field, "drop", {"dataTransfer": carrying(page, FILES[number])})
    page.wait_for_selector("#search-images li:nth-child(3)")
    page.locator("#search-query").evaluate(PASTE, carrying(page, FILES[0]))
    page.wait_for_selector("#search-image li")
    carried = {"dataTransfer": carrying(page, FILES[0])}
    page.dispatch_event("#search-image", "dragover", carried)
    assert page.locator(".images.over").get_attribute("id") == "search-image"
    page.dispatch_event("#search-image", "drop", carried)
    page.wait_for_selector("#search-image .error:not(:empty)")
    message = page.locator("#search-image > .error").text_content()
    assert message == "Not added: picture-1.png: there may be 1 image"
    assert page.locator("#search-images li").count() == 3
    assert page.locator(".images.over").count() == 0


def test_cells_are_pasted_as_text_and_a_model_of_texts_is_given_no_image(opened):
    page = opened("similarity")
    page.select_option("#similarity-model", "clip")
    carried = carrying(page, FILES[0])
    carried.evaluate("carried => carried.setData('text/plain', 'a cell')")
    untouched = page.locator("#similarity-texts").evaluate(PASTE, carried)
    assert untouched is True
    assert page.locator("#similarity-images li").count() == 0
    page.select_option("#similarity-model", "minilm")
    page.dispatch_event("#similarity-texts", "drop", {"dataTransfer": carrying(page, FILES[0])})
    message = page.locator("#similarity > .error").text_content()
    assert message == "Not added: minilm takes no images"


def test_images_beyond_the_bounds_are_named_and_not_added(opened):
    page = opened_with_images(opened, "similarity", FILES[:1] * 40)
    page.set_input_files("#similarity-images input", FILES[1:3])
    error = page.locator("#similarity-images > .error")
    page.wait_for_selector("#similarity-images > .error:not(:empty)")
    assert error.text_content() == (
        "Not added: picture-2.png: there may be 40 images; picture-3.png: there may be 40 images"
    )
    assert page.locator("#similarity-images li").count() == 40
    page.get_by_role("button", name="Remove picture-1.png").first.click()
    assert error.text_content() == ""
    page.set_input_files("#similarity-images input", file_of("large.png", bytes(20_000_000)))
    page.wait_for_selector("#similarity-images > .error:not(:empty)")
    assert error.text_content() == (
        "Not added: large.png: there would be 20.1 MB, of at most 20.0 MB"
    )
    page.fill("#similarity-texts", "a\nb")
    message = "Not sent: wanted 2 to 40 texts and images, one per line; got 41"
    assert sent(page).locator(":scope > .error").text_content() == message


def test_a_broken_image_has_the_servers_message(opened):
    page = opened_with_images(opened, "search", [FILES[0], BROKEN])
    panel = sent(page)
    at_it = page.locator("#search-images li").nth(1).locator(".error").text_content()
    assert at_it.startswith(
        "`input[1]`: a file of 8 bytes that begins with b'no image' is not an image"
    )
    assert panel.locator(":scope > .error").text_content() == f"400: broken.png: {at_it}"
    page.get_by_role("button", name="Remove broken.png").click()
    assert status_of(sent(page))


@pytest.mark.parametrize(("kind", "command"), [("curl", "bash"), ("Python", sys.executable)])
def test_a_copied_request_with_images_runs_and_is_shown_in_brief(opened, kind, command, tmp_path):
    large = {**FILES[0], "buffer": png(picture(4, 300, 300))}  # more than an argument may be
    page = opened_with_images(opened, "similarity", [large, FILES[1]])
    with page.expect_response("**/v1/embeddings") as answered:
        panel = sent(page)
    panel.get_by_role("button", name=f"Copy as {kind}").click()
    page.wait_for_selector(f"text=Copied as {kind}, with the images in full")
    seen = panel.locator("pre").text_content()
    assert len(seen) < 1000
    assert re.search(r"data:image/png;base64,[\w+/]{24}… \(\d+ characters\)", seen)
    program = tmp_path / "program"
    program.write_text(page.evaluate("navigator.clipboard.readText()"))
    done = subprocess.run([command, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    vectors = [one["embedding"] for one in json.loads(done.stdout)["data"]]
    np.testing.assert_allclose(
        vectors, [one["embedding"] for one in answered.value.json()["data"]], atol=1e-6
    )


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("panel", ["similarity", "search"])
def test_axe_finds_nothing_about_images(opened, panel, state):
    page = opened_with_images(opened, panel, [*FILES, TIFF], **STATES[state])
    shown = sent(page)
    assert status_of(shown)
    shown.get_by_role("button", name="Copy as Python").first.click()
    given(page, f"{panel}-images", [BROKEN])
    page.click(f"#{panel} button[type=submit]")
    page.wait_for_selector(f"#{panel}-images li .error:not(:empty)")
    find_no_violation(page)
    assert not overflows(page)


# Requests


COPIED = {"terms": TERMS}
COPIED["similarity"] = {"similarity_texts": 'it\'s "quoted" $HOME `ls`\nnaïve 🙂 \\n'}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(("kind", "command"), [("curl", "bash"), ("Python", sys.executable)])
def test_a_copied_request_runs_and_gives_the_same(opened, panel, kind, command):
    page = opened(panel)
    is_server = panel == "server"
    model, values = MODELS.get(panel, "minilm"), COPIED.get(panel, {})
    shown = panel_of(page) if is_server else sent(page, model, **values)
    # with a key: the server's cards are drawn about now, and move the button under a mouse
    shown.get_by_role("button", name=f"Copy as {kind}").first.press("Enter")
    page.wait_for_selector(f"text=Copied as {kind}")
    assert shown.locator("li:has(pre) .copied[role=status]").inner_text() == f"Copied as {kind}"
    text = page.evaluate("navigator.clipboard.readText()")
    assert text == shown.locator("pre").text_content()
    done = subprocess.run([command, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "te_request_count" in done.stdout if is_server else json.loads(done.stdout)


def test_the_time_is_that_of_the_servers_headers(opened):
    page = opened("similarity")
    with page.expect_response("**/v1/embeddings") as answered:
        panel = sent(page, "minilm")
    headers = answered.value.headers
    line = panel.locator(".requests li").inner_text()
    assert f"{headers['x-total-time']} ms in the server" in line
    assert f"inference {headers['x-inference-time']})" in line
    assert f"{headers['x-compute-tokens']} tokens" in line


def test_an_error_is_shown_in_the_servers_words(opened):
    page = opened("tokens")
    assert status_of(sent(page, "minilm"))
    panel = sent(page, "minilm", tokens_text="")
    page.wait_for_selector("#tokens .error:not(:empty)")
    message = panel.locator(":scope > .error").text_content()
    assert message == "400: Input validation error: `inputs` cannot be empty"
    assert panel.locator(".tokens").count() == 0


def test_what_is_wrong_before_anything_is_sent_is_said(opened):
    page = opened("similarity")
    label = page.locator("label[for=similarity-texts]").inner_text()
    assert label == "Texts, one per line (2 to 40)"
    for texts, count in (("", 0), ("alone", 1), ("a\n" * 41, 41)):
        page.fill("#similarity-texts", texts)
        panel_of(page).locator("button[type=submit]").click()
        message = f"Not sent: wanted 2 to 40 texts, one per line; got {count}"
        assert panel_of(page).locator(":scope > .error").text_content() == message


def test_markup_in_a_text_stays_text(opened):
    evil = "<img src=x onerror=alert(1)>\n<b>bold</b>"
    panel = sent(opened("similarity"), "minilm", similarity_texts=evil)
    assert panel.locator("tbody th").first.inner_text() == "1. <img src=x onerror=alert(1)>"
    assert panel.locator("table img, table b").count() == 0


def test_a_server_with_a_key_is_given_it_and_nothing_else_holds_it(opened, tmp_path):
    embedder = save_tiny(tmp_path / "embedder")
    arguments = ("--api-key", "secret-key", "--cache-dir", str(tmp_path / "cache"))
    with ready(str(embedder), *arguments) as url:
        page = opened(at=url)
        assert page.locator("#error").text_content().startswith("401: missing or wrong API key")
        assert page.locator("section:visible").count() == 0
        page.keyboard.type("secret-key")  # its field has the focus
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Most similar: ")  # of the sample
        panel = sent(page, similarity_texts="the cat\nred dog")
        assert status_of(panel).startswith("Most similar: 1 and 2")
        panel.get_by_role("button", name="Copy as curl").click()
        text = panel.locator("pre").text_content()
        assert '"Authorization: Bearer $API_KEY"' in text
        assert "secret-key" not in text + page.url + page.content()
        assert page.evaluate("localStorage.length") == 0
        page.reload()
        page.wait_for_selector("[role=tab]:visible")
        page.click("#key-button")
        page.click("#key-forget")
        page.wait_for_selector("#error:not(:empty)")
        page.context.close()


# Swagger UI


def test_swagger_ui_shows_the_routes_and_sends_a_request(opened):
    """Nothing of it is refused by its policy, which Chromium would say."""
    page = opened(path="/docs", begun=".opblock")
    route = page.locator(".opblock", has_text="livez")
    route.locator(".opblock-summary").click()
    route.locator(".try-out__btn").click()
    route.locator("button.execute").click()
    answered = route.locator(".live-responses-table tbody .response-col_status")
    answered.filter(has_text="200").wait_for()
    page.locator("button.authorize").click()
    page.wait_for_selector("text=Available authorizations")


# For everybody


def test_the_keyboard_alone_does_it_all(opened):
    """Find the most similar pair, rerank a list, and copy a request, without a mouse."""
    page = opened()

    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)

    def reach(selector: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"Tab does not lead to {selector}")

    reach("#tab-similarity")
    reach("#similarity-texts")
    press("Control+Enter")
    page.wait_for_selector("text=Most similar: 1 and 3")
    reach("#similarity .requests button")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    press("Enter")
    page.wait_for_selector("text=Copied as curl")
    assert page.evaluate("navigator.clipboard.readText()").startswith("curl ")
    page.focus("#tab-similarity")
    press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-search"
    assert page.url.endswith("#search")
    reach("#search-query")
    press("Enter")
    page.wait_for_selector("text=documents moved")
    page.focus("#tab-search")
    press("End")
    assert page.evaluate("document.activeElement.id") == "tab-server"
    press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-similarity"
    page.focus("#key-button")
    press("Enter", "Escape")
    assert page.locator("#key-form").is_hidden()
    assert page.evaluate("document.activeElement.id") == "key-button"
    assert page.locator("#key-button").get_attribute("aria-expanded") == "false"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("panel", PANELS)
def test_axe_finds_nothing_and_nothing_is_outside(opened, panel, state):
    page = opened(panel, **STATES[state])
    if panel == "server":
        page.wait_for_selector(".figures")
    else:
        values = TERMS if panel == "terms" else {}
        shown = sent(page, MODELS.get(panel, "minilm"), **values)
        assert status_of(shown)
        assert not overflows(page)
        shown.get_by_role("button", name="Copy as curl").first.click()
    assert not overflows(page)
    page.click("#key-button")
    find_no_violation(page)


def test_dark_is_dark(opened):
    grounds = []
    for scheme in ("light", "dark"):
        page = opened(color_scheme=scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(map(int, re.findall(r"\d+", ground))))
    assert grounds[0] > 700
    assert grounds[1] < 100


# What docs/how-to/playground.md shows

WIDTH = 900  # pixels
COLOURS = 64  # enough for text, in a third of the bytes
SHOTS = {  # the panel, the scheme, and the choices of each
    "similarity-light": ("similarity", "light", {"model": "minilm"}),
    "search-light": ("search", "light", {"model": "minilm", "reranker": "late"}),
    "alignments-dark": ("alignments", "dark", {"model": "late"}),
    "images-light": ("search", "light", {"model": "clip", "reranker": ""}),
}
SHAPES = ("a red circle", "a blue square", "a green triangle", "a yellow circle")


@pytest.mark.parametrize("name", SHOTS)
def test_screenshots_are_taken_where_they_are_asked_for(opened, request, name):
    folder = request.config.getoption("--screenshots")
    if folder is None:
        pytest.skip("no --screenshots")
    panel, scheme, choices = SHOTS[name]
    page = opened(panel, color_scheme=scheme, viewport={"width": WIDTH, "height": 300})
    for field, value in choices.items():
        page.select_option(f"#{panel}-{field}", value)
    if "images" in name:
        drawn = draw_pictures()
        files = [
            file_of(f"{shape.replace(' ', '-')}.png", png(np.asarray(drawn[shape])))
            for shape in SHAPES
        ]
        given(page, "search-images", files)
        given(page, "search-image", files[:1])
    for _ in range(2):  # the second is not slowed by what is done once
        assert status_of(sent(page))
    folder.mkdir(parents=True, exist_ok=True)
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    shot.quantize(COLOURS).save(folder / f"playground-{name}.png", optimize=True)
