"""Whether a server does its work: not only listens, but answers a request.

Knows HTTP and the OpenAI names, no processes. A proxy listens long before its engines do, and a router before
its nodes: two tokens are asked for, so that whoever makes token 1 and whoever makes the later ones have to be there.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_REQUEST = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
_MAX_LOOK_S = 5.0
_MAX_SHOWN = 200


def why_not_ready(url: str, timeout_s: float) -> str:
    """One sentence, or "" when the server answers a request.

    A server that knows no health route is asked for its models. One that refuses the request as the client's mistake
    (a key is needed, only chat is served) is ready too: what it makes of the benchmark's own requests is seen there.
    """
    look_s = min(timeout_s, _MAX_LOOK_S)
    try:
        health, _ = _ask(f"{url}/health", look_s)
        if health not in (200, 404, 405):
            return f"{url}/health answered {health}"
        status, answer = _ask(f"{url}/v1/models", look_s)
        if status in (401, 403) or (health == 200 and status == 404):
            return ""
        if status != 200:
            return f"{url}/v1/models answered {status}"
        model = json.loads(answer)["data"][0]["id"]
        status, answer = _ask(f"{url}/v1/completions", timeout_s, {"model": model, **_REQUEST})
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
        return json.loads(_ask(f"{url}/health", timeout_s)[1])["nodes"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None


def _ask(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """GET, or POST of `body`; no proxy is in between."""
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, payload, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
