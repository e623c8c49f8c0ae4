"""Compares our library with transformers and onnxruntime on images: images a second with CLIP.

The model has CLIP-ViT-B/32's tower of images and random weights. The images are JPEG files made on
the spot, smooth colours with some grain, of the sizes in SIZES in turns. Each library runs in a
process and an environment of its own with as many threads as there are cores, from the bytes of the
files to vectors of length one. Peers use the batch size that was fastest for them in a run before.
In every round each library runs once whole, and once its two parts apart: decoding and resizing,
and the tower. The order alternates. transformers prepares its images in one thread, as its
processors do; the threads of onnxruntime's peer prepare the next images while the tower runs.

The tower is also timed without its engine, in buckets full of images, beside a program with only
the matrix products of their tokens, as in bench_model: `share` is theirs of its time.

    python -m benchmarks.bench_images
    python -m benchmarks.bench_images --torch .venv-parity --onnx .venv-peers

Columns: `times` is how many times as fast our library is, in the median round; `least` and `most`
are over the rounds. `cosine` is to transformers in float32.
"""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, processors

from benchmarks import bench_model, peer, report, subject
from benchmarks.bench_libraries import vectors_of
from benchmarks.parameters import random_parameters
from benchmarks.peer import Peer
from benchmarks.subject import Subject
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.data.spec import IMAGE_ROUTE, NormalizeLayer, Pooled
from jaxembed.engine.autotune.calibrate import Calibration
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.models import program
from jaxembed.models.tokens import PackedTokens

WORKER = Path(__file__).parent / "peers" / "images.py"
OURS, REFERENCE = "jaxembed", "transformers float32"
BATCHES = (4, 8, 16, 32)
PARTS = ("whole", "prepare", "forward")
SIZES = ((480, 640), (1080, 1920), (224, 224))  # height and width
CLIP_B32 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 32,
}
TOWERS = {"clip-b32": CLIP_B32, "tiny": TINY}
TEXT = {  # a tower of texts that nothing asks
    "vocab_size": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
    "eos_token_id": 1,
}
SPACE = 512  # dimensions of a vector


@dataclass(frozen=True)
class Contestant:
    """A library, and the dtype that it runs in."""

    name: str
    python: Path
    library: str  # a name of peers/images.py
    dtype: str


class Worker:
    """A contestant in its process, with the fastest batch size chosen."""

    def __init__(self, contestant: Contestant, process: Peer, folder: Path, count: int):
        self._process, self._count = process, count
        self.contestant = contestant
        job = {"library": contestant.library, "dtype": contestant.dtype, "threads": os.cpu_count()}
        job |= {name: str(folder / name) for name in ("model", "images", "cache")}
        self.versions: dict[str, str] = self._process.ask(json.dumps(job))
        batches = [0] if contestant.library == OURS else _batches(count)  # ours makes its own
        runs = [{batch: self.seconds("whole", batch) for batch in batches} for _ in range(2)]
        self.seconds_of = {batch: min(run[batch] for run in runs) for batch in batches}
        self.batch = min(self.seconds_of, key=lambda batch: self.seconds_of[batch])
        print(f"{contestant.name}: seconds by batch size {self.seconds_of}", flush=True)

    def seconds(self, part: str, batch: int | None = None) -> float:
        """The seconds that a part takes for all images."""
        batch = self.batch if batch is None else batch
        return self._process.ask(json.dumps([part, batch, self._count]))

    def vectors(self) -> np.ndarray:
        """The vectors of the last run, float64 `[images, dim]`, normalised."""
        return vectors_of(self._process.ask(""), self._count)


def _batches(count: int) -> list[int]:
    """The batch sizes to try with so many images: the last one holds them all, if one does."""
    return [batch for batch in BATCHES if batch == BATCHES[0] or batch // 2 < count]


@contextmanager
def working(contestant: Contestant, folder: Path, count: int) -> Iterator[Worker]:
    """Run a worker that has loaded its model and chosen its batch size; end its process after."""
    with peer.running(contestant.name, contestant.python, WORKER) as process:
        yield Worker(contestant, process, folder, count)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--torch", type=Path, help="an environment with transformers and Pillow")
    parser.add_argument("--onnx", type=Path, help="one with onnxruntime, torch and transformers")
    parser.add_argument("--tower", choices=TOWERS, default="clip-b32")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buckets", default="4x400,8x64,8x50", help="of the tower alone")
    parser.add_argument("--repeat", type=int, default=9, help="rounds of these buckets")
    parser.add_argument("--kernels", default="auto", help="as of `jaxembed serve`")
    parser.add_argument("--cache-dir", type=Path, help="for the results of kernel trials")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the contestants in turns, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_model(folder / "model", TOWERS[args.tower])
        sizes = write_images(folder / "images", args.images)
        workers = [
            stack.enter_context(working(one, folder, args.images)) for one in contestants(args)
        ]
        seconds = measure(workers, args.rounds)
        vectors = {worker.contestant.name: worker.vectors() for worker in workers}
        towers = of_products(folder, args)
    rows = [row_of(worker, seconds, vectors, args.images) for worker in workers]
    title = f"{args.tower} (random), {args.images} images, {report.device_name()}"
    report.show([row | {"cosine": f"{row['cosine']:.5f}"} for row in rows], title)
    report.show(towers)
    facts = {
        "model": f"{args.tower} (random)",
        "images": args.images,
        "sizes": sizes,
        "versions": {worker.contestant.name: worker.versions for worker in workers},
        "batches": {worker.contestant.name: worker.seconds_of for worker in workers},
        "results": rows,
        "towers": towers,
        "rounds": seconds,
    }
    report.finish("bench_images", argv, facts, args.out)


def contestants(args: Namespace) -> list[Contestant]:
    """Our library, and the peers whose environments the arguments name."""
    every = [Contestant(OURS, Path(sys.executable), OURS, "default")]
    if args.torch:
        every += [
            Contestant(f"transformers {dtype}", args.torch / "bin/python", "transformers", dtype)
            for dtype in ("float32", "bfloat16")
        ]
    if args.onnx:
        python = args.onnx / "bin/python"
        every.append(Contestant("onnxruntime float32", python, "onnxruntime", "float32"))
    return every


def measure(workers: Sequence[Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure the seconds of each contestant and part in each round."""
    seconds: dict[str, dict[str, list[float]]] = {
        worker.contestant.name: {part: [] for part in PARTS} for worker in workers
    }
    for number in range(rounds):
        for part in PARTS:
            for worker in workers if number % 2 else reversed(workers):
                seconds[worker.contestant.name][part].append(worker.seconds(part))
    return seconds


def row_of(
    worker: Worker,
    seconds: dict[str, dict[str, list[float]]],
    vectors: dict[str, np.ndarray],
    images: int,
) -> dict[str, Any]:
    """The row of a contestant, from the seconds and vectors of all."""
    name = worker.contestant.name
    whole, prepare, forward = (np.array(seconds[name][part]) for part in PARTS)
    times = whole / np.array(seconds[OURS]["whole"])
    reference = REFERENCE if REFERENCE in vectors else OURS
    cosine = np.einsum("nd,nd->n", vectors[name], vectors[reference])
    return {
        "library": name,
        "batch": worker.batch or None,
        "images_per_s": images / float(np.median(whole)),
        "times": float(np.median(times)),
        "least": times.min(),
        "most": times.max(),
        "prepare_ms": 1000 * float(np.median(prepare)) / images,
        "forward_ms": 1000 * float(np.median(forward)) / images,
        "cosine": cosine.min(),
    }


def of_products(folder: Path, args: Namespace) -> list[dict[str, Any]]:
    """The rows of the tower in each bucket, beside its matrix products alone."""
    path = hub.resolve(ModelSource(str(folder / "model"), cache_dir=folder / "cache"))
    spec = checkpoint.load_spec(checkpoint.route_path(path, IMAGE_ROUTE))
    # without the projection, whose product is of one token of an image
    spec = msgspec.structs.replace(spec, heads={"dense": Pooled(("cls",), (NormalizeLayer(),))})
    model = Subject(spec.source, spec, program(spec), random_parameters(spec), None)
    dtype = Calibration(jax.local_devices()[0]).native_dtype()
    pairs = [text.split("x") for text in args.buckets.split(",")]
    grid = BucketGrid(tuple(Bucket(int(rows), int(length)) for rows, length in pairs))
    replica = subject.replica(model, args, [grid], dtype)
    calls, lengths_of = [], []
    for bucket in grid.buckets:
        replica.compile(bucket)
        planes, lengths = full_planes(bucket, model)
        lengths_of.append(lengths)
        calls += [
            partial(replica.run, bucket, planes, (replica.primary,)),
            bench_model.products(
                model, dtype, sum(lengths), replica.devices[0], replica.native_layout
            ),
        ]
    times = report.timed_in_turn(calls, args.repeat)
    rows = []
    for bucket, lengths, whole, least in zip(
        grid.buckets, lengths_of, times[::2], times[1::2], strict=True
    ):
        flops = subject.useful_flops(spec, model.program, lengths)
        row = {"bucket": str(bucket), "images": len(lengths), "dtype": dtype, **whole.row()}
        row |= {"images_per_s": 1000 * len(lengths) / whole.median}
        row |= {"tflop_per_s": flops / whole.median / 1e9, "share": least.times(whole)}
        rows.append(row)
    return rows


def full_planes(bucket: Bucket, model: Subject) -> tuple[np.ndarray, list[int]]:
    """A batch of as many images as fit, as Replica takes it, and the lengths of its sequences."""
    tokens = model.spec.max_input_tokens
    a_row = bucket.length // tokens
    draw, shape = np.random.default_rng(0), (model.program.planes, bucket.rows, bucket.length)
    planes = draw.integers(-(2**31), 2**31, shape).astype(np.int32)
    ids, positions, segments, types, pooled = planes[: PackedTokens.PLANES]
    place = np.arange(bucket.length)
    positions[:] = place % tokens
    segments[:] = np.where(place < a_row * tokens, place // tokens + 1, 0)
    ids[:], types[:], pooled[:] = positions == 0, 0, 0
    first = tokens * np.arange(a_row)
    pooled[:, :a_row], pooled[:, bucket.slots : bucket.slots + a_row] = first, first + tokens
    return planes, [tokens] * (a_row * bucket.rows)


def write_images(folder: Path, count: int) -> list[str]:
    """Write JPEG files of each of SIZES in turns. Returns the sizes."""
    from PIL import Image  # the other benchmarks run without it

    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(count):
        height, width = SIZES[number % len(SIZES)]
        coarse = draw.integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        grain = draw.normal(0, 4, (height, width, 1))
        colours = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
        file = BytesIO()
        Image.fromarray(colours).save(file, "JPEG", quality=90)
        (folder / f"{number:04}.jpg").write_bytes(file.getvalue())
    return [f"{width}x{height}" for height, width in SIZES]


def write_model(folder: Path, image: dict[str, int]) -> None:
    """Write a CLIPModel of random weights, as transformers saves it."""
    folder.mkdir()
    side = image["image_size"]
    config = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": SPACE}
    config |= {"text_config": TEXT, "vision_config": image}
    rules = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}}
    rules |= {"crop_size": {"height": side, "width": side}}
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", rules),
        ("tokenizer_config.json", {}),
    ):
        (folder / name).write_text(json.dumps(content))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1}, unk_token="<unk>"))
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="$A <end>", special_tokens=[("<end>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(tensors(image), folder / "model.safetensors", {"format": "pt"})


def tensors(image: dict[str, int]) -> dict[str, np.ndarray]:
    """Random tensors of a CLIPModel by transformers' names: matrices that keep the scale of what
    they multiply, and norms that change nothing."""
    patch, patches = image["patch_size"], (image["image_size"] // image["patch_size"]) ** 2
    wide, narrow = image["hidden_size"], TEXT["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "text_projection.weight": (SPACE, narrow),
        "visual_projection.weight": (SPACE, wide),
        "text_model.embeddings.token_embedding.weight": (TEXT["vocab_size"], narrow),
        "text_model.embeddings.position_embedding.weight": (
            TEXT["max_position_embeddings"],
            narrow,
        ),
        "vision_model.embeddings.class_embedding": (wide,),
        "vision_model.embeddings.patch_embedding.weight": (wide, 3, patch, patch),
        "vision_model.embeddings.position_embedding.weight": (patches + 1, wide),
    }
    linears: dict[str, tuple[int, int]] = {}
    norms = {"text_model.final_layer_norm": narrow}
    norms |= {f"vision_model.{name}": wide for name in ("pre_layrnorm", "post_layernorm")}
    for half, sizes in (("text_model", TEXT), ("vision_model", image)):
        width, inner = sizes["hidden_size"], sizes["intermediate_size"]
        for number in range(sizes["num_hidden_layers"]):
            layer = f"{half}.encoder.layers.{number}"
            for one in ("q", "k", "v", "out"):
                linears[f"{layer}.self_attn.{one}_proj"] = (width, width)
            linears |= {f"{layer}.mlp.fc1": (inner, width), f"{layer}.mlp.fc2": (width, inner)}
            norms |= {f"{layer}.layer_norm{one}": width for one in (1, 2)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    draw = np.random.default_rng(0)
    found = {}
    for name, shape in shapes.items():
        scale = np.prod(shape[1:]) ** -0.5 if name.endswith("weight") else 0.1
        found[name] = np.asarray(scale * draw.standard_normal(shape), np.float32)
    for name, width in norms.items():
        found |= {f"{name}.weight": np.ones(width, np.float32)}
        found |= {f"{name}.bias": np.zeros(width, np.float32)}
    return found


if __name__ == "__main__":
    main()
