"""Tool calls that are written with tags instead of JSON: of Qwen3-Coder and GLM.

Values are bare text; what JSON they are depends on the function's schema (`typed_values`). A string is told as it
comes, every other value when it is whole.
"""

from __future__ import annotations

import re

from baton.engine.text.answers.deltas import Content
from baton.engine.text.answers.json_calls import NAME, TOOL_CALL, TOOL_CALL_END
from baton.engine.text.answers.reader import (
    Markers,
    Reader,
    Steps,
    accept,
    markers,
    pass_until,
    read_until,
    read_while,
    release,
    skip_space,
)
from baton.engine.text.answers.typed_values import Schemas, inside_quotes, is_plain_string, quoted, typed_value

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MAX_VALUE_CHARS = 2**22
_TAG_NAME = re.compile(r"[^<>\n]+")


def qwen3_coder(reader: Reader, schemas: Schemas) -> Steps[None]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`; the outer tags may be
    missing. A line break at each end of a value is not part of it."""
    while (marker := (yield from pass_until(reader, markers(TOOL_CALL, FUNCTION), Content))) is not None:
        if marker == TOOL_CALL:
            yield from skip_space(reader)
        is_function = marker == FUNCTION or (yield from accept(reader, FUNCTION))
        if is_function and (yield from _function(reader, schemas)):
            yield from _end_call(reader)
        else:
            yield from release(reader)


def _function(reader: Reader, schemas: Schemas) -> Steps[bool]:
    name = (yield from read_while(reader, _TAG_NAME)).strip()
    if not NAME.fullmatch(name) or not (yield from accept(reader, ">")):
        return False
    yield reader.begin_call(name)
    opening = "{"
    while True:
        yield from skip_space(reader)
        if (yield from accept(reader, FUNCTION_END)):
            yield reader.arguments("{}" if opening == "{" else "}")
            return True
        if not (yield from accept(reader, PARAMETER)):
            return False
        key = yield from read_while(reader, _TAG_NAME)
        if not key or not (yield from accept(reader, ">")):
            return False
        yield from accept(reader, "\n")
        end = markers("\n" + PARAMETER_END, PARAMETER_END)
        if not (yield from _value(reader, opening, name, key.strip(), schemas, end)):
            return False
        opening = ", "


def glm(reader: Reader, schemas: Schemas) -> Steps[None]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, line breaks or not."""
    while (yield from pass_until(reader, markers(TOOL_CALL), Content)):
        yield from skip_space(reader)
        name = yield from read_while(reader, NAME)
        yield from skip_space(reader)
        if name and (yield from _pairs(reader, name, schemas)):
            yield from _end_call(reader)
        else:
            yield from release(reader)


def _pairs(reader: Reader, name: str, schemas: Schemas) -> Steps[bool]:
    opening = "{"
    while True:
        yield from skip_space(reader)
        if (yield from accept(reader, TOOL_CALL_END)):
            if opening == "{":
                yield reader.begin_call(name)
            yield reader.arguments("{}" if opening == "{" else "}")
            return True
        if not (yield from accept(reader, KEY)):
            return False
        key = yield from read_until(reader, markers(KEY_END), 256)
        yield from skip_space(reader)
        if key is None or not (yield from accept(reader, VALUE)):
            return False
        if opening == "{":
            yield reader.begin_call(name)
        if not (yield from _value(reader, opening, name, key[0].strip(), schemas, markers(VALUE_END))):
            return False
        opening = ", "


def _value(reader: Reader, opening: str, name: str, key: str, schemas: Schemas, end: Markers) -> Steps[bool]:
    """One argument up to the `end` of its value. False: it does not come."""
    if is_plain_string(schemas, name, key):
        reader.take()
        yield reader.arguments(f'{opening}{quoted(key)}: "')
        found = yield from pass_until(reader, end, lambda text: reader.arguments(inside_quotes(text)), strips=False)
        if found is None:
            return False
        yield reader.arguments('"')
    else:
        value = yield from read_until(reader, end, _MAX_VALUE_CHARS)
        if value is None:
            return False
        yield reader.arguments(f"{opening}{quoted(key)}: {typed_value(schemas, name, key, value[0])}")
    reader.take()
    return True


def _end_call(reader: Reader) -> Steps[None]:
    yield from skip_space(reader)
    if (yield from accept(reader, TOOL_CALL_END)):
        yield from skip_space(reader)
    reader.take()
