"""A prefill leg and a decode leg with oracle engines, joined by real sockets, driven as `EngineLoop` drives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import zmq

from baton.decode_node.leg import DecodeLeg
from baton.decode_node.source import Source
from baton.engine.core import EngineCore
from baton.engine.steps_in_flight import StepFailed
from baton.kvtransfer.commands import ReceivingNotice, SendingNotice
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.mailbox import Mailbox
from baton.kvtransfer.messages import RECEIVER_TO_SENDER, SENDER_TO_RECEIVER
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sender_connections import SenderOpener, open_listener
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.thread import Side, TransferThread
from baton.kvtransfer.transports.base import Blocks
from baton.node.first_steps import FirstSteps
from baton.prefill_node.leg import PrefillLeg
from baton.wire.errors import BatonError
from baton.wire.messages.legs import Decode, Prefill, PrefillPeer
from baton.wire.messages.output import StepTimes, TokenEvent
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.kvtransfer.loopback import FaultPlan, LoopbackNetwork, LoopbackOpener, LoopbackReceiver, without_faults
from tests.kvtransfer.oracle import OracleRunner, make_core
from tests.kvtransfer.pair import NUM_BLOCKS, SETTINGS, empty_blocks, receiving_facts, sending_facts
from tests.kvtransfer.pools import LAYOUT, LEASE_S

_DEADLINE_S = 30.0


class LossyLink:
    """A ROUTER socket that loses the messages for which `is_lost` says so. `seen` names all that were not lost."""

    def __init__(self, link: zmq.Socket[bytes]) -> None:
        self.link = link
        self.is_lost: Callable[[object], bool] = lambda message: False
        self.seen: list[object] = []

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        if not self._loses(SENDER_TO_RECEIVER.decode(frames[-1])):
            self.link.send_multipart(frames, flags)

    def recv_multipart(self, flags: int) -> list[bytes]:
        while True:
            frames = self.link.recv_multipart(flags)
            try:
                message = RECEIVER_TO_SENDER.decode(frames[-1])
            except BatonError:
                return frames  # the side will refuse them
            if not self._loses(message):
                return frames

    def lose(self, *kinds: type[Any]) -> None:
        """Lose every message of these types from now on."""
        self.is_lost = lambda message: isinstance(message, kinds)

    def num_seen(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    def close(self) -> None:
        self.link.close()

    def _loses(self, message: object) -> bool:
        if self.is_lost(message):
            return True
        self.seen.append(message)
        return False


class Echo:
    """A round trip through a context's own I/O thread, so that messages sent before it have had time to arrive."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._near, self._far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        port = self._near.bind_to_random_port("tcp://127.0.0.1")
        self._far.connect(f"tcp://127.0.0.1:{port}")

    def wait(self) -> None:
        self._near.send(b"")
        self._far.recv()
        self._far.send(b"")
        self._near.recv()

    def close(self) -> None:
        self._near.close(linger=0)
        self._far.close(linger=0)


class SteppedThread(TransferThread[Any]):
    """A transfer thread that works only when a test calls `turn`."""

    def __init__(self, side: Side[Any], name: str) -> None:
        super().__init__(side, name, lambda: None)

    def turn(self, now_s: float) -> None:
        for command in self._commands.take():
            self._side.do(command, now_s)
        self._side.round(now_s)

    def close(self, timeout_s: float = 0.0) -> None:
        self._commands.close()
        self._side.close()


@dataclass(slots=True)
class Node:
    """A leg, its engine, its ends of the transfers, whose threads are stepped, and what it reported to the router."""

    leg: PrefillLeg | DecodeLeg
    ends: Sequence[SendingEnd | ReceivingEnd]
    core: EngineCore
    runner: OracleRunner
    first_steps: FirstSteps
    tokens: dict[tuple[RequestKey, int], int] = field(default_factory=dict)
    finished: dict[RequestKey, str] = field(default_factory=dict)
    failures: list[tuple[RequestKey, BatonError]] = field(default_factory=list)
    num_cached_tokens: dict[RequestKey, int] = field(default_factory=dict)
    times: dict[tuple[RequestKey, int], StepTimes] = field(default_factory=dict)

    @property
    def threads(self) -> list[SteppedThread]:
        """Those of its ends: of a decode node the receiving and then the sending one."""
        return [cast(SteppedThread, end.thread) for end in self.ends]

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def round(self, now_s: float) -> None:
        """As `EngineLoop.run` and the transfer threads do it, by turns."""
        for thread in self.threads:
            thread.turn(now_s)
        self.leg.poll(now_s)
        if self.core.has_work:
            try:
                outputs = self.core.step(self.leg.watch)
            except StepFailed as error:
                self.leg.lost(error, now_s)
                for key in error.keys:
                    self.leg.fail(key, error, now_s)
            else:
                self._note(self.leg.applied(outputs, now_s))
                self.leg.sent(now_s)
        self.failures += self.leg.take_failures()
        self.core.check()

    def failures_of(self, key: RequestKey) -> list[str]:
        return [str(error) for failed, error in self.failures if failed == key]

    def stream(self, key: RequestKey) -> list[int]:
        """Tokens reported for this attempt, in order of their index."""
        return [token for (of, _), token in sorted(self.tokens.items()) if of == key]

    @property
    def is_empty(self) -> bool:
        """Whether no request is alive, none waits to be timed, and no block is held."""
        return self.leg.num_live == len(self.first_steps) == self.core.status().num_held_blocks == 0

    def _note(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            key = RequestKey(event.handoff_id, event.attempt)
            self.tokens[(key, event.index)] = event.token_ids[0]
            self.num_cached_tokens[key] = event.num_cached_tokens
            if event.times is not None:
                self.times[(key, event.index)] = event.times
            if event.finish_reason:
                self.finished[key] = event.finish_reason


@dataclass(slots=True)
class Relay:
    """Both nodes and their clock; its methods do the part of the router."""

    prefill: Node
    decode: Node
    link: LossyLink
    address: str
    echo: Echo
    stop_token_ids: tuple[int, ...] = ()
    now_s: float = 0.0

    def ask_prefill(
        self, key: RequestKey, token_ids: Sequence[int], *, max_tokens: int = 8, forks: Sequence[RequestKey] = ()
    ) -> None:
        facts = receiving_facts()
        request = Prefill(
            handoff_id=key[0],
            attempt=key[1],
            prompt=Prompt.of(token_ids),
            params=params(max_tokens, self.stop_token_ids),
            decode_node_id=facts.node_id,
            decode_epoch=facts.epoch,
            forks=tuple(fork.handoff_id for fork in forks),
        )
        self.prefill.leg.begin(request, self.now_s)

    def ask_decode(
        self, key: RequestKey, token_ids: Sequence[int], *, max_tokens: int = 8, forks: Sequence[RequestKey] = ()
    ) -> None:
        self.decode.leg.begin(self.decode_request(key, token_ids, max_tokens=max_tokens, forks=forks), self.now_s)

    def decode_request(
        self, key: RequestKey, token_ids: Sequence[int], *, max_tokens: int = 8, forks: Sequence[RequestKey] = ()
    ) -> Decode:
        return Decode(
            handoff_id=key[0],
            attempt=key[1],
            prompt=Prompt.of(token_ids),
            params=params(max_tokens, self.stop_token_ids),
            prefill_peer=PrefillPeer("P", sending_facts().epoch, self.address),
            forks=tuple(fork.handoff_id for fork in forks),
        )

    def ask(
        self, key: RequestKey, token_ids: Sequence[int], *, max_tokens: int = 8, forks: Sequence[RequestKey] = ()
    ) -> None:
        """Begin both legs of a request, and of further choices of the same prompt."""
        self.ask_prefill(key, token_ids, max_tokens=max_tokens, forks=forks)
        self.ask_decode(key, token_ids, max_tokens=max_tokens, forks=forks)

    def round(self) -> None:
        self.prefill.round(self.now_s)
        self.decode.round(self.now_s)

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not is_done():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the condition of the test did not become true")
            self.round()
            time.sleep(0.0005)

    def until_finished(self, *keys: RequestKey) -> None:
        self.until(lambda: all(key in self.decode.finished for key in keys) and self.is_empty)

    def settle(self) -> None:
        for _ in range(30):
            self.round()
            self.echo.wait()

    def pass_time(self, duration_s: float) -> None:
        for _ in range(round(duration_s)):
            self.now_s += 1.0
            for _ in range(6):
                self.round()
                self.echo.wait()

    @property
    def is_empty(self) -> bool:
        return self.prefill.is_empty and self.decode.is_empty


def params(max_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> DecodingParams:
    return DecodingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop_token_ids)


def undisturbed(
    token_ids: Sequence[int], *, max_tokens: int = 8, stop_token_ids: tuple[int, ...] = (), choice: int = 0
) -> list[int]:
    """The tokens that one engine alone generates."""
    blocks = empty_blocks()
    core = make_core(blocks, OracleRunner(blocks))
    core.add(RequestKey.numbered(0), Prompt.of(token_ids), replace(params(max_tokens, stop_token_ids), choice=choice))
    found = []
    while core.has_work:
        found += [token_id for output in core.step() for token_id in output.token_ids]
    return found


@contextmanager
def open_relay(
    *,
    plan: FaultPlan = without_faults,
    peers_write: bool = True,
    num_blocks: int = NUM_BLOCKS,
    lease_s: float = LEASE_S,
    overlaps: bool = False,
) -> Iterator[Relay]:
    """Two legs, closed at the end. `overlaps`: their engines schedule asynchronously."""
    network = LoopbackNetwork(plan)
    sent_blocks, received_blocks = empty_blocks(num_blocks), empty_blocks(num_blocks)
    prefill_runner, prefill_steps = OracleRunner(sent_blocks, overlaps), FirstSteps()
    prefill_core = make_core(sent_blocks, prefill_runner)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, address = open_listener(context, "127.0.0.1", 0, SETTINGS)
    link = LossyLink(socket)
    sent: Mailbox[SendingNotice] = Mailbox()
    sending = SendingSide(
        replace(sending_facts(), lease_s=lease_s),
        cast("zmq.Socket[bytes]", link),
        LoopbackOpener(network, sent_blocks),
        Pusher(HostPool(sent_blocks)),
        sent,
    )
    end = SendingEnd(sending, SteppedThread(sending, "sending"), sent)
    prefill_leg = PrefillLeg(prefill_core, end, LAYOUT.layer_ends, prefill_steps)
    prefill = Node(prefill_leg, [end], prefill_core, prefill_runner, prefill_steps)
    facts = replace(receiving_facts(), num_blocks=num_blocks, lease_s=lease_s)
    decode, _ = open_decode(context, network, facts, received_blocks, peers_write=peers_write, overlaps=overlaps)
    try:
        yield Relay(prefill, decode, link, address, Echo(context))
    finally:
        prefill.close()
        decode.close()
        context.destroy(linger=0)


def open_decode(
    context: zmq.Context[zmq.Socket[bytes]],
    network: LoopbackNetwork,
    facts: ReceivingFacts,
    blocks: Blocks,
    *,
    peers_write: bool,
    overlaps: bool,
) -> tuple[Node, PrefillPeer]:
    """A decode node, and what another one dials when it takes requests over."""
    runner, first_steps = OracleRunner(blocks, overlaps), FirstSteps()
    core = make_core(blocks, runner)
    receiver = LoopbackReceiver(network, facts.node_id, blocks, peers_write=peers_write)
    received: Mailbox[ReceivingNotice] = Mailbox()
    connections = ReceiverConnections(facts, context, SETTINGS, [receiver])
    receiving = ReceivingSide(facts, connections, HostPool(blocks), received)
    end = ReceivingEnd(receiving, SteppedThread(receiving, "receiving"), received)
    source, source_end, address = open_source(context, core, facts, LoopbackOpener(network, blocks), HostPool(blocks))
    leg = DecodeLeg(core, end, first_steps, source)
    node = Node(leg, [end, source_end], core, runner, first_steps)
    return node, PrefillPeer(facts.node_id, facts.epoch, address)


def open_source(
    context: zmq.Context[zmq.Socket[bytes]], core: EngineCore, facts: ReceivingFacts, opener: SenderOpener, pool: KvPool
) -> tuple[Source, SendingEnd, str]:
    """What hands requests of a decode node over, its end and its address."""
    socket, address = open_listener(context, "127.0.0.1", 0, SETTINGS)
    notices: Mailbox[SendingNotice] = Mailbox()
    own = replace(sending_facts(), node_id=facts.node_id, epoch=facts.epoch, lease_s=facts.lease_s)
    sending = SendingSide(own, socket, opener, Pusher(pool, facts.checksum), notices)
    end = SendingEnd(sending, SteppedThread(sending, "source"), notices)
    return Source(core, end), end, address
