"""Builds the site out of the repository's own Markdown: `make docs`.

The source directory is the root of the repository, so that one relative link works both here and on
a code host. `docs/index.md` is the table of contents: its links are the pages, its headings the
captions of the sidebar. Generated sections exist only in the site: the build replaces the line
`<!-- generated: NAME -->` of a page with the section of that name in modules.py.
"""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

from modules import SECTIONS

project = "jaxembed"
html_title = "jaxembed"
root_doc = "docs/index"
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md", "deploy/*/*.md"]
exclude_patterns = [".*", "**/.*", "docs/_build", "build", "dist", "jaxembed", "tests"]
myst_heading_anchors = 3
html_theme = "furo"
html_extra_path = ["site"]  # an index.html that leads to docs/index.html
html_show_sphinx = False

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
PAGE = re.compile(r"^- \[[^]]+\]\((\S+)\.md\)", re.MULTILINE)
PLACEHOLDER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append to the index one hidden table of contents for each of its sections."""
    if docname != root_doc:
        return
    _, *sections = SECTION.split(source[0])
    for caption, text in zip(sections[::2], sections[1::2], strict=True):
        pages = "\n".join(PAGE.findall(text))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def add_generated(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the placeholders of a page with the sections that modules.py generates."""
    source[0], count = PLACEHOLDER.subn(lambda found: "\n".join(SECTIONS[found[1]]()), source[0])
    if count:
        app.env.note_reread()  # the code may change while the page does not


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_contents)
    app.connect("source-read", add_generated)
    return {"parallel_read_safe": True}
