"""An answer whose node fails behind any of its tokens is the answer of one whose node does not."""

from __future__ import annotations

import json
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.wire.errors import RequestFailed
from baton.wire.messages.membership import DECODE
from tests.router.conversations import CALL, PARAMETERS, THOUGHT, conversing
from tests.router.fake_node import FakeNode, LegMessage, first_index
from tests.router.http_client import Reply, chat_body, completion_body, fetch
from tests.router.rig import Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DOUBLE = {"type": "function", "function": {"name": "double", "parameters": PARAMETERS}}
_RANDOM = re.compile(r'"(id|created)":("[^"]*"|\d+)')


class Cutting:
    """A script: the answer is `token_ids`; every first attempt fails behind `at` tokens, none when that is negative."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.at = -1

    def __call__(self, node: FakeNode, leg: LegMessage) -> None:
        """See `Script`."""
        if leg.params.prompt_logprobs is not None and leg.prompt.num_tokens > 1:
            node.tell_prompt(leg)
        is_cut = leg.attempt == 1 and self.at >= 0
        end = self.at if is_cut else len(self.token_ids)
        for index in range(first_index(leg), end):
            is_last = index == len(self.token_ids) - 1
            node.emit(leg, self.token_ids[index : index + 1], index, "complete" if is_last else "")
        if is_cut:
            node.fail(leg, RequestFailed.code)


def told(reply: Reply, *, streamed: bool) -> Any:
    """What an answer says; of a stream the text of each choice, why it ended and how many tokens there are."""
    assert reply.status == 200
    if not streamed:
        answer = json.loads(_RANDOM.sub(r'"\1":0', reply.body.decode()))
        del answer["usage"]["prompt_tokens_details"]
        return answer
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            part = choice if "text" in choice else {"text": choice["delta"].get("content", "")}
            texts[index] = texts.get(index, "") + part["text"]
            ends[index] = choice["finish_reason"] or ends.get(index)
    return texts, ends, reply.chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "text", "members"),
    [
        (CHAT, "Käse 🧀 ß", {"stream": True, "stream_options": {"include_usage": True}}),
        (COMPLETIONS, "Zoë. END🧀!", {"stream": True, "stop": ["END🧀"], "stream_options": {"include_usage": True}}),
        (COMPLETIONS, "né 🧀", {"n": 2, "logprobs": 1, "echo": True, "prompt": ["ab", "c"]}),
        (CHAT, f"{THOUGHT}ü{CALL}", {"tools": [DOUBLE]}),
    ],
    ids=["characters of several bytes", "stop string", "choices, prompts and log probabilities", "tool call"],
)
async def test_wherever_an_attempt_ends_the_text_is_the_same(
    prompts: PromptMaker, path: str, text: str, members: dict[str, Any]
) -> None:
    script = Cutting(prompts.tokenizer.encode(text))
    body = json.dumps((chat_body if path == CHAT else completion_body)(**members)).encode()
    running: AbstractAsyncContextManager[Server] = conversing(prompts) if "tools" in members else serving(prompts)
    async with running as server:
        await server.rig.join(DECODE, script)
        undisturbed = told(await fetch(server, "POST", path, body), streamed="stream" in members)
        places = range(0, len(script.token_ids), 1 + len(script.token_ids) // 32)
        for place in places:
            script.at = place
            assert told(await fetch(server, "POST", path, body), streamed="stream" in members) == undisturbed
        # behind a whole stop string there is nothing to try again
        assert server.rig.relay.counters.num_retries >= len(places) - 2
