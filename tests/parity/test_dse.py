"""DSE-Qwen2 and mcdse against transformers' Qwen2-VL and the code in their README.md: texts, with a
black image before them, and pages."""

import numpy as np
import pytest
import torch
from colqwen_sources import DSE_README, IMAGE_ID, MCDSE_README, qwen_words, vlm_config
from dual_sources import data_uri
from PIL import Image
from sources import change_json
from torch.nn.functional import normalize
from transformers import ColQwen2Processor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLConfig, Qwen2VLModel

from parity.reference import answers, assert_within, with_odd_norms
from parity.test_colqwen import pictures, wide_config
from parity.test_gme import first_resized

TEXTS = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
)
ENDS = {DSE_README: "<|im_start|>assistant\n<|endoftext|>", MCDSE_README: "<|endoftext|>"}
MOST = {DSE_README: 2560, MCDSE_README: 960}  # tokens of an image
BUCKETS = [(1, 2656), (2, 256)]


class Reference:
    """A model as the code in `readme` runs it."""

    def __init__(self, model: Qwen2VLModel, processor: ColQwen2Processor, readme: str):
        self._model, self._processor, self._readme = model.eval(), processor, readme

    @torch.no_grad()
    def __call__(self, image: np.ndarray | None = None, text: str = "") -> np.ndarray:
        if image is None:
            sized = Image.new("RGB", (56, 56))
        elif self._readme == DSE_README:
            sized = first_resized(image)
        else:
            sized = Image.fromarray(image)
        pixels = self._processor.image_processor(sized, return_tensors="pt")
        count = int(pixels["image_grid_thw"].prod()) // 4
        assert image is not None or count == 4
        page = text if image is None else "What is shown in this image?"
        whole = TEMPLATE.format(IMAGE + page) + ENDS[self._readme]
        whole = whole.replace("<|image_pad|>", count * "<|image_pad|>")
        ids = self._processor.tokenizer(whole, return_tensors="pt")["input_ids"]
        kinds = (ids == IMAGE_ID).int()
        hidden = self._model(input_ids=ids, mm_token_type_ids=kinds, **pixels).last_hidden_state
        return normalize(hidden[0, -1], dim=0).numpy()


@pytest.fixture(
    name="dse",
    scope="module",
    params=[
        pytest.param(("tiny", DSE_README), id="dse"),
        pytest.param(("tiny", MCDSE_README), id="mcdse"),
        pytest.param(("wide", DSE_README), id="wide", marks=pytest.mark.slow),
    ],
)
def _dse(request, tmp_path_factory):
    """The reference, and the folder of the model as its authors publish it."""
    size, readme = request.param
    folder = tmp_path_factory.mktemp("dse") / "model"
    torch.manual_seed(0)
    stated = wide_config("qwen2_vl") if size == "wide" else vlm_config("qwen2_vl")
    stated |= {"vision_start_token_id": IMAGE_ID - 2, "vision_end_token_id": IMAGE_ID - 1}
    stated["text_config"] = stated["text_config"] | {"max_position_embeddings": 2656}
    model = with_odd_norms(Qwen2VLModel(Qwen2VLConfig(**stated)).float())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=qwen_words(), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil(max_pixels=16384 * 784).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(readme)
    change_json(folder / "config.json", architectures=["Qwen2VLForConditionalGeneration"])
    images = Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=MOST[readme] * 784)
    return Reference(model, ColQwen2Processor(images, tokenizer), readme), folder


def worst(got, wanted) -> float:
    return float(np.abs(np.asarray(got) - np.asarray(wanted)).max())


def test_vectors_of_texts_and_pages_are_those_of_its_code(dse, make_embedder, note):
    reference, folder = dse
    ours = make_embedder(folder, BUCKETS)
    draw = np.random.default_rng(5)
    sides = [(10, 200), (3, 3), (40, 41), (1, 101), (1000, 1200)]
    images = [*pictures(), *(draw.integers(0, 256, (*one, 3), dtype=np.uint8) for one in sides)]
    for prompt, name in (("Query: ", "query"), ("Document: ", "document")):
        wanted = [reference(text=prompt + text) for text in TEXTS]
        apart = worst(ours.encode(TEXTS, prompt_name=name), wanted)
        assert_within(apart, note, f"components with {name}")
    apart = worst(ours.encode(images=images), [reference(image) for image in images])
    assert_within(apart, note, "components of pages")


def test_answers_over_http_are_those_of_its_code(dse, make_embedder, note):
    reference, folder = dse
    ours, image = make_embedder(folder, BUCKETS), pictures()[1]
    mixed = {"input": [{"image": data_uri(image)}, {"text": "Größe"}]}
    documents = {"input": ["Größe"], "input_type": "document"}
    found = answers(ours, "/v1/embeddings", [{"input": ["Größe"]}, mixed, documents])
    query = reference(text="Query: Größe")
    wanted = [[query], [reference(image), query], [reference(text="Document: Größe")]]
    got = [[one["embedding"] for one in answer["data"]] for answer in found]
    assert_within(max(map(worst, got, wanted)), note, "components")
