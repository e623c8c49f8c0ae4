"""GME-Qwen2-VL against transformers' Qwen2-VL and the formulas of the model's code: texts, images
and both in one input."""

from math import ceil, floor, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from colqwen_sources import IMAGE_ID, qwen_words, vlm_config
from dual_sources import data_uri
from PIL import Image
from sources import change_json
from torch.nn.functional import normalize
from transformers import ColQwen2Processor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLConfig, Qwen2VLModel

from jaxembed import Parts
from parity.reference import answers, assert_within, with_odd_norms
from parity.test_colqwen import pictures, wide_config

TEMPLATE = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    "<|endoftext|>"
)
DEFAULT, INSTRUCTION = "You are a helpful assistant.", " Find a page that answers the question"
TEXTS = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]
TOKENS = (6, 40)  # the limits of an image
BUCKETS = [(1, 256), (2, 256)]


def first_resized(colours: np.ndarray) -> Image.Image:
    """An image as the code resizes it before the processor, by smart_resize of qwen_vl_utils."""
    height, width = colours.shape[:2]
    high, wide = (max(28, round(side / 28) * 28) for side in (height, width))
    if high * wide > 16384 * 784:
        shrink = sqrt(height * width / (16384 * 784))
        high, wide = (floor(side / shrink / 28) * 28 for side in (height, width))
    elif high * wide < 4 * 784:
        grow = sqrt(4 * 784 / (height * width))
        high, wide = (ceil(side * grow / 28) * 28 for side in (height, width))
    wide, high = min(wide, 200 * high), min(high, 200 * wide)
    return Image.fromarray(colours).resize((wide, high))


class Reference:
    """The model, whose tokens of images have the positions of text."""

    def __init__(self, model: Qwen2VLModel, processor: ColQwen2Processor):
        self._model, self._processor = model.eval(), processor

    @torch.no_grad()
    def __call__(self, *parts: str | np.ndarray, instruction: str = DEFAULT) -> np.ndarray:
        user, pixels = "", {}
        for part in parts:
            if isinstance(part, str):
                user += part
                continue
            pixels = self._processor.image_processor(first_resized(part), return_tensors="pt")
            count = int(pixels["image_grid_thw"].prod()) // 4
            user += "<|vision_start|>" + count * "<|image_pad|>" + "<|vision_end|>"
        text = TEMPLATE.format(instruction, user)
        ids = self._processor.tokenizer(text, return_tensors="pt")["input_ids"]
        hidden = self._model(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1]).expand(3, 1, -1),
            mm_token_type_ids=(ids == IMAGE_ID).int(),
            **pixels,
        ).last_hidden_state
        return normalize(hidden[0, -1], dim=0).numpy()


@pytest.fixture(
    name="gme", scope="module", params=["tiny", pytest.param("wide", marks=pytest.mark.slow)]
)
def _gme(request, tmp_path_factory):
    """The reference, and the folder of the model as its authors publish it."""
    folder = tmp_path_factory.mktemp("gme") / "model"
    torch.manual_seed(0)
    stated = wide_config("qwen2_vl") if request.param == "wide" else vlm_config("qwen2_vl")
    stated |= {"vision_start_token_id": IMAGE_ID - 2, "vision_end_token_id": IMAGE_ID - 1}
    model = with_odd_norms(Qwen2VLModel(Qwen2VLConfig(**stated)).float())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=qwen_words(), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    own: dict[str, Any] = {"AutoModel": "modeling_gme_qwen2vl.GmeQwen2VL"}
    change_json(
        folder / "config.json",
        architectures=["GmeQwen2VL"],
        auto_map=own,
        min_image_tokens=TOKENS[0],
        max_image_tokens=TOKENS[1],
        max_length=256,
    )
    low, high = TOKENS
    images = Qwen2VLImageProcessorPil(min_pixels=low * 784, max_pixels=high * 784)
    return Reference(model, ColQwen2Processor(images, tokenizer)), folder


def images_of_odd_shapes() -> list[np.ndarray]:
    draw = np.random.default_rng(5)
    sides = [(10, 2000), (3, 3), (2000, 30), (40, 41), (1, 201), (69, 13800)]
    return [*pictures(), *(draw.integers(0, 256, (*one, 3), dtype=np.uint8) for one in sides)]


def worst(got, wanted) -> float:
    return float(np.abs(np.asarray(got) - np.asarray(wanted)).max())


def test_vectors_of_texts_images_and_both_are_those_of_its_formulas(gme, make_embedder, note):
    reference, folder = gme
    ours, images = make_embedder(folder, BUCKETS), images_of_odd_shapes()
    apart = worst(ours.encode(TEXTS), [reference(text) for text in TEXTS])
    asked = [reference(text, instruction=INSTRUCTION) for text in TEXTS]
    apart = max(apart, worst(ours.encode(TEXTS, instruction=INSTRUCTION), asked))
    assert worst(asked, ours.encode(TEXTS)) > 0.01
    apart = max(apart, worst(ours.encode(images=images), [reference(one) for one in images]))
    both = [*zip(images, TEXTS, strict=False)]
    got = ours.encode([Parts(pair) for pair in both], instruction=INSTRUCTION)
    wanted = [reference(*pair, instruction=INSTRUCTION) for pair in both]
    assert_within(max(apart, worst(got, wanted)), note, "components")


def test_answers_over_http_are_those_of_its_formulas(gme, make_embedder, note):
    reference, folder = gme
    ours, image = make_embedder(folder, BUCKETS), pictures()[1]
    url = {"url": data_uri(image)}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "Größe"}]
    messages = {"messages": [{"role": "user", "content": content}]}
    of_jina = {"input": [{"image": data_uri(image), "text": "Größe"}]}
    found = answers(ours, "/v1/embeddings", [messages, of_jina, {"input": ["Größe"]}])
    wanted = [reference(image, "Größe")] * 2 + [reference("Größe")]
    got = [answer["data"][0]["embedding"] for answer in found]
    assert_within(worst(got, wanted), note, "components")
