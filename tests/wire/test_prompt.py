"""A prompt says what it is made of, and makes others of it without changing."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from baton.wire.errors import InvalidMessage
from baton.wire.messages.legs import Decode
from baton.wire.messages.vocabulary import ROUTER_TO_NODE
from baton.wire.prompt import ADAPTER_BYTES, MAX_SALT_BYTES, Prompt
from baton.wire.sampling import DecodingParams
from tests.wire.wire_samples import IMAGE

FAR = replace(IMAGE, start=4)
PROMPT = Prompt((1, 5, 5, 2, 5, 5), b"salt", (IMAGE, FAR), b"a" * 16)


def test_it_is_made_of_whatever_holds_its_parts_and_is_not_changed() -> None:
    assert Prompt.of(iter([1, 5, 5, 2, 5, 5]), b"salt", [IMAGE, FAR], b"a" * 16) == PROMPT
    assert Prompt.of(range(3)) == Prompt((0, 1, 2), b"", (), b"")
    with pytest.raises(FrozenInstanceError):
        PROMPT.cache_salt = b"other"  # type: ignore[misc]


def test_what_follows_it_is_not_counted_and_without_that_nothing_is_copied() -> None:
    assert PROMPT.num_tokens == 6
    assert PROMPT.followed_by([8, 9]) == (1, 5, 5, 2, 5, 5, 8, 9)
    assert PROMPT.followed_by(()) is PROMPT.token_ids


@pytest.mark.parametrize(("num_tokens", "images"), [(1, ()), (2, (IMAGE,)), (4, (IMAGE,)), (5, (IMAGE, FAR))])
def test_its_beginning_has_its_salt_its_adapter_and_the_images_that_begin_there(
    num_tokens: int, images: tuple[object, ...]
) -> None:
    first = PROMPT.first(num_tokens)
    assert (first.token_ids, first.cache_salt) == (PROMPT.token_ids[:num_tokens], b"salt")
    assert first.adapter == PROMPT.adapter
    assert first.media == images


def test_without_payload_it_is_the_same_beside_them() -> None:
    bare = PROMPT.without_payload()
    assert [image.payload for image in bare.media] == [b"", b""]
    assert [image.mark for image in bare.media] == [image.mark for image in PROMPT.media]
    assert replace(bare, media=PROMPT.media) == PROMPT
    assert (plain := Prompt((1,))).without_payload() is plain


@pytest.mark.parametrize(("excess", "too_long"), [((0, 0), ""), ((1, 0), "cache_salt"), ((0, 1), "adapter")])
def test_no_part_is_longer_than_the_router_makes_it(excess: tuple[int, int], too_long: str) -> None:
    salt, adapter = bytes(MAX_SALT_BYTES + excess[0]), bytes(ADAPTER_BYTES + excess[1])
    message = Decode(b"h" * 16, 1, Prompt((1,), salt, (), adapter), DecodingParams(), None)
    frame = ROUTER_TO_NODE.encode(message)
    if not too_long:
        assert ROUTER_TO_NODE.decode(frame) == message
        return
    with pytest.raises(InvalidMessage, match=too_long):
        ROUTER_TO_NODE.decode(frame)
