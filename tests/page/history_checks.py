"""Chats are kept in the browser, over a reload, in a list, bounded, until they are deleted.

Where they are not, the page says so.
"""

from __future__ import annotations

from tests.page.chats import ChatPage

_TITLES = "return [...document.querySelectorAll('#chat-list .open')].map(e => e.textContent)"
_KEPT = "return Object.keys(localStorage).filter(e => e.startsWith('baton.chat.')).length"
_WITHOUT_STORAGE = """
Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }});
"""
_FILL = """
for (let number = 0; number < 60; number++) {
  const head = JSON.stringify({title: 'old ' + number, at: number});
  const turns = JSON.stringify([{role: 'user', content: 'x'.repeat(60000)}]);
  localStorage.setItem('baton.chat.old' + number, head + '\\n' + turns);
}
"""
_SIZE = "return Object.entries(localStorage).reduce((sum, [key, value]) => sum + key.length + value.length, 0)"
_MAX_CHARS = 2_010_000


def check_history(page: ChatPage) -> None:
    """A reload shows the same chat; another can be opened, begun, deleted."""
    browser = page.browser
    page.ask("the first chat")
    page.open()
    assert page.turns() == ["the first chat"] * 2
    browser.click("#new-chat")
    page.ask("the second chat")
    assert browser.run(_TITLES)[:2] == ["the second chat", "the first chat"]
    browser.run("[...document.querySelectorAll('#chat-list .open')][1].click()")
    browser.wait("the first chat", "return document.querySelector('.message .text').innerText === 'the first chat'")
    page.ask("goes on")
    assert page.turns() == ["the first chat"] * 2 + ["goes on"] * 2
    number = browser.run(_KEPT)
    browser.run("document.querySelector('#chat-list [aria-label^=Delete]').click()")
    browser.click("#confirm-no")
    assert browser.run(_KEPT) == number
    browser.run("document.querySelector('#chat-list [aria-label^=Delete]').click()")
    browser.click("#confirm-yes")
    browser.wait("one chat less", f"{_KEPT} === {number - 1}")
    assert page.turns() == [], "the chat that was open is gone"


def check_reload_in_an_answer(page: ChatPage) -> None:
    """What was there of the answer is kept, and the page says that it is not all."""
    page.send("slowly " + "one word more " * 60)
    page.wait_for_text(30)
    page.open()
    assert page.turns()[1].startswith("slowly one word")
    assert "left before this answer was complete" in page.last_notes(), page.last_notes()
    page.press("Retry")
    page.browser.click("#stop")


def check_bounds(page: ChatPage) -> None:
    """The oldest chats go first, and no key is kept."""
    browser = page.browser
    browser.run(_FILL)
    browser.click("#new-chat")
    page.ask("the newest")
    titles = browser.run(_TITLES)
    assert len(titles) <= 50
    assert titles[0] == "the newest"
    assert titles[1:3] != ["old 0", "old 1"]
    assert browser.run(_SIZE) < _MAX_CHARS
    assert browser.run("return !Object.keys(localStorage).some(key => key.includes('key'))")
    browser.click("#delete-all")
    browser.click("#confirm-yes")
    browser.wait("an empty list", f"{_KEPT} === 0")


def check_without_storage(page: ChatPage) -> None:
    """A plain sentence says that nothing is kept, and the chat works."""
    end = page.browser.before_each_page(_WITHOUT_STORAGE)
    page.open()
    said = "const said = document.querySelector('#not-kept'); return said.hidden ? '' : said.textContent"
    assert "keeps nothing" in page.browser.run(said)
    page.ask("all the same")
    assert page.turns() == ["all the same"] * 2
    end()
    page.open()
    assert page.browser.run("return document.querySelector('#not-kept').hidden")
