"""Renders one conversation with a chat template that is not the model's: a process of its own, which ends with it.

Reads one JSON object from its standard input (`source`, `special_tokens`, and the arguments of `ChatTemplate.render`)
and writes one to its standard output: `text`, or `error` with `param`. jinja2's sandbox keeps the template from
everything but time and memory, which the kernel limits: a template that takes too much ends this process and nothing
else, also when nobody waits for it any more.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from baton.engine.text.chat_template import ChatTemplate
from baton.wire.errors import InvalidRequest, ModelLoadError

CPU_S = 3
MEMORY_BYTES = 2**30
MAX_TEXT_CHARS = 2**22


def main() -> int:
    """Answer one request to render a template."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asked: dict[str, Any] = json.load(sys.stdin)
    try:
        answer = {"text": _render(**asked)}
    except InvalidRequest as error:
        answer = {"error": error.message, "param": error.param or ""}
    except ModelLoadError as error:
        answer = {"error": error.message, "param": "chat_template"}
    json.dump(answer, sys.stdout)
    return 0


def _render(source: str, special_tokens: dict[str, str], **arguments: Any) -> str:
    text = ChatTemplate({"default": source}, special_tokens).render(**arguments)
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"the chat template made more than {MAX_TEXT_CHARS} characters", "chat_template")
    return text


if __name__ == "__main__":
    sys.exit(main())
