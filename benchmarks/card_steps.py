"""The steps of first_card: each measures one thing on this machine, and yields its rows.

first_card runs each in a process of its own:

    python -m benchmarks.card_steps buckets:bert-base:triton --carried .card --work /tmp/work

A row is one JSON object on a line of standard output. A case that fails is a row with its error; an
error of the step itself is the last row. Whatever else is printed goes to standard error. A step
imports what it needs of jaxembed by itself, so that one whose imports fail stops no other.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks import report

if TYPE_CHECKING:
    from benchmarks.subject import Subject
    from jaxembed.engine.bucket import Bucket

Rows = Iterator[dict[str, Any]]

ERROR_CHARACTERS = 3000  # of the end of a traceback
FIRST_ID = 5  # of the random token ids: smaller ones are special tokens
COPIES_MB = (0.1, 1.0, 12.6, 67.0)
BUCKETS = {
    "tiny": "1x16,4x16,2x64",
    "bert-base": "1x16,1024x16,128x128,32x512",
    "modernbert-base": "1x8192,2x8192",
    "qwen3-0.6b": "1x16,128x128,32x512",
    "qwen3-8b": "1x128,2x8192",
}
# Lengths in tokens of the sequences whose vectors are compared with float32, the longest first.
PROBES = (3000, 512, 300, 128, 100, 40, 17, 16, 11, 5)
LONGEST_PROBE = {"modernbert-base": 3000}  # of other models: 512; a CPU computes them all
TOKENS_A_TEXT = (100, 500)  # in bulk
CHECKPOINT = "checkpoint"  # of random weights, in the work folder


def size_of(args: Namespace, size: str) -> str:
    """The size of the model to run: `size`, or with --tiny the tiny one."""
    return "tiny" if args.tiny else size


def attempt(label: dict[str, Any], call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a function and return its row, or one with the end of the traceback."""
    try:
        return label | call()
    except Exception:
        return label | {"error": traceback.format_exc()[-ERROR_CHARACTERS:]}


# -- the device


def ceilings(args: Namespace) -> Rows:
    """The device, and the rates of products, of device memory, and of the smallest program."""
    device = jax.local_devices()[0]
    yield {
        "folder": report.device_folder(),
        "made": report.provenance("first_card", ()),
        "platform_version": device.client.platform_version.splitlines(),
        "compute_capability": getattr(device, "compute_capability", None),
        "memory": device.memory_stats(),
        "memories": [memory.kind for memory in device.addressable_memories()],
    }
    n, floats = (256, 2**16) if args.tiny else (8192, 2**29)
    for dtype, precision in (("bfloat16", None), ("float32", None), ("float32", "highest")):
        label = {"product": f"{dtype} {precision or 'default'}", "size": n}
        yield attempt(label, partial(_product, n, dtype, precision, args.repeat))
    yield attempt({"copy": "device memory"}, partial(_device_copy, floats, args.repeat))
    planes = np.ones((5, 8, 128), np.int32)
    small = jax.device_put(np.ones(768, np.float32), device)
    smallest = jax.jit(lambda x: x + 1)
    for name, call in (
        ("copy of 20 kB to the device", lambda: jax.device_put(planes, device)),
        ("smallest program", lambda: smallest(small)),
    ):
        yield attempt({"latency": name}, lambda call=call: report.timed(call, args.repeat).row())


def _product(n: int, dtype: str, precision: str | None, runs: int) -> dict[str, Any]:
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.float32).astype(dtype)
    with jax.default_matmul_precision(precision):
        product = jax.jit(partial(jnp.dot, preferred_element_type=jnp.float32))
        times = report.timed(lambda: product(a, a), runs)
    return {**times.row(), "tflop_per_s": 2 * n**3 / times.median / 1e9}


def _device_copy(floats: int, runs: int) -> dict[str, Any]:
    x = jnp.ones(floats, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = report.timed(lambda: copy(x), runs)
    return {**times.row(), "gb_per_s": 2 * x.nbytes / times.median / 1e6}


def copies(args: Namespace) -> Rows:
    """The time of copies to the host, by size: plain, and into pinned memory.

    JAX keeps the host's copy of an array, so each run copies a new one.
    """
    device = jax.local_devices()[0]

    def pinned(array: jax.Array) -> np.ndarray:
        memory = SingleDeviceSharding(device, memory_kind="pinned_host")
        return np.asarray(jax.device_put(array, memory))

    for mb in COPIES_MB[:2] if args.tiny else COPIES_MB:
        x = jax.device_put(np.ones((int(mb * 1e6) // 4096, 1024), np.float32), device)
        for way, fetch in (("plain", np.asarray), ("pinned", pinned)):
            label = {"mb": mb, "bytes": x.nbytes, "way": way}
            yield attempt(label, partial(_copy, x, fetch, args.repeat))


def _copy(x: jax.Array, fetch: Callable[[jax.Array], Any], runs: int) -> dict[str, Any]:
    """Time the copy of a new array each time, without the first two."""
    makes, ms = jax.jit(lambda y: y + 1), []
    for _ in range(runs + 2):
        made = jax.block_until_ready(makes(x))
        ms += report.timed(partial(fetch, made), 1, warmups=0).ms
    times = report.Times(tuple(ms[2:]))
    return {**times.row(), "gb_per_s": x.nbytes / times.median / 1e6}


# -- models


def buckets(args: Namespace, size: str, kernel: str) -> Rows:
    """Each bucket of a model in bfloat16 with one attention kernel, as the engine runs it.

    `launch_ms` is a run until the outputs are ready on the device, `pipelined_ms` one of several
    that are started together, `run_ms` one with the copy of its vectors to the host. `distance` is
    the largest 1 - cosine to the carried float32 vectors.
    """
    from benchmarks import subject
    from jaxembed.cli.loading import configure_jax
    from jaxembed.engine.replica import Replica
    from jaxembed.models import kernels
    from jaxembed.models.attention import by_xla

    configure_jax(args.work / "cache", None)
    found = None
    if kernel != "xla":
        (path,) = (paths[kernel] for paths in kernels.KERNELS.values() if kernel in paths)
        found = kernels.kernel(path)
    size = size_of(args, size)
    started_at = time.perf_counter()
    model = subject.random_subject(size, dtype="bfloat16" if size == "qwen3-8b" else "float32")
    replica = Replica(
        model.program,
        model.parameters,
        jax.local_devices()[:1],
        "bfloat16",
        attention=lambda bucket: found.implementation(bucket.slots) if found else by_xla,
    )
    yield {"model": size, "kernel": kernel, "weights_s": time.perf_counter() - started_at}
    reference = carried_reference(args.carried, model, size)
    for bucket in subject.grid_of(BUCKETS[size]).buckets:
        label = {"kernel": kernel, "bucket": str(bucket)}
        yield attempt(label, partial(_bucket, replica, model, bucket, reference, args.repeat))


def _bucket(replica, model: "Subject", bucket: "Bucket", reference, runs: int) -> dict[str, Any]:
    started_at = time.perf_counter()
    replica.compile(bucket)
    compile_s = time.perf_counter() - started_at
    planes, places = probe_batch(model, bucket)
    launched = report.timed(lambda: replica.launch(bucket, planes), runs)
    together = report.timed(lambda: [replica.launch(bucket, planes) for _ in range(runs)], 1)
    whole = report.timed(lambda: replica.run(bucket, planes, ("dense",)), runs)
    dense = replica.run(bucket, planes, ("dense",))["dense"]
    program = replica.compiled(bucket)
    memory = program.memory_analysis()
    parts = ("argument", "output", "temp", "generated_code")
    return {
        "compile_s": compile_s,
        "launch_ms": launched.median,
        "launch_p95_ms": launched.p95,
        "pipelined_ms": together.median / runs,
        "run_ms": whole.median,
        "tokens_per_s": bucket.tokens / together.median * runs * 1000,
        "memory_mb": {part: getattr(memory, f"{part}_size_in_bytes", 0) / 1e6 for part in parts},
        **agreement(dense, places, reference),
        "hlo": program.as_text(),
    }


def agreement(dense: np.ndarray, places: dict[int, tuple[int, int]], reference) -> dict[str, Any]:
    """Compare the vectors of probes in a batch with those of the reference."""
    vectors = {length: unit(dense[place]) for length, place in places.items()}
    row: dict[str, Any] = {"finite": all(np.isfinite(v).all() for v in vectors.values())}
    if isinstance(reference, str):
        return row | {"distance": None, "not_compared": reference}
    distances = {
        length: float(np.square(vector - reference[str(length)]).sum() / 2)
        for length, vector in vectors.items()
        if str(length) in reference
    }
    return row | {"distance": max(distances.values()), "distances": distances}


def unit(vector: np.ndarray) -> np.ndarray:
    """Scale a vector to length 1."""
    vector = np.asarray(vector, np.float32)
    return vector / np.linalg.norm(vector)


def probe_batch(
    model: "Subject", bucket: "Bucket"
) -> tuple[np.ndarray, dict[int, tuple[int, int]]]:
    """Make a batch of the probes that fit, and full rows after them.

    Returns the planes, int32 `[planes, rows, length]`, and the row and slot of each probe by its
    length. A probe has the same tokens in every batch.
    """
    from benchmarks.bench_model import full_planes
    from jaxembed.engine.batch import RowAllocator

    planes, _ = full_planes(bucket, model)
    shelf, places = RowAllocator(bucket), {}
    longest = min(bucket.length, model.spec.max_input_tokens)
    for length in (n for n in PROBES if n <= longest):
        if (place := shelf.put(length)) is None:
            continue
        row, segment, slot, start = place
        if slot == 0:
            planes[:, row] = 0
        part = slice(start, start + length)
        ids = np.random.default_rng(length).integers(FIRST_ID, model.vocab_size, length)
        planes[0, row, part], planes[1, row, part] = ids, np.arange(length)
        planes[2, row, part] = segment
        planes[4, row, [slot, bucket.slots + slot]] = start, start + length
        places[length] = row, slot
    return planes, places


def weights_digest(model: "Subject") -> int:
    """A checksum of the first and the last weights."""
    names = list(model.parameters)
    return zlib.crc32(b"".join(model.parameters[n].tobytes() for n in (names[0], names[-1])))


def float32_reference(size: str) -> dict[str, np.ndarray]:
    """The vectors of the probes by a model with random weights in float32, by length as text."""
    from benchmarks import subject
    from jaxembed.engine.bucket import Bucket
    from jaxembed.engine.replica import Replica

    model = subject.random_subject(size)
    longest = min(LONGEST_PROBE.get(size, 512), model.spec.max_input_tokens)
    rows = -(-sum(length for length in PROBES if length <= longest) // longest)
    bucket = Bucket(rows, longest)
    replica = Replica(model.program, model.parameters, jax.local_devices()[:1], "float32")
    replica.compile(bucket)
    planes, places = probe_batch(model, bucket)
    dense = replica.run(bucket, planes, ("dense",))["dense"]
    vectors = {str(length): unit(dense[place]) for length, place in places.items()}
    return vectors | {"weights": np.array(weights_digest(model))}


def carried_reference(carried: Path, model: "Subject", size: str) -> dict[str, np.ndarray] | str:
    """The carried vectors of the same weights, or why there are none."""
    file = carried / f"{size}.npz"
    if not file.is_file():
        return f"no {file}"
    with np.load(file) as stored:
        vectors = dict(stored)
    if int(vectors.pop("weights")) != weights_digest(model):
        return f"{file} was made with other weights"
    return vectors


def choice(args: Namespace, size: str) -> Rows:
    """The kernels that a server would choose at its start, and the seconds, for each row length."""
    from benchmarks import subject
    from jaxembed.engine.autotune.kernels import choose_kernels
    from jaxembed.engine.bucket import Bucket, BucketGrid
    from jaxembed.models import program

    made = program(subject.spec_of(size_of(args, size)))
    device = jax.local_devices()[0]
    longest = 8192 if size == "modernbert-base" else 512
    for length in (64,) if args.tiny else [n for n in (512, 128, 256, 8192) if n <= longest]:

        def chosen(length: int = length) -> dict[str, Any]:
            started_at = time.perf_counter()
            found = choose_kernels(made, device, "bfloat16", BucketGrid((Bucket(1, length),)))
            return {"seconds": time.perf_counter() - started_at, **found.describe()}

        yield attempt({"length": length}, chosen)


def attention(args: Namespace, name: str) -> Rows:
    """One implementation of attention on each case."""
    from benchmarks import attention_candidates

    for case in attention_candidates.cases(jax.local_devices()[0].platform == "cpu"):
        tried = partial(attention_candidates.tried, name, case, args.repeat)
        yield attempt({"case": str(case)}, tried)


def mixes(args: Namespace, size: str) -> Rows:
    """Useful tokens a second of the engine on mixes of lengths, and of torch, if it is there.

    Torch runs in a process of its own: transformers in bf16, sorted by length, with the fastest of
    some batch sizes. Both start from token ids.
    """
    from benchmarks import bench_engine, bench_model, subject, workloads

    size, count = size_of(args, size), 50 if args.tiny else 4096
    arguments = bench_model.parse(["--architecture-size", size, "--dtype", "bfloat16"])
    model, grid = subject.random_subject(size), subject.grid_of(BUCKETS[size])
    limit, replica = grid.max_length, subject.replica(model, arguments, grid)
    lengths = [
        workloads.workload(name, count, limit=limit, vocab_size=model.vocab_size)
        for name in ("queries", "mixed", f"constant:{limit}")
    ]
    for row in bench_engine.measure(model, replica, grid, lengths, args.repeat):
        yield {"library": "jaxembed"} | row
    model_type, config = subject.transformers_config(size)
    job = {
        "model_type": model_type,
        "config": config,
        "mixes": {mix.name: mix.lengths.tolist() for mix in lengths},
        "batches": (32, 128, 512),
        "repeat": args.repeat,
    }
    command = [sys.executable, str(Path(__file__).parent / "peers" / "forward.py")]
    torch = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True)
    if torch.returncode:
        yield {"library": "torch", "skipped": f"exit status {torch.returncode}: see its errors"}
        return
    found = json.loads(torch.stdout.splitlines()[-1])
    for row in found["results"]:
        yield {"library": "torch", "versions": found["versions"]} | row


# -- servers


def write_checkpoint(folder: Path, size: str) -> Path:
    """Write a checkpoint with random weights and a tokenizer for words, unless it is there."""
    from benchmarks import subject, workloads
    from jaxembed.checkpoints import checkpoint

    if (folder / checkpoint.DIGESTS).is_file():
        return folder
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    model = subject.random_subject(size)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *workloads.COMMON.split()]
    words += [f"w{number}" for number in range(model.vocab_size - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(special)
    checkpoint.save(folder, model.spec, model.parameters, tokenizer.to_str().encode())
    return folder


def words_of(count: int, tokens: int) -> list[str]:
    """Different texts of common words, each of so many tokens with the two special ones."""
    from benchmarks import workloads

    draw, words = np.random.default_rng(tokens), workloads.COMMON.split()
    return [" ".join(draw.choice(words, max(tokens - 2, 1))) for _ in range(count)]


def server(args: Namespace, size: str, kind: str) -> Rows:
    """A server under single queries and under bulk, or with `null` its null model: the host alone.

    The columns are those of bench_host: `text_us` is the server's CPU time for a text.
    """
    from benchmarks import bench_host, servers, workloads
    from benchmarks.load import Closed

    size = size_of(args, size)
    folder = write_checkpoint(args.work / CHECKPOINT, size)
    grid = args.work / "grid.json"
    shapes = [list(map(int, text.split("x"))) for text in BUCKETS[size].split(",")]
    grid.write_text(json.dumps({"buckets": shapes}))
    flags = ["--buckets", str(grid), "--cache-dir", str(args.work / "cache")]
    flags += ["--max-queue-tokens", "2000000", *(["--null-model"] if kind == "null" else [])]
    longest = max(length for _, length in shapes)
    started_at = time.perf_counter()
    with servers.jaxembed(str(folder), flags) as running:
        with urllib.request.urlopen(running.url + "/info", timeout=30) as answer:
            info = json.load(answer).get("jaxembed", {})
        yield {"start_s": time.perf_counter() - started_at, "kernels": info.get("kernels")}
        seconds, texts = (0.3, 4) if args.tiny else (5.0, 64)
        loads = [(Closed(f"queries, {n} connections", 1, n), 10) for n in (1, 32)]
        loads += [(Closed(f"bulk of {n} tokens", texts, 8), n) for n in TOKENS_A_TEXT]
        for one, tokens in loads:
            pool = words_of(4096 if one.texts == 1 else 16 * texts, min(tokens, longest))
            requests = workloads.requests(running.target, pool, one.texts)
            measured = partial(bench_host.measure, running, one, requests, seconds)
            yield attempt({"load": one.name}, measured)


def start(args: Namespace, size: str) -> Rows:
    """A server's start with the default grid: with an empty cache folder, and again with it."""
    from benchmarks import bench_start

    folder = write_checkpoint(args.work / CHECKPOINT, size_of(args, size))
    flags = ["--max-batch-tokens", "128"] if args.tiny else []
    yield from bench_start.cold_and_warm(str(folder), flags)


STEPS: dict[str, Callable[..., Rows]] = {
    one.__name__: one
    for one in (ceilings, copies, buckets, choice, attention, mixes, server, start)
}


def end_with_stdin() -> None:
    """Kill this process group when standard input is closed, as it is when the parent is killed."""

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(argv: Sequence[str] | None = None) -> None:
    """Run one step, and print its rows. The exit status is 1 if the step itself fails."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", help="name and arguments with colons, such as attention:triton")
    parser.add_argument("--carried", type=Path, required=True, help="what first_card packed")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the steps of a run")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU and a test")
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin is closed")
    args = parser.parse_args(argv)
    args.repeat = 2 if args.tiny else 10
    name, *of_step = args.step.split(":")
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        if args.watch_stdin:
            end_with_stdin()
        try:
            for row in STEPS[name](args, *of_step):
                print(json.dumps(report.rounded(row)), file=out)
        except BaseException:
            print(json.dumps({"error": traceback.format_exc()[-ERROR_CHARACTERS:]}), file=out)
            raise


if __name__ == "__main__":
    main()
