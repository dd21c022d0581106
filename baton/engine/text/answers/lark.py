"""Pieces of llguidance's form of Lark's notation, of which the grammars of whole answers are put together.

A marker is the text of a token of its own where the vocabulary has one, and text elsewhere: `MarkerForm` writes it. A
model writes that token then, which is no text to a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from baton.wire.grammar import CHOICE, JSON_SCHEMA, REGEX, Grammar

SPACE = r"SPACE: /[ \t\r\n]{1,8}/"
"""White space at markers, with an end: a model could go on for ever."""
_SPECIAL = re.compile(r"[.^$*+?()\[\]{}|\\/]")
_SLASH_OR_ESCAPED = re.compile(r"\\.|/", re.DOTALL)
MarkerForm: TypeAlias = Callable[[str], str]


def marker_form(token_of: Callable[[str], int | None]) -> MarkerForm:
    """How markers are written for a vocabulary. `token_of` names the token of a marker, where there is one."""

    def marker(text: str) -> str:
        token_id = token_of(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    return marker


def quoted(text: str) -> str:
    """A string in Lark's notation that stands for `text`."""
    return json.dumps(text, ensure_ascii=False)


def until(
    rule: str, end: str, marker: MarkerForm, tokens: Sequence[str] = (), max_tokens: int | None = None
) -> list[str]:
    """Rules for free text and the marker behind it. `tokens` may stand in the text too. `max_tokens`: the text has at
    most so many, then the marker is forced, where it is a token; `tokens` do not go with it."""
    name = f"{rule.upper()}_TEXT"
    if marker(end).startswith('"'):
        return [f"{rule}[lazy]: /(?s:.*){_regex(end)}/"]
    if max_tokens == 0:
        return [f"{rule}: {marker(end)}"]
    if max_tokens is not None:
        bounded = f"{rule}_text"
        return [
            f"{rule}: {bounded}? {marker(end)}",
            f"{bounded}[max_tokens={max_tokens}]: {name}",
            free_text(name, end),
        ]
    free = f"({' | '.join((name, *tokens))})*" if tokens else f"{name}?"
    return [f"{rule}: {free} {marker(end)}", free_text(name, end)]


def free_text(name: str, *without: str) -> str:
    """A terminal of any text that holds none of the markers."""
    return " & ".join((f"{name}: /(?s:.+)/", *(f"~/(?s:.*){_regex(text)}(?s:.*)/" for text in without)))


def any_tokens(first_is_not: str = "") -> str:
    """Any tokens, those that are no text included. `first_is_not`: the form of a marker that may not be the first of
    them, where it is a token."""
    is_token = first_is_not.startswith("<[")
    return f"(<[^{first_is_not[2:]} <[*]>*)?" if is_token else "<[*]>*"


def has_form(grammar: Grammar) -> bool:
    """Whether `grammar` can be a part of another."""
    return grammar.kind in _FORMS


def form_of(grammar: Grammar) -> str:
    """The body of a rule that derives the texts of `grammar`."""
    return _FORMS[grammar.kind](grammar.text)


def json_by(schema: Mapping[str, Any]) -> str:
    """JSON that is valid by `schema`. Raises `InvalidRequest` when it is too long."""
    return form_of(Grammar.json_schema(schema))


def _regex(text: str) -> str:
    return _SPECIAL.sub(lambda found: "\\" + found[0], text)


def _of_expression(expression: str) -> str:
    escaped = _SLASH_OR_ESCAPED.sub(lambda found: "\\/" if found[0] == "/" else found[0], expression)
    return f"/{escaped}/".replace("\n", "\\n")


_FORMS: Mapping[str, Callable[[str], str]] = {
    JSON_SCHEMA: lambda text: f"%json {text}",
    REGEX: _of_expression,
    CHOICE: lambda text: " | ".join(quoted(choice) for choice in json.loads(text)),
}
