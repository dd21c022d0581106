"""Sizes, tokens and numbers of images: those of transformers' own processors; and files that are no images."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from baton.engine.models.vision.decoding import MAX_PIXELS, decode, resized
from baton.engine.models.vision.facts import ImageFacts, NoImages, PixtralFacts, load_image_facts
from baton.engine.models.vision.limit import image_limit
from baton.engine.models.vision.tower import inputs_of, values_of
from baton.wire.errors import InvalidRequest, InvalidSetting
from baton.wire.media import MAX_PAYLOAD_BYTES
from tests.engine.models.image_files import as_file, picture, write_image_facts
from tests.engine.models.seeing import Seeing, make_seeing

_SIZES = ((100, 60), (60, 100), (1, 1), (13, 200), (333, 250), (28, 28))


@pytest.fixture(scope="module", params=("mistral3", "qwen3-vl"))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """One of each kind."""
    return make_seeing(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.mark.parametrize("size", _SIZES)
def test_pixels_are_those_of_transformers(seeing: Seeing, size: tuple[int, int]) -> None:
    image = picture(*size)
    if isinstance(seeing.facts, PixtralFacts) and max(size) <= seeing.facts.edge:
        with pytest.raises(InvalidRequest, match="too small for this model"):
            resized(image, seeing.facts)
        return
    found = resized(image, seeing.facts)
    levels = np.frombuffer(found.pixels, dtype=np.uint8).reshape(found.height, found.width, 3)
    values = values_of(seeing.facts.pixel)
    numbers = np.stack([values[channel][levels[..., channel]] for channel in range(3)])
    given = inputs_of(seeing.facts, torch.from_numpy(numbers))
    expected = seeing.processor()([image], return_tensors="pt")
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, rtol=0, atol=0)


def test_rows_of_an_image_of_mistral_end_with_tokens_of_their_own(tmp_path: Path) -> None:
    facts = make_seeing(tmp_path, "mistral3").facts
    image, end_of_row, end = 317, 318, 319
    assert facts.token_ids(56, 84) == [image] * 3 + [end_of_row] + [image] * 3 + [end]


def _facts(folder: Path) -> ImageFacts:
    write_image_facts(folder)
    facts = load_image_facts(folder)
    assert facts is not None
    return facts


def _read(content: bytes, facts: ImageFacts) -> tuple[int, int]:
    found = decode(base64.b64encode(content).decode(), facts)
    assert len(found.pixels) == found.height * found.width * 3
    return found.height, found.width


def _claiming(width: int, height: int) -> bytes:
    """A PNG whose header says so, and that has next to nothing in it."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_of_each_kind_are_read(tmp_path: Path, kind: str) -> None:
    assert _read(as_file(picture(90, 60), kind), _facts(tmp_path)) == (56, 84)


def test_of_an_animation_the_first_picture_counts_and_what_is_transparent_has_a_colour(tmp_path: Path) -> None:
    facts = _facts(tmp_path)
    first, second = picture(56, 56, 1).convert("P"), picture(56, 56, 2).convert("P")
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second] * 9)
    first.save(tmp_path / "b.gif")
    moving, still = (base64.b64encode((tmp_path / f"{name}.gif").read_bytes()).decode() for name in "ab")
    assert decode(moving, facts) == decode(still, facts)
    clear = as_file(Image.new("RGBA", (56, 56), (255, 0, 0, 0)))
    assert decode(base64.b64encode(clear).decode(), facts).pixels == b"\xff\0\0" * 56 * 56


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_claiming(100_000, 100_000), "cannot be decoded|at most"),
        (_claiming(8_000, 8_000), f"{MAX_PIXELS} at most"),
        (_claiming(64, 64), "cannot be decoded"),
        (as_file(picture(64, 64))[:200], "cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'/>", "none of PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "none of PNG"),
        (as_file(picture(8, 8), "BMP"), "none of PNG"),
        (as_file(picture(2_000, 4)), "too narrow"),
        (b"", "none of PNG"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _read(content, _facts(tmp_path))


def test_images_beyond_what_a_message_carries_are_refused(tmp_path: Path) -> None:
    write_image_facts(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1, "max_pixels": MAX_PAYLOAD_BYTES}))
    facts = load_image_facts(tmp_path)
    assert facts is not None
    with pytest.raises(InvalidRequest, match="too many"):
        _read(as_file(Image.new("RGB", (2_500, 2_500))), facts)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("preprocessor_config.json", {}, "has no preprocessor_config.json"),
        ("preprocessor_config.json", {"do_rescale": False, "size": {}}, "do_rescale is not true"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 3}}, "longest_edge"),
        ("config.json", {"architectures": ["Gemma3ForConditionalGeneration"]}, "not served for Gemma3For"),
        ("config.json", {"image_token_id": "x"}, "image_token_id"),
    ],
)
def test_images_that_cannot_be_served_have_a_reason(
    tmp_path: Path, name: str, changes: dict[str, object], reason: str
) -> None:
    write_image_facts(tmp_path)
    path = tmp_path / name
    content = {**json.loads(path.read_text()), **changes} if name == "config.json" else changes
    path.write_text(json.dumps(content))
    with pytest.raises(NoImages, match=reason):
        load_image_facts(tmp_path)


@pytest.mark.parametrize(("setting", "limit"), [("image=0", 0), ("image=7", 7), ('{"image": 2}', 2)])
def test_the_limit_is_written_as_in_vllm(setting: str, limit: int) -> None:
    assert image_limit(setting) == limit


@pytest.mark.parametrize("setting", ["", "image", "image=-1", "image=65", "video=1", '{"image": 1, "video": 1}', "[1]"])
def test_another_limit_is_refused(setting: str) -> None:
    with pytest.raises(InvalidSetting, match="is not image=N"):
        image_limit(setting)
