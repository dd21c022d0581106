"""One rank, in this process: every call leaves things as they are."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.executor.base import StreamShape
from baton.engine.model_shard import Basis
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.runner.forward import ForwardPass
from baton.engine.runner.kv_memory import KvMemory
from baton.engine.runner.model_runner import RunnerArguments
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.errors import InvalidSetting


class UniExecutor:
    """The executor of an engine with one rank, which is in this process."""

    shard = WHOLE
    collectives = None

    def loaded(self) -> None:
        """Nothing to wait for: there are no other ranks."""

    def fewest_blocks(self, measure: Callable[[], int]) -> int:
        """The blocks that this rank measures: there are no others."""
        return measure()

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        """Nobody else attends to the pool."""

    def leading_runner(
        self, arguments: RunnerArguments, run: ForwardPass | None, num_layers_before: int, costs: StepCosts
    ) -> None:
        """None: there is nobody to lead."""

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """Nothing: there are no other ranks."""
        return {}

    def with_other_ranks(self, own: TieredPool) -> TieredPool:
        """`own`: there are no other ranks."""
        return own

    def ready(self) -> None:
        """Nothing to tell: there are no other ranks."""

    def watched(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """`each_round` itself: there are no other ranks to watch."""
        return each_round

    def close(self) -> None:
        """Nothing to end: there are no other ranks."""


def open_uni(basis: Basis, num_threads: int) -> UniExecutor:
    """The executor of one rank. Raises `InvalidSetting` for settings of several ranks."""
    if basis.settings.num_ranks > 1:
        raise InvalidSetting(f"{basis.settings.num_ranks} ranks: this program computes with one")
    return UniExecutor()
