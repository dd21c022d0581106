"""The folder of an adapter as PEFT publishes it: what is read of its config, and what is refused by name.

Owns the fields of `adapter_config.json` that this package applies. A field that would change what the adapter computes
and is not applied is an error, never left out. Imports no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.wire.errors import ModelLoadError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
_CHANGES_MORE = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Fields that make more of an adapter than a product of low rank for each of its modules."""
_OWN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
"""How an adapter may have begun. With other beginnings, PEFT changes the base's weights too."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`rank` of every product, and `scale` by which each is multiplied."""

    rank: int
    scale: float


def read_config(folder: Path) -> AdapterConfig:
    """What `adapter_config.json` in `folder` says. Raises `ModelLoadError`."""
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: an adapter's config cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    _require_plain(path, fields)
    rank, alpha = _number(path, fields, "r"), _number(path, fields, "lora_alpha")
    if rank not in range(1, MAX_RANK + 1):
        raise ModelLoadError(f"{path}: r is {rank:g}, and ranks from 1 to {MAX_RANK} are supported")
    return AdapterConfig(int(rank), alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank)


def read_weights(folder: Path) -> bytes:
    """All of `adapter_model.safetensors` in `folder`. Raises `ModelLoadError`."""
    path = folder / WEIGHTS_FILE
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is not there: adapters are loaded from safetensors only") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error


def _require_plain(path: Path, fields: dict[str, Any]) -> None:
    """Raise `ModelLoadError` for whatever is not a plain LoRA adapter."""
    if fields.get("peft_type") != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {fields.get('peft_type')!r:.50}, and only 'LORA' is supported")
    if fields.get("bias", "none") != "none":
        raise ModelLoadError(f"{path}: bias is {fields['bias']!r:.50}, and adapters with biases are not supported")
    for name in _CHANGES_MORE:
        if fields.get(name):
            raise ModelLoadError(f"{path}: {name} is {fields[name]!r:.50}, which is not supported")
    begun = fields.get("init_lora_weights")
    if begun not in _OWN_BEGINNINGS:
        raise ModelLoadError(
            f"{path}: init_lora_weights is {begun!r:.50}, which changes the base's weights too; PEFT converts such an "
            "adapter when it is saved with path_initial_model_for_weight_conversion"
        )


def _number(path: Path, fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"{path}: {name} is {value!r:.50}, which is not a number")
    return value
