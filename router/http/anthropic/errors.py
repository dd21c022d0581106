"""Errors as clients of Anthropic's interface see them: `{"type": "error", "error": {"type", "message"}}`, and `details`
where Anthropic's own clients know how to go on.

What an error says and with which status is the same for all interfaces; see `baton.router.http.openai.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

_PATH = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    # the client sends the whole conversation from then on
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""By the field that an error is about."""


def is_of_messages(http: web.Request) -> bool:
    """Whether the client speaks Anthropic's interface."""
    return http.path == _PATH or http.path.startswith(f"{_PATH}/")


def messages_error(status: int, body: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """The form of an error here. `body`: the one that clients of OpenAI's interface get with this status."""
    fallback = "invalid_request_error" if 400 <= status < 500 else "api_error"
    said = body["error"]
    error: dict[str, Any] = {"type": _TYPES.get(status, fallback), "message": said["message"]}
    if said.get("param") in _DETAILS:
        error["details"] = _DETAILS[said["param"]]
    found: dict[str, Any] = {"type": "error", "error": error}
    return found if request_id is None else {**found, "request_id": request_id}
