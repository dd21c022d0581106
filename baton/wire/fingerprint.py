"""The fingerprint of a model: its checkpoint's identity in hex, how weights were quantized while they were loaded, to
what activations are rounded, the dtype of its KV where that is not the model's own, and the draft whose KV lies beside
that.

Owns how these are one name. Nodes that exchange KV have the same one; a router knows the checkpoint alone.
"""

from __future__ import annotations

from typing import NamedTuple

_SEPARATOR, _ACTIVATIONS, _KV, _DRAFT = "+", "+x-", "+kv-", "+draft-"


class _Parts(NamedTuple):
    checkpoint: str
    quantization: str
    activations: str
    kv_dtype: str
    draft: str


def with_quantization(
    checkpoint: str, quantization: str, kv_dtype: str = "", draft: str = "", activations: str = ""
) -> str:
    """The fingerprint of a model. `quantization`: "" for none; `kv_dtype`: "" for the model's own; `draft`: the
    identity of what computes drafts, "" for nothing with KV; `activations`: to what they are rounded, "" for
    none.
    """
    weights = f"{checkpoint}{_SEPARATOR}{quantization}" if quantization else checkpoint
    if activations:
        weights += f"{_ACTIVATIONS}{activations}"
    stored = f"{weights}{_KV}{kv_dtype}" if kv_dtype else weights
    return f"{stored}{_DRAFT}{draft}" if draft else stored


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
    if here.activations != there.activations:
        found = (parts.activations or "not rounded" for parts in (here, there))
        return f"activations differ: {next(found)} here, {next(found)} at {node_id} (see --activation-dtype)"
    if here.draft != there.draft:
        found = (parts.draft or "none" for parts in (here, there))
        return f"draft model differs: {next(found)} here, {next(found)} at {node_id} (see --speculative-config)"
    found = (parts.kv_dtype or "the model's dtype" for parts in (here, there))
    return f"KV cache differs: {next(found)} here, {next(found)} at {node_id} (see --kv-cache-dtype)"


def _parts(fingerprint: str) -> _Parts:
    stored, _, draft = fingerprint.partition(_DRAFT)
    weights, _, kv_dtype = stored.partition(_KV)
    weights, _, activations = weights.partition(_ACTIVATIONS)
    checkpoint, _, quantization = weights.partition(_SEPARATOR)
    return _Parts(checkpoint, quantization, activations, kv_dtype, draft)
