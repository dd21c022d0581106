"""What a node of some ranks holds: weights, KV, how many requests, and how fast at best.

Owns the estimate of what a GPU needs beside weights and KV, which a node measures. The pool is sized by the code that
sizes a node's (`baton.engine.pool_size`), of readings as that device would give them.

Times are rooflines: the longer of computing at the device's peak times `utilization`, and of reading weights and KV at
its bandwidth. What ranks say to each other is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.device.host_memory import HostMemory
from baton.device.memory import MemoryReading
from baton.engine.attention.flashinfer_limits import float_workspace_bytes, int_workspace_bytes
from baton.engine.capacity import Capacity, find_capacity
from baton.engine.models.config import ModelConfig
from baton.engine.models.model_costs import attention_flop, head_flop, product_flop_per_token, share_of_experts
from baton.engine.pool_size import GpuNeeds, gpu_num_blocks, host_num_blocks, later_bytes
from baton.engine.runner.limits import RunnerLimits
from baton.engine.runner.readings import PIECE_ELEMENTS
from baton.engine.settings import EngineSettings
from baton.launch.plan.devices import PlannedDevice
from baton.launch.plan.rank_size import RankSize, stage_sizes
from baton.wire.errors import InvalidSetting
from baton.wire.layout import DTYPE_BYTES, LATENT, STATE

_LIBRARY_BYTES = 512 * 2**20
"""What libraries take on a GPU outside torch, beside the CUDA context: an estimate, which a node measures."""
_SCORED_COPIES = 3
_SAMPLED_ROW_BYTES = 24
"""A logit of a row that is sorted to be sampled: as float32, its probability, the order, and their copies."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a node: `tensor` in each of `stages` pipeline stages."""

    tensor: int
    stages: int

    @property
    def count(self) -> int:
        """The number of all ranks. Each has a device of its own, except on a CPU."""
        return self.tensor * self.stages


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node. Bytes of weights and KV are those of the rank that holds most of them; a token's KV lies in all ranks.
    `kv_tokens`: in its pool. `weights_bytes_total`, `kv_bytes_per_token_total`: over all ranks, with what several of
    them hold."""

    ranks: Ranks
    weights_bytes: int
    weights_bytes_total: int
    step_bytes: int
    kv_bytes_per_token: float
    kv_bytes_per_token_total: float
    num_blocks: int
    block_size: int
    max_context: int
    max_chunk: int
    max_step_tokens: int
    stages: tuple[RankSize, ...]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the node holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one request take."""
        return -(-num_tokens // self.block_size)

    def sequences_at(self, context: int) -> int:
        """Requests of that context whose KV fits."""
        return self.num_blocks // self.blocks_for(context)


@dataclass(frozen=True, slots=True)
class NodePlanner:
    """Plans nodes of one model on one kind of device. `num_sharing`: ranks that share the memory of this machine, on a
    CPU. `kv_dtype`: of the stored KV. `draft`: the model that computes drafts, if one does."""

    config: ModelConfig
    device: PlannedDevice
    settings: EngineSettings
    dtype: str
    kv_dtype: str
    num_sharing: int
    utilization: float
    draft: ModelConfig | None = None

    def plan(self, ranks: Ranks) -> PlannedNode:
        """A node. Raises `ModelLoadError` and `InvalidSetting` as that node would."""
        stages = self._stages(self.config, ranks)
        if self.draft is not None:
            if ranks.count > 1:
                raise InvalidSetting("--speculative-config: a node with a draft model is planned as one rank")
            stages = [stages[0].with_draft(self._stages(self.draft, ranks)[0])]
        capacity = find_capacity(self.settings, self.config, is_gpu=self.device.is_gpu)
        step_bytes = self._step_bytes(capacity, ranks)
        num_blocks = min(self._num_blocks(stage, ranks, capacity, step_bytes) for stage in stages)
        block_size = self.settings.block_size
        return PlannedNode(
            ranks=ranks,
            weights_bytes=max(stage.weights_bytes for stage in stages),
            weights_bytes_total=ranks.tensor * sum(stage.weights_bytes for stage in stages),
            step_bytes=step_bytes,
            kv_bytes_per_token=max(stage.layout.block_bytes for stage in stages) / block_size,
            kv_bytes_per_token_total=ranks.tensor * sum(stage.layout.block_bytes for stage in stages) / block_size,
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=min(capacity.max_model_len, num_blocks * block_size),
            max_chunk=capacity.max_chunk,
            max_step_tokens=capacity.max_step_tokens,
            stages=tuple(stages),
        )

    def _stages(self, config: ModelConfig, ranks: Ranks) -> list[RankSize]:
        return stage_sizes(config, self.dtype, self.kv_dtype, self.settings.block_size, ranks.tensor, ranks.stages)

    def chunk_s(self, node: PlannedNode, first: int, count: int) -> float:
        """Seconds from one chunk of `count` tokens, behind `first` others, to the next at best: with stages, several
        chunks are under way."""
        flop = count * product_flop_per_token(self.config)
        flop += count * attention_flop(self.config, first + count // 2)
        return self._roofline_s(node, flop, self._read_weights_bytes(node, count), count)

    def prompt_s(self, node: PlannedNode, num_tokens: int) -> float:
        """Seconds for a whole prompt at best, alone on the node."""
        step = node.max_chunk
        chunks = [(first, min(step, num_tokens - first)) for first in range(0, num_tokens, step)]
        times_s = [self.chunk_s(node, first, count) for first, count in chunks]
        return sum(times_s) + (node.ranks.stages - 1) * times_s[-1]  # the last chunk goes through all stages

    def decode_s(self, node: PlannedNode, num_sequences: int, context: int) -> float:
        """Seconds of a decode step of so many requests at best, through all stages one after another."""
        config = self.config
        flop = product_flop_per_token(config) + head_flop(config) + attention_flop(config, context)
        kv_bytes = num_sequences * self._read_kv_bytes(node, context)
        read = self._read_weights_bytes(node, num_sequences) + kv_bytes / node.ranks.count
        return self._roofline_s(node, num_sequences * flop, read, num_sequences) * node.ranks.stages

    def _roofline_s(self, node: PlannedNode, flop: float, read_bytes: float, num_tokens: int) -> float:
        """Of a stage. `flop`: of the whole model; `read_bytes`: of a rank."""
        compute_s = flop / node.ranks.count / (self.device.flop_per_s(self.dtype) * self.utilization)
        return max(compute_s, read_bytes / self.device.bytes_per_s) if num_tokens else 0.0

    def _read_weights_bytes(self, node: PlannedNode, num_tokens: int) -> float:
        """Of the rank that reads most, in a step of so many tokens."""
        unread = 1.0 - share_of_experts(self.config, num_tokens)
        # a tied head reads all of the table, where that is in the same stage
        has_own_head = not self.config.tie_word_embeddings or node.ranks.stages > 1
        return max(
            stage.model_bytes - unread * stage.expert_bytes - (stage.table_bytes if has_own_head else 0)
            for stage in node.stages
        )

    def _read_kv_bytes(self, node: PlannedNode, context: int) -> float:
        """Of one request in all ranks: layers with a window read no more than that."""
        layers = [(stage.layout, kv) for stage in node.stages for kv in stage.model_layers]
        return node.ranks.tensor * sum(
            layout.layer_bytes(kv) * (1 if kv.kind == STATE else min(context, kv.window or context) / node.block_size)
            for layout, kv in layers
        )

    def _num_blocks(self, stage: RankSize, ranks: Ranks, capacity: Capacity, step_bytes: int) -> int:
        if not self.device.is_gpu:
            share = round(self.settings.cpu_memory_utilization / self.num_sharing, 4)  # as `baton serve` divides it
            memory = HostMemory(
                self.device.memory_bytes, self.device.memory_bytes - self.num_sharing * stage.weights_bytes
            )
            settings = replace(self.settings, cpu_memory_utilization=share)
            return host_num_blocks(settings, stage.layout, capacity, memory, stage.weights_bytes)
        total = self.device.memory_bytes
        usable = int(total * self.settings.gpu_memory_utilization)
        if stage.weights_bytes + step_bytes > usable:
            raise InvalidSetting(
                f"{stage.weights_bytes / _GIB:.1f} GiB of weights a rank, and {step_bytes / _GIB:.1f} GiB for a step, "
                f"do not fit into {usable / _GIB:.1f} GiB, --gpu-memory-utilization "
                f"{self.settings.gpu_memory_utilization:g} of a {self.device.name}; more ranks hold less each"
            )
        before = MemoryReading(total, total, 0, 0)
        peak = stage.weights_bytes + step_bytes
        after = MemoryReading(total, total - _LIBRARY_BYTES - stage.weights_bytes, stage.weights_bytes, peak)
        limits = RunnerLimits(self.settings.max_num_seqs, capacity.max_step_tokens, capacity.blocks_per_request)
        later = later_bytes(self.settings, limits, self.config.vocab_size, self._workspace_bytes(stage, ranks, limits))
        return gpu_num_blocks(self.settings, stage.layout, capacity, GpuNeeds(before, after, later))

    def _workspace_bytes(self, stage: RankSize, ranks: Ranks, limits: RunnerLimits) -> int:
        """Of flashinfer; attention to latents, and beside states, has none."""
        kvs = [group.kv for group in stage.layout.groups]
        if any(kv.kind in (LATENT, STATE) for kv in kvs):
            return 0
        heads, sequences = self.config.num_heads // ranks.tensor, limits.max_num_seqs
        sizes = [
            float_workspace_bytes(heads, kv.num_kv_heads, kv.head_dim, self.device.num_processors, sequences)
            for kv in kvs
        ]
        return max(sizes) + int_workspace_bytes(len(kvs))

    def _step_bytes(self, capacity: Capacity, ranks: Ranks) -> int:
        """An estimate of the largest step's tensors: of a layer, or of scored and sampled rows, whichever is more."""
        config, size, tokens = self.config, DTYPE_BYTES[self.dtype], capacity.max_step_tokens
        heads = config.num_heads * (2 * config.head_dim if config.latent is None else config.latent.kv_rank)
        inner = [3 * config.intermediate_size / ranks.tensor, 2 * heads / ranks.tensor]
        if config.experts is not None:
            row = 3 * config.experts.intermediate_size / ranks.tensor + 2 * config.hidden_size
            inner.append(config.experts.num_chosen * row)
        layer = tokens * size * (4 * config.hidden_size + max(inner))
        stream = tokens * size * config.hidden_size
        rows = self.settings.max_num_seqs * config.vocab_size * _SAMPLED_ROW_BYTES
        return int(max(layer, stream + max(_SCORED_COPIES * 4 * PIECE_ELEMENTS, rows)))
