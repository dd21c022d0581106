"""One node of the measured pair, without an engine: `python -m bench.kv.node_process`, driven by `bench.child`.

Owns a pool, one side of the transfer layer on its own thread, and the time stamps. Everything between the stamps is
what `baton prefill` and `baton decode` run: sides, pusher, transfer thread, transports and real sockets. The engine's
part is played by the main thread, which posts and waits.

Stamps are seconds of CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq

from bench.child import Worker, serve_parent
from bench.kv.pattern import fill, wrong_blocks
from kvtransfer.commands import (
    BeginHandoff,
    Delivered,
    Failed,
    FinishHandoff,
    GrantBlocks,
    ReceivingNotice,
    Rejected,
    Released,
    ReservedBlocks,
    SendingNotice,
)
from kvtransfer.facts import ReceivingFacts, SendingFacts
from kvtransfer.messages import PeerHello
from kvtransfer.pools.base import KvPool
from kvtransfer.process_identity import this_process
from kvtransfer.pusher import Pusher
from kvtransfer.receiving import ReceivingSide
from kvtransfer.sender_connections import open_listener
from kvtransfer.sending import SendingSide
from kvtransfer.thread import TransferThread
from kvtransfer.transports.base import Blocks, Sender
from kvtransfer.transports.registry import (
    SHM,
    SLOTS,
    PoolMemory,
    SenderFactory,
    TransportSettings,
    open_pool,
    open_receivers,
)
from program.process import keep_freed_memory
from wire.errors import Refused, RequestFailed
from wire.layout import KvLayout, LayerKv
from wire.links import LinkSettings
from wire.messages import PrefillPeer, TokenEvent
from wire.request_key import RequestKey

PREFILL, DECODE = "prefill", "decode"
TOKENS_PER_BLOCK = 16
_EPOCHS = {PREFILL: 1, DECODE: 2}
_HOST = "127.0.0.1"
_LEASE_S = 30.0
_WAIT_S = 60.0
_LOOK_S = 0.5
_PAGE_BYTES = 4096
_SETTLE_S = 0.003
"""What a grant gets to arrive before the prompt counts as computed. A later one would only make figures worse."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node is made of. `role` is "prefill" or "decode". `device`: where its pool lies, as torch names it; "" for
    memory that the transport allocates on the host.
    """

    role: str
    transport: str
    checksum: str
    num_blocks: int
    block_bytes: int
    device: str = ""

    @property
    def layout(self) -> KvLayout:
        """A layout with blocks of this size; what the bytes mean is of no importance here."""
        # keys and values of 2 bytes an element
        kv = LayerKv(num_kv_heads=1, head_dim=self.block_bytes // (4 * TOKENS_PER_BLOCK))
        return KvLayout.of_layers("bfloat16", TOKENS_PER_BLOCK, [kv])


def key_of(number: int) -> RequestKey:
    """The key of the handoff with this number."""
    return RequestKey.numbered(number)


class _Inbox:
    """What the transfer thread tells the main thread: a time for each handoff, or why it failed."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[RequestKey, float, str]] = queue.SimpleQueue()

    def tell(self, key: RequestKey, failure: str = "") -> None:
        self._told.put((key, time.monotonic(), failure))

    def wait_for(self, key: RequestKey, thread: TransferThread[Any]) -> float:
        """When it was told. Raises `RequestFailed`, also when the thread has failed or says nothing for long."""
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            try:
                told, at_s, failure = self._told.get(timeout=_LOOK_S)
            except queue.Empty:
                thread.require_alive()
                continue
            if failure or told != key:
                raise RequestFailed(f"a handoff failed: {failure or 'another one ended'}")
            return at_s
        raise RequestFailed(f"nothing came of a handoff within {_WAIT_S:g} s")


class _SendingInbox(_Inbox):
    """Takes the notices of the sending side."""

    def put(self, notice: SendingNotice, /) -> None:
        self.tell(notice.key, notice.reason if isinstance(notice, Rejected) else "")


class _ReceivingInbox(_Inbox):
    """Takes the notices of the receiving side: of those about a handoff that failed, the first."""

    def put(self, notice: ReceivingNotice, /) -> None:
        match notice:
            case Delivered():
                self.tell(notice.key)
            case Failed():
                self.tell(notice.key, notice.reason or "the request ended")
            case Released():
                pass


class _OneTransport(SenderFactory):
    """Refuses to measure another transport than was asked for."""

    def __init__(self, settings: TransportSettings, memory: PoolMemory, pool: KvPool) -> None:
        super().__init__(settings, memory, pool)
        self._names = (settings.choice, SLOTS) if pool.is_device and settings.choice == SHM else (settings.choice,)

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """See `SenderFactory.open`."""
        name, sender = super().open(hello)
        if name not in self._names:
            sender.close()
            raise Refused(f"{self._names[0]} was to be measured, and {name} was taken")
        return name, sender


def _transport_settings(spec: NodeSpec, context: zmq.Context[zmq.Socket[bytes]]) -> TransportSettings:
    return TransportSettings(spec.transport, context, _HOST, LinkSettings(), this_process())


def _allocate(memory: PoolMemory, spec: NodeSpec) -> Any:
    """[num_blocks, block_bytes] with every page touched: an array, or a tensor of a device."""
    if spec.device:
        return torch.zeros(spec.num_blocks, spec.block_bytes, dtype=torch.uint8, device=spec.device)
    region = memory.allocate(spec.num_blocks * spec.block_bytes)
    region[::_PAGE_BYTES] = 0
    return region.reshape(spec.num_blocks, spec.block_bytes)


def _fill(blocks: Any) -> None:
    """The pattern, wherever the blocks are."""
    if isinstance(blocks, torch.Tensor):
        on_host = np.empty(blocks.shape, dtype=np.uint8)
        fill(on_host)
        blocks.copy_(torch.from_numpy(on_host))
    else:
        fill(blocks)


def _wait_for(blocks: Any) -> None:
    """Until a device has done what it was told."""
    if isinstance(blocks, torch.Tensor) and blocks.is_cuda:
        torch.cuda.synchronize(blocks.device)


class PrefillEnd:
    """The sending side, its pool, and the yardstick: a copy from that pool into memory of the kind that D's is."""

    def __init__(self, spec: NodeSpec) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        settings = _transport_settings(spec, self._context)
        self._memory, self._yardstick_memory = PoolMemory(settings, "sender"), PoolMemory(settings, "receiver")
        self._factory: SenderFactory | None = None
        self._thread: TransferThread[Any] | None = None
        try:
            self._blocks = _allocate(self._memory, spec)
            self._yardstick = _allocate(self._yardstick_memory, spec)
            _fill(self._blocks)
            _wait_for(self._blocks)
            pool = open_pool(self._blocks)
            facts = SendingFacts(
                node_id=PREFILL,
                epoch=_EPOCHS[PREFILL],
                fingerprint="bench",
                layout=spec.layout,
                process=settings.process,
                lease_s=_LEASE_S,
                checksum=spec.checksum,
            )
            self._factory = _OneTransport(settings, self._memory, pool)
            link, self._address = open_listener(self._context, _HOST, 0, settings.links)
            self._inbox = _SendingInbox()
            pusher = Pusher(pool, spec.checksum)
            side = SendingSide(facts, link, self._factory, pusher, self._inbox)
            self._thread = TransferThread(side, "kv-sending", pool.enter)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "address", {}:
                return self._address
            case "begin", {"number": int(number), "count": int(count)}:
                return self._begin(number, count)
            case "finish", {"number": int(number), "first": int(first), "count": int(count)}:
                return self._finish(number, first, count)
            case "memcpy", {"first": int(first), "count": int(count)}:
                return self._memcpy(first, count)
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        if self._thread is not None:
            self._thread.close()
        if self._factory is not None:
            self._factory.close()
        self._memory.close()
        self._yardstick_memory.close()
        self._context.destroy(linger=0)

    def _begin(self, number: int, count: int) -> None:
        if self._thread is None:
            raise RuntimeError("the node has been closed")
        key = key_of(number)
        self._thread.post(BeginHandoff(key, DECODE, _EPOCHS[DECODE], count * TOKENS_PER_BLOCK, prompt_digest=key[0]))

    def _finish(self, number: int, first: int, count: int) -> dict[str, float]:
        """The prompt is computed now: when it was, and when its blocks were released."""
        if self._thread is None:
            raise RuntimeError("the node has been closed")
        key = key_of(number)
        table = list(range(first, first + count))
        token = TokenEvent(*key, index=0, token_ids=(0,), logprobs=(), finish_reason="", num_cached_tokens=0)
        time.sleep(_SETTLE_S)
        computed_s = time.monotonic()
        self._thread.post(FinishHandoff(key, table, token, computed_s))
        return {"computed_s": computed_s, "let_go_s": self._inbox.wait_for(key, self._thread)}

    def _memcpy(self, first: int, count: int) -> float:
        """Seconds that one copy of these blocks takes."""
        target, source = self._yardstick[first : first + count], self._blocks[first : first + count]
        begin_s = time.monotonic()
        if isinstance(source, torch.Tensor):
            target.copy_(source)
            _wait_for(source)
        else:
            np.copyto(target, source)
        return time.monotonic() - begin_s


class DecodeEnd:
    """The receiving side and its pool."""

    def __init__(self, spec: NodeSpec) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        settings = _transport_settings(spec, self._context)
        self._memory = PoolMemory(settings, "receiver")
        self._thread: TransferThread[Any] | None = None
        self._receivers = []
        try:
            self._blocks = _allocate(self._memory, spec)
            facts = ReceivingFacts(
                node_id=DECODE,
                epoch=_EPOCHS[DECODE],
                fingerprint="bench",
                layout=spec.layout,
                num_blocks=spec.num_blocks,
                process=settings.process,
                lease_s=_LEASE_S,
                checksum=spec.checksum,
            )
            pool = open_pool(self._blocks)
            self._receivers = open_receivers(settings, self._memory, pool)
            self._inbox = _ReceivingInbox()
            side = ReceivingSide(facts, self._context, settings.links, self._receivers, pool, self._inbox)
            self._thread = TransferThread(side, "kv-receiving", pool.enter)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "grant", {"number": int(number), "first": int(first), "count": int(count), "address": str(address)}:
                return self._grant(number, first, count, address)
            case "delivered", {"number": int(number)}:
                return self._delivered(number)
            case "clear", {"first": int(first), "count": int(count)}:
                self._blocks[first : first + count] = 0
                _wait_for(self._blocks)
                return None
            case "wrong_blocks", {"first": int(first), "count": int(count)}:
                return wrong_blocks(self._on_host(), first, count)
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        if self._thread is not None:
            self._thread.close()
        for receiver in self._receivers:
            receiver.close()
        self._memory.close()
        self._context.destroy(linger=0)

    def _grant(self, number: int, first: int, count: int, address: str) -> None:
        if self._thread is None:
            raise RuntimeError("the node has been closed")
        key = key_of(number)
        blocks = ReservedBlocks(
            key=key,
            num_tokens=count * TOKENS_PER_BLOCK,
            num_cached_tokens=0,
            prompt_digest=key[0],
            block_ids=tuple(range(first, first + count)),
            generations=(number,) * count,
        )
        self._thread.post(GrantBlocks(blocks, PrefillPeer(PREFILL, _EPOCHS[PREFILL], address)))

    def _on_host(self) -> Blocks:
        return self._blocks.cpu().numpy() if isinstance(self._blocks, torch.Tensor) else self._blocks

    def _delivered(self, number: int) -> float:
        """When this handoff was delivered."""
        if self._thread is None:
            raise RuntimeError("the node has been closed")
        return self._inbox.wait_for(key_of(number), self._thread)


def _begin(spec: dict[str, Any]) -> Worker:
    keep_freed_memory()
    node = NodeSpec(**spec)
    return PrefillEnd(node) if node.role == PREFILL else DecodeEnd(node)


if __name__ == "__main__":
    serve_parent(_begin)
