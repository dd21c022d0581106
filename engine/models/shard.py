"""A shard: the share of a model that one of several ranks has (tensor parallelism). Imports no torch.

Owns the division only: what is divided, rows of a weight or columns, is the part's knowledge. Ranks have equal and
neighbouring shares, but for the vocabulary, and together they have everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.errors import InvalidSetting, ModelLoadError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. The default is the whole model."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InvalidSetting(f"there is no rank {self.rank} of {self.size}")

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
        first = self.rank * count // self.size
        return range(first, first + 1)


WHOLE = Shard()


def scaled(share: range, unit: int) -> range:
    """The rows of `share` when each of its items is `unit` rows: those of a head, for example."""
    return range(share.start * unit, share.stop * unit)
