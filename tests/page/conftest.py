"""Its own option: where screenshots go."""

from pathlib import Path


def pytest_addoption(parser) -> None:
    parser.addoption("--screenshots", type=Path, help="Write screenshots to this folder too.")
