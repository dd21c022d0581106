"""An image of a prompt, as router and nodes name it and send it.

Owns what an image is between programs: the place of its tokens, its pixels after the checkpoint's resizing, and the
digest by which caches know it. Does not know how pixels are made, or what a model computes of them.

Invariants: pixels fit the size and the digest, or an image cannot be constructed. Whoever computes a prompt has the
pixels; whoever gets its KV has an image without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated

from baton.wire.codec import Bounds, Length
from baton.wire.errors import InvalidMessage

MAX_IMAGES = 64
"""Of one request."""
MAX_PIXEL_BYTES = 11 * 2**20
"""Of all images of a request: they travel in one message, beside the token ids."""
MAX_EDGE = 2**14
_DIGEST_BYTES = 16
_CHANNELS = 3

_Place = Annotated[int, Bounds(0, 2**30)]
_Edge = Annotated[int, Bounds(1, MAX_EDGE)]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PromptImage:
    """The image that stands in the tokens start .. start + num_tokens - 1 of a prompt. `pixels`: its resized rows, 8
    bits each of red, green and blue; empty where only its KV is of use. `digest`: of size and pixels."""

    start: _Place
    num_tokens: Annotated[int, Bounds(1, 2**20)]
    height: _Edge
    width: _Edge
    digest: Annotated[bytes, Length(_DIGEST_BYTES)]
    pixels: Annotated[bytes, Length(MAX_PIXEL_BYTES)] = b""

    def __post_init__(self) -> None:
        if len(self.digest) != _DIGEST_BYTES:
            raise InvalidMessage(f"the digest of an image has {len(self.digest)} bytes")
        if not self.pixels:
            return
        if len(self.pixels) != self.height * self.width * _CHANNELS:
            raise InvalidMessage(f"{len(self.pixels)} bytes are no image of {self.height} x {self.width} pixels")
        if self.digest != digest_of(self.height, self.width, self.pixels):
            raise InvalidMessage("the pixels of an image do not have its digest")

    @property
    def stop(self) -> int:
        """The place behind the image's last token in the prompt."""
        return self.start + self.num_tokens

    @property
    def mark(self) -> bytes:
        """The bytes that stand for the image in the hash of a block that holds it, with its place there."""
        return self.digest + self.start.to_bytes(4, "little")

    def without_pixels(self) -> PromptImage:
        """This image for a node that gets the KV, and needs no pixels."""
        return replace(self, pixels=b"")


def digest_of(height: int, width: int, pixels: bytes) -> bytes:
    """128 bits that name the pixels of an image."""
    key = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    return blake2b(pixels, digest_size=_DIGEST_BYTES, key=key).digest()


def require_in_order(images: Sequence[PromptImage], num_tokens: int) -> None:
    """Raise `InvalidMessage` unless the images follow each other within `num_tokens` tokens, and are few enough."""
    place = 0
    for image in images:
        if image.start < place:
            raise InvalidMessage("images of a prompt lie in each other, or are out of order")
        place = image.stop
    if place > num_tokens:
        raise InvalidMessage(f"an image ends at token {place} of a prompt of {num_tokens}")
    if sum(len(image.pixels) for image in images) > MAX_PIXEL_BYTES:
        raise InvalidMessage(f"the images of a prompt have more than {MAX_PIXEL_BYTES} bytes")
