"""States that layers keep in the blocks of a sequence: the last inputs of convolutions, and what recurrences carry on.

Owns where a state lies and when it is read and written. Knows no model and no scheduling.

A block has one state a layer, that of its sequence behind the last token which was stored in the block. So a step reads
it from the block of the token before its first one, and writes it into each block that it stores tokens in. A full
block holds the state at its end, for ever: whoever finds the block in the prefix cache, or receives it, goes on from
there. Of a block that is not full there is one state only: it cannot be shared by sequences that go on differently.

Drafts are computed one after another, as steps of a token each would compute them. The state behind each lies in a
block of its own, that no request has. Behind the step it is known which drafts were right: of each block that they have
reached, the last state that is right goes there, see `settle`. No other step sees a state behind a draft.

Letters: T tokens of the step, N sequences, B blocks of the pool, P pieces of the step, E elements of a row, D sequences
with drafts, M blocks that drafts reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Staging
from baton.engine.attention.base import LayerStored, PlannedShare, StatePiece
from baton.engine.attention.paged_kv import PagedKv
from baton.wire.layout import STATE


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A step as it was staged. before: [N], the block with the state before a sequence's first token, and is_first:
    [N], 1 where there is none; owner, offset: [T], each token's sequence and its place among the step's tokens of that;
    kept: [P], the tokens behind which a state is stored, and blocks: [P], where."""

    before: Tensor
    is_first: Tensor
    owner: Tensor
    offset: Tensor
    kept: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The blocks that the drafts of a step reach, each with its drafts, all [M]: which of the D sequences has them, how
    many drafts of it come before, and how many there are. `first`: which of all drafts is the first of them; `states`:
    the blocks with the state behind each of all drafts."""

    blocks: Tensor
    owner: Tensor
    num_before: Tensor
    count: Tensor
    first: Tensor
    states: Tensor


class BlockStates:
    """The states of all layers that have some."""

    def __init__(self, pool: PagedKv) -> None:
        kinds = enumerate(kv.kind for kv in pool.layout.layers)
        self._states = {layer: pool.state(layer) for layer, kind in kinds if kind == STATE}
        self._block_size = pool.layout.block_size
        self._rank = pool.shard.rank
        self._draft_blocks = pool.draft_blocks
        self._drafted: _Drafted | None = None
        self._inputs: _Inputs | None = None
        self._windows: dict[int, Tensor] = {}
        self.pieces: Sequence[StatePiece] = ()
        """The tokens of the planned step, cut where blocks end."""

    def plan(self, shares: Sequence[PlannedShare], staging: Staging) -> None:
        """Prepare for one step over `shares`: see `AttentionBackend.plan`."""
        if not self._states:
            return
        counts = np.array([share.num_tokens for share in shares], dtype=np.int64)
        begins = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(shares)), counts)
        behind_drafts = iter(self._draft_blocks)
        self.pieces = [
            piece
            for begin, share in zip(begins, shares, strict=True)
            for piece in self._cut(int(begin), share, behind_drafts)
        ]
        before = [share.block_table[max(share.start - 1, 0) // self._block_size] for share in shares]
        self._inputs = _Inputs(
            before=staging.put(np.array(before, dtype=np.int64)),
            is_first=staging.put(np.array([share.start == 0 for share in shares], dtype=np.int64)),
            owner=staging.put(owner),
            offset=staging.put(np.arange(counts.sum()) - begins[owner]),
            kept=staging.put(np.array([piece.last - 1 for piece in self.pieces], dtype=np.int64)),
            blocks=staging.put(np.array([piece.block for piece in self.pieces], dtype=np.int64)),
        )
        self._windows.clear()
        drafting = [share for share in shares if share.num_drafts]
        self._drafted = self._put_drafted(drafting, staging) if drafting else None

    def settle(self, num_accepted: Tensor) -> None:
        """Have the state behind the last draft that was right in each block that drafts have reached: of each of the D
        sequences the first `num_accepted` [D] were. A block that has none of these keeps the state that it has."""
        drafted = self._drafted
        if drafted is None:
            return
        reached = num_accepted[drafted.owner] - drafted.num_before
        reached = torch.minimum(reached.clamp(min=0), drafted.count)
        source = drafted.states[(drafted.first + reached - 1).clamp(min=0)]
        source = torch.where(reached > 0, source, drafted.blocks)
        for states in self._states.values():
            states.index_copy_(0, drafted.blocks, states.index_select(0, source))

    def recent(self, layer: int, x: Tensor, num_before: int) -> Tensor:
        """Windows of inputs, [T, 1 + num_before, E]. Also stores the last inputs of every block of the step."""
        inputs, (_, width) = self._inputs, x.shape
        # of each input, as of all that is carried, ranks have neighbouring shares
        states = self._states[layer][:, :num_before, self._rank * width : (self._rank + 1) * width]
        assert inputs is not None  # planned
        if num_before not in self._windows:
            self._windows[num_before] = _windows(inputs, num_before)
        windows = self._windows[num_before]
        before = states.index_select(0, inputs.before)
        # by a choice and not by a product: what an unused block holds may be NaN
        before.masked_fill_(inputs.is_first.bool()[:, None, None], 0.0)
        rows = torch.cat((before.flatten(0, 1), x))
        states.index_copy_(0, inputs.blocks, rows[windows.index_select(0, inputs.kept)[:, 1:]])
        return rows[windows]

    def carried(self, layer: int, num_before: int, num_elements: int) -> Tensor:
        """A view [B, num_elements] of the states, behind the inputs of convolutions: this rank's elements only."""
        behind = self._states[layer][:, num_before:].flatten(1)
        return behind[:, self._rank * num_elements : (self._rank + 1) * num_elements]

    def _cut(self, begin: int, share: PlannedShare, behind_drafts: Iterator[int]) -> Iterator[StatePiece]:
        """The pieces of a share whose first token is the token `begin` of the step. The state behind each of its drafts
        goes into the next of `behind_drafts`."""
        size, at, level = self._block_size, share.start, 0
        before = share.block_table[(at - 1) // size] if at else None
        first, first_draft = begin - share.start, share.context_len - share.num_drafts
        while at < share.context_len:
            is_draft = at >= first_draft
            end = at + 1 if is_draft else min((at // size + 1) * size, first_draft)
            block = next(behind_drafts) if is_draft else share.block_table[at // size]
            yield StatePiece(first + at, first + end, before, block, level)
            before, at, level = block, end, level + 1

    def _put_drafted(self, drafting: Sequence[PlannedShare], staging: Staging) -> _Drafted:
        size, values, num_drafts = self._block_size, list[tuple[int, ...]](), 0
        for owner, share in enumerate(drafting):
            begin = share.context_len - share.num_drafts
            for number in range(begin // size, -(-share.context_len // size)):
                first = max(begin, number * size)
                count = min(share.context_len, (number + 1) * size) - first
                block = share.block_table[number]
                values.append((block, owner, first - begin, count, num_drafts + first - begin))
            num_drafts += share.num_drafts
        columns = (*zip(*values, strict=True), self._draft_blocks[:num_drafts])
        return _Drafted(*[staging.put(np.array(column, dtype=np.int64)) for column in columns])


class AttendsOverStates:
    """The part of an attention backend that is `KeepsStates`: it hands on to the `BlockStates` of its pool."""

    def __init__(self, pool: PagedKv) -> None:
        self._states = BlockStates(pool)
        self._layer_stored: LayerStored | None = None

    def recent(self, layer: int, x: Tensor, num_before: int) -> Tensor:
        """The windows of inputs [T, 1 + num_before, E] that states and this step have."""
        return self._states.recent(layer, x, num_before)

    def carried(self, layer: int, num_before: int, num_elements: int) -> Tensor:
        """A view [B, num_elements] of this rank's states behind `num_before` inputs."""
        return self._states.carried(layer, num_before, num_elements)

    @property
    def pieces(self) -> Sequence[StatePiece]:
        """The step's tokens, cut where blocks end, as the last `plan` found them."""
        return self._states.pieces

    def stored(self) -> None:
        """Tell the caller of the last `plan`, if it wants to know, that a layer is stored."""
        if self._layer_stored is not None:
            self._layer_stored()

    def settle(self, num_accepted: Tensor) -> None:
        """Have the states behind the drafts that were right in the blocks of their sequences."""
        self._states.settle(num_accepted)


def _windows(inputs: _Inputs, num_before: int) -> Tensor:
    """[T, 1 + num_before]: which rows each token sees, of all inputs before the step, one sequence after another, and
    all of its own behind them."""
    back = torch.arange(-num_before, 1, device=inputs.owner.device)
    offsets = inputs.offset[:, None] + back
    tokens = torch.arange(len(inputs.offset), device=back.device)[:, None] + back
    earlier = (inputs.owner[:, None] + 1) * num_before + offsets
    return torch.where(offsets >= 0, len(inputs.before) * num_before + tokens, earlier)
