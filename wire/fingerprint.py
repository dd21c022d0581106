"""The fingerprint of a model: its checkpoint's identity in hex, and how weights were quantized while they were loaded.

Owns how the two are one name. Nodes that exchange KV have the same one; a router knows the checkpoint alone.
"""

from __future__ import annotations

_SEPARATOR = "+"


def with_quantization(checkpoint: str, quantization: str) -> str:
    """The fingerprint of a model. `quantization`: "" for none."""
    return f"{checkpoint}{_SEPARATOR}{quantization}" if quantization else checkpoint


def checkpoint_of(fingerprint: str) -> str:
    """The fingerprint without quantization."""
    return fingerprint.partition(_SEPARATOR)[0]


def difference(ours: str, theirs: str, node_id: str) -> str:
    """Why two fingerprints that differ do not fit, in one line."""
    if checkpoint_of(ours) != checkpoint_of(theirs):
        return f"model differs: fingerprint {ours} here, {theirs} at {node_id}"
    found = (fingerprint.partition(_SEPARATOR)[2] or "none" for fingerprint in (ours, theirs))
    return f"quantization differs: {next(found)} here, {next(found)} at {node_id} (see --quantization)"
