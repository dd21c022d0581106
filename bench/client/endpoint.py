"""Where requests go and what is sent: an OpenAI-compatible server, asked for its models, and the body of each request.

Owns the three forms of a prompt (token ids, text, messages) and how a conversation grows with the answers so far. Sends
no load.

Invariant: the prompt of turn k + 1 begins with the whole prompt of turn k and its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from baton.bench.client.outcome import Outcome
from baton.bench.workload.dataset_settings import Conversation, Turn
from baton.wire.errors import InvalidSetting, RequestFailed

Kind: TypeAlias = Literal["completions", "chat"]

PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_BATON = "baton"
PromptForm: TypeAlias = Literal["ids", "text", "chat"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`base_url` has no slash at its end. `is_baton`: it takes Baton's own request members and reports its timings."""

    base_url: str
    path: str
    kind: Kind
    model: str
    is_baton: bool

    @property
    def url(self) -> str:
        return self.base_url + self.path


async def probe(
    base_url: str, kind: Kind, model: str, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Endpoint:
    """Ask a server for its models; `model` "" takes the first. Raises `InvalidSetting`, `RequestFailed`."""
    base_url = checked_base_url(base_url)
    listed = await _models(f"{base_url}/v1/models", timeout_s, headers or {})
    if not listed and not model:
        raise RequestFailed(f"{base_url}/v1/models lists no model: name one")
    chosen: dict[str, Any] = next((entry for entry in listed if entry.get("id") == model), listed[0] if listed else {})
    return Endpoint(base_url, PATHS[kind], kind, model or str(chosen["id"]), chosen.get("owned_by") == _BATON)


def checked_base_url(base_url: str) -> str:
    """`base_url` without slashes at its end. Raises `InvalidSetting`."""
    try:
        address = urlsplit(base_url)
        is_usable = address.scheme in ("http", "https") and address.hostname and (address.port or 1)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidSetting(f"base URL {base_url!r:.200}: http://HOST:PORT is needed")
    return base_url.rstrip("/")


async def _models(url: str, timeout_s: float, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The entries of the list, [] where a server answers but has no such list."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, session.get(url) as answer:
            if answer.status not in (200, 404):
                raise RequestFailed(f"{url} answered {answer.status}")
            found = await answer.json(content_type=None) if answer.status == 200 else {}
    except ValueError:
        raise RequestFailed(f"{url} did not answer with JSON") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestFailed(f"{url}: {str(error) or f'it did not answer within {timeout_s:g} s'}") from None
    entries = found.get("data") if isinstance(found, dict) else None
    return [entry for entry in entries or () if isinstance(entry, dict) and "id" in entry]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What all requests of a run share. `temperature` None leaves it to the server; `extra_body` overrides members."""

    prompt_form: PromptForm = "ids"
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    with_timings: bool = False


def check_requests(endpoints: Sequence[Endpoint], conversations: Sequence[Conversation], form: PromptForm) -> None:
    """Raise `InvalidSetting` when an endpoint does not take this form of prompt, or a turn has none in it."""
    for endpoint in endpoints:
        if (endpoint.kind == "chat") != (form == "chat"):
            raise InvalidSetting(f"{endpoint.url} takes no prompts in the form {form!r}")
    for index, conversation in enumerate(conversations):
        for turn in conversation.turns:
            if not (turn.token_ids if form == "ids" else turn.text):
                raise InvalidSetting(
                    f"conversation {index} has no {form} to send: it needs a tokenizer or longer turns"
                )


class History:
    """One conversation as far as it has got."""

    def __init__(self, conversation: Conversation, endpoint: Endpoint, options: RequestOptions) -> None:
        self._turns = conversation.turns
        self._endpoint = endpoint
        self._options = options
        self._num_asked = 0
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, str]] = []
        self.num_prompt_tokens = 0

    @property
    def num_left(self) -> int:
        return len(self._turns) - self._num_asked

    def next_body(self) -> dict[str, Any]:
        """The body of the next turn's request. `num_prompt_tokens` is then its length, as far as known."""
        turn = self._turns[self._num_asked]
        self._num_asked += 1
        self.num_prompt_tokens += len(turn.token_ids)
        options = self._options
        body = {"model": self._endpoint.model, **self._prompt(turn), "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        body |= {} if options.temperature is None else {"temperature": options.temperature}
        flags = {
            "ignore_eos": options.ignore_eos,
            "return_token_ids": options.prompt_form == "ids" and self.num_left > 0,
            "return_timings": options.with_timings and self._endpoint.is_baton,
        }
        return body | {name: True for name, is_asked in flags.items() if is_asked} | options.extra_body

    def add_answer(self, outcome: Outcome) -> None:
        """Put the answer of the last request behind its prompt.

        Where the server does not tell the ids of its tokens, ids of the turn before stand for them: the length is right
        then, but a prefix cache finds no answers.
        """
        form = self._options.prompt_form
        if form == "ids":
            filler = islice(cycle(self._turns[self._num_asked - 1].token_ids), outcome.num_output_tokens)
            self._ids.extend(outcome.output_ids or filler)
        elif form == "text":
            self._text += outcome.text
        else:
            self._messages.append({"role": "assistant", "content": outcome.text})
        self.num_prompt_tokens += outcome.num_output_tokens

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        form = self._options.prompt_form
        if form == "chat":
            self._messages.append({"role": "user", "content": turn.text})
            return {"messages": list(self._messages), "max_completion_tokens": turn.num_output_tokens}
        if form == "text":
            self._text += turn.text
            return {"prompt": self._text, "max_tokens": turn.num_output_tokens}
        self._ids.extend(turn.token_ids)
        return {"prompt": list(self._ids), "max_tokens": turn.num_output_tokens}
