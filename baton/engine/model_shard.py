"""A rank's share of a model, from the checkpoint to what computes a step: what every rank of an engine does alike.

Owns the order: read the config, check the files and the memory, load, choose attention, record the layers. With several
ranks all of them run this, and where a function computes with the model they run it at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from baton.device.base import Device
from baton.device.choose import AUTO as AUTO_DEVICE
from baton.device.choose import open_device
from baton.device.host_memory import GIB, SMALLER, HostMemory, read_host_memory
from baton.device.memory import MemoryReading
from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.choose import AttentionChoice, AttentionShape, choose_attention
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.capacity import Capacity, find_capacity
from baton.engine.executor.base import StreamShape
from baton.engine.models.base import RunnableDecoder
from baton.engine.models.checkpoint import choose_dtype, choose_kv_dtype
from baton.engine.models.collectives import Collectives
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import TORCH_DTYPES, Decoder
from baton.engine.models.dummy import fill_with_noise
from baton.engine.models.facts import load_facts
from baton.engine.models.identity import dummy_fingerprint, find_checkpoint, model_fingerprint
from baton.engine.models.loading import OnProgress, check_weights, load_weights
from baton.engine.models.media import MediaTower
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.models.noted_collectives import NotedCollectives
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.quantization.while_loading import AUTO
from baton.engine.models.shard import Shard
from baton.engine.models.text_part import published_names
from baton.engine.models.vision.facts import NoImages, load_image_facts
from baton.engine.models.vision.limit import image_limit
from baton.engine.native.library import Kernels, open_kernels
from baton.engine.native.loans import Lending
from baton.engine.pool_size import gpu_num_blocks, host_budget, measure_needs
from baton.engine.runner.forward import ForwardPass
from baton.engine.runner.limits import RunnerLimits
from baton.engine.runner.recorded_layers import StepSizes, record_layers
from baton.engine.runner.sampler import Sampler
from baton.engine.settings import DUMMY, OWN, SHARED, EngineSettings
from baton.engine.speculation.choose import open_draft
from baton.engine.speculation.layers import DraftLayers
from baton.engine.speculation.settings import chosen_config
from baton.runtime.process import return_freed_memory
from baton.wire.errors import InvalidSetting
from baton.wire.fingerprint import with_quantization
from baton.wire.images import PromptImage
from baton.wire.layout import KvLayout

if TYPE_CHECKING:
    from baton.engine.models.vision.tower import Tower

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Basis:
    """What is known of an engine before weights are loaded, in each of its ranks. `draft`: the layers of its drafts."""

    settings: EngineSettings
    folder: Path
    config: ModelConfig | ModellingConfig
    device: Device
    kernels: Kernels | None
    capacity: Capacity
    limits: RunnerLimits
    draft: DraftLayers | None = None

    @property
    def records_steps(self) -> bool:
        """Whether decode steps are recorded, where the device can. Transformers' modelling code may look at values, so
        nothing of it is."""
        is_read = self.draft is not None and self.draft.reads_steps
        return not (self.settings.enforce_eager or is_read) and isinstance(self.config, ModelConfig)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is one."""
        return self.device.torch_device.type == "cuda"

    @property
    def measures_room(self) -> bool:
        """Whether the size of the pool is what a largest step leaves of a GPU."""
        return self.is_gpu and not (self.settings.num_blocks or self.settings.kv_cache_memory_bytes)


def open_basis(settings: EngineSettings, num_threads: int, place: int = 0) -> Basis:
    """Open the device and read the checkpoint's config. `num_threads`: of torch and of the kernels in this process;
    `place`: which of the ranks of this machine it is. Raises `ModelLoadError` and `InvalidSetting`."""
    device = open_device(settings.device, place)
    settings = _on_device(settings, device)
    torch.set_num_threads(num_threads)
    kernels = _kernels_for(settings, device, num_threads)
    folder = find_checkpoint(settings.model, weights=settings.load_format != DUMMY)
    config = load_facts(folder, settings.model_impl, remote_code=settings.trust_remote_code)
    if isinstance(config, ModelConfig):
        config = config.for_context(settings.max_model_len)
    capacity = find_capacity(settings, config, is_gpu=device.torch_device.type == "cuda")
    limits = RunnerLimits(settings.max_num_seqs, capacity.max_step_tokens, capacity.blocks_per_request)
    has_states = isinstance(config, ModelConfig) and config.states is not None
    is_useful = device.torch_device.type == "cpu" and not device.has_own_memory and not has_states
    drafts = chosen_config(settings.speculative_config, is_useful=is_useful)
    settings = replace(settings, speculative_config=drafts)
    draft = open_draft(settings, folder, config, device)
    return Basis(settings, folder, config, device, kernels, capacity, limits, draft)


def _on_device(settings: EngineSettings, device: Device) -> EngineSettings:
    """With what the device decides for all ranks of a node. Raises `InvalidSetting`."""
    if settings.num_ranks == 1:
        return settings
    if settings.device == AUTO_DEVICE:  # ranks of other machines might find another kind
        settings = replace(settings, device=device.torch_device.type)
    if not device.has_own_memory:
        return settings
    if settings.rank_pools == SHARED:
        raise InvalidSetting("--rank-pools shared: each rank is on a device with memory of its own")
    return replace(settings, rank_pools=OWN)


def checkpoint_fingerprint(basis: Basis) -> str:
    """Equal where the weights are. How many ranks have them makes no difference."""
    if basis.settings.load_format == DUMMY:
        return dummy_fingerprint(basis.config, basis.device.torch_device.type)
    return model_fingerprint(basis.folder, basis.config)


def fingerprint_of(basis: Basis, model: ModelShard) -> str:
    """Equal where the KV of a prompt means the same: of the checkpoint, with what is quantized while it is loaded, and
    that of its drafts."""
    kv_dtype = model.layout.dtype if model.layout.has_scales else ""
    draft = "" if basis.draft is None else basis.draft.identity
    activations = "" if basis.settings.activation_dtype == AUTO else basis.settings.activation_dtype
    return with_quantization(checkpoint_fingerprint(basis), model.quantization, kv_dtype, draft, activations)


def node_memory(settings: EngineSettings) -> HostMemory:
    """The host memory of a node: that of all its machines, which are taken to be like this one."""
    memory, count = read_host_memory(), settings.rank_machines
    return replace(memory, total=memory.total * count, free=memory.free * count)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """A loaded share of a model on its device. `layout`: of a block of all ranks, with the layers of drafts at its end;
    `own`: what this rank's share of the model has in one.
    `weights_bytes`: of the parameters of all ranks; `quantization`: by what name they are quantized, "" for none.
    `towers`: what computes media here, by their kind. `adapters`: the digest of each that is loaded, by its name."""

    decoder: RunnableDecoder
    layout: KvLayout
    own: KvLayout
    ops: DecoderOps
    weights_bytes: int
    quantization: str = ""
    towers: Mapping[str, MediaTower[Any]] = field(default_factory=dict)
    adapters: Mapping[str, bytes] = field(default_factory=dict)


def _kernels_for(settings: EngineSettings, device: Device, num_threads: int) -> Kernels | None:
    """Baton's own CPU kernels, where they can be called on the tensors of `device`: at once, in the order of the
    program, in host memory. Raises `InvalidSetting`."""
    can_run = device.torch_device.type == "cpu" and not device.is_asynchronous
    lending = Lending.parse(settings.core_loans)
    return open_kernels(settings.cpu_kernels, num_threads, lending=lending) if can_run else None


def load_shard(
    basis: Basis, shard: Shard, collectives: Collectives | None, on_weights: OnProgress | None
) -> ModelShard:
    """Load this rank's share, and nothing else of the files. Raises `ModelLoadError` and `InvalidSetting`."""
    model = _load_shard(basis, shard, collectives, on_weights)
    draft = basis.draft
    if draft is None:
        return model
    layout, weights_bytes = model.layout.followed_by(draft.kvs), model.weights_bytes + draft.weights_bytes
    return replace(model, layout=layout, weights_bytes=weights_bytes)


def _load_shard(
    basis: Basis, shard: Shard, collectives: Collectives | None, on_weights: OnProgress | None
) -> ModelShard:
    settings, folder, config, device, kernels = basis.settings, basis.folder, basis.config, basis.device, basis.kernels
    if isinstance(config, ModellingConfig):
        return _load_modelling(settings, folder, config, device, kernels, on_weights)
    if config.other_parts and settings.load_format != DUMMY:
        config = replace(config, names=published_names(config.names, folder))
    dtype = choose_dtype(settings.dtype, config)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype)
    quantization = choose_quantization(settings.quantization, config, folder, kernels)
    if collectives is not None and kernels is not None:
        collectives = NotedCollectives(collectives, kernels)
    all_stages = Shard(shard.rank, shard.size)
    shapes = Decoder(config, TORCH_DTYPES[dtype], "meta", TorchOps(), all_stages, collectives, quantization)
    KvLayout.of_layers(kv_dtype, settings.block_size, shapes.layer_kvs)  # refuses what has no KV of that dtype
    weights_bytes = _checked_weights(settings, folder, shapes, device, shard)
    ops = choose_ops(device.torch_device, kernels, rounds_activations=settings.activation_dtype != AUTO)
    decoder = Decoder(config, TORCH_DTYPES[dtype], device.torch_device, ops, shard, collectives, quantization)
    if settings.load_format == DUMMY:
        fill_with_noise(decoder)
    else:
        load_weights(folder, decoder, on_weights)
    return_freed_memory()  # plain weights that were packed, or quantized
    _require_rounding(settings, ops)
    own = KvLayout.of_layers(kv_dtype, settings.block_size, decoder.layer_kvs)
    layout = own
    if not shard.is_whole:
        whole = Decoder(config, TORCH_DTYPES[dtype], "meta", TorchOps())
        layout = KvLayout.of_layers(kv_dtype, settings.block_size, whole.layer_kvs)
    towers = towers_of(basis, TORCH_DTYPES[dtype])
    weights_bytes += sum(tower.num_bytes for tower in towers.values())
    return ModelShard(decoder, layout, own, ops, weights_bytes, quantization.name, towers)


def _require_rounding(settings: EngineSettings, ops: DecoderOps) -> None:
    if settings.activation_dtype != AUTO and not (isinstance(ops, NativeOps) and ops.has_rounded):
        raise InvalidSetting(
            f"--activation-dtype {settings.activation_dtype}: no weight here has 8 or 4 bits in groups of 16 inputs or "
            "more (see --quantization)"
        )


def towers_of(basis: Basis, dtype: torch.dtype) -> Mapping[str, MediaTower[Any]]:
    """What computes media of a model, by their kind: nothing else of an engine knows kinds. Raises `ModelLoadError`."""
    tower = _image_tower(basis, dtype)
    return {} if tower is None else {PromptImage.kind: tower}


def _image_tower(basis: Basis, dtype: torch.dtype) -> Tower | None:
    """The tower of a model that sees, where it is wanted: it stays in the model's dtype, on one rank. Raises
    `ModelLoadError`."""
    settings = basis.settings
    if settings.load_format == DUMMY or image_limit(settings.limit_mm_per_prompt) == 0:
        return None
    try:
        facts = load_image_facts(basis.folder)
    except NoImages as error:
        _log.info("%s", error)
        return None
    if facts is None:
        return None
    if settings.num_ranks > 1:
        _log.info("images are not served by nodes of several ranks: this one answers to text alone")
        return None
    # imported late: it takes seconds, and most models see nothing
    from baton.engine.models.vision.tower import Tower

    return Tower(basis.folder, facts, dtype, basis.device.torch_device)


def attention_of(basis: Basis, model: ModelShard, shard: Shard) -> AttentionChoice:
    """The attention of this rank's heads. Raises `InvalidSetting`."""
    return attention_for(basis, model.decoder, model.own, shard)


def attention_for(basis: Basis, decoder: RunnableDecoder, layout: KvLayout, shard: Shard) -> AttentionChoice:
    """The attention of a decoder that stores `layout`. Raises `InvalidSetting`."""
    settings, limits = basis.settings, basis.limits
    shape = AttentionShape(
        num_heads=len(shard.share_of(decoder.num_heads, "attention heads")),
        dtype=decoder.dtype,
        layout=layout,
        max_blocks=limits.max_blocks_per_request,
        max_graph_sequences=0 if settings.enforce_eager else limits.max_num_seqs,
        rules=decoder.layer_rules,
    )
    return choose_attention(settings.attention_backend, basis.device, shape, basis.kernels)


def gpu_room(
    basis: Basis,
    model: ModelShard,
    attention: AttentionChoice,
    before: MemoryReading,
    sampler: Sampler | None,
) -> int:
    """For how many blocks this rank's GPU has room. `before`: see `GpuNeeds`; `sampler`: that of the first rank. Raises
    `InvalidSetting` when it is too small."""
    settings, device, workspace_bytes = basis.settings, basis.device, attention.workspace_bytes
    needs = measure_needs(settings, before, model.decoder, sampler, device, basis.limits, workspace_bytes)
    if basis.draft is not None:  # it has a workspace and graphs of its own
        needs = replace(needs, later_bytes=2 * needs.later_bytes)
    return gpu_num_blocks(settings, model.own if settings.divides_pool else model.layout, basis.capacity, needs)


def recorded_pass(basis: Basis, decoder: RunnableDecoder, attention: AttentionBackend) -> ForwardPass | None:
    """The forward pass as recorded calls of kernels, where that is possible. Computes in block 0."""
    settings, limits = basis.settings, basis.limits
    if basis.kernels is None or not isinstance(attention, NativeAttention) or settings.enforce_eager:
        return None
    if not isinstance(decoder, Decoder):
        return None
    max_positions = limits.max_blocks_per_request * settings.block_size
    sizes = StepSizes(limits.max_step_tokens, limits.max_num_seqs, max_positions)
    return record_layers(decoder, attention, basis.kernels, sizes)


def stream_of(basis: Basis, model: ModelShard, shard: Shard) -> StreamShape | None:
    """What stages hand on; None where there is one."""
    if shard.num_stages == 1 or not isinstance(basis.config, ModelConfig):
        return None
    size, dtype = basis.config.hidden_size, model.decoder.dtype
    device = basis.device.torch_device if basis.device.has_own_memory else None
    return StreamShape(basis.limits.max_step_tokens, size, dtype, shard.num_stages, device)


def _load_modelling(
    settings: EngineSettings,
    folder: Path,
    config: ModellingConfig,
    device: Device,
    kernels: Kernels | None,
    on_weights: OnProgress | None,
) -> ModelShard:
    """A model in transformers' modelling code, which is not divided. Raises `ModelLoadError` and `InvalidSetting`."""
    # imported late: models of Baton's own need none of it, and it takes seconds
    from baton.engine.models.modelling import loading

    if settings.quantization != AUTO or settings.activation_dtype != AUTO:
        raise InvalidSetting(
            "--quantization, --activation-dtype: what transformers' modelling code computes is not quantized"
        )
    name, remote_code = choose_dtype(settings.dtype, config), settings.trust_remote_code
    dtype, kv_dtype = TORCH_DTYPES[name], choose_kv_dtype(settings.kv_cache_dtype, name)
    num_bytes = loading.count_weights(folder, config, dtype, remote_code=remote_code)
    _require_room(num_bytes, device, settings)
    decoder: RunnableDecoder
    if settings.load_format == DUMMY:
        decoder = loading.random_modelling_decoder(folder, config, dtype, device, remote_code=remote_code)
    else:
        decoder = loading.load_modelling_decoder(folder, config, dtype, device, on_weights, remote_code=remote_code)
    layout = KvLayout.of_layers(kv_dtype, settings.block_size, decoder.layer_kvs)
    return ModelShard(decoder, layout, layout, choose_ops(device.torch_device, kernels), num_bytes)


def _checked_weights(settings: EngineSettings, folder: Path, shapes: Decoder, device: Device, shard: Shard) -> int:
    """The bytes of the parameters of all ranks, once it is known that the files have them and that the host has room:
    nothing has been allocated. `shapes`: a rank's share of all stages. Raises `ModelLoadError` and `InvalidSetting`."""
    if settings.load_format != DUMMY:
        check_weights(folder, shapes)
    parameters = shapes.parameters()
    held = (each.num_gpu_bytes if device.has_own_memory else each.num_bytes for each in parameters)
    num_bytes = shard.size * sum(held)
    # asked by the driver, before the others have taken theirs
    if shard.rank == 0 and shard.is_last_stage:
        _require_room(num_bytes, device, settings)
    return num_bytes


def _require_room(num_bytes: int, device: Device, settings: EngineSettings) -> None:
    memory = node_memory(settings)
    if device.has_own_memory:
        return
    if num_bytes > memory.free:
        raise InvalidSetting(
            f"the weights need {num_bytes / GIB:.2f} GiB, and {memory} on this machine; try {SMALLER}, or a smaller "
            "model"
        )
    if not (settings.num_blocks or settings.kv_cache_memory_bytes or host_budget(settings, memory, num_bytes)):
        raise InvalidSetting(
            f"--cpu-memory-utilization {settings.cpu_memory_utilization:g} of {memory.total / GIB:.2f} GiB leaves "
            f"nothing for KV beside {num_bytes / GIB:.2f} GiB of weights: raise it, or set --kv-cache-memory-bytes, "
            "which counts whatever the share is"
        )
