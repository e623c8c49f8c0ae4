"""The native kernels under sanitizers: what they read and write, on every call, is theirs."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from native_builds import AVX2, AVX512, AVX512_BF16, for_this_cpu

from jaxembed.models import native

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
SECONDS = 300.0  # to compile, and for the calls

# Operands and results lie in heap buffers of exactly their size, each of which is watched.
PROGRAM = """
import ctypes, sys
import jax
from jaxembed.models.native import library
path, dtype = sys.argv[1:]
kernels = ctypes.CDLL(path)
assert not kernels.jaxembed_prepare() and not kernels.jaxembed_check()
library._libraries[dtype] = kernels, None
library._register(kernels, dtype)
from test_native_operands import calls_of
sizes = (1, 16), (3, 16), (9, 48), (2, 144)
calls = [made for size in sizes for made in calls_of(*size, dtype).values()]
for made in calls:
    jax.block_until_ready(made.run())
print(len(calls), "calls stayed within their operands")
"""


def library_of_gcc(name: str) -> str:
    command = ["gcc", f"-print-file-name={name}.so"]
    try:
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip("there is no gcc")
    if path == f"{name}.so":
        pytest.skip(f"gcc has no {name}")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("build", [AVX512_BF16, AVX512, AVX2], ids=lambda build: build.name)
def test_every_call_stays_within_its_operands(tmp_path, monkeypatch, build):
    preloaded = [library_of_gcc(name) for name in ("libasan", "libstdc++")]
    build = for_this_cpu(build)
    monkeypatch.setattr(native.compiler, "COMPILERS", ("gcc",))
    monkeypatch.setattr(native.compiler, "COMPILE_S", SECONDS)
    build = replace(build, flags=(*build.flags, *SANITIZERS))
    native.compiler.compile_library(build, tmp_path / "native.so")
    environment = {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "native.so"), build.dtype],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls stayed within" in done.stdout
