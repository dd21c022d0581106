"""Where requests go: one path of one OpenAI-compatible server, found out by asking it.

Knows `/v1/models` and no other part of a server. Sends no load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from wire.errors import InvalidSetting, RequestFailed

Kind: TypeAlias = Literal["completions", "chat"]

PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_BATON = "baton"


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
        """What requests are posted to."""
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
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise InvalidSetting(f"base URL {base_url!r:.200}: http://HOST:PORT is needed")
    return base_url.rstrip("/")


async def _models(url: str, timeout_s: float, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The entries of the list, [] where a server answers but has no such list."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, session.get(url) as answer:
            if answer.status == 404:
                return []
            if answer.status != 200:
                raise RequestFailed(f"{url} answered {answer.status}")
            found = await answer.json(content_type=None)
    except TimeoutError:
        raise RequestFailed(f"{url} did not answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestFailed(f"{url}: {error}") from None
    except ValueError:
        raise RequestFailed(f"{url} did not answer with JSON") from None
    entries = found.get("data") if isinstance(found, dict) else None
    return [entry for entry in entries if isinstance(entry, dict) and "id" in entry] if entries else []
