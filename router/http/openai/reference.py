"""The tables of docs/api.md: what happens to each field of a request.

Owns their form. The facts come from the schemas, from the tables of ignored and unsupported fields, and from the
sentences of `field_docs`. The page itself is written by hand around a pair of marks, between which the tables are; to
bring them up to date:

    python -m baton.router.http.openai.reference docs/api.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from baton.router.http.anthropic.request import MessagesRequest
from baton.router.http.openai import field_docs, ignored
from baton.router.http.openai.messages import Message
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.router.http.openai.schemas import ChatCompletionRequest, CompletionRequest, StreamOptions
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.unsupported import REASONS

BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
USED, IGNORED, REFUSED = "used", "ignored", "refused"


_URL = (
    "`data:image/png;base64,...`, also `jpeg`, `webp` and `gif`; an address is refused: images are not fetched. "
    "Only in messages of the user, and where the model sees."
)


class Row(NamedTuple):
    """One field: its name, what happens to it, its default as JSON or "", and a sentence."""

    name: str
    verdict: str
    default: str
    sentence: str


def rows_of(schema: type[Strict], sentences: Mapping[str, str]) -> list[Row]:
    """All fields that are known of the objects of a schema, by name. Raises `KeyError` for one without a sentence."""
    rows = []
    for name in sorted({*schema.model_fields, *schema.unsupported, *schema.ignorable}):
        if name in schema.ignorable:
            rule = schema.ignorable[name]
            rows.append(Row(name, IGNORED, "", _sentence(rule.reason) + _neutral(rule.neutral)))
        elif name in schema.unsupported:
            reason = _sentence(REASONS.get(name, "is not supported").removeprefix("is "))
            rows.append(Row(name, REFUSED, "", reason + _neutral(schema.unsupported[name])))
        else:
            rows.append(Row(name, USED, _default(schema.model_fields[name]), sentences[name]))
    return rows


def tables() -> str:
    """The part of the page between the marks."""
    parts = _ignored(ignored.TEXT_PART)
    sections = {
        "`POST /v1/chat/completions`": rows_of(ChatCompletionRequest, field_docs.REQUEST),
        "`POST /v1/completions`": rows_of(CompletionRequest, field_docs.REQUEST),
        "`POST /v1/responses`": rows_of(ResponsesRequest, field_docs.RESPONSES),
        "`POST /v1/messages`": rows_of(MessagesRequest, field_docs.ANTHROPIC),
        "A message of a chat (`messages[]`)": rows_of(Message, field_docs.MESSAGE),
        "A part of a message of a chat (`messages[].content[]`)": [
            Row("text", USED, "required", "Of a `text` part: the text."),
            Row("type", USED, "required", "`text` or `image_url`; parts of another type are refused."),
            Row("image_url", USED, "required", "Of an `image_url` part, see below."),
            *parts,
        ],
        "An image of a chat (`messages[].content[].image_url`)": [
            Row("url", USED, "required", _URL),
            *_ignored(ignored.IMAGE_URL),
        ],
        "`stream_options`": rows_of(StreamOptions, field_docs.STREAM_OPTIONS),
    }
    internal = ", ".join(f"`{name}`" for name in ignored.INTERNAL)
    text = "".join(f"### {title}\n\n{_table(rows)}\n" for title, rows in sections.items())
    return f"{text}Refused everywhere, because servers tell each other such things: {internal}.\n"


def _ignored(table: ignored.IgnoredTable) -> list[Row]:
    return [
        Row(name, IGNORED, "", _sentence(rule.reason) + _neutral(rule.neutral)) for name, rule in sorted(table.items())
    ]


def with_tables(page: str) -> str:
    """`page` with its tables up to date. Raises `ValueError` when it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _table(rows: Iterable[Row]) -> str:
    lines = ["| field | | default | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{row.name}` | {row.verdict} | {row.default and f'`{row.default}`'} | {row.sentence} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    return "" if value in (None, PydanticUndefined, (), {}) else json.dumps(value)


def _neutral(values: tuple[object, ...]) -> str:
    return f" Asks for nothing: {', '.join(f'`{json.dumps(value)}`' for value in values)}." if values else ""


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."


def main(argv: list[str]) -> int:
    """Bring the tables of a page up to date."""
    path = Path(argv[0])
    path.write_text(with_tables(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
