"""The page over a deployment of the demo model: its size, its key, answers that stream, requests on their legs, and a
router that comes back."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import psutil

from tests.page.browser import ENTER, Browser, until
from tests.page.look_checks import Look
from tests.page.programs import busy, child_of, slowed

MAX_PAGE_BYTES = 160_000
QUESTIONS = ("Where does the river go?", "Tell me a story about a small boat.")
NUM_TURNS, BLOCK_SIZE = 10, 16
_PROMPT = re.compile(r"prompt of (\d+): (.*) computed")
_CACHED = re.compile(r"(\d+) from ")
LEGS = {"queued", "prefill", "transfer", "decode"}
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
_HAS_BARS = "return document.querySelectorAll('.message.assistant > .turn-bar').length > arguments[0]"


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
    browser.type("#prompt", question + ENTER)
    until("an answer", lambda: browser.run(_HAS_BARS, number))
    growths, legs = browser.run("return [window.growths, [...window.legs]]")
    error = browser.run("const e = [...document.querySelectorAll('.error')].pop(); return e && e.textContent")
    assert error is None, error
    assert growths > 3, f"the answer did not stream: it grew {growths} times"
    return set(legs) & LEGS


def check_turns(browser: Browser, look: Look) -> None:
    """A chat of ten turns: below each answer is where its prompt came from, and it is what the turns before left."""
    for number in range(NUM_TURNS - 1):
        check_answer(browser, f"And then, for the {number + 2}. time?")
    notes = browser.run("return [...document.querySelectorAll('.message.assistant .turn-bar')].map(e => e.innerText)")
    found = [_PROMPT.search(note) for note in notes]
    assert len(found) == NUM_TURNS, notes
    for before, now in pairwise(found):
        assert before, notes
        assert now, notes
        assert sum(map(int, _CACHED.findall(now[2]))) >= int(before[1]) // BLOCK_SIZE * BLOCK_SIZE, notes
    nodes = browser.run("return document.querySelector('#nodes').innerText")
    assert "host 0 %" in nodes
    assert re.search(r"drafts: \d\.\d a step, \d+ %", nodes), nodes
    look.at(browser, "turns")


def check_key(browser: Browser, key: str, look: Look) -> None:
    """The page asks for the key that this router wants, and keeps it in the tab."""
    browser.wait("the question for a key", "return document.querySelector('#key-dialog').open")
    found = look.findings(browser)
    assert not found, json.dumps(found, indent=2)
    browser.type("#key", "a wrong key" + ENTER)
    wrong = "return document.querySelector('#key-dialog').open && document.querySelector('#key-note').textContent"
    browser.wait("the key to be refused", f"return ((() => {{{wrong}}})() || '').includes('not valid')")
    browser.type("#key", key + ENTER)
    browser.wait("the stream", "return document.querySelector('#link').dataset.state === 'live'")
    errors = [entry["message"] for entry in browser.log() if entry["level"] == "SEVERE"]
    assert all("401" in message for message in errors), errors  # the browser itself logs refused requests


def check_restart(browser: Browser, supervisor: psutil.Process) -> None:
    """End the router by its process id; the page has to say so, and to find the next one by itself."""
    child_of(supervisor, "baton.router").kill()
    browser.wait("a mark that the router is gone", "return document.querySelector('#link').dataset.state === 'lost'")
    assert browser.run("return document.querySelector('#relay').classList.contains('old')")
    browser.wait(
        "the router's next life",
        "return document.querySelector('#link').dataset.state === 'live' && "
        "[...document.querySelectorAll('#nodes td:nth-child(2)')].map(e => e.textContent).join() === 'prefill,decode'",
    )


def check_relay(browser: Browser, url: str, supervisor: psutil.Process, key: str, look: Look) -> str:
    """All checks, in order; what was seen. Raises `AssertionError`."""
    browser.open(url)
    browser.log()  # of other pages, and that there was no key
    check_key(browser, key, look)
    browser.wait("both nodes", "return document.querySelectorAll('#nodes tr').length === 2")
    browser.wait("the models", "return document.querySelectorAll('#model option').length === 1")
    size = check_size(browser)
    assert 0 < size < MAX_PAGE_BYTES, size
    model = browser.run("return document.querySelector('#model').value")
    check_answer(browser, QUESTIONS[0])
    check_turns(browser, look)
    with slowed(child_of(supervisor, "baton.decode_node")), busy(url, model, key):
        browser.run(_OBSERVE)
        browser.wait("a request on its legs", "return window.legs.has('prefill') && window.legs.has('decode')")
        legs = set(check_answer(browser, QUESTIONS[1])) | set(browser.run("return [...window.legs]"))
        look.at(browser, "busy")
    errors = [entry for entry in browser.log() if entry["level"] == "SEVERE"]
    assert not errors, errors
    check_restart(browser, supervisor)
    check_answer(browser, QUESTIONS[0])
    browser.log()  # a refused connection is logged by the browser itself
    return f"the page has {size:,} bytes; requests were seen on: {', '.join(sorted(legs & LEGS))}"
