"""CLIP's images in one library, in a process of its own, driven over pipes by `bench_images`.

Runs in that library's environment, so it imports nothing of jaxembed but where it is what is timed.
The first line of standard input is a JSON object:

    {"library": "transformers", "model": "/folder", "dtype": "bfloat16", "threads": 2,
     "images": "/folder"}

`model` is a folder as transformers saves a CLIPModel, `images` one of files of images. Then each
line is a part, a batch size and how many of the images, `["whole", 16, 32]`. The parts are
`prepare` (files to pixels, whose result the next `forward` takes), `forward` (pixels to vectors on
the host) and `whole` (both, as the library's users run them). Answers are lines of JSON: versions
first, then seconds, and for an empty line the vectors of the last run, float32 in base64.

transformers prepares images in the calling thread, as its processors do. For onnxruntime, which
runs what torch exports of the same tower, as many threads as there are cores prepare them.
"""

import base64
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
from pipe import opened, versions


class Jaxembed:
    """The library, which makes its own batches."""

    PACKAGES = ("jaxembed", "jax", "jaxlib", "pillow")

    def __init__(self, job: dict[str, Any]):
        import jax

        from jaxembed import Embedder, EngineConfig, memory

        memory.keep()  # as docs/library.md says: what the command line does
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        dtype: Any = None if job["dtype"] == "default" else job["dtype"]
        config = EngineConfig(dtype=dtype, warmup="full")
        self._embedder = Embedder(job["model"], cache_dir=Path(job["cache"]), config=config)
        for one in self._embedder.model.engines.values():
            one.engine.wait_timed()

    def whole(self, files: Sequence[bytes], batch: int) -> np.ndarray:
        return self._embedder.encode(images=files)

    def prepare(self, files: Sequence[bytes], batch: int) -> Any:
        from jaxembed.data.inputs import Image

        processor = self._embedder.model.routes["image"].processor
        rules = None  # which are of texts
        jobs = [processor.executor.submit(processor.encode, [Image(f)], rules) for f in files]
        return [job.result().work for job in jobs]

    def forward(self, prepared: Any, batch: int) -> np.ndarray:
        from jaxembed.data.work import join_work

        engine, outputs = self._embedder.model.engines["image"].engine, frozenset({"dense"})
        future = engine.submit(join_work(prepared, outputs))
        future.result()
        return future.values["dense"]


class Transformers:
    """A CLIPVisionModelWithProjection and the processor on Pillow."""

    PACKAGES = ("transformers", "torch", "pillow")

    def __init__(self, job: dict[str, Any]):
        import torch

        torch.set_num_threads(job["threads"])
        self._model, self._dtype = tower(job["model"], job["dtype"]), getattr(torch, job["dtype"])
        self._processor = processor(job["model"])

    def whole(self, files: Sequence[bytes], batch: int) -> np.ndarray:
        return np.concatenate([self._vectors(self._pixels(some)) for some in parts(files, batch)])

    def prepare(self, files: Sequence[bytes], batch: int) -> list[Any]:
        return [self._pixels(some) for some in parts(files, batch)]

    def forward(self, prepared: list[Any], batch: int) -> np.ndarray:
        return np.concatenate([self._vectors(pixels) for pixels in prepared])

    def _pixels(self, files: Sequence[bytes]) -> Any:
        import torch

        images = [decoded(file) for file in files]
        return torch.from_numpy(pixels_of(self._processor, images)).to(self._dtype)

    def _vectors(self, pixels: Any) -> np.ndarray:
        import torch

        with torch.inference_mode():
            found = self._model(pixel_values=pixels).image_embeds
            return torch.nn.functional.normalize(found.float()).numpy()


class OnnxRuntime:
    """The same tower, exported, in float32."""

    PACKAGES = ("onnxruntime", "onnx", "transformers", "torch", "pillow")

    def __init__(self, job: dict[str, Any]):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job["threads"]
        self._processor = processor(job["model"])
        self._pool = ThreadPoolExecutor(job["threads"])
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "images.onnx")
            # in a process that ends, so that torch and its threads are not beside what is timed
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=export, args=(job["model"], path))
            process.start()
            process.join()
            self._session = onnxruntime.InferenceSession(path, options)

    def whole(self, files: Sequence[bytes], batch: int) -> np.ndarray:
        """Batches are prepared while those before them run."""
        prepared = [self._pixels(some) for some in parts(files, batch)]
        return np.concatenate([self._vectors(images) for images in prepared])

    def prepare(self, files: Sequence[bytes], batch: int) -> list[Any]:
        prepared = [self._pixels(some) for some in parts(files, batch)]
        return [list(images) for images in prepared]

    def forward(self, prepared: list[Any], batch: int) -> np.ndarray:
        return np.concatenate([self._vectors(images) for images in prepared])

    def _pixels(self, files: Sequence[bytes]) -> Any:
        """The pixels of each file, which the threads make."""
        return self._pool.map(lambda file: pixels_of(self._processor, [decoded(file)]), files)

    def _vectors(self, images: Any) -> np.ndarray:
        (found,) = self._session.run(None, {"pixel_values": np.concatenate(list(images))})
        return found / np.linalg.norm(found, axis=1, keepdims=True)


LIBRARIES = {"jaxembed": Jaxembed, "transformers": Transformers, "onnxruntime": OnnxRuntime}


def parts(files: Sequence[bytes], batch: int) -> list[Sequence[bytes]]:
    return [files[start : start + batch] for start in range(0, len(files), batch)]


def decoded(file: bytes) -> Any:
    from PIL import Image

    return Image.open(BytesIO(file)).convert("RGB")


def processor(folder: str) -> Any:
    """The processor on Pillow: by name in transformers 5, in 4 the one that is not fast."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        return transformers.CLIPImageProcessor.from_pretrained(folder)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil.from_pretrained(folder)


def pixels_of(processor: Any, images: list[Any]) -> np.ndarray:
    return np.asarray(processor(images, return_tensors="np")["pixel_values"])


def tower(folder: str, dtype: str) -> Any:
    import torch
    import transformers

    kind = transformers.CLIPVisionModelWithProjection
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def export(folder: str, path: str) -> None:
    """Write the tower as a graph from pixels to vectors that are not normalised."""
    import torch

    model = tower(folder, "float32")

    class Vectors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Any) -> Any:
            return self.model(pixel_values=pixel_values).image_embeds

    side = model.config.image_size
    torch.onnx.export(
        Vectors().eval(),
        (torch.zeros(2, 3, side, side),),
        path,
        input_names=["pixel_values"],
        dynamic_axes={"pixel_values": {0: "images"}},
        dynamo=False,  # the other exporter needs onnxscript, which Infinity does not bring
    )


def main() -> None:
    job, answer = opened()
    library = LIBRARIES[job["library"]](job)
    files = [path.read_bytes() for path in sorted(Path(job["images"]).iterdir())]
    prepared: Any = None
    vectors = np.zeros((0, 0), np.float32)
    answer(versions(library.PACKAGES))
    for line in sys.stdin:
        if not line.strip():
            answer(base64.b64encode(vectors.astype("<f4").tobytes()).decode())
            continue
        part, batch, count = loads(line)
        start = time.perf_counter()
        if part == "prepare":
            prepared = library.prepare(files[:count], batch)
        elif part == "forward":
            vectors = library.forward(prepared, batch)
        else:
            vectors = library.whole(files[:count], batch)
        answer(time.perf_counter() - start)


if __name__ == "__main__":
    main()
