"""One rank, in this process: every call leaves things as they are."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from baton.engine.executor.base import StreamShape
from baton.engine.model_shard import Basis
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.runner.forward import ForwardPass
from baton.engine.runner.kv_memory import KvMemory
from baton.engine.runner.model_runner import RunnerArguments
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.errors import InvalidSetting


class UniExecutor:
    """See `Executor`."""

    shard = WHOLE
    collectives = None

    def loaded(self) -> None:
        """See `Executor.loaded`: there are no others."""

    def fewest_blocks(self, measure: Callable[[], int]) -> int:
        """See `Executor.fewest_blocks`."""
        return measure()

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        """See `Executor.share_memory`: nobody else attends."""

    def leading_runner(
        self, arguments: RunnerArguments, run: ForwardPass | None, num_layers_before: int, costs: StepCosts
    ) -> None:
        """See `Executor.leading_runner`: there is nobody to lead."""

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """See `Executor.take_transfer_ends`: there are no others."""
        return {}

    def ready(self) -> None:
        """See `Executor.ready`."""

    def watched(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """See `Executor.watched`."""
        return each_round

    def close(self) -> None:
        """See `Executor.close`."""


def open_uni(basis: Basis, num_threads: int) -> UniExecutor:
    """See `OpenExecutor`. Raises `InvalidSetting` for settings of several ranks."""
    if basis.settings.num_ranks > 1:
        raise InvalidSetting(f"{basis.settings.num_ranks} ranks: this program computes with one")
    return UniExecutor()
