"""Compares our library with transformers and onnxruntime on images: images a second from files.

transformers makes the model, of random weights and published widths. Models of pages have fewer
layers than published, as TOWERS says. The images are JPEG files made on the spot, smooth colours
with some grain: of the sizes in PHOTOS in turns, or pages of A4 at 100 dpi. Each library runs in a
process and an environment of its own with as many threads as there are cores, from the bytes of the
files to vectors of length one. Peers use the batch size that was fastest for them in a run before.
In every round each library runs once whole, and once its two parts apart: decoding and resizing,
and the model. The order alternates. transformers prepares its images in one thread, as its
processors do; the threads of onnxruntime's peer prepare the next images while the tower runs.

    python -m benchmarks.bench_images --torch .venv-parity --onnx .venv-peers
    python -m benchmarks.bench_images --torch .venv-parity --tower colqwen2 --images 8

Columns: `times` is how many times as fast our library is in the same dtype, in the median round;
`least` and `most` are over the rounds. `cosine` is the lowest to a vector of transformers in
float32.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peer, report
from benchmarks.peer import Contestant

PROGRAM = "images.py"
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


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument(
        "--torch", type=Path, required=True, help="an environment with transformers and Pillow"
    )
    parser.add_argument("--onnx", type=Path, help="one with onnxruntime, torch and transformers")
    parser.add_argument("--tower", choices=TOWERS, default="clip-b32")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = report.parse(parser, argv)
    if args.onnx and TOWERS[args.tower].sizes == PAGES:
        parser.error(f"--onnx is for towers without texts, not for {args.tower}; leave it out")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the contestants in turns, and print and write the results."""
    args = parse(argv)
    tower, seconds = TOWERS[args.tower], {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {name: str(Path(folder) / name) for name in ("model", "images", "cache")}
        with peer.running(
            Contestant("maker", args.torch, "maker"), PROGRAM, **job, **asdict(tower)
        ):
            pass  # it answers when it has written the model
        write_images(Path(job["images"]), args.images, tower.sizes)
        workers = []
        for one in contestants(args):
            worker = stack.enter_context(peer.running(one, PROGRAM, **job))
            batches = [n for n in BATCHES if n == BATCHES[0] or n // 2 < args.images]
            worker.choose((0,) if one.library == OURS else batches, "whole")
            workers.append(worker)
        for part in PARTS:
            calls = {w.name: partial(w.seconds, part, w.batch) for w in workers}
            seconds[part] = report.in_turns(calls, args.rounds)
        vectors = {worker.name: worker.vectors() for worker in workers}
    rows = [row_of(worker.name, worker.batch, seconds, vectors, args.images) for worker in workers]
    report.show(rows, f"{args.tower} (random), {args.images} images, {report.device_name()}")
    facts = {
        "model": f"{args.tower} (random)",
        "images": args.images,
        "sizes": [f"{width}x{height}" for height, width in tower.sizes],
        "config": tower.config,
    }
    report.finish(args, facts | peer.about(workers) | {"results": rows, "rounds": seconds})


def contestants(args: Namespace) -> Iterator[Contestant]:
    """Our library, and the peers whose environments the arguments name."""
    for library, environment in ((OURS, Path(sys.prefix)), (THEIRS, args.torch)):
        for dtype in DTYPES:
            yield Contestant(f"{library} {dtype}", environment, library, {"dtype": dtype})
    if args.onnx:
        yield Contestant("onnxruntime float32", args.onnx, "onnxruntime", {"dtype": "float32"})


def row_of(
    name: str,
    batch: int,
    seconds: dict[str, dict[str, list[float]]],
    vectors: dict[str, np.ndarray],
    images: int,
) -> dict[str, Any]:
    """The row of a contestant, from the seconds and vectors of all."""
    whole, prepare, forward = (np.array(seconds[part][name]) for part in PARTS)
    ours = seconds["whole"][f"{OURS} {name.split()[1]}"]
    return {
        "library": name,
        "batch": batch or None,
        "images_per_s": images / float(np.median(whole)),
        **report.spread(whole / ours),
        "prepare_ms": 1000 * float(np.median(prepare)) / images,
        "forward_ms": 1000 * float(np.median(forward)) / images,
        "cosine": np.einsum("nd,nd->n", vectors[name], vectors[f"{THEIRS} float32"]).min(),
    }


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
