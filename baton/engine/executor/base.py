"""The contract between whoever builds and runs an engine and its ranks.

Owns nothing but the contract. `uni`: one rank, in this process, and nothing between it and the engine. `mp`: this
process is the driver and rank 0, the others are processes that it starts.

The order of calls: construct, build this rank's share of the model, `loaded`, `fewest_blocks` where that is measured,
`share_memory`, prepare to compute, `ready`; then steps, `guarded` rounds between them, and `close`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from baton.engine.executor.messages import Order
from baton.engine.executor.passages import Incoming, StreamShape
from baton.engine.models.collectives import Collectives
from baton.engine.models.shard import Shard
from baton.engine.runner.kv_memory import KvMemory
from baton.wire.errors import BatonError


class Leader(Protocol):
    """Tells all ranks but this one what to do."""

    def tell_ahead(self, order: Order) -> None:
        """Send an order to every rank of the stages before this one. Raises `DeviceFailed`."""
        ...

    def tell(self, order: Order) -> None:
        """Send an order to every other rank of this stage. Raises `DeviceFailed`."""
        ...

    def within(self, limit_s: float) -> AbstractContextManager[None]:
        """What is done with the ranks meanwhile takes longer than `limit_s` only if one of them stands still: all of
        them are ended then, so that it fails. Raises `DeviceFailed` at its end when one has ended."""
        ...

    def reason_of(self, error: Exception) -> BatonError:
        """What ended the ranks, after a call with them has failed."""
        ...


class Executor(Protocol):
    """The ranks of one engine.

    `shard`: what this process has of the model. `collectives`: by which its parts come together with those of the other
    ranks; `leader`: by which the runner has them compute its steps. Both are None when there are no others.
    """

    @property
    def shard(self) -> Shard:
        """See the class."""
        ...

    @property
    def collectives(self) -> Collectives | None:
        """See the class."""
        ...

    @property
    def leader(self) -> Leader | None:
        """See the class."""
        ...

    def loaded(self) -> None:
        """This rank has loaded its share: wait for the others. Raises `DeviceFailed`."""
        ...

    def fewest_blocks(self, num_blocks: int) -> int:
        """For how many blocks every rank's device has room; `num_blocks` is what this one has found. All of them
        measure at the same time. Raises `DeviceFailed`."""
        ...

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> Incoming | None:
        """Let every rank attend over this memory, or over as much of its own, and hand on to the next stage what has
        this shape, where there are stages; they are preparing when it returns. What this rank receives from the stage
        before; None: it is in the first. Raises `DeviceFailed`."""
        ...

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """After `share_memory`, where ranks have pools of their own: for each other rank a socket by which it is told
        what to receive of other nodes' KV, and one by which it is told what to send. The caller closes them."""
        ...

    def ready(self) -> None:
        """This rank is prepared: wait for the others. Raises `DeviceFailed`."""
        ...

    def guarded(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """`each_round`, which then also raises `DeviceFailed` as soon as a rank has ended. For a process that does
        nothing else: it is ended when it hangs in a call with a rank that is gone."""
        ...

    def close(self) -> None:
        """End all ranks but this one."""
        ...
