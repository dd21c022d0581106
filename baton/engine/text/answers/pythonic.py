"""Tool calls written as a Python list: `[f(a=1, b="x"), g()]`, of Llama 4 and others.

Nothing is evaluated: a call is read as syntax, and only literals are arguments. Any answer may begin with a bracket, so
only functions of the request are called; a call is told when it is whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from baton.engine.text.answers.json_calls import NAME, PYTHON_TAG
from baton.engine.text.answers.reader import Reader, Steps, accept, peek, read_while, release, skip_space

START, END = "<|python_start|>", "<|python_end|>"
MAX_CALL_CHARS = 2**16
_MAX_DEPTH = 64
_WORDS = {"true": True, "false": False, "null": None}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_PLAIN_RUN = re.compile(r"""[^()\[\]{}'"\\]+""")
_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError)


def pythonic(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Read an answer that begins with a list of calls. Text behind the list is content."""
    yield from skip_space(reader)
    yield from accept(reader, START)
    yield from accept(reader, PYTHON_TAG)
    yield from skip_space(reader)
    if not (yield from accept(reader, "[")) or not (yield from _calls(reader, names)):
        yield from release(reader)
        return
    yield from skip_space(reader)
    if (yield from accept(reader, END)):
        yield from skip_space(reader)
    reader.take()


def _calls(reader: Reader, names: Collection[str]) -> Steps[bool]:
    while True:
        yield from skip_space(reader)
        start = reader.pos
        name = yield from read_while(reader, NAME)
        if name not in names or (yield from peek(reader)) != "(":
            return False
        if not (yield from _skip_brackets(reader)):
            return False
        arguments = _arguments(reader.text[start : reader.pos], name)
        if arguments is None:
            return False
        yield reader.begin_call(name)
        yield reader.arguments(arguments)
        yield from skip_space(reader)
        if not (yield from accept(reader, ",")):
            return (yield from accept(reader, "]"))


def _skip_brackets(reader: Reader) -> Steps[bool]:
    """Look at everything up to the bracket that closes the next one. False: it does not come."""
    start, closers, quote = reader.pos, list[str](), ""
    while reader.pos - start < MAX_CALL_CHARS and len(closers) <= _MAX_DEPTH:
        char = yield from peek(reader)
        if not char:
            return False
        run = _PLAIN_RUN.match(reader.text, reader.pos, start + MAX_CALL_CHARS)
        if run is not None:
            reader.pos = run.end()
            continue
        reader.pos += 1
        if quote:
            if char == "\\":
                yield from peek(reader)
                reader.pos = min(reader.pos + 1, len(reader.text))
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif not closers or char != closers.pop():
            return False
        if not closers and not quote:
            return True
    return False


def _arguments(text: str, name: str) -> str | None:
    """The arguments of a call as JSON; None when it is no call with named literals."""
    try:
        call = ast.parse("f" + text[len(name) :], mode="eval").body
        if not isinstance(call, ast.Call) or call.args or None in (found.arg for found in call.keywords):
            return None
        members = {found.arg: _literal(found.value) for found in call.keywords}
        arguments = json.dumps(members, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half a character could not be sent
    except _ERRORS:
        return None
    return arguments


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {key.value: _literal(item) for key, item in zip(keys, values, strict=True)}  # type: ignore[union-attr]
    raise ValueError("not a literal")
