"""What can be done with turns: copy, retry, edit, stop, send again; and what is told of thinking and speed."""

from __future__ import annotations

import json

from tests.page.browser import ESCAPE
from tests.page.chats import ChatPage
from tests.page.echo_server import THOUGHT

_CATCH_CLIPBOARD = """
window.copied = [];
Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { window.copied.push(text); }}});
"""
_CATCH_REQUESTS = """
window.asked = [];
const send = window.fetch;
window.fetch = (path, options) => {
  if (String(path).includes('chat/completions')) window.asked.push(JSON.parse(options.body));
  return send(path, options);
};
"""
CATCH = _CATCH_CLIPBOARD + _CATCH_REQUESTS
_CODE = "Look:\n\n```js\nlet a = 1;\n```\n\nand `b`."


def check_copy(page: ChatPage) -> None:
    """A block of code, a whole answer in Markdown, a question."""
    page.ask(_CODE)
    page.in_last("last.querySelector('.code button').click()")
    page.browser.wait("a copy", "return window.copied.length === 1")
    page.press("Copy", turn=-1)  # the first of them is that of the code, which says "Copied" now
    page.press("Copy", "user")
    page.browser.wait("more copies", "return window.copied.length === 3")
    assert page.browser.run("return window.copied") == ["let a = 1;", _CODE, _CODE]
    page.browser.wait("the buttons as before", "return ![...document.querySelectorAll('button')].some(e => e.disabled)")


def check_retry_and_edit(page: ChatPage) -> None:
    """Both forget what came after, and the model is told what is left."""
    page.ask("one")
    page.ask("two")
    page.press("Retry", turn=0)
    page.wait_for_end()
    assert page.turns() == ["one", "one"]
    page.ask("three")
    page.press("Edit", "user", 0)
    page.browser.run("document.querySelector('.editor textarea').value = 'uno'")
    page.browser.run("document.querySelector('.editor').requestSubmit()")
    page.browser.wait("the edited question", "return document.querySelectorAll('.message').length === 2")
    page.wait_for_end()
    assert page.turns() == ["uno", "uno"]
    page.ask("due")
    asked = page.browser.run("return window.asked.at(-1).messages.map(e => [e.role, e.content])")
    assert asked == [["user", "uno"], ["assistant", "uno"], ["user", "due"]], asked
    page.press("Edit", "user", 0)
    page.browser.type(".editor textarea", ESCAPE)
    assert page.turns() == ["uno", "uno", "due", "due"]


def check_stop(page: ChatPage) -> None:
    """By its button and by Escape; what is there stays."""
    for press, what in ((page.browser.click, ("#stop",)), (page.browser.type, ("#prompt", ESCAPE))):
        page.send("slowly " + "a word " * 200)
        page.wait_for_text(12)
        press(*what)
        page.wait_for_end()
        assert "stopped" in page.last_notes()
        assert page.last_text().startswith("slowly")


def check_failed_send(page: ChatPage) -> None:
    """A question that found no router stays, also over a reload, and can be sent again."""
    page.browser.be_connected(False)
    page.ask("is anybody there?")
    assert "the router cannot be reached" in page.last_notes()
    page.browser.be_connected(True)
    page.open()
    assert page.turns() == ["is anybody there?", ""]
    page.press("Send again")
    page.wait_for_end()
    assert page.turns() == ["is anybody there?"] * 2
    page.ask("fail please")
    assert "Send again" in page.last_notes()
    page.ask("go on")
    roles = page.browser.run("return window.asked.at(-1).messages.map(e => e.role)")
    assert roles == ["user", "assistant", "user"], "a question without an answer is left out"


def check_thinking(page: ChatPage) -> None:
    """Thoughts are folded, apart from the answer; the switch is there, works, and is remembered."""
    page.ask("think about it")
    fold = page.in_last(
        "const f = last.querySelector('.reasoning'); return [f.open, f.querySelector('div').textContent.trim()]"
    )
    assert fold == [False, THOUGHT], fold
    assert page.last_text().strip() == "think about it"
    for wanted, sent, has_thought in (
        ("off", {"enable_thinking": False}, False),
        ("on", {"enable_thinking": True}, True),
    ):
        page.browser.run(
            "const choice = document.querySelector('#thinking'); choice.value = arguments[0];"
            "choice.dispatchEvent(new Event('change'))",
            wanted,
        )
        page.open()  # the switch is remembered
        page.ask("and now?")
        assert page.browser.run("return window.asked.at(-1).chat_template_kwargs") == sent
        assert page.in_last("return last.querySelector('.reasoning') !== null") == has_thought
    page.browser.run("localStorage.removeItem('baton.options')")


def check_speed(page: ChatPage) -> None:
    """No speed of tokens that came at once; one of those that were measured."""
    page.ask("at-once " + "many words " * 40)
    assert "tokens/s" not in page.last_notes(), page.last_notes()
    assert "TTFT" in page.last_notes()
    page.ask("slowly " + "some words " * 10)
    assert "tokens/s" in page.last_notes(), page.last_notes()


def check_refused(page: ChatPage) -> None:
    """A client's mistake is counted apart from failures of the relay."""
    before = _counts(page)
    body = json.dumps({"model": "org/nothing", "messages": [{"role": "user", "content": "a"}]})
    options = "{method: 'POST', headers: {'Content-Type': 'application/json'}, body: arguments[0]}"
    page.browser.run(f"fetch('v1/chat/completions', {options})", body)
    page.browser.wait(
        "the refused request", f"return Number(document.querySelector('#refused').textContent) === {before[1] + 1}"
    )
    assert _counts(page)[0] == before[0]
    assert page.browser.run(
        "return [...document.querySelectorAll('#requests .leg')].some(e => e.textContent === 'refused')"
    )


def _counts(page: ChatPage) -> list[int]:
    page.browser.wait("the relay", "return document.querySelector('#link').dataset.state === 'live'")
    return [
        int(page.browser.run(f"return document.querySelector('#{name}').textContent")) for name in ("failed", "refused")
    ]
