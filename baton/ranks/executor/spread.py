"""On which machines the ranks of a node are, and what follows from it: where a rank listens for others, and which
passages lead to memory that cannot be shared: another machine's, or a device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.models.shard import Shard

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that ranks are on.

    `number`: 0 for the driver's; `host`: the address at which its ranks listen for those of other machines. `model` and
    `num_threads`: its path of the checkpoint and the threads of each of its ranks, where these are not the driver's;
    else None and 0. `trusts_remote_code`: whether its ranks may run code that comes with the checkpoint.
    """

    number: int = 0
    host: str = LOOPBACK
    model: str | None = None
    num_threads: int = 0
    trusts_remote_code: bool = True


@dataclass(frozen=True, slots=True)
class Spread:
    """`machines`: of each rank, by its number; `shards`: likewise. `on_devices`: what ranks compute is in memory of
    devices."""

    machines: Sequence[Machine]
    shards: Sequence[Shard]
    on_devices: bool = False

    def stage_host(self, number: int) -> str:
        """The address at which a rank listens for the others of its stage: loopback when all of them are on one
        machine."""
        stage = self.shards[number].stage
        of_stage = {
            machine.number for machine, shard in zip(self.machines, self.shards, strict=True) if shard.stage == stage
        }
        return LOOPBACK if len(of_stage) == 1 else self.machines[number].host

    def is_before_afar(self, number: int) -> bool:
        """Whether the passage from the stage before comes from memory that cannot be shared. Between two ranks of a
        machine that is not the driver's it is taken as one that does: the driver cannot share memory with them."""
        shard = self.shards[number]
        return not shard.is_first_stage and self._is_afar(number, shard.stage - 1)

    def is_next_afar(self, number: int) -> bool:
        """Whether the passage to the next stage leads to memory that cannot be shared. See `is_before_afar`."""
        shard = self.shards[number]
        return not shard.is_last_stage and self._is_afar(number, shard.stage + 1)

    def _is_afar(self, number: int, stage: int) -> bool:
        if self.on_devices:
            return True
        own = self.shards[number]
        other = self.shards.index(Shard(own.rank, own.size, stage, own.num_stages))
        return self.machines[number].number > 0 or self.machines[other].number > 0
