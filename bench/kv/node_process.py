"""One node of the measured pair, without an engine: `python -m baton.bench.kv.node_process`, driven by
`baton.bench.child`.

Owns a pool, one side of the transfer layer on its own thread, and the time stamps (CLOCK_MONOTONIC). Everything between
the stamps is what `baton prefill` and `baton decode` run. The main thread posts and waits, as an engine would.
"""

from __future__ import annotations

import queue
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import zmq

from baton.bench.child import Worker, serve_parent
from baton.kvtransfer import commands
from baton.kvtransfer.facts import ReceivingFacts, SendingFacts
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.open import open_pool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.sender_connections import open_listener
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.thread import TransferThread
from baton.kvtransfer.transports import registry
from baton.kvtransfer.transports.base import Blocks
from baton.kvtransfer.transports.registry import SHM, SLOTS, PoolMemory, SenderFactory, TransportSettings
from baton.runtime.process import keep_freed_memory
from baton.wire.errors import RequestFailed
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.links import LinkSettings
from baton.wire.messages.legs import PrefillPeer
from baton.wire.messages.output import TokenEvent
from baton.wire.request_key import RequestKey

PREFILL, DECODE = "prefill", "decode"
TOKENS_PER_BLOCK = 16
_EPOCHS = {PREFILL: 1, DECODE: 2}
_HOST = "127.0.0.1"
_LEASE_S, _WAIT_S, _LOOK_S = 30.0, 60.0, 0.5
_SEED = 20_211
_SETTLE_S = 0.003
"""What a grant gets to arrive before the prompt counts as computed. A later one would only make figures worse."""


def pattern(block_id: int, block_bytes: int) -> Blocks:
    """[block_bytes] that block `block_id` of the sending pool holds. Different in every block, and never all alike."""
    return np.random.default_rng((_SEED, block_id)).integers(0, 256, block_bytes, dtype=np.uint8)


def wrong_blocks(blocks: Blocks, first: int, count: int) -> list[int]:
    """Blocks of `first` .. `first + count - 1` that do not hold their pattern."""
    size = blocks.shape[1]
    return [found for found in range(first, first + count) if not np.array_equal(blocks[found], pattern(found, size))]


class _Told:
    """What a side tells its engine: a time for each handoff, or why it failed."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[RequestKey, float, str]] = queue.SimpleQueue()

    def put(self, notice: commands.SendingNotice | commands.ReceivingNotice, /) -> None:
        match notice:
            case commands.Rejected() | commands.Failed():
                self._told.put((notice.key, time.monotonic(), notice.reason or "the request ended"))
            case commands.Delivered() | commands.Released():
                self._told.put((notice.key, time.monotonic(), ""))
            case commands.Verified():
                pass  # there are no prefixes

    def wait_for(self, key: RequestKey, thread: TransferThread[Any]) -> float:
        """When it was told. Raises `RequestFailed`."""
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


class _End:
    """What both ends have; `closing` gives it up. `spec`: `role`, `transport`, `checksum`, `num_blocks`, `block_bytes`,
    and `device`, which says where the pool lies as torch names it, "" for memory that the transport allocates on the
    host.
    """

    def __init__(self, spec: dict[str, Any], closing: ExitStack) -> None:
        self._spec, self._closing = spec, closing
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        closing.callback(self._context.destroy, linger=0)
        self._settings = TransportSettings(spec["transport"], self._context, _HOST, LinkSettings(), this_process())
        self._told = _Told()

    def close(self) -> None:
        self._closing.close()

    def _open_memory(self, side: str) -> tuple[PoolMemory, Any]:
        """With its pool [num_blocks, block_bytes], every page touched: an array, or a tensor of a device."""
        memory, shape = PoolMemory(self._settings, side), (self._spec["num_blocks"], self._spec["block_bytes"])
        self._closing.callback(memory.close)
        if self._spec["device"]:
            import torch  # takes seconds, and nothing else here needs it

            return memory, torch.zeros(shape, dtype=torch.uint8, device=self._spec["device"])
        region = memory.allocate(shape[0] * shape[1])
        region[:] = 0
        return memory, region.reshape(shape)

    def _facts(self) -> dict[str, Any]:
        """What sending and receiving nodes say of themselves alike. What the bytes mean is of no importance here."""
        role = self._spec["role"]
        layer = LayerKv(1, head_dim=self._spec["block_bytes"] // (4 * TOKENS_PER_BLOCK))  # K and V, 2 bytes an element
        return {
            "node_id": role,
            "epoch": _EPOCHS[role],
            "fingerprint": "bench",
            "layout": KvLayout.of_layers("bfloat16", TOKENS_PER_BLOCK, [layer]),
            "process": self._settings.process,
            "lease_s": _LEASE_S,
            "checksum": self._spec["checksum"],
        }

    def _start(self, side: SendingSide | ReceivingSide, pool: KvPool) -> TransferThread[Any]:
        thread: TransferThread[Any] = TransferThread(side, f"kv-{self._spec['role']}", pool.enter)
        self._closing.callback(thread.close)
        thread.start()
        return thread


class PrefillEnd(_End):
    """The sending side, its pool, and the yardstick: a copy from that pool into memory of the kind that D's is."""

    def __init__(self, spec: dict[str, Any], closing: ExitStack) -> None:
        super().__init__(spec, closing)
        memory, self._blocks = self._open_memory("sender")
        _, self._yardstick = self._open_memory("receiver")
        filled = [pattern(block_id, spec["block_bytes"]) for block_id in range(spec["num_blocks"])]
        _copy(self._blocks, np.stack(filled))
        pool = open_pool(self._blocks)
        factory = SenderFactory(self._settings, memory, pool)
        closing.callback(factory.close)
        link, self._address = open_listener(self._context, _HOST, 0, self._settings.links)
        pusher = Pusher(pool, spec["checksum"])
        self._side = SendingSide(SendingFacts(**self._facts()), link, factory, pusher, self._told)
        self._thread = self._start(self._side, pool)

    def begin(self, number: int, count: int) -> str:
        """A prompt of so many blocks arrives for handoff `number`; the address at which decode nodes ask for it."""
        key = RequestKey.numbered(number)
        num_tokens = count * TOKENS_PER_BLOCK
        self._thread.post(commands.BeginHandoff(key, DECODE, _EPOCHS[DECODE], num_tokens, prompt_digest=key[0]))
        return self._address

    def finish(self, number: int, first: int, count: int) -> dict[str, float]:
        """The prompt is computed now: when it was, and when its blocks were released."""
        key, table = RequestKey.numbered(number), list(range(first, first + count))
        token = TokenEvent(*key, index=0, token_ids=(0,), logprobs=(), finish_reason="", num_cached_tokens=0)
        time.sleep(_SETTLE_S)
        computed_s = time.monotonic()
        self._thread.post(commands.FinishHandoff(key, table, (token,), computed_s))
        return {"computed_s": computed_s, "let_go_s": self._told.wait_for(key, self._thread)}

    def memcpy(self, first: int, count: int) -> float:
        target, source = self._yardstick[first : first + count], self._blocks[first : first + count]
        begin_s = time.monotonic()
        _copy(target, source)
        return time.monotonic() - begin_s


class DecodeEnd(_End):
    """The receiving side and its pool."""

    def __init__(self, spec: dict[str, Any], closing: ExitStack) -> None:
        super().__init__(spec, closing)
        memory, self._blocks = self._open_memory("receiver")
        pool = open_pool(self._blocks)
        receivers = registry.open_receivers(self._settings, memory, pool)
        for receiver in receivers:
            closing.callback(receiver.close)
        # no other transport is measured in its place
        wanted = SLOTS if pool.is_device and spec["transport"] == SHM else spec["transport"]
        receivers = [receiver for receiver in receivers if receiver.endpoint.transport == wanted]
        facts = ReceivingFacts(num_blocks=spec["num_blocks"], **self._facts())
        connections = ReceiverConnections(facts, self._context, self._settings.links, receivers)
        self._side = ReceivingSide(facts, connections, pool, self._told)
        self._thread = self._start(self._side, pool)

    def grant(self, number: int, first: int, count: int, address: str) -> None:
        """Room for handoff `number` is in these blocks; the prefill node is at `address`."""
        key = RequestKey.numbered(number)
        table, num_tokens = tuple(range(first, first + count)), count * TOKENS_PER_BLOCK
        blocks = commands.ReservedBlocks(key, num_tokens, 0, key[0], table, generations=(number,) * count)
        self._thread.post(commands.GrantBlocks(blocks, PrefillPeer(PREFILL, _EPOCHS[PREFILL], address)))

    def delivered(self, number: int) -> float:
        return self._told.wait_for(RequestKey.numbered(number), self._thread)

    def clear(self, first: int, count: int) -> None:
        _copy(self._blocks[first : first + count], np.zeros(self._blocks[first : first + count].shape, dtype=np.uint8))

    def wrong_blocks(self, first: int, count: int) -> list[int]:
        blocks = self._blocks if isinstance(self._blocks, np.ndarray) else self._blocks.cpu().numpy()
        return wrong_blocks(blocks, first, count)


def _copy(target: Any, source: Any) -> None:
    """Done when it returns, wherever the two are."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
        return
    import torch

    target.copy_(torch.from_numpy(source) if isinstance(source, np.ndarray) else source)
    if target.is_cuda:
        torch.cuda.synchronize(target.device)


def _begin(spec: dict[str, Any]) -> Worker:
    keep_freed_memory()
    closing = ExitStack()
    try:
        return PrefillEnd(spec, closing) if spec["role"] == PREFILL else DecodeEnd(spec, closing)
    except BaseException:
        closing.close()
        raise


if __name__ == "__main__":
    serve_parent(_begin)
