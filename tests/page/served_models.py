"""A server with a model for every panel, and the Chromium that looks at its page."""

import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import sources
from dual_sources import write_dual
from fakes import until
from live_server import QUICK, served
from playwright.sync_api import Browser, Error, sync_playwright
from test_embedder import save_scorer
from test_static import OF_MODEL2VEC

from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import DEFAULT_MODEL, ModelSource
from jaxembed.data.spec import LateInteraction, NormalizeLayer, PerToken

NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
SWITCHES += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
MARKER = 1  # [unused0] of the default model's vocabulary


def chromium() -> str | None:
    """The program: CHROMIUM of the environment, else the first that is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A headless Chromium. Raises Error if it does not start."""
    program = chromium()
    if program is None:
        raise Error("there is no Chromium: install the package chromium, or set CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=SWITCHES)
        yield browser
        browser.close()


def save_late(folder: Path, cache: Path) -> Path:
    """The default model without its pooling: it compares texts token by token, so it reranks."""
    source = hub.resolve(ModelSource(None, cache_dir=cache))
    spec = checkpoint.load_spec(source)
    late = msgspec.structs.replace(
        spec,
        heads={"multi_vector": PerToken((NormalizeLayer(),))},
        interaction=LateInteraction(32, 180, query_marker=MARKER, document_marker=MARKER + 1),
        prompts={"query": "", "document": ""},
        max_input_tokens=180,
    )
    tokenizer = (source / "tokenizer.json").read_bytes()
    checkpoint.save(folder, late, checkpoint.load_params(source, spec).items(), tokenizer)
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of a server of the default model and one of each other kind, and of one that is
    loaded on first use."""
    cache = folder / "cache"
    late = save_late(folder / "late", cache)
    splade = sources.write_splade(folder / "splade")
    labels = save_scorer(folder / "labels", ("bad", "good"))
    pairs = save_scorer(folder / "pairs")
    # static embeddings: nothing is compiled, so that it is in memory at once
    sources.write_static(folder / "repository" / "later", OF_MODEL2VEC, normalize=True)
    clip = write_dual(folder / "clip")
    models = {"minilm": DEFAULT_MODEL, "late": late, "pairs": pairs}
    models |= {"splade": splade, "labels": labels, "clip": clip}
    names = [f"--served-model-name={name}={model}" for name, model in models.items()]
    arguments = [*map(str, models.values()), *names, "--cache-dir", str(cache)]
    arguments += ["--model-repository", str(folder / "repository"), "--load-timeout", "90"]
    with ready(*arguments) as url:
        yield url


@contextmanager
def ready(*arguments: str) -> Iterator[str]:
    """The URL of a server with these arguments once it is ready."""
    with served(*arguments, program=QUICK) as (url, _):
        until(lambda: is_ready(url))
        yield url


def is_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/ready").close()
    except OSError:
        return False
    return True
