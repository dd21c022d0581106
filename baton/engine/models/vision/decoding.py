"""From the bytes of an image's file to resized pixels, with Pillow.

Owns what is accepted: PNG, JPEG, WebP and GIF (its first picture), of a bounded size, which the header says before
anything is decoded. What else may happen to a process that decodes what strangers send is `image_process`'s.
"""

from __future__ import annotations

import base64
import binascii
import warnings
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from baton.engine.models.vision.facts import ImageFacts
from baton.wire.errors import InvalidRequest
from baton.wire.images import MAX_EDGE
from baton.wire.media import MAX_PAYLOAD_BYTES

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 2**25
"""Of an image before it is resized."""
_DECODING_ERRORS = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, MemoryError, ArithmeticError)


class DecodedImage(NamedTuple):
    """A resized image: rows of red, green and blue, 8 bits each."""

    height: int
    width: int
    pixels: bytes


def decode(text: str, facts: ImageFacts) -> DecodedImage:
    """The image whose file is `text` in base64, as `facts` want it. Raises `InvalidRequest`."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("an image is not valid base64", "messages") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resized(_opened(content), facts)


def resized(image: Image.Image, facts: ImageFacts) -> DecodedImage:
    """An image in red, green and blue, as `facts` want it. Raises `InvalidRequest`."""
    height, width = facts.resized(image.height, image.width)
    if height * width * 3 > MAX_PAYLOAD_BYTES or max(height, width) > MAX_EDGE:
        raise InvalidRequest(f"an image has {height} x {width} pixels for this model: too many", "messages")
    found = image.resize((width, height), resample=facts.pixel.resample)
    return DecodedImage(height, width, found.tobytes())


def _opened(content: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(content), formats=KINDS)
    except UnidentifiedImageError:
        raise InvalidRequest("an image is none of PNG, JPEG, WebP and GIF", "messages") from None
    except (*_DECODING_ERRORS, Image.DecompressionBombError):
        raise InvalidRequest("an image cannot be decoded", "messages") from None
    if image.width * image.height > MAX_PIXELS:
        raise InvalidRequest(f"an image has {image.width} x {image.height} pixels, {MAX_PIXELS} at most", "messages")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (*_DECODING_ERRORS, Image.DecompressionBombError):
        raise InvalidRequest("an image cannot be decoded", "messages") from None
