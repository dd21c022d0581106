"""`python -m tests.page.film docs/pictures/relay.webp`: a moving picture of the page while it answers.

Run by hand; it needs `chromium` and `chromedriver` as `tests.page.browser_check` does. It starts a deployment of the
demo model, whose decode node gets a part of the time only, as if the model were large. It asks for a story while a few
other clients are served, and takes pictures until the answer has ended.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
from PIL import Image

from tests.free_port import free_port
from tests.page.browser import Browser, browsing, until
from tests.page.chats import ChatPage
from tests.page.programs import busy, child_of, is_ready, running, slowed

QUESTION = "Tell me a short story about a fox."
MODEL = "baton-demo"
EVERY_S, LAST_S, STOPPED_S = 0.125, 3.0, 0.15
SIZE = (1200, 720)
SHOWN = (900, 540)


def filmed(browser: Browser, url: str) -> Iterator[tuple[float, Image.Image]]:
    """The page from the question to the end of the answer, each picture with its moment in seconds."""
    page = ChatPage(browser, url)
    browser.be_wide(*SIZE)
    page.open()
    browser.wait("both nodes", "return document.querySelectorAll('#nodes tr').length === 2")
    browser.wait("others", "return document.querySelectorAll('#requests tr').length >= 4")
    page.send(QUESTION)
    browser.wait("an answer", "return document.querySelector('.message.running') !== null")
    is_running = True
    while is_running:
        begun_s = time.monotonic()
        is_running = bool(browser.run("return document.querySelector('.message.running') !== null"))
        picture = Image.open(io.BytesIO(browser.picture())).convert("RGB")
        yield begun_s, picture.resize(SHOWN, Image.Resampling.LANCZOS)
        time.sleep(max(0.0, begun_s + EVERY_S - time.monotonic()))


def main() -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.page.film", description=__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "baton", "serve", "--prefill=1", "--port", str(port), "--local-prefill-tokens=0"]
    with running(command) as server, browsing() as browser:
        until("a relay", lambda: is_ready(url))
        decode = child_of(psutil.Process(server.pid), "baton.decode_node")
        with busy(url, MODEL, ""), slowed(decode, STOPPED_S):
            moments_s, pictures = zip(*filmed(browser, url), strict=True)
    shown_s = [*(after - before for before, after in pairwise(moments_s)), LAST_S]
    options = {"save_all": True, "append_images": pictures[1:], "loop": 0, "quality": 60, "method": 4}
    pictures[0].save(file, duration=[round(1000 * each) for each in shown_s], **options)
    sys.stdout.write(f"{file}: {len(pictures)} pictures, {file.stat().st_size / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
