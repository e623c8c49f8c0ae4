"""ColPali against transformers: the vectors of pages and of queries, token by token."""

import numpy as np
import pytest
import torch
from golden.families import sized
from page_sources import IMAGE_ID, VOCABULARY, words
from PIL import Image
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    PaliGemmaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from jaxembed import Embedder, EngineConfig
from parity.reference import with_odd_norms

SMALL = sized(64, 3, 4, 128)
QUERIES = ["w1 w2 w3", "w5", "w7 w8 w9 w10 w11 w12 w13 w14"]
SIZES = [(64, 64), (50, 90), (200, 70), (333, 501)]


@pytest.fixture(
    name="saved",
    scope="module",
    params=["tiny", pytest.param("published widths", marks=pytest.mark.slow)],
)
def _saved(request, tmp_path_factory):
    """A model with random weights and its processor, saved as transformers does; also one with the
    widths and heads of colpali-v1.3, two layers deep."""
    folder = tmp_path_factory.mktemp("model")
    text = SMALL | {"num_key_value_heads": 1, "head_dim": 16}
    image = SMALL | {"image_size": 64, "patch_size": 16}
    if request.param != "tiny":
        text |= sized(2048, 2, 8, 16384, head_dim=256)
        image |= sized(1152, 2, 16, 4304, image_size=112, patch_size=14)
    config = PaliGemmaConfig(
        text_config=text | {"model_type": "gemma", "vocab_size": VOCABULARY},
        vision_config=image | {"model_type": "siglip_vision_model", "vision_use_head": False},
        projection_dim=text["hidden_size"],
        hidden_size=text["hidden_size"],
        image_token_index=IMAGE_ID,
    )
    torch.manual_seed(0)
    model = ColPaliForRetrieval(ColPaliConfig(vlm_config=config, embedding_dim=128))
    with_odd_norms(model).save_pretrained(folder)
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    size = {"height": side, "width": side}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words(), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.image_token, tokenizer.image_token_id = "<image>", IMAGE_ID
    tokenizer.add_tokens = lambda *_: 0  # those of the published vocabulary
    images = SiglipImageProcessorPil(size=size, image_seq_length=(side // patch) ** 2)
    processor = ColPaliProcessor(image_processor=images, tokenizer=tokenizer)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, processor


@torch.no_grad()
def vectors(model, inputs) -> np.ndarray:
    kept = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
    return model(**{name: inputs[name] for name in kept if name in inputs}).embeddings[0].numpy()


def test_vectors_are_those_of_transformers(saved, tmp_path):
    folder, model, processor = saved
    draw = np.random.default_rng(1)
    colours = [draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in SIZES]
    images = list(map(Image.fromarray, colours))
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=512)
    with Embedder(str(folder), cache_dir=tmp_path, config=config) as ours:
        got = list(ours.encode_multi([*QUERIES, *images]))
    asked = [processor.process_queries([text], return_tensors="pt") for text in QUERIES]
    shown = [processor.process_images([one], return_tensors="pt") for one in images]
    for found, inputs in zip(got, [*asked, *shown], strict=True):
        wanted = vectors(model, inputs)
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted, axis=1).max() < 1e-4
