"""Where requests go and what is sent: an OpenAI-compatible server, asked for its models, and the body of each request.

Owns the three forms of a prompt: token ids, text, messages. Sends no load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from baton.bench.workload.dataset_settings import Prompt
from baton.wire.errors import InvalidSetting, RequestFailed

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
_BATON = "baton"
PromptForm: TypeAlias = Literal["ids", "text", "chat"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`base_url` has no slash at its end. `is_baton`: it takes Baton's own request members and reports its timings."""

    base_url: str
    path: str
    model: str
    is_baton: bool

    @property
    def url(self) -> str:
        return self.base_url + self.path


async def probe(
    base_url: str, path: str, model: str, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Endpoint:
    """Ask a server for its models; `model` "" takes the first. Raises `InvalidSetting`, `RequestFailed`."""
    base_url = checked_base_url(base_url)
    listed = await _models(f"{base_url}/v1/models", timeout_s, headers or {})
    if not listed and not model:
        raise RequestFailed(f"{base_url}/v1/models lists no model: name one")
    chosen: dict[str, Any] = next((entry for entry in listed if entry.get("id") == model), listed[0] if listed else {})
    return Endpoint(base_url, path, model or str(chosen["id"]), chosen.get("owned_by") == _BATON)


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


def check_prompts(prompts: Sequence[Prompt], form: PromptForm) -> None:
    """Raise `InvalidSetting` when a prompt has nothing in it to send."""
    for index, prompt in enumerate(prompts):
        if not (prompt.token_ids if form == "ids" else prompt.text):
            raise InvalidSetting(
                f"prompt {index} has no {form} to send: it needs a tokenizer with words, or a larger length"
            )


def body_of(prompt: Prompt, endpoint: Endpoint, options: RequestOptions) -> dict[str, Any]:
    """The body of a prompt's request."""
    if options.prompt_form == "chat":
        messages = [{"role": "user", "content": prompt.text}]
        asked: dict[str, Any] = {"messages": messages, "max_completion_tokens": prompt.num_output_tokens}
    else:
        sent = list(prompt.token_ids) if options.prompt_form == "ids" else prompt.text
        asked = {"prompt": sent, "max_tokens": prompt.num_output_tokens}
    body = {"model": endpoint.model, **asked, "stream": True, "stream_options": {"include_usage": True}}
    body |= {} if options.temperature is None else {"temperature": options.temperature}
    flags = {"ignore_eos": options.ignore_eos, "return_timings": endpoint.is_baton}
    return body | {name: True for name, is_asked in flags.items() if is_asked} | options.extra_body
