"""Images in messages: what does not fit together is no message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.wire.errors import InvalidMessage
from baton.wire.images import digest_of
from tests.wire.wire_samples import IMAGE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload": IMAGE.payload[:-1]}, "no image of 2 x 3 pixels"),
        ({"height": 3, "width": 2}, "do not have its digest"),
        ({"payload": bytes(18)}, "do not have its digest"),
        ({"digest": b"short"}, "has 5 bytes"),
    ],
)
def test_pixels_fit_size_and_digest(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        replace(IMAGE, **changes)
    assert replace(IMAGE.without_payload(), start=4).digest == IMAGE.digest


def test_the_size_is_part_of_the_digest() -> None:
    assert digest_of(2, 3, IMAGE.payload) != digest_of(3, 2, IMAGE.payload)
