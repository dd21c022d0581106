"""Answers in gpt-oss's harmony: messages with headers, on channels.

The header of a message names its channel and, for a call, its recipient. `analysis` is reasoning, a message to
`functions.NAME` is a call, everything else is content.
"""

from __future__ import annotations

import re

from baton.engine.text.answers.deltas import Content, Reasoning
from baton.engine.text.answers.json_scanner import scan_value
from baton.engine.text.answers.reader import Reader, Steps, accept, markers, pass_until, read_until, release, skip_space

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis")
_MAX_HEADER = 1024


def harmony(reader: Reader) -> Steps[None]:
    """All messages of an answer, of which the prompt wrote the first header's beginning."""
    is_header = yield from accept(reader, " to=")
    while is_header or (yield from pass_until(reader, markers(START, CHANNEL), Content)):
        is_header = False
        header = yield from read_until(reader, markers(MESSAGE), _MAX_HEADER)
        if header is None:
            yield from release(reader)
            continue
        written = reader.take()
        recipient = _RECIPIENT.search(written)
        if recipient is not None:
            yield from _call(reader, recipient[1])
        elif _ANALYSIS.search(written):
            yield from _reasoning(reader)
        else:
            yield from pass_until(reader, markers(*ENDS), Content, strips=False)
        reader.take()


def _reasoning(reader: Reader) -> Steps[None]:
    reader.begin_reasoning()
    end = yield from pass_until(reader, markers(*ENDS), Reasoning, strips=False)
    if end is not None:
        reader.end_reasoning(end)


def _call(reader: Reader, name: str) -> Steps[None]:
    yield reader.begin_call(name)
    yield from skip_space(reader)
    reader.take()
    if (yield from scan_value(reader, passes_on=True)) is None:
        yield from release(reader)
    yield from skip_space(reader)
    yield from pass_until(reader, markers(*ENDS), Content)
