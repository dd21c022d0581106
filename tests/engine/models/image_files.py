"""Pictures, files of them, and what a checkpoint says of images. Without torch: tests of the router use it too."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

TOKEN_ID = 5
"""That of an image, for `write_image_facts`."""


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Colours that change from place to place, and with the seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def as_file(image: Image.Image, kind: str = "PNG") -> bytes:
    """The bytes of a file with that image."""
    with BytesIO() as file:
        image.save(file, kind)
        return file.getvalue()


def write_image_facts(folder: Path, **changes: object) -> None:
    """The files about images of a Qwen2.5-VL checkpoint: a token for 28 x 28 pixels, from 4 tokens to 1280. `changes`:
    other fields of its `config.json`."""
    content = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {},
        "image_token_id": TOKEN_ID,
        "text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(content))
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
