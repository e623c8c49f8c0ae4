"""The wheel: with the native kernels where they can be compiled, of pure Python where not."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxembed.models import native

ROOT = Path(__file__).parent.parent
PARTS = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "jaxembed", "converters")
LIBRARIES = {f"jaxembed/models/native/libs/{one.name}.so" for one in native.compiler.builds()}

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    """A copy of what the wheel is made of, with a library of an earlier build."""
    folder = tmp_path / "source"
    folder.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    libraries = folder / "jaxembed" / "models" / "native" / "libs"
    libraries.mkdir(exist_ok=True)
    (libraries / "earlier.so").write_bytes(b"")
    return folder


def built(source: Path, path: str, **variables: str) -> Path:
    """The wheel of hatchling, in this environment, where programs are found on `path`."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    environment = {**os.environ, "PATH": path, **variables}
    subprocess.run(command, cwd=source, check=True, env=environment)
    (wheel,) = (source / "dist").iterdir()
    return wheel


def libraries_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith(".so")}


@pytest.mark.slow
def test_a_wheel_holds_the_native_kernels_where_there_is_a_compiler(source):
    if not any(map(shutil.which, native.compiler.COMPILERS)):
        pytest.skip("there is no C compiler")
    wheel = built(source, os.environ["PATH"])
    assert "-py3-none-manylinux_2_" in wheel.name
    assert wheel.name.endswith(f"_{platform.machine()}.whl")
    assert libraries_in(wheel) == LIBRARIES


def test_a_wheel_without_a_compiler_is_of_pure_python(source, tmp_path):
    wheel = built(source, str(tmp_path / "nothing"))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not libraries_in(wheel)


@pytest.mark.skipif(
    platform.machine() not in native.compiler.MACHINES,
    reason="there are no kernels for this machine",
)
def test_a_wheel_whose_kernels_are_required_is_not_built_without_a_compiler(source, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        built(source, str(tmp_path / "nothing"), JAXEMBED_NATIVE="required")
    assert not list(source.rglob("*.whl"))
