"""The images of requests: read in processes of their own, and put into prompts.

Owns these processes (`engine.models.vision.image_process`), which are started with the first image; one is replaced
when an image has ended it, and none is left after `close`. Owns how many bytes of pixels the requests in flight may
have together: they stay at the router as long as a node may have to compute the prompt, and no longer. Nothing here
holds up the event loop, and nothing of a client's is opened or fetched: images come in the body of a request.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import logging
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine.models.vision.facts import ImageFacts, NoImages, load_image_facts
from engine.models.vision.limit import image_limit
from program.child import NOTHING, PIPE, Child
from wire.errors import ChildFailed, InvalidRequest, Overloaded
from wire.images import PromptImage, digest_of

MAX_AT_ONCE = 2
MAX_WAITING_BYTES = 2**28
"""Of the files of requests whose images are to be read."""
MAX_HELD_BYTES = 2**29
"""Of pixels of requests in flight; more are refused as too much load, like more files than may wait."""
UNSUPPORTED = "unsupported_parameter"
_MODULE = "engine.models.vision.image_process"
_START_S = 60.0
_ANSWER_S = 30.0
_TOO_MUCH = "reading the images takes more time or memory than a request may have"
_CANNOT_START = "the router cannot start the process that reads images now"
_NO_PILLOW = "images need Pillow at the router: pip install 'baton-serve[images]'"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image after resizing. pixels: rows of red, green and blue, 8 bits each."""

    height: int
    width: int
    pixels: bytes


def refused_images(param: str, message: str, code: str | None = None) -> InvalidRequest:
    """The error of a request whose images, in the field `param`, are not served."""
    return InvalidRequest(f"{param}: {message}", param, code)


class Images:
    """What a router does with images of the model in `folder`. `limit`: of one request. `reason`: why it serves none,
    "" when it does. Used by one event loop."""

    def __init__(self, folder: Path, facts: ImageFacts | None, limit: int, reason: str = "") -> None:
        self.limit = limit
        self.reason = reason
        self._folder = folder
        self._facts = facts
        self._threads: ThreadPoolExecutor | None = None
        self._waiting_bytes = 0
        self._idle: list[Child] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._held_bytes = 0

    @classmethod
    def of_checkpoint(cls, folder: Path, setting: str) -> Images:
        """With the value of `--limit-mm-per-prompt`. Raises `InvalidSetting`, and `ModelLoadError` for files that
        cannot be read."""
        limit = image_limit(setting)
        try:
            facts = load_image_facts(folder)
        except NoImages as error:
            _log.info("%s", error)
            return cls(folder, None, 0, error.message)
        if facts is None:
            return cls(folder, None, 0, "this model sees no images: content may hold text only")
        if limit == 0:
            return cls(folder, None, 0, "images are not served here: see --limit-mm-per-prompt")
        if importlib.util.find_spec("PIL") is None:
            return cls(folder, None, 0, _NO_PILLOW)
        return cls(folder, facts, limit)

    async def read(self, texts: Sequence[str], param: str) -> list[ReadImage]:
        """The images whose files are `texts`, in base64; `param` is the field that they came in. Raises
        `InvalidRequest`, and `Overloaded` when others leave no room."""
        if self._facts is None:
            raise refused_images(param, self.reason, UNSUPPORTED)
        if len(texts) > self.limit:
            message = f"{len(texts)} images in one request; {self.limit} are allowed (see --limit-mm-per-prompt)"
            raise refused_images(param, message)
        num_bytes = sum(map(len, texts))
        if self._waiting_bytes and self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise Overloaded("too many images are being read", retry_after_s=2)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "images")
        self._waiting_bytes += num_bytes
        found = asyncio.get_running_loop().run_in_executor(self._threads, self._read, list(texts), param)
        found.add_done_callback(lambda _: self._ended(num_bytes))
        return await asyncio.shield(found)

    def placed(
        self, prompt_ids: Sequence[int], images: Sequence[ReadImage], param: str
    ) -> tuple[list[int], list[PromptImage]]:
        """A prompt in which each image's one token has become all of its tokens, and where these stand. Raises
        `InvalidRequest` for `param` when the prompt has not as many of that token as there are images."""
        facts = self._facts
        assert facts is not None  # there are images
        if prompt_ids.count(facts.token_id) != len(images):
            message = f"the chat template made {prompt_ids.count(facts.token_id)} places for {len(images)} images"
            raise refused_images(param, f"{message}; a text must not hold the token of an image itself")
        ids: list[int] = []
        placed: list[PromptImage] = []
        for token_id in prompt_ids:
            if token_id != facts.token_id:
                ids.append(token_id)
                continue
            image = images[len(placed)]
            tokens = facts.token_ids(image.height, image.width)
            digest = digest_of(image.height, image.width, image.pixels)
            placed.append(PromptImage(len(ids), len(tokens), image.height, image.width, digest, image.pixels))
            ids += tokens
            self._hold(placed[-1])
        return ids, placed

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            children, self._idle = self._idle, []
        for child in children:
            child.end()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _hold(self, image: PromptImage) -> None:
        num_bytes = len(image.pixels)
        self._count(num_bytes)
        weakref.finalize(image, self._count, -num_bytes).atexit = False

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes += num_bytes

    def _ended(self, num_bytes: int) -> None:
        self._waiting_bytes -= num_bytes

    def _read(self, texts: list[str], param: str) -> list[ReadImage]:
        """In a thread, in which the process that it starts lives on. Raises as `read`."""
        if self._held_bytes > MAX_HELD_BYTES:
            raise Overloaded("the images of other requests leave no room for more", retry_after_s=2)
        child = self._asked(json.dumps(texts).encode() + b"\n")
        try:
            answer = json.loads(child.read_line(_ANSWER_S))
        except ChildFailed:
            child.end()
            raise refused_images(param, _TOO_MUCH) from None
        self._give_back(child, is_last=answer["is_last"])
        if answer["error"]:
            raise refused_images(param, answer["error"])
        return [ReadImage(each["height"], each["width"], base64.b64decode(each["pixels"])) for each in answer["images"]]

    def _asked(self, question: bytes) -> Child:
        """A process that has been asked: an idle one, or when those have died a new one. Raises `Overloaded`."""
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            is_new = child is None
            child = child or self._start()
            try:
                child.write(question, _ANSWER_S)
            except ChildFailed:
                child.end()
                if is_new:
                    raise Overloaded(_CANNOT_START, retry_after_s=2) from None
            else:
                return child

    def _start(self) -> Child:
        try:
            child = Child(_MODULE, str(self._folder), stdin=PIPE, stdout=PIPE, stderr=NOTHING)
        except OSError as error:
            _log.warning("%s: %s", _CANNOT_START, error.strerror)
            raise Overloaded(_CANNOT_START, retry_after_s=2) from None
        try:
            child.read_line(_START_S)
        except ChildFailed as error:
            child.end()
            _log.warning("%s: %s", _CANNOT_START, error.message)
            raise Overloaded(_CANNOT_START, retry_after_s=2) from None
        return child

    def _give_back(self, child: Child, *, is_last: bool) -> None:
        with self._lock:
            if not (self._is_closed or is_last):
                self._idle.append(child)
                return
        child.end()
