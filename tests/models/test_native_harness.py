"""The native kernels without XLA (tests/native/harness.c), for Arm in an emulator: their results
against XLA in float32, what they read and write, and errors that are planted in them."""

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_builds import AVX2, AVX512_BF16, X86, for_this_cpu

from jaxembed.engine.autotune import native_trial
from jaxembed.models import native
from jaxembed.models.adapters import chosen
from jaxembed.models.native import compiler

HARNESS = Path(__file__).parent.parent / "native" / "harness.c"
SECONDS = 300.0  # to compile, and for the calls
SANITIZER = ("-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all")
ARM = (compiler.ARM_BF16, compiler.NEON)
# Largest difference to XLA's result in float32, divided by one plus that result: of float32, of
# products of bfloat16 with a float32 result, and of what is rounded to bfloat16 in between.
# If a quantized input lies between two steps, another order of sums may give it the other one.
NEAR, PRODUCT, ROUNDED, FLIPPED = 2e-5, 1e-5, 0.015, 0.04


@dataclass(frozen=True)
class Platform:
    """How a program for the machine of a build is compiled and run."""

    compiler: str
    options: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()


def platform_of(build: compiler.Build) -> Platform:
    if platform.machine() == build.machine:
        found = compiler.find_compiler()
        if found is None:
            pytest.skip("there is no C compiler")
        return Platform(found)
    if build.machine != "aarch64":
        pytest.skip(f"this machine runs no programs for {build.machine}")
    needed = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    for program in needed:
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}, by which kernels for Arm are compiled or run here")
    # the oldest CPU for kernels that need no more than NEON
    cpu = "cortex-a57" if build == compiler.NEON else "max"
    return Platform(needed[0], ("-static",), (needed[1], "-cpu", cpu))


@dataclass(frozen=True)
class Harness:
    """The harness with the kernels of a build."""

    command: tuple[str, ...]

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def harness_of(
    build: compiler.Build,
    folder: Path,
    options: tuple[str, ...] = (),
    sources: Path = compiler.SOURCES,
) -> Harness:
    """Compile the harness into a folder."""
    target = platform_of(build)
    if build.machine == "x86_64":
        build = for_this_cpu(build)
    program = folder / build.name
    command = [
        target.compiler,
        *(flag for flag in build.flags if flag != "-shared"),
        *target.options,
        *options,
        '-DJAXEMBED_SOURCE=""',
        f"-I{sources}",
        f"-I{jax.ffi.include_dir()}",
        "-o",
        str(program),
        str(HARNESS),
        "-lm",
        "-pthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return Harness((*target.emulator, str(program)))


def weight(k: int, n: int, dtype: str, groups: int = 0) -> Any:
    """A packed weight of zeros: quantized, if it has groups."""
    if not groups:
        return jnp.zeros(native.packed_shape((k, n), dtype), dtype)
    shapes = native.packed_quantized_shape((k, n), groups, dtype)
    return jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)


def single(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


def adapters(rows: int, length: int, k: int, n: int, dtype: str) -> native.AdapterOperands:
    numbers, owners = jnp.zeros((rows, length), jnp.int32), jnp.zeros(64, jnp.int32)
    return native.AdapterOperands(numbers, weight(k, 64, dtype), weight(64, n, dtype), owners)


def make_products(dtype: str, groups: int = 0) -> None:
    """`linear` with all epilogues, dtypes and adapters; `k` is more than a chunk of a panel."""
    k, n = 384 if groups else 416, 96
    for rows, length in ((1, 1), (2, 20), (1, 136)):
        for i, end in enumerate(native.EPILOGUES):
            columns = 2 * n if end.startswith("gated") else n
            norm = (single(rows, length, n), single(n), single(n), 1e-6)
            for few in (None, adapters(rows, length, k, columns, dtype)):
                native.linear(
                    jnp.zeros((rows, length, k), (dtype, "float32")[i % 2]),
                    weight(k, columns, dtype, groups),
                    single(columns),
                    end,
                    norm=norm if end == "norm" else None,
                    dtype="float32" if end == "norm" or (i + length) % 3 else dtype,
                    adapters=few,
                )
    # columns that threads share
    few = weight(64, 1536, dtype, min(groups, 1))
    native.linear(single(1, 40, 64), few, single(1536))


def make_attention(dtype: str, groups: int = 0) -> None:
    """All variants of attention: masks, caps, biases, rotations."""
    masks = ((False, None, None), (True, None, 2.5), (False, 9, None), (True, 5, None))
    shapes = ((3, 16, 2, 32), (2, 80, 4, 64), (2, 144, 2, 96))
    for rows, length, heads, width in shapes:
        segments, dim = jnp.zeros((rows, length), jnp.int32), heads * width
        bias = single(heads, 2 * length - 1)
        angles = (single(rows, length, width // 2),) * 2
        query = jnp.zeros((rows, length, heads, width), dtype)
        joint = jnp.zeros((rows, length, 3, heads, width), dtype)
        product = weight(dim, 3 * dim, dtype, min(groups, 1)), single(3 * dim)
        few = adapters(rows, length, dim, 3 * dim, dtype)
        for i, mask in enumerate(masks):
            with_bias, with_angles = bias if i % 2 else None, angles if i > 1 else None
            for of_keys in (heads, heads // 2):
                key = jnp.zeros((rows, length, of_keys, width), dtype)
                native.attention(query, key, key, segments, *mask, with_bias)
            native.joint_attention(joint, segments, *mask, with_bias, with_angles)
            native.self_attention(
                single(rows, length, dim), *product, segments, heads, *mask, with_bias, with_angles,
                adapters=few if i in (1, 2) else None,
            )  # fmt: skip


def make_mlps(dtype: str, groups: int = 0) -> None:
    """`mlp` with each activation, with adapters and without. Threads share the columns of the
    last."""
    dim, narrow = (128, 192) if groups else (64, 224)
    for rows, length, width in ((1, 7, narrow), (3, 48, narrow), (1, 40, 960)):
        hidden = single(rows, length, dim)
        out = weight(dim, dim, dtype, min(groups, 2)), *(single(dim),) * 3
        down = weight(width, dim, dtype, groups), *(single(dim),) * 3
        for end in native.EPILOGUES[2:]:
            columns = 2 * width if end.startswith("gated") else width
            few = {
                name: adapters(rows, length, *shape, dtype)
                for name, shape in {
                    "out": (dim, dim),
                    "up": (dim, columns),
                    "down": (width, dim),
                }.items()
            }
            for some in (None, few, {"down": few["down"]}):
                up = weight(dim, columns, dtype, min(groups, 1)), single(columns)
                native.mlp(hidden.astype(dtype), hidden, out, up, down, 1e-6, end, some)


@dataclass(frozen=True)
class Case:
    """A call, its operands, and its result by XLA in float32."""

    call: native.NativeCall
    operands: dict[str, np.ndarray]
    wanted: np.ndarray

    @property
    def allowed(self) -> float:
        if self.call.mode & native.QUANTIZED:
            return FLIPPED
        if self.call.kernels == "float32":
            return NEAR
        is_product = self.call.target == "linear" and self.call.dtype == "float32"
        return PRODUCT if is_product and not self.call.mode & native.ADAPTED else ROUNDED


def in_xla(call: native.NativeCall, plain: dict[str, np.ndarray]) -> np.ndarray:
    """The result of a call, with operands that are rounded as the kernels round them."""
    operands = {}
    for name, value in plain.items():
        is_input = name == {"linear": "x", "self_attention": "hidden"}.get(call.target)
        if is_input and not call.mode & native.QUANTIZED:
            value = value.astype(call.kernels)
        operands[name] = value.astype(np.float32) if value.dtype == jnp.bfloat16 else value
    single_call = replace(call, kernels="float32", dtype="float32")

    @jax.jit
    def run(operands):
        with chosen(operands.get("numbers")):
            return native_trial.XLA_CALLS[call.target](single_call, operands)

    return np.asarray(run(operands))


@cache
def calls_of(dtype: str) -> tuple[native.NativeCall, ...]:
    calls: dict[native.NativeCall, None] = {}
    with native.recording(calls):
        for make in (make_products, make_attention, make_mlps):
            make(dtype)
            make(dtype, groups=3)
    return tuple(calls)


@cache
def case_of(call: native.NativeCall) -> Case:
    plain, packed = native_trial._operands_of(call)
    if "cos" in plain:
        turns = plain["cos"]
        for of in (plain, packed):
            of["cos"], of["sin"] = np.cos(turns), np.sin(turns)
    return Case(call, packed, in_xla(call, plain))


def two_of_each(dtype: str) -> list[Case]:
    """The first and the last call of each target."""
    by_target: dict[str, list[native.NativeCall]] = {}
    for call in calls_of(dtype):
        by_target.setdefault(call.target, []).append(call)
    assert by_target.keys() == set(native.CALLS)
    return [case_of(call) for calls in by_target.values() for call in (calls[0], calls[-1])]


def shape_of(array: np.ndarray | jax.ShapeDtypeStruct) -> str:
    return " ".join(map(str, (array.dtype, len(array.shape), *array.shape)))


def text_of(case: Case) -> str:
    """A call as the harness reads it, with the operands backwards."""
    lines = [f"call {case.call.target}"]
    for name, value in case.call.attributes:
        kind = "f32" if isinstance(value, np.float32) else "s64"
        lines.append(f"attribute {name} {kind} {value}")
    for name, value in reversed(case.operands.items()):
        lines.append(f"operand {name} {shape_of(value)}")
    result = jax.ShapeDtypeStruct(case.call.shape, case.call.dtype)
    return "\n".join([*lines, f"result {shape_of(result)}", ""])


def results_of(harness: Harness, cases: list[Case], folder: Path, threads: int) -> list[np.ndarray]:
    """The results of the harness, of which it makes two for each call."""
    calls, data, results = (folder / name for name in ("calls", "data", "results"))
    calls.write_text("".join(map(text_of, cases)))
    values = (value for case in cases for value in reversed(case.operands.values()))
    data.write_bytes(b"".join(value.tobytes() for value in values))
    done = harness.run(calls, data, results, threads)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-500:]}"
    content, at, arrays = results.read_bytes(), 0, []
    for case in cases:
        dtype, shape = jnp.dtype(case.call.dtype), (2, *case.call.shape)
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(content, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    assert at == len(content)
    return arrays


def assert_right(case: Case, results: np.ndarray) -> None:
    first, second = results.astype(np.float32)
    np.testing.assert_array_equal(first, second)  # wherever the buffers lie
    useful = ...
    if "segments" in case.operands:
        useful = case.operands["segments"] != 0
        np.testing.assert_array_equal(first[~useful], 0.0)
    off = np.abs(first - case.wanted)[useful] / (1 + np.abs(case.wanted[useful]))
    assert off.max() <= case.allowed, f"{case.call.name} {case.call.attributes}"


def id_of(build: compiler.Build) -> str:
    return build.name


EVERY = [AVX2, *(pytest.param(one, marks=pytest.mark.slow) for one in (*X86, *ARM) if one != AVX2)]


@pytest.fixture(name="harness", params=EVERY, ids=id_of, scope="module")
def _harness(request, tmp_path_factory) -> tuple[Harness, str]:
    """The harness with the kernels of a build, and their dtype."""
    return harness_of(request.param, tmp_path_factory.mktemp("harness")), request.param.dtype


def test_each_function_of_vectors_is_right(harness):
    done = harness[0].run("vectors")
    assert done.returncode == 0, done.stderr
    assert harness[0].run("check").returncode == 0


def assert_all_right(harness: Harness, cases: list[Case], folder: Path, threads: int) -> None:
    for case, results in zip(cases, results_of(harness, cases, folder, threads), strict=True):
        assert_right(case, results)


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_of_each_target_are_right_and_touch_nothing_else(harness, tmp_path, threads):
    program, dtype = harness
    assert_all_right(program, two_of_each(dtype), tmp_path, threads)


@pytest.mark.slow
def test_all_calls_are_right_and_touch_nothing_else(harness, tmp_path):
    program, dtype = harness
    assert_all_right(program, list(map(case_of, calls_of(dtype))), tmp_path, 3)


def test_the_harness_sees_wrong_calls_results_and_accesses(harness, tmp_path):
    program, dtype = harness
    case = case_of(calls_of(dtype)[0])
    (results,) = results_of(program, [case], tmp_path, 1)
    with pytest.raises(AssertionError, match="linear"):
        assert_right(replace(case, wanted=case.wanted + 0.1), results)
    short = replace(case, operands=case.operands | {"bias": case.operands["bias"][:-32]})
    with pytest.raises(AssertionError, match=r"operand bias: f32\[64\] came, wanted"):
        results_of(program, [short], tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("build", [*ARM, AVX512_BF16, AVX2], ids=id_of)
def test_no_call_does_what_c_leaves_undefined(build, tmp_path):
    program = harness_of(build, tmp_path, SANITIZER)
    done = program.run("vectors")
    assert done.returncode == 0, done.stderr
    assert_all_right(program, two_of_each(build.dtype), tmp_path, 3)


# Loads a library and exits with the status of its check, as library.py does in another process.
LOADER = """
#include <dlfcn.h>
int main(int count, char** arguments) {
  void* library = dlopen(arguments[count - 1], RTLD_NOW);
  int (*check)(void) = library ? (int (*)(void))dlsym(library, "jaxembed_check") : 0;
  return check ? check() : 99;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("build", [*ARM, replace(compiler.MEANS, machine="aarch64")], ids=id_of)
def test_libraries_for_arm_are_compiled_and_loaded(build, tmp_path, monkeypatch):
    target = platform_of(build)
    monkeypatch.setattr(compiler, "COMPILERS", (target.compiler,))
    library, loader = tmp_path / "library.so", tmp_path / "loader"
    compiler.compile_library(build, library)
    content = library.read_bytes()
    assert compiler.digest(build).encode() in content
    assert compiler.newest_glibc(content) >= compiler.OLDEST_GLIBC
    loader.with_suffix(".c").write_text(LOADER)
    command = [target.compiler, "-o", str(loader), str(loader.with_suffix(".c")), "-ldl"]
    subprocess.run(command, check=True, timeout=SECONDS)
    libc = ("-L", "/usr/aarch64-linux-gnu") if target.emulator else ()
    command = [*target.emulator, *libc, str(loader), str(library)]
    assert subprocess.run(command, timeout=SECONDS).returncode == 0


# What is changed in a source, and what finds it.
PRODUCT_STEP = (r"sums\[i\]\[half\] = multiply_units\(.*\);", ";", "product.h", "check")
PLANTED = {
    "a product that is left out": (AVX2, *PRODUCT_STEP),
    "a product that is left out, NEON": (compiler.NEON, *PRODUCT_STEP),
    "a product that is left out, BF16": (compiler.ARM_BF16, *PRODUCT_STEP),
    "half of a unit": (
        compiler.ARM_BF16, r"vdupq_n_u32\(unit\)", "vdupq_n_u32(unit & 0xffff)", "product.h",
        "check",
    ),
    "a quarter of another unit": (
        compiler.ARM_BF16, r"four_units\(from \+ 24\)", "four_units(from + 16)", "product.h",
        "check",
    ),
    "a quarter stored twice": (
        compiler.NEON, r"vst1q_f32\(to \+ 12, x.d\)", "vst1q_f32(to + 12, x.c)", "vectors_neon.h",
        "check",
    ),
    "NaN of the first operand": (
        compiler.NEON, r"vbslq_f32\(vcgtq_f32\(x, y\), x, y\)", "vmaxq_f32(x, y)",
        "vectors_neon.h", "vectors",
    ),
    "rounding toward zero": (
        compiler.ARM_BF16, r"vst1q_u16\(to \+ 8, vreinterpretq_u16_bf16\(high\)\)",
        "vst1q_u16(to + 8, vshrn_high_n_u32(vshrn_n_u32(vreinterpretq_u32_f32(values.c), 16), "
        "vreinterpretq_u32_f32(values.d), 16))",
        "numbers.h", "vectors",
    ),
}  # fmt: skip


def planted(name: str, folder: Path) -> tuple[compiler.Build, Path, str]:
    """The build, its changed sources, and what finds the change."""
    build, pattern, instead, file, finder = PLANTED[name]
    sources = shutil.copytree(compiler.SOURCES, folder / "sources")
    text, count = re.subn(pattern, instead, (sources / file).read_text())
    assert count == 1
    (sources / file).write_text(text)
    return build, sources, finder


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name, tmp_path):
    build, sources, finder = planted(name, tmp_path)
    done = harness_of(build, tmp_path, sources=sources).run(finder)
    assert done.returncode == (4 if finder == "check" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("build", [AVX2, compiler.NEON], ids=id_of)
@pytest.mark.parametrize("beyond", [-1, 1])
def test_a_planted_access_beyond_an_operand_crashes(build, beyond, tmp_path):
    sources = shutil.copytree(compiler.SOURCES, tmp_path / "sources")
    text = (sources / "linear.h").read_text()
    load = "v_load(of_sums), v_load(of_sums + TILE)"
    assert text.count(load) == 1
    changed = "v_load(of_sums - 1)" if beyond < 0 else "v_load(of_sums + TILE + 1)"
    text = text.replace(load, f"v_load(of_sums), {changed}")
    (sources / "linear.h").write_text(text)
    program = harness_of(build, tmp_path, sources=sources)
    with pytest.raises(AssertionError, match=r"exit status -?11"):
        results_of(program, [case_of(calls_of(build.dtype)[0])], tmp_path, 1)
