"""A decode node hands a running request to another decode node, which goes on after the last token that was sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest
import zmq

from baton.decode_node.source import Source
from baton.engine.cache.block_pool import pack_blocks
from baton.engine.core import EngineCore
from baton.engine.handoffs import HandedOver
from baton.kvtransfer.commands import FinishHandoff
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.base import Move
from baton.wire.errors import TransferFailed
from baton.wire.messages.legs import Decode, HandOver, PrefillPeer
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from tests.kvtransfer.legs import Node, open_decode, params, undisturbed
from tests.kvtransfer.loopback import Fault, LoopbackNetwork
from tests.kvtransfer.pair import empty_blocks, receiving_facts
from tests.kvtransfer.pools import BLOCK_SIZE, LEASE_S

ID = b"m" * 16
FIRST, SECOND = RequestKey(ID, 1), RequestKey(ID, 2)
PROMPT = list(range(18))
NUM_TOKENS = 30
_DEADLINE_S = 30.0


@dataclass(slots=True)
class Decodes:
    """Two decode nodes; its methods do the part of the router."""

    left: Node
    other: Node
    left_peer: PrefillPeer
    now_s: float = 0.0

    def begin(self, key: RequestKey = FIRST, prompt: list[int] = PROMPT, output_ids: Sequence[int] = ()) -> None:
        """Let the node that is left later compute a prompt and earlier output, and generate."""
        self.left.leg.begin(self.decode(key, prompt, output_ids, None), self.now_s)

    def hand_over(self, key: RequestKey = FIRST) -> int:
        facts = receiving_facts()
        return self.left.leg.hand_over(
            HandOver(key.handoff_id, key.attempt, key.attempt + 1, "E", facts.epoch + 1), self.now_s
        )

    def move(self, key: RequestKey = FIRST, prompt: list[int] = PROMPT) -> list[int]:
        """Move a request as the router does; the output that its client has."""
        num_tokens = self.hand_over(key)
        output = self.left.stream(key)
        assert num_tokens == len(prompt) + len(output) - 1
        following = RequestKey(key.handoff_id, key.attempt + 1)
        self.other.leg.begin(self.decode(following, prompt, output[:-1], self.left_peer), self.now_s)
        return output

    def decode(self, key: RequestKey, prompt: list[int], output_ids: Sequence[int], peer: PrefillPeer | None) -> Decode:
        return Decode(*key, Prompt.of(prompt), params(NUM_TOKENS), peer, tuple(output_ids))

    def round(self) -> None:
        self.left.round(self.now_s)
        self.other.round(self.now_s)

    def until(self, is_done: Callable[[], bool], turn: Callable[[], None] | None = None) -> None:
        """Let both nodes step, or do `turn` over and over."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline_s, "the condition of the test did not become true"
            (turn or self.round)()
            time.sleep(0.0005)

    def receive(self) -> None:
        """A round of the other node, while the one that is left serves it and takes no step: how many steps a message
        takes depends on the machine."""
        self.transfer()
        self.other.round(self.now_s)

    def generates(self, num_tokens: int, key: RequestKey = FIRST) -> None:
        self.until(lambda: len(self.left.stream(key)) >= num_tokens)

    def transfer(self) -> None:
        """Everything but steps."""
        self.left.threads[1].turn(self.now_s)
        self.other.threads[0].turn(self.now_s)
        self.other.leg.poll(self.now_s)
        time.sleep(0.0005)

    @property
    def num_pushed(self) -> int:
        found = {metric.name: metric.samples[0].value for metric in self.left.leg.metrics()}
        return int(found["baton:kv_send_blocks"])

    @property
    def is_empty(self) -> bool:
        return self.left.is_empty and self.other.is_empty


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture(params=[True, False], ids=["memory", "mailbox"])
def decodes(request: pytest.FixtureRequest, overlaps: bool, network: LoopbackNetwork) -> Iterator[Decodes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    facts = receiving_facts()
    of_other = replace(facts, node_id="E", epoch=facts.epoch + 1)
    left, left_peer = open_decode(context, network, facts, empty_blocks(), peers_write=request.param, overlaps=overlaps)
    other, _ = open_decode(context, network, of_other, empty_blocks(), peers_write=request.param, overlaps=overlaps)
    try:
        yield Decodes(left, other, left_peer)
    finally:
        left.close()
        other.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("num_sent", [1, 2, 3, 4, 5, 7, 15])
def test_the_other_node_goes_on_exactly_and_nothing_is_computed_again(decodes: Decodes, num_sent: int) -> None:
    decodes.begin()
    decodes.generates(num_sent)
    output = decodes.move()
    decodes.until(lambda: SECOND in decodes.other.finished and decodes.is_empty)
    moved = decodes.other.stream(SECOND)
    assert moved[0] == output[-1], "the last token is repeated"
    assert output + moved[1:] == undisturbed(PROMPT, max_tokens=NUM_TOKENS)
    assert decodes.other.runner.num_slots_written == NUM_TOKENS - len(output), "every token was computed once"
    assert decodes.left.stream(FIRST) == output, "the node that is left says nothing more"
    assert decodes.left.failures == decodes.other.failures == []


def test_what_was_copied_ahead_is_not_moved_again_and_the_stream_goes_on_meanwhile(decodes: Decodes) -> None:
    decodes.begin()
    decodes.generates(7)
    facts, key = receiving_facts(), RequestKey(ID, 7)
    order = HandOver(ID, FIRST.attempt, key.attempt, "E", facts.epoch + 1, goes_on=True)
    num_copied = decodes.left.leg.hand_over(order, decodes.now_s)
    assert num_copied % BLOCK_SIZE == 0
    assert len(PROMPT) < num_copied < len(PROMPT) + 7
    copied = decodes.left.stream(FIRST)[: num_copied - len(PROMPT)]
    decodes.other.leg.begin(decodes.decode(key, PROMPT, copied, decodes.left_peer), decodes.now_s)
    decodes.round()  # the step that is under way ends
    decodes.until(lambda: bool(decodes.other.stream(key)), decodes.receive)
    decodes.other.leg.cancel(key, decodes.now_s)
    decodes.generates(9)
    num_pushed = decodes.num_pushed
    output = decodes.move()
    decodes.until(lambda: SECOND in decodes.other.finished and decodes.is_empty)
    assert output + decodes.other.stream(SECOND)[1:] == undisturbed(PROMPT, max_tokens=NUM_TOKENS)
    num_rest = -(-(len(PROMPT) + len(output) - 1) // BLOCK_SIZE) - num_copied // BLOCK_SIZE
    assert decodes.num_pushed - num_pushed == num_rest
    assert decodes.left.failures == decodes.other.failures == []


def test_several_requests_are_moved_and_moved_back_while_others_go_on(decodes: Decodes) -> None:
    keys = [RequestKey(bytes([number]) * 16, 1) for number in range(3)]
    prompts = {key: [number] * 9 for number, key in enumerate(keys)}
    for key in keys:
        decodes.begin(key, prompts[key])
    for key in keys:
        decodes.generates(4, key)
    outputs = {key: decodes.move(key, prompts[key]) for key in keys[:2]}
    ends = [RequestKey(key.handoff_id, 2) for key in keys[:2]]
    decodes.until(lambda: all(end in decodes.other.finished for end in ends) and decodes.is_empty)
    for key, end in zip(keys, ends, strict=False):
        found = outputs[key] + decodes.other.stream(end)[1:]
        assert found == undisturbed(prompts[key], max_tokens=NUM_TOKENS)
    assert decodes.left.stream(keys[2]) == undisturbed(prompts[keys[2]], max_tokens=NUM_TOKENS)


def test_what_is_not_here_or_has_no_token_yet_goes_on_as_before(decodes: Decodes) -> None:
    assert decodes.hand_over() == 0
    decodes.begin()
    assert decodes.hand_over() == 0
    decodes.left.round(0.0)  # a chunk of the prompt
    assert decodes.hand_over() == 0
    decodes.until(lambda: FIRST in decodes.left.finished and decodes.is_empty)
    assert decodes.left.stream(FIRST) == undisturbed(PROMPT, max_tokens=NUM_TOKENS)
    assert decodes.hand_over() == 0, "it has ended"


def test_output_of_an_earlier_attempt_that_is_computed_still_is_not_handed_over(decodes: Decodes) -> None:
    decodes.begin(prompt=PROMPT[:3], output_ids=PROMPT[3:])
    for _ in range(2):
        decodes.left.round(0.0)
        assert decodes.hand_over() == 0
    decodes.until(lambda: FIRST in decodes.left.finished and decodes.is_empty)


def test_a_request_that_is_handed_over_already_is_not_handed_over_again(decodes: Decodes) -> None:
    decodes.begin()
    decodes.generates(3)
    assert decodes.hand_over() > 0
    assert decodes.hand_over() == 0
    assert list(decodes.left.leg.live_keys()) == [SECOND], "until its blocks are released"


def test_cancelled_before_the_other_node_is_there(decodes: Decodes) -> None:
    decodes.begin()
    decodes.generates(3)
    assert decodes.hand_over() > 0
    decodes.left.leg.cancel(SECOND, decodes.now_s)
    decodes.until(lambda: decodes.is_empty)
    assert decodes.left.failures == []


def test_without_a_word_of_the_other_node_the_blocks_are_released_with_their_lease(decodes: Decodes) -> None:
    decodes.begin()
    decodes.generates(3)
    assert decodes.hand_over() > 0
    for _ in range(5):
        decodes.round()
    assert decodes.left.core.status().num_held_blocks > 0
    decodes.now_s += LEASE_S + 1
    decodes.until(lambda: decodes.is_empty)


def test_the_router_is_gone_before_the_other_node_is_asked(decodes: Decodes) -> None:
    decodes.begin()
    decodes.generates(3)
    assert decodes.hand_over() > 0
    decodes.left.leg.cancel_all(decodes.now_s)
    decodes.until(lambda: decodes.is_empty)


def test_the_router_is_gone(decodes: Decodes) -> None:
    decodes.begin()
    decodes.generates(3)
    decodes.move()
    for node in (decodes.left, decodes.other):
        node.leg.cancel_all(decodes.now_s)
    decodes.until(lambda: decodes.is_empty)


def test_kv_that_arrives_damaged_twice_fails_at_the_other_node_only(decodes: Decodes, network: LoopbackNetwork) -> None:
    def flip(number: int, key: RequestKey, move: Move) -> Fault:
        return Fault(flipped_bits=(9,)) if move.index == 2 else Fault()

    network.plan = flip
    decodes.begin()
    decodes.generates(3)
    decodes.move()
    decodes.until(lambda: bool(decodes.other.failures) and decodes.is_empty)
    ((failed, error),) = decodes.other.failures
    assert failed == SECOND
    assert isinstance(error, TransferFailed)
    assert decodes.left.failures == []


def test_nothing_is_pushed_before_the_step_in_flight_is_over(decodes: Decodes, overlaps: bool) -> None:
    """It may write into the last block between the push and its checksum."""
    decodes.begin()
    decodes.generates(3)
    decodes.move()
    deadline_s = time.monotonic() + _DEADLINE_S
    while not decodes.other.core.request_keys() and not overlaps:
        assert time.monotonic() < deadline_s
        decodes.transfer()
    for _ in range(30):
        decodes.transfer()
    assert (decodes.num_pushed > 0) is not overlaps
    decodes.until(lambda: SECOND in decodes.other.finished and decodes.is_empty)
    assert decodes.num_pushed > 0


def test_the_step_in_flight_fails_after_a_request_was_handed_over(decodes: Decodes) -> None:
    """It could only have written behind the tokens that are handed over."""
    decodes.begin()
    decodes.generates(3)
    output = decodes.move()
    decodes.left.runner.error = ValueError("device lost")
    decodes.until(lambda: SECOND in decodes.other.finished and decodes.is_empty)
    assert output + decodes.other.stream(SECOND)[1:] == undisturbed(PROMPT, max_tokens=NUM_TOKENS)


def test_a_handoff_is_finished_when_every_step_that_was_in_flight_is_over() -> None:
    posted: list[object] = []
    handed = HandedOver(Prompt((1, 2)), (3,), 4, pack_blocks((0,)))
    core = SimpleNamespace(handoffs=SimpleNamespace(hand_over=lambda *_, **__: handed, num_drafted=lambda _: 0))
    source = Source(cast("EngineCore", core), cast("SendingEnd", SimpleNamespace(thread=PostBox(posted))))
    order = HandOver(ID, 1, 2, "E", 5)
    for core.num_steps_in_flight, over, num_finished in ((0, source.step_over, 1), (2, source.steps_lost, 1)):
        source.hand_over(order, 0.0)
        assert sum(isinstance(each, FinishHandoff) for each in posted) == (core.num_steps_in_flight == 0)
        over()
        assert sum(isinstance(each, FinishHandoff) for each in posted) == num_finished
        posted.clear()
    core.num_steps_in_flight = 2
    source.hand_over(order, 0.0)
    source.step_over()
    assert not any(isinstance(each, FinishHandoff) for each in posted)
    source.step_over()
    assert isinstance(posted[-1], FinishHandoff)


@dataclass(frozen=True)
class PostBox:
    """Stands for the transfer thread."""

    posted: list[object]

    def post(self, command: object) -> None:
        self.posted.append(command)
