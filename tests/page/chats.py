"""The chat of the page as a visitor uses it: ask, wait for the end of an answer, look at the turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.page.browser import ENTER, Browser, until

_SEND = "document.querySelector('#prompt').value = arguments[0]; document.querySelector('#ask').requestSubmit();"
_LAST = "const last = [...document.querySelectorAll('.message.assistant')].pop(); "


@dataclass(frozen=True, slots=True)
class ChatPage:
    """See the module."""

    browser: Browser
    url: str

    def open(self) -> None:
        """Load the page, or load it again."""
        self.browser.open(self.url)
        self.browser.wait("the models", "return document.querySelectorAll('#model option').length === 1")

    def type(self, text: str) -> None:
        """Press keys, and Enter; a line feed would be Enter too."""
        self.browser.type("#prompt", text + ENTER)

    def send(self, text: str) -> None:
        """Send a text of any kind."""
        self.browser.run(_SEND, text)

    def ask(self, text: str) -> str:
        """Send, and the text of the answer, complete or not."""
        number = len(self.turns())
        self.send(text)
        until("a turn more", lambda: len(self.turns()) == number + 2)
        self.wait_for_end()
        return self.last_text()

    def wait_for_end(self) -> None:
        """Wait until no answer is being written."""
        self.browser.wait("the end of the answer", "return !document.querySelector('.message.running')")

    def wait_for_text(self, num_chars: int) -> None:
        """Wait until the last answer has so many characters."""
        self.browser.wait(
            "some text", f"{_LAST} return last && last.querySelector('.text').innerText.length >= {num_chars}"
        )

    def turns(self) -> list[str]:
        """The text of each question and answer."""
        found: list[str] = self.browser.run(
            "return [...document.querySelectorAll('.message > .text')].map(e => e.innerText.trim())"
        )
        return found

    def last_text(self) -> str:
        """The text of the last answer."""
        return str(self.browser.run(_LAST + "return last.querySelector('.text').innerText"))

    def last_html(self) -> str:
        """The markup of the last answer, as the browser would write it."""
        return str(self.browser.run(_LAST + "return last.querySelector('.text').innerHTML"))

    def last_notes(self) -> str:
        """What is said below the last answer, its buttons included."""
        return str(self.browser.run(_LAST + "return (last.querySelector('.turn-bar') || last).innerText"))

    def in_last(self, script: str) -> Any:
        """What a script finds in the last answer, `last`."""
        return self.browser.run(_LAST + script)

    def press(self, name: str, role: str = "assistant", turn: int = -1) -> None:
        """Press the button with this text in a turn of `role`."""
        self.browser.run(
            "const turn = [...document.querySelectorAll('.message.' + arguments[1])].at(arguments[2]);"
            "[...turn.querySelectorAll('button')].find(e => e.textContent === arguments[0]).click()",
            name, role, turn,
        )  # fmt: skip
