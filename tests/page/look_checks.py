"""How the page looks: what can be hidden, a telephone, both colour schemes, what axe-core says of it, and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.page.browser import Browser
from tests.page.chats import ChatPage

_IS_SEEN = "return document.querySelector(arguments[0]).getClientRects().length > 0"
_WIDE, _NARROW = (1360, 860), (390, 844)
_SAMPLE = """## A table and some code

Each **leg** of a request has a node of its own:

| Leg | Node | Time |
|:----|:-----|-----:|
| prefill | `prefill-0` | 12 ms |
| decode | `decode-0` | 840 ms |

```python
def relay(prompt: str) -> Iterator[str]:
    kv = prefill(prompt)
    yield from decode(kv)
```

1. The prompt is computed once.
2. Its KV is handed over, see [the protocol](https://example.org).

> A baton is passed on, not copied."""


@dataclass(frozen=True, slots=True)
class Look:
    """`axe`: the source of axe-core, "" where it was not given. `pictures`: a folder, None for none."""

    axe: str
    pictures: Path | None

    def at(self, browser: Browser, name: str) -> None:
        """Look at the page as it is now, in both colour schemes. Raises `AssertionError`."""
        for scheme in ("dark", "light"):
            browser.choose_scheme(scheme)
            found = self.findings(browser)
            assert not found, f"{name}, {scheme}: {json.dumps(found, indent=2)}"
            if self.pictures is not None:
                (self.pictures / f"{name}-{scheme}.png").write_bytes(browser.picture())

    def findings(self, browser: Browser) -> list[dict[str, Any]]:
        """What axe-core finds that is serious or critical."""
        if not self.axe:
            return []
        browser.run(self.axe + "; window.axe = axe || window.axe;")
        results = browser.run_async("const done = arguments[0]; axe.run(document).then(r => done(r.violations))")
        return [
            {"id": each["id"], "impact": each["impact"], "nodes": [node["html"][:120] for node in each["nodes"]][:4]}
            for each in results
            if each["impact"] in ("serious", "critical")
        ]


def is_seen(browser: Browser, selector: str) -> bool:
    """Whether an element is shown."""
    return bool(browser.run(_IS_SEEN, selector))


def check_hiding(page: ChatPage) -> None:
    """The view of the relay can be hidden and stays so over a reload; the chat gets its room."""
    browser = page.browser
    width = "return document.querySelector('#chat').clientWidth"
    before = browser.run(width)
    assert is_seen(browser, "#relay")
    browser.click("#show-relay")
    page.open()
    assert not is_seen(browser, "#relay")
    assert browser.run(width) > 1.5 * before
    assert browser.run("return document.querySelector('#show-relay').ariaExpanded") == "false"
    browser.click("#show-relay")
    page.open()
    assert is_seen(browser, "#relay")


def check_narrow(page: ChatPage, look: Look) -> None:
    """On a telephone there is one part at a time, and nothing is cut off at the side."""
    browser = page.browser
    browser.be_wide(*_NARROW)
    browser.wait(
        "the chat alone", "return !document.querySelector('#chat').hidden && document.querySelector('#relay').hidden"
    )
    _not_cut_off(browser, look, "phone-chat")
    for part in ("relay", "chats"):
        browser.click(f"#show-{part}")
        assert is_seen(browser, f"#{part}")
        assert not is_seen(browser, "#chat")
        _not_cut_off(browser, look, f"phone-{part}")
    browser.click("#show-chats")
    browser.run("document.querySelector('.settings').open = true")
    _not_cut_off(browser, look, "phone-settings")
    browser.run("document.querySelector('.settings').open = false")
    browser.be_wide(*_WIDE)


def _not_cut_off(browser: Browser, look: Look, name: str) -> None:
    widths = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], (name, widths)
    look.at(browser, name)


def check_looks(page: ChatPage, look: Look) -> None:
    """The page in each of its states."""
    browser = page.browser
    browser.be_wide(*_WIDE)
    page.ask("How does a relay work?")
    look.at(browser, "short")
    page.ask(_SAMPLE)
    browser.run("document.querySelector('#log').scrollTop = 1e9")
    look.at(browser, "markdown")
    browser.click("#show-relay")
    for prepare, name in _states(page):
        prepare()
        look.at(browser, name)
    browser.click("#confirm-no")
    browser.click("#show-relay")
    check_narrow(page, look)


def _states(page: ChatPage) -> list[tuple[Callable[[], object], str]]:
    browser = page.browser
    return [
        (lambda: page.ask("fail here"), "error"),
        (lambda: page.press("Edit", "user", 0), "edit"),
        (lambda: page.in_last("document.querySelector('.reasoning').open = true"), "thoughts"),
        (lambda: browser.run("document.querySelector('#chat-list [aria-label^=Delete]').click()"), "confirm"),
    ]
