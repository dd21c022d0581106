"""The size of a node's KV pool, in blocks.

Owns the whole rule; the first line that applies decides:

1. `--num-blocks`: this number.
2. `--kv-cache-memory-bytes`: as many as these bytes hold.
3. In host memory: what `--max-num-seqs` of the longest requests can use, within 1 GiB or one such request, whichever
   is more; and within the node's share. The share is `--cpu-memory-utilization` of the machine's memory, less the
   weights, and never more than that part of what is free.
4. On a GPU: what is left of the node's share of it. The share is `--gpu-memory-utilization` of the GPU's whole
   memory, as in other servers, so two nodes of one GPU take 0.45 each. What the node needs beside the pool comes out
   of the share: weights, the largest step, and what its process allocates outside torch, which are measured;
   attention's workspace and recorded graphs, which come after the pool and are computed; and a margin. Where less is
   free than that leaves, what is free decides. One block of it is the spare one of `KvMemory`. Ranks measure together,
   each on its GPU, and the one that has room for the fewest blocks decides (`Executor.fewest_blocks`).

Does not know the owners of blocks. Readings are plain numbers, so that the arithmetic can be tested without a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from baton.device.base import Device
from baton.device.host_memory import HostMemory
from baton.device.memory import MemoryReading, read_memory, reset_peak
from baton.engine.capacity import Capacity
from baton.engine.models.base import RunnableDecoder
from baton.engine.runner.limits import RunnerLimits, graph_sizes
from baton.engine.runner.profiling import profile, profile_shard
from baton.engine.runner.sampler import Sampler
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting
from baton.wire.kv_shard import KvDivision, own_layout
from baton.wire.layout import KvLayout

_FEWEST_BLOCKS = 2
_HOST_KV_BYTES = 2**30
_HOST_PROCESS_BYTES = 512 * 2**20
"""What a node's process takes beside weights and KV: Python, torch, and the tensors of a step."""
_BYTES_PER_GRAPH = 16 * 2**20
_MARGIN_BYTES = 64 * 2**20
"""Always left free, for fragmentation and for allocations by libraries at their first call."""
_MAX_OUTSIDE_BYTES = 2 * 2**30
"""More than a CUDA context and its libraries take: memory missing beyond that was taken by another process
meanwhile."""
_GIB = 2**30
_log = logging.getLogger(__name__)


class BlockSize(Protocol):
    """How large a block is, in all ranks together; a `KvLayout` says it, and `DividedBlocks` where ranks have pools of
    their own."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...


@dataclass(frozen=True, slots=True)
class DividedBlocks:
    """Sizes of blocks that lie divided over ranks: heads that several ranks have count for each of them."""

    layout: KvLayout
    num_ranks: int
    num_stages: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all ranks."""
        shards = KvDivision(self.num_ranks, self.num_stages).shards
        return sum(own_layout(self.layout, shard).block_bytes for shard in shards)


def chosen_num_blocks(settings: EngineSettings, layout: BlockSize) -> int | None:
    """The size of the pool if the settings fix it, otherwise None. Raises `InvalidSetting`."""
    if settings.num_blocks:
        if settings.num_blocks < _FEWEST_BLOCKS:
            raise InvalidSetting(f"--num-blocks must be at least {_FEWEST_BLOCKS}, got {settings.num_blocks}")
        return settings.num_blocks
    if settings.kv_cache_memory_bytes:
        num_blocks = settings.kv_cache_memory_bytes // layout.block_bytes
        if num_blocks < _FEWEST_BLOCKS:
            raise InvalidSetting(
                f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes} holds {num_blocks} blocks of "
                f"{layout.block_bytes} bytes: at least {_FEWEST_BLOCKS} are needed"
            )
        return num_blocks
    return None


def host_budget(settings: EngineSettings, memory: HostMemory, weights_bytes: int) -> int:
    """Bytes for a pool in host memory, not negative; `memory` was read when the weights had been loaded."""
    share = settings.cpu_memory_utilization
    return max(0, int(min(memory.total * share - weights_bytes - _HOST_PROCESS_BYTES, memory.free * share)))


def host_num_blocks(
    settings: EngineSettings,
    layout: BlockSize,
    capacity: Capacity,
    memory: HostMemory,
    weights_bytes: int,
    num_ranks: int = 1,
) -> int:
    """The size of a pool in host memory when the settings leave it open. `weights_bytes`: of all ranks.

    A `--max-model-len` that was asked for has to fit. The model's own limit does not: requests are shorter then.
    Raises `InvalidSetting` when it is too small.
    """
    usable = capacity.blocks_per_request * settings.max_num_seqs
    affordable = max(_HOST_KV_BYTES // layout.block_bytes, capacity.blocks_per_request)
    wanted = max(_FEWEST_BLOCKS, min(usable, affordable))
    weights_bytes += (num_ranks - 1) * _HOST_PROCESS_BYTES
    allowed = host_budget(settings, memory, weights_bytes) // layout.block_bytes
    fewest = capacity.blocks_per_request if settings.max_model_len else _FEWEST_BLOCKS
    if allowed < max(_FEWEST_BLOCKS, fewest):
        raise InvalidSetting(
            f"--cpu-memory-utilization {settings.cpu_memory_utilization:g} leaves "
            f"{allowed * layout.block_bytes / _GIB:.2f} GiB for KV beside {weights_bytes / _GIB:.2f} GiB of weights "
            f"({memory}); one request of --max-model-len needs "
            f"{capacity.blocks_per_request * layout.block_bytes / _GIB:.2f} GiB; lower --max-model-len, or raise "
            "--cpu-memory-utilization, or set --kv-cache-memory-bytes, which counts whatever the share is"
        )
    return min(wanted, allowed)


def require_room(layout: BlockSize, num_blocks: int, memory: HostMemory) -> None:
    """Raise `InvalidSetting` when the host has no memory for the pool: it would end this process, not refuse."""
    needed = num_blocks * layout.block_bytes
    if needed > memory.free:
        raise InvalidSetting(
            f"the KV pool of {num_blocks} blocks needs {needed / _GIB:.2f} GiB, and {memory}: "
            "lower --kv-cache-memory-bytes, --num-blocks or --max-model-len"
        )


def report_shorter_requests(settings: EngineSettings, layout: BlockSize, capacity: Capacity, num_blocks: int) -> None:
    """One log line where the pool holds no request of the full length."""
    if num_blocks < capacity.blocks_per_request:
        needed = capacity.blocks_per_request * layout.block_bytes / _GIB
        _log.warning(
            "requests may have %d tokens instead of %d, because the KV pool has %.2f GiB and %.2f would be needed: "
            "--kv-cache-memory-bytes makes it larger",
            num_blocks * settings.block_size,
            capacity.max_model_len,
            num_blocks * layout.block_bytes / _GIB,
            needed,
        )


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """The memory of a GPU that a node needs beside its pool.

    `before`: read when this process had nothing but its CUDA context on the GPU; every reading includes the context, so
    it is not part of the share. `after`: read after the weights were loaded, the largest step was computed, and torch's
    cache was freed. `later_bytes`: allocated after the pool.
    """

    before: MemoryReading
    after: MemoryReading
    later_bytes: int

    def budget(self, utilization: float) -> int:
        """Bytes for the pool, not negative."""
        after = self.after
        outside_torch = min(max(0, self.before.free - after.free - after.reserved), _MAX_OUTSIDE_BYTES)
        ours = outside_torch + max(after.peak, after.reserved) + self.later_bytes
        left_of_share = int(after.total * utilization) - ours
        peak_beyond_reserved = max(0, after.peak - after.reserved)
        really_free = after.free - peak_beyond_reserved - self.later_bytes
        return max(0, min(left_of_share, really_free) - _MARGIN_BYTES)


def measure_needs(
    settings: EngineSettings,
    before: MemoryReading,
    decoder: RunnableDecoder,
    sampler: Sampler | None,
    device: Device,
    limits: RunnerLimits,
    workspace_bytes: int,
) -> GpuNeeds:
    """Compute the largest step that `limits` allow, and read what it took. `workspace_bytes`: of attention. All ranks
    do this together; `sampler`: None for all but the first."""
    reset_peak(device.torch_device)
    if sampler is None:
        profile_shard(decoder, device, limits)
    else:
        profile(decoder, sampler, device, limits)
    after = read_memory(device.torch_device)
    return GpuNeeds(before, after, later_bytes(settings, limits, decoder.config.vocab_size, workspace_bytes))


def later_bytes(settings: EngineSettings, limits: RunnerLimits, vocab_size: int, workspace_bytes: int) -> int:
    """Bytes that are allocated on a GPU after the pool: attention's workspace, recorded graphs, and the logits that
    they write."""
    if settings.enforce_eager:
        return workspace_bytes
    graph_bytes = len(graph_sizes(limits.max_num_seqs)) * _BYTES_PER_GRAPH
    return workspace_bytes + graph_bytes + 4 * limits.max_num_seqs * vocab_size


def gpu_num_blocks(settings: EngineSettings, layout: BlockSize, capacity: Capacity, needs: GpuNeeds) -> int:
    """The size of a pool on a GPU when the settings leave it open. Raises `InvalidSetting` when it is too small.

    A `--max-model-len` that was asked for has to fit. The model's own limit does not: requests are shorter then.
    """
    budget = needs.budget(settings.gpu_memory_utilization)
    num_blocks = budget // layout.block_bytes - 1
    fewest = capacity.blocks_per_request if settings.max_model_len else _FEWEST_BLOCKS
    if num_blocks < max(_FEWEST_BLOCKS, fewest):
        raise _too_small(budget, capacity.blocks_per_request * layout.block_bytes, needs.after, settings)
    _log.info("KV pool: %d blocks, %.2f GiB", num_blocks, num_blocks * layout.block_bytes / _GIB)
    return num_blocks


def _too_small(budget: int, needed: int, after: MemoryReading, settings: EngineSettings) -> InvalidSetting:
    return InvalidSetting(
        f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} leaves {budget / _GIB:.2f} GiB for KV on a "
        f"device of {after.total / _GIB:.1f} GiB ({after.free / _GIB:.1f} GiB free after loading); one request of "
        f"--max-model-len needs {needed / _GIB:.2f} GiB; raise the first, lower the second, or free the device"
    )
