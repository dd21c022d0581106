"""Opens the executor of the settings `--tensor-parallel-size`, `--pipeline-parallel-size` and
`--distributed-executor-backend`.

Owns the names, and the refusals that need no process: what cannot be divided, or does not work with several ranks.
"""

from __future__ import annotations

from baton.device.base import Device
from baton.device.choose import require_one_for_each
from baton.engine.executor.base import Executor
from baton.engine.executor.uni import UniExecutor
from baton.engine.model_shard import Basis, checkpoint_fingerprint
from baton.engine.models.config import ModelConfig
from baton.engine.models.division import require_divisible
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.settings import SHARED, EngineSettings
from baton.ranks.executor.starting import LocalRanks, RankStarter
from baton.wire.errors import InvalidSetting, ModelLoadError

AUTO, UNI, MP = "auto", "uni", "mp"


def open_executor(basis: Basis, num_threads: int, starter: RankStarter | None = None) -> Executor:
    """The executor that the settings ask for. `starter` starts all ranks but the first; None: as processes of this
    machine. Raises `InvalidSetting`, and `DeviceFailed` when they do not come up."""
    settings = basis.settings
    _require_machines(settings)
    if settings.num_ranks == 1:
        return UniExecutor()
    _require_possible(settings, basis.config, basis.device)
    from baton.ranks.executor.mp import MpExecutor

    return MpExecutor(settings, basis.device, num_threads, starter or LocalRanks(), checkpoint_fingerprint(basis))


def _require_machines(settings: EngineSettings) -> None:
    count = settings.rank_machines
    if settings.num_ranks % count:
        raise InvalidSetting(f"--rank-machines {count}: {settings.num_ranks} ranks cannot be spread equally over them")
    if count > 1 and settings.rank_pools == SHARED:
        raise InvalidSetting(f"--rank-pools shared: the ranks are on {count} machines, and have no memory in common")


def _require_possible(settings: EngineSettings, config: ModelConfig | ModellingConfig, device: Device) -> None:
    stages = settings.pipeline_parallel_size
    flag = f"--tensor-parallel-size {settings.tensor_parallel_size}"
    if stages > 1:
        flag = f"--pipeline-parallel-size {stages}" + (f" with {flag}" if settings.tensor_parallel_size > 1 else "")
    if settings.distributed_executor_backend == UNI:
        raise InvalidSetting(f"{flag}: --distributed-executor-backend uni is one process, and so one rank; use mp")
    if device.torch_device.type == "cuda":
        require_one_for_each(device.torch_device, settings.num_ranks_here)
    try:
        require_divisible(config, settings.tensor_parallel_size, stages)
    except ModelLoadError as error:
        raise InvalidSetting(f"{flag}: {error}") from None
