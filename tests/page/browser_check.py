"""`python -m tests.page.browser_check --axe axe.min.js --pictures FOLDER`: looks at the page with a real browser.

Run by hand; it needs `chromium` and `chromedriver` (Debian: `apt-get install chromium chromium-driver`). It starts a
deployment of the demo model and a browser, speaks WebDriver to it, and checks that the page loads small and whole, asks
for a key, streams an answer, shows a request on its legs, finds its router again after a restart, logs no error, and
that axe-core (`npm pack axe-core`) finds nothing serious. `--pictures` keeps a screenshot of each colour scheme.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from router.access.keys import KEY_VARIABLE
from tests.free_port import free_port

_KEY = secrets.token_hex(16)
PATIENCE_S = 90.0
MAX_PAGE_BYTES = 100_000
QUESTIONS = ("Where does the river go?", "Tell me a story about a small boat.")
LEGS = {"queued", "prefill", "transfer", "decode"}
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1360,860", "--hide-scrollbars")
_OBSERVE = """
window.growths = 0; window.legs = new Set();
const note = () => document.querySelectorAll('#requests .leg').forEach(e => window.legs.add(e.textContent));
if (!window.observed) {
  const everything = {characterData: true, childList: true, subtree: true};
  new MutationObserver(found => window.growths += found.length).observe(document.querySelector('#log'), everything);
  new MutationObserver(note).observe(document.querySelector('#requests'), {...everything, attributes: true});
}
window.observed = true;
"""
_HAS_BARS = "return document.querySelectorAll('.message.assistant > .bar').length > arguments[0]"
_ENTER = "\ue007"


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
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"{self._session}/element/{next(iter(found.values()))}/value", {"text": text})

    def choose_scheme(self, scheme: str) -> None:
        """ "light" or "dark", as `prefers-color-scheme` says it."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def be_wide(self, width: int, height: int) -> None:
        """Be a screen of this size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask(
            "POST",
            f"{self._session}/goog/cdp/execute",
            {"cmd": "Emulation.setDeviceMetricsOverride", "params": size},
        )

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
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended by its process id."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, KEY_VARIABLE: _KEY})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


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


def is_ready(url: str) -> bool:
    """Whether the router would take a request."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def check_size(browser: Browser) -> int:
    """The bytes that the page has loaded, all of them from its own origin."""
    found = browser.run(
        "return performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
        ".map(e => [e.name, e.decodedBodySize])"
    )
    origin = browser.run("return location.origin")
    assert all(name.startswith(origin) for name, _ in found), found
    return sum(size for name, size in found if "/page/events" not in name and "/v1/" not in name)


def check_answer(browser: Browser, question: str) -> set[str]:
    """Ask, and return the legs that were seen until the answer was complete."""
    number = browser.run("return document.querySelectorAll('.message.assistant').length")
    browser.run(_OBSERVE)
    browser.type("#prompt", question + _ENTER)
    until("an answer", lambda: browser.run(_HAS_BARS, number))
    growths, legs = browser.run("return [window.growths, [...window.legs]]")
    error = browser.run("const e = [...document.querySelectorAll('.error')].pop(); return e && e.textContent")
    assert error is None, error
    assert growths > 3, f"the answer did not stream: it grew {growths} times"
    return set(legs) & LEGS


def check_key(browser: Browser, axe: str) -> None:
    """The page asks for the key that this router wants, and keeps it in the tab."""
    browser.wait("the question for a key", "return document.querySelector('#key-dialog').open")
    found = check_axe(browser, axe) if axe else []
    assert not found, json.dumps(found, indent=2)
    browser.type("#key", "a wrong key" + _ENTER)
    wrong = "return document.querySelector('#key-dialog').open && document.querySelector('#key-note').textContent"
    browser.wait("the key to be refused", f"return ((() => {{{wrong}}})() || '').includes('not valid')")
    browser.type("#key", _KEY + _ENTER)
    browser.wait("the stream", "return document.querySelector('#link').dataset.state === 'live'")
    errors = [entry["message"] for entry in browser.log() if entry["level"] == "SEVERE"]
    assert all("401" in message for message in errors), errors  # the browser itself logs refused requests


def check_axe(browser: Browser, source: str) -> list[dict[str, Any]]:
    """What axe-core finds that is serious or critical."""
    browser.run(source + "; window.axe = axe || window.axe;")
    results = browser.run_async("const done = arguments[0]; axe.run(document).then(r => done(r.violations))")
    return [
        {"id": each["id"], "impact": each["impact"], "nodes": [node["html"][:120] for node in each["nodes"]][:4]}
        for each in results
        if each["impact"] in ("serious", "critical")
    ]


def child_of(supervisor: psutil.Process, module: str) -> psutil.Process:
    """The process of the deployment that runs this program."""
    return next(child for child in supervisor.children(recursive=True) if module in child.cmdline())


def check_restart(browser: Browser, supervisor: psutil.Process) -> None:
    """End the router by its process id; the page has to say so, and to find the next one by itself."""
    child_of(supervisor, "router").kill()
    browser.wait("a mark that the router is gone", "return document.querySelector('#link').dataset.state === 'lost'")
    assert browser.run("return document.querySelector('#relay').classList.contains('old')")
    browser.wait(
        "the router's next life",
        "return document.querySelector('#link').dataset.state === 'live' && "
        "[...document.querySelectorAll('#nodes td:nth-child(2)')].map(e => e.textContent).join() === 'prefill,decode'",
    )


@contextmanager
def busy(url: str, model: str) -> Iterator[None]:
    """A few other clients, one answer after the other: the demo model answers a question faster than an eye can see."""
    is_over = threading.Event()

    def post(data: bytes) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
        request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            answer.read()

    def ask(number: int) -> None:
        while not is_over.is_set():
            prompt = f"{number} {time.monotonic()} " + "The river goes to the sea. " * (20 + 40 * number)
            body = {"model": model, "prompt": prompt, "max_tokens": 40 + 30 * number, "ignore_eos": True}
            post(json.dumps(body).encode())

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


@contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Let a process run for a small part of the time, as if its model were large."""
    is_over = threading.Event()

    def pace() -> None:
        while not is_over.wait(0.004):
            process.suspend()
            is_over.wait(0.05)
            process.resume()

    pacer = threading.Thread(target=pace)
    pacer.start()
    try:
        yield
    finally:
        is_over.set()
        pacer.join()


def keep_picture(browser: Browser, folder: Path, scheme: str) -> None:
    """A picture of the page while an answer streams."""
    browser.choose_scheme(scheme)

    def is_streaming() -> bool:
        """A short answer may be over before anybody looks: then the question is asked again."""
        length = browser.run(
            "const last = document.querySelector('.message.running');"
            "return last ? last.querySelector('.text').textContent.length : null"
        )
        if length is None:
            browser.type("#prompt", QUESTIONS[1] + _ENTER)
        return length is not None and length > 60

    until("an answer that streams", is_streaming)
    (folder / f"page-{scheme}.png").write_bytes(browser.picture())
    browser.wait("its end", "return !document.querySelector('.message.running')")


def check_narrow(browser: Browser, axe: str, pictures: Path | None) -> None:
    """On a telephone, with the settings open: nothing is cut off at the side."""
    browser.be_wide(390, 1900)
    browser.run("document.querySelector('.settings').open = true")
    widths = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], widths
    found = check_axe(browser, axe) if axe else []
    assert not found, json.dumps(found, indent=2)
    if pictures is not None:
        (pictures / "page-narrow.png").write_bytes(browser.picture())
    browser.be_wide(1360, 860)


def check(browser: Browser, url: str, supervisor: psutil.Process, axe: str, pictures: Path | None) -> None:
    """All checks, in order. Raises `AssertionError`."""
    browser.open(url)
    check_key(browser, axe)
    browser.wait("both nodes", "return document.querySelectorAll('#nodes tr').length === 2")
    browser.wait("the models", "return document.querySelectorAll('#model option').length === 1")
    size = check_size(browser)
    assert 0 < size < MAX_PAGE_BYTES, size
    model = browser.run("return document.querySelector('#model').value")
    check_answer(browser, QUESTIONS[0])
    with slowed(child_of(supervisor, "decode_node")), busy(url, model):
        browser.run(_OBSERVE)
        browser.wait("a request on its legs", "return window.legs.has('prefill') && window.legs.has('decode')")
        legs = set(check_answer(browser, QUESTIONS[1])) | set(browser.run("return [...window.legs]"))
        _say(f"the page has {size:,} bytes; answers streamed; requests were seen on: {', '.join(sorted(legs & LEGS))}")
        for scheme in ("light", "dark"):
            if pictures is not None:
                keep_picture(browser, pictures, scheme)
            browser.choose_scheme(scheme)
            found = check_axe(browser, axe) if axe else []
            assert not found, json.dumps(found, indent=2)
        check_narrow(browser, axe, pictures)
    _say("axe-core finds nothing serious in either colour scheme" if axe else "axe-core was not given")
    errors = [entry for entry in browser.log() if entry["level"] == "SEVERE"]
    assert not errors, errors
    check_restart(browser, supervisor)
    check_answer(browser, QUESTIONS[0])
    browser.log()  # a refused connection is logged by the browser itself
    _say("no error in the console; the page found the restarted router, and an answer streamed again")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run everything; the exit status."""
    parser = argparse.ArgumentParser(description="Check the page with a real browser.")
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core")
    parser.add_argument("--model", default="", help="a checkpoint instead of the demo model, whose answers take 0.1 s")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    flags = parser.parse_args()
    axe = "" if flags.axe is None else flags.axe.read_text()
    if flags.pictures is not None:
        flags.pictures.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "baton", "serve", *([flags.model] if flags.model else []), "--port", str(port)]
    with (
        running(command) as serve,
        browsing() as browser,
    ):
        until("the deployment", lambda: is_ready(url))
        check(browser, url, psutil.Process(serve.pid), axe, flags.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
