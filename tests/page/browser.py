"""A headless Chromium, spoken to by WebDriver.

It needs `chromium` and `chromedriver` (Debian: `apt-get install chromium chromium-driver`). Knows nothing of the page.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.free_port import free_port
from tests.page.programs import running

PATIENCE_S = 60.0
ENTER, ESCAPE = "\ue007", "\ue00c"
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1360,860", "--hide-scrollbars")


class Browser:
    """One session of a headless Chromium."""

    def __init__(self, driver: str, profile: str) -> None:
        self._driver = driver
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        options = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = (
            f"/session/{self._ask('POST', '/session', {'capabilities': {'alwaysMatch': options}})['sessionId']}"
        )

    def open(self, url: str) -> None:
        """Load a page."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def run_async(self, script: str) -> Any:
        """What a script gives to its last argument, a function."""
        return self._ask("POST", f"{self._session}/execute/async", {"script": script, "args": []})

    def type(self, selector: str, text: str) -> None:
        """Press keys in an element."""
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Press the first element with the mouse, which needs it to be seen."""
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def choose_scheme(self, scheme: str) -> None:
        """ "light" or "dark", as `prefers-color-scheme` says it."""
        self._tell("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def be_wide(self, width: int, height: int) -> None:
        """Be a screen of this size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._tell("Emulation.setDeviceMetricsOverride", size)

    def be_connected(self, is_connected: bool) -> None:
        """Reach the network, or nothing of it."""
        conditions = {"offline": not is_connected, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._tell("Network.enable", {})
        self._tell("Network.emulateNetworkConditions", conditions)

    def before_each_page(self, script: str) -> Callable[[], None]:
        """Run a script in each page before its own; what is returned ends that."""
        added = self._tell("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        return lambda: self._tell("Page.removeScriptToEvaluateOnNewDocument", added)

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def log(self) -> list[dict[str, Any]]:
        """What the console has said since the last call."""
        entries: list[dict[str, Any]] = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return entries

    def close(self) -> None:
        """End the session."""
        self._ask("DELETE", self._session)

    def wait(self, what: str, script: str, within_s: float = PATIENCE_S) -> Any:
        """What a script returns as soon as it is true. Raises `AssertionError`."""
        return until(what, lambda: self.run(script), within_s)

    def _find(self, selector: str) -> str:
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def _tell(self, command: str, parameters: object) -> Any:
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)["value"]


def until(what: str, ask: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """The first true answer. Raises `AssertionError`."""
    deadline_s = time.monotonic() + within_s
    while not (answer := ask()):
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.05)
    return answer


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser and its driver."""
    program = shutil.which("chromedriver")
    assert program is not None, "chromedriver is not installed"
    port = free_port()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,  # a browser that ends still writes there
        running([program, f"--port={port}", "--log-level=SEVERE"]),
    ):
        browser = until("chromedriver", lambda: _try(lambda: Browser(f"http://127.0.0.1:{port}", profile)))
        try:
            yield browser
        finally:
            browser.close()


def _try(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except OSError:
        return None
