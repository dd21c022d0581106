"""Before a prompt is computed what another node has of it is copied there; whatever goes wrong costs time alone."""

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
from baton.router.routing.prefix_ways import PrefixWays
from baton.router.routing.pulls import ARRIVED, CANCELLED, FAILED, LATE, REFUSED, PullRecords
from baton.wire.errors import TransferFailed
from baton.wire.messages import DECODE, PREFILL, Cancel, Decode, Failed, HandedOver, Prefill
from baton.wire.prompt import Prompt
from baton.wire.pulls import Lend, Pull, Pulled
from baton.wire.step_cost import StepCost
from tests.router.fake_node import FINGERPRINT, LAYOUT, STATUS, FakeNode
from tests.router.rig import Call, Rig, relaying

SIZE = LAYOUT.block_size
PROMPT = tuple(range(200))
NUM_HELD, NUM_KNOWN = 192, 8
SLOW = StepCost(1e-3, 2.0, 0.0, 0.1, 0.0)
"""A pull may take 38 s: no test waits for it."""
QUICK = replace(SLOW, prompt_token_s=1e-3)
"""It may take 0.02 s."""
ADDRESS = "tcp://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)


@dataclass(slots=True)
class Stage:
    """A request whose prompt the prefill node that is to compute it has a little of, and another one, the holder,
    nearly all. That was asked to lend it by `lend`."""

    rig: Rig
    prefill: FakeNode
    holder: FakeNode
    decode: FakeNode
    call: Call
    lend: Lend

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

    async def ends_well(self) -> Mapping[str, int]:
        """The attempt begins, and the tokens 1 to 3 reach the client. Where the cached tokens came from."""
        prefill, decode = await self.prefill.expect(Prefill), await self.decode.expect(Decode)
        assert (prefill.attempt, decode.attempt, prefill.prompt) == (1, 1, Prompt(PROMPT))
        self.prefill.emit(prefill, [1], cached=NUM_HELD)
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
        yield Stage(rig, prefill, holder, decode, call, await holder.expect(Lend))


def hashes(num_tokens: int) -> Sequence[bytes]:
    return block_hashes(FINGERPRINT, Prompt(PROMPT[:num_tokens]), (), SIZE)


async def test_the_attempt_begins_when_its_prefix_has_come() -> None:
    async with lending() as stage:
        lend, target = stage.lend, stage.prefill.hello
        assert (lend.prompt, lend.node_id, lend.epoch) == (Prompt(PROMPT[:NUM_HELD]), target.node_id, target.epoch)
        pull = await stage.pulling()
        assert (pull.handoff_id, pull.attempt, pull.prompt) == (lend.handoff_id, lend.attempt, lend.prompt)
        assert (pull.epoch, pull.address) == (stage.holder.hello.epoch, ADDRESS)
        assert not stage.prefill.has(Prefill)
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


async def test_a_pull_that_takes_longer_than_computing_would_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
        await stage.pulling()
        stage.prefill.die()
        assert (await stage.holder.expect(Prefill)).attempt == 1
        assert stage.results() == {FAILED: 1}


async def test_when_the_holder_is_lost_the_prompt_is_computed() -> None:
    async with lending() as stage:
        await stage.pulling()
        stage.holder.die()
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
        assert not stage.prefill.has(Prefill)
        assert not stage.decode.has(Decode)
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
    """The prefill node says nothing of what it has now: the attempt begins all the same."""
    async with lending() as stage:
        pull = await stage.pulling()
        stage.prefill.send(Pulled(stage.prefill.hello.epoch, pull.handoff_id, pull.attempt, NUM_HELD, 10**6, 5000))
        await stage.ends_well()
        assert not stage.holder.has(Lend)
