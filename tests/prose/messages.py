"""Texts in the code for users: messages of `baton.wire.errors`, lines of logs, and help on settings and fields.

Found in the sources, so that a message is checked although no test runs into it. A value in a message is one word.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from baton.router.http.openai import field_docs
from baton.wire import errors
from tests.prose.rules import faults_of
from tests.reference.settings_page import programs

_ERRORS = {name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, Exception)}
_LOGS = {"debug", "info", "warning", "error", "exception", "critical"}


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """The messages of a module, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if getattr(node.func, "attr", None) in _LOGS or getattr(node.func, "id", None) in _ERRORS:
            yield node.lineno, _text(node.args[0])


def _text(message: ast.expr) -> str:
    """What is known of a message; "" of one that is made elsewhere."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in parts)


def help_texts() -> dict[str, str]:
    """The sentence of each setting and of each field of a request, by name."""
    settings = {f"{each.name} {field.name}": field.metadata["doc"] for each in programs() for field in each.fields}
    requests = (field_docs.REQUEST, field_docs.RESPONSES, field_docs.ANTHROPIC, field_docs.MESSAGE)
    return settings | {f"{number} {name}": text for number, each in enumerate(requests) for name, text in each.items()}


def faults_in(message: str) -> list[str]:
    """What is wrong with a message. What stands between semicolons stands for itself."""
    return [what for clause in message.split("; ") for sentence in clause.split(". ") for what in faults_of(sentence)]
