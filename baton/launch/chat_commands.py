"""The commands of `baton chat`: lines that begin with a slash.

Owns the files that a command reads or writes: only paths that the person at the terminal has typed. Does not know the
terminal. Invariant: a command that is refused has changed nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from baton.launch.conversation import Conversation
from baton.wire.errors import InvalidRequest

MAX_FILE_BYTES = 2**20
HELP = """\
/system [TEXT]   give the model a system prompt; without a text, none
/model [NAME]    ask another model from now on; without a name, list them
/think [on|off]  let the model think before it answers, or not; without a word, as the model has it
/file PATH       send a text file with the next message
/retry           ask the last question again
/save PATH       write the conversation into a new file: JSON if it ends with .json, else Markdown
/reset           forget the conversation
/exit            leave
A line that ends with \\ goes on in the next one.
A line that begins with \"\"\" goes on until one that ends with \"\"\"."""


class Reply(NamedTuple):
    """The text that a command shows, and the text that it asks the model, "" for nothing."""

    says: str
    asks: str = ""


class ChatCommands:
    """The commands over one conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._attached = ""
        self._commands: dict[str, Callable[[str], Reply]] = {
            "/system": self._system,
            "/model": self._model,
            "/think": self._think,
            "/file": self._file,
            "/retry": self._retry,
            "/save": self._save,
            "/reset": self._reset,
            "/help": lambda _: Reply(HELP),
        }

    def run(self, line: str) -> Reply | None:
        """Run the command in `line`; None when it is none of the commands. Raises `InvalidRequest` when it cannot be
        done, `RequestFailed` when the router does not answer."""
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        return None if command is None else command(argument.strip())

    def with_file(self, text: str) -> str:
        """A message with the file in front of it that waits for one."""
        attached, self._attached = self._attached, ""
        return attached + text

    def _system(self, argument: str) -> Reply:
        self._conversation.system = argument
        return Reply("the system prompt is set" if argument else "there is no system prompt")

    def _model(self, argument: str) -> Reply:
        names = self._conversation.client.models()
        if argument and argument not in names:
            raise InvalidRequest(f"{argument} is not served here; there is {', '.join(names)}")
        self._conversation.model = argument or self._conversation.model
        return Reply("\n".join(f"{'*' if name == self._conversation.model else ' '} {name}" for name in names))

    def _think(self, argument: str) -> Reply:
        wishes = {"": None, "on": True, "off": False}
        if argument not in wishes:
            raise InvalidRequest("/think on, /think off, or /think")
        self._conversation.thinks = wishes[argument]
        return Reply(f"thinking is {argument or 'as the model has it'}")

    def _file(self, argument: str) -> Reply:
        if not argument:
            raise InvalidRequest("which file? /file PATH")
        path = Path(argument).expanduser()
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            text = content.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{path} is not text in UTF-8") from None
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path} cannot be read: {_why(error)}") from None
        if len(content) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        self._attached += f"{path.name}:\n\n{text.rstrip()}\n\n"
        return Reply(f"{path.name}, {len(content):,} bytes, goes with the next message")

    def _retry(self, argument: str) -> Reply:
        question = self._conversation.take_back()
        if not question:
            raise InvalidRequest("nothing has been asked yet")
        return Reply("", question)

    def _save(self, argument: str) -> Reply:
        if not argument:
            raise InvalidRequest("into which file? /save PATH")
        path, messages = Path(argument).expanduser(), self._conversation.messages
        if path.suffix == ".json":
            text = json.dumps({"model": self._conversation.model, "messages": messages}, ensure_ascii=False, indent=2)
        else:
            text = "\n\n".join(f"**{message['role']}**\n\n{message['content']}" for message in messages)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path} cannot be written: {_why(error)}") from None
        return Reply(f"{len(messages)} messages are in {path}")

    def _reset(self, argument: str) -> Reply:
        self._conversation.reset()
        self._attached = ""
        return Reply("forgotten")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
