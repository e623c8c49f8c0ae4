"""Models of texts and images against transformers: pixels bit for bit, and vectors of both."""

from io import BytesIO

import numpy as np
import pytest
import torch
from dual_sources import CLIPS, words
from golden.families import sized
from PIL import Image, ImageOps
from transformers import (
    CLIPConfig,
    CLIPModel,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    get_image_size_for_max_num_patches,
)

from converters.vision.image_rules import read_rules
from jaxembed import Embedder, EngineConfig
from jaxembed.preprocessing.images.decode import decode_image, to_pillow
from jaxembed.preprocessing.images.prepare import (
    image_positions,
    patches,
    prepare_image,
    resized_size,
)
from parity.reference import with_odd_norms

SIZES = [(224, 224), (333, 501), (1080, 1920), (1, 7), (7, 1), (100, 30), (225, 224), (640, 480)]
TEXTS = ["w1 w2 w3", "w5", "w7 w8 w9 w10 w11", "w0 " * 100]
SPELLED = ["w4 <end> w6", "w4 </s> w6"]  # one of them is the end token of CLIP or MetaCLIP 2
# Heights and widths of images in their own shapes: fewer rows or columns than the 16 of the table
# of positions, as many, and more.
SHAPED = [
    *SIZES,
    *((5, 5), (1, 1), (2, 3), (16, 16), (256, 256), (480, 640), (3000, 40), (17, 4000)),
    *((9, 2304), (1999, 2000), (1, 100_000)),
]
SMALL = sized(64, 2, 2, 128)
# the widths of metaclip-2-worldwide-huge, of texts and of images
HUGE = sized(1024, 2, 16, 4096), sized(1280, 2, 16, 5120) | {"patch_size": 14}
UNCHANGED = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
each_processor = pytest.mark.parametrize(
    ("kind", "patch"), [(CLIPImageProcessorPil, 32), (SiglipImageProcessorPil, 16)]
)


def assert_same_pixels(processor, image, got: np.ndarray, patch: int, name: str = "") -> None:
    (wanted,) = processor(image, **UNCHANGED)["pixel_values"]
    wanted = patches(np.asarray(wanted).transpose(1, 2, 0).astype(np.uint8), patch)
    np.testing.assert_array_equal(got, wanted, err_msg=name)


@pytest.mark.parametrize("resample", [0, 1, 2, 3])
@each_processor
def test_pixels_are_those_of_the_processors(kind, patch, resample):
    processor = kind(resample=resample)
    rules = read_rules(processor.to_dict(), patch)
    draw = np.random.default_rng(0)
    for height, width in SIZES:
        colours = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        got = prepare_image(to_pillow(colours), rules)
        assert_same_pixels(processor, Image.fromarray(colours), got, patch)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("most", [256, 64, 1000])
def test_pixels_in_their_own_shapes_are_those_of_the_processor(most, resample):
    processor = Siglip2ImageProcessorPil(max_num_patches=most, resample=resample)
    rules = read_rules(processor.to_dict(), 16)
    draw = np.random.default_rng(0)
    for height, width in SHAPED:
        colours = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        wanted = processor(Image.fromarray(colours), **UNCHANGED)
        rows, columns = wanted["spatial_shapes"][0].tolist()
        assert resized_size(height, width, rules) == (16 * rows, 16 * columns)
        got = prepare_image(to_pillow(colours), rules)
        np.testing.assert_array_equal(got, wanted["pixel_values"][0, : rows * columns])
        wanted = [[row, column, rows, columns] for row in range(rows) for column in range(columns)]
        assert image_positions(height, width, rules).tolist() == wanted


def test_the_shapes_of_many_sizes_are_those_of_the_processor():
    draw = np.random.default_rng(3)
    for most in (256, 255, 49, 1024):
        rules = read_rules(Siglip2ImageProcessorPil(max_num_patches=most).to_dict(), 16)
        for height, width in draw.integers(1, 3000, (500, 2)).tolist():
            wanted = get_image_size_for_max_num_patches(height, width, 16, most)
            assert resized_size(height, width, rules) == wanted


ORIENTATION = 0x0112  # of EXIF's tags


def odd_files() -> dict[str, tuple[bytes, Image.Image]]:
    """Files of unusual images, and what transformers' processors are given for each."""
    draw = np.random.default_rng(2)

    def colours(*shape: int) -> np.ndarray:
        return draw.integers(0, 256, shape, dtype=np.uint8)

    def written(image: Image.Image, kind: str, **options) -> bytes:
        file = BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    plain = Image.fromarray(colours(70, 90, 3))
    palette = plain.quantize(32)
    wide = draw.integers(0, 65536, (60, 50), dtype=np.uint16)
    exif = Image.Exif()
    images = {
        "one row": (Image.fromarray(colours(1, 300, 3)), "PNG", {}),
        "one column": (Image.fromarray(colours(300, 1, 3)), "PNG", {}),
        "one pixel": (Image.fromarray(colours(1, 1, 3)), "BMP", {}),
        "long and narrow": (Image.fromarray(colours(8, 1500, 3)), "PNG", {}),
        "two colours": (plain.convert("1"), "PNG", {}),
        "grey": (plain.convert("L"), "JPEG", {}),
        "palette": (palette, "GIF", {}),
        "palette with transparency": (palette, "PNG", {"transparency": 3}),
        "a transparent colour": (plain, "PNG", {"transparency": plain.getpixel((5, 5))}),
        "grey with alpha": (Image.fromarray(colours(64, 40, 2), "LA"), "PNG", {}),
        "alpha": (Image.fromarray(colours(64, 40, 4), "RGBA"), "WEBP", {"lossless": True}),
        "CMYK": (Image.fromarray(colours(64, 80, 4), "CMYK"), "JPEG", {}),
        "CMYK as it is": (Image.fromarray(colours(64, 80, 4), "CMYK"), "TIFF", {}),
    }
    files = {name: written(image, kind, **how) for name, (image, kind, how) in images.items()}
    found = {name: (data, Image.open(BytesIO(data))) for name, data in files.items()}
    for turned in range(1, 9):
        exif[ORIENTATION] = turned
        data = written(plain, "JPEG", exif=exif)
        found[f"turned {turned}"] = (data, ImageOps.exif_transpose(Image.open(BytesIO(data))))
    rounded = np.rint(wide / 257).astype(np.uint8)
    found["16 bits"] = (written(Image.fromarray(wide), "PNG"), Image.fromarray(rounded))
    return found


@each_processor
def test_pixels_of_odd_files_are_those_of_the_processors(kind, patch):
    processor = kind(do_convert_rgb=True)
    rules = read_rules(processor.to_dict(), patch)
    for name, (data, image) in odd_files().items():
        got = prepare_image(decode_image(data), rules)
        assert_same_pixels(processor, image, got, patch, name)


def saved(folder, kind: str, size: str, **of_text):
    """A model with random weights, its tokenizer and its processor, saved as transformers does.
    `of_text` are further fields of its config of texts."""
    tokenizer = words(kind)
    vocabulary = tokenizer.get_vocab_size()
    end = "<end>" if kind == "clip" else "</s>"
    text = {"vocab_size": vocabulary, "pad_token_id": 0}
    text |= {"bos_token_id": 2, "eos_token_id": tokenizer.token_to_id(end)}
    image = {}
    if kind == "metaclip_2":
        text, image = text | HUGE[0], HUGE[1]
    if size == "tiny":
        text |= SMALL | {"max_position_embeddings": 16}
        image = SMALL | {"image_size": 70, "patch_size": 16}  # no whole patches
    text |= of_text
    if kind == "siglip2":
        image = {key: value for key, value in image.items() if key != "image_size"}
    torch.manual_seed(0)
    if kind in CLIPS:
        of_kind = (CLIPModel, CLIPConfig) if kind == "clip" else (MetaClip2Model, MetaClip2Config)
        model = of_kind[0](of_kind[1](text_config=text, vision_config=image))
        side = model.config.vision_config.image_size
        crop = {"height": side, "width": side}
        processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=crop)
    elif kind == "siglip2":
        model = Siglip2Model(Siglip2Config(text_config=text, vision_config=image))
        processor = Siglip2ImageProcessorPil()
    else:
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=image))
        side = model.config.vision_config.image_size
        processor = SiglipImageProcessorPil(size={"height": side, "width": side})
    with_odd_norms(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=end)
    fast.save_pretrained(folder)
    return model, fast, processor


def unit(features) -> np.ndarray:
    found = getattr(features, "pooler_output", features)
    return (found / found.norm(dim=-1, keepdim=True)).numpy()


@torch.no_grad()
def vectors_of_texts(model, tokenizer, kind: str, texts: list[str]) -> np.ndarray:
    length, rows = model.config.text_config.max_position_embeddings, []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        ids = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
        if kind not in CLIPS:
            ids = ids + [0] * (length - len(ids))
        rows.append(unit(model.get_text_features(input_ids=torch.tensor([ids])))[0])
    return np.stack(rows)


@torch.no_grad()
def vectors_of_images(model, processor, images) -> np.ndarray:
    prepared = [processor(image, return_tensors="pt") for image in images]
    fields = {name: torch.cat([one[name] for one in prepared]) for name in prepared[0]}
    return unit(model.get_image_features(**fields))


@pytest.mark.parametrize("size", ["tiny", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["clip", "metaclip_2", "siglip", "siglip2"])
def test_vectors_are_those_of_transformers(tmp_path, kind, size):
    model, tokenizer, processor = saved(tmp_path / "model", kind, size)
    draw = np.random.default_rng(1)
    sizes = SHAPED if kind == "siglip2" else ((64, 64), (50, 90), (200, 70), (333, 501))
    colours = [draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in sizes]
    images = list(map(Image.fromarray, colours))
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=1024)
    with Embedder(str(tmp_path / "model"), cache_dir=tmp_path / "cache", config=config) as ours:
        texts = [*TEXTS, *(SPELLED if kind in CLIPS else ())]
        got_images, got_texts = ours.encode(images=images), ours.encode(texts)
    for got, wanted in (
        (got_images, vectors_of_images(model, processor, images)),
        (got_texts, vectors_of_texts(model, tokenizer, kind, texts)),
    ):
        distance = 1 - np.sum(got.astype(np.float64) * wanted, axis=1)
        assert np.abs(distance).max() < 1e-6
        np.testing.assert_allclose(got, wanted, atol=2e-6)
