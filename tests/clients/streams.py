"""Streams that a load generator has recorded, held against the same requests without streaming.

Knows the answers of the three endpoints, and the file that aiperf writes with `--export-level raw`: a line of JSON for
each request, with its body and the events it got. Requests have to be greedy, so that both answers are the same.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Json = Mapping[str, Any]
REQUEST_TIMEOUT_S = 60.0


class Told(NamedTuple):
    """What an answer says: its text, and the tokens of prompt and output by its usage."""

    text: str
    num_prompt_tokens: int | None
    num_output_tokens: int | None


def check_streams(file: Path, ask: Callable[[Json], Json], count: int) -> None:
    """Ask once more for each of `count` streams in `file`. Raises `ValueError` when there are others, or when an answer
    tells anything else than its stream."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    if len(records) != count:
        raise ValueError(f"{len(records)} streams were recorded, not {count}")
    for number, record in enumerate(records):
        packets = [packet["value"] for response in record["responses"] for packet in response["packets"]]
        stream = told_by_stream(json.loads(value) for value in packets if value.startswith("{"))
        body = {name: value for name, value in record["payload"].items() if not name.startswith("stream")}
        whole = told_by_answer(ask(body))
        if stream != whole or not whole.text:
            raise ValueError(f"request {number}: the stream told {stream}, the answer {whole}")


def asking(url: str) -> Callable[[Json], Json]:
    """Asks by POST at `url`."""

    def ask(body: Json) -> Json:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            answer: Json = json.load(response)
        return answer

    return ask


def told_by_stream(events: Iterable[Json]) -> Told:
    """What the events of one stream tell together."""
    texts: list[str] = []
    usage: Json = {}
    for event in events:
        texts += [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in _choices(event)]
        texts += [event["delta"]] if event.get("type") == "response.output_text.delta" else []
        usage = event.get("usage") or event.get("response", {}).get("usage") or usage
    return _told("".join(texts), usage)


def told_by_answer(answer: Json) -> Told:
    """What an answer tells that was not streamed."""
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in _choices(answer)]
    texts += [part["text"] for item in answer.get("output", ()) for part in item["content"]]
    return _told("".join(texts), answer["usage"])


def _choices(event: Json) -> Iterable[Json]:
    choices: Iterable[Json] = event.get("choices", ())
    return choices


def _told(text: str, usage: Json) -> Told:
    prompt, output = (usage.get(f"{first}_tokens", usage.get(f"{second}_tokens")) for first, second in _USAGE_NAMES)
    return Told(text, prompt, output)


_USAGE_NAMES = (("prompt", "input"), ("completion", "output"))
