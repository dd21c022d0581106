"""Where the packaged demo checkpoint lies. Knows paths only: importing it costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO_MODEL_NAME: Final = "baton-demo"


def checkpoint_path() -> Path:
    """Return the folder of the packaged checkpoint (config.json, model.safetensors, tokenizer.json, ...)."""
    return Path(__file__).resolve().parent / "checkpoint"
