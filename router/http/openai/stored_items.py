"""Items of /v1/responses as they are stored: those of an input get ids and the form in which they are listed.

Knows no store. Invariants: the items that a list has have ids of the router's own, each of them once; read
again they are the same messages as before. Log probabilities are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from baton.router.http.openai.replies import json_bytes
from baton.router.http.stored.records import Item, Turn, Version

_Item = Mapping[str, Any]
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ASSISTANT = "assistant"


def turn_of(
    response: Mapping[str, Any], items: Sequence[_Item], follows: str | Version | None, id_of: Callable[[str], str]
) -> Turn:
    """A response that has ended, and the `items` of its own input, to be stored. `id_of`: see `ReplyHead`."""
    output = [Item(item["id"], json_bytes(_stored(item)), is_output=True) for item in response["output"]]
    return Turn(response["id"], follows, (*new_items(items, id_of), *output), json_bytes({**response, "output": []}))


def new_items(items: Sequence[_Item], id_of: Callable[[str], str]) -> tuple[Item, ...]:
    """Items of an input, to be stored."""
    listed = [_listed(item, id_of(f"input {number}")) for number, item in enumerate(items)]
    return tuple(Item(item["id"], json_bytes(item)) for item in listed)


def response_of(turn: Turn) -> dict[str, Any]:
    """The response of a turn, as it was told."""
    return {**json.loads(turn.response), "output": objects_of(item for item in turn.items if item.is_output)}


def objects_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as they are told."""
    return [json.loads(item.content) for item in items]


def _listed(item: _Item, item_id: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    found = {**item, "type": kind, "id": f"{_PREFIXES[kind]}_{item_id}"}
    if kind == "reasoning":
        return {"summary": [], **found}
    found.setdefault("status", "completed")
    if kind == "message":
        found["content"] = _listed_content(item["content"], item["role"] == _ASSISTANT)
    return found


def _listed_content(content: Any, is_output: bool) -> list[_Item]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text: _Item = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
    return [_without_logprobs({**part, **text} if part["type"] == "text" else part) for part in parts]


def _stored(item: _Item) -> _Item:
    return {**item, "content": list(map(_without_logprobs, item["content"]))} if "content" in item else item


def _without_logprobs(part: _Item) -> _Item:
    return {**part, "logprobs": []} if part.get("logprobs") else part
