"""BiQwen2 and BiQwen2.5 of colpali-engine, adapters and whole models, against transformers and
PEFT: one vector for a page and for a query."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from colqwen_sources import IMAGE_ID, KINDS, qwen_words, vlm_config
from PIL import Image
from transformers import ColQwen2Processor, PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLModel,
)

from parity.reference import assert_within, with_odd_norms
from parity.test_colqwen import BUCKETS, QUERIES, pictures, wide_config

CLASSES = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLModel, "BiQwen2"),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLModel,
        "BiQwen2_5",
    ),
}
PROCESSORS = {"BiQwen2": "BiQwen2Processor", "BiQwen2_5": "BiQwen2_5_Processor"}
END = "<|endoftext|>"
# As in published adapters: linear layers of the language model, and those of an image encoder that
# have the same names.
TARGETS = r".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$"


def saved_processor(folder: Path, limit: int) -> ColQwen2Processor:
    """A processor with the text of BiQwen's pages, and its parts in a folder; `limit` is the
    maximum number of tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=qwen_words(), pad_token=END, eos_token="<|im_end|>"
    )
    sides = {"shortest_edge": 784, "longest_edge": limit * 784}
    processor = ColQwen2Processor(Qwen2VLImageProcessorPil(size=sides), tokenizer)
    processor.image_processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return processor


@pytest.fixture(
    name="biqwen",
    scope="module",
    params=[
        *(f"{kind} {form}" for kind in KINDS for form in ("model", "adapter")),
        pytest.param("qwen2_5_vl adapter wide", marks=pytest.mark.slow),
    ],
)
def _biqwen(request, tmp_path_factory):
    """A model with random weights and its processor, and the folder that is served: the model as
    colpali-engine saves it, or an adapter on the language model as its authors saved it."""
    peft = pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("biqwen")
    kind, form, *wide = request.param.split()
    config_class, generator, backbone, name = CLASSES[kind]
    torch.manual_seed(0)
    config = config_class(**(wide_config(kind) if wide else vlm_config(kind)))
    base = with_odd_norms(generator(config).float())
    folder = root / form
    processor = saved_processor(folder, 40)
    if form == "model":
        model = type(name, (backbone,), {})(config).float().eval()
        model.load_state_dict(base.model.state_dict())
        model.save_pretrained(folder)
    else:
        base.save_pretrained(root / "base")
        saved_processor(root / "base", 16384)  # pages are smaller than the base allows
        model = peft.get_peft_model(
            backbone.from_pretrained(root / "base", dtype=torch.float32),
            peft.LoraConfig(target_modules=TARGETS, r=4, lora_alpha=8),
        )
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05)
        model.eval().save_pretrained(folder)
        of_adapter = {"processor_class": PROCESSORS[name]}
        (folder / "processor_config.json").write_text(json.dumps(of_adapter))
    return model, processor, folder


@torch.no_grad()
def reference_vectors(model, processor) -> np.ndarray:
    """The vectors of pages, then of queries."""
    vectors = []
    pages = [processor(images=[Image.fromarray(one)]) for one in pictures()]
    texts = [processor.tokenizer(text + 10 * END, return_tensors="pt") for text in QUERIES]
    for inputs in (*pages, *texts):
        ids = inputs["input_ids"]
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"][0]
        kinds = (ids == IMAGE_ID).int()
        vector = model(**inputs, mm_token_type_ids=kinds).last_hidden_state[0, -1]
        getattr(model, "base_model", model).rope_deltas = None  # which it would add to the next
        vectors.append((vector / vector.norm()).numpy())
    return np.array(vectors)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_vectors_of_pages_and_queries_are_those_of_transformers(biqwen, make_embedder, note):
    model, processor, folder = biqwen
    ours = make_embedder(folder, BUCKETS)
    got = np.concatenate([ours.encode(images=pictures()), ours.encode_query(QUERIES)])
    wanted = reference_vectors(model, processor)
    assert got.shape == wanted.shape
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            assert np.abs(reference_vectors(model, processor) - wanted).max() > 0.01
    assert_within(float(np.abs(got - wanted).max()), note, "components")
