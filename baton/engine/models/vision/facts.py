"""How a checkpoint's images become tokens: sizes, token ids, and the numbers of a pixel.

Owns which models see images here, what their files say of it (`config.json`, `preprocessor_config.json` or
`processor_config.json`, and the added tokens of the tokenizer), and to which size an image is brought. It computes what
the image processors of transformers do, which need torch and seconds to be imported. Imports neither torch nor Pillow:
the router, its image process and the nodes ask the same questions.

An image of H x W pixels, after resizing, stands in a prompt as `token_ids(H, W)`. Those of them that are `token_id` get
what the tower computes, in order, in the place of their embeddings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engine.models.config import read_config_files
from baton.engine.text.checkpoint_files import read_json
from baton.wire.errors import InvalidRequest, ModelLoadError
from baton.wire.images import MAX_EDGE, PromptImage

if TYPE_CHECKING:
    from baton.device.base import Array

_BICUBIC = 3
"""Pillow's number."""
_MAX_RATIO = 200
_QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class NoImages(ModelLoadError):
    """Images of this checkpoint cannot be served; its text can."""


@dataclass(frozen=True, slots=True)
class PixelRule:
    """A pixel's number of 8 bits becomes (number * factor - mean) / std of its channel. `resample`: by which of
    Pillow's filters an image is resized."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int


@dataclass(frozen=True, slots=True)
class ImageFacts(ABC):
    """Facts about the images of a model, for router and nodes. `patch`: the edge, in pixels, of one input of the tower;
    `merge`: that many inputs, squared, become one token."""

    token_id: int
    patch: int
    merge: int
    pixel: PixelRule

    @property
    def edge(self) -> int:
        """The edge of the square of pixels that becomes one token."""
        return self.patch * self.merge

    @property
    def sections(self) -> tuple[int, ...]:
        """The number of the dimension by which each pair of a head is rotated; empty: positions have only one."""
        return ()

    @abstractmethod
    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size to which an image is brought. Raises `InvalidRequest`."""

    @abstractmethod
    def token_ids(self, height: int, width: int) -> list[int]:
        """The token ids in a prompt that stand for an image of that size, in pixels."""

    def coordinates(self, image: PromptImage, places: Array) -> tuple[Array, Array, Array]:
        """Time, row and column of the tokens at these places of an image, each a token of its size."""
        columns = image.width // self.edge
        return places * 0, places // columns, places % columns

    def num_positions(self, image: PromptImage) -> int:
        """The positions from the first token of an image to the token behind it."""
        return image.num_tokens

    def require_fit(self, token_ids: Sequence[int], image: PromptImage) -> None:
        """Raise `InvalidRequest` unless the tokens of `image` are those of its size."""
        if image.height % self.edge or image.width % self.edge:
            raise InvalidRequest(f"an image of {image.height} x {image.width} pixels has no whole patches", "messages")
        if list(token_ids[image.start : image.stop]) != self.token_ids(image.height, image.width):
            raise InvalidRequest("the tokens of an image are not those of its size", "messages")


@dataclass(frozen=True, slots=True)
class PixtralFacts(ImageFacts):
    """Mistral 3 with Pixtral's tower: rows end with a token of their own. No edge is longer than `longest_edge`."""

    longest_edge: int
    break_id: int
    end_id: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels: at most the model's longest edge, multiples of a patch. Raises `InvalidRequest`
        for one patch."""
        ratio = max(height, width) / self.longest_edge
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        if max(height, width) <= self.edge:
            # transformers' code fails with a single token, and with it the whole step would
            raise InvalidRequest(f"an image of {height} x {width} pixels is too small for this model", "messages")
        return (height - 1) // self.edge * self.edge + self.edge, (width - 1) // self.edge * self.edge + self.edge

    def token_ids(self, height: int, width: int) -> list[int]:
        """A token for each patch, with one that ends each row and one that ends the image."""
        row = [self.token_id] * (width // self.edge) + [self.break_id]
        return row * (height // self.edge - 1) + row[:-1] + [self.end_id]


@dataclass(frozen=True, slots=True)
class QwenFacts(ImageFacts):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: tokens have places in rows and columns. An image has from `min_pixels` to
    `max_pixels`, and counts as a film of `moments`; `dimensions`: see `sections`."""

    min_pixels: int
    max_pixels: int
    moments: int
    dimensions: tuple[int, ...]

    @property
    def sections(self) -> tuple[int, ...]:
        """For each pair of elements of a head, the dimension that rotates it: time (0), row (1) or column (2)."""
        return self.dimensions

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels: multiples of a patch, within the model's bounds. Raises `InvalidRequest` for
        narrow images."""
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise InvalidRequest(f"an image of {height} x {width} pixels is too narrow for this model", "messages")
        edge, size = self.edge, height * width
        rows, columns = round(height / edge), round(width / edge)
        if rows * columns * edge * edge > self.max_pixels:
            shrink = math.sqrt(size / self.max_pixels)
            rows, columns = (max(1, math.floor(length / shrink / edge)) for length in (height, width))
        elif rows * columns * edge * edge < self.min_pixels:
            grow = math.sqrt(self.min_pixels / size)
            rows, columns = (math.ceil(length * grow / edge) for length in (height, width))
        return rows * edge, columns * edge

    def token_ids(self, height: int, width: int) -> list[int]:
        """A token for each merged patch."""
        return [self.token_id] * (height // self.edge * (width // self.edge))

    def num_positions(self, image: PromptImage) -> int:
        """The longer edge of the image, in merged patches: that many positions are used up."""
        return max(image.height, image.width) // self.edge


def load_image_facts(folder: Path) -> ImageFacts | None:
    """The facts of the checkpoint in `folder` about images; None for a model of text alone. Raises `NoImages` with the
    reason when its images cannot be served, and `ModelLoadError` for files that cannot be read."""
    content, _ = read_config_files(folder)
    if not isinstance(content.get("vision_config"), dict):
        return None
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    read = _READ.get(name)
    if read is None:
        raise NoImages(f"images are not served for {name or 'this architecture'}, which answers to text alone")
    try:
        return read(content, _processor_fields(folder), folder)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NoImages(f"images are not served: the files about them lack or garble {error}") from error


def _processor_fields(folder: Path) -> Mapping[str, Any]:
    """The fields of the image processor, wherever they stand."""
    fields: Any = read_json(folder / "preprocessor_config.json")
    if not fields:
        fields = read_json(folder / "processor_config.json").get("image_processor")
    if not fields or not isinstance(fields, dict):
        raise NoImages("images are not served: the checkpoint has no preprocessor_config.json")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if fields.get(name, True) is not True:
            raise NoImages(f"images are not served: the image processor's {name} is not true")
    return fields


def _pixel_rule(fields: Mapping[str, Any]) -> PixelRule:
    usual = {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}
    mean, std = (_channels(fields.get(name, numbers)) for name, numbers in usual.items())
    return PixelRule(float(fields.get("rescale_factor", 1 / 255)), mean, std, int(fields.get("resample", _BICUBIC)))


def _channels(value: Any) -> tuple[float, float, float]:
    red, green, blue = (float(each) for each in value)
    return red, green, blue


def _added_id(folder: Path, text: str) -> int:
    """The id of an added token. Raises `KeyError`."""
    tokens: Any = read_json(folder / "tokenizer.json").get("added_tokens") or ()
    for token in tokens:
        if token["content"] == text:
            return int(token["id"])
    raise KeyError(f"the token {text}")


def _token_id(content: Mapping[str, Any], usual: int) -> int:
    found = content.get("image_token_id", content.get("image_token_index", usual))
    if type(found) is not int:
        raise KeyError("image_token_id")
    return found


def _bounded(value: Any, most: int = MAX_EDGE) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"the number {value!r:.50}")
    return value


def _read_pixtral(content: Mapping[str, Any], fields: Mapping[str, Any], folder: Path) -> ImageFacts:
    return PixtralFacts(
        token_id=_token_id(content, 10),
        patch=_bounded(content["vision_config"].get("patch_size", 16)),
        merge=_bounded(content.get("spatial_merge_size", 2)),
        pixel=_pixel_rule(fields),
        longest_edge=_bounded(fields.get("size", {}).get("longest_edge", 1024)),
        break_id=_added_id(folder, "[IMG_BREAK]"),
        end_id=_added_id(folder, "[IMG_END]"),
    )


@dataclass(frozen=True, slots=True)
class _QwenDefaults:
    """What files of a family leave out. `is_interleaved`: how sections become dimensions, which no file decides:
    transformers writes no `mrope_interleaved`, and reads none."""

    patch: int = 14
    sections: tuple[int, int, int] = (16, 24, 24)
    is_interleaved: bool = False


def _read_qwen(
    content: Mapping[str, Any], fields: Mapping[str, Any], folder: Path, defaults: _QwenDefaults
) -> ImageFacts:
    tower, text = content["vision_config"], content.get("text_config") or content
    size = fields.get("size") or _QWEN_SIZE
    # as for text: where a file has both spellings the older one wins
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return QwenFacts(
        token_id=_token_id(content, 151_655),
        patch=_bounded(tower.get("patch_size", defaults.patch)),
        merge=_bounded(tower.get("spatial_merge_size", 2)),
        pixel=_pixel_rule(fields),
        min_pixels=_bounded(fields.get("min_pixels") or size["shortest_edge"], MAX_EDGE**2),
        max_pixels=_bounded(fields.get("max_pixels") or size["longest_edge"], MAX_EDGE**2),
        moments=_bounded(tower.get("temporal_patch_size", 2)),
        dimensions=_dimensions(rope.get("mrope_section", defaults.sections), is_interleaved=defaults.is_interleaved),
    )


def _dimensions(sections: Any, *, is_interleaved: bool) -> tuple[int, ...]:
    """For each pair of a head whether it is rotated by time (0), row (1) or column (2)."""
    counts = [_bounded(each) for each in sections]
    if len(counts) != 3:
        raise ValueError(f"{len(counts)} sections of positions")
    if not is_interleaved:
        return tuple(dimension for dimension, count in enumerate(counts) for _ in range(count))
    found = [0] * sum(counts)
    for dimension in (1, 2):
        for pair in range(dimension, min(3 * counts[dimension], len(found)), 3):
            found[pair] = dimension
    return tuple(found)


_READ: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], Path], ImageFacts]] = {
    "Mistral3ForConditionalGeneration": _read_pixtral,
    "Qwen2VLForConditionalGeneration": partial(_read_qwen, defaults=_QwenDefaults()),
    "Qwen2_5_VLForConditionalGeneration": partial(_read_qwen, defaults=_QwenDefaults()),
    "Qwen3VLForConditionalGeneration": partial(
        _read_qwen, defaults=_QwenDefaults(patch=16, sections=(24, 20, 20), is_interleaved=True)
    ),
}
