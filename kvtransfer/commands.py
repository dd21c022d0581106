"""The commands and notices between the engine's thread and the transfer thread of a node.

Commands go to the transfer thread (`TransferThread.post`), where `SendingSide.do` or `ReceivingSide.do` carries them
out in order. Notices come back through a mailbox. Both are immutable values, so the threads share no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from baton.kvtransfer.layers import LayerProgress
from baton.wire.messages.legs import PrefillPeer
from baton.wire.messages.output import HandoffFigures, TokenEvent
from baton.wire.request_key import RequestKey

NoticeT_contra = TypeVar("NoticeT_contra", contravariant=True)


class NoticeSink(Protocol[NoticeT_contra]):
    """Accepts notices on the transfer thread; a `Mailbox` is one."""

    def put(self, item: NoticeT_contra, /) -> None:
        """Accept one notice."""
        ...


@dataclass(frozen=True, slots=True)
class Released:
    """A handoff is over at this node: its blocks are neither read nor written any more and may be released."""

    key: RequestKey


# commands and notices of a prefill node


@dataclass(frozen=True, slots=True)
class BeginHandoff:
    """A prompt is about to be computed for a decode node. A key that is known already is rejected."""

    key: RequestKey
    decode_node_id: str
    decode_epoch: int
    num_tokens: int
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class PushComputed:
    """The blocks of `table` hold the KV of the first `num_computed_tokens` tokens: push the blocks that became
    complete.
    """

    key: RequestKey
    table: Sequence[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PushLayers:
    """The step that is about to run computes the rest of the prompt. Push its blocks layer by layer as soon as the
    receiver has granted them, if its transport makes that cheap.
    """

    key: RequestKey
    table: Sequence[int]
    layers: LayerProgress


@dataclass(frozen=True, slots=True)
class FinishHandoff:
    """Push the rest of a handoff and commit it. The prompt was computed at `computed_s` (monotonic), and `firsts`,
    token 1 of each choice, are on their way to the client. `num_drafted`: see `Commit`."""

    key: RequestKey
    table: Sequence[int]
    firsts: tuple[TokenEvent, ...]
    computed_s: float
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class CancelSending:
    """Begin no further push of this handoff, and release its blocks once no push is in flight. Harmless when the
    handoff is over.

    `request_ended`: nothing failed; token 1 ended the request.
    """

    key: RequestKey
    reason: str
    request_ended: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """This handoff was refused before anything of it began."""

    key: RequestKey
    reason: str


SendingCommand: TypeAlias = BeginHandoff | PushComputed | PushLayers | FinishHandoff | CancelSending
SendingNotice: TypeAlias = Released | Rejected
"""Every handoff that begins ends with `Released`. The engine then stops computing the prompt, if it still does."""


# commands and notices of a decode node


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """The blocks that a grant offers: they are reserved for the tokens after the first `num_cached_tokens`. `forks`:
    the other choices of the prompt. `has_firsts`: the sender samples a first token of each choice, or has done so.
    """

    key: RequestKey
    num_tokens: int
    num_cached_tokens: int
    prompt_digest: bytes
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    forks: tuple[RequestKey, ...] = ()
    has_firsts: bool = True


@dataclass(frozen=True, slots=True)
class WaitForRoom:
    """There are no blocks for this handoff yet: renew the sender's lease until `GrantBlocks` or `CancelReceiving`.
    The handoff fails if the peer cannot be dialled.
    """

    key: RequestKey
    peer: PrefillPeer


@dataclass(frozen=True, slots=True)
class GrantBlocks:
    """Allow `peer` to write these blocks. The handoff fails if the peer cannot be dialled."""

    blocks: ReservedBlocks
    peer: PrefillPeer


@dataclass(frozen=True, slots=True)
class CancelReceiving:
    """This handoff is no longer wanted. `Released` says when its blocks may be released."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Verified:
    """Of a handoff without first tokens: the first `num_blocks` of its blocks hold verified KV, and nobody writes into
    them any more."""

    key: RequestKey
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The blocks hold verified KV of the prompt since `ready_us`. `firsts` are the tokens that the sender sampled, one
    of each choice in their order. `num_drafted`: see `Commit`."""

    key: RequestKey
    firsts: tuple[TokenEvent, ...]
    figures: HandoffFigures
    ready_us: int
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A handoff will not be delivered. Its blocks, if it had any, may still be written by the peer. `reason` is "" when
    nothing failed and the first token ended the request.
    """

    key: RequestKey
    reason: str


ReceivingCommand: TypeAlias = WaitForRoom | GrantBlocks | CancelReceiving
ReceivingNotice: TypeAlias = Verified | Delivered | Failed | Released
"""Every granted handoff ends with exactly one of `Delivered` and `Released`. One that still waits for room ends with
neither. `Verified` may come before it, with more blocks each time.
"""
