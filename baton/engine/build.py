"""Builds an engine: device, ranks, checkpoint, KV pool, scheduler, runner.

Owns the order of these: on a GPU the pool gets the memory that is left after the weights were loaded and the largest
step was computed, and graphs are recorded last. The first steps, which have the time of a step, are computed when every
rank has recorded its own. Everything built here is returned; the module has no state. Who builds an engine of several
ranks says who opens them; what each rank does alike is `baton.engine.model_shard`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from baton.device.base import Device
from baton.device.memory import MemoryReading, enough_memory, read_memory
from baton.engine.adapting import require_adaptable, with_adapters
from baton.engine.attention.choose import NATIVE, AttentionChoice
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.offload import KvOffload
from baton.engine.core import EngineCore
from baton.engine.executor.base import Executor
from baton.engine.executor.uni import open_uni
from baton.engine.first_costs import measure_first_costs
from baton.engine.model_shard import (
    Basis,
    ModelShard,
    attention_of,
    fingerprint_of,
    gpu_room,
    load_shard,
    node_memory,
    open_basis,
    recorded_pass,
    stream_of,
)
from baton.engine.models.config import ModelConfig
from baton.engine.models.division import require_number_of_ranks
from baton.engine.models.facts import ModelFacts
from baton.engine.models.loading import OnProgress
from baton.engine.models.model_costs import pair_in_tokens
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.shard import Shard
from baton.engine.native.loans import CoreLoans
from baton.engine.offloading import StoreOpener, only_tier, open_pool, tiers_opener
from baton.engine.pool_size import (
    BlockSize,
    DividedBlocks,
    chosen_num_blocks,
    host_num_blocks,
    report_shorter_requests,
    require_room,
)
from baton.engine.runner.base import Runner
from baton.engine.runner.greedy_series import GreedySeries
from baton.engine.runner.inputs import InputReader
from baton.engine.runner.kv_memory import KvAllocator, KvMemory, device_kv_memory, host_kv_memory, own_kv_memory
from baton.engine.runner.media import StepMedia
from baton.engine.runner.model_runner import ModelRunner, RunnerArguments
from baton.engine.runner.recorded_layers import RecordedLayers
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.step_adapters import StepAdapters
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step_bound import StepBound
from baton.engine.scheduler.step_costs import USUAL_PAIR, StepCosts
from baton.engine.settings import EngineSettings
from baton.engine.speculation.building import Drafting
from baton.engine.speculation.choose import drawing_of
from baton.engine.speculation.settings import read_asked
from baton.engine.structured.matcher import Grammars
from baton.engine.structured.vocabulary import Vocabulary, is_large
from baton.engine.text.tokenizer_digest import tokenizer_digest
from baton.runtime.settings import require_allowed
from baton.wire.errors import InvalidSetting

OpenExecutor: TypeAlias = Callable[[Basis, int], Executor]
"""The ranks of an engine with this basis, running; the number: of the threads of each. Raises `InvalidSetting`, and
`DeviceFailed` when they do not come up."""
_FIRST_BYTES = 2**25
"""Of a pool in host memory: as much gets its memory at the start. The first steps, which have the time of a step, find
theirs there."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step, and facts about it. The caller of `build_engine` closes `core`, `executor` and `device`
    at the end. `adapters`: the digest of each, by its name."""

    core: EngineCore
    runner: ModelRunner
    memory: KvMemory
    config: ModelFacts
    fingerprint: str
    num_blocks: int
    max_request_tokens: int
    device: Device
    attention: AttentionChoice
    tokenizer_digest: str
    executor: Executor
    loans: CoreLoans | None
    adapters: Mapping[str, bytes]
    drafting: Drafting

    def learn_costs(self) -> None:
        """Find out what small steps cost. Only before the first request."""
        measure_first_costs(self.runner, self.core.costs, self.core.limits)
        self.drafting.learn_costs(self.core.limits)


class StartProgress(NamedTuple):
    """Called while an engine starts, with what is done and what there is: bytes of `weights`, recorded `graphs`."""

    weights: OnProgress | None = None
    graphs: OnProgress | None = None


_SILENT = StartProgress()


def build_engine(
    settings: EngineSettings,
    allocate: KvAllocator,
    progress: StartProgress = _SILENT,
    open_executor: OpenExecutor = open_uni,
    proposer: Proposer | None = None,
    open_store: StoreOpener | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Engine:
    """Load the checkpoint and build an engine around it.

    `allocate` gives the memory of a KV pool in host memory. `open_executor`: without it the engine has one rank.
    `proposer`: its drafts are all verified; None: drafts as the settings say. `open_store`: opens the KV store below a
    pool that is not divided among ranks; None: as the settings say. `adapters`: their folders, by their names. Sets the
    number of torch threads of this process. Raises `ModelLoadError`, `InvalidSetting`, and `DeviceFailed` when a rank
    does not come up.
    """
    require_allowed(settings)
    read_asked(settings.speculative_config)
    require_number_of_ranks(settings.tensor_parallel_size, settings.pipeline_parallel_size)
    open_tiers = tiers_opener(settings) if open_store is None else only_tier("own", open_store)
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(1, (settings.num_threads or num_cores) // settings.num_ranks_here)
    if settings.num_ranks_here > num_cores:
        _log.warning("%d ranks share %d cores, and wait for each other", settings.num_ranks_here, num_cores)
    with enough_memory(), ExitStack() as opened:
        basis = open_basis(settings, num_threads)
        settings = basis.settings
        config, device = basis.config, basis.device
        if open_store is not None and settings.divides_pool:
            raise InvalidSetting("a store that a program brings is for one pool, and here each rank has its own")
        if adapters:
            require_adaptable(basis)
        grammars = _grammars(basis.folder, config)
        executor = open_executor(basis, num_threads)
        opened.callback(executor.close)
        before = read_memory(device.torch_device) if basis.is_gpu else None
        rank = executor.shard
        model = with_adapters(load_shard(basis, rank, executor.collectives, progress.weights), adapters or {})
        drafting = Drafting(basis, model, proposer)
        executor.loaded()
        sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size, basis.kernels, drawing_of(settings))
        attention = attention_of(basis, model, rank)
        if settings.batch_invariant:
            _require_batch_invariance(model, attention)
        size = _block_size(settings, model)
        num_blocks = _num_blocks(basis, model, size, sampler, attention, before, executor)
        report_shorter_requests(settings, size, basis.capacity, num_blocks)
        memory = drafting.with_states(_kv_memory(basis, model, size, num_blocks, allocate, rank))
        executor.share_memory(memory, stream_of(basis, model, rank))
        costs = StepCosts(pair_in_tokens=pair_in_tokens(config) if isinstance(config, ModelConfig) else USUAL_PAIR)
        runner = _runner(basis, model, sampler, attention, memory, executor, costs, progress.graphs)
        drafting.follow(memory, runner)
        executor.ready()
        runner.warm_up()
        fingerprint = fingerprint_of(basis, model)
        offload = None
        if open_tiers is not None:
            pool = executor.with_other_ranks(open_pool(basis, model, attention, memory, open_tiers))
            offload = KvOffload(pool, settings.block_size, basis.capacity.max_chunk, lambda: costs.cost)
        drafting.open_model(memory, offload)
        core = _core(basis, model, fingerprint, memory, runner, grammars, costs, drafting, offload)
        opened.callback(core.close)
        grammars.finish_loading()
        opened.pop_all()
    return Engine(
        core,
        runner,
        memory,
        config,
        fingerprint,
        num_blocks,
        core.limits.max_request_tokens,
        device,
        attention,
        tokenizer_digest(basis.folder),
        executor,
        None if basis.kernels is None else basis.kernels.loans,
        model.adapters,
        drafting,
    )


def _grammars(folder: Path, config: ModelFacts) -> Grammars:
    """Makes matchers. A large vocabulary is loaded while the weights are."""
    grammars = Grammars(partial(Vocabulary.from_folder, folder, config.eos_token_ids))
    if is_large(folder):
        grammars.begin_loading()
    return grammars


def _require_batch_invariance(model: ModelShard, attention: AttentionChoice) -> None:
    """Raise `InvalidSetting` when anything computes that may add in another order in another batch."""
    ops = model.ops
    if not isinstance(ops, NativeOps):
        reason = "it needs Baton's CPU kernels (see --cpu-kernels)"
    elif not model.decoder.is_recordable:
        reason = f"torch computes a part of {model.decoder.config.architecture}"
    elif attention.name != NATIVE:
        reason = f"attention is computed by {attention.name}"
    elif not ops.has_packed_all:
        reason = "some weights have a type that Baton's CPU kernels do not multiply"
    else:
        return
    raise InvalidSetting(f"--batch-invariant cannot be promised here: {reason}")


def _block_size(settings: EngineSettings, model: ModelShard) -> BlockSize:
    if not settings.divides_pool:
        return model.layout
    return DividedBlocks(model.layout, settings.tensor_parallel_size, settings.pipeline_parallel_size)


def _num_blocks(
    basis: Basis,
    model: ModelShard,
    size: BlockSize,
    sampler: Sampler,
    attention: AttentionChoice,
    before: MemoryReading | None,
    executor: Executor,
) -> int:
    """The size of the pool (see `baton.engine.pool_size`). Raises `InvalidSetting`."""
    settings, capacity = basis.settings, basis.capacity
    chosen = chosen_num_blocks(settings, size)
    if chosen is not None:
        return chosen
    if before is None:
        memory, num_ranks = node_memory(settings), settings.num_ranks
        return host_num_blocks(settings, size, capacity, memory, model.weights_bytes, num_ranks)
    return executor.fewest_blocks(partial(gpu_room, basis, model, attention, before, sampler))


def _kv_memory(
    basis: Basis, model: ModelShard, size: BlockSize, num_blocks: int, allocate: KvAllocator, rank: Shard
) -> KvMemory:
    device = basis.device
    if not device.has_own_memory:
        require_room(size, num_blocks, node_memory(basis.settings))
    if basis.settings.divides_pool:
        return own_kv_memory(model.layout, model.own, rank, num_blocks, device)
    if device.has_own_memory:
        return device_kv_memory(model.layout, num_blocks, device.torch_device, model.own)
    return host_kv_memory(model.layout, num_blocks, allocate, own=model.own, shard=rank)


def _runner(
    basis: Basis,
    model: ModelShard,
    sampler: Sampler,
    choice: AttentionChoice,
    memory: KvMemory,
    executor: Executor,
    costs: StepCosts,
    on_graphs: OnProgress | None,
) -> ModelRunner:
    attention = choice.build(memory.paged)
    draft_blocks = memory.paged.draft_blocks
    with_spare = replace(basis.limits, spare_block=memory.spare_block, num_draft_blocks=len(draft_blocks))
    run = recorded_pass(basis, model.decoder, attention)
    arguments = RunnerArguments(model.decoder, attention, memory.paged.blocks, sampler, basis.device, with_spare)
    num_layers_before = model.layout.num_layers - model.own.num_layers
    leading = executor.leading_runner(arguments, run, num_layers_before, costs)
    if leading is not None:
        return _recorded(leading, basis, on_graphs)
    readers: list[InputReader] = []
    if model.towers:
        readers.append(StepMedia(model.towers, basis.device.torch_device))
    if model.adapters:
        readers.append(StepAdapters(basis.device.torch_device))
    greedy = None
    if isinstance(run, RecordedLayers) and isinstance(attention, NativeAttention) and not run.needs_torch:
        greedy = GreedySeries(run, attention, run.kernels, sampler)
    return _recorded(ModelRunner(*arguments, run, readers, greedy), basis, on_graphs)


def _recorded(runner: ModelRunner, basis: Basis, on_graphs: OnProgress | None) -> ModelRunner:
    if basis.records_steps:
        runner.record_graphs(on_graphs)
    return runner


def _core(
    basis: Basis,
    model: ModelShard,
    fingerprint: str,
    memory: KvMemory,
    runner: Runner,
    grammars: Grammars,
    costs: StepCosts,
    drafting: Drafting,
    offload: KvOffload | None,
) -> EngineCore:
    settings, capacity, config = basis.settings, basis.capacity, basis.config
    on_evicted = None if offload is None else offload.evicted
    draft_blocks, has_states = memory.paged.draft_blocks, memory.layout.has_states
    num_blocks = memory.num_blocks - len(draft_blocks)
    if memory.give_memory is not None and draft_blocks:
        memory.give_memory(num_blocks, memory.num_blocks)
    pool = BlockPool(
        num_blocks,
        prefix_caching=settings.enable_prefix_caching,
        on_evicted=on_evicted,
        give_memory=memory.give_memory,
    )
    pool.grow(_FIRST_BYTES // memory.layout.block_bytes + 1)
    limits = SchedulerLimits(
        settings.block_size,
        settings.max_num_seqs,
        capacity.max_chunk,
        min(capacity.max_model_len, num_blocks * settings.block_size),
        vocab_size=config.vocab_size,
        # a recorded step takes no chunks, and is so much faster than another that jumping would cost more than it saves
        jumps_ahead=not basis.device.records or settings.enforce_eager,
        has_states=has_states,
        max_num_drafts=len(draft_blocks) if has_states else settings.max_num_seqs,
        num_stages=settings.pipeline_parallel_size,
        adapters=frozenset(model.adapters.values()),
    )
    goals_s = settings.goal_tpot_ms / 1000, max(0.0, settings.goal_ttft_ms / 1000)
    bound = StepBound(costs, *goals_s) if settings.goal_tpot_ms > 0 else None
    speculation = drafting.speculation(costs, bound, pool, offload)
    scheduler = Scheduler(pool, limits, frozenset(config.eos_token_ids), bound, speculation, offload)
    runner = drafting.beside(runner, scheduler.requests)
    media_facts = {kind: tower.facts for kind, tower in model.towers.items()}
    return EngineCore(pool, scheduler, runner, fingerprint, grammars, costs, media_facts, offload, drafting.coverage)
