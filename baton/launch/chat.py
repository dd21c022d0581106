"""`baton chat`: a conversation with a running router in the terminal, or one question.

Owns the terminal: its lines, its history and its colours. Does not know the wire format (`baton.launch.api_client`),
the messages (`baton.launch.conversation`) or what a command does (`baton.launch.chat_commands`). Invariant: no control
character of an answer reaches the terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from baton.launch.api_client import ApiClient
from baton.launch.chat_commands import ChatCommands
from baton.launch.conversation import Conversation
from baton.runtime.command_line import CommandParser
from baton.runtime.ranges import COUNT, Range
from baton.runtime.settings import add_flags, check_file_keys, resolve, setting
from baton.wire.errors import BatonError, InvalidRequest

PROMPT, CONTINUED = "> ", ". "
TOKEN_LIMIT_NOTE = "(the answer was cut off at the token limit)"
HINT = "/help lists the commands, Ctrl-C stops an answer, /exit leaves"
MAX_HISTORY = 1000
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_QUOTE = '"""'


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of `baton chat`."""

    question: str = setting("", "asked alone; empty: a conversation", positional=True)
    url: str = setting("http://127.0.0.1:8000", "address of the router")
    model: str = setting("", "name of the model, default the first that the router serves")
    system: str = setting("", "system prompt")
    max_tokens: int | None = setting(None, "longest answer in tokens", allowed=COUNT)
    temperature: float | None = setting(None, "sampling temperature", allowed=Range(0, 2))
    no_history: bool = setting(False, "do not keep what you type for the next time")
    api_key: str = setting("", "API key; better given as BATON_API_KEY, which no process list shows")


class Screen:
    """The place where answers are shown. On a terminal that can, reasoning and notes are dimmed; where the output is no
    terminal there is only the answer itself."""

    def __init__(self, is_terminal: bool, environment: Mapping[str, str]) -> None:
        self._is_terminal = is_terminal
        can_dim = is_terminal and not environment.get("NO_COLOR") and environment.get("TERM", "dumb") != "dumb"
        self._dim, self._plain = (_DIM, _PLAIN) if can_dim else ("", "")

    def show(self, conversation: Conversation, text: str) -> None:
        """Send `text` and show the answer as it comes, then how fast it came. Raises `RequestFailed`."""
        was_reasoning = False
        try:
            with closing(conversation.answer(text)) as parts:
                for part in parts:
                    if part.is_reasoning != was_reasoning and part.text:
                        self._write("\n" if was_reasoning and self._is_terminal else "")
                        was_reasoning = part.is_reasoning
                    if part.is_reasoning and self._is_terminal:
                        self._write(f"{self._dim}{printable(part.text)}{self._plain}")
                    elif not part.is_reasoning:
                        self._write(printable(part.text))
        finally:
            self._write("\n")
        if conversation.figures.is_cut_off:
            self._warn(TOKEN_LIMIT_NOTE)
        self.note(f"({conversation.figures.describe()})")

    def note(self, text: str) -> None:
        """Show a line that is no part of an answer."""
        if self._is_terminal and text != "()":
            print(f"{self._dim}{text}{self._plain}")

    def _warn(self, text: str) -> None:
        """Show a line that a person should see and that is no part of an answer, which a script may read."""
        print(text, file=sys.stdout if self._is_terminal else sys.stderr)

    @staticmethod
    def _write(text: str) -> None:
        if text:
            print(text, end="", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Answer the question, or talk until the end of the input; returns the exit status. Raises `BatonError` when no
    model can be found, and without a terminal or with a question at the first error."""
    settings = _parse(arguments)
    client = ApiClient(settings.url, settings.api_key)
    model = settings.model or client.models()[0]
    conversation = Conversation(client, model, settings.system, settings.max_tokens, settings.temperature)
    if settings.question:
        Screen(sys.stdout.isatty(), os.environ).show(conversation, settings.question)
        return 0
    if not sys.stdin.isatty():
        return _answer_lines(conversation)
    _set_up_lines(keep=not settings.no_history)
    # a shell starts background jobs with Ctrl-C ignored, and what they start inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"{model} at {settings.url}. {HINT}.")
    return _talk(conversation, Screen(sys.stdout.isatty(), os.environ))


def _parse(arguments: Sequence[str]) -> ChatSettings:
    parser = CommandParser(prog="baton chat", description="Talk to a running router in the terminal.")
    add_flags(parser, ChatSettings)
    flags = parser.parse(arguments)
    if flags.config:
        check_file_keys(flags.config, ChatSettings)
    return resolve(ChatSettings, flags, os.environ)


def _set_up_lines(keep: bool) -> None:
    """Give `input` its line editing, and the history of earlier conversations: a file that only its owner may read."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    if not keep:
        return
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / "baton" / "chat_history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)

    def write() -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written: this conversation is not remembered
            readline.write_history_file(path)

    atexit.register(write)


def _talk(conversation: Conversation, screen: Screen) -> int:
    commands = ChatCommands(conversation)
    while True:
        try:
            text = _read_message()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            raise
        if text == "/exit":
            return 0
        if text:
            _answer_or_explain(commands, conversation, screen, text)


def _read_message() -> str:
    """What the person types, which may be several lines. Raises `EOFError`."""
    return join_lines(_typed_lines())


def _typed_lines() -> Iterator[str]:
    yield input(PROMPT)
    while True:
        yield input(CONTINUED)


def join_lines(lines: Iterator[str]) -> str:
    """The next message of `lines`, as the help of the commands says. An end within a message ends it too."""
    first = next(lines).strip()
    if first.startswith(_QUOTE):
        text = first.removeprefix(_QUOTE)
        with contextlib.suppress(EOFError, StopIteration):
            while not text.rstrip().endswith(_QUOTE):
                text += "\n" + next(lines)
        return text.rstrip().removesuffix(_QUOTE).strip("\n")
    parts = [first]
    with contextlib.suppress(EOFError, StopIteration):
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1].removesuffix("\\")
            parts.append(next(lines).rstrip())
    return "\n".join(parts)


def _answer_or_explain(commands: ChatCommands, conversation: Conversation, screen: Screen, text: str) -> None:
    try:
        _answer(commands, conversation, screen, text)
    except BatonError as error:
        _explain(error)
    except KeyboardInterrupt:
        print("(stopped)")


def _answer(commands: ChatCommands, conversation: Conversation, screen: Screen, text: str) -> None:
    """Do what the command in `text` says, or show the answer to it. Raises `InvalidRequest` for a command that is
    refused, `RequestFailed` when there is no answer."""
    reply = commands.run(text)
    if reply is None and text.startswith("/") and "\n" not in text:
        raise InvalidRequest(f"unknown command {text.split()[0]}. {HINT}")
    if reply is not None and not reply.asks:
        print(printable(reply.says), flush=True)
    else:
        screen.show(conversation, commands.with_file(text) if reply is None else reply.asks)


def _explain(error: BatonError) -> None:
    print(f"error: {printable(str(error))}", file=sys.stderr)


def _answer_lines(conversation: Conversation) -> int:
    """The input is messages as they are typed; the first answer that fails ends the conversation."""
    commands, screen = ChatCommands(conversation), Screen(False, os.environ)
    lines = (line.rstrip("\n") for line in sys.stdin)
    with contextlib.suppress(StopIteration):
        while (text := join_lines(lines)) != "/exit":
            try:
                if text:
                    _answer(commands, conversation, screen, text)
            except InvalidRequest as error:
                _explain(error)
    return 0


def printable(text: str) -> str:
    """`text` without control characters, with which a model could drive the terminal; newlines and tabs stay."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
