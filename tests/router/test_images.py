"""The process that reads images at the router: what ends it, and what is left."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import router.images
from router.images import Images
from tests.engine.models.image_files import TOKEN_ID, as_file, picture, write_image_facts
from wire.errors import InvalidRequest, Overloaded

_PICTURE = as_file(picture(100, 60))


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture
async def images(tmp_path: Path) -> AsyncIterator[Images]:
    """At most two a request."""
    write_image_facts(tmp_path)
    found = Images.of_checkpoint(tmp_path, "image=2")
    yield found
    found.close()


def _child_of(images: Images) -> int:
    """The process that has read last."""
    (child,) = images._idle
    return child.pid


async def test_what_ends_the_process_is_refused_and_the_next_request_has_another(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = await images.read([_text(_PICTURE)])
    assert (found.height, found.width, len(found.pixels)) == (56, 112, 56 * 112 * 3)
    first = _child_of(images)
    assert [each.width for each in await images.read([_text(_PICTURE)] * 2)] == [112, 112]
    assert _child_of(images) == first
    # it died while nobody asked: nobody hears of it
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert await images.read([_text(_PICTURE)]) == [found]
    second = _child_of(images)
    assert second != first
    # it does not answer: the request is refused after the time of an answer, and nothing of the process is left
    monkeypatch.setattr(router.images, "_ANSWER_S", 0.05)
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="more time or memory"):
        await images.read([_text(_PICTURE)])
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    monkeypatch.undo()
    # an image that is none ends nothing
    assert await images.read([_text(_PICTURE)]) == [found]
    third = _child_of(images)
    with pytest.raises(InvalidRequest, match="none of PNG"):
        await images.read([_text(b"no image")])
    assert _child_of(images) == third
    images.close()
    with pytest.raises(ProcessLookupError):
        os.kill(third, 0)


async def test_pixels_of_requests_in_flight_are_counted_and_bounded(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = await images.read([_text(_PICTURE)])
    ids, placed = images.placed([1, TOKEN_ID, 2], read)
    assert ids == [1, *[TOKEN_ID] * 8, 2]
    assert (placed[0].start, placed[0].stop) == (1, 9)
    monkeypatch.setattr(router.images, "MAX_HELD_BYTES", 56 * 112 * 3 - 1)
    with pytest.raises(Overloaded, match="leave no room"):
        await images.read([_text(_PICTURE)])
    del placed
    gc.collect()
    assert await images.read([_text(_PICTURE)]) == read


async def test_more_images_than_allowed_or_than_wait_are_refused(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="3 images in one request; 2 are allowed"):
        await images.read([_text(_PICTURE)] * 3)
    with pytest.raises(InvalidRequest, match="0 places for 1 images"):
        images.placed([1, 2], await images.read([_text(_PICTURE)]))
    monkeypatch.setattr(router.images, "MAX_WAITING", 0)
    with pytest.raises(Overloaded, match="too many images"):
        await images.read([_text(_PICTURE)])


@pytest.mark.parametrize(
    ("changes", "setting", "reason"),
    [
        ({"vision_config": None}, "image=4", "sees no images"),
        ({}, "image=0", "--limit-mm-per-prompt"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "image=4", "not served for Gemma3For"),
    ],
)
async def test_a_model_that_is_shown_no_images_says_why(
    tmp_path: Path, changes: dict[str, object], setting: str, reason: str
) -> None:
    write_image_facts(tmp_path, **changes)
    found = Images.of_checkpoint(tmp_path, setting)
    assert found.limit == 0
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await found.read([_text(_PICTURE)])
    assert caught.value.param == "messages"
