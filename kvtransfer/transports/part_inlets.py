"""Which part of a block comes to a rank from which rank of a sender: see `baton.kvtransfer.parts`.

Bounds: `_MAX_DIVISIONS` kinds of senders, each of at most `MAX_RANKS` ranks; others have nothing for this pool.
"""

from __future__ import annotations

from baton.kvtransfer.parts import part_runs
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.cut import sink_of
from baton.kvtransfer.transports.inlets import Inlet
from baton.wire.errors import InvalidSetting
from baton.wire.kv_shard import MAX_RANKS, WHOLE_BLOCK, KvDivision, KvShard
from baton.wire.layout import KvLayout

_MAX_DIVISIONS = 16


class RankInlets:
    """The inlets of one rank. `pool` holds `shard` of blocks of `layout`."""

    def __init__(self, pool: KvPool, layout: KvLayout, shard: KvShard) -> None:
        self._pool, self._layout, self._shard = pool, layout, shard
        self._by_division: dict[KvDivision, dict[KvShard, Inlet]] = {}

    def of(self, source: KvShard | None) -> Inlet | None:
        """The place of the bytes that `source` has of blocks, or None if none of them belong here. A `source` of None
        has whole blocks."""
        source = source or WHOLE_BLOCK
        inlets = self._by_division.get(source.division)
        if inlets is None:
            if not self._may_add(source.division):
                return None
            inlets = self._by_division[source.division] = self._made(source.division)
        return inlets.get(source)

    def _may_add(self, division: KvDivision) -> bool:
        num_ranks = division.num_ranks * division.num_stages
        return num_ranks <= MAX_RANKS and len(self._by_division) < _MAX_DIVISIONS

    def _made(self, division: KvDivision) -> dict[KvShard, Inlet]:
        try:
            runs = part_runs(self._layout, division, self._shard)
        except InvalidSetting:  # no model of this layout is divided so
            return {}
        sources = tuple(runs)
        return {source: Inlet(sink_of(self._pool, runs[source]), source, sources) for source in sources}
