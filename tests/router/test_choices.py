"""Choices of one prompt at the router: they share their first legs, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.router.requests.attempt import RelayRequest
from baton.router.requests.flight import Flight
from baton.router.requests.inbox import Inbox
from baton.wire.errors import BatonError, NoNode, Overloaded, RequestFailed, TransferFailed
from baton.wire.messages.legs import Cancel, Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import answering, choice_legs
from tests.router.rig import DEFAULTS, MODEL, PROMPT, Rig, relaying

PARAMS = DecodingParams(max_tokens=16, seed=3)


class Choices:
    """Choices of one prompt, and what came of each."""

    def __init__(self, rig: Rig, count: int = 3) -> None:
        self.inbox = Inbox()
        requests = [RelayRequest(MODEL, Prompt(PROMPT), replace(PARAMS, choice=number)) for number in range(count)]
        self.flights: Sequence[Flight] = rig.relay.start_choices(requests, self.inbox, 0)
        self.token_ids: list[list[int]] = [[] for _ in requests]
        self.finished: set[int] = set()
        self._relay = rig.relay

    async def has(self, *token_ids: Sequence[int], within_s: float = 5.0) -> None:
        """Wait until each choice has had exactly these tokens."""
        expected = [list(each) for each in token_ids]
        async with asyncio.timeout(within_s):
            while self.token_ids != expected:
                for index, delivery in await self.inbox.take():
                    self.token_ids[index].extend(delivery.token_ids)
                    if delivery.finish_reason:
                        self.finished.add(index)

    async def error(self, within_s: float = 5.0) -> BatonError:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    await self.inbox.take()
                except BatonError as error:
                    return error

    def close(self, *indexes: int) -> None:
        for index in indexes or range(len(self.flights)):
            self._relay.close(self.flights[index])


async def test_choices_share_their_legs_and_have_their_own_names() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        choices = Choices(rig)
        prefill_leg, decode_leg = await prefill.expect(Prefill), await decode.expect(Decode)
        names = [flight.handoff_id for flight in choices.flights]
        for leg in (prefill_leg, decode_leg):
            assert [leg.handoff_id, *leg.forks] == names
            assert (leg.params, leg.prompt.followed_by(leg.output_ids), leg.prompt.num_tokens) == (
                PARAMS,
                PROMPT,
                len(PROMPT),
            )
        assert (rig.member(prefill).load, rig.member(decode).load) == (1, 3)
        for number, leg in enumerate(choice_legs(prefill_leg)):
            prefill.emit(leg, [10 + number])
        await choices.has([10], [11], [12])
        for number, leg in enumerate(choice_legs(decode_leg)):
            decode.emit(leg, [10 + number, 20 + number], 0, finish="stop")
        await choices.has([10, 20], [11, 21], [12, 22])
        assert choices.finished == {0, 1, 2}
        assert (rig.member(prefill).load, rig.member(decode).load) == (0, 3)
        choices.close()
        await rig.settle()
        assert not prefill.has(Prefill)
        assert not decode.has(Decode)


async def test_a_choice_that_ends_alone_is_cancelled_alone() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        choices = Choices(rig)
        legs = choice_legs(await decode.expect(Decode))
        for leg in legs:
            decode.emit(leg, [1])
        await choices.has([1], [1], [1])
        choices.close(1)
        assert await decode.expect(Cancel) == Cancel(legs[1].handoff_id, 1)
        assert rig.member(decode).load == 2
        for leg in (legs[0], legs[2]):
            decode.emit(leg, [2], 1, finish="length")
        await choices.has([1, 2], [1], [1, 2])
        choices.close(0, 2)
        await rig.settle()
        assert (await prefill.expect(Prefill)).forks == tuple(leg.handoff_id for leg in legs[1:])


async def test_a_lost_decode_node_is_replaced_for_the_unfinished_choices_each_for_itself() -> None:
    async with relaying() as rig:
        _, decode = await rig.pair()
        choices = Choices(rig)
        legs = choice_legs(await decode.expect(Decode))
        decode.emit(legs[0], [1], 0, finish="stop")
        decode.emit(legs[1], [2, 3])
        decode.emit(legs[2], [4])
        await choices.has([1], [2, 3], [4])
        other = await rig.join(DECODE)
        decode.die()
        again = sorted([await other.expect(Decode) for _ in range(2)], key=lambda leg: leg.params.choice)
        assert [(leg.handoff_id, leg.attempt, leg.forks) for leg in again] == [
            (legs[1].handoff_id, 2, ()), (legs[2].handoff_id, 2, ())
        ]  # fmt: skip
        assert [leg.prompt.followed_by(leg.output_ids) for leg in again] == [(*PROMPT, 2, 3), (*PROMPT, 4)]
        assert [leg.params.choice for leg in again] == [1, 2]
        for leg in again:
            other.emit(leg, [9], finish="length")
        await choices.has([1], [2, 3, 9], [4, 9])
        choices.close()
        await rig.settle()
        assert rig.relay.counters.num_retries == 2


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_lost_prefill_node_is_missed_by_choices_that_still_need_it(has_begun: bool) -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        choices = Choices(rig, 2)
        legs = choice_legs(await decode.expect(Decode))
        decode.emit(legs[1], [5])
        if has_begun:
            decode.emit(legs[0], [5])
        await choices.has([5] * has_begun, [5])
        prefill.die()
        await rig.loses(PREFILL)
        if not has_begun:
            again = await decode.expect(Decode)
            assert (again.handoff_id, again.attempt, again.prefill_peer) == (legs[0].handoff_id, 2, None)
            decode.emit(again, [5])
        await choices.has([5], [5])
        assert not decode.has(Decode)
        choices.close()
        await rig.settle()


async def test_a_handoff_that_fails_is_tried_again_by_each_choice() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        choices = Choices(rig)
        legs = choice_legs(await decode.expect(Decode))
        for leg in legs:
            decode.fail(leg, TransferFailed.code)
        again = [await decode.expect(Decode) for _ in legs]
        assert {(leg.handoff_id, leg.attempt) for leg in again} == {(leg.handoff_id, 2) for leg in legs}
        assert all(leg.prefill_peer is not None and not leg.forks for leg in again)
        await rig.has_heard(decode)
        assert (rig.member(prefill).load, rig.member(decode).load) == (3, 3)
        choices.close()
        await rig.settle()


async def test_without_nodes_all_choices_fail_at_once() -> None:
    async with relaying() as rig:
        choices = Choices(rig)
        assert isinstance(await choices.error(), NoNode)
        assert rig.relay.counters.num_failed == 3
        choices.close()
        await rig.settle()


async def test_more_choices_than_a_node_computes_together_begin_in_groups() -> None:
    async with relaying() as rig:
        decode = await rig.join(DECODE, answering([7], "length"), max_num_seqs=2)
        choices = Choices(rig, 5)
        await choices.has(*[[7]] * 5)
        groups = [await decode.expect(Decode) for _ in range(3)]
        assert [(leg.params.choice, len(leg.forks)) for leg in groups] == [(0, 1), (2, 1), (4, 0)]
        choices.close()
        await rig.settle()


async def test_choices_beyond_the_limit_are_refused_together() -> None:
    async with relaying(replace(DEFAULTS, max_concurrent_requests=2)) as rig:
        with pytest.raises(Overloaded):
            Choices(rig, 3)
        assert rig.relay.num_in_flight == 0


async def test_a_choice_that_fails_for_good_leaves_its_siblings_running() -> None:
    async with relaying(replace(DEFAULTS, max_attempts=1)) as rig:
        decode = await rig.join(DECODE)
        choices = Choices(rig, 2)
        first, second = choice_legs(await decode.expect(Decode))
        decode.fail(second, RequestFailed.code)
        assert isinstance(await choices.error(), RequestFailed)
        decode.emit(first, [1], finish="length")
        await rig.has_heard(decode)
        assert (rig.relay.counters.num_finished, rig.relay.counters.num_failed) == (1, 1)
        choices.close()
        await rig.settle()
