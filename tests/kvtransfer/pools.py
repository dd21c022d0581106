"""Both nodes' pools without an engine: real block accounting, and KV that can be recognised.

The KV of block i of a prompt is a function of (prompt digest, i), so both ends know what every delivered byte must be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from baton.engine.cache.block_pool import BlockPool
from baton.kvtransfer.commands import Delivered, Failed, ReceivingNotice, Rejected, ReservedBlocks, SendingNotice
from baton.kvtransfer.transports.base import Blocks
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.messages.output import HandoffFigures, TokenEvent
from baton.wire.request_key import RequestKey

LAYOUT = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=1, head_dim=4)])
BLOCK_SIZE, BLOCK_BYTES = LAYOUT.block_size, LAYOUT.block_bytes
LEASE_S = 10.0
FREE_BYTE = 0xEE


def key_of(number: int, attempt: int = 1) -> RequestKey:
    """A handoff id that is easy to read in failures."""
    return RequestKey(number.to_bytes(16, "big"), attempt)


def digest_of(key: RequestKey) -> bytes:
    """The digest of the prompt that this handoff is about."""
    return blake2b(repr(key).encode(), digest_size=16).digest()


def kv(digest: bytes, index: int) -> bytes:
    """The true KV of block `index` of a prompt."""
    return random.Random(digest + bytes([index])).randbytes(BLOCK_BYTES)


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def first_token(key: RequestKey) -> TokenEvent:
    """Token 1 as a prefill node reports it."""
    return TokenEvent(*key, index=0, token_ids=(42,), logprobs=(), finish_reason="", num_cached_tokens=0)


@dataclass(slots=True)
class PrefillPool:
    """A prefill node's pool: takes the notices of a sending side."""

    blocks: Blocks
    pool: BlockPool = field(init=False)
    tables: dict[RequestKey, list[int]] = field(default_factory=dict)
    refusals: list[tuple[RequestKey, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(len(self.blocks))
        self.blocks[:] = FREE_BYTE

    def start(self, key: RequestKey, num_tokens: int) -> None:
        """Allocate blocks for a prompt."""
        self.tables[key] = self.pool.allocate(num_blocks_of(num_tokens))

    def compute(self, key: RequestKey, num_tokens: int) -> None:
        """Write the KV of the first `num_tokens` tokens."""
        for index in range(num_blocks_of(num_tokens)):
            self.blocks[self.tables[key][index]] = np.frombuffer(kv(digest_of(key), index), dtype=np.uint8)

    def put(self, notice: SendingNotice, /) -> None:
        if isinstance(notice, Rejected):
            self.refusals.append((notice.key, notice.reason))
        self._free(notice.key)

    def _free(self, key: RequestKey) -> None:
        table = self.tables.pop(key, None)
        if table is not None:
            # freed memory is overwritten at once, so that a late read is detected
            self.blocks[table] = FREE_BYTE
            self.pool.release(table)


@dataclass(slots=True)
class DecodePool:
    """A decode node's pool: takes the notices of a receiving side. Every notice is recorded."""

    blocks: Blocks
    pool: BlockPool = field(init=False)
    held: dict[RequestKey, list[int]] = field(default_factory=dict)
    waiting: dict[RequestKey, ReservedBlocks] = field(default_factory=dict)
    delivered_kv: dict[RequestKey, list[bytes]] = field(default_factory=dict)
    figures: dict[RequestKey, HandoffFigures] = field(default_factory=dict)
    delivered_first: dict[RequestKey, TokenEvent] = field(default_factory=dict)
    failures: list[tuple[RequestKey, str]] = field(default_factory=list)
    released_keys: list[RequestKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(len(self.blocks))
        self.blocks[:] = FREE_BYTE

    def reserve(self, key: RequestKey, num_tokens: int, num_cached_tokens: int) -> ReservedBlocks:
        """Reserve blocks for what is not cached. Raises `NoFreeBlocks`."""
        block_ids = self.pool.allocate(num_blocks_of(num_tokens) - num_cached_tokens // BLOCK_SIZE)
        self.held[key] = block_ids
        generations = tuple(self.pool.generation(block_id) for block_id in block_ids)
        incoming = ReservedBlocks(key, num_tokens, num_cached_tokens, digest_of(key), tuple(block_ids), generations)
        self.waiting[key] = incoming
        return incoming

    def put(self, notice: ReceivingNotice, /) -> None:
        if isinstance(notice, Delivered):
            (first,) = notice.firsts
            self.delivered(notice.key, first, notice.figures)
        elif isinstance(notice, Failed):
            self.failed(notice.key, notice.reason)
        else:
            self.released(notice.key)

    def delivered(self, key: RequestKey, first: TokenEvent, figures: HandoffFigures) -> None:
        incoming = self.waiting[key]
        self.delivered_kv[key] = [self.blocks[block_id].tobytes() for block_id in incoming.block_ids]
        self.delivered_first[key] = first
        self.figures[key] = figures
        self._free(key)

    def failed(self, key: RequestKey, reason: str) -> None:
        if reason:
            self.failures.append((key, reason))

    def released(self, key: RequestKey) -> None:
        assert key not in self.delivered_kv, "a handoff ends once"
        self.released_keys.append(key)
        self._free(key)

    def failures_of(self, key: RequestKey) -> list[str]:
        """The reasons for which this handoff failed; more than one is an error."""
        return [reason for failed, reason in self.failures if failed == key]

    def has_exactly(self, key: RequestKey) -> bool:
        """Whether the delivered bytes are the prompt's KV."""
        incoming = self.waiting[key]
        first = incoming.num_cached_tokens // BLOCK_SIZE
        true_kv = [kv(digest_of(key), first + index) for index in range(len(incoming.block_ids))]
        return self.delivered_kv[key] == true_kv

    def _free(self, key: RequestKey) -> None:
        block_ids = self.held.pop(key, None)
        if block_ids is not None:
            self.blocks[block_ids] = FREE_BYTE
            self.pool.release(block_ids)
