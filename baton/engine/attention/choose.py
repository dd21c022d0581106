"""Chooses the attention backend of a model on a device.

Owns the setting `--attention-backend`, its refusals and its one log line. A backend's memory is known before the KV
pool is sized: a choice is made of shapes alone, and built when the KV pool is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch

from baton.device.base import Device, DeviceFailed
from baton.device.cuda_context import compute_facts
from baton.engine.attention.base import AttentionBackend, LayerRule, SequenceShare, attention_staging_bytes
from baton.engine.attention.flashinfer import FlashInferAttention, FlashInferCalls, load_flashinfer
from baton.engine.attention.flashinfer_limits import float_workspace_bytes, int_workspace_bytes, unsupported_reason
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.native.library import Kernels
from baton.runtime import plugins
from baton.wire.errors import InvalidSetting
from baton.wire.layout import DTYPE_BYTES, LATENT, KvLayout

_RULES = "caps of scores, sinks, or states"
AUTO, FLASHINFER, NATIVE, TORCH = "auto", "flashinfer", "native", "torch"
_FLAG = "--attention-backend"
_OWN = (AUTO, FLASHINFER, NATIVE, TORCH)
_TRIED_BLOCK_SIZE = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The facts that decide which backend works.

    `dtype`: of queries; `max_blocks`: of one sequence; `rules`: of each layer, empty for the default.
    `max_graph_sequences`: of the largest step that is recorded, 0 where none is.
    """

    num_heads: int
    dtype: torch.dtype
    layout: KvLayout
    max_blocks: int
    max_graph_sequences: int
    rules: tuple[LayerRule, ...] = ()

    @property
    def has_own_rules(self) -> bool:
        """Whether some layer attends by a rule that only Baton's own backends compute, or keeps a state."""
        return self.layout.has_states or not all(rule.is_plain for rule in self.rules)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The facts about a GPU that decide which kernels run on it. `num_processors` counts its multiprocessors."""

    compute_capability: tuple[int, int]
    num_processors: int


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend that can be built. `workspace_bytes`: device memory it takes beside the KV pool when it is."""

    name: str
    workspace_bytes: int
    build: Callable[[PagedKv], AttentionBackend]


ChooseAttention: TypeAlias = Callable[[Device, AttentionShape], AttentionChoice]
"""What a name of the group `baton.attention_backends` stands for. Raises `InvalidSetting` for a shape that the backend
does not compute: of a scale that `rules` name, of latents, of KV with scales, of heads or types that it has no kernel
for."""


def gpu_of(device: torch.device) -> Gpu:
    """The facts of a CUDA device."""
    return Gpu(*compute_facts(device))


@torch.inference_mode()
def try_out(choice: AttentionChoice, shape: AttentionShape, device: Device) -> None:
    """Compute a small step with a prompt and a decode. Packages that load may still lack a kernel for a shape, or the
    tools to compile one. Raises whatever that raises."""
    shares = [SequenceShare(0, 1, (0,)), SequenceShare(0, 2, (1,))]
    layout, where = replace(shape.layout, block_size=_TRIED_BLOCK_SIZE), device.torch_device
    block_elements = layout.block_bytes // DTYPE_BYTES[layout.dtype]
    backend = choice.build(PagedKv(layout, torch.zeros(2, block_elements, dtype=shape.dtype, device=where)))
    staging = device.staging(attention_staging_bytes(max_tokens=3, max_sequences=2, max_blocks=1))
    staging.begin()
    backend.plan(shares, staging)
    staging.upload()
    # one layer of each group: they have kernels of their own
    for group in layout.groups:
        q = torch.zeros(3, shape.num_heads, group.kv.head_dim, dtype=shape.dtype, device=where)
        backend.run(group.layers[0], q, q[:, : group.kv.num_kv_heads], q[:, : group.kv.num_kv_heads])
    device.synchronize()


TryOut: TypeAlias = Callable[[AttentionChoice, AttentionShape, Device], None]


def choose_attention(
    setting: str,
    device: Device,
    shape: AttentionShape,
    kernels: Kernels | None = None,
    *,
    load: Callable[[], FlashInferCalls] = load_flashinfer,
    look: Callable[[torch.device], Gpu] = gpu_of,
    attempt: TryOut = try_out,
) -> AttentionChoice:
    """`auto`: flashinfer on a GPU where it works, `kernels` on a CPU where there are some, else torch; on a GPU one log
    line says why.

    `setting`: auto, flashinfer, native, torch, or the name of a package's backend. `look` and `load` find the GPU's
    facts and flashinfer, `attempt` tries a backend out, which may compile kernels for minutes. Raises `InvalidSetting`
    for a backend where it does not work, and for an unknown name.
    """
    plugin = None if setting in _OWN else plugins.load(plugins.ATTENTION_BACKENDS, _FLAG, setting, _OWN)
    if setting == NATIVE and kernels is None:
        raise InvalidSetting(f"--attention-backend {NATIVE} needs Baton's CPU kernels (see --cpu-kernels)")
    if kernels is not None and setting in (AUTO, NATIVE):
        return AttentionChoice(
            NATIVE, 0, lambda pool: NativeAttention(kernels, pool, shape.num_heads, shape.rules, shape.dtype)
        )
    if shape.has_own_rules:
        if setting not in (AUTO, TORCH):
            raise InvalidSetting(f"--attention-backend {setting} has no {_RULES}, which this model needs")
        _log.info("attention: plain torch, because of the model's %s", _RULES)
        return _torch_choice(shape)
    if plugin is not None:
        return _plugged_choice(plugin, device, shape, attempt)
    if setting == TORCH or (setting == AUTO and device.torch_device.type != "cuda"):
        return _torch_choice(shape)
    found = _find_flashinfer(device, shape, load, look, attempt)
    if isinstance(found, AttentionChoice):
        _log.info("attention: flashinfer")
        return found
    if setting == FLASHINFER:
        raise InvalidSetting(f"--attention-backend flashinfer cannot be used: {found}")
    _log.warning("attention: plain torch, which is slow on a GPU, instead of flashinfer: %s", found)
    return _torch_choice(shape)


def _plugged_choice(plugin: plugins.Plugin, device: Device, shape: AttentionShape, attempt: TryOut) -> AttentionChoice:
    """What a package has for this shape, once it has computed a step."""
    choice = cast(AttentionChoice, plugin.opened(AttentionChoice, plugin.value, device, shape))

    def build(pool: PagedKv) -> AttentionBackend:
        return cast(AttentionBackend, plugin.opened(AttentionBackend, choice.build, pool))

    checked = replace(choice, build=build)
    plugin.opened(object, attempt, checked, shape, device)
    _log.info("attention: %s", choice.name)
    return checked


def _find_flashinfer(
    device: Device,
    shape: AttentionShape,
    load: Callable[[], FlashInferCalls],
    look: Callable[[torch.device], Gpu],
    attempt: TryOut,
) -> AttentionChoice | str:
    """The choice of flashinfer, or why there is none."""
    if device.torch_device.type != "cuda":
        return f"it needs a CUDA device, not {device.torch_device}"
    if any(rule.scale is not None for rule in shape.rules):
        return "the model's attention has a scale of its own"
    if shape.layout.has_scales:
        return f"KV in {shape.layout.dtype} has a scale for each token and head, and it knows one for all"
    kvs = [group.kv for group in shape.layout.groups]
    if any(kv.kind == LATENT for kv in kvs):
        return "the model attends to latents"
    gpu = look(device.torch_device)
    for kv in kvs:
        reason = unsupported_reason(shape.num_heads, kv.num_kv_heads, kv.head_dim, shape.dtype, gpu.compute_capability)
        if reason is not None:
            return reason
    try:
        calls = load()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed (pip install 'baton-serve[gpu]')"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"the installed package does not load: {type(error).__name__}: {error!s:.200}"
    num_bytes = max(
        float_workspace_bytes(
            shape.num_heads, kv.num_kv_heads, kv.head_dim, gpu.num_processors, shape.max_graph_sequences
        )
        for kv in kvs
    )

    def build(pool: PagedKv) -> FlashInferAttention:
        # zeros: what flashinfer asks of a workspace before its first use
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=pool.blocks.device)
        return FlashInferAttention(
            calls,
            pool,
            num_heads=shape.num_heads,
            workspace=workspace,
            max_blocks_per_sequence=shape.max_blocks,
        )

    choice = AttentionChoice(FLASHINFER, num_bytes + int_workspace_bytes(len(kvs)), build)
    try:
        attempt(choice, shape, device)
    except (torch.OutOfMemoryError, torch.AcceleratorError, DeviceFailed):
        raise
    except Exception as error:  # compiling, loading and starting a kernel fail in many ways
        _log.info("a first step with flashinfer failed", exc_info=error)
        return f"its kernels cannot be built or run here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return choice


def _torch_choice(shape: AttentionShape) -> AttentionChoice:
    return AttentionChoice(TORCH, 0, lambda pool: TorchAttention(pool, shape.rules))
