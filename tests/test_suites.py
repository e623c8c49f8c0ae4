"""Which suites a change needs."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / ".ci" / "suites.py"


@pytest.fixture(name="suites")
def _suites():
    found = importlib.util.spec_from_file_location("suites", FILE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_family_needs_its_own_parity_and_documents_need_nothing(suites):
    assert suites.needed(["converters/families/nomic_bert.py"]) == [
        "numerics",
        "parity nomic_bert nomic_moe",
    ]
    assert suites.needed(["docs/library.md", "tests/preprocessing/test_text.py"]) == []
    both = suites.needed(
        ["converters/families/t5.py", "jaxembed/bulk/run.py", "tests/parity/test_m3.py"]
    )
    assert both == ["numerics", "slow", "parity m3 mpnet t5", "stores", "ray"]
    assert suites.needed(["tests/parity/requirements.txt", "converters/families/t5.py"]) == [
        "numerics",
        "parity",
    ]
    assert suites.needed(["pyproject.toml"]) == list(suites.TARGETS)
    of_tests = ["tests/test_chaos.py", "tests/test_golden.py", "tests/test_deleted.py"]
    assert suites.needed(of_tests) == ["numerics", "slow"]


def test_a_file_of_the_product_without_a_line_is_found(suites):
    assert suites.uncovered(
        ["jaxembed/rooms/new.py", "docs/new.md", "converters/families/t5.py"]
    ) == ["jaxembed/rooms/new.py"]


def test_a_change_is_what_differs_from_a_base_that_is_known(suites, tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "BASE", tmp_path / "base")
    git("init", "--quiet")
    for name in "abc":
        (tmp_path / name).write_text("1")
    git("add", "a", "b")
    git("commit", "--quiet", "--message", "first")
    (tmp_path / "base").write_text("0" * 40)
    assert suites.changed() is None
    (tmp_path / "base").write_text(git("rev-parse", "HEAD"))
    (tmp_path / "a").write_text("2")
    git("commit", "--quiet", "--all", "--message", "second")
    (tmp_path / "b").write_text("2")
    assert set(suites.changed()) == {"a", "b", "c", "base"}
