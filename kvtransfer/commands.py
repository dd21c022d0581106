"""What the engine's thread and the transfer thread of a node say to each other.

Commands go to the thread (`TransferThread.post`) and are carried out in order by the side that lives there
(`SendingSide.do`, `ReceivingSide.do`). Notices come back through a mailbox. Both are values: neither thread touches
what belongs to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from kvtransfer.layers import LayerProgress
from wire.messages import HandoffFigures, PrefillPeer, TokenEvent
from wire.request_key import RequestKey

NoticeT_contra = TypeVar("NoticeT_contra", contravariant=True)


class NoticeSink(Protocol[NoticeT_contra]):
    """Takes notices on the transfer thread; a `Mailbox` is one."""

    def put(self, item: NoticeT_contra, /) -> None:
        """Take one."""
        ...


@dataclass(frozen=True, slots=True)
class Released:
    """Both ways of it: a handoff is over, nobody reads or writes its blocks any more, and they may be released."""

    key: RequestKey


# a prefill node


@dataclass(frozen=True, slots=True)
class BeginHandoff:
    """A prompt is about to be computed for that decode node. A key that is known already is rejected."""

    key: RequestKey
    decode_node_id: str
    decode_epoch: int
    num_tokens: int
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class PushComputed:
    """The KV of so many tokens is in the blocks of `table`: push what became complete."""

    key: RequestKey
    table: Sequence[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PushLayers:
    """The step that is about to run computes the rest of the prompt: push its blocks layer by layer, where the
    receiver's transport makes that cheap, as soon as it has granted them.
    """

    key: RequestKey
    table: Sequence[int]
    layers: LayerProgress


@dataclass(frozen=True, slots=True)
class FinishHandoff:
    """The prompt was computed at `computed_s` (monotonic) and token 1 is on its way to the client: push the rest and
    commit.
    """

    key: RequestKey
    table: Sequence[int]
    first: TokenEvent
    computed_s: float


@dataclass(frozen=True, slots=True)
class CancelSending:
    """No push begins any more, and the blocks are released once none is under way. Harmless when it is over.

    `request_ended`: nothing failed, token 1 ended the request.
    """

    key: RequestKey
    reason: str
    request_ended: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """This handoff cannot be; nothing of it was begun."""

    key: RequestKey
    reason: str


SendingCommand: TypeAlias = BeginHandoff | PushComputed | PushLayers | FinishHandoff | CancelSending
SendingNotice: TypeAlias = Released | Rejected
"""Every handoff that begins ends with `Released`: the engine stops computing it, if it still does."""


# a decode node


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """What a grant is made of: blocks reserved for the tokens after the first `num_cached_tokens`."""

    key: RequestKey
    num_tokens: int
    num_cached_tokens: int
    prompt_digest: bytes
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitForRoom:
    """There are no blocks for this handoff yet: keep the sender's lease alive until `GrantBlocks` or `CancelReceiving`.
    A peer that cannot be dialled fails it.
    """

    key: RequestKey
    peer: PrefillPeer


@dataclass(frozen=True, slots=True)
class GrantBlocks:
    """Allow `peer` to write these blocks. A peer that cannot be dialled fails the handoff."""

    blocks: ReservedBlocks
    peer: PrefillPeer


@dataclass(frozen=True, slots=True)
class CancelReceiving:
    """Nobody wants this handoff any more. Its blocks come back by `Released`."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Delivered:
    """The blocks hold verified KV of the prompt since `ready_us`; `first` is the token sampled by the sender."""

    key: RequestKey
    first: TokenEvent
    figures: HandoffFigures
    ready_us: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A handoff will not come. Its blocks, if it had any, may still be written. `reason` is "" when nothing failed: the
    first token ended the request.
    """

    key: RequestKey
    reason: str


ReceivingCommand: TypeAlias = WaitForRoom | GrantBlocks | CancelReceiving
ReceivingNotice: TypeAlias = Delivered | Failed | Released
"""Every granted handoff ends with exactly one of `Delivered` and `Released`, one that waits for room with neither."""
