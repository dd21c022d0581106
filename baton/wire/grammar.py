"""A grammar that the output of a request must obey, as its author wrote it: what kind of text it is, and the text.

Owns the kinds and the longest text. Whether a text is a valid grammar is found where it is compiled
(`baton.engine.structured`): that needs a tokenizer, and depends on no node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from baton.wire.codec import Length
from baton.wire.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 2**17
JSON_SCHEMA, REGEX, CHOICE, EBNF, LARK = "json_schema", "regex", "choice", "grammar", "lark"
WHITESPACE = r"( |\r?\n[ \t]{0,40})"
"""What may stand between the tokens of JSON: enough for an indented text, and no way to go on for ever."""
_KINDS = (JSON_SCHEMA, REGEX, CHOICE, EBNF, LARK)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must obey. Made by the functions below. Raises `InvalidRequest` for an unknown kind, and
    for a text that is empty or too long.

    `kind`: "json_schema" (`text` is a schema), "regex" (one regular expression for the whole output) or "choice" (a
    JSON list of strings, of which the output is one). Others are "grammar" (context-free, in Lark's notation or GBNF)
    and "lark" (in llguidance's form of Lark's notation, which a router writes and no client).
    """

    kind: Annotated[str, Length(16)]
    text: Annotated[str, Length(MAX_GRAMMAR_CHARS)] = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidRequest(f"a grammar must be one of {', '.join(_KINDS)}", "grammar")
        if not self.text:
            raise InvalidRequest("a grammar must not be empty", "grammar")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"a grammar has at most {MAX_GRAMMAR_CHARS} characters", "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, whitespace: str | None = None) -> Grammar:
        """JSON that is valid by `schema`. `whitespace`: a regular expression for what may stand between its tokens, ""
        for nothing; None: `WHITESPACE`."""
        members: dict[str, Any] = {"anyOf": [schema]} if isinstance(schema, bool) else dict(schema)
        pattern = WHITESPACE if whitespace is None else whitespace
        members[_OPTIONS] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
        return cls(JSON_SCHEMA, json.dumps(members, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def json_object(cls) -> Grammar:
        """The grammar of an output that is any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches `pattern` from its beginning to its end."""
        return cls(REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """The grammar of an output that is one of these texts."""
        return cls(CHOICE, json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """Text that a context-free grammar derives, which is written in Lark's notation or as GBNF."""
        return cls(EBNF, text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a grammar derives which is made here."""
        return cls(LARK, text)


_OPTIONS = "x-guidance"
"""The member of a schema by which the compiler takes options. They are ours to set, not the client's: one of them lets
it ignore keywords that it does not know."""
