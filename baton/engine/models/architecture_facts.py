"""What a fingerprint says of a model beside its weights. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from baton.engine.models.config import ModelConfig

_NOT_COMPUTED = ("dtype", "eos_token_ids", "names", "has_short_context", "quantization", "other_parts")


def architecture_facts(config: ModelConfig) -> dict[str, int | float | str | bool | None]:
    """The fields of `config` that change what a forward pass computes, flat and in a fixed order, for a fingerprint.

    Left out are the checkpoint's dtype (the dtype in use is the node's own choice), the bos and eos ids (no tensor
    depends on them) and the names of tensors. `has_short_context` is left out as well: it is a node's own choice too,
    and part of the layout of its KV.
    """
    shape = asdict(config)
    for not_computed in _NOT_COMPUTED:
        del shape[not_computed]
    windows = shape.pop("windows")
    facts = dict(_flat(shape))
    facts["windows"] = ",".join("all" if window is None else str(window) for window in windows)
    return dict(sorted(facts.items()))


def _flat(nested: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in nested.items():
        full = f"{prefix}_{name.removeprefix(f'{prefix}_')}" if prefix else name
        if isinstance(value, dict):
            found += _flat(value, full)
        else:
            found.append((full, ",".join(map(str, value)) if isinstance(value, tuple) else value))
    return found
