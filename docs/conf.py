"""Builds the site out of the repository's own Markdown: `make docs`.

The source directory is the root of the repository, so that one relative link works both here and on
a code host. `docs/index.md` is the table of contents: its links are the pages, its headings the
captions of the sidebar.
"""

import re
from typing import Any

from sphinx.application import Sphinx

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
PAGE = re.compile(r"^\| \[[^]]+\]\((\S+)\.md\)", re.MULTILINE)


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append to the index one hidden table of contents for each of its sections."""
    if docname != root_doc:
        return
    _, *sections = SECTION.split(source[0])
    for caption, text in zip(sections[::2], sections[1::2], strict=True):
        pages = "\n".join(PAGE.findall(text))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True}
