"""`best_of`: which choices a client gets, what it sees of the others, and what it pays for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from baton.wire.messages.output import TokenEvent, TokenLogprobs, Tokens
from tests.router.fake_node import FakeNode, LegMessage
from tests.router.http_client import post_completion
from tests.router.rig import Server, serving

LOGPROBS = ([-1.0, -1.0], [-0.5, -0.5, -0.5, -0.5], [-0.25, -3.0], [-0.5])
"""Of the tokens of each choice. By their sums the second one would be third."""


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        await running.rig.join(DECODE, _say(prompts))
        yield running


def _say(prompts: PromptMaker, logprobs: Sequence[Sequence[float]] = LOGPROBS) -> Any:
    """Choice c of a prompt says its letter as often as it has log probabilities, and then the prompt's last letter."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        last = leg.prompt.token_ids[leg.prompt.num_tokens - 1]
        mine = logprobs[leg.params.choice]
        token_ids = [*prompts.tokenizer.encode("ABCD"[leg.params.choice]) * (len(mine) - 1), last]
        scores = tuple(TokenLogprobs(value, (), ()) for value in mine)
        node.send(Tokens(node.hello.epoch, (TokenEvent(leg.handoff_id, 1, 0, tuple(token_ids), scores, "length", 0),)))

    return script


async def _choices(server: Server, **members: Any) -> list[tuple[int, str]]:
    reply = (await post_completion(server, **members)).json()
    return [(choice["index"], choice["text"]) for choice in reply["choices"]]


async def test_the_choices_with_the_highest_mean_are_returned_the_best_first(server: Server) -> None:
    assert await _choices(server, prompt="x", n=3, best_of=4) == [(0, "BBBx"), (1, "x"), (2, "Ax")]
    assert await _choices(server, prompt="x", best_of=3) == [(0, "BBBx")]


async def test_each_prompt_has_its_own_best(server: Server) -> None:
    found = await _choices(server, prompt=["x", "y"], n=2, best_of=4)
    assert found == [(0, "BBBx"), (1, "x"), (2, "BBBy"), (3, "y")]


async def test_all_that_was_generated_is_counted(server: Server) -> None:
    usage = (await post_completion(server, prompt="x", best_of=4)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, sum(map(len, LOGPROBS)))


@pytest.mark.parametrize(("asked", "shown"), [(None, None), (0, [-0.5] * 4)])
async def test_log_probabilities_are_shown_to_who_asked_for_them(
    server: Server, asked: int | None, shown: list[float] | None
) -> None:
    (choice,) = (await post_completion(server, best_of=4, logprobs=asked, return_token_ids=True)).json()["choices"]
    assert (choice["logprobs"] and choice["logprobs"]["token_logprobs"]) == shown
    assert len(choice["token_ids"]) == 4


async def test_as_many_as_n_are_returned_as_they_are(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        decode = await server.rig.join(DECODE, _say(prompts))
        found = await _choices(server, prompt="x", n=4, best_of=4, logprobs=0)
        assert [text for _, text in found] == ["Ax", "BBBx", "Cx", "x"]
        assert (await decode.expect(Decode)).params.logprobs == 0
        decode.script = lambda node, leg: node.emit(leg, [70], finish="length")
        await _choices(server, n=40, best_of=40)
        assert (await decode.expect(Decode)).params.logprobs is None


async def test_a_choice_without_a_reported_token_comes_last(server: Server) -> None:
    assert await _choices(server, prompt="x", n=3, best_of=4, stop=["B"]) == [(0, "x"), (1, "Ax"), (2, "Cx")]


async def test_an_echo_comes_with_every_choice(server: Server) -> None:
    assert await _choices(server, prompt="x", echo=True, n=2, best_of=4) == [(0, "xBBBx"), (1, "xx")]
