"""The workflows of GitHub Actions, held against the Makefile, pyproject.toml and constraints/."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jaxembed import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOWEST = ROOT / "constraints" / "lowest.txt"
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?(?:[^;]*?>=([\d.]+))?")

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def workflow(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def jobs_of(path: Path) -> dict[str, dict]:
    return workflow(path)["jobs"]


def scripts_of(path: Path) -> Iterator[str]:
    for job in jobs_of(path).values():
        yield from (step["run"] for step in job["steps"] if "run" in step)


def pins(path: Path) -> dict[str, str]:
    """The versions of a constraints file, by normalized name."""
    lines = [line.split("==") for line in path.read_text().splitlines() if "==" in line]
    return {name.lower().replace("_", "-"): version.strip() for name, version in lines}


def lower_bounds() -> dict[str, str]:
    found = (REQUIREMENT.match(requirement) for requirement in PROJECT["dependencies"])
    return {match[1].lower(): match[2] for match in found if match}


def as_numbers(version: str) -> tuple[int, ...]:
    """0.10 and 0.10.0 are the same version."""
    numbers = [int(part) for part in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@each_workflow
def test_actionlint_finds_nothing(path):
    actionlint = shutil.which("actionlint", path=Path(sys.executable).parent)
    if actionlint is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run([actionlint, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each_workflow
def test_a_workflow_has_read_permission_and_its_jobs_an_end(path):
    assert workflow(path)["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow(path)
    assert all(job["timeout-minutes"] <= 90 for job in jobs_of(path).values())


@each_workflow
def test_what_a_workflow_runs_is_there(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for script in scripts_of(path):
        assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= targets
        for name in re.findall(r"(?<![\w/])\.ci/[\w.]+", script):
            assert (ROOT / name).is_file()


def test_every_change_is_checked_tested_and_run_as_a_whole():
    scripts = "\n".join(scripts_of(ROOT / ".github" / "workflows" / "checks.yml"))
    assert {"make check", "make test", ".ci/run"} <= set(re.findall(r"make \w+|\.ci/run", scripts))


def test_the_tested_pythons_are_those_of_the_classifiers():
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={classifiers[0]}"
    for name, job in (("checks", "test"), ("release", "try")):
        path = ROOT / ".github" / "workflows" / f"{name}.yml"
        assert jobs_of(path)[job]["strategy"]["matrix"]["python"] == classifiers


def test_constraints_are_of_tested_pythons_and_used():
    test = jobs_of(ROOT / ".github" / "workflows" / "checks.yml")["test"]
    (lowest,) = test["strategy"]["matrix"]["include"]
    assert ROOT / lowest["constraints"] == LOWEST
    assert lowest["python"] == test["strategy"]["matrix"]["python"][0]


def test_the_lowest_versions_are_the_declared_ones():
    lowest = pins(LOWEST)
    assert {name: as_numbers(lowest[name]) for name in lower_bounds()} == {
        name: as_numbers(version) for name, version in lower_bounds().items()
    }
    assert as_numbers(lowest["jaxlib"]) == as_numbers(lowest["jax"])


def test_what_is_for_tests_brings_what_traces_need():
    extras = PROJECT["optional-dependencies"]
    assert set(extras["otel"]) <= set(extras["dev"])


def test_every_extra_declares_the_same_jax():
    extras = PROJECT["optional-dependencies"]
    bounds = re.findall(r"jax\[\w+\]>=([\d.]+)", "\n".join(extras["cuda"] + extras["tpu"]))
    assert bounds == [lower_bounds()["jax"]] * 2


def test_a_release_is_of_the_version_that_the_code_says():
    assert PROJECT["version"] == __version__
    scripts = "\n".join(scripts_of(ROOT / ".github" / "workflows" / "release.yml"))
    assert 'version = \\"${GITHUB_REF_NAME#v}\\"" pyproject.toml' in scripts


def test_a_release_builds_every_dockerfile():
    images = jobs_of(ROOT / ".github" / "workflows" / "release.yml")["images"]
    devices = images["strategy"]["matrix"]["device"]
    assert devices == sorted(path.suffix[1:] for path in ROOT.glob("Dockerfile.*"))
