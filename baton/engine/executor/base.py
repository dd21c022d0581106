"""The contract between whoever builds and runs an engine and its ranks.

Owns nothing but the contract. `uni`: one rank, in this process, and nothing between it and the engine. Several are no
knowledge of the engine: whoever builds it says what opens them (`baton.ranks.executor`).

The order of calls: construct, build this rank's share of the model, `loaded`, `fewest_blocks` where that is measured,
`share_memory`, `leading_runner`, prepare to compute, `ready`; then steps, `watched` rounds between them, and `close`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.cache.offload import PoolTiers
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.models.collectives import Collectives
from baton.engine.models.shard import Shard
from baton.engine.runner.forward import ForwardPass
from baton.engine.runner.kv_memory import ByteArray, KvMemory
from baton.engine.runner.model_runner import ModelRunner, RunnerArguments
from baton.engine.scheduler.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The residual stream of the largest step, [max_tokens, hidden_size], in a model of `num_stages` stages. `device`:
    whose own memory it is in; None: the host's."""

    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    num_stages: int
    device: torch.device | None = None

    @property
    def num_bytes(self) -> int:
        """Of all slots of a passage."""
        return self.num_stages * self.max_tokens * self.hidden_size * self.dtype.itemsize

    def slots(self, memory: ByteArray) -> Tensor:
        """[num_stages, max_tokens, hidden_size] in the memory of a passage."""
        return torch.from_numpy(memory).view(self.dtype).view(self.num_stages, self.max_tokens, self.hidden_size)


class Executor(Protocol):
    """The ranks of one engine.

    `shard`: what this process has of the model. `collectives`: by which its parts come together with those of the other
    ranks; None when there are no others.
    """

    @property
    def shard(self) -> Shard:
        """What of the model the rank in this process has."""
        ...

    @property
    def collectives(self) -> Collectives | None:
        """How this rank adds up with the others; None for the only one."""
        ...

    def loaded(self) -> None:
        """This rank has loaded its share: wait for the others. Raises `DeviceFailed`."""
        ...

    def fewest_blocks(self, measure: Callable[[], int]) -> int:
        """For how many blocks every rank's device has room; `measure` finds that out for this one. All of them measure
        at the same time. Raises `DeviceFailed`."""
        ...

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        """Let every rank attend over this memory, or over as much of its own, and hand on to the next stage what has
        this shape, where there are stages; they are preparing when it returns. Raises `DeviceFailed`."""
        ...

    def leading_runner(
        self, arguments: RunnerArguments, run: ForwardPass | None, num_layers_before: int, costs: StepCosts
    ) -> ModelRunner | None:
        """After `share_memory`: the runner by which all ranks compute a step; None: this one has nobody to lead. `run`:
        see `ModelRunner`; `num_layers_before`: of the stages before this one; `costs`: of this engine's steps."""
        ...

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """After `share_memory`, where ranks have pools of their own: for each other rank a socket by which it is told
        what to receive of other nodes' KV, and one by which it is told what to send. The caller closes them."""
        ...

    def with_other_ranks(self, own: TieredPool) -> PoolTiers:
        """After `ready`: the pool and tiers of this rank, together with those of every other rank that has its own."""
        ...

    def ready(self) -> None:
        """This rank is prepared: wait for the others. Raises `DeviceFailed`."""
        ...

    def watched(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """`each_round`, which then also raises `DeviceFailed` as soon as a rank has ended. For a process that does
        nothing else: it is ended when it hangs in a call with a rank that is gone."""
        ...

    def close(self) -> None:
        """End all ranks but this one."""
        ...
