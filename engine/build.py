"""Builds an engine: device, checkpoint, KV pool, scheduler, runner.

Owns the order of these: on a GPU the pool gets the memory that is left after the weights were loaded and the largest
step was computed, and graphs are recorded last. Everything built here is returned; the module has no state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from device.base import Device
from device.choose import open_device
from device.host_memory import GIB, SMALLER, read_host_memory
from device.memory import MemoryReading, enough_memory, read_memory
from engine.attention.choose import NATIVE, AttentionChoice, AttentionShape, choose_attention
from engine.attention.native_backend import NativeAttention
from engine.cache.block_pool import BlockPool
from engine.capacity import Capacity, find_capacity
from engine.core import EngineCore
from engine.first_costs import measure_first_costs
from engine.models.base import RunnableDecoder
from engine.models.checkpoint import choose_dtype
from engine.models.config import ModelConfig
from engine.models.decoder import TORCH_DTYPES, Decoder
from engine.models.dummy import fill_with_noise
from engine.models.facts import ModelFacts, load_facts
from engine.models.identity import dummy_fingerprint, find_checkpoint, model_fingerprint
from engine.models.loading import check_weights, load_weights
from engine.models.modelling.config import ModellingConfig
from engine.models.ops.base import DecoderOps
from engine.models.ops.choose import choose_ops
from engine.models.ops.native_ops import NativeOps
from engine.models.ops.torch_ops import TorchOps
from engine.models.quantization.base import UNQUANTIZED, Quantization
from engine.models.quantization.choose import choose_quantization
from engine.models.quantization.while_loading import AUTO
from engine.native.library import Kernels, open_kernels
from engine.pool_size import (
    chosen_num_blocks,
    gpu_num_blocks,
    host_num_blocks,
    measure_needs,
    report_shorter_requests,
    require_room,
)
from engine.runner.kv_memory import KvAllocator, KvMemory, device_kv_memory, host_kv_memory
from engine.runner.limits import RunnerLimits
from engine.runner.model_runner import ModelRunner
from engine.runner.recorded_layers import StepSizes, record_layers
from engine.runner.sampler import Sampler
from engine.scheduler.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.step_costs import StepBound, StepCosts
from engine.settings import EngineSettings
from engine.structured.matcher import Grammars
from engine.structured.vocabulary import Vocabulary, is_large
from engine.text.tokenizer_digest import tokenizer_digest
from wire.errors import InvalidSetting
from wire.fingerprint import with_quantization
from wire.layout import KvLayout

_DUMMY = "dummy"

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step, and facts about it. The caller of `build_engine` closes `device` at the end."""

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

    def learn_costs(self) -> None:
        """Find out what small steps cost. Only before the first request."""
        costs, block_size = self.core.costs, self.memory.layout.block_size
        measure_first_costs(self.runner, costs, block_size, self.num_blocks, self.core.max_step_tokens)


@dataclass(frozen=True, slots=True)
class _Model:
    """A loaded model on its device, and what it needs of a KV pool. `before`: the GPU's memory without it;
    `weights_bytes`: of all parameters."""

    decoder: RunnableDecoder
    sampler: Sampler
    layout: KvLayout
    fingerprint: str
    before: MemoryReading | None
    ops: DecoderOps
    weights_bytes: int


def build_engine(
    settings: EngineSettings,
    allocate: KvAllocator,
    on_weights: OnProgress | None = None,
    on_graphs: OnProgress | None = None,
) -> Engine:
    """Load the checkpoint and build an engine around it.

    `allocate` gives the memory of a KV pool in host memory. `on_weights` is called with loaded bytes, `on_graphs` with
    recorded graphs. Sets the number of torch threads of this process. Raises `ModelLoadError` and `InvalidSetting`.
    """
    device = open_device(settings.device)
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    kernels = open_kernels(settings.cpu_kernels, num_threads) if _runs_kernels(device) else None
    with enough_memory():
        folder = find_checkpoint(settings.model, weights=settings.load_format != _DUMMY)
        config = load_facts(folder, settings.model_impl, remote_code=settings.trust_remote_code)
        grammars = _grammars(folder, config)
        capacity = find_capacity(settings, config, is_gpu=_is_gpu(device))
        limits = RunnerLimits(settings.max_num_seqs, capacity.num_step_tokens, capacity.blocks_per_request)
        model = _load(settings, folder, config, device, kernels, on_weights)
        attention = _choose_attention(settings, model, limits, device, kernels)
        if settings.batch_invariant:
            _require_batch_invariance(model, attention)
        num_blocks = _num_blocks(settings, capacity, model, limits, attention, device)
        report_shorter_requests(settings, model.layout, capacity, num_blocks)
        memory = _kv_memory(model.layout, num_blocks, allocate, device)
        runner = _runner(settings, model, limits, attention, memory, device, kernels, on_graphs)
        core = _core(settings, capacity, model, num_blocks, runner, grammars, device)
        grammars.finish_loading()
    return Engine(
        core,
        runner,
        memory,
        config,
        model.fingerprint,
        num_blocks,
        core.max_request_tokens,
        device,
        attention,
        tokenizer_digest(folder),
    )


def _grammars(folder: Path, config: ModelFacts) -> Grammars:
    """Makes matchers. A large vocabulary is loaded while the weights are."""
    grammars = Grammars(partial(Vocabulary.from_folder, folder, config.eos_token_ids))
    if is_large(folder):
        grammars.begin_loading()
    return grammars


def _is_gpu(device: Device) -> bool:
    return device.torch_device.type == "cuda"


def _runs_kernels(device: Device) -> bool:
    """Whether CPU kernels can be called on its tensors: at once, in the order of the program, in host memory."""
    return device.torch_device.type == "cpu" and not device.is_asynchronous


def _require_batch_invariance(model: _Model, attention: AttentionChoice) -> None:
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


def _load(
    settings: EngineSettings,
    folder: Path,
    config: ModelConfig | ModellingConfig,
    device: Device,
    kernels: Kernels | None,
    on_weights: OnProgress | None,
) -> _Model:
    dtype = choose_dtype(settings.dtype, config)
    before = read_memory(device.torch_device) if _is_gpu(device) else None
    ops = choose_ops(device.torch_device, kernels)
    decoder: RunnableDecoder
    quantization: Quantization = UNQUANTIZED
    if isinstance(config, ModellingConfig):
        if settings.quantization != AUTO:
            raise InvalidSetting("--quantization: what transformers' modelling code computes is not quantized")
        decoder, weights_bytes = _load_modelling(settings, folder, config, TORCH_DTYPES[dtype], device, on_weights)
    else:
        config = config.for_context(settings.max_model_len)
        quantization = choose_quantization(settings.quantization, config, folder)
        weights_bytes = _checked_weights(settings, folder, config, TORCH_DTYPES[dtype], device, quantization)
        decoder = Decoder(config, TORCH_DTYPES[dtype], device.torch_device, ops, quantization=quantization)
        if settings.load_format == _DUMMY:
            fill_with_noise(decoder)
        else:
            load_weights(folder, decoder, on_weights)
    if settings.load_format == _DUMMY:
        fingerprint = dummy_fingerprint(config, device.torch_device.type)
    else:
        fingerprint = model_fingerprint(folder, config)
    fingerprint = with_quantization(fingerprint, quantization.name)
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size, kernels)
    layout = KvLayout.of_layers(dtype, settings.block_size, decoder.layer_kvs)
    return _Model(decoder, sampler, layout, fingerprint, before, ops, weights_bytes)


def _checked_weights(
    settings: EngineSettings,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    quantization: Quantization,
) -> int:
    """The bytes of all parameters, once it is known that the files have them and that the host has room: nothing has
    been allocated. Raises `ModelLoadError` and `InvalidSetting`."""
    shapes = Decoder(config, dtype, "meta", TorchOps(), quantization=quantization)
    if settings.load_format != _DUMMY:
        check_weights(folder, shapes)
    num_bytes = sum(parameter.num_bytes for parameter in shapes.parameters())
    _require_room_for_weights(num_bytes, device)
    return num_bytes


def _load_modelling(
    settings: EngineSettings,
    folder: Path,
    config: ModellingConfig,
    dtype: torch.dtype,
    device: Device,
    on_weights: OnProgress | None,
) -> tuple[RunnableDecoder, int]:
    """The model in transformers' modelling code, and the bytes of its weights. Raises `ModelLoadError` and
    `InvalidSetting`."""
    # imported late: models of Baton's own need none of it, and it takes seconds
    from engine.models.modelling import loading

    remote_code = settings.trust_remote_code
    num_bytes = loading.count_weights(folder, config, dtype, remote_code=remote_code)
    _require_room_for_weights(num_bytes, device)
    if settings.load_format == _DUMMY:
        decoder = loading.random_modelling_decoder(folder, config, dtype, device, remote_code=remote_code)
    else:
        decoder = loading.load_modelling_decoder(folder, config, dtype, device, on_weights, remote_code=remote_code)
    return decoder, num_bytes


def _require_room_for_weights(num_bytes: int, device: Device) -> None:
    memory = read_host_memory()
    if not device.has_own_memory and num_bytes > memory.free:
        raise InvalidSetting(
            f"the weights need {num_bytes / GIB:.2f} GiB, and {memory} on this machine; what helps is {SMALLER}, or a "
            "smaller model"
        )


def _choose_attention(
    settings: EngineSettings, model: _Model, limits: RunnerLimits, device: Device, kernels: Kernels | None
) -> AttentionChoice:
    shape = AttentionShape(
        num_heads=model.decoder.num_heads,
        dtype=model.decoder.dtype,
        layout=model.layout,
        max_blocks=limits.max_blocks_per_request,
        max_graph_sequences=0 if settings.enforce_eager else limits.max_decodes,
        rules=model.decoder.layer_rules,
    )
    return choose_attention(settings.attention_backend, device, shape, kernels)


def _num_blocks(
    settings: EngineSettings,
    capacity: Capacity,
    model: _Model,
    limits: RunnerLimits,
    attention: AttentionChoice,
    device: Device,
) -> int:
    """The size of the pool (see `engine.pool_size`). Raises `InvalidSetting`."""
    chosen = chosen_num_blocks(settings, model.layout)
    if chosen is not None:
        return chosen
    if model.before is None:
        return host_num_blocks(settings, model.layout, capacity, read_host_memory(), model.weights_bytes)
    needs = measure_needs(
        settings, model.before, model.decoder, model.sampler, device, limits, attention.workspace_bytes
    )
    return gpu_num_blocks(settings, model.layout, capacity, needs)


def _kv_memory(layout: KvLayout, num_blocks: int, allocate: KvAllocator, device: Device) -> KvMemory:
    if device.has_own_memory:
        return device_kv_memory(layout, num_blocks, device.torch_device)
    require_room(layout, num_blocks, read_host_memory())
    return host_kv_memory(layout, num_blocks, allocate)


def _runner(
    settings: EngineSettings,
    model: _Model,
    limits: RunnerLimits,
    choice: AttentionChoice,
    memory: KvMemory,
    device: Device,
    kernels: Kernels | None,
    on_graphs: OnProgress | None,
) -> ModelRunner:
    attention = choice.build(memory.paged)
    with_spare = replace(limits, spare_block=memory.spare_block)
    recorded = None
    # transformers' modelling code may look at values, so nothing of it is recorded
    own = model.decoder if isinstance(model.decoder, Decoder) and not settings.enforce_eager else None
    if own is not None and kernels is not None and isinstance(attention, NativeAttention):
        max_positions = limits.max_blocks_per_request * settings.block_size
        sizes = StepSizes(limits.max_num_batched_tokens, limits.max_num_seqs, max_positions)
        recorded = record_layers(own, attention, kernels, sizes)
    runner = ModelRunner(model.decoder, attention, memory.paged.blocks, model.sampler, device, with_spare, recorded)
    if own is not None:
        runner.record_graphs(on_graphs)
    runner.warm_up()
    return runner


def _core(
    settings: EngineSettings,
    capacity: Capacity,
    model: _Model,
    num_blocks: int,
    runner: ModelRunner,
    grammars: Grammars,
    device: Device,
) -> EngineCore:
    config = model.decoder.config
    pool = BlockPool(num_blocks, prefix_caching=settings.enable_prefix_caching)
    limits = SchedulerLimits(
        settings.block_size,
        settings.max_num_seqs,
        capacity.num_step_tokens,
        min(capacity.max_model_len, num_blocks * settings.block_size),
        vocab_size=config.vocab_size,
        # a recorded step takes no chunks, and is so much faster than another that jumping would cost more than it saves
        jumps_ahead=not device.records or settings.enforce_eager,
    )
    costs = StepCosts()
    bound = StepBound(costs, settings.goal_tpot_ms / 1000) if settings.goal_tpot_ms > 0 else None
    scheduler = Scheduler(pool, limits, frozenset(config.eos_token_ids), bound)
    return EngineCore(pool, scheduler, runner, model.fingerprint, grammars, costs)
