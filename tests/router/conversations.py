"""Helper: a server whose model reasons and calls functions, as a script of its answers says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from baton.engine.text.answers.formats import AnswerFormat
from baton.engine.text.chat_template import ChatTemplate
from baton.router.http.openai.prompts import PromptMaker
from tests.router.fake_node import FakeNode, LegMessage, Script, answering
from tests.router.rig import Server, serving

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.parameters | tojson }};{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<{{ message.reasoning_content }}>{% endif %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{{ message.tool_call_id }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if enable_thinking %}<think>{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 4}}\n</tool_call>'
THOUGHT = "<think>\nA sum.\n</think>\n\n"


@asynccontextmanager
async def conversing(prompts: PromptMaker, **settings: Any) -> AsyncIterator[Server]:
    """A server with calls as Hermes writes them and reasoning as Qwen3 does. `settings`: see `serving`."""
    template = ChatTemplate({"default": TEMPLATE}, {})
    model = replace(prompts, template=template, answer_format=AnswerFormat("hermes", "qwen3"))
    async with serving(model, **settings) as server:
        yield server


def choosing(prompts: PromptMaker, choose: Callable[[str], str]) -> Script:
    """A script: the answer is what `choose` says to the text of the prompt."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        prompt = prompts.tokenizer.decode(leg.prompt.token_ids, skip_special_tokens=False)
        answering(prompts.tokenizer.encode(choose(prompt)), "complete")(node, leg)

    return script


def doubling(prompt: str) -> str:
    """Call `double` once, then tell its result."""
    answer = f"{THOUGHT}It is 8." if "[tool]8" in prompt else f"{THOUGHT}Let me see.{CALL}"
    return answer.removeprefix("<think>") if prompt.endswith("<think>") else answer


def named_events(body: bytes) -> list[Mapping[str, Any]]:
    """The events of a stream in which each event has the name that its data has as its type."""
    found: list[Mapping[str, Any]] = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
