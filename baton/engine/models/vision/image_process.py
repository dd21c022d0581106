"""Decodes and resizes the images of clients: a process of its own, which the kernel limits.

Reads one JSON line for each request from its standard input, the list of its images as base64, and answers each with a
JSON line: `images`, with height, width and pixels in base64, or `error`. The first line of its output says that it is
ready. An image that takes too much time or memory, or breaks a decoder, ends this
process and nothing else; it has no sockets, and its files are those of the checkpoint. It ends with its input, and
after an answer that says `is_last`, when much memory was left in use.

    python -m baton.engine.models.vision.image_process CHECKPOINT
"""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import sys
from pathlib import Path

from baton.engine.models.vision.decoding import decode
from baton.engine.models.vision.facts import ImageFacts, load_image_facts
from baton.wire.errors import BatonError
from baton.wire.media import MAX_PAYLOAD_BYTES

CPU_S = 10.0
MEMORY_BYTES = 2**30
_KEPT_BYTES = 2**28


def main() -> int:
    """Answer one line of requests after another until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    facts = load_image_facts(Path(sys.argv[1]))
    assert facts is not None  # the router has read the same files
    _answer()
    size = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin:
        # processor time, so that a busy machine refuses no image; the signal's default action ends the process
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        found = _decoded(facts, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = _address_space() - size > _KEPT_BYTES
        _answer(**found, is_last=is_last)
        if is_last:
            break
    return 0


def _decoded(facts: ImageFacts, line: str) -> dict[str, object]:
    images: list[dict[str, object]] = []
    num_bytes = 0
    try:
        for text in json.loads(line):
            found = decode(text, facts)
            num_bytes += len(found.pixels)
            if num_bytes > MAX_PAYLOAD_BYTES:
                return {"error": f"the images have more than {MAX_PAYLOAD_BYTES // 3} pixels together, after resizing"}
            pixels = base64.b64encode(found.pixels).decode()
            images.append({"height": found.height, "width": found.width, "pixels": pixels})
    except BatonError as error:
        return {"error": error.message}
    except Exception as error:  # the outer edge: a decoder may raise anything
        return {"error": f"an image cannot be decoded ({type(error).__name__})"}
    return {"error": "", "images": images}


def _answer(error: object = "", images: object = (), is_last: bool = False) -> None:
    sys.stdout.write(json.dumps({"error": error, "images": images, "is_last": is_last}) + "\n")
    sys.stdout.flush()


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
