"""`baton chat`: a conversation with a running router in the terminal.

Owns the conversation and the terminal. Does not know the wire format (`launch.api_client`).
Invariants: the messages sent always alternate between user and assistant, whatever failed or was stopped before; no
control character of an answer reaches the terminal.
"""

from __future__ import annotations

import os
import signal
import sys
import unicodedata
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from launch.api_client import ApiClient, chat_body
from program.command_line import CommandParser
from program.settings import add_flags, check_file_keys, resolve, setting
from wire.errors import RequestFailed

PROMPT = "> "
HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"
TOKEN_LIMIT_NOTE = "(the answer was cut off at the token limit)"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of `baton chat`."""

    url: str = setting("http://127.0.0.1:8000", "address of the router")
    model: str = setting("", "name of the model, default the first that the router serves")
    system: str = setting("", "system prompt")
    max_tokens: int | None = setting(None, "longest answer in tokens")
    temperature: float | None = setting(None, "sampling temperature")
    api_key: str = setting("", "API key; better given as BATON_API_KEY, which no process list shows")


class Conversation:
    """The messages so far, and the next answer."""

    def __init__(self, client: ApiClient, model: str, settings: ChatSettings) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        system = self._settings.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Generator[str]:
        """Send one user turn and yield the answer as it comes.

        The turn stays in the conversation with as much of the answer as was read; without any it is forgotten.
        Raises `RequestFailed`.
        """
        parts: list[str] = []
        self._messages.append({"role": "user", "content": text})
        settings = self._settings
        body = chat_body(self._model, self._messages, settings.max_tokens, settings.temperature)
        try:
            with closing(self._client.stream_chat(body)) as chunks:
                for chunk in chunks:
                    content, finish_reason = read_chunk(chunk)
                    parts.append(content)
                    yield content
                    if finish_reason == "length":
                        yield f"\n{TOKEN_LIMIT_NOTE}"
        finally:
            if any(parts):
                self._messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self._messages.pop()


def read_chunk(chunk: dict[str, object]) -> tuple[str, str]:
    """Text and finish reason of one chunk, "" for what it does not have."""
    match chunk:
        case {"choices": [{**choice}]}:
            pass
        case _:
            return "", ""  # a chunk with the usage only
    match choice:
        case {"delta": {"content": str(content)}}:
            pass
        case _:
            content = ""
    reason = choice.get("finish_reason")
    return content, reason if isinstance(reason, str) else ""


def main(arguments: Sequence[str]) -> int:
    """Talk until the end of the input; returns the exit status. Raises `RequestFailed` when no model can be found."""
    settings = _parse(arguments)
    client = ApiClient(settings.url, settings.api_key)
    model = settings.model or client.models()[0]
    conversation = Conversation(client, model, settings)
    if not sys.stdin.isatty():
        return _answer_lines(conversation)
    import readline  # noqa: F401  gives input() its line editing and history

    # a shell starts background jobs with Ctrl-C ignored, and what they start inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"{model} at {settings.url}. {HELP}.")
    return _talk(conversation)


def _parse(arguments: Sequence[str]) -> ChatSettings:
    parser = CommandParser(prog="baton chat", description="Talk to a running router in the terminal.")
    add_flags(parser, ChatSettings)
    flags = parser.parse(arguments)
    if flags.config:
        check_file_keys(flags.config, ChatSettings)
    return resolve(ChatSettings, flags, os.environ)


def _talk(conversation: Conversation) -> int:
    while True:
        try:
            text = input(PROMPT).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            raise
        match text:
            case "":
                continue
            case "/exit":
                return 0
            case "/reset":
                conversation.reset()
                print("forgotten")
            case "/help":
                print(HELP)
            case _ if text.startswith("/"):
                print(f"unknown command {text}. {HELP}")
            case _:
                _show_answer_or_error(conversation, text)


def _show_answer_or_error(conversation: Conversation, text: str) -> None:
    try:
        _show_answer(conversation, text)
    except RequestFailed as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n(stopped)")


def _answer_lines(conversation: Conversation) -> int:
    """One line of the input is one turn; the first error ends the conversation."""
    for line in sys.stdin:
        match line.strip():
            case "":
                continue
            case "/exit":
                return 0
            case "/reset":
                conversation.reset()
            case text:
                _show_answer(conversation, text)
    return 0


def _show_answer(conversation: Conversation, text: str) -> None:
    with closing(conversation.answer(text)) as parts:
        for part in parts:
            print(printable(part), end="", flush=True)
        print()


def printable(text: str) -> str:
    """`text` without control characters, with which a model could drive the terminal; newlines and tabs stay."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
