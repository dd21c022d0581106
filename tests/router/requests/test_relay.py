"""A request over both legs, on real sockets with nodes that do as the test says: tokens, failures, losses, limits."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from dataclasses import replace

import pytest

import baton.router.nodes.control
from baton.engine.cache.hashing import block_hashes
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.inbox import Inbox
from baton.router.routing.policies import LeastLoaded
from baton.wire.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NoNode,
    Overloaded,
    RequestFailed,
    TransferFailed,
)
from baton.wire.messages.legs import Cancel, Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import FINGERPRINT, LAYOUT, FakeNode, LegMessage, answering, first_index, make_hello
from tests.router.rig import DEFAULTS, MODEL, PROMPT, Call, Rig, relaying

NODE_FAILED = RequestFailed.code


async def _legs(prefill: FakeNode, decode: FakeNode) -> tuple[Prefill, Decode]:
    return await prefill.expect(Prefill), await decode.expect(Decode)


async def _finish(rig: Rig, call: Call, decode: FakeNode, leg: LegMessage, *token_ids: int) -> list[int]:
    """End the request with these tokens from the decode node, and check that nothing is left of it."""
    decode.emit(leg, token_ids, len(call.token_ids), finish="length")
    result = await call.result()
    await rig.settle()
    return result


async def _failure(call: Call) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await call.result()
    return caught.value


async def test_both_legs_start_at_once_under_one_name() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        params = DecodingParams(max_tokens=5, seed=3, temperature=0.5)
        call = rig.call(params=params, cache_salt=b"tenant")
        prefill_leg, decode_leg = await _legs(prefill, decode)
        assert (prefill_leg.handoff_id, prefill_leg.attempt) == (decode_leg.handoff_id, decode_leg.attempt)
        assert (len(prefill_leg.handoff_id), prefill_leg.attempt) == (16, 1)
        assert (prefill_leg.decode_node_id, prefill_leg.decode_epoch) == (decode.hello.node_id, decode.hello.epoch)
        assert decode_leg.prefill_peer is not None
        assert decode_leg.prefill_peer.epoch == prefill.hello.epoch
        assert decode_leg.prefill_peer.address == prefill.hello.peer_address
        for leg in (prefill_leg, decode_leg):
            assert (leg.prompt, leg.output_ids, leg.params) == (Prompt(PROMPT, b"tenant"), (), params)
        assert await _finish(rig, call, decode, decode_leg, 1) == [1]


async def test_token_1_does_not_wait_for_the_decode_node() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1])
        assert await call.has_tokens(1) == [1]
        decode.emit(decode_leg, [1], 0)
        decode.emit(decode_leg, [2], 1)
        assert await call.has_tokens(2) == [1, 2]
        assert await _finish(rig, call, decode, decode_leg, 3) == [1, 2, 3]
        assert call.finish_reason == "length"
        assert (rig.relay.counters.num_handoff_attempts, rig.relay.counters.num_finished) == (1, 1)


async def test_tokens_of_the_decode_node_may_come_first() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        decode.emit(decode_leg, [1], 0)
        decode.emit(decode_leg, [2], 1)
        assert await call.has_tokens(2) == [1, 2]
        prefill.emit(prefill_leg, [1])
        decode.emit(decode_leg, [3], 2, finish="stop")
        assert await call.result() == [1, 2, 3]
        await rig.settle()


async def test_a_decode_node_that_repeats_token_1_replaces_a_lost_one() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        decode.emit(decode_leg, [1], 0)
        assert await call.has_tokens(1) == [1]
        prefill.emit(prefill_leg, [1])
        assert await _finish(rig, call, decode, decode_leg, 2) == [1, 2]


async def test_a_first_token_that_ends_the_request_cancels_the_decode_node() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1], finish="stop")
        assert await call.result() == [1]
        assert await decode.expect(Cancel) == Cancel(decode_leg.handoff_id, 1)
        await rig.settle()


async def test_a_client_that_leaves_cancels_both_legs() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, _ = await _legs(prefill, decode)
        await call.cancel()
        for node in (prefill, decode):
            assert await node.expect(Cancel) == Cancel(prefill_leg.handoff_id, 1)
        await rig.settle()
        assert rig.relay.counters.num_cancelled == 1


async def test_a_decode_leg_is_the_whole_request_without_prefill_nodes() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE, answering([4, 5, 6]))
        call = rig.call()
        assert await call.result() == [4, 5, 6]
        leg = await decode.expect(Decode)
        assert leg.prefill_peer is None
        await rig.settle()
        assert (rig.relay.counters.num_decode_only_attempts, rig.relay.counters.num_handoff_attempts) == (1, 0)


@pytest.mark.parametrize(("num_tokens", "is_local"), [(4, True), (5, False)])
async def test_short_prompts_stay_at_the_decode_node(num_tokens: int, is_local: bool) -> None:
    async with relaying() as rig:
        _, decode = await rig.pair(answering([1]))
        await rig.call(PROMPT[:num_tokens]).result()
        assert ((await decode.expect(Decode)).prefill_peer is None) == is_local
        await rig.settle()


@pytest.mark.parametrize(("num_blocks", "salt", "is_local"), [(4, b"", True), (3, b"", False), (4, b"x", False)])
async def test_prompts_that_a_decode_node_has_cached_stay_there(num_blocks: int, salt: bytes, is_local: bool) -> None:
    async with relaying() as rig:
        _, decode = await rig.pair(answering([1]))
        hashes = block_hashes(FINGERPRINT, Prompt(PROMPT), (), LAYOUT.block_size)
        decode.report_cache(b"".join(hashes[:num_blocks]))
        await rig.has_heard(decode)
        await rig.call(cache_salt=salt).result()
        assert ((await decode.expect(Decode)).prefill_peer is None) == is_local


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_failed_leg_cancels_the_other_and_tries_again(role: str) -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        failing, other = (prefill, decode) if role == PREFILL else (decode, prefill)
        failing.fail(prefill_leg, NODE_FAILED)
        assert await other.expect(Cancel) == Cancel(prefill_leg.handoff_id, 1)
        prefill_leg, decode_leg = await _legs(prefill, decode)
        assert (prefill_leg.attempt, decode_leg.attempt, decode_leg.handoff_id) == (2, 2, prefill_leg.handoff_id)
        prefill.emit(prefill_leg, [1])
        assert await _finish(rig, call, decode, decode_leg, 1, 2) == [1, 2]
        assert rig.relay.counters.num_retries == 1


async def test_the_next_attempt_continues_after_what_was_sent_and_fences_the_old_one() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, old = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1])
        decode.emit(old, [2], 1)
        await call.has_tokens(2)
        decode.fail(old, NODE_FAILED)
        prefill_leg, decode_leg = await _legs(prefill, decode)
        for leg in (prefill_leg, decode_leg):
            assert leg.prompt.followed_by(leg.output_ids) == (*PROMPT, 1, 2)
            assert (leg.prompt.num_tokens, first_index(leg)) == (len(PROMPT), 2)
        decode.emit(old, [99, 99], 2, finish="stop")
        await rig.has_heard(decode)
        assert rig.member(prefill).load == 1  # those tokens do not end the new prefill leg either
        prefill.emit(prefill_leg, [3])
        assert await call.has_tokens(3) == [1, 2, 3]
        decode.fail(old, NODE_FAILED)
        assert await _finish(rig, call, decode, decode_leg, 4) == [1, 2, 3, 4]
        assert rig.relay.counters.num_retries == 1


async def test_a_node_that_knows_a_request_but_was_not_given_it_has_no_say() -> None:
    async with relaying() as rig:
        liar, decode = await rig.join(DECODE), await rig.join(DECODE)
        call = rig.call()
        first = await liar.expect(Decode)
        liar.fail(first, NODE_FAILED)  # now it knows the id
        second = await decode.expect(Decode)
        liar.emit(second, (66, 66, 66), 0, finish="stop")
        await rig.has_heard(liar)
        assert await _finish(rig, call, decode, second, 1, 2) == [1, 2]


async def test_another_node_is_preferred_after_a_failure() -> None:
    async with relaying(decode_policy=LeastLoaded()) as rig:
        failing = await rig.join(DECODE, lambda node, leg: node.fail(leg, NODE_FAILED))
        working = await rig.join(DECODE, answering([1]))
        for _ in range(2):
            assert await rig.call().result() == [1]
        await rig.settle()
        assert failing.has(Decode)
        assert working.has(Decode)


async def test_a_request_is_tried_so_often_and_no_more() -> None:
    async with relaying(replace(DEFAULTS, max_attempts=3)) as rig:
        decode = await rig.join(DECODE, lambda node, leg: node.fail(leg, NODE_FAILED, "no luck"))
        error = await _failure(rig.call())
        assert isinstance(error, RequestFailed)
        assert "no luck" in str(error)
        assert [(await decode.expect(Decode)).attempt for _ in range(3)] == [1, 2, 3]
        await rig.settle()
        assert not decode.has(Decode)
        assert rig.relay.counters.num_failed == 1


@pytest.mark.parametrize("kind", [InvalidRequest, ContextLengthExceeded])
async def test_the_clients_mistake_is_not_tried_again(kind: type[InvalidRequest]) -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE, lambda node, leg: node.fail(leg, kind.code, "too much"))
        assert type(await _failure(rig.call())) is kind
        await rig.settle()
        await decode.expect(Decode)
        assert not decode.has(Decode)


async def test_a_handoff_that_failed_twice_is_left_to_the_decode_node() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        for attempt in (1, 2):
            _, decode_leg = await _legs(prefill, decode)
            assert decode_leg.attempt == attempt
            decode.fail(decode_leg, TransferFailed.code)
        alone = await decode.expect(Decode)
        assert (alone.attempt, alone.prefill_peer) == (3, None)
        assert await _finish(rig, call, decode, alone, 1) == [1]
        assert not prefill.has(Prefill)


async def test_a_prefill_node_that_is_lost_before_the_decode_node_generates_is_replaced() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1])
        await call.has_tokens(1)
        prefill.die()
        assert await decode.expect(Cancel) == Cancel(decode_leg.handoff_id, 1)
        decode_leg = await decode.expect(Decode)
        assert (decode_leg.attempt, decode_leg.prefill_peer, decode_leg.prompt.followed_by(decode_leg.output_ids)) == (
            2,
            None,
            (*PROMPT, 1),
        )
        assert await _finish(rig, call, decode, decode_leg, 2) == [1, 2]


async def test_a_prefill_node_that_is_lost_once_the_decode_node_generates_is_not_missed() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1])
        decode.emit(decode_leg, [1], 0)
        decode.emit(decode_leg, [2], 1)
        await call.has_tokens(2)
        assert rig.member(prefill).load == 0
        prefill.fail(prefill_leg, NODE_FAILED)
        await rig.has_heard(prefill)
        prefill.die()
        await rig.loses(PREFILL)
        assert not decode.has(Cancel)
        assert await _finish(rig, call, decode, decode_leg, 3) == [1, 2, 3]
        assert rig.relay.counters.num_retries == 0


async def test_a_lost_decode_node_is_replaced_by_another() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, decode_leg = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1])
        decode.emit(decode_leg, [1], 0)
        decode.emit(decode_leg, [2], 1)
        await call.has_tokens(2)
        other = await rig.join(DECODE)
        decode.die()
        decode_leg = await other.expect(Decode)
        assert decode_leg.prompt.followed_by(decode_leg.output_ids) == (*PROMPT, 1, 2)
        assert await _finish(rig, call, other, decode_leg, 3) == [1, 2, 3]


async def test_a_node_that_cannot_be_reached_costs_a_request_no_wait_for_a_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 1000.0)
    async with relaying() as rig:
        rig.registry.register(make_hello(DECODE), time.monotonic())
        await rig.join(DECODE, answering([1, 2]))
        for _ in range(2):
            assert await rig.call().result() == [1, 2]
        await rig.settle()
        assert rig.relay.counters.num_retries == 1


async def test_without_another_decode_node_the_request_fails() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        await _legs(prefill, decode)
        decode.die()
        assert isinstance(await _failure(call), NoNode)
        await prefill.expect(Cancel)
        await rig.settle()


async def test_without_nodes_there_is_nothing_to_wait_for() -> None:
    async with relaying() as rig:
        with pytest.raises(NoNode):
            rig.relay.check_size(MODEL, 1, 1, "prompt")
        assert isinstance(await _failure(rig.call()), NoNode)
        await rig.join(PREFILL)
        assert isinstance(await _failure(rig.call()), NoNode)
        await rig.settle()


async def test_a_leaving_node_finishes_its_work_and_gets_no_more() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        call = rig.call()
        leg = await decode.expect(Decode)
        decode.leave()
        await rig.loses(DECODE)
        assert isinstance(await _failure(rig.call()), NoNode)
        assert await _finish(rig, call, decode, leg, 1) == [1]


async def test_a_node_that_left_with_nothing_to_finish_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with relaying() as rig:
        for is_leaving in (True, False):
            decode = await rig.join(DECODE)
            if is_leaving:
                decode.leave()
                await rig.loses(DECODE)
            decode.die()
            async with asyncio.timeout(30):
                while len(rig.registry):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert any("is lost" in record.message for record in caplog.records) is not is_leaving


async def test_a_flight_that_has_ended_is_held_by_nothing() -> None:
    """So that its images are gone at once, and not when garbage is looked for."""
    async with relaying() as rig:
        await rig.pair(answering([1, 2]))
        inbox = Inbox()
        gc.disable()
        try:
            flight = rig.relay.start(RelayRequest(MODEL, Prompt(PROMPT), DecodingParams(max_tokens=16)), inbox)
            held = weakref.ref(flight)
            while not any(delivery.finish_reason for _, delivery in await inbox.take()):
                pass
            rig.relay.close(flight)
            del flight
            await rig.settle()
            assert held() is None
        finally:
            gc.enable()


async def test_a_request_has_a_deadline() -> None:
    async with relaying(replace(DEFAULTS, request_timeout_s=0.2)) as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill_leg, _ = await _legs(prefill, decode)
        prefill.emit(prefill_leg, [1])
        assert isinstance(await _failure(call), DeadlineExceeded)
        assert call.token_ids == [1]
        await prefill.expect(Cancel)
        await decode.expect(Cancel)
        await rig.settle()


async def test_more_requests_than_allowed_are_refused_at_once() -> None:
    async with relaying(replace(DEFAULTS, max_concurrent_requests=1)) as rig:
        decode = await rig.join(DECODE)
        call = rig.call()
        leg = await decode.expect(Decode)
        assert type(await _failure(rig.call())) is Overloaded
        assert await _finish(rig, call, decode, leg, 1) == [1]
        assert rig.relay.num_in_flight == 0


async def test_a_gap_in_the_output_is_a_failed_attempt() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        call = rig.call()
        leg = await decode.expect(Decode)
        decode.emit(leg, [7], 0)
        decode.emit(leg, [9], 2)
        leg = await decode.expect(Decode)
        assert (leg.attempt, leg.prompt.followed_by(leg.output_ids)) == (2, (*PROMPT, 7))
        assert await _finish(rig, call, decode, leg, 8) == [7, 8]


async def test_what_comes_after_the_end_starts_nothing() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE)
        inbox = Inbox()
        flight = rig.relay.start(RelayRequest(MODEL, Prompt(PROMPT), DecodingParams(max_tokens=4)), inbox)
        leg = await decode.expect(Decode)
        decode.emit(leg, [1], finish="stop")
        ((_, delivery),) = await inbox.take()
        assert delivery.finish_reason == "stop"
        decode.fail(leg, NODE_FAILED)
        decode.die()
        await rig.loses(DECODE)
        rig.relay.close(flight)
        await rig.settle()
        counters = rig.relay.counters
        assert (counters.num_retries, counters.num_finished, counters.num_cancelled) == (0, 1, 0)


async def test_requests_do_not_touch_each_other() -> None:
    async with relaying() as rig:

        def script(node: FakeNode, leg: LegMessage) -> None:
            if leg.prompt.followed_by(leg.output_ids)[0] % 3 == 0 and leg.attempt == 1:
                node.fail(leg, NODE_FAILED)
                return
            answering([leg.prompt.followed_by(leg.output_ids)[0] + number for number in range(8)])(node, leg)

        await rig.pair(script)
        await rig.pair(script)
        prompts = [(start, *PROMPT) for start in range(30)]
        calls = [rig.call(prompt) for prompt in prompts]
        for prompt, call in zip(prompts, calls, strict=True):
            assert await call.result() == [prompt[0] + number for number in range(8)]
        await rig.settle()
        assert rig.relay.counters.num_finished == 30


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "expected"), [
    (255, None, None), (250, 6, 6), (250, 7, 6), (255, 16, 1), (1, 10**18, 255), (256, None, 0), (256, 1, 0),
])  # fmt: skip
async def test_the_output_is_clipped_to_the_room_on_the_largest_decode_node(
    num_prompt_tokens: int, max_tokens: int | None, expected: int | None
) -> None:
    async with relaying() as rig:
        await rig.join(DECODE)
        await rig.join(PREFILL, max_request_tokens=1000)
        if expected != 0:
            assert rig.relay.check_size(MODEL, num_prompt_tokens, max_tokens, "prompt") == expected
            return
        with pytest.raises(ContextLengthExceeded, match="256 tokens") as caught:
            rig.relay.check_size(MODEL, num_prompt_tokens, max_tokens, "prompt")
        assert caught.value.param == "prompt"


async def test_a_small_node_gets_what_fits_and_limits_nothing_else() -> None:
    async with relaying() as rig:
        small = await rig.join(DECODE, answering([1]), max_request_tokens=len(PROMPT) + 4)
        large = await rig.join(DECODE, answering([2]))
        small_prefill = await rig.join(PREFILL, max_request_tokens=len(PROMPT) - 2)
        assert rig.relay.check_size(MODEL, len(PROMPT), 100, "prompt") == 100
        long, short = DecodingParams(max_tokens=5), DecodingParams(max_tokens=4)
        assert [await rig.call(params=long).result() for _ in range(3)] == [[2]] * 3
        assert sorted([await rig.call(params=short).result() for _ in range(2)]) == [[1], [2]]
        assert not small_prefill.has(Prefill)
        assert (small.has(Decode), large.has(Decode)) == (True, True)
