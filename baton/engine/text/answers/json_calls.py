"""Tool calls that are JSON objects with a name and arguments: of Hermes and Qwen, Llama 3, Mistral and DeepSeek, and
those that a grammar enforces.

Every parser here yields content and calls; see `reader` for how parsers are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from baton.engine.text.answers.deltas import Content
from baton.engine.text.answers.json_scanner import scan_value
from baton.engine.text.answers.reader import (
    Reader,
    Steps,
    accept,
    markers,
    pass_until,
    peek,
    read_until,
    read_while,
    release,
    skip_space,
)

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
NAME = re.compile(r"[A-Za-z0-9_.-]+")
_ARGUMENTS = ("arguments", "parameters")
_FENCE, _FENCE_END = "```json", "```"


def hermes(reader: Reader) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them among content."""
    while (yield from pass_until(reader, markers(TOOL_CALL), Content)):
        yield from skip_space(reader)
        if not (yield from call_object(reader)):
            yield from release(reader)
            continue
        yield from skip_space(reader)
        yield from accept(reader, TOOL_CALL_END)
        yield from skip_space(reader)
        reader.take()


def llama3_json(reader: Reader, names: Collection[str]) -> Steps[None]:
    """An answer that begins with `{"name": ..., "parameters": {...}}`, further ones behind semicolons; or such objects
    behind `<|python_tag|>`. Any answer of JSON looks like that, so only functions in `names` are called."""
    yield from skip_space(reader)
    if (yield from peek(reader)) == "{":
        yield from _objects(reader, names)
    while (yield from pass_until(reader, markers(PYTHON_TAG), Content)):
        yield from skip_space(reader)
        yield from _objects(reader, names)


def _objects(reader: Reader, names: Collection[str]) -> Steps[None]:
    while (yield from call_object(reader, names)):
        yield from skip_space(reader)
        reader.take()
        if not (yield from accept(reader, ";")):
            return
        yield from skip_space(reader)
    yield from release(reader)


def mistral(reader: Reader) -> Steps[None]:
    """`[TOOL_CALLS]` and an array of objects; or, for each call, `[TOOL_CALLS]name[ARGS]{...}`."""
    while (yield from pass_until(reader, markers(MISTRAL_CALLS), Content)):
        yield from skip_space(reader)
        is_array = (yield from peek(reader)) == "["
        is_whole = yield from (call_array(reader) if is_array else _named_call(reader))
        if not is_whole:
            yield from release(reader)
            continue
        yield from skip_space(reader)
        reader.take()


def _named_call(reader: Reader) -> Steps[bool]:
    name = yield from read_while(reader, NAME)
    if name and (yield from accept(reader, MISTRAL_ID)):
        yield from read_while(reader, NAME)
    if name:
        yield from accept(reader, MISTRAL_ARGUMENTS)
        yield from skip_space(reader)
    return bool(name) and (yield from _arguments(reader, name))


def deepseek(reader: Reader) -> Steps[None]:
    """Calls between DeepSeek's markers: V3 writes `function`, the name and a fenced block of JSON, V3.1 the name and
    JSON."""
    while (yield from pass_until(reader, markers(DEEPSEEK_CALLS, DEEPSEEK_CALL), Content)):
        if reader.text[: reader.pos].endswith(DEEPSEEK_CALLS):
            yield from skip_space(reader)
            if not (yield from accept(reader, DEEPSEEK_CALL)):
                yield from release(reader)
                continue
        if not (yield from _deepseek_call(reader)):
            yield from release(reader)
            continue
        yield from skip_space(reader)
        yield from accept(reader, DEEPSEEK_CALL_END)
        yield from skip_space(reader)
        if (yield from accept(reader, DEEPSEEK_CALLS_END)):
            yield from skip_space(reader)
        reader.take()


def _deepseek_call(reader: Reader) -> Steps[bool]:
    head = yield from read_until(reader, markers(DEEPSEEK_SEPARATOR), 256)
    if head is None:
        return False
    name, is_fenced = head[0].strip(), False
    if name == "function":
        name = yield from read_while(reader, NAME)
        yield from skip_space(reader)
        is_fenced = yield from accept(reader, _FENCE)
    yield from skip_space(reader)
    if not NAME.fullmatch(name) or not (yield from _arguments(reader, name)):
        return False
    if is_fenced:
        yield from skip_space(reader)
        yield from accept(reader, _FENCE_END)
    return True


def enforced_calls(reader: Reader) -> Steps[None]:
    """An answer that is an array of calls."""
    yield from skip_space(reader)
    if (yield from call_array(reader)):
        yield from skip_space(reader)
        reader.take()
    else:
        yield from release(reader)


def enforced_arguments(reader: Reader, name: str) -> Steps[None]:
    """An answer that is the arguments of the function `name`."""
    yield from skip_space(reader)
    if (yield from _arguments(reader, name)):
        yield from skip_space(reader)
        reader.take()
    else:
        yield from release(reader)


def _arguments(reader: Reader, name: str) -> Steps[bool]:
    if (yield from peek(reader)) != "{":
        return False
    yield reader.begin_call(name)
    return (yield from scan_value(reader, passes_on=True)) is not None


def call_array(reader: Reader) -> Steps[bool]:
    """`[{"name": ..., "arguments": {...}}, ...]`. False: what was looked at is none."""
    if not (yield from accept(reader, "[")):
        return False
    while True:
        yield from skip_space(reader)
        if not (yield from call_object(reader)):
            return False
        yield from skip_space(reader)
        if not (yield from accept(reader, ",")):
            return (yield from accept(reader, "]"))


def call_object(reader: Reader, names: Collection[str] | None = None) -> Steps[bool]:
    """One object with `name` and `arguments` (or `parameters`), and whatever else. False: what was looked at is none.

    Arguments are told as they come when the name stands before them. With `names` only these functions are called, and
    only with arguments.
    """
    name: str | None = None
    arguments: str | None = None
    has_begun = False
    if not (yield from accept(reader, "{")):
        return False
    while True:
        yield from skip_space(reader)
        key = yield from _key(reader)
        if key is None:
            return False
        if key in _ARGUMENTS and name is not None and not has_begun and (yield from peek(reader)) == "{":
            yield reader.begin_call(name)
            has_begun = True
            value = yield from scan_value(reader, passes_on=True)
        else:
            value = yield from scan_value(reader)
            arguments = value if key in _ARGUMENTS and arguments is None else arguments
        if key == "name" and name is None:
            name = _name(value, names)
            value = name
        if value is None:
            return False
        yield from skip_space(reader)
        if (yield from accept(reader, ",")):
            continue
        if not (yield from accept(reader, "}")):
            return False
        if has_begun:
            return True
        return (yield from _tell_late(reader, name, arguments, is_bare=names is None))


def _tell_late(reader: Reader, name: str | None, arguments: str | None, *, is_bare: bool) -> Steps[bool]:
    """A call whose object has ended before anything of it was told."""
    found = "{}" if arguments is None and is_bare else _object(arguments)
    if name is None or found is None:
        return False
    yield reader.begin_call(name)
    yield reader.arguments(found)
    return True


def _key(reader: Reader) -> Steps[str | None]:
    if (yield from peek(reader)) != '"':
        return None
    raw = yield from scan_value(reader)
    yield from skip_space(reader)
    if raw is None or not (yield from accept(reader, ":")):
        return None
    yield from skip_space(reader)
    return str(json.loads(raw))


def _name(raw: str | None, names: Collection[str] | None) -> str | None:
    name = json.loads(raw) if raw is not None and raw.startswith('"') else None
    if not isinstance(name, str) or not NAME.fullmatch(name) or (names is not None and name not in names):
        return None
    return name


def _object(raw: str | None) -> str | None:
    """Arguments as the text of an object; some models write that text into a string."""
    if raw is not None and raw.startswith('"'):
        raw = json.loads(raw)
        try:
            json.loads(raw or "")
            (raw or "").encode()  # half a character could not be sent
        except (ValueError, RecursionError):
            return None
    if raw == "null":
        return "{}"
    return raw if raw is not None and raw.lstrip().startswith("{") else None
