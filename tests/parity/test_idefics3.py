"""ColModernVBERT and ColSmol against transformers: pixels bit for bit, token ids, vectors of pages
and queries."""

import numpy as np
import pytest
import torch
from idefics3_sources import CONFIGS, IMAGES, KINDS, SPACE, TILE_TOKENS, tile_words
from PIL import Image
from transformers import (
    ColModernVBertConfig,
    ColModernVBertForRetrieval,
    ColModernVBertProcessor,
    Idefics3Config,
    Idefics3Model,
    Idefics3PreTrainedModel,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from converters.vision.image_rules import read_rules
from jaxembed.preprocessing.images.decode import to_pillow
from jaxembed.preprocessing.images.prepare import prepare_image, resized_size
from parity.reference import assert_within, with_odd_norms

SIZES = [(224, 224), (1754, 1240), (1, 200), (30, 4000), (3000, 40), (1080, 1920), (333, 501)]
SIZES += [(7, 9), (2048, 2047), (512, 512), (1, 1), (1001, 1000)]
UNCHANGED = {"do_rescale": False, "do_normalize": False, "return_row_col_info": True}


@pytest.mark.parametrize(
    ("longest", "side"), [(2048, 512), (1456, 364), (96, 32), (1001, 64)], ids=str
)
def test_pixels_are_those_of_the_processor(longest, side):
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    processor = Idefics3ImageProcessorPil(**sizes)
    rules = read_rules(processor.to_dict(), 4)
    draw = np.random.default_rng(0)
    for height, width in SIZES:
        colours = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        made = processor(Image.fromarray(colours), **UNCHANGED, return_tensors="np")
        high, wide = resized_size(height, width, rules)
        assert (made["rows"], made["cols"]) == ([[high // side]], [[wide // side]])
        tiles = np.asarray(made["pixel_values"])[0].transpose(0, 2, 3, 1)
        cut = tiles.reshape(len(tiles), side // 4, 4, side // 4, 4, 3).transpose(0, 1, 3, 2, 4, 5)
        np.testing.assert_array_equal(
            prepare_image(to_pillow(colours), rules), cut.reshape(-1, rules.token_bytes)
        )


class ColIdefics3(Idefics3PreTrainedModel):
    """As in colpali-engine: a linear layer on each token of Idefics3."""

    def __init__(self, config):
        super().__init__(config)
        self.model = Idefics3Model(config)
        self.linear = torch.nn.Linear(config.text_config.hidden_size, SPACE)
        self.post_init()


PAGES = [(56, 84), (300, 100), (84, 280), (1000, 700), (20, 30), (2, 90)]
QUERIES = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]
BUCKETS = [(1, 128), (2, 256)]
# The widths and heads of colmodernvbert and of colSmol-256M, two layers deep, with smaller tiles.
WIDE = {
    "colmodernvbert": {"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12},
    "colsmol": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    | {"num_key_value_heads": 3},
}
WIDE_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
WIDE_VISION |= {"image_size": 128, "patch_size": 16}
WIDE_IMAGES = {"size": {"longest_edge": 384}, "max_image_size": {"longest_edge": 128}}


@pytest.fixture(
    name="saved",
    scope="module",
    params=[*KINDS, *(pytest.param(f"{kind} wide", marks=pytest.mark.slow) for kind in KINDS)],
)
def _saved(request, tmp_path_factory):
    """A model with random weights and its processor, saved as transformers does, and the folder."""
    folder = tmp_path_factory.mktemp("model")
    kind, *wide = request.param.split()
    is_bert = kind == "colmodernvbert"
    config = CONFIGS[kind]
    vlm = config["vlm_config"] if is_bert else config
    parts = {"text_config": vlm["text_config"], "vision_config": vlm["vision_config"]}
    if wide:
        parts["text_config"] = parts["text_config"] | WIDE[kind]
        parts["vision_config"] = parts["vision_config"] | WIDE_VISION
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    special |= dict.fromkeys(("cls_token_id", "sep_token_id")) if is_bert else {}
    parts["text_config"] = parts["text_config"] | special
    torch.manual_seed(0)
    known = ("image_token_id", "scale_factor", "pixel_shuffle_factor", "model_type")
    vlm = {key: vlm[key] for key in known if key in vlm} | parts
    if is_bert:
        model = ColModernVBertForRetrieval(
            ColModernVBertConfig(vlm_config=vlm, embedding_dim=SPACE)
        )
    else:
        model = ColIdefics3(Idefics3Config(**vlm, embedding_dim=SPACE))
    if not wide:  # whose weights are small at first
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(2 if one.ndim > 1 else 1)
    model = with_odd_norms(model.float())
    images = Idefics3ImageProcessorPil(**(IMAGES | (WIDE_IMAGES if wide else {})))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tile_words(kind), pad_token="[CLS]")
    processor_class = ColModernVBertProcessor if is_bert else Idefics3Processor
    processor = processor_class(images, tokenizer, image_seq_len=TILE_TOKENS)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return kind, model, processor, folder


@torch.no_grad()
def vectors(model, inputs) -> np.ndarray:
    if isinstance(model, ColModernVBertForRetrieval):
        return model(**inputs).embeddings[0].numpy()
    found = model.linear(model.model(**inputs).last_hidden_state)[0]
    return (found / found.norm(dim=-1, keepdim=True)).numpy()


def inputs_of_page(kind, processor, colours):
    image = Image.fromarray(colours)
    if kind == "colmodernvbert":
        return processor.process_images([image])
    text = "<|im_start|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
    return processor(text=[text], images=[[image]], return_tensors="pt")


def inputs_of_query(kind, processor, text):
    if kind == "colmodernvbert":
        return processor.process_queries([text])
    return processor(text=[text + "<end_of_utterance>" * 10], return_tensors="pt")


def test_pages_and_queries_are_those_of_transformers(saved, make_embedder, note):
    kind, model, processor, folder = saved
    draw = np.random.default_rng(3)
    pages = [draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in PAGES]
    ours = make_embedder(folder, BUCKETS)
    got = [*ours.encode_multi(images=pages), *ours.encode_multi(QUERIES)]
    asked = [inputs_of_query(kind, processor, text) for text in QUERIES]
    wanted = [vectors(model, inputs_of_page(kind, processor, one)) for one in pages]
    wanted += [vectors(model, inputs) for inputs in asked]
    assert [one.shape for one in got] == [one.shape for one in wanted]
    worst = max(float(np.abs(one - other).max()) for one, other in zip(got, wanted, strict=True))
    assert_within(worst, note, "components")
    # each page is another one, so that these vectors say something
    assert min(np.abs(wanted[0][:20] - one[:20]).max() for one in wanted[1 : len(PAGES)]) > 0.01
