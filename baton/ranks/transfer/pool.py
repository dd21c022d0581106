"""The pool of a node whose ranks have pools of their own, as the transfer layer sees it: blocks of the whole model.

Owns the checksums of such blocks: every rank adds up its words, and the driver makes one value of that, the same that
a pool of whole blocks has. Bytes are not read or written here: ranks move them (`receiver`, `senders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from baton.kvtransfer.integrity import DOT64, NONE
from baton.kvtransfer.pools.base import Checksums, NoChecksums, Parts, Pending
from baton.kvtransfer.pools.cut import WholeChecksums
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import AddUp, Totals
from baton.wire.kv_shard import KvShard
from baton.wire.layout import KvLayout

_MAX_BLOCKS = 8
_GLANCE_S = 0.001


class RanksPool:
    """The blocks of the whole model, of which each rank has its part. Only their checksums can be had here."""

    def __init__(self, lines: RankLines, layout: KvLayout) -> None:
        self.block_bytes = layout.block_bytes
        self._lines, self._layout = lines, layout

    def enter(self) -> None:
        """Make the calling thread the one that uses the driver's own part of the pool."""
        self._lines.enter()

    def checksums(self, kind: str) -> Checksums:
        """Checksums that are added up over all ranks. Raises `ValueError` for other kinds than `DOT64` and `NONE`."""
        if kind == NONE:
            return NoChecksums()
        if kind != DOT64:
            raise ValueError(f"ranks with pools of their own cannot compute {kind!r} together")
        return _RankChecksums(self._lines, self._layout)


class _RankChecksums:
    """Has every rank add up its words of blocks, and combines the sums."""

    max_blocks = _MAX_BLOCKS

    def __init__(self, lines: RankLines, layout: KvLayout) -> None:
        self._lines = lines
        self._whole = WholeChecksums(layout, lines.division)
        self._numbers = count()
        self._asked: dict[int, _Sums] = {}
        lines.hear(Totals, self._on_totals)

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """Ask all ranks for the sums of these blocks."""
        number = next(self._numbers)
        sums = self._asked[number] = _Sums(self._lines, self._whole, len(block_ids))
        self._lines.tell(AddUp(number, tuple(block_ids)))
        return sums

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        """Not here: the senders push no parts."""
        raise NotImplementedError

    def _on_totals(self, shard: KvShard, totals: Totals) -> None:
        sums = self._asked[totals.number]
        sums.totals[shard] = totals.totals
        if sums.is_complete:
            del self._asked[totals.number]


class _Sums:
    """Sums of blocks that the ranks are asked for."""

    def __init__(self, lines: RankLines, whole: WholeChecksums, num_blocks: int) -> None:
        self.totals: dict[KvShard, Sequence[int]] = {}
        self._lines, self._whole, self._num_blocks = lines, whole, num_blocks
        self._num_ranks = lines.division.num_ranks * lines.division.num_stages

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have added up."""
        return len(self.totals) == self._num_ranks

    def take(self) -> Sequence[int] | None:
        """A checksum for each block, or None while a rank has not answered. Waits a moment: the caller has nothing else
        to do, and would ask again at once."""
        self._lines.round()
        if not self.is_complete:
            self._lines.wait(_GLANCE_S)
            self._lines.round()
        return self._whole.values(self._num_blocks, self.totals) if self.is_complete else None
