"""Reads from preprocessor_config.json how a model's images are prepared."""

from collections.abc import Mapping
from typing import Any

import msgspec

from converters.fields import PROCESSOR_FIELDS, check_fields, given, lookup
from jaxembed.data.spec import ImageRules, Resample, Tiles
from jaxembed.errors import CheckpointError, UnsupportedModel

RESAMPLE_NAMES: dict[int, Resample] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}

# transformers' defaults for missing fields, by the processor's name without "ImageProcessor" etc.
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIP": {
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "Siglip": {
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "Siglip2": {
        "resample": 2,
        "patch_size": 16,
        "max_num_patches": 256,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "Qwen2VL": {
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},  # area, pixels
        "do_center_crop": False,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "Idefics3": {
        "resample": 1,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},  # that of a tile
        "do_image_splitting": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
MAX_AREA = 2**31  # pixels
MAX_MERGE = 8  # patches along the side of the square that becomes one token
COMMON_DEFAULTS = {"resample": 3, "rescale_factor": 1 / 255}
ENDINGS = ("Fast", "Pil")
MAX_SIDE = 8192  # pixels
MAX_TILED_SIDE = 4096  # pixels; transformers resizes larger images once more
MAX_PATCHES = 8192  # maximum of an image: the longest row of a default grid


def read_rules(config: Mapping[str, Any], patch: int) -> ImageRules:
    """Return the rules of the image processor `config`, for patches of `patch` by `patch` pixels,
    without the tokens around images and tiles.
    Raises UnsupportedModel for an unknown processor or step, and CheckpointError for invalid
    fields."""
    full_name = config.get("image_processor_type") or config.get("feature_extractor_type") or "CLIP"
    processor = str(full_name)
    for ending in (*ENDINGS, "ImageProcessor", "FeatureExtractor"):
        processor = processor.removesuffix(ending)
    if processor not in PROCESSOR_DEFAULTS:
        known = ", ".join(f"{name}ImageProcessor" for name in PROCESSOR_DEFAULTS)
        raise UnsupportedModel(f"image processor {full_name!r} is not supported; known: {known}")
    fields = {**COMMON_DEFAULTS, **PROCESSOR_DEFAULTS[processor], **given(config)}
    switches = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": False}
    if processor == "Idefics3":  # it pads images to one size, which all tiles have
        switches = switches | {"do_pad": fields.get("do_pad"), "do_image_splitting": True}
    for switch, wanted in switches.items():
        if fields.get(switch, wanted) is not wanted:
            raise UnsupportedModel(
                f"{switch} {fields[switch]!r} of images is not supported; wanted {wanted}"
            )
    check_fields("the image processor's config", fields, PROCESSOR_FIELDS)
    rules = ImageRules(
        patch=patch,
        resample=lookup("resample", fields["resample"], RESAMPLE_NAMES),
        rescale=float(fields["rescale_factor"]),
        mean=msgspec.convert(fields["image_mean"], tuple[float, float, float]),
        std=msgspec.convert(fields["image_std"], tuple[float, float, float]),
        **_resize_fields(fields, processor, patch),
    )
    if not all(rules.std):
        raise CheckpointError("image_std has a zero")
    # images that keep their aspect ratio are resized to whole patches
    sides = (patch,) if rules.place_numbers else rules.made
    has_part = any(side % patch for side in sides)
    if patch % 2 or min(sides) < patch or (rules.tiles is not None and has_part):
        raise UnsupportedModel(
            f"images of {sides} in patches of {patch} are not supported; known: an even size, at "
            "most that of the sides, which divides those of tiles"
        )
    return rules


def _resize_fields(fields: Mapping[str, Any], processor: str, patch: int) -> dict[str, Any]:
    """Return the fields of ImageRules that say to what size images are resized and cropped.
    `processor` is a key of PROCESSOR_DEFAULTS, `patch` the side of a patch in pixels. Raises
    UnsupportedModel and CheckpointError."""
    if processor == "Siglip2":  # images keep their aspect ratio, within a number of patches
        for name in ("size", "do_center_crop", "crop_size"):
            if fields.get(name):
                raise UnsupportedModel(
                    f"{name} {fields[name]!r} of images that keep their shape is not supported"
                )
        _refuse_other_patches(fields, patch)
        max_patches = _whole("max_num_patches", fields["max_num_patches"], MAX_PATCHES)
        return {"most_patches": max_patches, "place_numbers": 4}  # row, column, rows, columns
    if processor == "Qwen2VL":  # images keep their aspect ratio, in whole tokens within an area
        if fields["do_center_crop"]:
            raise UnsupportedModel(
                "do_center_crop true of images that keep their shape is not supported"
            )
        _refuse_other_patches(fields, patch)
        merge = _whole("merge_size", fields["merge_size"], MAX_MERGE)
        # the area in pixels: min_pixels and max_pixels, or else the bounds in `size`
        size = fields["size"]
        if not isinstance(size, Mapping) or set(given(size)) - {"shortest_edge", "longest_edge"}:
            raise UnsupportedModel(
                f"size {size!r} of images is not supported; known: shortest_edge and longest_edge"
            )
        low = fields.get("min_pixels", size.get("shortest_edge"))
        high = fields.get("max_pixels", size.get("longest_edge"))
        area = _whole("min_pixels", low, MAX_AREA), _whole("max_pixels", high, MAX_AREA)
        if area[0] > area[1]:
            raise CheckpointError(f"min_pixels {area[0]} of images is over max_pixels {area[1]}")
        return {"area": area, "merge": merge, "place_numbers": 3}  # time, row, column
    if processor == "Idefics3":  # images nearly keep their aspect ratio, in whole tiles
        side, longest = (
            _whole(name, _longest_edge(name, fields[name]), MAX_TILED_SIDE)
            for name in ("max_image_size", "size")
        )
        if side >= longest:
            raise UnsupportedModel(
                f"size {longest} of images in tiles of {side} is not supported; known: a larger "
                "size, so that images are split"
            )
        return {"size": (side, side), "tiles": Tiles(longest, (), (), ())}
    # all images are resized or cropped to one size
    size, shortest = _target_size(fields["size"], square=processor != "CLIP")
    crop = _height_and_width("crop_size", fields["crop_size"]) if fields["do_center_crop"] else None
    if crop is None and size is None:
        raise UnsupportedModel(
            "images that keep their shape are not supported without do_center_crop"
        )
    # the crop must fit into every resized image
    if crop is not None and max(crop) > (shortest or min(size or crop)):
        raise UnsupportedModel(
            f"images of {size or shortest} are not supported: the crop {crop} is larger"
        )
    return {"size": size, "shortest": shortest, "crop": crop}


def _longest_edge(name: str, value: Any) -> Any:
    """Return the longest_edge of the field `name`. Raises UnsupportedModel for other keys."""
    if not isinstance(value, Mapping) or set(given(value)) != {"longest_edge"}:
        raise UnsupportedModel(f"{name} {value!r} of images is not supported; known: longest_edge")
    return value["longest_edge"]


def _refuse_other_patches(fields: Mapping[str, Any], patch: int) -> None:
    """Raise UnsupportedModel unless the patch_size in `fields` is that of the image encoder."""
    if fields["patch_size"] != patch:
        raise UnsupportedModel(
            f"patch_size {fields['patch_size']!r} of images is not supported: the image encoder "
            f"has {patch}"
        )


def _target_size(value: Any, *, square: bool) -> tuple[tuple[int, int] | None, int | None]:
    """Return the target size in pixels: (height, width) and None, or None and the shorter side. A
    number as `value` is the length of both sides if `square`, and else of the shorter side."""
    if isinstance(value, Mapping) and "shortest_edge" in value:
        if set(given(value)) - {"shortest_edge"}:
            raise UnsupportedModel(f"size {dict(value)} of images is not supported")
        return None, _whole("size", value["shortest_edge"], MAX_SIDE)
    if isinstance(value, int) and not square:
        return None, _whole("size", value, MAX_SIDE)
    return _height_and_width("size", value), None


def _height_and_width(name: str, value: Any) -> tuple[int, int]:
    """Return (height, width) in pixels. If `value` is a number, it is both."""
    sides = value if isinstance(value, Mapping) else {"height": value, "width": value}
    height, width = (_whole(name, sides.get(side), MAX_SIDE) for side in ("height", "width"))
    return height, width


def _whole(name: str, value: Any, maximum: int) -> int:
    if type(value) is not int or not 1 <= value <= maximum:
        raise CheckpointError(
            f"{name} of images has {value!r}, wanted a whole number from 1 to {maximum}"
        )
    return value
