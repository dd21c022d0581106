"""A shard: the share of a model that one of several ranks has. Imports no torch.

Owns the division only: what is divided, rows of a weight or columns, is the part's knowledge. Within a stage, ranks
have equal and neighbouring shares, but for the vocabulary (tensor parallelism). Stages have neighbouring layers
(pipeline parallelism): the first one has the embedding, too, and the last one norm and head. Together ranks have
everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.kv_shard import KvDivision, KvShard


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` in stage `stage` of `num_stages`. The default is the whole model."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InvalidSetting(f"there is no rank {self.rank} of {self.size}")
        if not 0 <= self.stage < self.num_stages:
            raise InvalidSetting(f"there is no stage {self.stage} of {self.num_stages}")

    @classmethod
    def of_process(cls, number: int, size: int, num_stages: int) -> Shard:
        """The shard of process `number` of a node, with `size` ranks in each of its stages.

        The driver, which is number 0, is in the last stage, where logits are. Then come the others of its stage, those
        of the first stage, the second, and so on.
        """
        group, rank = divmod(number, size)
        return cls(rank, size, (group - 1) % num_stages, num_stages)

    @property
    def is_whole(self) -> bool:
        """Whether there are no other ranks."""
        return self.size == self.num_stages == 1

    @property
    def kv(self) -> KvShard:
        """The part of a block that this rank stores."""
        return KvShard(self.rank, self.stage, KvDivision(self.size, self.num_stages))

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage begins with the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether norm and head come behind its layers."""
        return self.stage == self.num_stages - 1

    def layers_of(self, num_layers: int) -> range:
        """The layers of this stage, of `num_layers`. The first stages have one more where they do not divide. Raises
        `ModelLoadError` when there are fewer layers than stages."""
        if num_layers < self.num_stages:
            raise ModelLoadError(f"{num_layers} layers cannot be divided among {self.num_stages} stages")
        return self.kv.layers_of(num_layers)

    def share_of(self, count: int, what: str) -> range:
        """The share of `count` heads, rows or columns. Raises `ModelLoadError`, naming `what`, if that cannot be."""
        if count % self.size:
            raise ModelLoadError(f"{count} {what} cannot be divided among {self.size} ranks")
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def part_of(self, count: int) -> range:
        """The part of `count` rows, which need not divide: equal parts, the last ones perhaps shorter."""
        width = -(-count // self.size)
        return range(min(self.rank * width, count), min((self.rank + 1) * width, count))

    def kv_heads_of(self, count: int) -> range:
        """The share of `count` key and value heads. With more ranks than heads, neighbouring ranks have the same one.

        Raises `ModelLoadError` where heads and ranks do not divide.
        """
        if count >= self.size or self.size % count:
            return self.share_of(count, "key and value heads")
        return self.kv.heads_of(count)


WHOLE = Shard()


def scaled(share: range, unit: int) -> range:
    """The rows of `share` when each of its items is `unit` rows: those of a head, for example."""
    return range(share.start * unit, share.stop * unit)
