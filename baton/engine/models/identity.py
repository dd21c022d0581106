"""The identity of a model: where its checkpoint lies, what clients call it, and the fingerprint that nodes compare.

Imports no torch: the router asks the same questions as the nodes.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from baton.engine.models.architecture_facts import architecture_facts
from baton.engine.models.checkpoint import resolve_checkpoint
from baton.engine.models.config import ModelConfig
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.models.weight_files import weights_digest


def find_checkpoint(model: str, *, weights: bool = True) -> Path:
    """The checkpoint folder of the `model` setting; empty means the demo model. Raises `ModelLoadError`."""
    return resolve_checkpoint(model, weights) if model else checkpoint_path()


def model_name(model: str, served_model_name: str) -> str:
    """The name clients use: as set, else as the model was given, else the demo model's."""
    return served_model_name or model.rstrip("/") or DEMO_MODEL_NAME


def model_fingerprint(folder: Path, config: ModelConfig | ModellingConfig) -> str:
    """128-bit hex identity of architecture and weights: equal on all nodes that may share KV."""
    return _fingerprint(config, weights_digest(folder))


def dummy_fingerprint(config: ModelConfig | ModellingConfig, kind: str) -> str:
    """A string in the place of a checkpoint's fingerprint: equal where random weights of the same `kind` are."""
    return _fingerprint(config, f"random weights {kind}")


def _fingerprint(config: ModelConfig | ModellingConfig, weights: str) -> str:
    if isinstance(config, ModelConfig):
        facts = json.dumps(architecture_facts(config), sort_keys=True)
    else:
        # what they make of a token may differ in the order of elements
        facts = f"transformers {config.digest}"
    return blake2b(f"{facts}|{weights}".encode(), digest_size=16).hexdigest()
