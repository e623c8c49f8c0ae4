"""The native kernels under sanitizers: what they read and write, on every call, is theirs."""

import shutil
import subprocess
from pathlib import Path

import pytest
from native_builds import AVX512_BF16, for_this_cpu

from jaxembed.models import native

DRIVER = Path(__file__).with_name("native") / "driver.c"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
SECONDS = 120


def compiled(*arguments: str | Path) -> None:
    """Compile with the flags of AVX512_BF16, and further arguments."""
    headers = f"-I{native.compiler.headers()}"
    flags = [one for one in for_this_cpu(AVX512_BF16).flags if one not in native.compiler.FLAGS]
    options = ["-std=gnu11", *flags, headers, '-DJAXEMBED_SOURCE=""']
    command = ["gcc", *options, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_call_stays_within_its_operands_and_refuses_slips(tmp_path):
    """Operands lie in heap buffers of exactly their size. The driver's own reference is compiled
    without sanitizers: it would take a minute."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    there = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if there.stdout.strip() == "libasan.so":
        pytest.skip("gcc has no libasan")
    driver, program = tmp_path / "driver.o", tmp_path / "driver"
    compiled("-O3", "-c", DRIVER, "-o", driver)
    libraries = ("-lm", "-lpthread")
    compiled(*SANITIZERS, native.compiler.SOURCES / "native.c", driver, *libraries, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls were right, " in done.stdout
