"""The fingerprint of a model: its checkpoint's identity in hex, how weights were quantized while they were loaded, and
the dtype of its KV where that is not the model's own.

Owns how the three are one name. Nodes that exchange KV have the same one; a router knows the checkpoint alone.
"""

from __future__ import annotations

from typing import NamedTuple

_SEPARATOR, _KV = "+", "+kv-"


class _Parts(NamedTuple):
    checkpoint: str
    quantization: str
    kv_dtype: str


def with_quantization(checkpoint: str, quantization: str, kv_dtype: str = "") -> str:
    """The fingerprint of a model. `quantization`: "" for none; `kv_dtype`: "" for the model's own."""
    weights = f"{checkpoint}{_SEPARATOR}{quantization}" if quantization else checkpoint
    return f"{weights}{_KV}{kv_dtype}" if kv_dtype else weights


def checkpoint_of(fingerprint: str) -> str:
    """The fingerprint without what is behind the checkpoint's identity."""
    return fingerprint.partition(_SEPARATOR)[0]


def difference(ours: str, theirs: str, node_id: str) -> str:
    """Why two fingerprints that differ do not fit, in one line."""
    here, there = _parts(ours), _parts(theirs)
    if here.checkpoint != there.checkpoint:
        return f"model differs: fingerprint {ours} here, {theirs} at {node_id}"
    if here.quantization != there.quantization:
        found = (parts.quantization or "none" for parts in (here, there))
        return f"quantization differs: {next(found)} here, {next(found)} at {node_id} (see --quantization)"
    found = (parts.kv_dtype or "the model's dtype" for parts in (here, there))
    return f"KV cache differs: {next(found)} here, {next(found)} at {node_id} (see --kv-cache-dtype)"


def _parts(fingerprint: str) -> _Parts:
    weights, _, kv_dtype = fingerprint.partition(_KV)
    checkpoint, _, quantization = weights.partition(_SEPARATOR)
    return _Parts(checkpoint, quantization, kv_dtype)
