"""The images of a model in one library, in a process of its own: see `pipe` for how it is driven.

    {"library": "transformers", "model": "/folder", "dtype": "bfloat16", "threads": 2,
     "images": "/folder", "cache": "/folder"}

`model` is a folder as transformers saves a model, `images` one of files of images. A call is a part
and a batch size, `["whole", 16]`. The parts are `prepare` (files to pixels, whose result the next
`forward` takes), `forward` (pixels to vectors on the host) and `whole` (both, as the library's
users run them).

transformers prepares images in the calling thread, as its processors do. For onnxruntime, which
runs what torch exports of the same tower, as many threads as there are cores prepare them.

The library `maker` is transformers, which makes the model of a `config` with random weights, and
writes it to the folder, beside `files`, the contents of other JSON files.
"""

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from pipe import apart, embedder, serve, session

IMAGE = "<|image_pad|>"
PAD, END, *_ = SPECIAL = (
    *("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", IMAGE),
)
# What stands around the tokens of a page: the processor of ColQwen2 has it, and the code of
# Qwen3-VL-Embedding's authors.
PROMPTS = {
    "colqwen2": f"<|im_start|>user\n<|vision_start|>{IMAGE}<|vision_end|>Describe the image."
    "<|im_end|><|endoftext|>",
    "qwen3_vl": "<|im_start|>system\nRepresent the user's input.<|im_end|>\n"
    f"<|im_start|>user\n<|vision_start|>{IMAGE}<|vision_end|><|im_end|>\n"
    "<|im_start|>assistant\n",
}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}"
    "<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)


class Library:
    """A model, and the files of its images in batches."""

    def __init__(self, job: dict[str, Any]):
        self._files = [path.read_bytes() for path in sorted(Path(job["images"]).iterdir())]

    def parts(self, batch: int) -> list[Sequence[bytes]]:
        return [self._files[k : k + batch] for k in range(0, len(self._files), batch)]

    def whole(self, batch: int) -> np.ndarray:
        return np.concatenate([self.vectors(self.inputs(some)) for some in self.parts(batch)])

    def prepare(self, batch: int) -> None:
        self._prepared: Any = [self.inputs(some) for some in self.parts(batch)]

    def forward(self, batch: int) -> np.ndarray:
        return np.concatenate([self.vectors(inputs) for inputs in self._prepared])


class Jaxembed(Library):
    """The library, which makes its own batches."""

    PACKAGES = ("jaxembed", "jax", "jaxlib", "pillow")

    def __init__(self, job: dict[str, Any]):
        super().__init__(job)
        self._embedder = embedder(job["model"], job["cache"], dtype=job["dtype"])
        self._route = self._embedder.model.routes["image"]
        (self._output,) = self._embedder.spec.representations

    def whole(self, batch: int) -> np.ndarray:
        found = self._embedder.encode_outputs((), [self._output], images=self._files)[self._output]
        return getattr(found, "values", found)

    def prepare(self, batch: int) -> None:
        from jaxembed.data.inputs import Image
        from jaxembed.runtime.tasks import EncodeOptions

        options = EncodeOptions(outputs=frozenset({self._output}))
        request = self._embedder.model.tasks.embed([Image(one) for one in self._files], options)
        processor = self._route.processor
        submit = partial(processor.executor.submit, request.prepare, processor, None)
        jobs = [submit([one]) for one in request.items]
        self._prepared = [job.result().work for job in jobs]

    def forward(self, batch: int) -> np.ndarray:
        from jaxembed.data.work import join_work

        future = self._route.engine.submit(join_work(self._prepared, frozenset({self._output})))
        future.result()
        found = future.values[self._output]
        return getattr(found, "values", found)


class Transformers(Library):
    """A model, and its processor on Pillow."""

    PACKAGES = ("transformers", "torch", "pillow")

    def __init__(self, job: dict[str, Any]):
        import torch
        import transformers

        super().__init__(job)
        torch.set_num_threads(job["threads"])
        self._model, self._dtype = loaded(job["model"], job["dtype"]), getattr(torch, job["dtype"])
        self._processor = processor(job["model"])
        self._prompt = PROMPTS.get(self._model.config.model_type, "")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            job["model"], padding_side="left"
        )

    def inputs(self, files: Sequence[bytes]) -> dict[str, Any]:
        made = dict(self._processor([decoded(file) for file in files], return_tensors="pt"))
        if self._prompt:
            counts = made["image_grid_thw"].prod(1) // self._processor.merge_size**2
            texts = [self._prompt.replace(IMAGE, IMAGE * count) for count in counts.tolist()]
            made |= self._tokenizer(
                texts, padding=True, return_tensors="pt", return_token_type_ids=False
            )
            image_id = self._tokenizer.convert_tokens_to_ids(IMAGE)
            made["mm_token_type_ids"] = (made["input_ids"] == image_id).int()
        return made | {"pixel_values": made["pixel_values"].to(self._dtype)}

    def vectors(self, inputs: dict[str, Any]) -> np.ndarray:
        import torch

        model = self._model
        with torch.inference_mode():
            if not self._prompt:
                found = of_images(model, inputs["pixel_values"])
            elif model.config.model_type == "colqwen2":
                # not by the model itself, which counts a page's tokens instead of its places
                hidden = model.vlm(**inputs, use_cache=False).last_hidden_state
                found = model.embedding_proj_layer(hidden)[inputs["attention_mask"].bool()]
            else:
                found = model.model(**inputs, use_cache=False).last_hidden_state[:, -1]
            return torch.nn.functional.normalize(found.float(), dim=-1).numpy()


class OnnxRuntime(Library):
    """The same tower, exported, in float32."""

    PACKAGES = ("onnxruntime", "onnx", "transformers", "torch", "pillow")

    def __init__(self, job: dict[str, Any]):
        super().__init__(job)
        self._processor = processor(job["model"])
        self._pool = ThreadPoolExecutor(job["threads"])
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "images.onnx")
            apart(export, job["model"], path)
            self._session = session(path, job["threads"])

    def whole(self, batch: int) -> np.ndarray:
        """Batches are prepared while those before them run."""
        prepared = [self.inputs(some) for some in self.parts(batch)]
        return np.concatenate([self.vectors(images) for images in prepared])

    def prepare(self, batch: int) -> None:
        super().prepare(batch)
        self._prepared = [list(images) for images in self._prepared]

    def inputs(self, files: Sequence[bytes]) -> Any:
        """The pixels of each file, which the threads make."""
        return self._pool.map(
            lambda file: self._processor([decoded(file)], return_tensors="np")["pixel_values"],
            files,
        )

    def vectors(self, images: Any) -> np.ndarray:
        (found,) = self._session.run(None, {"pixel_values": np.concatenate(list(images))})
        return found / np.linalg.norm(found, axis=1, keepdims=True)


class Maker:
    """transformers, which writes a model of random weights, and a tokenizer of single bytes."""

    PACKAGES = Transformers.PACKAGES

    def __init__(self, job: dict[str, Any]):
        import torch
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**job["config"])
        getattr(transformers, config.architectures[0])(config).save_pretrained(job["model"])
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(letters)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.add_special_tokens(list(SPECIAL))
        is_dual = config.model_type not in PROMPTS
        if is_dual:  # whose texts end with a token
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"$A {PAD}", special_tokens=[(PAD, tokenizer.token_to_id(PAD))]
            )
        saved = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            eos_token=PAD if is_dual else END,
            chat_template=CHAT,
        )
        saved.save_pretrained(job["model"])
        for name, content in job["files"].items():
            path = Path(job["model"]) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))


def decoded(file: bytes) -> Any:
    from PIL import Image

    return Image.open(BytesIO(file)).convert("RGB")


def processor(folder: str) -> Any:
    """The processor on Pillow."""
    import transformers

    return transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)


def loaded(folder: str, dtype: str) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def of_images(model: Any, pixels: Any) -> Any:
    """The vectors of images, which are not normalised; transformers 4 returns them alone."""
    found = model.get_image_features(pixel_values=pixels)
    return getattr(found, "pooler_output", found)


def export(folder: str, path: str) -> None:
    """Write the tower as a graph from pixels to vectors that are not normalised."""
    import torch

    model = loaded(folder, "float32")

    class Vectors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Any) -> Any:
            return of_images(self.model, pixel_values)

    side = model.config.vision_config.image_size
    torch.onnx.export(
        Vectors().eval(),
        (torch.zeros(2, 3, side, side),),
        path,
        input_names=["pixel_values"],
        dynamic_axes={"pixel_values": {0: "images"}},
        dynamo=False,  # the other exporter needs onnxscript, which Infinity does not bring
    )


LIBRARIES = {
    "jaxembed": Jaxembed,
    "transformers": Transformers,
    "onnxruntime": OnnxRuntime,
    "maker": Maker,
}

if __name__ == "__main__":
    serve(LIBRARIES)
