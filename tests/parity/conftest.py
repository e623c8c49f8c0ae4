"""Fixtures of the live comparison with torch, and the table of how closely everything agreed."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import jax
import pytest

from jaxembed import Embedder, EngineConfig
from jaxembed.data.spec import DType

_AGREEMENT = "agreement"  # a property of tests, which pytest-xdist sends along

MakeEmbedder = Callable[..., Embedder]
Note = Callable[[str], None]

jax.config.update("jax_disable_most_optimizations", False)  # the programs that users get

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is fetched

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
elif processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(processes)))


def pytest_addoption(parser) -> None:
    parser.addoption("--only", default="", help="names of families, or of files without test_")


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what is not in one of the files, nor of one of the families: the first word of a
    test's parameters."""
    names = {*config.getoption("--only").split()}
    if not names:
        return
    family = re.compile(rf"\[({'|'.join(names)})(?=[-_ ,\]])")
    kept = [
        item
        for item in items
        if item.path.stem.removeprefix("test_") in names or family.search(item.name)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, [])]
    lines = sorted(
        (report.nodeid.partition("::")[2], figure)
        for report in reports
        for name, figure in report.user_properties
        if name == _AGREEMENT
    )
    if lines:
        terminalreporter.section("agreement")
    for test, figure in lines:
        terminalreporter.write_line(f"{figure:<44} {test}")


@pytest.fixture(name="note")
def _note(request) -> Note:
    """Put a figure into the table at the end of the run."""

    def note(figure: str) -> None:
        request.node.user_properties.append((_AGREEMENT, figure))

    return note


@pytest.fixture(name="make_embedder", scope="module")
def _make_embedder(tmp_path_factory) -> Iterator[MakeEmbedder]:
    """Embedder(source, **options) on one device with the given buckets; closed after the module."""
    opened: WeakSet[Embedder] = WeakSet()
    cache = tmp_path_factory.mktemp("cache")

    def make(
        source: Path,
        buckets: Sequence[tuple[int, int]],
        dtype: DType | None = "float32",
        **options: Any,
    ) -> Embedder:
        grid = tmp_path_factory.mktemp("grid") / "buckets.json"
        grid.write_text(json.dumps({"buckets": buckets}))
        budget = max(rows * length for rows, length in buckets)
        config = EngineConfig(dtype=dtype, devices=1, buckets=grid, max_batch_tokens=budget)
        embedder = Embedder(str(source), cache_dir=cache, config=config, **options)
        opened.add(embedder)
        return embedder

    yield make
    for embedder in list(opened):
        embedder.close()
