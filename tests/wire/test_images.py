"""Images in messages: what does not fit together is no message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.wire.errors import InvalidMessage
from baton.wire.images import MAX_PIXEL_BYTES, PromptImage, digest_of, require_in_order
from tests.wire.wire_samples import IMAGE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixels": IMAGE.pixels[:-1]}, "no image of 2 x 3 pixels"),
        ({"height": 3, "width": 2}, "do not have its digest"),
        ({"pixels": bytes(18)}, "do not have its digest"),
        ({"digest": b"short"}, "has 5 bytes"),
    ],
)
def test_pixels_fit_size_and_digest(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        replace(IMAGE, **changes)
    assert replace(IMAGE.without_pixels(), start=4).digest == IMAGE.digest


def test_the_size_is_part_of_the_digest() -> None:
    assert digest_of(2, 3, IMAGE.pixels) != digest_of(3, 2, IMAGE.pixels)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([IMAGE, replace(IMAGE, start=2)], "lie in each other"),
        ([replace(IMAGE, start=4), IMAGE], "lie in each other, or are out of order"),
        ([replace(IMAGE, start=9)], "ends at token 11 of a prompt of 10"),
    ],
)
def test_images_follow_each_other_within_the_prompt(images: Sequence[PromptImage], message: str) -> None:
    require_in_order([IMAGE, replace(IMAGE, start=3), replace(IMAGE, start=8)], 10)
    with pytest.raises(InvalidMessage, match=message):
        require_in_order(images, 10)


def test_images_of_a_request_fit_a_message() -> None:
    pixels = bytes(1024 * 1024 * 3)
    large = PromptImage(0, 2, 1024, 1024, digest_of(1024, 1024, pixels), pixels)
    require_in_order([replace(large, start=2 * place) for place in range(3)], 10)
    with pytest.raises(InvalidMessage, match=f"more than {MAX_PIXEL_BYTES} bytes"):
        require_in_order([replace(large, start=2 * place) for place in range(4)], 10)
