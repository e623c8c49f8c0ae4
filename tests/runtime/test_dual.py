"""Models of texts and images: what their files say, their vectors, and inputs of both kinds."""

from functools import cache
from io import BytesIO
from itertools import product

import jax
import numpy as np
import pytest
from dual_sources import (
    CLIPS,
    CONFIGS,
    PATCH,
    PATCHES,
    POSITIONS,
    PROCESSORS,
    SIDE,
    SIGLIP2_IMAGES,
    SPACE,
    dual_tensors,
    expected_image,
    expected_text,
    picture,
    png,
    words,
    write_dual,
)
from fake_embedder import FakeEmbedder
from representatives import each
from sources import change_json, write_json, write_modules
from test_field_types import assert_described_or_refused
from tokenizers import Tokenizer, processors

from converters import convert, folders_read, outline_routes, weight_folders
from converters.vision.image_rules import read_rules
from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints.checkpoint import (
    load_params,
    load_routes,
    route_path,
    verify,
    verify_values,
)
from jaxembed.data.inputs import Image, Text
from jaxembed.data.spec import IMAGE_ROUTE, TEXT_ROUTE, AttentionPooling, Expansion, Pooled
from jaxembed.engine.batch import pack, place
from jaxembed.engine.bucket import Bucket, BucketGrid, one_length_grid
from jaxembed.engine.build import make_plan
from jaxembed.engine.future import WorkFuture
from jaxembed.errors import (
    CheckpointError,
    ConfigError,
    InvalidImage,
    InvalidInput,
    UnknownRoute,
    UnsupportedModel,
    WrongTask,
)
from jaxembed.models import program
from jaxembed.models.tokens import PackedTokens
from jaxembed.platform import extras
from jaxembed.preprocessing.images.processor import ImageProcessor
from jaxembed.preprocessing.text import TokenizationOptions
from jaxembed.runtime.options import EncodeOptions

pytest.importorskip("PIL")

KINDS = ["clip", "metaclip_2", "siglip", "siglip2"]
TEXTS = ["w1 w2 w3", "w5", "w1 w2 w3 w4", " ".join(f"w{k}" for k in range(20))]

each_kind = pytest.mark.parametrize("kind", each(KINDS, "clip", "siglip2"))


def _packing(length, budget, shards, unit):
    """One bucket, whose rows hold several."""
    return BucketGrid(one_length_grid(length, budget, shards).buckets[-1:])


@pytest.fixture(name="converted", scope="module")
def _converted(tmp_path_factory):
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = folder / "out"
        convert(write_dual(folder / "source", kind), made[kind])
    return made


@pytest.fixture(name="dual", scope="module")
def _dual(converted, tmp_path_factory, closed_late):
    """The Embedder of a kind, in float32, with several images in a row as on native kernels."""
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=256)
    folder = tmp_path_factory.mktemp("cache")

    @cache
    def dual(kind: str) -> Embedder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxembed.engine.build.one_length_grid", _packing)
            embedder = Embedder(str(converted[kind]), cache_dir=folder, config=config)
        return closed_late.enter_context(embedder)

    return dual


def ids_of(kind, text):
    """The token ids of a text within the limit, with the one that ends it."""
    ids = words(kind).encode(text).ids
    return ids if len(ids) <= POSITIONS else [*ids[: POSITIONS - 1], ids[-1]]


@each_kind
def test_vectors_are_those_of_the_formulas_when_rows_are_packed(dual, kind):
    tensors = dual_tensors(kind)
    images = [picture(seed) for seed in range(30)]
    wanted = [expected_image(kind, tensors, image) for image in images]
    np.testing.assert_allclose(dual(kind).encode(images=images), wanted, atol=2e-6)
    np.testing.assert_allclose(dual(kind).encode(images=images[:1]), wanted[:1], atol=2e-6)
    texts = TEXTS + [f"w{k} w{(k + 7) % 20}" for k in range(20)]
    wanted = [expected_text(kind, tensors, ids_of(kind, text)) for text in texts]
    np.testing.assert_allclose(dual(kind).encode(texts), wanted, atol=2e-6)
    np.testing.assert_allclose(dual(kind).encode(texts[0]), wanted[0], atol=2e-6)


@each_kind
def test_what_the_checkpoint_says(converted, kind):
    out = converted[kind]
    routes = load_routes(out)
    spec = routes.specs[TEXT_ROUTE]
    assert (routes.default, set(routes.specs)) == (TEXT_ROUTE, {TEXT_ROUTE, IMAGE_ROUTE})
    assert spec == routes.of_texts.main
    image = routes.image
    assert image is routes.specs[IMAGE_ROUTE]
    if kind == "siglip2":
        assert (image.image.most_patches, image.image.place_numbers) == (PATCHES, 4)
    else:
        assert image.image.made == (SIDE, SIDE)
        assert image.image.grid == (SIDE // PATCH, SIDE // PATCH)
    assert image.max_input_tokens == PATCHES + (kind in CLIPS)
    assert (spec.max_input_tokens, spec.dim) == (POSITIONS, image.dim)
    assert spec.heads["dense"].normalize
    assert isinstance(image.heads["dense"], Pooled if kind in CLIPS else AttentionPooling)
    assert spec.filled == (None if kind in CLIPS else Expansion(0, POSITIONS, attended=True))
    verify(out)
    verify_values(out)


# Rows and columns of patches, which images of these sides keep when at most PATCHES are allowed.
SHAPES = [(4, 4), (5, 3), (3, 5), (2, 8), (1, 16), (16, 1), (1, 9), (10, 1), (2, 7), (3, 4)]


def shaped_pictures():
    return [picture(seed, PATCH * rows, PATCH * columns) for seed, (rows, columns) in
            enumerate(SHAPES)]  # fmt: skip


def test_images_of_several_shapes_in_one_row_equal_each_alone(converted):
    spec = load_routes(converted["siglip2"]).image
    processor = ImageProcessor(spec, 1)
    tokenization = TokenizationOptions("", truncate=True, side="right")
    images = [Image(one) for one in shaped_pictures()]
    entries = WorkFuture(processor.encode(images, tokenization).work, spec.widths).sequences
    batch = place(Bucket(3, 64), entries)
    assert len(batch.sequences) == len(images)
    assert max(batch.segments) > 3
    model = program(spec)
    parameters = load_params(route_path(converted["siglip2"], IMAGE_ROUTE), spec)
    planes = pack(batch, model.planes)
    padding = planes[2] == 0
    assert padding.any()
    planes[PackedTokens.PLANES :, padding] = np.iinfo(np.int32).max
    forward = jax.jit(model.forward, static_argnums=(2, 3))
    found = forward(model.order(parameters), planes, batch.bucket.slots, ("dense",))["dense"]
    vectors = np.asarray(found)[batch.rows, batch.slots]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tensors = dual_tensors("siglip2")
    for entry, vector in zip(batch.sequences, vectors, strict=True):
        number = next(number for number, one in enumerate(entries) if one is entry)
        wanted = expected_image("siglip2", tensors, shaped_pictures()[number])
        np.testing.assert_allclose(vector, wanted, atol=2e-6)


def test_an_image_is_placed_as_it_lies_after_it_is_turned(dual):
    from PIL import Image as Pillow

    colours = picture(1, 3 * PATCH, 5 * PATCH)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Pillow.fromarray(colours).save(file, "PNG", exif=exif)
    turned = np.ascontiguousarray(colours[::-1].transpose(1, 0, 2))
    first, second = dual("siglip2").encode(images=[file.getvalue(), turned])
    np.testing.assert_allclose(first, second, atol=2e-6)


@each_kind
def test_equal_images_are_computed_once_and_different_ones_never_confused(dual, kind):
    image = picture(1)
    other = image.copy()
    other[-1, -1, -1] ^= 0x80
    route = dual(kind).model.routes[IMAGE_ROUTE]
    given = [Image(image), Image(other), Image(image)]
    work = route.processor.encode(given, TokenizationOptions("", truncate=True, side="right")).work
    entries = WorkFuture(work, route.spec.widths).sequences
    assert [list(entry.futures.values()) for entry in entries] == [[[0, 2]], [[1]]]
    first, second, third = dual(kind).encode(given)
    np.testing.assert_array_equal(first, third)
    assert np.abs(first - second).max() > 1e-4


@each_kind
def test_inputs_of_both_kinds_keep_their_order_also_in_parts(dual, kind, monkeypatch):
    monkeypatch.setattr("jaxembed.runtime.runner.IMAGES_A_PART", 1)
    images = [picture(3), picture(4)]
    mixed = ["w1", images[0], "w2 w3", images[1], "w4"]
    got = dual(kind).encode(mixed)
    texts, pictures = dual(kind).encode(["w1", "w2 w3", "w4"]), dual(kind).encode(images=images)
    wanted = [texts[0], pictures[0], texts[1], pictures[1], texts[2]]
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    np.testing.assert_allclose(dual(kind).encode(["w1"], images=images)[1:], pictures, atol=2e-6)
    with pytest.raises(InvalidImage) as caught:
        dual(kind).encode([*mixed, Image(b"no image")])
    assert caught.value.index == len(mixed)


def test_an_image_comes_as_a_file_bytes_an_array_or_one_of_pillow(dual, tmp_path):
    from PIL import Image as Pillow

    colours = picture(5, 40, 50)
    path = tmp_path / "image.png"
    path.write_bytes(png(colours))
    given = [path, str(path), path.read_bytes(), colours, Pillow.fromarray(colours)]
    vectors = dual("clip").encode(images=given)
    np.testing.assert_allclose(vectors, np.tile(vectors[:1], (5, 1)), atol=2e-6)
    with pytest.raises(InvalidImage, match="float64"):
        dual("clip").encode(images=[colours / 255])
    with pytest.raises(InvalidImage, match="an image is a int"):
        dual("clip").encode(images=[7])
    with pytest.raises(InvalidImage, match=r"'https://a\.test/b\.png' is a URL; expected a path"):
        dual("clip").encode(images=["https://a.test/b.png"])
    with pytest.raises(InvalidImage, match=r"begins with b'no'.*expected a JPEG") as caught:
        dual("clip").encode(["w1", path, Image(b"no")])
    assert caught.value.index == 2


def test_texts_are_filled_up_and_only_their_own_tokens_count(dual):
    """Nor do images have more tokens than patches."""
    inputs = [Text("w1 w2"), *(Image(image) for image in shaped_pictures())]
    request = dual("siglip2").model.tasks.embed(inputs, EncodeOptions())
    wanted = [3, *(rows * columns for rows, columns in SHAPES)]
    assert dual("siglip2").model.run(request).num_tokens.tolist() == wanted


def test_what_a_model_of_texts_and_images_refuses(dual):
    clip, image = dual("clip"), Image(picture(1))
    with pytest.raises(WrongTask, match="takes texts and no images"):
        FakeEmbedder().tasks.embed([image], EncodeOptions())
    with pytest.raises(InvalidInput, match=r"`prompt` is for texts.*`input_type`"):
        clip.encode([image], prompt="a")
    with pytest.raises(UnknownRoute):
        clip.encode(["w1"], route=IMAGE_ROUTE)
    with pytest.raises(InvalidInput, match="late chunking"):
        clip.encode_chunks([["w1", "w2"]])


def test_a_limit_of_texts_that_are_filled_up_is_refused(converted, tmp_path):
    config = EngineConfig(devices=1, max_input_tokens=8)
    with pytest.raises(ConfigError, match="pads every text to 12;"):
        Embedder(str(converted["siglip"]), cache_dir=tmp_path, config=config)


def test_without_pillow_the_extra_is_named_before_it_serves(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxembed\[images\]'"):
        Embedder(str(converted["clip"]), cache_dir=tmp_path)


def test_modules_json_says_whether_vectors_are_normalised(tmp_path):
    folder = tmp_path / "st"
    write_dual(folder / "0_CLIPModel")
    clip = "sentence_transformers.models.CLIPModel", "0_CLIPModel"
    write_modules(folder, clip)
    routes, default = outline_routes(folder)
    assert default == TEXT_ROUTE
    assert {model.spec.dim for model in routes.values()} == {SPACE}
    assert routes[IMAGE_ROUTE].tokenizer == b""
    assert weight_folders(folder) == ["0_CLIPModel"]
    assert folders_read(folder) == []
    assert not routes[IMAGE_ROUTE].spec.heads["dense"].normalize
    kind = "sentence_transformers.models.Pooling"
    write_modules(folder, clip, (kind, "1_Pooling"))
    with pytest.raises(UnsupportedModel, match="Pooling"):
        outline_routes(folder)


def of_text(kind, **changes):
    return {"text_config": CONFIGS[kind]["text_config"] | changes}


def of_images(kind, **changes):
    return {"vision_config": CONFIGS[kind]["vision_config"] | changes}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("clip", {"architectures": ["CLIPTextModelWithProjection"]}, "CLIPTextModelWithProjection"),
        ("clip", of_text("clip", eos_token_id=3), "ends texts"),
        ("metaclip_2", of_text("metaclip_2", eos_token_id=1), r"\[2\], and the model needs 1"),
        ("clip", of_images("clip", num_channels=1), "channels"),
        ("clip", of_images("clip", image_size=64), "64, 64"),
        ("clip", of_images("clip", patch_size=5), "patches of"),
        ("siglip", of_images("siglip", vision_use_head=False), "vision_use_head"),
        ("siglip2", of_images("siglip2", num_patches=15), "num_patches 15"),
        ("siglip2", of_images("siglip2", patch_size=4), "patch_size 8"),
        ("siglip2", {"architectures": ["Siglip2ForImageClassification"]}, "Siglip2ForImage"),
        ("siglip", of_text("siglip", hidden_act="x"), "hidden_a"),
        ("clip", of_text("clip", hidden_size=33), "split into"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, kind, changes, message):
    with pytest.raises(CheckpointError, match=message):
        outline_routes(write_dual(tmp_path, kind, **changes))


def test_files_that_a_model_of_images_needs(tmp_path):
    folder = write_dual(tmp_path / "a")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"wanted preprocessor_config\.json"):
        outline_routes(folder)
    write_json(folder / "processor_config.json", {"image_processor": {"size": SIDE}})
    with pytest.raises(CheckpointError, match="224, 224"):
        outline_routes(folder)
    folder = write_dual(tmp_path / "b", "siglip")
    change_json(folder / "tokenizer_config.json", pad_token="<none>")
    assert outline_routes(folder)[0][TEXT_ROUTE].spec.filled == Expansion(1, 12, attended=True)


def test_the_tokenizer_of_siglip_ends_texts_and_makes_letters_small(tmp_path):
    folder = write_dual(tmp_path, "siglip")
    change_json(folder / "tokenizer_config.json", eos_token={"content": "</s>"})
    stored = outline_routes(folder)[0][TEXT_ROUTE].tokenizer
    assert Tokenizer.from_str(stored.decode()).encode("W1").ids == [4, 1]
    change_json(folder / "tokenizer_config.json", eos_token="<end>")
    with pytest.raises(CheckpointError, match=r"ends texts with the ids \[1\].*needs 24"):
        outline_routes(folder)


def test_texts_are_filled_up_as_they_were_in_training(tmp_path):
    folder = write_dual(tmp_path, "siglip2")
    change_json(folder / "tokenizer_config.json", padding_side="left")
    with pytest.raises(UnsupportedModel, match="padding_side 'left'"):
        outline_routes(folder)
    change_json(folder / "tokenizer_config.json", padding_side="right", bos_token="w1")
    outline_routes(folder)
    tokenizer = words("siglip2")
    begun = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 1)])
    tokenizer.post_processor = begun  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    change_json(folder / "tokenizer_config.json", bos_token="<s>")
    with pytest.raises(UnsupportedModel, match="texts that begin with <s>"):
        outline_routes(folder)


@pytest.mark.parametrize(("kind", "other"), [("siglip", "siglip2"), ("siglip2", "siglip")])
def test_the_image_processor_of_another_kind_is_refused(tmp_path, kind, other):
    folder = write_dual(tmp_path, kind)
    write_json(folder / "preprocessor_config.json", PROCESSORS[other])
    with pytest.raises(UnsupportedModel, match=f"ImageProcessor' of a {kind} model"):
        outline_routes(folder)


def test_flags_of_texts_are_refused(tmp_path):
    folder = write_dual(tmp_path)
    with pytest.raises(UnsupportedModel, match="--pooling splade"):
        outline_routes(folder, splade=True)
    with pytest.raises(UnsupportedModel, match="--dense-path"):
        outline_routes(folder, dense_path="2_Dense")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"size": 32, "crop_size": 32}, (None, 32, (32, 32))),
        ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 64, "crop_size": 32},
         (None, 64, (32, 32))),
        ({"image_processor_type": "SiglipImageProcessorFast", "size": 32}, ((32, 32), None, None)),
        ({"image_processor_type": "CLIPImageProcessor"}, (None, 224, (224, 224))),
    ],
)  # fmt: skip
def test_old_and_new_forms_of_sizes(config, wanted):
    tokenization = read_rules(config, 8)
    assert (tokenization.size, tokenization.shortest, tokenization.crop) == wanted


def test_rows_hold_one_image_in_its_own_shape(converted, tmp_path):
    spec = load_routes(converted["siglip2"]).image
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=1024, kernels="xla")
    grid = make_plan(spec, program(spec), config, tmp_path).grid
    assert {bucket.length for bucket in grid.buckets} == {PATCHES}


OF_CLIP = {"image_processor_type": "CLIPImageProcessor"}


@pytest.mark.parametrize(
    ("of_kind", "changes"),
    [
        (OF_CLIP, {"image_processor_type": "ViTImageProcessor"}),
        (OF_CLIP, {"resample": 7}), (OF_CLIP, {"do_rescale": False}),
        (OF_CLIP, {"do_normalize": False}), (OF_CLIP, {"do_pad": True}),
        (OF_CLIP, {"do_center_crop": False}), (OF_CLIP, {"size": {"shortest_edge": 100}}),
        (OF_CLIP, {"size": {"shortest_edge": 224, "longest_edge": 300}}),
        (OF_CLIP, {"size": {"height": 0, "width": 224}}), (OF_CLIP, {"image_mean": [0.5]}),
        (OF_CLIP, {"image_std": [0.5, 0.0, 0.5]}), (OF_CLIP, {"rescale_factor": "x"}),
        (SIGLIP2_IMAGES, {"patch_size": 14}), (SIGLIP2_IMAGES, {"max_num_patches": 0}),
        (SIGLIP2_IMAGES, {"max_num_patches": "256"}), (SIGLIP2_IMAGES, {"max_num_patches": 10**6}),
        (SIGLIP2_IMAGES, {"size": {"height": 224, "width": 224}}),
        (SIGLIP2_IMAGES, {"do_center_crop": True}), (SIGLIP2_IMAGES, {"do_resize": False}),
    ],
)  # fmt: skip
def test_preparation_that_is_not_done_is_refused(of_kind, changes):
    own_shapes = of_kind is SIGLIP2_IMAGES
    with pytest.raises(CheckpointError, match="|".join(changes) if own_shapes else None):
        read_rules(of_kind | changes, PATCH if own_shapes else 32)


def test_a_grid_for_one_length_holds_it_and_wastes_little():
    for length, budget in product((16, 50, 64, 197, 257, 729), (16, 256, 2048, 16384)):
        grid, case = one_length_grid(length, budget), (length, budget)
        assert len(set(grid.buckets)) == len(grid.buckets) <= 20, case
        for bucket in grid.buckets:
            assert bucket.length % 16 == 0, case
            assert bucket.slots == bucket.length // length >= 1, case
            assert bucket.tokens <= max(budget, bucket.length), case
        fill = max(b.length // length * length / b.length for b in grid.buckets)
        assert fill > 0.94 or budget < 6 * length, case


@each_kind
def test_a_config_is_described_or_refused_whatever_it_holds(tmp_path, kind):
    files = ("config.json", "preprocessor_config.json", "tokenizer_config.json")
    assert_described_or_refused(write_dual(tmp_path, kind), files, outline_routes)
