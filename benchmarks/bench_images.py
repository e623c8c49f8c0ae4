"""Compares our library with transformers and onnxruntime on images: images a second from files.

transformers makes the model, of random weights and published widths. Models of pages have fewer
layers than published, as TOWERS says. The images are JPEG files made on the spot, smooth colours
with some grain: of the sizes in PHOTOS in turns, or pages of A4 at 100 dpi. Each library runs in a
process and an environment of its own with as many threads as there are cores, from the bytes of the
files to vectors of length one. Peers use the batch size that was fastest for them in a run before.
In every round each library runs once whole, and once its two parts apart: decoding and resizing,
and the model. The order alternates. transformers prepares its images in one thread, as its
processors do; the threads of onnxruntime's peer prepare the next images while the tower runs.

CLIP's tower is also timed without its engine, in buckets full of images, beside a program with only
the matrix products of their tokens, as in bench_model: `share` is theirs of its time.

    python -m benchmarks.bench_images --torch .venv-parity --onnx .venv-peers
    python -m benchmarks.bench_images --torch .venv-parity --tower colqwen2 --images 8

Columns: `times` is how many times as fast our library is in the same dtype, in the median round;
`least` and `most` are over the rounds. `cosine` is the lowest to a vector of transformers in
float32.
"""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

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
OURS, THEIRS = "jaxembed", "transformers"
DTYPES = ("float32", "bfloat16")
BATCHES = (1, 4, 8, 16, 32)
PARTS = ("whole", "prepare", "forward")
PHOTOS = ((480, 640), (1080, 1920), (224, 224))  # height and width
PAGES = ((1169, 827),)


def sized(width: int, layers: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    """The sizes of a tower, by transformers' names."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (width, layers, heads, inner), strict=True)) | others


@dataclass(frozen=True)
class Tower:
    """A model: its config.json, its other files by their names, and the sizes of its images."""

    config: dict[str, Any]
    files: dict[str, Any]
    sizes: tuple[tuple[int, int], ...] = PHOTOS


RULES = "preprocessor_config.json"
SQUARE = {"height": 224, "width": 224}
# sentence-transformers' files of a model whose texts and images are put into the chat template, and
# whose vector is that of the last token
MODULES = ("Transformer", "Pooling", "Normalize")
CHAT = {
    "modules.json": [
        {"idx": number, "name": str(number), "type": f"sentence_transformers.models.{name}"}
        | {"path": f"{number}_{name}" if number else ""}
        for number, name in enumerate(MODULES)
    ],
    "1_Pooling/config.json": {"embedding_dimension": 2048, "pooling_mode": "lasttoken"},
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"message": {"method": "forward", "format": "structured"}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    },
}
TOKENS = 262  # of the tokenizer, of which the last is that of an image
NO_TEXT = sized(32, 1, 1, 32, vocab_size=TOKENS, max_position_embeddings=8, eos_token_id=TOKENS - 6)


def clip(side: int, vision: dict[str, Any]) -> Tower:
    """CLIP, with a tower of texts that nothing asks."""
    vision |= {"image_size": side, "patch_size": 32}
    config = {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512}
    rules = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}}
    return Tower(
        config | {"text_config": NO_TEXT, "vision_config": vision},
        {RULES: rules | {"crop_size": {"height": side, "width": side}}},
    )


def rope(theta: float, *sections: int) -> dict[str, Any]:
    """Rotations of text and of the places of a page."""
    fields = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    return {"rope_parameters": fields, "vocab_size": TOKENS, "max_position_embeddings": 2048}


TOWERS = {
    "clip-b32": clip(224, sized(768, 12, 12, 3072)),
    "tiny": clip(64, sized(32, 1, 2, 64)),
    "siglip-b16": Tower(
        {
            "model_type": "siglip",
            "architectures": ["SiglipModel"],
            "text_config": NO_TEXT | {"projection_size": 768},
            "vision_config": sized(768, 12, 12, 3072, image_size=224, patch_size=16),
        },
        {RULES: {"image_processor_type": "SiglipImageProcessor"} | {"size": SQUARE}},
    ),
    "colqwen2": Tower(  # on Qwen2-VL-2B, of which 28 and 32 layers are published
        {
            "model_type": "colqwen2",
            "architectures": ["ColQwen2ForRetrieval"],
            "embedding_dim": 128,
            "vlm_config": {
                "model_type": "qwen2_vl",
                "image_token_id": TOKENS - 1,
                "text_config": sized(1536, 2, 12, 8960, num_key_value_heads=2)
                | rope(1e6, 16, 24, 24),
                "vision_config": {"depth": 2, "embed_dim": 1280, "num_heads": 16}
                | {"hidden_size": 1536},
            },
        },
        {
            RULES: {"image_processor_type": "Qwen2VLImageProcessor"}
            | {"size": {"shortest_edge": 4 * 28**2, "longest_edge": 768 * 28**2}}
        },
        PAGES,
    ),
    "qwen3-vl": Tower(  # Qwen3-VL-Embedding-2B, of which 28 and 24 layers are published
        {
            "model_type": "qwen3_vl",
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": TOKENS - 1,
            "vision_start_token_id": TOKENS - 3,
            "vision_end_token_id": TOKENS - 2,
            "tie_word_embeddings": True,
            "text_config": sized(2048, 2, 16, 6144, num_key_value_heads=8, head_dim=128)
            | rope(5e6, 24, 20, 20),
            "vision_config": {"depth": 2, "hidden_size": 1024, "num_heads": 16}
            | {"intermediate_size": 4096, "out_hidden_size": 2048}
            | {"deepstack_visual_indexes": [0, 1]},
        },
        CHAT
        | {
            RULES: {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}
            | {"size": {"shortest_edge": 4 * 32**2, "longest_edge": 1800 * 32**2}}
            | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        },
        PAGES,
    ),
}


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
        """The vectors of the last run, float64 `[vectors, dim]`, normalised."""
        count, encoded = self._process.ask("")
        return vectors_of(encoded, count)


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
    parser.add_argument(
        "--torch", type=Path, required=True, help="an environment with transformers and Pillow"
    )
    parser.add_argument("--onnx", type=Path, help="one with onnxruntime, torch and transformers")
    parser.add_argument("--tower", choices=TOWERS, default="clip-b32")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buckets", default="4x400,8x64,8x50", help="of the tower alone")
    parser.add_argument("--repeat", type=int, default=9, help="rounds of these buckets")
    parser.add_argument("--kernels", default="auto", help="as of `jaxembed serve`")
    parser.add_argument("--cache-dir", type=Path, help="for the results of kernel trials")
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.onnx and TOWERS[args.tower].sizes == PAGES:
        parser.error(f"--onnx is for towers without texts, not for {args.tower}; leave it out")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the contestants in turns, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        tower = TOWERS[args.tower]
        make(folder / "model", tower, args.torch)
        write_images(folder / "images", args.images, tower.sizes)
        workers = [
            stack.enter_context(working(one, folder, args.images)) for one in contestants(args)
        ]
        seconds = measure(workers, args.rounds)
        vectors = {worker.contestant.name: worker.vectors() for worker in workers}
        towers = of_products(folder, args) if tower.config["model_type"] == "clip" else []
    rows = [row_of(worker, seconds, vectors, args.images) for worker in workers]
    title = f"{args.tower} (random), {args.images} images, {report.device_name()}"
    report.show([row | {"cosine": f"{row['cosine']:.5f}"} for row in rows], title)
    if towers:
        report.show(towers)
    facts = {
        "model": f"{args.tower} (random)",
        "images": args.images,
        "sizes": [f"{width}x{height}" for height, width in tower.sizes],
        "config": tower.config,
        "versions": {worker.contestant.name: worker.versions for worker in workers},
        "batches": {worker.contestant.name: worker.seconds_of for worker in workers},
        "results": rows,
        "towers": towers,
        "rounds": seconds,
    }
    report.finish("bench_images", argv, facts, args.out)


def make(folder: Path, tower: Tower, environment: Path) -> None:
    """Let transformers write a model of random weights to a folder."""
    with peer.running(THEIRS, environment / "bin/python", WORKER) as process:
        process.ask(json.dumps(asdict(tower) | {"model": str(folder)}))


def contestants(args: Namespace) -> list[Contestant]:
    """Our library, and the peers whose environments the arguments name."""
    pythons = {OURS: Path(sys.executable), THEIRS: args.torch / "bin/python"}
    every = [
        Contestant(f"{name} {dtype}", python, name, dtype)
        for name, python in pythons.items()
        for dtype in DTYPES
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
    times = whole / np.array(seconds[f"{OURS} {worker.contestant.dtype}"]["whole"])
    cosine = np.einsum("nd,nd->n", vectors[name], vectors[f"{THEIRS} float32"])
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


def write_images(folder: Path, count: int, sizes: Sequence[tuple[int, int]]) -> None:
    """Write JPEG files of each of the sizes in turns."""
    from PIL import Image  # the other benchmarks run without it

    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(count):
        height, width = sizes[number % len(sizes)]
        coarse = draw.integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        grain = draw.normal(0, 4, (height, width, 1))
        colours = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
        file = BytesIO()
        Image.fromarray(colours).save(file, "JPEG", quality=90)
        (folder / f"{number:04}.jpg").write_bytes(file.getvalue())


if __name__ == "__main__":
    main()
