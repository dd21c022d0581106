"""The process that reads images at the router: what ends it, and what is left."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import baton.router.http.images
from baton.router.http.images import Images
from baton.wire.errors import InvalidRequest, Overloaded
from baton.wire.messages.legs import Prefill
from baton.wire.messages.vocabulary import ROUTER_TO_NODE
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from baton.wire.session import Session
from tests.engine.models.image_files import TOKEN_ID, as_file, picture, write_image_facts

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
    (child,) = images._readers._idle
    return child.pid


async def test_what_ends_the_process_is_refused_and_the_next_request_has_another(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = await images.read([_text(_PICTURE)], "messages")
    assert (found.height, found.width, len(found.pixels)) == (56, 112, 56 * 112 * 3)
    first = _child_of(images)
    assert [each.width for each in await images.read([_text(_PICTURE)] * 2, "messages")] == [112, 112]
    # an image that is none ends nothing
    with pytest.raises(InvalidRequest, match="none of PNG"):
        await images.read([_text(b"no image")], "messages")
    assert _child_of(images) == first
    # the process does not answer in time: the request is refused
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(images._readers, "_answer_s", 0.05)
    with pytest.raises(InvalidRequest, match="more time or memory"):
        await images.read([_text(_PICTURE)], "messages")
    monkeypatch.undo()
    assert await images.read([_text(_PICTURE)], "messages") == [found]
    assert _child_of(images) != first


_LIMITED = """
import sys
from baton.engine.models.vision import image_process
def decode(text, facts):
    if text == "memory":
        bytearray(2**31)
    while text == "time":
        pass
    raise ValueError(text)
image_process.decode, image_process.CPU_S = decode, 0.1
sys.argv[1] = {folder!r}
image_process.main()
"""


def test_the_process_limits_its_own_memory_and_time(tmp_path: Path) -> None:
    write_image_facts(tmp_path)
    program = [sys.executable, "-c", _LIMITED.replace("{folder!r}", repr(str(tmp_path))), ""]
    asked = "".join(f"{json.dumps([text])}\n" for text in ("memory", "file", "time", "never read"))
    ended = subprocess.run(program, input=asked, capture_output=True, text=True, timeout=60, check=False)
    errors = [json.loads(line)["error"] for line in ended.stdout.splitlines()]
    assert errors == ["", "an image cannot be decoded (MemoryError)", "an image cannot be decoded (ValueError)"]
    assert ended.returncode == -signal.SIGPROF


async def test_pixels_of_requests_in_flight_are_counted_and_bounded(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = await images.read([_text(_PICTURE)], "messages")
    ids, placed = images.placed([1, TOKEN_ID, 2], read, "messages")
    assert ids == [1, *[TOKEN_ID] * 8, 2]
    assert (placed[0].start, placed[0].stop) == (1, 9)
    monkeypatch.setattr(baton.router.http.images, "MAX_HELD_BYTES", 56 * 112 * 3 - 1)
    with pytest.raises(Overloaded, match="leave no room"):
        await images.read([_text(_PICTURE)], "messages")
    # its request is over, and a node has not acknowledged the prompt: the pixels are still there, wherever that is
    session = Session(2**33, ROUTER_TO_NODE)
    session.frames(Prefill(b"h" * 16, 1, Prompt.of(ids, media=placed), DecodingParams(), "decode-1", 8))
    del placed
    gc.collect()
    with pytest.raises(Overloaded, match="leave no room"):
        await images.read([_text(_PICTURE)], "messages")
    session.acknowledge(session.sent)
    gc.collect()
    assert await images.read([_text(_PICTURE)], "messages") == read


async def test_more_images_than_allowed_or_than_wait_are_refused(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="3 images in one request; 2 are allowed"):
        await images.read([_text(_PICTURE)] * 3, "messages")
    with pytest.raises(InvalidRequest, match="0 places for 1 images"):
        images.placed([1, 2], await images.read([_text(_PICTURE)], "messages"), "messages")
    monkeypatch.setattr(baton.router.http.images, "MAX_WAITING_BYTES", 2 * len(_text(_PICTURE)))
    waiting = [asyncio.ensure_future(images.read([_text(_PICTURE)], "messages")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many images"):
        await images.read([_text(_PICTURE)], "messages")
    assert len(await asyncio.gather(*waiting)) == 2


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
        await found.read([_text(_PICTURE)], "messages")
    assert caught.value.param == "messages"
