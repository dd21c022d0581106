"""Predictions on their way to the node that generates, and what answers say of drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.wire.drafts import PREDICTION, VerifiedDraft
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import FakeNode, LegMessage, choice_legs
from tests.router.http_client import Reply, fetch, post_chat, post_completion
from tests.router.rig import MODEL, Server, serving

TEXT = "def area(width, height):\n    return width * height\n"
PREDICTED: dict[str, Any] = {"prediction": {"type": "content", "content": TEXT}}
ALL_WRONG, TWO_RIGHT = VerifiedDraft(PREDICTION, 4, 0), VerifiedDraft(PREDICTION, 3, 2)


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def drafting(node: FakeNode, leg: LegMessage) -> None:
    """Ten tokens in five steps for each choice, the last with a draft of more than its answer needs. The second choice
    has tried a token more in vain."""
    for choice in choice_legs(leg):
        node.emit(choice, [70], 0)
        node.emit(choice, [71], 1, draft=replace(ALL_WRONG, num_tokens=4 + choice.params.choice))
        node.emit(choice, [72, 73, 74], 2, draft=TWO_RIGHT)
        node.emit(choice, [75], 5, draft=VerifiedDraft("ngram", 2, 0))
        node.emit(choice, [76, 77, 78, 79], 6, "length", draft=VerifiedDraft("ngram", 5, 5))


def details_of(reply: Reply) -> dict[str, Any]:
    found = reply.json()["usage"]["completion_tokens_details"]
    assert isinstance(found, dict)
    return found


ONE_CHOICE = {
    "accepted_prediction_tokens": 2,
    "rejected_prediction_tokens": 5,
    "drafts": {
        "prediction": {"steps": 2, "tokens": 7, "accepted": 2},
        "ngram": {"steps": 2, "tokens": 7, "accepted": 4},
    },
}
TWO_CHOICES = {
    "accepted_prediction_tokens": 4,
    "rejected_prediction_tokens": 11,
    "drafts": {
        "prediction": {"steps": 4, "tokens": 15, "accepted": 4},
        "ngram": {"steps": 4, "tokens": 14, "accepted": 8},
    },
}


@pytest.mark.parametrize("post", [post_chat, post_completion])
@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:20]}, {"type": "text", "text": TEXT[20:]}]])
async def test_the_node_that_generates_gets_the_tokens_and_no_other_does(
    server: Server, prompts: PromptMaker, post: Any, content: object
) -> None:
    prefill, decode = await server.rig.pair()
    body = {"max_tokens": 9, "seed": 1}
    legs: list[tuple[Prefill, Decode]] = []
    for members in (body, body | {"prediction": {"type": "content", "content": content}}):
        asking = asyncio.create_task(post(server, **members))
        legs.append((await prefill.expect(Prefill), await decode.expect(Decode)))
        decode.emit(legs[-1][1], [70], 0, "stop")
        assert (await asking).status == 200
    (plain_prefill, plain), (predicted_prefill, predicted) = legs
    assert predicted.params.prediction_ids == tuple(prompts.tokenizer.encode(TEXT, add_special_tokens=False))
    assert plain.params.prediction_ids == predicted_prefill.params.prediction_ids == ()
    assert predicted.prompt == plain.prompt
    assert predicted_prefill.params == plain_prefill.params


async def test_all_choices_have_the_prediction_beside_whatever_else_is_asked_for(server: Server) -> None:
    decode = await server.rig.join(DECODE, drafting)
    asked = {"n": 2, "logprobs": True, "presence_penalty": 1.0, "seed": 1, "max_completion_tokens": 10}
    reply = await post_chat(server, **asked, **PREDICTED)
    assert reply.status == 200
    assert (await decode.expect(Decode)).params.prediction_ids
    assert details_of(reply) == TWO_CHOICES


async def test_a_prediction_longer_than_the_context_is_cut(server: Server) -> None:
    decode = await server.rig.join(DECODE, drafting, max_request_tokens=64)
    reply = await post_chat(server, max_tokens=10, prediction={"type": "content", "content": "so " * 10_000})
    assert reply.status == 200
    assert len((await decode.expect(Decode)).params.prediction_ids) == 64


async def test_a_stream_and_a_whole_answer_say_what_became_of_it(server: Server) -> None:
    await server.rig.join(DECODE, drafting)
    whole = await post_chat(server, max_tokens=10, **PREDICTED)
    stream = await post_chat(server, max_tokens=10, stream=True, stream_options={"include_usage": True}, **PREDICTED)
    assert details_of(whole) == stream.chunks[-1]["usage"]["completion_tokens_details"] == ONE_CHOICE
    body = json.dumps({"model": MODEL, "input": "Hi", "max_output_tokens": 10, **PREDICTED}).encode()
    usage = (await fetch(server, "POST", "/v1/responses", body)).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0, **ONE_CHOICE}
    assert "completion_tokens_details" not in usage


async def test_drafts_of_other_methods_are_told_without_a_prediction_and_are_none_of_it(server: Server) -> None:
    def script(node: FakeNode, leg: LegMessage) -> None:
        node.emit(leg, [70, 71], 0, "length", draft=VerifiedDraft("ngram", 3, 1))

    await server.rig.join(DECODE, script)
    assert details_of(await post_chat(server)) == {"drafts": {"ngram": {"steps": 1, "tokens": 3, "accepted": 1}}}
    predicted = details_of(await post_chat(server, **PREDICTED))
    assert (predicted["accepted_prediction_tokens"], predicted["rejected_prediction_tokens"]) == (0, 0)


async def test_what_was_drafted_before_a_node_died_counts_too(server: Server) -> None:
    first = await server.rig.join(DECODE)
    asking = asyncio.create_task(post_chat(server, max_tokens=10, **PREDICTED))
    leg = await first.expect(Decode)
    first.emit(leg, [70, 71, 72], 0, draft=TWO_RIGHT)
    await server.rig.has_heard(first)
    first.die()
    second = await server.rig.join(DECODE)
    leg = await second.expect(Decode)
    assert (leg.output_ids, bool(leg.params.prediction_ids)) == ((70, 71, 72), True)
    second.emit(leg, [73], 3, "length", draft=ALL_WRONG)
    details = details_of(await asking)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (2, 5)


async def test_the_client_of_openai_sends_a_prediction_and_reads_what_became_of_it(server: Server) -> None:
    await server.rig.join(DECODE, drafting)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            prediction={"type": "content", "content": TEXT},
        )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 5)
