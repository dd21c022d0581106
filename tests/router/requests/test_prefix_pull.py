"""While a prompt stands in a node's queue, what another node has of it is copied there; what goes wrong costs time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

import baton.router.nodes.control
from baton.engine.cache.hashing import block_hashes
from baton.router.routing.prefix_ways import RISKED, PrefixWays
from baton.router.routing.pulls import ARRIVED, CANCELLED, FAILED, LATE, REFUSED, PullRecords
from baton.wire.errors import DeadlineExceeded, RequestFailed, TransferFailed
from baton.wire.messages.legs import Cancel, Decode, HandedOver, Prefill
from baton.wire.messages.membership import DECODE, PREFILL, live_key
from baton.wire.messages.output import Failed
from baton.wire.messages.prefixes import Lend, Pull, Pulled
from baton.wire.prompt import Prompt
from baton.wire.step_cost import StepCost
from tests.router.eager_ways import EagerWays
from tests.router.fake_node import FINGERPRINT, LAYOUT, STATUS, FakeNode
from tests.router.rig import Call, Rig, relaying

SIZE = LAYOUT.block_size
PROMPT = tuple(range(200))
NUM_HELD, NUM_KNOWN = 192, 8
SLOW = StepCost(1e-3, 2.0, 0.0, 0.1, 0.0)
"""A pull may take minutes: no test waits for it."""
QUICK = replace(SLOW, prompt_token_s=1e-3)
"""It may take 0.2 s."""
ADDRESS = "tcp://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)


@dataclass(slots=True)
class Stage:
    """A request whose prompt the prefill node that is to compute it has a little of, and another one, the holder,
    nearly all. That was asked to lend it by `lend`; both others have their legs."""

    rig: Rig
    prefill: FakeNode
    holder: FakeNode
    decode: FakeNode
    call: Call
    lend: Lend
    legs: tuple[Prefill, Decode]

    def answer(self, num_tokens: int) -> None:
        lend = self.lend
        self.holder.send(HandedOver(self.holder.hello.epoch, lend.handoff_id, lend.attempt, num_tokens))

    async def pulling(self) -> Pull:
        self.answer(self.lend.prompt.num_tokens)
        return await self.prefill.expect(Pull)

    async def taken_back(self) -> None:
        """Both are told that nobody wants it."""
        for node in (self.holder, self.prefill):
            assert await node.expect(Cancel) == Cancel(self.lend.handoff_id, self.lend.attempt)

    async def ends_well(self, cached: int = NUM_HELD) -> Mapping[str, int]:
        """The attempt goes on, and the tokens 1 to 3 reach the client. Where the cached tokens came from."""
        prefill, decode = self.legs
        self.prefill.emit(prefill, [1], cached=cached)
        await self.rig.has_heard(self.prefill)
        for number in range(3):
            self.decode.emit(decode, [number + 1], number, "length" if number == 2 else "")
        assert await self.call.result() == [1, 2, 3]
        await self.rig.settle()
        assert self.call.flight is not None
        return self.call.flight.figures.cached_by_place

    def results(self) -> dict[str, int]:
        return dict(self.rig.relay.pulls.results)


@asynccontextmanager
async def lending(cost: StepCost = SLOW) -> AsyncIterator[Stage]:
    status = replace(STATUS, cost=cost)
    async with relaying(ways=PrefixWays(PullRecords())) as rig:
        prefill = await rig.join(PREFILL, status=status, can_pull=True)
        holder = await rig.join(PREFILL, status=status)
        decode = await rig.join(DECODE, status=status)
        for node, num_tokens in ((prefill, NUM_KNOWN), (holder, NUM_HELD)):
            node.report_cache(b"".join(hashes(num_tokens)))
            await rig.has_heard(node)
        call = rig.call(PROMPT)
        legs = await prefill.expect(Prefill), await decode.expect(Decode)
        yield Stage(rig, prefill, holder, decode, call, await holder.expect(Lend), legs)


def hashes(num_tokens: int) -> Sequence[bytes]:
    return block_hashes(FINGERPRINT, Prompt(PROMPT[:num_tokens]), (), SIZE)


async def test_the_node_has_its_leg_and_waits_for_the_prefix() -> None:
    async with lending() as stage:
        lend, target, (prefill, decode) = stage.lend, stage.prefill.hello, stage.legs
        assert (prefill.attempt, decode.attempt, prefill.prompt) == (1, 1, Prompt(PROMPT))
        assert prefill.awaited is not None
        assert (prefill.awaited.attempt, decode.awaited) == (lend.attempt, None)
        assert prefill.awaited.token_s == pytest.approx(SLOW.prompt_token_s)
        assert prefill.awaited.patience_s == pytest.approx(RISKED * (SLOW.step_s + (len(PROMPT) - NUM_KNOWN) * 2.0))
        assert (lend.prompt, lend.node_id, lend.epoch) == (Prompt(PROMPT[:NUM_HELD]), target.node_id, target.epoch)
        pull = await stage.pulling()
        assert (pull.handoff_id, pull.attempt, pull.prompt) == (lend.handoff_id, lend.attempt, lend.prompt)
        assert (pull.epoch, pull.address) == (stage.holder.hello.epoch, ADDRESS)
        stage.prefill.send(Pulled(target.epoch, pull.handoff_id, pull.attempt, NUM_HELD, 10**6, 5000))
        assert await stage.ends_well() == {"prefill": NUM_KNOWN, "peer": NUM_HELD - NUM_KNOWN}
        assert stage.results() == {ARRIVED: 1}
        assert stage.rig.relay.pulls.num_tokens == NUM_HELD - NUM_KNOWN
        assert not stage.holder.has(Cancel)
        assert not stage.prefill.has(Cancel)


async def test_what_the_holder_still_has_is_pulled() -> None:
    async with lending() as stage:
        stage.answer(64)
        pull = await stage.prefill.expect(Pull)
        assert pull.prompt == Prompt(PROMPT[:64])


@pytest.mark.parametrize("num_tokens", [0, NUM_KNOWN, NUM_HELD + SIZE])
async def test_what_is_not_worth_it_or_was_not_asked_for_is_not_taken(num_tokens: int) -> None:
    async with lending() as stage:
        stage.answer(num_tokens)
        await stage.taken_back()
        await stage.ends_well()
        assert stage.results() == {REFUSED: 1}
        assert not stage.prefill.has(Pull)


async def test_a_node_that_waits_no_longer_says_so_and_uses_what_has_come() -> None:
    async with lending() as stage:
        pull = await stage.pulling()
        stage.prefill.send(Failed(pull.handoff_id, pull.attempt, DeadlineExceeded.code, "as the test says"))
        await stage.taken_back()
        assert await stage.ends_well(cached=64) == {"prefill": NUM_KNOWN, "peer": 64 - NUM_KNOWN}
        assert (stage.results(), stage.rig.relay.counters.num_retries) == ({LATE: 1}, 0)


async def test_the_router_takes_a_pull_back_that_cannot_be_worth_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, deadlines = asyncio.get_running_loop(), list[Callable[[], None]]()
    call_later = loop.call_later

    def noting(delay_s: float, callback: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        deadlines.extend([partial(callback, *arguments)] * (arguments == (LATE,)))
        return call_later(delay_s, callback, *arguments)

    monkeypatch.setattr(loop, "call_later", noting)
    async with lending() as stage:
        pull = await stage.pulling()
        (pass_deadline,) = deadlines
        pass_deadline()
        await stage.taken_back()
        stage.prefill.send(Pulled(stage.prefill.hello.epoch, pull.handoff_id, pull.attempt, NUM_HELD, 10**6, 5000))
        await stage.ends_well()
        assert stage.results() == {LATE: 1}


async def test_an_answer_that_comes_too_late_is_cancelled() -> None:
    async with lending(QUICK) as stage:
        await stage.taken_back()
        stage.answer(NUM_HELD)
        assert await stage.holder.expect(Cancel) == Cancel(stage.lend.handoff_id, stage.lend.attempt)
        assert not stage.prefill.has(Pull)
        await stage.ends_well()


async def test_a_pull_that_fails_costs_no_attempt() -> None:
    async with lending() as stage:
        pull = await stage.pulling()
        for reason in ("as the test says", "again"):
            stage.prefill.send(Failed(pull.handoff_id, pull.attempt, TransferFailed.code, reason))
        await stage.taken_back()
        await stage.rig.has_heard(stage.prefill)
        await stage.ends_well()
        assert not stage.prefill.has(Prefill)
        assert (stage.results(), stage.rig.relay.counters.num_retries) == ({FAILED: 1}, 0)


async def test_when_the_target_is_lost_another_node_computes() -> None:
    async with lending() as stage:
        pull = await stage.pulling()
        stage.prefill.die()
        again = await stage.holder.expect(Prefill)
        assert (again.attempt > pull.attempt, again.awaited) == (True, None)
        assert stage.results() == {FAILED: 1}


async def test_when_the_holder_is_lost_the_prompt_is_computed() -> None:
    async with lending() as stage:
        await stage.pulling()
        stage.holder.die()
        assert await stage.prefill.expect(Cancel) == Cancel(stage.lend.handoff_id, stage.lend.attempt)
        await stage.ends_well()
        assert stage.results() == {FAILED: 1}


@pytest.mark.parametrize("has_answered", [False, True])
async def test_a_client_that_leaves_takes_its_pull_along(has_answered: bool) -> None:
    async with lending() as stage:
        if has_answered:
            await stage.pulling()
        await stage.call.cancel()
        await stage.taken_back()
        await stage.rig.settle()
        assert stage.results() == {CANCELLED: 1}
        stage.answer(NUM_HELD)  # it did not know yet
        assert await stage.holder.expect(Cancel) == Cancel(stage.lend.handoff_id, stage.lend.attempt)


async def test_what_strangers_say_of_a_pull_changes_nothing() -> None:
    async with lending() as stage:
        lend = stage.lend
        stage.prefill.send(Pulled(stage.prefill.hello.epoch, lend.handoff_id, lend.attempt, NUM_HELD, 1, 1))
        stage.prefill.send(HandedOver(stage.prefill.hello.epoch, lend.handoff_id, lend.attempt, NUM_HELD))
        pull = await stage.pulling()
        stage.holder.send(Pulled(stage.holder.hello.epoch, lend.handoff_id, lend.attempt, NUM_HELD, 1, 1))
        await stage.rig.has_heard(stage.holder)
        assert stage.results() == {}
        stage.prefill.send(Pulled(stage.prefill.hello.epoch, pull.handoff_id, pull.attempt, NUM_HELD, 1, 1))
        await stage.ends_well()


async def test_a_request_pulls_once() -> None:
    """The holder dies with the attempt, and there is another one when the next begins."""
    async with lending() as stage:
        await stage.pulling()
        other = await stage.rig.join(DECODE, status=replace(STATUS, cost=SLOW))
        other.report_cache(b"".join(hashes(NUM_HELD)))
        await stage.rig.has_heard(other)
        prefill, _ = stage.legs
        stage.prefill.send(Failed(prefill.handoff_id, prefill.attempt, RequestFailed.code, "as the test says"))
        await stage.taken_back()
        assert (await stage.holder.expect(Prefill)).awaited is None
        assert not other.has(Lend)
        assert stage.results() == {CANCELLED: 1}


async def test_a_holder_that_has_a_leg_of_the_request_is_looked_after_because_of_that() -> None:
    """The pull of its KV neither hides the leg nor takes it along when it is over."""
    async with relaying(ways=EagerWays(PullRecords(), 60.0)) as rig:
        prefill = await rig.join(PREFILL, status=STATUS, can_pull=True)
        decode = await rig.join(DECODE, status=STATUS, peer_address=ADDRESS)
        decode.report_cache(b"".join(hashes(128)))
        await rig.has_heard(decode)
        call = rig.call(PROMPT)
        leg, lend = await decode.expect(Decode), await decode.expect(Lend)
        await prefill.expect(Prefill)
        holder = rig.registry.get(decode.hello.epoch)
        assert holder is not None
        expected = {lend.handoff_id: live_key(lend.handoff_id, leg.attempt)}
        assert holder.live_keys == expected
        decode.send(HandedOver(decode.hello.epoch, lend.handoff_id, lend.attempt, 0))
        assert await prefill.expect(Cancel) == Cancel(lend.handoff_id, lend.attempt)
        assert holder.live_keys == expected
        await call.cancel()
        await rig.settle()
        assert holder.live_keys == {}
