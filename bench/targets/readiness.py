"""Whether a server does its work: not only listens, but answers a request.

Knows HTTP and the OpenAI names, no processes. A proxy listens long before its engines do, and a router before
its nodes: two tokens are asked for, so that whoever makes token 1 and whoever makes the later ones have to be there.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

_PROMPT = "Hello"
_NUM_TOKENS = 2
_MAX_LOOK_S = 5.0
_MAX_SHOWN = 200


def why_not_ready(url: str, timeout_s: float) -> str:
    """One sentence, or "" when the server answers a request.

    A server that knows no health route is asked for its models. One that refuses the request as the client's mistake
    (a key is needed, only chat is served) is ready too: what it makes of the benchmark's own requests is seen there.
    """
    look_s = min(timeout_s, _MAX_LOOK_S)
    try:
        status, _ = _ask(url, "GET", "/health", None, look_s)
        if status not in (200, 404, 405):
            return f"{url}/health answered {status}"
        is_healthy = status == 200
        status, answer = _ask(url, "GET", "/v1/models", None, look_s)
        if status in (401, 403) or (is_healthy and status == 404):
            return ""
        if status != 200:
            return f"{url}/v1/models answered {status}"
        model = json.loads(answer)["data"][0]["id"]
        body = {"model": model, "prompt": _PROMPT, "max_tokens": _NUM_TOKENS, "temperature": 0}
        status, answer = _ask(url, "POST", "/v1/completions", body, timeout_s)
        is_refused = 400 <= status < 500 and status not in (408, 425, 429)
        if status != 200 and not is_refused:
            return f"{url}/v1/completions answered {status}: {answer.decode(errors='replace')[:_MAX_SHOWN]}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {str(error) or type(error).__name__}"
    except (ValueError, LookupError, TypeError):
        return f"{url}/v1/models lists no model"
    return ""


def node_counts(url: str, timeout_s: float) -> Any:
    """What a Baton router says of its nodes; None where nothing is said."""
    try:
        return json.loads(_ask(url, "GET", "/health", None, timeout_s)[1])["nodes"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None


def _ask(url: str, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_class(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, parts.path + path, payload, {"Content-Type": "application/json"} if payload else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
