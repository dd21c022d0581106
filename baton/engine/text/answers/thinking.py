"""Reasoning that stands between two tags at the beginning of an answer."""

from __future__ import annotations

from typing import NamedTuple

from baton.engine.text.answers.deltas import Reasoning
from baton.engine.text.answers.reader import Reader, Steps, accept, markers, pass_until, skip_space


class Tags(NamedTuple):
    """The tags that begin and end reasoning."""

    begin: str
    end: str


def thinking(reader: Reader, tags: Tags, *, is_begun: bool) -> Steps[None]:
    """The reasoning, if there is any. `is_begun`: the prompt ends with the tag that begins it. White space at the tags
    belongs to them. Without an end everything is reasoning."""
    yield from skip_space(reader)
    if not (yield from accept(reader, tags.begin)) and not is_begun:
        reader.pos = 0
        return
    yield from skip_space(reader)
    reader.take()
    reader.begin_reasoning()
    end = yield from pass_until(reader, markers(tags.end), Reasoning)
    if end is None:
        return
    reader.end_reasoning(end)
    yield from skip_space(reader)
    reader.take()
