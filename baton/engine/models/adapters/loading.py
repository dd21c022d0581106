"""Loads published adapters into a decoder, and names each by its content.

Owns the names of an adapter's tensors, and the digest. Everything is checked before anything is added: each tensor
has a place, its other half, and its shape.

Invariant: each problem is a `ModelLoadError` with the names of the tensors in it. The digest is of the bytes that were
loaded, not of what the file may be later.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from baton.engine.models.adapters.low_rank import AdaptedMatrix, Adapters, LowRank
from baton.engine.models.adapters.published import WEIGHTS_FILE, read_config, read_weights
from baton.engine.models.weight_files import listed
from baton.wire.errors import ModelLoadError
from baton.wire.prompt import ADAPTER_BYTES

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def load_adapter(folder: Path, adapters: Adapters, dtype: torch.dtype, device: torch.device) -> bytes:
    """Add the adapter in `folder`, in `dtype` on `device`. Its digest: that of what it changes, and of nothing else.
    Raises `ModelLoadError`."""
    config, content = read_config(folder), read_weights(folder)
    digest = blake2b(content, digest_size=ADAPTER_BYTES, salt=struct.pack("<d", config.scale)).digest()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ModelLoadError(f"{folder / WEIGHTS_FILE}: cannot be read: {error}") from error
    changes = {}
    for name in _modules(tensors, adapters, folder):
        a, b = tensors[f"{_PREFIX}{name}{_A}"], tensors[f"{_PREFIX}{name}{_B}"]
        _require_fitting(name, a, b, config.rank, adapters.matrices[name], folder)
        scaled = b.to(torch.float32) * config.scale
        changes[name] = LowRank(a.to(device, dtype), scaled.to(device, dtype))
    adapters.add(digest, changes)
    return digest


def _modules(tensors: dict[str, Tensor], adapters: Adapters, folder: Path) -> list[str]:
    """The matrices that the tensors change. Raises `ModelLoadError` for tensors that cannot be applied."""
    path = folder / WEIGHTS_FILE
    modules = sorted({name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B) for name in tensors})
    known = {f"{_PREFIX}{module}{half}" for module in modules for half in (_A, _B)}
    if unknown := sorted(tensors.keys() - known):
        raise ModelLoadError(f"{path}: tensors that are no part of a LoRA adapter: {listed(unknown)}")
    if missing := sorted(known - tensors.keys()):
        raise ModelLoadError(f"{path} lacks {listed(missing)}")
    if strange := [module for module in modules if module not in adapters.matrices]:
        raise ModelLoadError(f"{path}: this model takes no adapters in {listed(strange)}")
    if not modules:
        raise ModelLoadError(f"{path} has no tensors")
    return modules


def _require_fitting(name: str, a: Tensor, b: Tensor, rank: int, matrix: AdaptedMatrix, folder: Path) -> None:
    """Raise `ModelLoadError` where the halves cannot change the matrix, or hold anything but numbers."""
    path = folder / WEIGHTS_FILE
    for half, found, expected in ((_A, a, [rank, matrix.num_in]), (_B, b, [matrix.num_out, rank])):
        if list(found.shape) != expected:
            raise ModelLoadError(f"{path}: {name}{half} has shape {list(found.shape)}, and {expected} fits here")
        if not found.is_floating_point():
            raise ModelLoadError(f"{path}: {name}{half} has dtype {str(found.dtype).removeprefix('torch.')}")
        if not found.to(torch.float32).isfinite().all():
            raise ModelLoadError(f"{path}: there are NaN or infinite numbers in {name}{half}")
