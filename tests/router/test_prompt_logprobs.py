"""Log probabilities of a prompt come to the reader once and whole before the first token, whatever happens to nodes."""

from __future__ import annotations

import asyncio

import pytest

from baton.engine.cache.hashing import block_hashes
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.flight import Flight
from baton.router.requests.inbox import Inbox
from baton.wire.errors import RequestFailed
from baton.wire.messages.legs import Cancel, Decode, Prefill
from baton.wire.messages.membership import DECODE
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import FakeNode
from tests.router.rig import MODEL, PROMPT, Rig, relaying

SCORED = DecodingParams(max_tokens=16, prompt_logprobs=2)
NUM_TOKENS = len(PROMPT)


class Reader:
    """A request that wants log probabilities of its prompt, and what its reader has got."""

    def __init__(self, rig: Rig, params: DecodingParams = SCORED, prompt_ids: tuple[int, ...] = PROMPT) -> None:
        self._rig = rig
        self._inbox = Inbox()
        self._flight: Flight = rig.relay.start(RelayRequest(MODEL, Prompt(prompt_ids), params), self._inbox)
        self.token_ids: list[int] = []

    async def take(self) -> list[int]:
        """All tokens so far, after the next have come. The prompt is whole when they do."""
        async with asyncio.timeout(30):
            for _, delivery in await self._inbox.take():
                self.token_ids += delivery.token_ids
        self.require_whole()
        return self.token_ids

    def require_whole(self) -> None:
        scored = self._flight.scored_prompt
        assert scored is not None
        assert [row.logprob for row in scored.rows()] == [-float(place) for place in range(1, scored.num_tokens)]
        assert {row.top_ids for row in scored.rows()} <= {(100, 101)}

    def has_tokens(self) -> bool:
        """Whether tokens are there to be taken."""
        return bool(self._inbox._due)

    async def close(self) -> None:
        self._rig.relay.close(self._flight)
        await self._rig.settle()


async def test_the_node_that_computes_the_prompt_tells_them() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        reader = Reader(rig)
        prefill_leg, decode_leg = await prefill.expect(Prefill), await decode.expect(Decode)
        assert (prefill_leg.params.prompt_logprobs, decode_leg.params.prompt_logprobs) == (2, None)
        prefill.tell_prompt(prefill_leg, 1, 7)
        prefill.tell_prompt(prefill_leg, 8)
        prefill.emit(prefill_leg, [1])
        assert await reader.take() == [1]
        decode.emit(decode_leg, [1, 2], 0, finish="length")
        assert await reader.take() == [1, 2]
        await reader.close()


async def test_a_decode_node_that_computes_the_prompt_tells_them() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        reader = Reader(rig)
        leg = await decode.expect(Decode)
        assert leg.params.prompt_logprobs == 2
        decode.tell_prompt(leg)
        decode.emit(leg, [5], finish="length")
        assert await reader.take() == [5]
        await reader.close()


async def test_a_prompt_of_one_token_has_none_to_wait_for() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        reader = Reader(rig, prompt_ids=(9,))
        decode.emit(await decode.expect(Decode), [5], finish="length")
        assert await reader.take() == [5]
        await reader.close()


async def test_tokens_of_the_decode_node_wait_for_the_prompt() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        reader = Reader(rig)
        prefill_leg, decode_leg = await prefill.expect(Prefill), await decode.expect(Decode)
        decode.emit(decode_leg, [1], 0)
        decode.emit(decode_leg, [2], 1, finish="length")
        prefill.tell_prompt(prefill_leg, 1, 7)
        await rig.has_heard(decode)
        await rig.has_heard(prefill)
        assert not reader.has_tokens()
        prefill.tell_prompt(prefill_leg, 8)
        assert await reader.take() == [1, 2]
        assert rig.relay.counters.num_retries == 0
        await reader.close()


async def test_the_loss_of_the_prefill_node_counts_until_the_prompt_is_whole() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        reader = Reader(rig)
        prefill_leg, decode_leg = await prefill.expect(Prefill), await decode.expect(Decode)
        prefill.tell_prompt(prefill_leg, 1, 7)
        decode.emit(decode_leg, [1], 0)
        await rig.has_heard(decode)
        prefill.die()
        second = await decode.expect(Decode)
        assert (second.attempt, second.prefill_peer, second.params.prompt_logprobs) == (2, None, 2)
        assert (second.prompt.token_ids, second.output_ids) == (PROMPT, ())
        decode.tell_prompt(second)
        decode.emit(second, [1], 0, finish="length")
        assert await reader.take() == [1]
        await reader.close()


async def test_a_later_attempt_does_not_tell_a_whole_prompt_again() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        reader = Reader(rig)
        prefill_leg = await prefill.expect(Prefill)
        decode_leg = await decode.expect(Decode)
        prefill.tell_prompt(prefill_leg)
        prefill.emit(prefill_leg, [1])
        assert await reader.take() == [1]
        decode.fail(decode_leg, RequestFailed.code)
        again = await prefill.expect(Prefill)
        assert (again.attempt, again.params.prompt_logprobs, again.output_ids) == (2, None, (1,))
        decode.emit(await decode.expect(Decode), [2], 1, finish="length")
        assert await reader.take() == [1, 2]
        await reader.close()


@pytest.mark.parametrize("first", [9, 1])
async def test_a_lost_message_of_the_prompt_costs_the_attempt(first: int) -> None:
    """Either the next message leaves a gap, or the node's token comes without the rest."""
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        reader = Reader(rig)
        leg = await decode.expect(Decode)
        decode.tell_prompt(leg, first, 3)
        decode.emit(leg, [1])
        again = await decode.expect(Decode)
        assert (again.attempt, again.params.prompt_logprobs) == (2, 2)
        assert rig.relay.counters.num_retries == 1
        decode.tell_prompt(leg, 4)  # late words of the first attempt change nothing
        decode.tell_prompt(again)
        decode.tell_prompt(again)
        decode.emit(again, [1], finish="length")
        assert await reader.take() == [1]
        await reader.close()


async def test_a_prompt_that_a_decode_node_has_cached_is_still_long() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        await _cache_everything(rig, decode)
        plain = rig.call()
        assert (await decode.expect(Decode)).prefill_peer is None
        await plain.cancel()
        reader = Reader(rig)
        assert (await decode.expect(Decode)).prefill_peer is not None
        assert (await prefill.expect(Prefill)).params.prompt_logprobs == 2
        await reader.close()


async def test_a_node_that_tells_of_an_unknown_request_is_stopped() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        reader = Reader(rig)
        leg = await decode.expect(Decode)
        await reader.close()
        await decode.expect(Cancel)
        decode.tell_prompt(leg)
        assert (await decode.expect(Cancel)).handoff_id == leg.handoff_id


async def _cache_everything(rig: Rig, node: FakeNode) -> None:
    hello = node.hello
    hashes = block_hashes(hello.fingerprint, Prompt(PROMPT), (), hello.layout.block_size)
    node.report_cache(b"".join(hashes))
    await rig.has_heard(node)
