"""Renders conversations with chat templates that come with a request, each in a process of its own.

Owns these processes: how many there are at once, how long one may take, and that none is left. What a template may
reach, and how much processor time and memory it may use, is `baton.engine.text.render_process`'s. Only a router that
trusts its clients renders such templates at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from baton.wire.errors import InvalidRequest

TIMEOUT_S = 20.0
_MAX_AT_ONCE = 2


class RequestTemplates:
    """At most `_MAX_AT_ONCE` templates are rendered at once; the others wait, within their own deadline."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def render(self, source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
        """The text that `ChatTemplate.render` makes with `source` and `arguments`. Raises `InvalidRequest` for whatever
        the template does wrong, taking too long included."""
        asked = json.dumps({"source": source, "special_tokens": dict(special_tokens), **arguments}).encode()
        try:
            async with asyncio.timeout(TIMEOUT_S), self._slots:
                answer = await _ask(asked)
        except TimeoutError:
            raise InvalidRequest(f"rendering took longer than {TIMEOUT_S:g} s", "chat_template") from None
        if "error" in answer:
            raise InvalidRequest(answer["error"], answer["param"] or None)
        return answer["text"]


async def _ask(asked: bytes) -> dict[str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton.engine.text.render_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        answer, _ = await process.communicate(asked)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InvalidRequest("the chat template needs more time or memory than it may have", "chat_template")
    found: dict[str, str] = json.loads(answer)
    return found
