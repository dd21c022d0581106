"""Chooses how the weights of a model are quantized: as its checkpoint says, or as `--quantization` asks for.

Invariant: nothing is computed in another precision than one of the two says.
"""

from __future__ import annotations

import logging
from pathlib import Path

from baton.engine.models.config import ModelConfig
from baton.engine.models.quantization.base import Quantization
from baton.engine.models.quantization.parts import QuantizedParts
from baton.engine.models.quantization.published import Published, is_code
from baton.engine.models.quantization.while_loading import AUTO, quantization_while_loading
from baton.engine.models.quantization_settings import GGUF
from baton.engine.models.weight_files import read_header, weight_files
from baton.engine.native.library import Kernels
from baton.wire.errors import InvalidSetting, ModelLoadError

_log = logging.getLogger(__name__)


def choose_quantization(
    setting: str, config: ModelConfig, folder: Path, kernels: Kernels | None = None
) -> Quantization:
    """`kernels`: of a CPU, where the model's weights lie there. Raises `InvalidSetting` for a setting that does not fit
    the checkpoint, and `ModelLoadError`."""
    if config.quantization is None:  # experts in MXFP4 stay as they are, and what is plain beside them may change
        return quantization_while_loading(setting, kernels)
    if setting != AUTO:
        raise InvalidSetting(
            f"--quantization {setting}: the checkpoint is quantized already ({config.quantization.method}); "
            "leave the flag out"
        )
    _require_supported(config)
    entries = {name: entry for file in weight_files(folder) for name, entry in read_header(file).items()}
    if config.quantization.method == GGUF:
        return QuantizedParts(entries)
    if not any(is_code(name, entry.dtype) for name, entry in entries.items()):
        raise ModelLoadError(
            f"{folder}: quantization_config says {config.quantization.method}, and no weight is stored so; "
            "without it the checkpoint is served as it is"
        )
    if config.quantization.has_activations:
        _log.info(
            "the checkpoint is made for activations of 8 bits (%s): here they keep the model's dtype",
            config.quantization.method,
        )
    if config.quantization.has_kv_scales:
        _log.info(
            "the checkpoint has scales for KV in 8 bits, which are not needed; KV has the dtype of the model, or with "
            "--kv-cache-dtype fp8 a scale for each token and head"
        )
    return Published(config.quantization, entries)


def _require_supported(config: ModelConfig) -> None:
    if config.experts is not None and config.experts.is_clamped:
        raise ModelLoadError(f"config.json: quantization_config: {config.architecture} is known plain or in mxfp4 only")
