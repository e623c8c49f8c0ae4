"""What pyproject.toml declares, held against constraints/ and the code."""

import re
import tomllib
from pathlib import Path

from jaxembed import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?(?:[^;]*?>=([\d.]+))?")


def lower_bounds() -> dict[str, str]:
    found = (REQUIREMENT.match(requirement) for requirement in PROJECT["dependencies"])
    return {match[1].lower(): match[2] for match in found if match}


def as_numbers(version: str) -> tuple[int, ...]:
    """0.10 and 0.10.0 are the same version."""
    numbers = [int(part) for part in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def test_the_lowest_versions_are_the_declared_ones():
    lines = (ROOT / "constraints" / "lowest.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line)
    lowest = {name.lower().replace("_", "-"): version for name, version in pins}
    for name, version in (*lower_bounds().items(), ("jaxlib", lowest["jax"])):
        assert as_numbers(lowest[name]) == as_numbers(version), name


def test_the_tested_versions_name_no_index():
    assert "://" not in (ROOT / "constraints" / "tested.txt").read_text()


def test_extras_agree_with_each_other():
    extras = PROJECT["optional-dependencies"]
    assert set(extras["otel"]) <= set(extras["dev"])
    bounds = re.findall(r"jax\[\w+\]>=([\d.]+)", "\n".join(extras["cuda"] + extras["tpu"]))
    assert bounds == [lower_bounds()["jax"]] * 2


def test_the_version_is_the_one_that_the_code_says():
    assert PROJECT["version"] == __version__
