"""The images of requests: read in processes of their own, and put into prompts.

Owns how many bytes of files may wait to be read, and of how many bytes of pixels more images are refused. Pixels stay
at the router as long as a node may have to compute the prompt, or has not acknowledged the message with them
(`baton.wire.session`), and count as long as they exist. The processes (`baton.engine.models.vision.image_process`) are
a `ChildPool`. Nothing here holds up the event loop, and nothing of a client's is opened or fetched: images come in the
body of a request.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.engine.models.vision.facts import ImageFacts, NoImages, load_image_facts
from baton.engine.models.vision.limit import image_limit
from baton.router.http.child_pool import ChildPool
from baton.wire.errors import ChildFailed, InvalidRequest, Overloaded
from baton.wire.images import PromptImage, digest_of

MAX_AT_ONCE = 2
MAX_WAITING_BYTES = 2**28
"""Of the files of requests whose images are to be read."""
MAX_HELD_BYTES = 2**29
"""Of pixels; more are refused as too much load, like more files than may wait."""
UNSUPPORTED = "unsupported_parameter"
_MODULE = "baton.engine.models.vision.image_process"
_ANSWER_S = 30.0
_TOO_MUCH = "reading the images takes more time or memory than a request may have"
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
        self._facts = facts
        self._readers = ChildPool(
            _MODULE, str(folder), name="the process that reads images", max_at_once=MAX_AT_ONCE, answer_s=_ANSWER_S
        )
        self._waiting_bytes = 0
        self._lock = threading.Lock()
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

    def start(self) -> None:
        """Start the threads that wait for the processes, if it serves any."""
        if self._facts is not None:
            self._readers.start()

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
        self._waiting_bytes += num_bytes
        found = self._readers.run(self._read, list(texts), param)
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
            placed.append(PromptImage(len(ids), len(tokens), digest, image.pixels, image.height, image.width))
            ids += tokens
            self._hold(placed[-1])
        return ids, placed

    def close(self) -> None:
        """End the processes."""
        self._readers.close()

    def _hold(self, image: PromptImage) -> None:
        num_bytes = len(image.payload)
        self._count(num_bytes)
        weakref.finalize(image, self._count, -num_bytes).atexit = False

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes += num_bytes

    def _ended(self, num_bytes: int) -> None:
        self._waiting_bytes -= num_bytes

    def _read(self, texts: list[str], param: str) -> list[ReadImage]:
        """In a thread of the pool. Raises as `read`."""
        if self._held_bytes > MAX_HELD_BYTES:
            raise Overloaded("the images of other requests leave no room for more", retry_after_s=2)
        try:
            answer = self._readers.ask(texts)
        except ChildFailed:
            raise refused_images(param, _TOO_MUCH) from None
        if answer["error"]:
            raise refused_images(param, answer["error"])
        return [ReadImage(each["height"], each["width"], base64.b64decode(each["pixels"])) for each in answer["images"]]
